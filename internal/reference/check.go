package reference

import (
	"slices"
	"time"
)

// Report is the answer of Check.
type Report struct {
	Allowed bool

	// RetryAfter is the shortest wait after which the call is admitted if nothing else
	// happens. Zero: at once, or never.
	RetryAfter time.Duration

	// Rules are the limits of each rule.
	Rules [][]Standing
}

// Standing is how a limit stands without the call: what is used, and how long it takes
// until nothing of that counts any more.
type Standing struct {
	Quota

	ResetAfter time.Duration
}

// Check is what is to be said of a call that is not made. It reports false where the
// rules are invalid.
func (s State) Check(call Enforce) (Report, bool) {
	rules, _, valid := s.prepare(call.Rules)
	if !valid || len(rules) == 0 {
		return Report{}, false
	}

	_, result := s.Step(call)
	report := Report{Allowed: result.Outcome == Admitted}

	if !report.Allowed {
		report.RetryAfter = s.retryAfter(call, call.Agent, rules)
	}

	caller, _ := s.Agent(call.Agent)

	for _, rule := range rules {
		var standings []Standing

		for _, quota := range rule.Policy.limits() {
			standing := Standing{Quota: quota}

			for _, item := range s.items(caller, rule, quota.Limit) {
				if item.until > s.now && item.amount > 0 {
					standing.Used = add(standing.Used, item.amount)
					standing.ResetAfter = max(standing.ResetAfter, item.until-s.now)
				}
			}

			standings = append(standings, standing)
		}

		report.Rules = append(report.Rules, standings)
	}

	return report, true
}

// RetryAfter is the shortest wait after which the turn begins if nothing else happens.
// Zero: at once, or never.
func (s State) RetryAfter(turn Begin) time.Duration {
	rules, _, _ := s.prepare(turn.Rules)

	return s.retryAfter(turn, turn.Agent, turn.counted(rules))
}

// retryAfter tries every moment at which something of the groups ceases to count.
func (s State) retryAfter(call Operation, agent string, rules []Rule) time.Duration {
	caller, _ := s.Agent(agent)

	var moments []time.Duration

	for _, rule := range rules {
		for _, quota := range rule.Policy.limits() {
			for _, item := range s.items(caller, rule, quota.Limit) {
				moments = append(moments, item.until)
			}
		}
	}

	slices.Sort(moments)

	for _, moment := range moments {
		if moment <= s.now {
			continue
		}

		later, _ := s.Step(Advance{By: moment - s.now})
		if _, result := later.Step(call); result.Outcome == Admitted {
			return moment - s.now
		}
	}

	return 0
}

// item is an amount that counts until a moment.
type item struct {
	amount int64
	until  time.Duration
}

func (s State) items(caller Agent, rule Rule, limit Limit) []item {
	var items []item

	for _, agent := range append(s.others(caller, rule.Identity), caller) {
		switch limit {
		case Agents:
			if agent.Started.Known {
				items = append(items, item{1, agent.Started.At + rule.Policy.Window})
			}
		case RunningAgents:
			if agent.holdsSlot(s.now) {
				items = append(items, item{1, agent.Lease.At})
			}
		case Tokens:
			for _, entry := range agent.Usage {
				items = append(items, item{entry.Tokens, entry.At + rule.Policy.Window})
			}

			if agent.holdsSlot(s.now) && agent.ID != caller.ID {
				items = append(items, item{agent.Reserved, agent.Lease.At})
			}
		case Evals:
			for _, entry := range agent.Usage {
				items = append(items, item{entry.Evals, entry.At + rule.Policy.Window})
			}
		}
	}

	return items
}
