package legion_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/plugin/dbresolver"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// useReplica makes a resolver plugin send the reads of db to the database of the DSN.
func useReplica(t *testing.T, db *gorm.DB, dsn string) {
	t.Helper()

	resolver := dbresolver.Register(dbresolver.Config{Replicas: []gorm.Dialector{postgres.Open(dsn)}})
	require.NoError(t, db.Use(resolver))

	primary, err := db.DB()
	require.NoError(t, err)

	t.Cleanup(func() {
		require.NoError(t, resolver.Call(func(pool gorm.ConnPool) error {
			if closer, ok := pool.(interface{ Close() error }); ok && pool != gorm.ConnPool(primary) {
				return closer.Close()
			}

			return nil
		}))
	})
}

// lagging is the DSN of a replica that has the tables and none of the rows.
func lagging(t *testing.T, options ...legion.Option) string {
	t.Helper()

	db := pgtest.Open(t)
	usePlugin(t, db, options...)

	return pgtest.DSN(db)
}

func TestTheServerFunctionIsCalledOnThePrimary(t *testing.T) {
	t.Parallel()

	db, plugin, statements := useFunction(t)
	readOnly := pgtest.WithParameter(pgtest.DSN(db), "default_transaction_read_only", "on")
	useReplica(t, db, readOnly)
	requireFunctionInUse(t, plugin, true)

	require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))

	statements.take()
	require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))
	require.Len(t, statements.take(), 1)
	require.ErrorIs(t, limiter.Enforce(db, "two", runningRule(1)), limiter.ErrExceeded)
	require.ErrorIs(t, limiter.Enforce(db, "two", runningRule(1)), limiter.ErrExceeded)

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	require.NoError(t, turn.End(t.Context()))

	another, behind, _ := useFunction(t)
	useReplica(t, another, lagging(t))
	requireFunctionInUse(t, behind, true)
	require.NoError(t, limiter.Enforce(another, "one", runningRule(1)))
	require.ErrorIs(t, limiter.Enforce(another, "two", runningRule(1)), limiter.ErrExceeded)
}

func TestATurnIsDecidedByThePrimary(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	useReplica(t, db, lagging(t))

	turn, err := plugin.Begin(t.Context(), "one", legion.TurnOptions{PerStep: true, Store: &memoryStore{}})
	require.NoError(t, err)
	require.NoError(t, turn.Checkpoint(t.Context(), []byte("state")))
	require.NoError(t, turn.End(t.Context()))

	turn, err = plugin.Begin(t.Context(), "one", legion.TurnOptions{})
	require.NoError(t, err)
	require.NoError(t, turn.Record(t.Context(), models.Usage{ID: "entry", TotalTokens: 1}))
	require.NoError(t, turn.Record(t.Context(), models.Usage{ID: "entry", TotalTokens: 1}))

	// The attempt whose reply was lost.
	require.NoError(t, db.Exec("UPDATE legion_agents SET status = 'idle', lease_expires_at = NULL").Error)
	require.NoError(t, turn.End(t.Context()))

	crash(t, db, 0, "one")

	report, err := plugin.Recover(t.Context(), recoverUnder(runningRule(1)), func(context.Context, *legion.Turn) error { return nil })
	require.NoError(t, err)
	require.Equal(t, []string{"one"}, report.Resumed, report.Left)
}
