package limiter_test

import (
	"slices"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/legion-gorm/legion/internal/reference"
)

// raceCheckTime bounds the search for a serial history.
const raceCheckTime = 30 * time.Second

// A raceEvent is a step and what it came to.
type raceEvent struct {
	step    raceStep
	outcome raceOutcome

	// beside are the events that overlap this one.
	beside []*raceEvent
}

func (e *raceEvent) String() string { return e.step.String() + ": " + e.outcome.String() }

// changes reports whether the step may have left anything behind.
func (e *raceEvent) changes() bool {
	return !e.step.Undo && (e.outcome.Outcome == reference.Admitted || e.outcome.Outcome == reference.Done)
}

// from returns the states in which the event may leave this one; none if it cannot come
// now.
func (e *raceEvent) from(state reference.State) (possible []reference.State) {
	for _, state := range raceWaned(state) {
		if e.outcome.Outcome == raceHeld {
			if agent, _ := state.Agent(e.step.Agent); agent.Run == e.step.Run && agent.Lease.Known && agent.Lease.At > 0 {
				possible = append(possible, state)
			}

			continue
		}

		for _, race := range e.races(state) {
			next, result := state.Racing(race).Step(e.step.operation())

			switch {
			case !e.isResult(result):
			case e.changes():
				possible = append(possible, next)
			default:
				possible = append(possible, state)
			}
		}

		if e.isStaleDenial(state) || e.isStaleLoss() {
			possible = append(possible, state)
		}
	}

	return possible
}

func (e *raceEvent) isResult(result reference.Result) bool {
	return result.Outcome == e.outcome.Outcome && (result.Outcome != reference.Denied || result.Index == e.outcome.Denied)
}

// isStaleDenial reports whether the event is the denial of a turn whose agent seemed to
// have crashed, while its own run was being renewed in a transaction that had not
// committed. An admission waits for the row and looks again. A denial does not, so it may
// come in place of the refusal: the turn begins in neither case.
func (e *raceEvent) isStaleDenial(state reference.State) bool {
	isRenewed := func(other *raceEvent) bool { return other.step.Kind == raceRenew && other.step.Agent == e.step.Agent }
	if e.step.Kind != raceBegin || e.outcome.Outcome != reference.Denied || !slices.ContainsFunc(e.beside, isRenewed) {
		return false
	}

	state = raceEnded(state, e.step.Agent)

	return slices.ContainsFunc(e.races(state), func(race reference.Race) bool {
		_, result := state.Racing(race).Step(e.step.operation())

		return e.isResult(result)
	})
}

// isStaleLoss reports whether the event is a renewal that may have found the lease over
// while a retried Begin of its run, which had not committed, made it whole: it errs on the
// safe side. The plugin renews no run before its Begin has returned.
func (e *raceEvent) isStaleLoss() bool {
	return e.step.Kind == raceRenew && e.outcome.Outcome == reference.LeaseLost && slices.ContainsFunc(e.beside, func(other *raceEvent) bool {
		return other.step.Kind == raceBegin && other.step.Agent == e.step.Agent && other.step.Run == e.step.Run
	})
}

// races are what the others may do to a verdict: lock rows that it would take, and end
// what made it take some.
func (e *raceEvent) races(state reference.State) []reference.Race {
	races := []reference.Race{{}}

	if len(e.step.Rules) == 0 || len(e.beside) == 0 {
		return races
	}

	for _, agent := range state.Agents() {
		if agent.Run == "" || agent.Lease != raceOver || !slices.ContainsFunc(e.beside, func(other *raceEvent) bool { return other.mayLock(agent) }) {
			continue
		}

		for _, race := range slices.Clone(races) {
			races = append(races, reference.Race{Locked: append(slices.Clone(race.Locked), agent.ID)})
		}
	}

	if slices.ContainsFunc(state.Agents(), func(agent reference.Agent) bool { return agent.Lease == raceOver }) {
		for _, race := range slices.Clone(races) {
			race.Early = true
			races = append(races, race)
		}
	}

	return races
}

// mayLock reports whether the step may lock the agent's row: because it is about the
// agent, or because it may take the agent's slot.
func (e *raceEvent) mayLock(agent reference.Agent) bool {
	if e.step.Agent == agent.ID {
		return true
	}

	return slices.ContainsFunc(e.step.Rules, func(rule raceRule) bool {
		isCounting := rule.Running != concurrentUnlimited || rule.Tokens != concurrentUnlimited

		return isCounting && raceInGroup(agent, rule.Fields)
	})
}

// raceWaned are the states after time has passed: any of the leases that are about to be
// over may be.
func raceWaned(state reference.State) []reference.State {
	waned := []reference.State{state}

	for _, agent := range state.Agents() {
		if agent.Lease != raceWaning {
			continue
		}

		for _, state := range slices.Clone(waned) {
			waned = append(waned, raceEnded(state, agent.ID))
		}
	}

	return waned
}

// raceEnded is the state in which the agent's lease is over.
func raceEnded(state reference.State, agentID string) reference.State {
	agent, _ := state.Agent(agentID)
	turn := reference.Turn{Agent: agent.ID, Running: agent.Running, Run: agent.Run, Lease: raceOver, Reserved: agent.Reserved}
	ended, _ := state.Step(turn)

	return ended
}

// raceFound is the end of a history: the rows that are found in the database.
type raceFound []reference.Agent

func (f raceFound) String() string { return modelLines(f) }

func (f raceFound) from(state reference.State) (possible []reference.State) {
	for _, state := range raceWaned(state) {
		if modelLines(state.Agents()) == f.String() {
			possible = append(possible, state)
		}
	}

	return possible
}

// heldTwice reports whether more than one turn of the group has been told that its lease
// is whole. The group's limit is 1 in every rule of the round, and no turn ends.
func (f raceFound) heldTwice(group string, events []*raceEvent) bool {
	held := 0

	for _, agent := range f {
		isRenewed := func(event *raceEvent) bool {
			return event.step.Kind == raceRenew && event.changes() && event.step.Agent == agent.ID && event.step.Run == agent.Run
		}

		if raceInGroup(agent, group) && agent.Running && (agent.Lease == raceWhole || slices.ContainsFunc(events, isRenewed)) {
			held++
		}
	}

	return held > 1
}

func raceInGroup(agent reference.Agent, group string) bool {
	return agent.Identity.Contains(modelIdentity(concurrentIdentity(group, false)))
}

// raceOverlaps fills in which events overlap.
func raceOverlaps(events []*raceEvent) {
	for _, event := range events {
		event.beside = slices.DeleteFunc(slices.Clone(events), func(other *raceEvent) bool {
			return other == event || other.outcome.Return < event.outcome.Call || event.outcome.Return < other.outcome.Call
		})
	}
}

// raceSerial reports whether there is a serial history of the events in which each comes
// to its outcome, at a moment between its call and its return, from the first state to
// what is found.
func raceSerial(start reference.State, events []*raceEvent, found raceFound) bool {
	history := make([]porcupine.Operation, 0, len(events)+1)

	var last int64

	raceOverlaps(events)

	for client, event := range events {
		operation := porcupine.Operation{ClientId: client, Input: event, Call: event.outcome.Call, Return: event.outcome.Return}
		if !event.changes() {
			operation.Return = event.outcome.Verdict
		}

		history = append(history, operation)
		last = max(last, event.outcome.Return)
	}

	history = append(history, porcupine.Operation{ClientId: len(events), Input: found, Call: last + 1, Return: last + 2})

	model := porcupine.NondeterministicModel{
		Init: func() []any { return []any{start} },
		Step: func(state, input, _ any) (next []any) {
			from, isState := state.(reference.State)
			event, isEvent := input.(interface {
				from(state reference.State) []reference.State
			})

			if !isState || !isEvent {
				return nil
			}

			for _, state := range event.from(from) {
				next = append(next, state)
			}

			return next
		},
		Equal: func(a, b any) bool {
			one, isState := a.(reference.State)
			other, isOther := b.(reference.State)

			return isState && isOther && one.Equal(other)
		},
	}

	return porcupine.CheckOperationsTimeout(model.ToModel(), history, raceCheckTime) == porcupine.Ok
}
