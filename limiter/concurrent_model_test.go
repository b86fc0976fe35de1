package limiter_test

import (
	"maps"
	"strings"

	"github.com/anishathalye/porcupine"
)

// The model is written from the contract and shares nothing with the limiter: it says
// what the verdicts would be if the calls came one after the other.

// concurrentAgent is what the model knows of an agent.
type concurrentAgent struct {
	fields string
	slot   bool
}

// in reports whether an agent that is recorded under its fields is in the group.
func (a concurrentAgent) in(group string) bool {
	for _, letter := range group {
		if !strings.ContainsRune(a.fields, letter) {
			return false
		}
	}

	return true
}

// A concurrentState is the agents that a serial history has left.
type concurrentState map[string]concurrentAgent

// verdict returns the position of the rule that denies an agent of the call.
func (s concurrentState) verdict(operation *concurrentOperation) int {
	for _, admission := range operation.Admissions {
		if denied := s.denial(admission); denied != concurrentAdmitted {
			return denied
		}

		s = s.with(admission)
	}

	return concurrentAdmitted
}

// denial returns the position of the first rule that denies the agent.
func (s concurrentState) denial(admission concurrentAdmission) int {
	for i, rule := range admission.Rules {
		agents, running := int64(1), int64(1) // the caller

		for name, agent := range s {
			if name != admission.Agent && agent.in(rule.Fields) {
				agents++

				if agent.slot {
					running++
				}
			}
		}

		if exceedsConcurrent(agents, rule.Agents) || exceedsConcurrent(running, rule.Running) {
			return i
		}
	}

	return concurrentAdmitted
}

func exceedsConcurrent(used, limit int64) bool {
	return limit != concurrentUnlimited && (used > limit || limit == 0)
}

// admit is the state after the call was admitted.
func (s concurrentState) admit(operation *concurrentOperation) concurrentState {
	for _, admission := range operation.Admissions {
		s = s.with(admission)
	}

	return s
}

func (s concurrentState) with(admission concurrentAdmission) concurrentState {
	next := maps.Clone(s)
	next[admission.Agent] = concurrentAgent{
		fields: admission.merged(),
		slot:   s[admission.Agent].slot || admission.limitsRunning(),
	}

	return next
}

// denies reports whether the call may be denied by the rule at this position.
//
// Of several agents each is measured after those before it, and before what they use
// for the first time is locked. So the one that is named need not be the first that is
// denied at one moment.
func (s concurrentState) denies(operation *concurrentOperation, position int) bool {
	verdict := s.verdict(operation)

	return verdict == position || len(operation.Admissions) > 1 && verdict != concurrentAdmitted
}

// release is the state after a call of Release, and whether there is such an agent.
func (s concurrentState) release(name string) (concurrentState, bool) {
	agent, found := s[name]
	if !agent.slot {
		return s, found
	}

	next := maps.Clone(s)
	next[name] = concurrentAgent{fields: agent.fields}

	return next, found
}

// A concurrentModel is a moment of a serial history.
//
// A call that checks Everyone holds a lock that only its like wait for. Others may be
// admitted between its count and its commit, without being counted. So it has its place
// in the order of admissions at its count, and stands there until its commit. Meanwhile
// denials and releases go by what is committed.
type concurrentModel struct {
	committed concurrentState
	standing  *concurrentOperation
}

// admissions is the state that an admission must be right in.
func (m concurrentModel) admissions() concurrentState {
	if m.standing == nil {
		return m.committed
	}

	return m.committed.admit(m.standing)
}

func (m concurrentModel) equal(other concurrentModel) bool {
	return m.standing == other.standing && maps.Equal(m.committed, other.committed)
}

// A concurrentStep is one event of a serial history: whether it may come at this
// moment, and what it leaves.
type concurrentStep interface {
	from(m concurrentModel) (possible bool, next concurrentModel)
}

// A concurrentEvent is a call and what it came to. As a step it is the call's verdict,
// and its commit too unless it stands at its count.
type concurrentEvent struct {
	operation concurrentOperation
	outcome   concurrentOutcome
}

func (e *concurrentEvent) String() string { return e.operation.String() + ": " + e.outcome.String() }

// changes reports whether the call may have left anything behind.
func (e *concurrentEvent) changes() bool {
	return e.outcome.Denied == concurrentAdmitted && !e.operation.Undo
}

func (e *concurrentEvent) stands() bool { return e.changes() && e.operation.checksEveryone() }

func (e *concurrentEvent) from(m concurrentModel) (possible bool, next concurrentModel) {
	next = m

	switch operation := &e.operation; {
	case operation.Release != "":
		committed, found := m.committed.release(operation.Release)
		possible = found != e.outcome.NotFound
		next.committed = committed
	case m.standing != nil && operation.admits(m.standing.Admissions[0].Agent):
		return false, m // its lock on the agent makes the other call wait
	case e.outcome.Denied != concurrentAdmitted:
		return m.committed.denies(operation, e.outcome.Denied), m
	default:
		possible = m.admissions().verdict(operation) == concurrentAdmitted
		next.committed = m.committed.admit(operation)
	}

	switch {
	case !e.changes():
		return possible, m
	case e.stands():
		// One at a time has Everyone's lock.
		return possible && m.standing == nil, concurrentModel{committed: m.committed, standing: &e.operation}
	default:
		return possible, next
	}
}

// concurrentCommit is the commit of a call that stands.
type concurrentCommit struct{ event *concurrentEvent }

func (c concurrentCommit) from(m concurrentModel) (possible bool, next concurrentModel) {
	return m.standing == &c.event.operation, concurrentModel{committed: m.committed.admit(&c.event.operation)}
}

// concurrentEnd is the end of a history: what is found in the database.
type concurrentEnd struct{ state concurrentState }

func (e concurrentEnd) from(m concurrentModel) (possible bool, next concurrentModel) {
	return maps.Equal(m.committed, e.state), m
}

// concurrentSerial reports whether there is a serial history of the calls in which
// each comes to its outcome, at a moment between its call and its return, and which
// ends in the given state.
func concurrentSerial(events []*concurrentEvent, end concurrentState) bool {
	history := make([]porcupine.Operation, 0, 2*len(events)+1)

	var last int64

	for client, event := range events {
		verdict := porcupine.Operation{ClientId: client, Input: event, Call: event.outcome.Call, Return: event.outcome.Return}

		if event.stands() || !event.changes() {
			verdict.Return = event.outcome.Verdict
		}

		history = append(history, verdict)

		if event.stands() {
			commit := verdict
			commit.Input, commit.Return = concurrentCommit{event}, event.outcome.Return
			history = append(history, commit)
		}

		last = max(last, event.outcome.Return)
	}

	history = append(history, porcupine.Operation{ClientId: len(events), Input: concurrentEnd{end}, Call: last + 1, Return: last + 2})

	return porcupine.CheckOperations(porcupine.Model{
		Init: func() any { return concurrentModel{committed: concurrentState{}} },
		Step: func(state, input, _ any) (bool, any) {
			model, isModel := state.(concurrentModel)
			step, isStep := input.(concurrentStep)

			if !isModel || !isStep {
				return false, state
			}

			return step.from(model)
		},
		Equal: func(a, b any) bool {
			one, isModel := a.(concurrentModel)
			other, isOther := b.(concurrentModel)

			return isModel && isOther && one.equal(other)
		},
	}, history)
}
