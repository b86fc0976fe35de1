package limiter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

func TestReleaseGivesTheSlotBack(t *testing.T) {
	t.Parallel()

	db := setup(t)
	rule := maxRunning(tenant, 1)
	require.NoError(t, limiter.Enforce(db, "first", rule))
	before := find(t, db, "first")

	require.NoError(t, limiter.Release(db, "first"))

	released := find(t, db, "first")
	require.Equal(t, models.StatusIdle, released.Status)
	require.Nil(t, released.LeaseExpiresAt)
	require.Equal(t, before.Metadata, released.Metadata)
	require.Equal(t, before.StartedAt, released.StartedAt)

	require.NoError(t, limiter.Enforce(db, "second", rule))
	requireDenied(t, limiter.Enforce(db, "first", rule), limiter.LimitRunningAgents)
}

func TestReleaseLeavesAnAgentWithoutASlotAlone(t *testing.T) {
	t.Parallel()

	db := setup(t)
	recorded, statements := openRecorded(t, db)
	revoked := turn(t, "turn without a lease", tenant, time.Hour)
	revoked.LeaseExpiresAt = nil
	insert(t, db,
		models.LegionAgent{AgentID: "idle", Metadata: document(t, tenant)},
		models.LegionAgent{AgentID: "never limited"},
		models.LegionAgent{AgentID: "idle after a turn", Metadata: document(t, tenant), RunID: pointer("run")},
		turn(t, "turn whose lease is over", tenant, -time.Second),
		revoked,
	)

	before := snapshot(t, db)

	for _, agentID := range agentIDs(t, db) {
		statements.reset()
		require.NoError(t, limiter.Release(recorded, agentID), agentID)

		commands := statements.commands()
		require.Equal(t, "rollback", commands[len(commands)-1], "nothing was written")
	}

	require.Equal(t, before, snapshot(t, db))
}

func TestReleaseEndsAnUnownedSlotThatIsOverOrHidden(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, unowned(t, "over", tenant, -time.Second), unowned(t, "deleted", tenant, time.Hour))
	change(t, db, "deleted", map[string]any{"deleted_at": time.Now()})
	requireDenied(t, limiter.Enforce(db, "agent", maxRunning(tenant, 1)), limiter.LimitRunningAgents)

	for _, agentID := range []string{"over", "deleted"} {
		require.NoError(t, limiter.Release(db, agentID))
		require.Equal(t, models.StatusIdle, find(t, db, agentID).Status)
		require.Nil(t, find(t, db, agentID).LeaseExpiresAt)
	}

	require.True(t, find(t, db, "deleted").DeletedAt.Valid)
	require.NoError(t, limiter.Enforce(db, "agent", maxRunning(tenant, 1)))
}

func TestReleaseOfALiveTurnIsErrAgentRunning(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, turn(t, "turn", tenant, time.Hour))
	before := snapshot(t, db)

	err := limiter.Release(db, "turn")
	require.ErrorIs(t, err, limiter.ErrAgentRunning)
	require.EqualError(t, err, "legion: the agent is running a turn: end the turn to give its slot back")
	require.ErrorIs(t, limiter.Release(begin(t, db), "turn"), limiter.ErrAgentRunning)
	require.Equal(t, before, snapshot(t, db))
}

func TestReleaseOfAnUnknownAgentIsErrNotFound(t *testing.T) {
	t.Parallel()

	db := setup(t)
	err := limiter.Release(db, "nobody")
	require.ErrorIs(t, err, limiter.ErrNotFound)
	require.ErrorIs(t, err, gorm.ErrRecordNotFound)
	require.Empty(t, agentIDs(t, db))
}

func TestReleaseInACallersTransactionTakesEffectWhenThatCommits(t *testing.T) {
	t.Parallel()

	db := setup(t, pgtest.MaxOpenConnections(2))
	rule := maxRunning(tenant, 1)
	require.NoError(t, limiter.Enforce(db, "first", rule))

	tx := begin(t, db)
	require.NoError(t, limiter.Release(tx, "first"))
	require.Equal(t, models.StatusRunning, find(t, db, "first").Status)
	require.NoError(t, limiter.Enforce(tx, "second", rule), "in the transaction there is room already")
	require.NoError(t, tx.Rollback().Error)
	require.Equal(t, models.StatusRunning, find(t, db, "first").Status)
	requireDenied(t, limiter.Enforce(db, "second", rule), limiter.LimitRunningAgents)

	require.NoError(t, db.Transaction(func(tx *gorm.DB) error { return limiter.Release(tx, "first") }))
	require.NoError(t, limiter.Enforce(db, "second", rule))
}

func TestAnErrorOfReleaseLeavesTheCallersTransactionUsable(t *testing.T) {
	t.Parallel()

	db := setupNotes(t)
	insert(t, db, turn(t, "turn", tenant, time.Hour))

	tx := begin(t, db)
	require.ErrorIs(t, limiter.Release(tx, "nobody"), limiter.ErrNotFound)
	require.ErrorIs(t, limiter.Release(tx, "turn"), limiter.ErrAgentRunning)
	require.ErrorIs(t, limiter.Release(tx, ""), limiter.ErrInvalidAgentID)
	require.NoError(t, tx.Create(&note{Text: "after"}).Error)

	require.NoError(t, db.WithContext(impatient(t)).Exec("UPDATE legion_agents SET agent_type = 'chat' WHERE agent_id = 'turn'").Error,
		"the row is free as well")

	require.NoError(t, tx.Exec("ALTER TABLE legion_agents RENAME TO renamed").Error)
	require.ErrorIs(t, limiter.Release(tx, "turn"), limiter.ErrNotMigrated)
	require.NoError(t, tx.Create(&note{Text: "after"}).Error)
}
