package limiter_test

import (
	"errors"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"pgregory.net/rapid"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/reference"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store" //nolint:depguard // it makes the rows that verdicts count
)

const (
	// modelOperations is how many operations a run performs in all.
	modelOperations = 20_000

	// modelDatabases share them, one at a time in each: one decides by statements, the other
	// by the server's function.
	modelDatabases = 2

	// modelStretches is how many times 30 operations a sequence has, on average. With
	// rapid's 100 sequences that is a little more than a database's share.
	modelStretches = 4

	// modelLease is the lease of unowned slots: like all durations of this test a
	// multiple of modelGrain.
	modelLease = 2 * modelGrain
)

// Random sequences of operations are performed in the database and in the reference
// model. After each, the verdict, its figures and all rows must be the same.
//
// LEGION_TEST_COUNT multiplies the number of operations, or LEGION_TEST_OPERATIONS says it. A failure prints its seed and
// the shortest sequence that still fails.
func TestVerdictsFiguresAndRowsAgreeWithTheReferenceModel(t *testing.T) {
	t.Parallel()

	share := modelOperationCount(t) / modelDatabases

	for path, byFunction := range map[string]bool{"statements": false, "the server's function": true} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()

			machine := modelSetup(t, byFunction)
			operations := modelGenerate()

			for machine.performed < share {
				rapid.Check(t, func(t *rapid.T) {
					machine.reset(t)

					for range modelStretches {
						t.Repeat(map[string]func(*rapid.T){
							"operation": func(t *rapid.T) { machine.perform(t, operations.Draw(t, "operation")) },
						})
					}
				})
			}

			t.Log(machine.seen)

			// A test whose calls are all denied, or never revoke, would show little.
			for _, event := range modelEvents {
				require.GreaterOrEqual(t, machine.seen[event], 10, "%s happens too rarely", event)
			}
		})
	}
}

// modelMachine is the database and what should be in it.
type modelMachine struct {
	db    *gorm.DB
	store *store.Store[models.LegionAgent]

	state reference.State

	// registered are the identities of admissions, less those that were pruned, by
	// their text.
	registered map[string]reference.Identity

	// rows are the tables as they were after the last operation.
	rows modelRows

	performed int
	seen      map[string]int
}

func modelOperationCount(t *testing.T) int {
	t.Helper()

	text := os.Getenv("LEGION_TEST_OPERATIONS")
	if text == "" {
		return concurrentCount(t, modelOperations)
	}

	operations, err := strconv.Atoi(text)
	require.NoError(t, err, "LEGION_TEST_OPERATIONS is a whole number")

	return operations
}

func modelSetup(t *testing.T, byFunction bool) *modelMachine {
	t.Helper()

	db := setup(t)
	used := modelPlugin{plugin{
		settings: database.Settings{Lease: modelLease, ServerFunction: byFunction},
		policy:   new(modelDefaultPolicy()),
	}}

	if byFunction {
		useFunction(t, db, used.plugin)
	}

	db.Plugins[used.Name()] = used

	return &modelMachine{db: db, store: store.For[models.LegionAgent](db), seen: make(map[string]int)}
}

// modelPlugin does not log some ten thousand denials.
type modelPlugin struct{ plugin }

func (modelPlugin) LegionObserver() limiter.Observer { return func(limiter.Observation) {} }

func modelDefaultPolicy() limiter.Policy {
	return limiter.Policy{Window: 2 * modelGrain, MaxAgents: limiter.Max(3), MaxTokens: limiter.Max(8)}
}

func (m *modelMachine) reset(t *rapid.T) {
	require.NoError(t, m.db.Exec("TRUNCATE legion_agents, legion_agents_identities").Error)

	m.state = reference.New(reference.Settings{Lease: modelLease, Default: new(modelPolicy(modelDefaultPolicy()))})
	m.registered = make(map[string]reference.Identity)
	m.rows = m.readRows(t)
}

// perform performs the operation once, or twice as for a reply that was lost.
func (m *modelMachine) perform(t *rapid.T, operation modelOperation) {
	m.performOnce(t, operation)

	if call, ok := operation.(interface{ isRetried() bool }); ok && call.isRetried() {
		m.performOnce(t, operation)
	}
}

func (o modelEnforce) isRetried() bool { return o.Retried }

// performOnce performs the operation on both sides and compares them.
func (m *modelMachine) performOnce(t *rapid.T, operation modelOperation) {
	m.performed++

	expected := operation.expected(m.state)
	next, result := m.state.Step(expected)
	operation.perform(t, m, result)

	switch operation := operation.(type) {
	case modelEnforce:
		m.note(operation, next, result)

		if operation.In == modelRolledBack {
			next = m.state
		} else {
			m.register(result)
		}
	case modelTurnOperation:
		m.noteTurn(operation, next, result)
		m.register(result)
	}

	if _, ok := operation.(modelPrune); ok {
		for text, identity := range m.registered {
			if !slices.ContainsFunc(next.Agents(), func(agent reference.Agent) bool { return agent.Identity.Contains(identity) }) {
				delete(m.registered, text)
			}
		}
	}

	before := m.rows
	m.rows = m.readRows(t)

	require.Equal(t, modelLines(next.Agents()), modelLines(m.rows.agents(t, next.Now())), "rows")
	require.Equal(t, modelSorted(m.registered), m.rows.identities(t), "registered identities")

	if operation, ok := operation.(modelWriter); ok {
		for _, agentID := range operation.untouched(m.state, next, result) {
			require.Equal(t, before.version(agentID), m.rows.version(agentID), "%s was written with nothing to change", agentID)
		}
	}

	m.state = next
}

// register notes the identities of an admission.
func (m *modelMachine) register(result reference.Result) {
	if result.Outcome != reference.Admitted {
		return
	}

	for _, rule := range result.Rules {
		m.registered[rule.Rule.Identity.String()] = rule.Rule.Identity
	}
}

// A modelWriter knows which rows it must not have written.
type modelWriter interface {
	untouched(before, after reference.State, result reference.Result) []string
}

// modelEvents must all happen in a run.
var modelEvents = append(modelTurnEvents,
	"admitted", "denied", "invalid", "own transaction", "in a transaction", "rolled back",
	"agents denied", "running agents denied", "tokens denied", "evals denied",
	"several limits of a rule denied", "a later rule denied", "moved", "restored", "revoked", "taken over", "left to its turn",
	"reservation counted", "sum saturated", "nothing to write", "folded",
)

// note counts what the call was an example of.
func (m *modelMachine) note(call modelEnforce, next reference.State, result reference.Result) {
	m.seen[string(result.Outcome)]++
	m.seen[string(call.In)]++

	caller, known := m.state.Agent(call.Agent)
	is := func(event string, happened bool) {
		if happened {
			m.seen[event]++
		}
	}

	for _, rule := range result.Rules {
		is("reservation counted", rule.Usage.ReservedTokens > 0)
		is("sum saturated", rule.Usage.Tokens == modelHuge)
	}

	switch result.Outcome {
	case reference.Denied:
		violations := result.Rules[result.Index].Violations()
		for _, violation := range violations {
			m.seen[string(violation.Limit)+" denied"]++
		}

		is("several limits of a rule denied", len(violations) > 1)
		is("a later rule denied", result.Index > 0)
	case reference.Admitted:
		admitted, _ := next.Agent(call.Agent)

		is("moved", known && caller.Identity != nil && !slices.Equal(caller.Identity, admitted.Identity))
		is("restored", caller.Deleted.Known)
		is("taken over", caller.Run != "" && caller.Running && admitted.Running && admitted.Run == "")
		is("left to its turn", call.limitsRunning() && admitted.Running && admitted.Run != "")
		is("nothing to write", !call.limitsRunning() && m.state.Equal(next))

		for _, agent := range m.state.Agents() {
			after, _ := next.Agent(agent.ID)
			is("revoked", agent.ID != call.Agent && agent.Lease.Known && !after.Lease.Known)
		}
	default:
	}
}

// untouched are the rows that the call must not have written.
func (o modelEnforce) untouched(before, after reference.State, result reference.Result) []string {
	var untouched []string

	for _, agent := range before.Agents() {
		left, _ := after.Agent(agent.ID)
		// An unowned slot is renewed, a turn's is not.
		renewed := result.Outcome == reference.Admitted && agent.ID == o.Agent && o.limitsRunning() && left.Run == ""

		if o.In == modelRolledBack || agent.Equal(left) && !renewed {
			untouched = append(untouched, agent.ID)
		}
	}

	return untouched
}

// perform calls Admit and compares what it says with the model's result.
func (o modelEnforce) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	decision, err := o.admit(t, m.db)

	switch expected.Outcome {
	case reference.Admitted:
		require.NoError(t, err)
		modelRequireDecision(t, expected, o.Agent, o.Rules, decision)
	case reference.Denied:
		require.Nil(t, decision)

		report, _ := m.state.Check(o.call())
		modelRequireDenial(t, expected, o.Agent, report.RetryAfter, err)
	default:
		require.ErrorIs(t, err, limiter.ErrInvalidRule)
		require.Nil(t, decision)
	}
}

func modelRequireDecision(t *rapid.T, expected reference.Result, agentID string, rules []limiter.Rule, decision *limiter.Decision) {
	require.Equal(t, agentID, decision.AgentID)
	require.Len(t, decision.Rules, len(expected.Rules))

	for i, rule := range decision.Rules {
		usage, quotas := reference.Usage(rule.Usage), modelQuotas(rule.Quotas)
		modelCountOn(&usage, quotas, expected.Rules[i].Usage.Agents)

		require.Equal(t, rules[i].Identity, rule.Rule.Identity, "rule %d", i)
		require.Equal(t, expected.Rules[i].Rule.Policy, modelPolicy(rule.Rule.Policy), "rule %d", i)
		require.Equal(t, expected.Rules[i].Usage, usage, "rule %d", i)
		require.Equal(t, expected.Rules[i].Quotas, quotas, "rule %d", i)
	}
}

func modelRequireDenial(t *rapid.T, expected reference.Result, agentID string, retryAfter time.Duration, err error) {
	var exceeded *limiter.ExceededError

	require.ErrorIs(t, err, limiter.ErrExceeded)
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, agentID, exceeded.AgentID)
	require.Equal(t, expected.Index, exceeded.RuleIndex)

	rule := expected.Rules[expected.Index]
	usage, violations := reference.Usage(exceeded.Usage), modelQuotas(exceeded.Violations)
	modelCountOn(&usage, violations, rule.Usage.Agents)

	require.Equal(t, rule.Rule.Policy, modelPolicy(exceeded.Rule.Policy))
	require.Equal(t, rule.Usage, usage)
	require.Equal(t, rule.Violations(), violations)
	require.Equal(t, retryAfter, modelWait(t, exceeded.RetryAfter))
}

// modelCountOn replaces a count of agents that ended early, which it may where it
// exceeds the limit, by the exact one.
func modelCountOn(usage *reference.Usage, violations []reference.Quota, exact int64) {
	for i, violation := range violations {
		if violation.Limit == reference.Agents && violation.Max < usage.Agents && usage.Agents <= exact {
			usage.Agents = exact
			violations[i].Used = exact
		}
	}
}

var errModelRollback = errors.New("the application changes its mind")

// admit calls Admit where the operation says.
func (o modelEnforce) admit(t *rapid.T, db *gorm.DB) (decision *limiter.Decision, err error) {
	if o.In == modelOwnTransaction {
		return limiter.Admit(db, o.Agent, o.Rules...)
	}

	end := db.Transaction(func(tx *gorm.DB) error {
		decision, err = limiter.Admit(tx, o.Agent, o.Rules...)

		// The transaction is usable, whatever came of the call.
		require.NoError(t, tx.Exec("SELECT 1").Error)

		if o.In == modelRolledBack {
			return errModelRollback
		}

		return nil
	})

	if o.In == modelRolledBack {
		require.ErrorIs(t, end, errModelRollback)
	} else {
		require.NoError(t, end)
	}

	return decision, err
}

// perform asks without enforcing, and compares the answer with what would happen.
func (o modelCheck) perform(t *rapid.T, m *modelMachine, _ reference.Result) {
	expected, valid := m.state.Check(o.call())
	report, err := limiter.Check(m.db, o.Agent, o.Rules...)

	if !valid {
		require.ErrorIs(t, err, limiter.ErrInvalidRule)

		return
	}

	require.NoError(t, err)
	require.Equal(t, expected.Allowed, report.Allowed)
	require.Equal(t, expected.RetryAfter, modelWait(t, report.RetryAfter))
	require.Len(t, report.Rules, len(expected.Rules))

	for i, rule := range report.Rules {
		var standings []reference.Standing

		for j, quota := range modelQuotas(rule.Quotas) {
			standings = append(standings, reference.Standing{Quota: quota, ResetAfter: modelWait(t, rule.Quotas[j].ResetAfter)})
		}

		require.Equal(t, expected.Rules[i], standings, "rule %d", i)
	}
}

func (o modelAppend) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	appended, err := m.store.AppendUsage(t.Context(), o.Agent, o.entry(m.rows.Now))
	modelRequireOutcome(t, expected.Outcome, err)
	require.Equal(t, expected.Outcome == reference.Done, appended)
}

func (o modelRelease) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	modelRequireOutcome(t, expected.Outcome, limiter.Release(m.db, o.Agent))
}

func (o modelIdle) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	patch := store.Patch{AgentID: o.Agent, Status: new(models.StatusIdle)}
	modelRequireOutcome(t, expected.Outcome, m.store.Save(t.Context(), patch))
}

func (o modelDelete) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	modelRequireOutcome(t, expected.Outcome, m.store.Delete(t.Context(), o.Agent))
}

func (o modelPrune) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	_, err := m.store.Prune(t.Context(), m.rows.Now.Add(-o.ago()))
	modelRequireOutcome(t, expected.Outcome, err)
}

func (o modelAdvance) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	modelRequireOutcome(t, expected.Outcome, m.shift(o.By))
}

func (o modelTurn) perform(t *rapid.T, m *modelMachine, expected reference.Result) {
	written, err := m.writeTurn(o)
	require.NoError(t, err)
	require.Equal(t, expected.Outcome == reference.Done, written)
}

func modelRequireOutcome(t *rapid.T, expected reference.Outcome, err error) {
	switch expected {
	case reference.NotFound:
		require.ErrorIs(t, err, limiter.ErrNotFound)
	case reference.AgentRunning:
		require.ErrorIs(t, err, limiter.ErrAgentRunning)
	case reference.RunEnded:
		require.ErrorIs(t, err, fault.ErrInvalidTurn)
	case reference.LeaseLost:
		require.ErrorIs(t, err, fault.ErrLeaseLost)
	case reference.Invalid:
		require.ErrorIs(t, err, limiter.ErrInvalidRule)
	default:
		require.NoError(t, err)
	}
}

// The limiter's types in the model's terms.

func modelPolicy(policy limiter.Policy) reference.Policy { return reference.Policy(policy) }

func modelQuotas(quotas []limiter.Quota) []reference.Quota {
	var converted []reference.Quota
	for _, quota := range quotas {
		converted = append(converted, reference.Quota{
			Limit: reference.Limit(quota.Limit), Max: quota.Max, Used: quota.Used, Requested: quota.Requested,
		})
	}

	return converted
}
