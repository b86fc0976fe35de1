package reference

import (
	"fmt"
	"strings"
	"time"
)

// Limit is one of the four limits of a policy.
type Limit string

// The limits, in the order in which violations are reported.
const (
	Agents        Limit = "agents"
	RunningAgents Limit = "running agents"
	Tokens        Limit = "tokens"
	Evals         Limit = "evals"
)

// Policy is the limits of a group. A nil limit is unlimited, 0 always denies. The zero
// Policy stands for the default one.
type Policy struct {
	Window           time.Duration
	MaxAgents        *int64
	MaxRunningAgents *int64
	MaxTokens        *int64
	MaxEvals         *int64
}

// Rule is a group and its limits.
type Rule struct {
	Identity Identity
	Policy   Policy
}

// Usage is what a group uses with the caller admitted. What no limit of the policy
// asks for is 0.
type Usage struct {
	Agents, RunningAgents, Tokens, Evals, ReservedTokens int64
}

// Quota is a limit and what counts towards it.
type Quota struct {
	Limit     Limit
	Max, Used int64

	// Requested is what the caller asks for on top: the tokens that a turn reserves.
	Requested int64
}

// violated reports whether the limit denies.
func (q Quota) violated() bool {
	if q.Max == 0 {
		return true
	}

	if q.Limit == Agents || q.Limit == RunningAgents {
		return q.Used > q.Max
	}

	if q.Requested > 0 {
		return q.Requested > q.Max-q.Used // the sum may be beyond what can be counted
	}

	return q.Used >= q.Max
}

func (p Policy) limits() []Quota {
	var limits []Quota

	for _, limit := range []struct {
		limit   Limit
		maximum *int64
	}{
		{Agents, p.MaxAgents},
		{RunningAgents, p.MaxRunningAgents},
		{Tokens, p.MaxTokens},
		{Evals, p.MaxEvals},
	} {
		if limit.maximum != nil {
			limits = append(limits, Quota{Limit: limit.limit, Max: *limit.maximum})
		}
	}

	return limits
}

func (p Policy) valid() bool {
	for _, limit := range p.limits() {
		if limit.Max < 0 {
			return false
		}
	}

	return p.Window > 0
}

// String lists the window and the limits that are set.
func (p Policy) String() string {
	text := []string{p.Window.String()}
	for _, limit := range p.limits() {
		text = append(text, fmt.Sprintf("%s<=%d", limit.Limit, limit.Max))
	}

	return strings.Join(text, " ")
}

// String writes the identity and the policy.
func (r Rule) String() string { return fmt.Sprintf("%s %s", r.Identity, r.Policy) }
