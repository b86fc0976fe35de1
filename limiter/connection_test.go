package limiter_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// Every kind of statement of the package, in every way in which pgx can send it.
func TestEveryModeOfTheDriverAndOfGORM(t *testing.T) {
	t.Parallel()

	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()

			requireWorkingLimiter(t, pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.Database(t), "default_query_exec_mode", mode)))
		})
	}

	for name, config := range map[string]*gorm.Config{
		"PrepareStmt":              withPrepareStmt(),
		"SkipDefaultTransaction":   {SkipDefaultTransaction: true},
		"DisableNestedTransaction": {DisableNestedTransaction: true},
		"TranslateError":           {TranslateError: true},
		"everything":               {SkipDefaultTransaction: true, DisableNestedTransaction: true, TranslateError: true, QueryFields: true, AllowGlobalUpdate: true, CreateBatchSize: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			requireWorkingLimiter(t, pgtest.Open(t, config))
		})
	}

	t.Run("PreferSimpleProtocol", func(t *testing.T) {
		t.Parallel()

		db, err := gorm.Open(postgres.New(postgres.Config{DSN: pgtest.Database(t), PreferSimpleProtocol: true}), &gorm.Config{Logger: logger.Discard})
		require.NoError(t, err)

		closeAfter(t, db)
		requireWorkingLimiter(t, db)
	})
}

// requireWorkingLimiter goes through everything that the package sends to a database
// without tables.
func requireWorkingLimiter(t *testing.T, db *gorm.DB) {
	t.Helper()

	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))

	identity := limiter.Identity{"tenant": `a "quoted" \ one?`, "seats": 1.5, "paying": true, "@name": "$1"}
	rule := limiter.Rule{Identity: identity, Policy: limiter.Policy{
		Window: window, MaxAgents: limiter.Max(2), MaxRunningAgents: limiter.Max(1), MaxTokens: limiter.Max(10), MaxEvals: limiter.Max(5),
	}}
	everyone := maxAgents(limiter.Everyone(), 3)

	require.NoError(t, limiter.Enforce(db, "first", rule, everyone))
	require.NoError(t, limiter.Enforce(db, "first", rule, everyone))
	requireDenied(t, limiter.Enforce(db, "second", rule, everyone), limiter.LimitRunningAgents)
	require.NoError(t, limiter.Release(db, "first"))
	require.NoError(t, limiter.Enforce(db, "second", rule, everyone))
	requireDenied(t, limiter.Enforce(db, "third", everyone, rule), limiter.LimitAgents, limiter.LimitRunningAgents)

	// A turn whose lease is over.
	change(t, db, "second", map[string]any{"run_id": "run", "lease_expires_at": ago(time.Second), "reserved_tokens": 10})
	require.NoError(t, limiter.Enforce(db, "first", rule))
	require.Nil(t, find(t, db, "second").LeaseExpiresAt)

	// In the caller's transaction, a first use of an identity included.
	require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
		requireDenied(t, limiter.Enforce(tx, "third", rule), limiter.LimitAgents, limiter.LimitRunningAgents)
		require.NoError(t, limiter.Enforce(tx, "third", everyone, recordOnly(member)))

		return limiter.Release(tx, "first")
	}))

	require.NoError(t, limiter.EnforceAll(db,
		limiter.Admission{AgentID: "first", Rules: []limiter.Rule{everyone, maxTokens(identity, 10)}},
		limiter.Admission{AgentID: "second", Rules: []limiter.Rule{everyone, maxTokens(otherTenant, 10)}},
	))
	require.Equal(t, []string{"first", "second", "third"}, agentIDs(t, db))
	require.Len(t, registered(t, db), 4)
}

// impatientPlugin has a short connection timeout, for tests that run into it.
func impatientPlugin(timeout time.Duration) plugin {
	return plugin{settings: database.Settings{ConnectionTimeout: timeout}}
}

func TestACapturedDBInsideATransactionIsErrNoConnection(t *testing.T) {
	t.Parallel()

	for _, warm := range []bool{false, true} {
		t.Run(fmt.Sprintf("registry seen before: %t", warm), func(t *testing.T) {
			t.Parallel()

			db := setupWith(t, impatientPlugin(150*time.Millisecond), pgtest.MaxOpenConnections(1))
			if warm {
				require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))
			}

			ctx := impatient(t)
			started := time.Now()

			require.NoError(t, db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
				captured := db.WithContext(ctx)

				err := limiter.Enforce(captured, "agent", recordOnly(tenant))
				require.ErrorIs(t, err, limiter.ErrNoConnection)
				require.ErrorContains(t, err, "captured", "the cause")
				require.ErrorContains(t, err, "pass the hook's tx", "the remedy")
				require.ErrorContains(t, err, "150ms")
				require.NotErrorIs(t, err, limiter.ErrExceeded)

				require.ErrorIs(t, limiter.Release(captured, "first"), limiter.ErrNoConnection)

				return limiter.Enforce(tx, "agent", recordOnly(tenant))
			}))

			require.Less(t, time.Since(started), 4*time.Second)
			require.Contains(t, agentIDs(t, db), "agent")
		})
	}
}

func TestAContextThatEndsBeforeTheConnectionTimeoutWins(t *testing.T) {
	t.Parallel()

	for _, warm := range []bool{false, true} {
		t.Run(fmt.Sprintf("registry seen before: %t", warm), func(t *testing.T) {
			t.Parallel()

			db := setupWith(t, impatientPlugin(time.Minute), pgtest.MaxOpenConnections(1))
			if warm {
				require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))
			}

			begin(t, db)

			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()

			for _, err := range []error{
				limiter.Enforce(db.WithContext(ctx), "agent", recordOnly(tenant)),
				limiter.Release(db.WithContext(ctx), "first"),
			} {
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.NotErrorIs(t, err, limiter.ErrNoConnection)
			}
		})
	}
}

func TestTheConnectionTimeoutDoesNotBoundTheCallItself(t *testing.T) {
	t.Parallel()

	db := setupWith(t, impatientPlugin(time.Second))
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

	tx := begin(t, db)
	require.NoError(t, begin(t, db).Rollback().Error, "another connection is open already")
	require.NoError(t, limiter.Enforce(tx, "second", recordOnly(tenant)))

	verdict := inBackground(func() error { return limiter.Enforce(db, "third", recordOnly(tenant)) })

	waitForLockWaiters(t, db, 1)
	time.Sleep(1200 * time.Millisecond)
	require.NoError(t, tx.Commit().Error)
	require.NoError(t, <-verdict)
}

func TestAContextThatEndsWhileTheCallWaitsForALock(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

	tx := begin(t, db)
	require.NoError(t, limiter.Enforce(tx, "second", recordOnly(tenant)))

	ctx, cancel := context.WithCancel(t.Context())
	verdict := inBackground(func() error { return limiter.Enforce(db.WithContext(ctx), "third", recordOnly(tenant)) })

	waitForLockWaiters(t, db, 1)
	cancel()
	require.ErrorIs(t, <-verdict, context.Canceled)
	require.NoError(t, tx.Commit().Error)
	require.Equal(t, []string{"first", "second"}, agentIDs(t, db))
}

func TestACallWhoseConnectionIsLostIsMadeAgain(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

	tx := begin(t, db)
	require.NoError(t, limiter.Enforce(tx, "second", recordOnly(tenant)))

	verdict := inBackground(func() error { return limiter.Enforce(db, "third", recordOnly(tenant)) })

	waitForLockWaiters(t, db, 1)
	terminateLockWaiters(t, db)
	waitForLockWaiters(t, db, 1)
	require.NoError(t, tx.Commit().Error)
	require.NoError(t, <-verdict)
	require.Equal(t, []string{"first", "second", "third"}, agentIDs(t, db))
}

func TestALostConnectionInACallersTransactionIsRetryable(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

	holder := begin(t, db)
	require.NoError(t, limiter.Enforce(holder, "second", recordOnly(tenant)))

	waiter := begin(t, db)
	verdict := inBackground(func() error { return limiter.Enforce(waiter, "third", recordOnly(tenant)) })

	waitForLockWaiters(t, db, 1)
	terminateLockWaiters(t, db)

	err := <-verdict
	require.Error(t, err)
	require.True(t, limiter.Retryable(err), "%v", err)
	require.NotErrorIs(t, err, limiter.ErrExceeded)
}

func terminateLockWaiters(t *testing.T, db *gorm.DB) {
	t.Helper()

	require.NoError(t, db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock'`).Error)
}

func TestAnUnreachableDatabaseIsAnError(t *testing.T) {
	t.Parallel()

	unreachable, err := gorm.Open(postgres.Open("host=127.0.0.1 port=1 user=nobody connect_timeout=2 sslmode=disable"),
		&gorm.Config{Logger: logger.Discard, DisableAutomaticPing: true})
	require.NoError(t, err)

	closeAfter(t, unreachable)

	closed := setup(t)
	require.NoError(t, limiter.Enforce(closed, "first", recordOnly(tenant)))

	pool, err := closed.DB()
	require.NoError(t, err)
	require.NoError(t, pool.Close())

	for name, db := range map[string]*gorm.DB{"nobody listens": unreachable, "the pool is closed": closed} {
		decision, err := limiter.Admit(db.WithContext(impatient(t)), "agent", recordOnly(tenant))
		require.Error(t, err, name)
		require.Nil(t, decision, name)
		require.NotErrorIs(t, err, limiter.ErrExceeded, name)
		require.NotErrorIs(t, err, context.DeadlineExceeded, "%s: it need not wait", name)
		require.Error(t, limiter.Release(db, "agent"), name)
	}

	require.True(t, limiter.Retryable(limiter.Enforce(unreachable, "agent", recordOnly(tenant))))
}
