package legion_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// useIdle is a plugin on a pool whose sessions the server ends when they are idle for that
// long, and a connection to the same database past it.
func useIdle(t *testing.T, parameter string, timeout time.Duration, options ...legion.Option) (direct, db *gorm.DB, plugin *legion.Plugin) {
	t.Helper()

	direct = pgtest.Open(t)
	require.NoError(t, migrateFor(direct, options))

	db = pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.DSN(direct), parameter, fmt.Sprint(timeout.Milliseconds())), pgtest.MaxOpenConnections(3))
	plugin = legion.New(append([]legion.Option{legion.WithObserver(nil)}, options...)...)
	require.NoError(t, db.Use(plugin))

	shutDownAfter(t, plugin, longest)

	return direct, db, plugin
}

func TestATransactionThatIsIdleTooLongLeavesNothing(t *testing.T) {
	t.Parallel()

	rules := []limiter.Rule{runningRule(1), tokensRule(1000)}
	append100 := func(tx *gorm.DB) error {
		_, err := store.For[models.LegionAgent](tx).AppendUsage(tx.Statement.Context, "warm", models.Usage{TotalTokens: 100})

		return err
	}
	enforce := func(tx *gorm.DB) error { return limiter.Enforce(tx, "one", rules...) }
	firstUse := func(tx *gorm.DB) error {
		return limiter.Enforce(tx, "new", limiter.Rule{Identity: limiter.Identity{"ip": "203.0.113.42"}, Policy: limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(1)}})
	}
	save := func(tx *gorm.DB) error {
		return store.For[models.LegionAgent](tx).Save(tx.Statement.Context, store.Patch{AgentID: "one", ConversationState: []byte("state")})
	}

	for name, options := range paths() {
		for step, calls := range map[string][2]func(tx *gorm.DB) error{
			"enforce, then commit":      {enforce, func(tx *gorm.DB) error { return tx.Commit().Error }},
			"enforce, then enforce":     {enforce, enforce},
			"enforce, then append":      {enforce, append100},
			"append, then enforce":      {append100, enforce},
			"append, then save":         {append100, save},
			"nothing, then enforce":     {func(tx *gorm.DB) error { return tx.Exec("SELECT 1").Error }, enforce},
			"a first use, then enforce": {firstUse, enforce},
		} {
			t.Run(name+", "+step, func(t *testing.T) {
				t.Parallel()

				direct, db, plugin := useIdle(t, "idle_in_transaction_session_timeout", 500*time.Millisecond, options...)
				require.NoError(t, plugin.Run(t.Context(), "warm", under(rules...), func(context.Context, *legion.Turn) error { return nil }))

				tx := db.Begin()
				require.NoError(t, calls[0](tx))
				requireNoTransaction(t, direct)

				err := calls[1](tx)
				require.Error(t, err)
				require.NotErrorIs(t, err, limiter.ErrExceeded)
				require.True(t, legion.Retryable(err), "%v", err)
				tx.Rollback()

				// No lock is held (that was waited for), no slot taken, no token counted.
				require.Zero(t, tokensOf(t, direct, "warm"))
				require.NoError(t, limiter.Enforce(db, "two", rules...))

				var rows int64
				require.NoError(t, direct.Model(&models.LegionAgent{}).Where("agent_id NOT IN ('warm', 'two')").Count(&rows).Error)
				require.Zero(t, rows)

				// The transaction as a whole, again.
				require.NoError(t, limiter.Release(db, "two"))
				require.Eventually(t, func() bool {
					return !legion.Retryable(db.Transaction(func(tx *gorm.DB) error { return errors.Join(append100(tx), enforce(tx)) }))
				}, longest, time.Millisecond)
				require.EqualValues(t, 100, tokensOf(t, direct, "warm"))

				pool, err := db.DB()
				require.NoError(t, err)
				require.Eventually(t, func() bool { return pool.Stats().InUse == 0 }, longest, time.Millisecond)
			})
		}
	}
}

// requireNoTransaction waits until the server has ended every transaction that was idle.
func requireNoTransaction(t *testing.T, db *gorm.DB) {
	t.Helper()

	require.Eventually(t, func() bool {
		var open, held int64

		err := db.Raw(`SELECT count(*) FILTER (WHERE state LIKE 'idle in transaction%'),
			(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
			FROM pg_stat_activity WHERE datname = current_database()`).Row().Scan(&open, &held)

		return err == nil && open == 0 && held == 0
	}, longest, 5*time.Millisecond)
}

// requireNoSession waits until the server has ended every session but the one that asks.
func requireNoSession(t *testing.T, db *gorm.DB) {
	t.Helper()

	require.Eventually(t, func() bool {
		var others int64

		err := db.Raw(`SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'`).Scan(&others).Error

		return err == nil && others == 0
	}, longest, 5*time.Millisecond)
}

func TestAPoolThatTheServerHasEndedServesTheNextCall(t *testing.T) {
	t.Parallel()

	rules := []limiter.Rule{runningRule(1), tokensRule(1000)}

	for name, options := range paths() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			direct, db, plugin := useIdle(t, "idle_session_timeout", 100*time.Millisecond, options...)
			agents := store.For[models.LegionAgent](db)

			var turn *legion.Turn

			for _, call := range []struct {
				name string
				call func() error
			}{
				{"a first use", func() error { return limiter.Enforce(db, "one", rules...) }},
				{"a repeated one", func() error { return limiter.Enforce(db, "one", rules...) }},
				{"release", func() error { return limiter.Release(db, "one") }},
				{"check", func() error { _, err := limiter.Check(db, "one", rules...); return err }},
				{"a caller's transaction", func() error {
					return db.Transaction(func(tx *gorm.DB) error {
						return errors.Join(limiter.Enforce(tx, "one", rules...), limiter.Release(tx, "one"))
					})
				}},
				{"begin", func() (err error) { turn, err = plugin.Begin(t.Context(), "turn", under(rules...)); return err }},
				{"record", func() error { return turn.Record(t.Context(), models.Usage{ID: "usage", TotalTokens: 7}) }},
				{"append", func() error {
					_, err := agents.AppendUsage(t.Context(), "turn", models.Usage{ID: "more", TotalTokens: 1})
					return err
				}},
				{"end", func() error { return turn.End(t.Context()) }},
				{"save", func() error {
					return agents.Save(t.Context(), store.Patch{AgentID: "turn", ConversationState: []byte("state")})
				}},
				{"get", func() error { _, err := agents.Get(t.Context(), "turn"); return err }},
				{"list", func() error { _, err := agents.List(t.Context(), 10); return err }},
				{"recover", func() error { _, err := plugin.Recover(t.Context(), recoverUnder(rules...), doNothing); return err }},
				{"delete", func() error { return agents.Delete(t.Context(), "one") }},
				{"prune", func() error { _, err := agents.Prune(t.Context(), time.Now().Add(-time.Hour)); return err }},
			} {
				fillPool(t, db)
				requireNoSession(t, direct)

				err := call.call()
				t.Logf("%s: %v", call.name, err)

				for attempts := 0; legion.Retryable(err) && attempts < 5; attempts++ {
					err = call.call()
				}

				require.NoError(t, err, call.name)
			}

			requireIdle(t, direct, "turn")
			require.EqualValues(t, 8, tokensOf(t, direct, "turn"))
			require.NoError(t, limiter.Enforce(direct, "two", rules...))

			pool, err := db.DB()
			require.NoError(t, err)
			require.Eventually(t, func() bool { return pool.Stats().InUse == 0 }, longest, time.Millisecond)
		})
	}
}

// fillPool leaves the pool with as many idle connections as it takes.
func fillPool(t *testing.T, db *gorm.DB) {
	t.Helper()

	pool, err := db.DB()
	require.NoError(t, err)

	taken := make([]*sql.Conn, pool.Stats().MaxOpenConnections)

	for i := range taken {
		taken[i], err = pool.Conn(t.Context())
		require.NoError(t, err)
	}

	for _, connection := range taken {
		_ = connection.Close() // the server may have ended it
	}
}

func TestATurnWhoseSessionsTheServerEndsIsRenewed(t *testing.T) {
	t.Parallel()

	direct, _, plugin := useIdle(t, "idle_session_timeout", 100*time.Millisecond, legion.WithLease(shortLease))

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)

	// Between two renewals their connection is idle, too.
	requireHolds(t, turn, 3)
	require.ErrorIs(t, limiter.Enforce(direct, "two", runningRule(1)), limiter.ErrExceeded)
	require.NoError(t, turn.Record(t.Context(), models.Usage{TotalTokens: 7}))
	require.NoError(t, turn.End(t.Context()))
	requireIdle(t, direct, "one")
	require.EqualValues(t, 7, tokensOf(t, direct, "one"))
}
