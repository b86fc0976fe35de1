package limiter_test

import (
	"cmp"
	"fmt"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm/clause"
	"pgregory.net/rapid"

	"github.com/legion-gorm/legion/internal/lease"
	"github.com/legion-gorm/legion/internal/reference"
	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// modelRun is a run by its ID. Empty: the one in the agent's row, whichever that is.
type modelRun string

// of is the ID, in the state that the operation meets.
func (r modelRun) of(state reference.State, agentID string) string {
	agent, _ := state.Agent(agentID)

	return cmp.Or(string(r), agent.Run, "none")
}

type (
	// modelBegin begins a turn, or resumes one.
	modelBegin struct {
		Agent   string
		Run     modelRun
		Resume  bool
		Resumes modelRun
		Rules   []limiter.Rule
		Reserve int64
		Parent  string

		// Retried calls are made twice.
		Retried bool
	}

	modelRenew struct {
		Agent string
		Run   modelRun
	}

	modelCheckpoint struct {
		Agent        string
		Run          modelRun
		Conversation string
	}

	modelEnd struct {
		modelCheckpoint

		// Retried calls are made twice.
		Retried bool
	}

	modelRecord struct {
		modelAppend

		Run modelRun

		// Retried calls are made twice.
		Retried bool
	}
)

// A modelTurnOperation is one of a turn.
type modelTurnOperation interface {
	modelOperation
	modelWriter
}

func (o modelBegin) isRetried() bool { return o.Retried }
func (o modelEnd) isRetried() bool   { return o.Retried }

func (o modelRecord) isRetried() bool { return o.Retried }

func (o modelBegin) expected(state reference.State) reference.Operation { return o.call(state) }

func (o modelBegin) call(state reference.State) reference.Begin {
	begin := reference.Begin{
		Agent: o.Agent, Run: o.Run.of(state, o.Agent), Rules: modelRules(o.Rules), Reserve: o.Reserve, Parent: o.Parent,
	}

	if o.Resume {
		begin.Resumes = o.Resumes.of(state, o.Agent)
	}

	return begin
}

func (o modelRenew) expected(state reference.State) reference.Operation {
	return reference.Renew{Agent: o.Agent, Run: o.Run.of(state, o.Agent)}
}

func (o modelCheckpoint) expected(state reference.State) reference.Operation {
	return reference.Checkpoint{Agent: o.Agent, Run: o.Run.of(state, o.Agent), Conversation: o.Conversation}
}

func (o modelEnd) expected(state reference.State) reference.Operation {
	return reference.End{Agent: o.Agent, Run: o.Run.of(state, o.Agent), Conversation: o.Conversation}
}

func (o modelRecord) expected(state reference.State) reference.Operation {
	entry := reference.Entry{ID: o.ID, At: state.Now() - o.Ago, Tokens: o.Tokens, Evals: o.Evals}

	return reference.Record{Agent: o.Agent, Run: o.Run.of(state, o.Agent), Entry: entry}
}

// GoString shows how the values were written, which the model's identity does not.
func (o modelBegin) GoString() string {
	begin := o.call(reference.State{})
	begin.Rules = nil

	return fmt.Sprintf("%s, twice: %t%s", begin, o.Retried, modelDescribe(o.Rules))
}

// GoString is in the model's terms.
func (o modelRenew) GoString() string { return o.expected(reference.State{}).String() }

// GoString is in the model's terms.
func (o modelCheckpoint) GoString() string { return o.expected(reference.State{}).String() }

// GoString is in the model's terms.
func (o modelEnd) GoString() string {
	return fmt.Sprintf("%s, twice: %t", o.expected(reference.State{}), o.Retried)
}

// GoString is in the model's terms.
func (o modelRecord) GoString() string {
	return fmt.Sprintf("%s, twice: %t", o.expected(reference.State{}), o.Retried)
}

func (o modelBegin) untouched(before, after reference.State, result reference.Result) []string {
	return modelUntouched(o.Agent, before, after, result)
}

func (o modelRenew) untouched(before, after reference.State, result reference.Result) []string {
	return modelUntouched(o.Agent, before, after, result)
}

func (o modelCheckpoint) untouched(before, after reference.State, result reference.Result) []string {
	return modelUntouched(o.Agent, before, after, result)
}

func (o modelRecord) untouched(before, after reference.State, result reference.Result) []string {
	return modelUntouched(o.Agent, before, after, result)
}

// untouched has the row of an End that is called again.
func (o modelEnd) untouched(before, after reference.State, _ reference.Result) []string {
	return modelUntouched(o.Agent, before, after, reference.Result{})
}

// modelUntouched are the rows that must not have been written: all that are as they were,
// but for the agent's own, whose lease may just have been made whole.
func modelUntouched(agentID string, before, after reference.State, result reference.Result) (untouched []string) {
	written := result.Outcome == reference.Admitted || result.Outcome == reference.Done

	for _, agent := range before.Agents() {
		if left, _ := after.Agent(agent.ID); agent.Equal(left) && !(written && agent.ID == agentID) {
			untouched = append(untouched, agent.ID)
		}
	}

	return untouched
}

// perform begins the turn and compares what the limiter says with the model's result.
func (o modelBegin) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	call := o.call(m.state)
	begin := run.Begin{ID: call.Run, Resumes: call.Resumes, ParentID: o.Parent, Reserve: o.Reserve}

	before := time.Now()
	decision, leased, err := limiter.AdmitTurn(m.db, limiter.Admission{AgentID: o.Agent, Rules: o.Rules}, begin)

	switch expected.Outcome {
	case reference.Admitted:
		require.NoError(t, err)
		require.WithinRange(t, leased, before, time.Now())
		modelRequireDecision(t, expected, o.Agent, o.Rules, decision)

		return
	case reference.Denied:
		modelRequireDenial(t, expected, o.Agent, m.state.RetryAfter(call), err)
	default:
		modelRequireOutcome(t, expected.Outcome, err)
	}

	require.Nil(t, decision)
}

func (o modelRenew) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	statement := lease.RenewStatement("legion_agents", modelLease)
	runID := o.Run.of(m.state, o.Agent)

	var (
		agentID, ofRun string
		renewed, held  bool
	)

	// Not through GORM, which would expand the arrays.
	rows := m.db.Statement.ConnPool.QueryRowContext(t.Context(), statement, []string{o.Agent}, []string{runID})
	require.NoError(t, rows.Scan(&agentID, &ofRun, &renewed, &held))
	require.Equal(t, []string{o.Agent, runID}, []string{agentID, ofRun})
	require.Equal(t, expected.Outcome == reference.Done, renewed)
	require.Equal(t, expected.Outcome == reference.Done, held)
}

func (o modelCheckpoint) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	err := m.runOf(o.Run, o.Agent).Checkpoint(m.db.WithContext(t.Context()), modelAgents, []byte(o.Conversation))
	modelRequireOutcome(t, expected.Outcome, err)
}

func (o modelEnd) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	var conversation []byte
	if o.Conversation != "" {
		conversation = []byte(o.Conversation)
	}

	err := m.runOf(o.Run, o.Agent).End(m.db.WithContext(t.Context()), modelAgents, conversation)
	modelRequireOutcome(t, expected.Outcome, err)
}

func (o modelRecord) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	appended, err := m.store.AppendTurnUsage(t.Context(), m.runOf(o.Run, o.Agent), o.entry(m.rows.Now))
	modelRequireOutcome(t, expected.Outcome, err)
	require.Equal(t, expected.Outcome == reference.Done, appended)
}

var modelAgents = clause.Table{Name: "legion_agents"}

func (m *modelMachine) runOf(id modelRun, agentID string) run.Run {
	return run.Run{AgentID: agentID, ID: id.of(m.state, agentID)}
}

// entry is what is appended, with a time that is counted back from the database's clock.
func (o modelAppend) entry(now time.Time) models.Usage {
	entry := models.Usage{ID: o.ID, TotalTokens: o.Tokens, Evals: o.Evals}
	if o.Ago != 0 {
		entry.At = now.Add(-o.Ago)
	}

	return entry
}

// modelTurnEvents must all happen in a run.
var modelTurnEvents = []string{
	"begun", "begun over a crash", "begun again", "begun without rules", "begun under a parent", "an unowned slot adopted",
	"turn denied", "reservation denied", "begun when the agent was live", "begun after its end", "turn revoked",
	"resumed", "resumed again", "resume denied", "resumed what was not interrupted",
	"renewed", "renewal lost", "checkpoint", "checkpoint lost", "ended", "ended late", "end lost", "ended again",
	"reservation lowered", "recorded without the row", "recorded twice",
}

// noteTurn counts what the operation was an example of.
func (m *modelMachine) noteTurn(operation modelTurnOperation, next reference.State, result reference.Result) {
	is := func(event string, happened bool) {
		if happened {
			m.seen[event]++
		}
	}
	done, lost := result.Outcome == reference.Done, result.Outcome == reference.LeaseLost

	switch operation := operation.(type) {
	case modelBegin:
		m.noteBegin(operation, next, result, is)
	case modelRenew:
		is("renewed", done)
		is("renewal lost", lost)
	case modelCheckpoint:
		is("checkpoint", done)
		is("checkpoint lost", lost)
	case modelEnd:
		agent, _ := m.state.Agent(operation.Agent)
		is("ended", done && agent.Running)
		is("ended late", done && agent.Running && agent.Lease.At <= m.state.Now())
		is("ended again", done && !agent.Running)
		is("end lost", lost)
	case modelRecord:
		before, _ := m.state.Agent(operation.Agent)
		after, _ := next.Agent(operation.Agent)
		is("reservation lowered", before.Reserved > after.Reserved)
		is("recorded without the row", done && before.Reserved > 0 && operation.Tokens > 0 && before.Reserved == after.Reserved)
		is("recorded twice", result.Outcome == reference.Recorded)
	}
}

func (m *modelMachine) noteBegin(o modelBegin, next reference.State, result reference.Result, is func(event string, happened bool)) {
	call := o.call(m.state)
	caller, known := m.state.Agent(o.Agent)
	own := caller.Run == call.Run && caller.Running
	live := caller.Running && caller.Run != "" && caller.Lease.Known && caller.Lease.At > m.state.Now()

	switch result.Outcome {
	case reference.Admitted:
		is("begun", !o.Resume && !caller.Running)
		is("begun over a crash", !o.Resume && caller.Running && caller.Run != "" && !own)
		is("begun again", !o.Resume && own && live)
		is("begun without rules", len(o.Rules) == 0 && known && caller.Identity != nil)
		is("begun under a parent", o.Parent != "")
		is("an unowned slot adopted", caller.Running && caller.Run == "" && caller.Lease.Known)
		is("resumed", o.Resume && !own)
		is("resumed again", o.Resume && own)

		for _, agent := range m.state.Agents() {
			after, _ := next.Agent(agent.ID)
			is("turn revoked", agent.ID != o.Agent && agent.Lease.Known && !after.Lease.Known)
		}
	case reference.Denied:
		is("turn denied", !o.Resume)
		is("resume denied", o.Resume)

		for _, violation := range result.Rules[result.Index].Violations() {
			is("reservation denied", violation.Used < violation.Max && violation.Requested > 0)
		}
	case reference.AgentRunning:
		is("begun when the agent was live", !o.Resume)
		is("resumed what was not interrupted", o.Resume)
	case reference.RunEnded:
		is("begun after its end", true)
	default:
	}
}

// modelDrawRun draws the row's own run as often as not.
func modelDrawRun(t *rapid.T, label string) modelRun {
	return rapid.SampledFrom([]modelRun{"", "one", "", "two"}).Draw(t, label)
}

func modelDrawBegin(t *rapid.T) modelOperation { return modelDrawTurnBegin(t) }

func modelDrawTurnBegin(t *rapid.T) modelBegin {
	return modelBegin{
		Agent:   modelDrawAgent(t),
		Run:     rapid.SampledFrom([]modelRun{"one", "two", "three", "four", "five", ""}).Draw(t, "run"),
		Rules:   modelDrawRules(t, rapid.SampledFrom([]int{1, 1, 2, 3, 0}).Draw(t, "rules")),
		Reserve: rapid.SampledFrom([]int64{0, 1, 3, 0, 2, 6, modelHuge}).Draw(t, "reserve"),
		Parent:  rapid.SampledFrom([]string{"", "", "", "a", "b"}).Draw(t, "parent"),
		Retried: modelDrawRetried(t),
	}
}

func modelDrawRetried(t *rapid.T) bool {
	return rapid.SampledFrom([]bool{false, false, false, true}).Draw(t, "retried")
}

func modelDrawResume(t *rapid.T) modelOperation {
	resume := modelDrawTurnBegin(t)
	resume.Resume, resume.Resumes, resume.Parent = true, rapid.SampledFrom([]modelRun{"", "", "", "one"}).Draw(t, "resumes"), ""

	return resume
}

func modelDrawRenew(t *rapid.T) modelOperation {
	return modelRenew{Agent: modelDrawAgent(t), Run: modelDrawRun(t, "run")}
}

func modelDrawCheckpoint(t *rapid.T) modelOperation { return modelDrawConversation(t) }

func modelDrawConversation(t *rapid.T) modelCheckpoint {
	return modelCheckpoint{
		Agent: modelDrawAgent(t), Run: modelDrawRun(t, "run"),
		Conversation: rapid.SampledFrom([]string{"", "step", "step on"}).Draw(t, "conversation"),
	}
}

func modelDrawEnd(t *rapid.T) modelOperation {
	return modelEnd{modelCheckpoint: modelDrawConversation(t), Retried: modelDrawRetried(t)}
}

func modelDrawRecord(t *rapid.T) modelOperation {
	return modelRecord{modelAppend: modelDrawEntry(t), Run: modelDrawRun(t, "run"), Retried: modelDrawRetried(t)}
}
