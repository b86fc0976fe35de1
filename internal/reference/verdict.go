package reference

import (
	"math"
	"slices"
	"time"
)

// Measured is a rule of a call with what its group uses.
type Measured struct {
	// Rule has the default policy filled in.
	Rule Rule

	// Usage and Quotas are exact. The limiter's count of agents on a denial may be
	// lower, down to the first that violates.
	Usage  Usage
	Quotas []Quota
}

// Violations are the limits that deny.
func (m Measured) Violations() []Quota {
	var violations []Quota

	for _, quota := range m.Quotas {
		if quota.violated() {
			violations = append(violations, quota)
		}
	}

	return violations
}

// enforce admits the agent and records it, or changes nothing.
func (s State) enforce(call Enforce) (State, Result) {
	rules, merged, valid := s.prepare(call.Rules)
	if !valid || len(rules) == 0 {
		return s, Result{Outcome: Invalid}
	}

	caller, _ := s.Agent(call.Agent)

	next, result := s.decide(caller, rules, 0)
	if result.Outcome == Denied {
		return s, result
	}

	if !caller.Started.Known || caller.Deleted.Known || caller.Identity == nil || !slices.Equal(caller.Identity, merged) {
		caller.Updated = s.now
	}

	caller = caller.joining(merged, s.now)

	if limitsRunning(rules) && !caller.live(s.now) {
		caller.Running, caller.Run, caller.Reserved = true, "", 0
		caller.Lease = At(s.now + s.settings.Lease)
	}

	return next.with(caller), result
}

// decide measures the rules with what the caller reserves, and revokes where that
// decides. The state is the one with the revocations.
func (s State) decide(caller Agent, rules []Rule, reserve int64) (State, Result) {
	measured := s.measure(caller, rules, reserve)

	if s.race.Early || s.expiredDecide(caller, measured) {
		s = s.revoke(caller, rules)
		measured = s.measure(caller, rules, reserve)
	}

	for i, rule := range measured {
		if len(rule.Violations()) > 0 {
			return s, Result{Outcome: Denied, Rules: measured, Index: i}
		}
	}

	return s, Result{Outcome: Admitted, Rules: measured}
}

// joining is the agent in the groups of the merged identity. It starts unless it has.
func (a Agent) joining(merged Identity, now time.Duration) Agent {
	a.Identity = merged
	a.Deleted = Moment{}

	if !a.Started.Known {
		a.Started = At(now)
	}

	return a
}

// prepare fills in the default policy and merges the identities.
func (s State) prepare(given []Rule) (rules []Rule, merged Identity, valid bool) {
	merged = Identity{}

	for _, rule := range given {
		if rule.Policy == (Policy{}) && s.settings.Default != nil {
			rule.Policy = *s.settings.Default
		}

		var agree bool
		if merged, agree = merged.merge(rule.Identity); !agree || rule.Identity == nil || !rule.Policy.valid() {
			return nil, nil, false
		}

		rules = append(rules, rule)
	}

	return rules, merged, true
}

func limitsRunning(rules []Rule) bool {
	return slices.ContainsFunc(rules, func(rule Rule) bool { return rule.Policy.MaxRunningAgents != nil })
}

// measure counts what each rule's group uses with the caller admitted.
func (s State) measure(caller Agent, rules []Rule, reserve int64) []Measured {
	measured := make([]Measured, len(rules))

	for i, rule := range rules {
		usage := s.usage(caller, rule)
		quotas := rule.Policy.limits()

		for n := range quotas {
			quotas[n].Used = map[Limit]int64{
				Agents:        usage.Agents,
				RunningAgents: usage.RunningAgents,
				Tokens:        add(usage.Tokens, usage.ReservedTokens),
				Evals:         usage.Evals,
			}[quotas[n].Limit]

			if quotas[n].Limit == Tokens {
				quotas[n].Requested = reserve
			}
		}

		measured[i] = Measured{Rule: rule, Usage: usage, Quotas: quotas}
	}

	return measured
}

func (s State) usage(caller Agent, rule Rule) Usage {
	var usage Usage

	begin := s.now - rule.Policy.Window

	for _, agent := range append(s.others(caller, rule.Identity), caller) {
		isCaller := agent.ID == caller.ID

		if agent.Started.after(begin) || isCaller && !agent.Started.Known {
			usage.Agents++
		}

		if agent.holdsSlot(s.now) || isCaller {
			usage.RunningAgents++
		}

		if agent.holdsSlot(s.now) && !isCaller {
			usage.ReservedTokens = add(usage.ReservedTokens, agent.Reserved)
		}

		tokens, evals := spent(agent, begin)
		usage.Tokens = add(usage.Tokens, tokens)
		usage.Evals = add(usage.Evals, evals)
	}

	return usage.only(rule.Policy)
}

// others are the rows of the group but the caller's.
func (s State) others(caller Agent, identity Identity) []Agent {
	var others []Agent

	for _, agent := range s.agents {
		if agent.ID != caller.ID && agent.Identity.Contains(identity) {
			others = append(others, agent)
		}
	}

	return others
}

func spent(agent Agent, begin time.Duration) (tokens, evals int64) {
	for _, entry := range agent.Usage {
		if entry.At > begin {
			tokens = add(tokens, entry.Tokens)
			evals = add(evals, entry.Evals)
		}
	}

	return tokens, evals
}

// only leaves out what the policy does not ask for.
func (u Usage) only(policy Policy) Usage {
	if policy.MaxAgents == nil {
		u.Agents = 0
	}

	if policy.MaxRunningAgents == nil {
		u.RunningAgents = 0
	}

	if policy.MaxTokens == nil {
		u.Tokens, u.ReservedTokens = 0, 0
	}

	if policy.MaxEvals == nil {
		u.Evals = 0
	}

	return u
}

// add saturates.
func add(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}

	return a + b
}

// expiredDecide reports whether a violated limit counts a slot or a reservation whose
// lease is over.
func (s State) expiredDecide(caller Agent, measured []Measured) bool {
	for _, rule := range measured {
		var slots, reserved bool

		for _, agent := range s.others(caller, rule.Rule.Identity) {
			slots = slots || agent.expired(s.now)
			reserved = reserved || agent.expired(s.now) && agent.Reserved > 0
		}

		for _, violation := range rule.Violations() {
			if violation.Limit == RunningAgents && slots || violation.Limit == Tokens && reserved {
				return true
			}
		}
	}

	return false
}

// revoke ends the slots, of the groups whose slots or reservations are counted, whose
// lease is over. Run and status stay, so that the turn can be recovered.
func (s State) revoke(caller Agent, rules []Rule) State {
	for _, rule := range rules {
		if rule.Policy.MaxRunningAgents == nil && rule.Policy.MaxTokens == nil {
			continue
		}

		for _, agent := range s.others(caller, rule.Identity) {
			if agent.expired(s.now) && !slices.Contains(s.race.Locked, agent.ID) {
				agent.Lease = Moment{}
				s = s.with(agent)
			}
		}
	}

	return s
}
