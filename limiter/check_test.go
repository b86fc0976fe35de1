package limiter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// pass moves everything in the database into the past, as if so much time had passed.
func pass(t *testing.T, db *gorm.DB, duration time.Duration) {
	t.Helper()

	require.NoError(t, db.Exec(`UPDATE legion_agents SET
  started_at = started_at - @by, created_at = created_at - @by, updated_at = updated_at - @by,
  lease_expires_at = lease_expires_at - @by, deleted_at = deleted_at - @by,
  usage = (SELECT coalesce(jsonb_agg(jsonb_set(entry, '{at}', to_jsonb((entry ->> 'at')::bigint - @ms))), '[]') FROM jsonb_array_elements(usage) AS entry)`,
		map[string]any{
			"by": gorm.Expr("? * interval '1 microsecond'", duration.Microseconds()),
			"ms": gorm.Expr("?::bigint", duration.Milliseconds()),
		}).Error)
}

// spent is an agent of the tenant that recorded usage so long ago.
func spent(t *testing.T, id string, since time.Duration, tokens, evals int64) models.LegionAgent {
	t.Helper()

	at := ago(since)

	return models.LegionAgent{
		AgentID: id, Metadata: document(t, tenant), StartedAt: &at, CreatedAt: at, UpdatedAt: at,
		Usage: usage(t, models.Usage{At: at, TotalTokens: tokens, Evals: evals}),
	}
}

func running(t *testing.T, id string, lease time.Duration, reserved int64) models.LegionAgent {
	t.Helper()

	long := ago(10 * window)

	return models.LegionAgent{
		AgentID: id, Metadata: document(t, tenant), StartedAt: &long, Status: models.StatusRunning,
		RunID: pointer("run of " + id), LeaseExpiresAt: pointer(time.Now().Add(lease)), ReservedTokens: reserved,
	}
}

func TestRetryAfterIsTheShortestWaitThatPasses(t *testing.T) {
	t.Parallel()

	tests := []struct {
		name   string
		rows   func(t *testing.T) []models.LegionAgent
		rules  []limiter.Rule
		agent  string
		expect time.Duration
	}{
		{
			name: "agents: the oldest start leaves the window",
			rows: func(t *testing.T) []models.LegionAgent {
				t.Helper()

				return []models.LegionAgent{spent(t, "a", 50*time.Minute, 0, 0), spent(t, "b", 20*time.Minute, 0, 0)}
			},
			rules:  []limiter.Rule{maxAgents(tenant, 2)},
			expect: 10 * time.Minute,
		},
		{
			name: "agents: over a limit that was lowered, several must leave",
			rows: func(t *testing.T) []models.LegionAgent {
				t.Helper()

				return []models.LegionAgent{spent(t, "a", 50*time.Minute, 0, 0), spent(t, "b", 20*time.Minute, 0, 0)}
			},
			rules:  []limiter.Rule{maxAgents(tenant, 1)},
			expect: 40 * time.Minute,
		},
		{
			name: "agents: the caller's own start counts once",
			rows: func(t *testing.T) []models.LegionAgent {
				t.Helper()

				return []models.LegionAgent{spent(t, "caller", 50*time.Minute, 0, 0), spent(t, "b", 20*time.Minute, 0, 0)}
			},
			rules:  []limiter.Rule{maxAgents(tenant, 1)},
			agent:  "caller",
			expect: 10 * time.Minute,
		},
		{
			name: "tokens: enough entries leave the window",
			rows: func(t *testing.T) []models.LegionAgent {
				t.Helper()

				return []models.LegionAgent{
					spent(t, "a", 50*time.Minute, 100, 0), spent(t, "b", 30*time.Minute, 60, 0), spent(t, "c", 10*time.Minute, 40, 0),
				}
			},
			rules:  []limiter.Rule{maxTokens(tenant, 100)},
			expect: 30 * time.Minute,
		},
		{
			name: "tokens: a reservation dies with its lease",
			rows: func(t *testing.T) []models.LegionAgent {
				t.Helper()

				return []models.LegionAgent{spent(t, "a", 10*time.Minute, 50, 0), running(t, "b", 5*time.Minute, 60)}
			},
			rules:  []limiter.Rule{maxTokens(tenant, 100)},
			expect: 5 * time.Minute,
		},
		{
			name: "evals",
			rows: func(t *testing.T) []models.LegionAgent {
				t.Helper()

				return []models.LegionAgent{spent(t, "a", 45*time.Minute, 0, 3), spent(t, "b", 15*time.Minute, 0, 3)}
			},
			rules:  []limiter.Rule{maxEvals(tenant, 4)},
			expect: 15 * time.Minute,
		},
		{
			name: "running agents: a lease ends",
			rows: func(t *testing.T) []models.LegionAgent {
				t.Helper()

				return []models.LegionAgent{running(t, "a", 4*time.Minute, 0), running(t, "b", 2*time.Minute, 0)}
			},
			rules:  []limiter.Rule{maxRunning(tenant, 2)},
			expect: 2 * time.Minute,
		},
		{
			name: "several rules and violations: the last of them to pass",
			rows: func(t *testing.T) []models.LegionAgent {
				t.Helper()

				return []models.LegionAgent{spent(t, "a", 50*time.Minute, 100, 5), spent(t, "b", 20*time.Minute, 100, 5)}
			},
			rules: []limiter.Rule{
				{Identity: tenant, Policy: limiter.Policy{Window: window, MaxAgents: limiter.Max(2), MaxTokens: limiter.Max(150)}},
				maxEvals(limiter.Everyone(), 5),
			},
			expect: 40 * time.Minute,
		},
	}

	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db := setup(t)
			agent := test.agent
			insert(t, db, test.rows(t)...)

			if agent == "" {
				agent = "new"
			}

			var exceeded *limiter.ExceededError

			require.ErrorAs(t, limiter.Enforce(db, agent, test.rules...), &exceeded)
			require.InDelta(t, test.expect, exceeded.RetryAfter, float64(20*time.Second))

			report, err := limiter.Check(db, agent, test.rules...)
			require.NoError(t, err)
			require.False(t, report.Allowed)
			require.InDelta(t, exceeded.RetryAfter, report.RetryAfter, float64(20*time.Second))

			// The moment leaves room for the pace of a busy machine.
			const moment = 30 * time.Second

			pass(t, db, exceeded.RetryAfter-moment)
			require.ErrorAs(t, limiter.Enforce(db, agent, test.rules...), &exceeded)
			require.Positive(t, exceeded.RetryAfter)
			require.LessOrEqual(t, exceeded.RetryAfter, moment)

			// Rows have milliseconds, so that they cannot be moved by less.
			pass(t, db, exceeded.RetryAfter+time.Millisecond)
			require.NoError(t, limiter.Enforce(db, agent, test.rules...))
		})
	}
}

// PostgreSQL has such a time, and evaluates it also where an OFFSET skips it.
func TestAStartThatNeverLeavesTheWindowLeavesTheOthersWaitsAlone(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, spent(t, "a", 50*time.Minute, 0, 0), spent(t, "b", 20*time.Minute, 0, 0), spent(t, "never", 0, 0, 0))
	require.NoError(t, db.Exec("UPDATE legion_agents SET started_at = 'infinity' WHERE agent_id = 'never'").Error)

	for limit, expect := range map[int64]time.Duration{2: 40 * time.Minute, 3: 10 * time.Minute} {
		exceeded := requireDenied(t, limiter.Enforce(db, "new", maxAgents(tenant, limit)), limiter.LimitAgents)
		require.InDelta(t, expect, exceeded.RetryAfter, float64(20*time.Second))
	}

	exceeded := requireDenied(t, limiter.Enforce(db, "new", maxAgents(tenant, 1)), limiter.LimitAgents)
	require.Greater(t, exceeded.RetryAfter, 200*365*24*time.Hour, "it never passes")
}

func TestRetryAfterIsZeroWhereALimitIsZero(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, spent(t, "a", time.Minute, 1, 1))

	for _, rule := range []limiter.Rule{maxAgents(tenant, 0), maxRunning(tenant, 0), maxTokens(tenant, 0), maxEvals(tenant, 0)} {
		var exceeded *limiter.ExceededError

		require.ErrorAs(t, limiter.Enforce(db, "new", rule, maxAgents(otherField, 5)), &exceeded)
		require.Zero(t, exceeded.RetryAfter)

		report, err := limiter.Check(db, "new", rule, maxAgents(otherField, 5))
		require.NoError(t, err)
		require.False(t, report.Allowed)
		require.Zero(t, report.RetryAfter)
	}
}

var otherField = limiter.Identity{"region": "eu"}

func TestCheckReportsWhatIsUsedLeftAndWhenItResets(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, spent(t, "a", 50*time.Minute, 100, 2), spent(t, "b", 20*time.Minute, 50, 1), running(t, "c", time.Minute, 30))

	rule := limiter.Rule{Identity: tenant, Policy: limiter.Policy{
		Window: window, MaxAgents: limiter.Max(5), MaxRunningAgents: limiter.Max(4), MaxTokens: limiter.Max(1000), MaxEvals: limiter.Max(3),
	}}
	before := snapshot(t, db)

	report, err := limiter.Check(db, "", rule, maxAgents(otherField, 1))
	require.NoError(t, err)
	require.Equal(t, before, snapshot(t, db))

	require.False(t, report.Allowed, "evals are used up")
	require.InDelta(t, 10*time.Minute, report.RetryAfter, float64(20*time.Second))

	quotas := report.Rules[0].Quotas
	require.Equal(t, limiter.Usage{Agents: 2, RunningAgents: 1, Tokens: 180, Evals: 3}, report.Rules[0].Usage)
	require.Equal(t, []int64{3, 3, 820, 0}, []int64{quotas[0].Remaining(), quotas[1].Remaining(), quotas[2].Remaining(), quotas[3].Remaining()})
	require.InDelta(t, 40*time.Minute, quotas[0].ResetAfter, float64(20*time.Second))
	require.InDelta(t, time.Minute, quotas[1].ResetAfter, float64(20*time.Second))
	require.InDelta(t, 40*time.Minute, quotas[2].ResetAfter, float64(20*time.Second))

	require.Equal(t, limiter.Usage{}, report.Rules[1].Usage)
	require.Zero(t, report.Rules[1].Quotas[0].ResetAfter)
}

func TestCheckAgreesWithEnforceForAnAgentThatIsThere(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, spent(t, "a", time.Minute, 0, 0), running(t, "b", time.Minute, 0))

	for _, test := range []struct {
		agent   string
		rule    limiter.Rule
		allowed bool
	}{
		{"a", maxAgents(tenant, 1), true},
		{"new", maxAgents(tenant, 1), false},
		{"b", maxRunning(tenant, 1), true},
		{"new", maxRunning(tenant, 1), false},
	} {
		report, err := limiter.Check(db, test.agent, test.rule)
		require.NoError(t, err)
		require.Equal(t, test.allowed, report.Allowed)

		err = limiter.Enforce(db, test.agent, test.rule)
		if test.allowed {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, limiter.ErrExceeded)
		}
	}
}

func TestCheckJoinsTheCallersTransaction(t *testing.T) {
	t.Parallel()

	db := setup(t)
	tx := begin(t, db)

	require.NoError(t, limiter.Enforce(tx, "a", maxAgents(tenant, 1)))

	report, err := limiter.Check(tx, "b", maxAgents(tenant, 1))
	require.NoError(t, err)
	require.False(t, report.Allowed)

	report, err = limiter.Check(db, "b", maxAgents(tenant, 1))
	require.NoError(t, err)
	require.True(t, report.Allowed, "what is not committed is not seen outside")
}
