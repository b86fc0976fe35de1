package legion_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

func TestShutdownWaitsForTurnsThatEndThemselves(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	ended := make(chan error, 1)
	working := make(chan struct{})

	go func() {
		ended <- plugin.Run(t.Context(), "one", under(runningRule(1), tokensRule(100)), func(ctx context.Context, turn *legion.Turn) error {
			close(working)
			<-ctx.Done()

			// What it still has to tell is kept.
			if err := turn.Record(ctx, models.Usage{TotalTokens: 3}); err != nil {
				return err
			}

			return context.Cause(ctx)
		})
	}()

	<-working
	require.NoError(t, plugin.Shutdown(t.Context()))
	require.ErrorIs(t, <-ended, legion.ErrShutdown)
	requireIdle(t, db, "one")
	require.EqualValues(t, 3, tokensOf(t, db, "one"))

	_, err := plugin.Begin(t.Context(), "two", legion.TurnOptions{})
	require.ErrorIs(t, err, legion.ErrShutdown)
	_, err = plugin.Recover(t.Context(), legion.RecoverOptions{Rules: noRules}, doNothing)
	require.NoError(t, err, "there was nothing to recover")
	require.NoError(t, plugin.Shutdown(t.Context()), "again")
	require.NoError(t, limiter.Enforce(db, "two", runningRule(1)), "the limiter is not affected")
}

func noRules(context.Context, *models.LegionAgent) ([]limiter.Rule, error) { return nil, nil }

func TestShutdownEndsTurnsThatDoNotStopInTime(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	require.NoError(t, turn.Checkpoint(t.Context(), []byte("state")))

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()

	require.NoError(t, plugin.Shutdown(ctx))
	require.ErrorIs(t, context.Cause(turn.Context()), legion.ErrShutdown)
	requireIdle(t, db, "one")
	require.Equal(t, []byte("state"), rowOf(t, db, "one").ConversationState)
	require.NoError(t, turn.End(t.Context()))
}

func TestShutdownReportsTurnsThatItCouldNotEnd(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)

	locker := db.Begin()
	t.Cleanup(func() { locker.Rollback() })
	require.NoError(t, locker.Exec("SELECT FROM legion_agents FOR UPDATE").Error)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, plugin.Shutdown(ctx), context.Canceled)

	require.NoError(t, locker.Rollback().Error)
	require.NoError(t, turn.End(t.Context()))
}

func TestShutdownDoesNotWaitForEverBehindAnEndThatDoes(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)

	locker := db.Begin()
	t.Cleanup(func() { locker.Rollback() })
	require.NoError(t, locker.Exec("SELECT FROM legion_agents FOR UPDATE").Error)

	ended := make(chan error, 1)

	go func() { ended <- turn.End(t.Context()) }()

	requireWaiting(t, db)

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()

	shut := make(chan error, 1)

	go func() { shut <- plugin.Shutdown(ctx) }()

	select {
	case err := <-shut:
		require.ErrorIs(t, err, context.DeadlineExceeded)
	case <-time.After(longest / 2):
		require.Fail(t, "Shutdown still waits", "its context ended long ago")
	}

	require.Empty(t, ended, "the End that came first still waits")
	require.NoError(t, locker.Rollback().Error)
	require.NoError(t, <-ended)
	requireIdle(t, db, "one")
}

func TestShutdownDoesNotWaitForATurnWhoseEndHasFailed(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	agents, err := db.DB()
	require.NoError(t, err)

	fail := func() {
		_, err := agents.ExecContext(t.Context(), "ALTER TABLE legion_agents ADD CONSTRAINT busy CHECK (status <> 'idle') NOT VALID")
		require.NoError(t, err)
	}
	heal := func() {
		_, err := agents.ExecContext(t.Context(), "ALTER TABLE legion_agents DROP CONSTRAINT busy")
		require.NoError(t, err)
	}

	require.Error(t, plugin.Run(t.Context(), "before", under(runningRule(2)), func(context.Context, *legion.Turn) error {
		fail()

		return nil
	}))
	heal()

	// It fails once more while Shutdown waits for it.
	ended := make(chan error, 1)
	working := make(chan struct{})

	go func() {
		ended <- plugin.Run(t.Context(), "meanwhile", under(runningRule(2)), func(ctx context.Context, _ *legion.Turn) error {
			close(working)
			<-ctx.Done()
			fail()

			return nil
		})
	}()

	<-working

	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), longest)
	defer cancel()

	require.Error(t, plugin.Shutdown(ctx), "they cannot be ended")
	require.Less(t, time.Since(began), longest/2)
	require.Error(t, <-ended)

	heal()
	require.NoError(t, plugin.Shutdown(ctx))
	require.Less(t, time.Since(began), longest/2)
	requireIdle(t, db, "before")
	requireIdle(t, db, "meanwhile")
}

func TestShutdownEndsABeginThatWaits(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	require.NoError(t, limiter.Enforce(db, "another", runningRule(10)))

	locker := db.Begin()
	t.Cleanup(func() { locker.Rollback() })
	require.NoError(t, locker.Exec("SELECT FROM legion_agents_identities FOR UPDATE").Error)

	began := make(chan error, 1)

	go func() {
		_, err := plugin.Begin(t.Context(), "one", under(runningRule(10)))
		began <- err
	}()

	requireWaiting(t, db)
	require.NoError(t, plugin.Shutdown(t.Context()))
	require.ErrorIs(t, <-began, legion.ErrShutdown)
	require.NoError(t, locker.Rollback().Error)
}

// requireWaiting waits until a session of the database waits for a lock.
func requireWaiting(t *testing.T, db *gorm.DB) {
	t.Helper()

	require.Eventually(t, func() bool {
		var waiting int64
		err := db.Raw("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'").Scan(&waiting).Error

		return err == nil && waiting > 0
	}, longest, 5*time.Millisecond)
}

func TestABeginBehindAnotherOneEndsWithItsContext(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t, pgtest.MaxOpenConnections(1))
	plugin := usePlugin(t, db, legion.WithConnectionTimeout(longest))
	captive := db.Begin() // the pool's only connection

	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)

	go func() {
		_, err := plugin.Begin(ctx, "one", legion.TurnOptions{})
		first <- err
	}()

	pool, err := db.DB()
	require.NoError(t, err)
	require.Eventually(t, func() bool { return pool.Stats().WaitCount > 0 }, longest, time.Millisecond)

	behind, end := context.WithCancel(t.Context())
	end()

	_, err = plugin.Begin(behind, "two", legion.TurnOptions{})
	require.ErrorIs(t, err, context.Canceled)
	require.Empty(t, first, "the first one still waits")

	cancel()
	require.ErrorIs(t, <-first, context.Canceled)
	require.NoError(t, captive.Rollback().Error)
}

func TestABeginThatIsCancelledLeavesNoSlot(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	for i := range 60 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*100*time.Microsecond)

		turn, err := plugin.Begin(ctx, "one", under(runningRule(1)))
		cancel()

		if err == nil {
			require.NoError(t, turn.End(t.Context()))
		}

		require.Eventually(t, func() bool { return limiter.Enforce(db, "two", runningRule(1)) == nil }, longest, time.Millisecond)
		require.NoError(t, limiter.Release(db, "two"))
	}
}
