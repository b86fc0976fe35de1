package reference

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Outcome is what an operation came to.
type Outcome string

// The outcomes. All but Admitted and Done leave the state as it is.
const (
	Admitted     Outcome = "admitted"
	Denied       Outcome = "denied"
	Invalid      Outcome = "invalid"       // rules that cannot be enforced
	Done         Outcome = "done"          // anything but a verdict
	Recorded     Outcome = "recorded"      // a usage entry that was there already
	NotFound     Outcome = "not found"     // no such agent
	AgentRunning Outcome = "agent running" // its slot belongs to a live turn, or its run cannot be resumed
	RunEnded     Outcome = "run ended"     // a run cannot begin after its end
	LeaseLost    Outcome = "lease lost"    // the run does not hold its row
)

// Result is what an operation reports.
type Result struct {
	Outcome Outcome

	// Rules are those of a call that was admitted or denied.
	Rules []Measured

	// Index is the rule that denied, the first one that was violated.
	Index int
}

// Operation is something that happens to the state.
type Operation interface {
	fmt.Stringer
	apply(state State) (State, Result)
}

// Step returns the state after the operation. s itself stays as it is.
func (s State) Step(operation Operation) (State, Result) {
	next, result := operation.apply(s)
	next.race = Race{}

	return next, result
}

// Enforce is an admission or a denial.
type Enforce struct {
	Agent string
	Rules []Rule
}

// Append records one usage entry. An At after now is now.
type Append struct {
	Agent string
	Entry Entry
}

// Release gives an unowned slot back.
type Release struct{ Agent string }

// Idle is a Save with only the status. It also gives up a run whose lease is over, and
// makes a row where there is none.
type Idle struct{ Agent string }

// Delete is the soft deletion.
type Delete struct{ Agent string }

// Prune removes usage from before the given time, and rows that were deleted before it,
// unless they have changed or started since or a lease of theirs is not over.
type Prune struct{ Before time.Duration }

// Advance lets time pass.
type Advance struct{ By time.Duration }

// Turn writes the columns of a turn, as one that begins, ends or crashes leaves them.
type Turn struct {
	Agent    string
	Running  bool
	Run      string
	Lease    Moment
	Reserved int64
}

func (o Enforce) apply(state State) (State, Result) { return state.enforce(o) }

func (o Append) apply(state State) (State, Result) {
	return state.update(o.Agent, func(agent Agent) (Agent, Outcome) { return agent.append(o.Entry, state.now) })
}

func (a Agent) append(entry Entry, now time.Duration) (Agent, Outcome) {
	if slices.ContainsFunc(a.Usage, func(recorded Entry) bool { return recorded.ID == entry.ID }) {
		return a, Recorded
	}

	entry.At = min(entry.At, now)
	a.Usage = append(slices.Clip(a.Usage), entry)
	a.Updated = now

	return a, Done
}

func (o Release) apply(state State) (State, Result) {
	return state.update(o.Agent, func(agent Agent) (Agent, Outcome) {
		switch {
		case agent.live(state.now):
			return agent, AgentRunning
		case agent.Running && agent.Run == "":
			agent.Running, agent.Lease, agent.Updated = false, Moment{}, state.now
		}

		return agent, Done
	})
}

func (o Idle) apply(state State) (State, Result) {
	agent, _ := state.Agent(o.Agent)
	if agent.live(state.now) {
		return state, Result{Outcome: AgentRunning}
	}

	if agent.Running {
		agent.Run = ""
	}

	agent.Running, agent.Lease, agent.Reserved = false, Moment{}, 0
	agent.Updated = state.now

	return state.with(agent), Result{Outcome: Done}
}

func (o Delete) apply(state State) (State, Result) {
	return state.update(o.Agent, func(agent Agent) (Agent, Outcome) {
		if agent.Deleted.Known {
			return agent, NotFound
		}

		agent.Deleted = At(state.now)
		agent.Updated = state.now

		return agent, Done
	})
}

func (o Prune) apply(state State) (State, Result) {
	kept := make([]Agent, 0, len(state.agents))

	for _, agent := range state.agents {
		deleted := agent.Deleted.Known && agent.Deleted.At < o.Before
		recent := agent.Updated >= o.Before || agent.Started.Known && agent.Started.At >= o.Before

		if deleted && !recent && !(agent.Running && agent.Lease.after(state.now)) {
			continue
		}

		agent.Usage = slices.DeleteFunc(slices.Clone(agent.Usage), func(entry Entry) bool { return entry.At < o.Before })
		kept = append(kept, agent)
	}

	state.agents = kept

	return state, Result{Outcome: Done}
}

func (o Advance) apply(state State) (State, Result) {
	state.now += o.By

	return state, Result{Outcome: Done}
}

func (o Turn) apply(state State) (State, Result) {
	return state.update(o.Agent, func(agent Agent) (Agent, Outcome) {
		agent.Running, agent.Run, agent.Lease, agent.Reserved = o.Running, o.Run, o.Lease, o.Reserved

		return agent, Done
	})
}

func (s State) update(id string, change func(Agent) (Agent, Outcome)) (State, Result) {
	agent, found := s.Agent(id)
	if !found {
		return s, Result{Outcome: NotFound}
	}

	changed, outcome := change(agent)
	if outcome != Done {
		return s, Result{Outcome: outcome}
	}

	return s.with(changed), Result{Outcome: Done}
}

// String implements fmt.Stringer.
func (o Enforce) String() string {
	rules := make([]string, len(o.Rules))
	for i, rule := range o.Rules {
		rules[i] = rule.String()
	}

	return fmt.Sprintf("enforce %s under [%s]", o.Agent, strings.Join(rules, "; "))
}

// String implements fmt.Stringer.
func (o Append) String() string {
	return fmt.Sprintf("append to %s %q of %s: %d tokens, %d evals", o.Agent, o.Entry.ID, o.Entry.At, o.Entry.Tokens, o.Entry.Evals)
}

// String implements fmt.Stringer.
func (o Release) String() string { return "release " + o.Agent }

// String implements fmt.Stringer.
func (o Idle) String() string { return "save " + o.Agent + " as idle" }

// String implements fmt.Stringer.
func (o Delete) String() string { return "delete " + o.Agent }

// String implements fmt.Stringer.
func (o Prune) String() string { return fmt.Sprintf("prune what is before %s", o.Before) }

// String implements fmt.Stringer.
func (o Advance) String() string { return fmt.Sprintf("%s pass", o.By) }

// String implements fmt.Stringer.
func (o Turn) String() string {
	status := "idle"
	if o.Running {
		status = "running"
	}

	return fmt.Sprintf("turn %q of %s is %s until %s with %d reserved", o.Run, o.Agent, status, o.Lease, o.Reserved)
}
