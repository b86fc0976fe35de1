package limiter

import "time"

// Usage is what a group has used, as far as its policy asks for it: what no limit
// asks for is not measured and stays 0.
type Usage struct {
	// Agents are those that started within the window, with the caller once it is
	// admitted. On a denial this is a lower bound: counting stops past the limit.
	Agents int64

	// RunningAgents are those that hold a slot, with the caller once it is admitted.
	RunningAgents int64

	// Tokens and Evals are the sums that were recorded within the window.
	Tokens int64
	Evals  int64

	// ReservedTokens are those that the turns of other agents hold reserved.
	ReservedTokens int64
}

// set fills in the figure that belongs to the limit. Reserved tokens are in the tokens.
func (u *Usage) set(limit Limit, used int64) {
	switch limit {
	case LimitAgents:
		u.Agents = used
	case LimitRunningAgents:
		u.RunningAgents = used
	case LimitTokens:
		u.Tokens = used
	case LimitEvals:
		u.Evals = used
	}
}

// Limit is one of the four limits of a [Policy]. Its text is for people.
type Limit string

// The limits, named after the fields of Policy.
const (
	LimitAgents        Limit = "agents"
	LimitRunningAgents Limit = "running agents"
	LimitTokens        Limit = "tokens"
	LimitEvals         Limit = "evals"
)

// Quota is one limit of a rule and what is used of it.
type Quota struct {
	// Limit says which limit it is.
	Limit Limit

	// Max is the limit itself.
	Max int64

	// Used is what counts towards it. For agents and running agents the caller is
	// included; for tokens, so is what others hold reserved. It may be above Max, for
	// example after a limit was lowered.
	Used int64

	// Requested is what the caller asks for on top, the tokens that a turn reserves. They
	// are granted as a whole or not at all. Otherwise 0.
	Requested int64

	// ResetAfter is how long it takes until nothing of what is used now counts any more,
	// if nothing is added. Only [Check] fills it in. Zero: nothing is used.
	ResetAfter time.Duration
}

// Remaining is what is left, at least 0.
func (q Quota) Remaining() int64 { return max(0, q.Max-q.Used) }

// exceeded reports whether the quota denies an admission. Agents and running agents
// include the caller, so they may reach the limit; tokens and evals are spent after
// the admission, so there must be some left, and as much as is asked for.
func (q Quota) exceeded() bool {
	switch q.Limit {
	case LimitAgents, LimitRunningAgents:
		return q.Used > q.Max || q.Max == 0
	default:
		return q.Used >= q.Max || q.Requested > q.Max-q.Used
	}
}

// RuleState is a rule and what was measured of it.
type RuleState struct {
	// Rule is the rule as it was enforced, with the default policy filled in.
	Rule Rule

	// Usage is what the group uses.
	Usage Usage

	// Quotas are the limits that the policy sets, in the order agents, running
	// agents, tokens, evals.
	Quotas []Quota
}

// Decision is a verdict that admits.
type Decision struct {
	// AgentID is the agent that was admitted.
	AgentID string

	// Rules are the rules of the call in its order, with what is left of each.
	Rules []RuleState
}
