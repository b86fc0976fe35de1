package limiter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/datatypes"

	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

func TestMaxAgentsAdmitsUpToTheLimitAndDeniesTheNext(t *testing.T) {
	t.Parallel()

	db := setup(t)
	rule := maxAgents(tenant, 2)

	require.NoError(t, limiter.Enforce(db, "first", rule))
	require.NoError(t, limiter.Enforce(db, "second", rule))

	exceeded := requireDenied(t, limiter.Enforce(db, "third", rule), limiter.LimitAgents)
	require.Equal(t, "third", exceeded.AgentID)
	require.Equal(t, rule, exceeded.Rule)
	require.Equal(t, 0, exceeded.RuleIndex)
	require.EqualValues(t, 3, exceeded.Usage.Agents)
	require.Equal(t, []limiter.Quota{{Limit: limiter.LimitAgents, Max: 2, Used: 3}}, exceeded.Violations)
	require.Zero(t, exceeded.Violations[0].Remaining())

	require.Equal(t, []string{"first", "second"}, agentIDs(t, db))
}

func TestAnAdmissionIsRecorded(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "agent", maxAgents(member, 1)))

	agent := find(t, db, "agent")
	require.Equal(t, models.StatusIdle, agent.Status)
	require.JSONEq(t, `{"tenant": "acme", "email": "someone@example.com"}`, string(agent.Metadata))
	require.JSONEq(t, `[]`, string(agent.Usage))
	require.WithinDuration(t, time.Now(), *agent.StartedAt, time.Minute)
	require.WithinDuration(t, *agent.StartedAt, agent.CreatedAt, time.Second)
	require.WithinDuration(t, *agent.StartedAt, agent.UpdatedAt, time.Second)
	require.False(t, agent.DeletedAt.Valid)
	require.Nil(t, agent.AgentType)
	require.Nil(t, agent.ParentAgentID)
	require.Nil(t, agent.ConversationState)
	require.Nil(t, agent.RunID)
	require.Nil(t, agent.LeaseExpiresAt)
	require.Zero(t, agent.ReservedTokens)

	require.Equal(t, []string{`{"email": "someone@example.com", "tenant": "acme"}`}, registered(t, db))
}

func TestAnAgentThatIsAdmittedAgainCountsOnce(t *testing.T) {
	t.Parallel()

	db := setup(t)
	rule := maxAgents(tenant, 1)

	for range 3 {
		require.NoError(t, limiter.Enforce(db, "agent", rule))
	}

	requireDenied(t, limiter.Enforce(db, "another", rule), limiter.LimitAgents)
}

func TestAgentsCountUnderEveryIdentityThatTheirsContains(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name    string
		checked limiter.Identity
		counts  bool
	}{
		{"the same", member, true},
		{"a broader one", tenant, true},
		{"another broader one", limiter.Identity{"email": "someone@example.com"}, true},
		{"everyone", limiter.Everyone(), true},
		{"a narrower one", limiter.Identity{"tenant": "acme", "email": "someone@example.com", "ip": "203.0.113.42"}, false},
		{"one that overlaps", limiter.Identity{"tenant": "acme", "ip": "203.0.113.42"}, false},
		{"another value", otherTenant, false},
		{"another name", limiter.Identity{"Tenant": "acme"}, false},
		{"a name that is a value", limiter.Identity{"acme": "tenant"}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db := setup(t)
			require.NoError(t, limiter.Enforce(db, "agent", recordOnly(member)))

			err := limiter.Enforce(db, "another", maxAgents(test.checked, 1))
			if test.counts {
				requireDenied(t, err, limiter.LimitAgents)
			} else {
				require.NoError(t, err)
			}
		})
	}
}

func TestNumbersAreOneGroupByValueAndTextIsAnother(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "number", maxAgents(limiter.Identity{"plan": 1}, 1)))

	requireDenied(t, limiter.Enforce(db, "fraction", maxAgents(limiter.Identity{"plan": 1.0}, 1)), limiter.LimitAgents)
	require.NoError(t, limiter.Enforce(db, "text", maxAgents(limiter.Identity{"plan": "1"}, 1)))
	require.NoError(t, limiter.Enforce(db, "boolean", maxAgents(limiter.Identity{"plan": true}, 1)))
	require.Equal(t, []string{`{"plan": "1"}`, `{"plan": 1}`, `{"plan": true}`}, registered(t, db))
}

func TestMaxAgentsCountsStartsWithinTheWindowOnly(t *testing.T) {
	t.Parallel()

	db := setup(t)
	metadata := document(t, tenant)
	insert(t, db,
		models.LegionAgent{AgentID: "within", Metadata: metadata, StartedAt: pointer(ago(window - time.Minute))},
		models.LegionAgent{AgentID: "before", Metadata: metadata, StartedAt: pointer(ago(window + time.Minute))},
		models.LegionAgent{AgentID: "never", Metadata: metadata},
	)

	require.EqualValues(t, 2, measured(t, db, everyLimit(tenant)).Agents, "the one within and the throwaway")

	// An agent that is there already counts by its own start: "before" adds nothing.
	decision, err := limiter.Admit(db, "before", maxAgents(tenant, 1))
	require.NoError(t, err)
	require.EqualValues(t, 1, decision.Rules[0].Usage.Agents)

	// One without a start starts now, so it is the second.
	requireDenied(t, limiter.Enforce(db, "never", maxAgents(tenant, 1)), limiter.LimitAgents)
	require.NoError(t, limiter.Enforce(db, "never", maxAgents(tenant, 2)))
	require.WithinDuration(t, time.Now(), *find(t, db, "never").StartedAt, time.Minute)
}

func TestZeroDeniesEveryAgent(t *testing.T) {
	t.Parallel()

	db := setup(t)

	for _, test := range []struct {
		rule  limiter.Rule
		limit limiter.Limit
	}{
		{maxAgents(tenant, 0), limiter.LimitAgents},
		{maxRunning(tenant, 0), limiter.LimitRunningAgents},
		{maxTokens(tenant, 0), limiter.LimitTokens},
		{maxEvals(tenant, 0), limiter.LimitEvals},
	} {
		requireDenied(t, limiter.Enforce(db, "new", test.rule), test.limit)
	}

	require.Empty(t, agentIDs(t, db))

	// Also one that is there already, and one in whose group nobody is counted.
	require.NoError(t, limiter.Enforce(db, "present", recordOnly(tenant)))
	insert(t, db, models.LegionAgent{AgentID: "old", Metadata: document(t, otherTenant), StartedAt: pointer(ago(2 * window))})

	for agentID, identity := range map[string]limiter.Identity{"present": tenant, "old": otherTenant} {
		requireDenied(t, limiter.Enforce(db, agentID, maxAgents(identity, 0)), limiter.LimitAgents)
		requireDenied(t, limiter.Enforce(db, agentID, maxRunning(identity, 0)), limiter.LimitRunningAgents)
		requireDenied(t, limiter.Enforce(db, agentID, maxTokens(identity, 0)), limiter.LimitTokens)
		requireDenied(t, limiter.Enforce(db, agentID, maxEvals(identity, 0)), limiter.LimitEvals)
	}
}

func TestEveryViolationOfARuleIsReported(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, models.LegionAgent{
		AgentID:        "busy",
		Metadata:       document(t, tenant),
		Status:         models.StatusRunning,
		LeaseExpiresAt: pointer(time.Now().Add(time.Hour)),
		StartedAt:      pointer(ago(time.Minute)),
		Usage:          usage(t, models.Usage{At: ago(time.Minute), TotalTokens: 500, Evals: 7}),
	})

	exceeded := requireDenied(t, limiter.Enforce(db, "agent", limiter.Rule{Identity: tenant, Policy: limiter.Policy{
		Window:           window,
		MaxAgents:        limiter.Max(1),
		MaxRunningAgents: limiter.Max(1),
		MaxTokens:        limiter.Max(500),
		MaxEvals:         limiter.Max(6),
	}}), limiter.LimitAgents, limiter.LimitRunningAgents, limiter.LimitTokens, limiter.LimitEvals)
	require.Equal(t, []limiter.Quota{
		{Limit: limiter.LimitAgents, Max: 1, Used: 2},
		{Limit: limiter.LimitRunningAgents, Max: 1, Used: 2},
		{Limit: limiter.LimitTokens, Max: 500, Used: 500},
		{Limit: limiter.LimitEvals, Max: 6, Used: 7},
	}, exceeded.Violations)
	require.Equal(t, limiter.Usage{Agents: 2, RunningAgents: 2, Tokens: 500, Evals: 7}, exceeded.Usage)

	// Only those that are violated.
	requireDenied(t, limiter.Enforce(db, "agent", limiter.Rule{Identity: tenant, Policy: limiter.Policy{
		Window:           window,
		MaxAgents:        limiter.Max(2),
		MaxRunningAgents: limiter.Max(1),
		MaxTokens:        limiter.Max(501),
		MaxEvals:         limiter.Max(7),
	}}), limiter.LimitRunningAgents, limiter.LimitEvals)
}

func TestTheFirstViolatedRuleInListOrderIsReported(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(member)))

	allows := limiter.Rule{Name: "allows", Identity: limiter.Everyone(), Policy: maxAgents(nil, 2).Policy}
	broad := limiter.Rule{Name: "broad", Identity: tenant, Policy: maxAgents(nil, 1).Policy}
	narrow := limiter.Rule{Name: "narrow", Identity: member, Policy: maxAgents(nil, 1).Policy}

	for _, test := range []struct {
		rules []limiter.Rule
		index int
		name  string
	}{
		{[]limiter.Rule{allows, broad, narrow}, 1, "broad"},
		{[]limiter.Rule{narrow, allows, broad}, 0, "narrow"},
		{[]limiter.Rule{allows, narrow}, 1, "narrow"},
	} {
		exceeded := requireDenied(t, limiter.Enforce(db, "second", test.rules...), limiter.LimitAgents)
		require.Equal(t, test.index, exceeded.RuleIndex)
		require.Equal(t, test.name, exceeded.Rule.Name)
	}
}

func TestOneIdentityUnderTwoWindows(t *testing.T) {
	t.Parallel()

	db := setup(t)
	metadata := document(t, tenant)
	insert(t, db,
		models.LegionAgent{AgentID: "just now", Metadata: metadata, StartedAt: pointer(ago(10 * time.Second))},
		models.LegionAgent{AgentID: "this morning", Metadata: metadata, StartedAt: pointer(ago(3 * time.Hour))},
		models.LegionAgent{AgentID: "at noon", Metadata: metadata, StartedAt: pointer(ago(2 * time.Hour))},
	)

	minute := limiter.Rule{Name: "minute", Identity: tenant, Policy: limiter.Policy{Window: time.Minute, MaxAgents: limiter.Max(2)}}
	day := limiter.Rule{Name: "day", Identity: tenant, Policy: limiter.Policy{Window: 24 * time.Hour, MaxAgents: limiter.Max(4)}}

	decision, err := limiter.Admit(db, "agent", minute, day)
	require.NoError(t, err)
	require.EqualValues(t, 2, decision.Rules[0].Usage.Agents)
	require.EqualValues(t, 4, decision.Rules[1].Usage.Agents)

	require.Equal(t, "minute", requireDenied(t, limiter.Enforce(db, "another", minute, day), limiter.LimitAgents).Rule.Name)

	minute.Policy.MaxAgents = nil
	require.Equal(t, "day", requireDenied(t, limiter.Enforce(db, "another", minute, day), limiter.LimitAgents).Rule.Name)
	require.Equal(t, []string{`{"tenant": "acme"}`}, registered(t, db))
}

func TestSeveralRulesRecordTheMergedIdentity(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "agent",
		recordOnly(limiter.Identity{"ip": "203.0.113.42"}),
		recordOnly(member),
		recordOnly(limiter.Everyone()),
		recordOnly(limiter.Identity{"tenant": "acme", "paying": true, "seats": 12}),
	))

	require.JSONEq(t, `{"ip": "203.0.113.42", "tenant": "acme", "email": "someone@example.com", "paying": true, "seats": 12}`,
		string(find(t, db, "agent").Metadata))

	// It counts for each of them, and for a mix that no rule has named.
	for _, identity := range []limiter.Identity{
		{"ip": "203.0.113.42"}, member, limiter.Everyone(), {"ip": "203.0.113.42", "seats": 12.0},
	} {
		require.EqualValues(t, 2, measured(t, db, everyLimit(identity)).Agents)
	}
}

func TestADeniedCallChangesNothing(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "first", maxAgents(tenant, 1), recordOnly(limiter.Everyone())))
	insert(t, db, models.LegionAgent{
		AgentID:   "moving",
		AgentType: pointer("chat"),
		Metadata:  document(t, otherTenant),
		Usage:     usage(t, models.Usage{At: ago(time.Minute), TotalTokens: 3}),
		StartedAt: pointer(ago(time.Minute)),
		DeletedAt: find(t, db, "first").DeletedAt,
	})

	before := snapshot(t, db)

	for _, agentID := range []string{"new", "moving"} {
		for _, rules := range [][]limiter.Rule{
			{maxAgents(tenant, 1)},
			{maxRunning(tenant, 5), maxAgents(tenant, 1)},
			// Identities that nobody has used yet: they are not registered either.
			{recordOnly(limiter.Identity{"ip": "203.0.113.42"}), maxRunning(member, 5), maxAgents(tenant, 1)},
			{maxTokens(limiter.Identity{"plan": "free"}, 0)},
		} {
			requireDeniedAny(t, limiter.Enforce(db, agentID, rules...))
			requireDeniedAny(t, limiter.Enforce(begin(t, db), agentID, rules...))
			require.Equal(t, before, snapshot(t, db))
		}
	}
}

func requireDeniedAny(t *testing.T, err error) {
	t.Helper()
	require.ErrorIs(t, err, limiter.ErrExceeded)
}

func TestADenialUsesUpNothingOfAnotherRulesLimit(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

	everyone := limiter.Rule{Identity: limiter.Everyone(), Policy: limiter.Policy{
		Window: window, MaxAgents: limiter.Max(2), MaxRunningAgents: limiter.Max(1),
	}}

	for _, agentID := range []string{"second", "third", "fourth"} {
		requireDenied(t, limiter.Enforce(db, agentID, everyone, maxAgents(tenant, 1)), limiter.LimitAgents)
	}

	// The one place that is left under Everyone is still there.
	require.NoError(t, limiter.Enforce(db, "elsewhere", everyone, maxAgents(otherTenant, 1)))
}

func TestMovingKeepsTheStartAndMovesTheCount(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "agent", maxAgents(tenant, 1)))
	change(t, db, "agent", map[string]any{"started_at": ago(10 * time.Minute)})
	started := find(t, db, "agent").StartedAt

	require.NoError(t, limiter.Enforce(db, "agent", maxAgents(otherTenant, 1)))

	moved := find(t, db, "agent")
	require.JSONEq(t, `{"tenant": "globex"}`, string(moved.Metadata))
	require.Equal(t, started, moved.StartedAt)

	require.NoError(t, limiter.Enforce(db, "replacement", maxAgents(tenant, 1)))
	requireDenied(t, limiter.Enforce(db, "another", maxAgents(otherTenant, 1)), limiter.LimitAgents)

	// Its start counts where it is now: outside a window of five minutes.
	require.NoError(t, limiter.Enforce(db, "another", limiter.Rule{
		Identity: otherTenant,
		Policy:   limiter.Policy{Window: 5 * time.Minute, MaxAgents: limiter.Max(1)},
	}))
}

func TestMovingDropsTheFieldsOfTheOldIdentity(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "agent", recordOnly(member)))
	require.NoError(t, limiter.Enforce(db, "agent", recordOnly(limiter.Identity{"tenant": "globex"})))
	require.JSONEq(t, `{"tenant": "globex"}`, string(find(t, db, "agent").Metadata))
}

func TestDeletedAgentsCountAndAreRestored(t *testing.T) {
	t.Parallel()

	db := setup(t)
	rule := limiter.Rule{Identity: tenant, Policy: limiter.Policy{Window: window, MaxAgents: limiter.Max(1), MaxTokens: limiter.Max(20)}}
	insert(t, db, models.LegionAgent{
		AgentID:   "deleted",
		Metadata:  document(t, tenant),
		Usage:     usage(t, models.Usage{At: ago(time.Minute), TotalTokens: 10}),
		StartedAt: pointer(ago(time.Minute)),
	})
	require.NoError(t, db.Delete(&models.LegionAgent{AgentID: "deleted"}).Error)
	require.True(t, find(t, db, "deleted").DeletedAt.Valid)

	exceeded := requireDenied(t, limiter.Enforce(db, "another", rule), limiter.LimitAgents)
	require.EqualValues(t, 10, exceeded.Usage.Tokens)
	require.True(t, find(t, db, "deleted").DeletedAt.Valid)

	before := find(t, db, "deleted")

	require.NoError(t, limiter.Enforce(db, "deleted", rule))

	restored := find(t, db, "deleted")
	require.False(t, restored.DeletedAt.Valid)
	require.Equal(t, before.StartedAt, restored.StartedAt)
	require.Equal(t, before.Usage, restored.Usage)
}

func TestEveryoneCountsLimitedAgentsOnly(t *testing.T) {
	t.Parallel()

	db := setup(t)
	spent := usage(t, models.Usage{At: ago(time.Minute), TotalTokens: 10, Evals: 1})
	lease := pointer(time.Now().Add(time.Hour))

	for agentID, metadata := range map[string]datatypes.JSON{
		"never limited":  nil,
		"under a tenant": document(t, tenant),
		"under Everyone": document(t, limiter.Everyone()),
	} {
		insert(t, db, models.LegionAgent{
			AgentID: agentID, Metadata: metadata, Usage: spent, StartedAt: pointer(ago(time.Minute)),
			Status: models.StatusRunning, LeaseExpiresAt: lease,
		})
	}

	require.Equal(t, limiter.Usage{Agents: 3, RunningAgents: 3, Tokens: 20, Evals: 2}, measured(t, db, everyLimit(limiter.Everyone())))
}

func TestAnAgentThatOnlyTheStoreKnewStartsWithItsFirstAdmission(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, models.LegionAgent{
		AgentID:           "saved",
		AgentType:         pointer("chat"),
		ConversationState: []byte("state"),
		CreatedAt:         ago(2 * window),
		Usage:             usage(t, models.Usage{At: ago(time.Minute), TotalTokens: 10}),
	})

	// Its own tokens count with its first admission already.
	requireDenied(t, limiter.Enforce(db, "saved", maxTokens(tenant, 10)), limiter.LimitTokens)
	require.NoError(t, limiter.Enforce(db, "saved", maxTokens(tenant, 11)))

	agent := find(t, db, "saved")
	require.WithinDuration(t, time.Now(), *agent.StartedAt, time.Minute)
	require.Equal(t, "chat", *agent.AgentType)
	require.Equal(t, []byte("state"), agent.ConversationState)
	require.WithinDuration(t, ago(2*window), agent.CreatedAt, time.Minute)
}

func TestAdmitSaysWhatIsLeftOfEachRule(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, models.LegionAgent{
		AgentID:   "first",
		Metadata:  document(t, member),
		StartedAt: pointer(ago(time.Minute)),
		Usage:     usage(t, models.Usage{At: ago(time.Minute), TotalTokens: 30, Evals: 4}),
	})

	broad := limiter.Rule{Name: "broad", Identity: tenant, Policy: limiter.Policy{
		Window: window, MaxAgents: limiter.Max(5), MaxRunningAgents: limiter.Max(2), MaxTokens: limiter.Max(100), MaxEvals: limiter.Max(10),
	}}
	narrow := limiter.Rule{Name: "narrow", Identity: member, Policy: limiter.Policy{Window: window, MaxEvals: limiter.Max(5)}}

	decision, err := limiter.Admit(db, "second", broad, narrow)
	require.NoError(t, err)
	require.Equal(t, &limiter.Decision{AgentID: "second", Rules: []limiter.RuleState{
		{
			Rule:  broad,
			Usage: limiter.Usage{Agents: 2, RunningAgents: 1, Tokens: 30, Evals: 4},
			Quotas: []limiter.Quota{
				{Limit: limiter.LimitAgents, Max: 5, Used: 2},
				{Limit: limiter.LimitRunningAgents, Max: 2, Used: 1},
				{Limit: limiter.LimitTokens, Max: 100, Used: 30},
				{Limit: limiter.LimitEvals, Max: 10, Used: 4},
			},
		},
		{
			Rule:   narrow,
			Usage:  limiter.Usage{Evals: 4},
			Quotas: []limiter.Quota{{Limit: limiter.LimitEvals, Max: 5, Used: 4}},
		},
	}}, decision)
	require.EqualValues(t, 1, decision.Rules[1].Quotas[0].Remaining())

	decision, err = limiter.Admit(db, "third", maxAgents(tenant, 1))
	require.Nil(t, decision)
	requireDenied(t, err, limiter.LimitAgents)
}
