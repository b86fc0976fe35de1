package reference_test

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/internal/reference"
)

const (
	lease  = 30 * time.Second
	window = time.Hour
)

var (
	tenant = identity(map[string]any{"tenant": "acme"})
	member = identity(map[string]any{"tenant": "acme", "seat": 1})
)

func identity(values map[string]any) reference.Identity {
	made, err := reference.NewIdentity(values)
	if err != nil {
		panic(err)
	}

	return made
}

func rule(identity reference.Identity, limits reference.Policy) reference.Rule {
	limits.Window = window

	return reference.Rule{Identity: identity, Policy: limits}
}

func enforce(agent string, rules ...reference.Rule) reference.Enforce {
	return reference.Enforce{Agent: agent, Rules: rules}
}

func spend(agent string, tokens, evals int64) reference.Append {
	return reference.Append{Agent: agent, Entry: reference.Entry{ID: agent, At: math.MaxInt64, Tokens: tokens, Evals: evals}}
}

// play performs the operations in order and returns what the last came to.
func play(operations ...reference.Operation) (reference.State, reference.Result) {
	state := reference.New(reference.Settings{Lease: lease})

	var result reference.Result

	for _, operation := range operations {
		state, result = state.Step(operation)
	}

	return state, result
}

func TestVerdicts(t *testing.T) {
	t.Parallel()

	var (
		record  = rule(tenant, reference.Policy{})
		agents  = func(limit int64) reference.Policy { return reference.Policy{MaxAgents: &limit} }
		running = func(limit int64) reference.Policy { return reference.Policy{MaxRunningAgents: &limit} }
		tokens  = func(limit int64) reference.Policy { return reference.Policy{MaxTokens: &limit} }
		evals   = func(limit int64) reference.Policy { return reference.Policy{MaxEvals: &limit} }
		turn    = reference.Turn{Agent: "one", Running: true, Run: "run", Lease: reference.At(lease), Reserved: 5}
		pass    = func(by time.Duration) reference.Advance { return reference.Advance{By: by} }
	)

	for _, test := range []struct {
		name       string
		operations []reference.Operation
		outcome    reference.Outcome
	}{
		{"no rules", []reference.Operation{enforce("one")}, reference.Invalid},
		{"no identity", []reference.Operation{enforce("one", rule(nil, agents(1)))}, reference.Invalid},
		{"no window", []reference.Operation{enforce("one", reference.Rule{Identity: tenant, Policy: agents(1)})}, reference.Invalid},
		{"no policy and no default", []reference.Operation{enforce("one", reference.Rule{Identity: tenant})}, reference.Invalid},
		{"negative limit", []reference.Operation{enforce("one", rule(tenant, agents(-1)))}, reference.Invalid},
		{"rules that disagree", []reference.Operation{
			enforce("one", record, rule(identity(map[string]any{"tenant": "globex"}), agents(1))),
		}, reference.Invalid},

		{"agents up to the limit", []reference.Operation{enforce("one", record), enforce("two", rule(tenant, agents(2)))}, reference.Admitted},
		{"agents beyond the limit", []reference.Operation{enforce("one", record), enforce("two", rule(tenant, agents(1)))}, reference.Denied},
		{"the same agent again", []reference.Operation{enforce("one", record), enforce("one", rule(tenant, agents(1)))}, reference.Admitted},
		{"agents under a broader identity", []reference.Operation{
			enforce("one", rule(member, reference.Policy{})), enforce("two", rule(tenant, agents(1))),
		}, reference.Denied},
		{"agents under a narrower identity", []reference.Operation{enforce("one", record), enforce("two", rule(member, agents(1)))}, reference.Admitted},
		{"agents of everyone", []reference.Operation{enforce("one", record), enforce("two", rule(identity(nil), agents(1)))}, reference.Denied},
		{"agents that were saved and never limited", []reference.Operation{
			reference.Idle{Agent: "one"}, enforce("two", rule(identity(nil), agents(1))),
		}, reference.Admitted},
		{"agents that started before the window", []reference.Operation{
			enforce("one", record), pass(window), enforce("two", rule(tenant, agents(1))),
		}, reference.Admitted},
		{"agents that started just within the window", []reference.Operation{
			enforce("one", record), pass(window - 1), enforce("two", rule(tenant, agents(1))),
		}, reference.Denied},
		{"deleted agents", []reference.Operation{
			enforce("one", record), reference.Delete{Agent: "one"}, enforce("two", rule(tenant, agents(1))),
		}, reference.Denied},
		{"pruned agents", []reference.Operation{
			enforce("one", record), reference.Delete{Agent: "one"}, reference.Prune{Before: 1}, enforce("two", rule(tenant, agents(1))),
		}, reference.Admitted},
		{"an agent that has moved away", []reference.Operation{
			enforce("one", record), enforce("one", rule(identity(map[string]any{"ip": "::1"}), agents(1))), enforce("two", rule(tenant, agents(1))),
		}, reference.Admitted},
		{"a limit of 0 for an agent that does not count", []reference.Operation{
			enforce("one", record), pass(window), enforce("one", rule(tenant, agents(0))),
		}, reference.Denied},

		{"running agents up to the limit", []reference.Operation{enforce("one", rule(tenant, running(1)))}, reference.Admitted},
		{"running agents beyond the limit", []reference.Operation{
			enforce("one", rule(tenant, running(1))), enforce("two", rule(tenant, running(1))),
		}, reference.Denied},
		{"a slot is taken only under a running limit", []reference.Operation{
			enforce("one", record), enforce("two", rule(tenant, running(1))),
		}, reference.Admitted},
		{"a slot that was released", []reference.Operation{
			enforce("one", rule(tenant, running(1))), reference.Release{Agent: "one"}, enforce("two", rule(tenant, running(1))),
		}, reference.Admitted},
		{"an unowned slot after its lease", []reference.Operation{
			enforce("one", rule(tenant, running(1))), pass(lease), enforce("two", rule(tenant, running(1))),
		}, reference.Admitted},
		{"a turn's slot, however long ago the agent started", []reference.Operation{
			enforce("one", record), pass(window),
			reference.Turn{Agent: "one", Running: true, Run: "run", Lease: reference.At(2 * window)},
			enforce("two", rule(tenant, running(1))),
		}, reference.Denied},
		{"a turn's slot after its lease", []reference.Operation{
			enforce("one", record), turn, pass(lease), enforce("two", rule(tenant, running(1))),
		}, reference.Admitted},
		{"a running row without a lease", []reference.Operation{
			enforce("one", record), reference.Turn{Agent: "one", Running: true, Run: "run"}, enforce("two", rule(tenant, running(1))),
		}, reference.Admitted},
		{"release of a live turn", []reference.Operation{enforce("one", record), turn, reference.Release{Agent: "one"}}, reference.AgentRunning},
		{"idle under a live turn", []reference.Operation{enforce("one", record), turn, reference.Idle{Agent: "one"}}, reference.AgentRunning},

		{"tokens below the limit", []reference.Operation{
			enforce("one", record), spend("one", 9, 0), enforce("two", rule(tenant, tokens(10))),
		}, reference.Admitted},
		{"tokens that have reached the limit", []reference.Operation{
			enforce("one", record), spend("one", 10, 0), enforce("two", rule(tenant, tokens(10))),
		}, reference.Denied},
		{"tokens of the caller's own, spent elsewhere", []reference.Operation{
			enforce("one", rule(identity(nil), reference.Policy{})), spend("one", 10, 0), enforce("one", rule(tenant, tokens(10))),
		}, reference.Denied},
		{"tokens from before the window", []reference.Operation{
			enforce("one", record), spend("one", 10, 0), pass(window), enforce("two", rule(tenant, tokens(10))),
		}, reference.Admitted},
		{"tokens that another agent's turn has reserved", []reference.Operation{
			enforce("one", record), turn, enforce("two", rule(tenant, tokens(5))),
		}, reference.Denied},
		{"tokens that were reserved by a turn after its lease", []reference.Operation{
			enforce("one", record), turn, pass(lease), enforce("two", rule(tenant, tokens(5))),
		}, reference.Admitted},
		{"tokens that the caller itself has reserved", []reference.Operation{
			enforce("one", record), turn, enforce("one", rule(tenant, tokens(5))),
		}, reference.Admitted},
		{"tokens beyond what can be counted", []reference.Operation{
			enforce("one", record), spend("one", math.MaxInt64, 0), enforce("two", record), spend("two", math.MaxInt64, 0),
			enforce("three", rule(tenant, tokens(math.MaxInt64))),
		}, reference.Denied},
		{"an entry that was recorded before", []reference.Operation{
			enforce("one", record), spend("one", 9, 0), spend("one", 9, 0), enforce("two", rule(tenant, tokens(10))),
		}, reference.Admitted},
		{"evals that have reached the limit", []reference.Operation{
			enforce("one", record), spend("one", 0, 1), enforce("two", rule(tenant, evals(1))),
		}, reference.Denied},
		{"evals are no tokens", []reference.Operation{
			enforce("one", record), spend("one", 0, 1), enforce("two", rule(tenant, tokens(1))),
		}, reference.Admitted},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			_, result := play(test.operations...)
			require.Equal(t, test.outcome, result.Outcome)
		})
	}
}

func TestTheFirstViolatedRuleDeniesWithAllItsLimits(t *testing.T) {
	t.Parallel()

	one, none := int64(1), int64(0)
	state, _ := play(enforce("one", rule(tenant, reference.Policy{})), spend("one", 3, 0))

	denied, result := state.Step(enforce("two",
		rule(tenant, reference.Policy{MaxAgents: new(int64(2))}),
		rule(tenant, reference.Policy{MaxAgents: &one, MaxRunningAgents: &one, MaxTokens: &one}),
		rule(tenant, reference.Policy{MaxEvals: &none}),
	))

	require.Equal(t, reference.Denied, result.Outcome)
	require.Equal(t, 1, result.Index)
	require.Equal(t, []reference.Quota{
		{Limit: reference.Agents, Max: 1, Used: 2},
		{Limit: reference.Tokens, Max: 1, Used: 3},
	}, result.Rules[1].Violations())
	require.Equal(t, reference.Usage{Agents: 2, RunningAgents: 1, Tokens: 3}, result.Rules[1].Usage)
	require.True(t, denied.Equal(state), "a denial changes nothing")
}

func TestAnAdmissionMergesMovesAndRestoresAndKeepsTheStart(t *testing.T) {
	t.Parallel()

	state, _ := play(
		enforce("one", rule(tenant, reference.Policy{})),
		reference.Advance{By: time.Minute},
		reference.Delete{Agent: "one"},
	)
	before := state.String()

	next, result := state.Step(enforce("one", rule(member, reference.Policy{}), rule(identity(map[string]any{"ip": "::1"}), reference.Policy{})))
	require.Equal(t, reference.Admitted, result.Outcome)

	agent, _ := next.Agent("one")
	require.Equal(t, identity(map[string]any{"tenant": "acme", "seat": json.Number("1.0"), "ip": "::1"}), agent.Identity)
	require.Equal(t, reference.At(0), agent.Started)
	require.Equal(t, reference.Moment{}, agent.Deleted)
	require.Equal(t, before, state.String(), "a state never changes")
	require.NotEqual(t, state.Hash(), next.Hash())
}

func TestSlotsAreRevokedOnlyToAdmit(t *testing.T) {
	t.Parallel()

	expired := func(agent string) reference.Turn {
		return reference.Turn{Agent: agent, Running: true, Run: "run of " + agent, Lease: reference.At(0)}
	}
	state, _ := play(
		enforce("one", rule(tenant, reference.Policy{})), expired("one"),
		enforce("two", rule(member, reference.Policy{})), expired("two"),
	)

	running := func(identity reference.Identity, limit int64) reference.Rule {
		return rule(identity, reference.Policy{MaxRunningAgents: &limit})
	}
	nobody := rule(tenant, reference.Policy{MaxAgents: new(int64(0))})

	for _, test := range []struct {
		name    string
		call    reference.Enforce
		outcome reference.Outcome
		revoked []string
	}{
		{"where there is room", enforce("three", running(tenant, 3)), reference.Admitted, nil},
		{"where they are in the way", enforce("three", running(tenant, 2)), reference.Admitted, []string{"one", "two"}},
		{"in the group only", enforce("three", running(member, 1)), reference.Admitted, []string{"two"}},
		{"but the caller's own", enforce("two", running(tenant, 1)), reference.Admitted, []string{"one"}},
		{"not for a denial", enforce("three", running(tenant, 2), nobody), reference.Denied, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			next, result := state.Step(test.call)
			require.Equal(t, test.outcome, result.Outcome)

			var revoked []string

			for _, agent := range next.Agents() {
				if agent.Running && !agent.Lease.Known {
					revoked = append(revoked, agent.ID)
				}
			}

			require.Equal(t, test.revoked, revoked)
		})
	}
}

func TestCheckSaysWhenTheCallWillPass(t *testing.T) {
	t.Parallel()

	state, _ := play(
		enforce("one", rule(tenant, reference.Policy{})), spend("one", 4, 0),
		reference.Advance{By: time.Minute},
		enforce("two", rule(tenant, reference.Policy{})), spend("two", 5, 0),
	)

	report, valid := state.Check(enforce("three", rule(tenant, reference.Policy{MaxAgents: new(int64(2)), MaxTokens: new(int64(5))})))
	require.True(t, valid)
	require.Equal(t, reference.Report{
		// Then the tokens of "one" have gone, and those of "two" alone still reach the limit.
		RetryAfter: window,
		Rules: [][]reference.Standing{{
			{Quota: reference.Quota{Limit: reference.Agents, Max: 2, Used: 2}, ResetAfter: window},
			{Quota: reference.Quota{Limit: reference.Tokens, Max: 5, Used: 9}, ResetAfter: window},
		}},
	}, report)

	never, _ := state.Check(enforce("three", rule(tenant, reference.Policy{MaxTokens: new(int64(0))})))
	require.Zero(t, never.RetryAfter)
	require.False(t, never.Allowed)
}

func TestIdentitiesAreComparedAsJSONB(t *testing.T) {
	t.Parallel()

	parsed, err := reference.ParseIdentity(`{"b": 1.0, "a": "x", "c": 9007199254740993, "d": true}`)
	require.NoError(t, err)
	require.Equal(t, identity(map[string]any{
		"a": "x", "b": json.Number("10e-1"), "c": int64(9007199254740993), "d": true,
	}), parsed)

	require.True(t, parsed.Contains(identity(map[string]any{"b": 1})))
	require.False(t, parsed.Contains(identity(map[string]any{"b": "1"})))
	require.False(t, parsed.Contains(identity(map[string]any{"c": json.Number("9007199254740992")})))
	require.False(t, parsed.Contains(identity(map[string]any{"d": "true"})))
	require.False(t, reference.Identity(nil).Contains(identity(nil)))

	_, err = reference.ParseIdentity(`{"a": null}`)
	require.Error(t, err)
}
