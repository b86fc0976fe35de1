package limiter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/limiter"
)

// A COMMIT after row locks flushes the WAL though nothing was written. So a call that
// wrote nothing ends with ROLLBACK.
func TestACallThatWroteNothingEndsWithRollback(t *testing.T) {
	t.Parallel()

	db := setup(t)
	recorded, statements := openRecorded(t, db)
	require.NoError(t, limiter.Enforce(recorded, "first", recordOnly(member)))
	statements.reset()

	last := func() string {
		commands := statements.commands()
		require.NotEmpty(t, commands)

		return commands[len(commands)-1]
	}

	require.NoError(t, limiter.Enforce(recorded, "agent", recordOnly(member)))
	require.Equal(t, "commit", last())

	before := snapshot(t, db)

	require.NoError(t, limiter.Enforce(recorded, "agent", recordOnly(member)))
	require.Equal(t, "rollback", last())
	require.Equal(t, before, snapshot(t, db))

	// A denial finds out when to come back once its locks are free.
	statements.reset()
	requireDenied(t, limiter.Enforce(recorded, "another", maxAgents(member, 2)), limiter.LimitAgents)
	require.Equal(t, []string{"begin", "select", "select", "with", "rollback", "with"}, statements.commands())
	require.Equal(t, before, snapshot(t, db))
}

func TestEnforcingAgainWithNothingToChangeWritesNothing(t *testing.T) {
	t.Parallel()

	db := setup(t)
	rules := []limiter.Rule{
		maxAgents(tenant, 1), maxTokens(member, 1000), maxEvals(limiter.Everyone(), 5),
		recordOnly(limiter.Identity{"tenant": "acme", "seats": 1.0}),
	}
	require.NoError(t, limiter.Enforce(db, "agent", rules...))

	// Neither the rules' order, nor how a number is written, nor their limits are part
	// of what is recorded.
	rules[0], rules[3] = recordOnly(limiter.Identity{"seats": 1, "tenant": "acme"}), maxAgents(tenant, 7)

	before := snapshot(t, db)

	for range 3 {
		require.NoError(t, limiter.Enforce(db, "agent", rules...))
		require.NoError(t, db.Transaction(func(tx *gorm.DB) error { return limiter.Enforce(tx, "agent", rules...) }))
	}

	require.Len(t, before, 5)
	require.Equal(t, before, snapshot(t, db))
}

func TestARetryAfterALostReplyChangesNothing(t *testing.T) {
	t.Parallel()

	db := setup(t)
	rule := limiter.Rule{Identity: tenant, Policy: limiter.Policy{Window: window, MaxAgents: limiter.Max(1), MaxRunningAgents: limiter.Max(1)}}
	require.NoError(t, limiter.Enforce(db, "agent", rule))

	before := find(t, db, "agent")

	require.NoError(t, limiter.Enforce(db, "agent", rule))

	after := find(t, db, "agent")
	require.WithinDuration(t, *before.LeaseExpiresAt, *after.LeaseExpiresAt, 10*time.Second)

	after.LeaseExpiresAt = before.LeaseExpiresAt
	require.Equal(t, before, after)
}
