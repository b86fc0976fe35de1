package reference

import (
	"fmt"
	"slices"
	"strings"
)

// Begin is an admission that begins a turn of the agent, or takes over an interrupted
// one.
type Begin struct {
	Agent string

	// Run is the same in every retry, and no other turn's.
	Run string

	// Resumes is the interrupted run that is taken over. Empty: the turn is a new one.
	Resumes string

	// Rules may be none.
	Rules []Rule

	// Reserve is how many tokens are held back.
	Reserve int64

	// Parent is written unless it is empty.
	Parent string
}

// Renew makes the lease of the run whole again.
type Renew struct{ Agent, Run string }

// Checkpoint writes the conversation.
type Checkpoint struct{ Agent, Run, Conversation string }

// End gives the slot and the reservation back, and writes the conversation unless it is
// empty.
type End struct{ Agent, Run, Conversation string }

// Record appends a usage entry and lowers what the run holds reserved.
type Record struct {
	Agent, Run string
	Entry      Entry
}

func (o Begin) apply(state State) (State, Result) {
	rules, merged, valid := state.prepare(o.Rules)
	if !valid || o.Reserve < 0 {
		return state, Result{Outcome: Invalid}
	}

	rules = o.counted(rules)
	caller, _ := state.Agent(o.Agent)
	isOwn := caller.Run == o.Run

	switch {
	case isOwn && caller.live(state.now):
		measured := state.measure(caller, rules, o.Reserve)
		caller.Lease = At(state.now + state.settings.Lease)

		return state.with(caller), Result{Outcome: Admitted, Rules: measured}
	case isOwn && !caller.Running:
		return state, Result{Outcome: RunEnded}
	case caller.live(state.now), o.Resumes != "" && !caller.interrupted(o.Run, o.Resumes):
		return state, Result{Outcome: AgentRunning}
	}

	next, result := state.decide(caller, rules, o.Reserve)
	if result.Outcome == Denied {
		return state, result
	}

	if len(rules) > 0 {
		caller = caller.joining(merged, state.now)
	}

	caller.Running, caller.Run, caller.Reserved = true, o.Run, o.Reserve
	caller.Lease = At(state.now + state.settings.Lease)
	caller.Deleted = Moment{}
	caller.Updated = state.now

	if o.Parent != "" {
		caller.Parent = o.Parent
	}

	return next.with(caller), result
}

// interrupted reports whether one of the runs was, given that the agent is not live.
func (a Agent) interrupted(runs ...string) bool {
	return a.Running && slices.Contains(runs, a.Run) && !a.Deleted.Known
}

// counted are the rules with the limits that are checked.
func (o Begin) counted(rules []Rule) []Rule {
	if o.Resumes == "" {
		return rules
	}

	counted := slices.Clone(rules)

	for i := range counted {
		policy := &counted[i].Policy
		policy.MaxAgents, policy.MaxEvals = nil, nil

		if o.Reserve == 0 {
			policy.MaxTokens = nil
		}
	}

	return counted
}

// holds reports whether the run may still put its row in order.
func (a Agent) holds(run string) bool { return a.Running && a.Run == run && a.Lease.Known }

func (o Renew) apply(state State) (State, Result) {
	agent, _ := state.Agent(o.Agent)
	if !agent.holds(o.Run) || !agent.Lease.after(state.now) {
		return state, Result{Outcome: LeaseLost}
	}

	agent.Lease = At(state.now + state.settings.Lease)

	return state.with(agent), Result{Outcome: Done}
}

func (o Checkpoint) apply(state State) (State, Result) {
	agent, _ := state.Agent(o.Agent)
	if !agent.holds(o.Run) {
		return state, Result{Outcome: LeaseLost}
	}

	agent.Conversation = o.Conversation
	agent.Updated = state.now

	return state.with(agent), Result{Outcome: Done}
}

func (o End) apply(state State) (State, Result) {
	agent, _ := state.Agent(o.Agent)

	switch {
	case agent.holds(o.Run):
	case agent.Run == o.Run && !agent.Running:
		return state, Result{Outcome: Done}
	default:
		return state, Result{Outcome: LeaseLost}
	}

	agent.Running, agent.Lease, agent.Reserved = false, Moment{}, 0
	agent.Updated = state.now

	if o.Conversation != "" {
		agent.Conversation = o.Conversation
	}

	return state.with(agent), Result{Outcome: Done}
}

func (o Record) apply(state State) (State, Result) {
	return state.update(o.Agent, func(agent Agent) (Agent, Outcome) {
		agent, outcome := agent.append(o.Entry, state.now)
		if agent.Run == o.Run {
			agent.Reserved = max(0, agent.Reserved-o.Entry.Tokens)
		}

		return agent, outcome
	})
}

// String implements fmt.Stringer.
func (o Begin) String() string {
	var text strings.Builder

	_, _ = fmt.Fprintf(&text, "begin run %q of %s", o.Run, o.Agent)

	if o.Resumes != "" {
		_, _ = fmt.Fprintf(&text, " in place of %q", o.Resumes)
	}

	if o.Parent != "" {
		_, _ = fmt.Fprintf(&text, " for %s", o.Parent)
	}

	_, _ = fmt.Fprintf(&text, " reserving %d under %v", o.Reserve, o.Rules)

	return text.String()
}

// String implements fmt.Stringer.
func (o Renew) String() string { return fmt.Sprintf("renew run %q of %s", o.Run, o.Agent) }

// String implements fmt.Stringer.
func (o Checkpoint) String() string {
	return fmt.Sprintf("checkpoint run %q of %s in %q", o.Run, o.Agent, o.Conversation)
}

// String implements fmt.Stringer.
func (o End) String() string {
	return fmt.Sprintf("end run %q of %s in %q", o.Run, o.Agent, o.Conversation)
}

// String implements fmt.Stringer.
func (o Record) String() string {
	return fmt.Sprintf("record for run %q of %s %q: %d tokens, %d evals", o.Run, o.Agent, o.Entry.ID, o.Entry.Tokens, o.Entry.Evals)
}
