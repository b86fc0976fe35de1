package legion_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// shortLease is long enough for a renewal on a busy machine, and short enough for a test
// to outlast several.
const shortLease = 2 * time.Second

// longest bounds what a test waits for.
const longest = time.Minute

// requireHolds is for turns that have kept their slot for some leases.
func requireHolds(t *testing.T, turn *legion.Turn, leases float64) {
	t.Helper()

	select {
	case <-turn.Context().Done():
		require.FailNow(t, "the turn ended", context.Cause(turn.Context()))
	case <-time.After(time.Duration(leases * float64(shortLease))):
	}
}

// requireLost waits for the turn to lose its lease.
func requireLost(t *testing.T, turn *legion.Turn) {
	t.Helper()

	select {
	case <-turn.Context().Done():
		require.ErrorIs(t, context.Cause(turn.Context()), legion.ErrLeaseLost)
	case <-time.After(longest):
		require.FailNow(t, "the turn did not notice that it lost its lease")
	}
}

func TestATurnOfManyLeasesKeepsItsSlot(t *testing.T) {
	t.Parallel()

	for name, disturb := range map[string]func(t *testing.T, db *gorm.DB){
		"undisturbed": func(*testing.T, *gorm.DB) {},
		"the pool used up": func(t *testing.T, db *gorm.DB) {
			t.Helper()

			for range 2 {
				tx := db.Begin()
				require.NoError(t, tx.Error)
				t.Cleanup(func() { tx.Rollback() })
			}
		},
		"another agent's row locked": func(t *testing.T, db *gorm.DB) {
			t.Helper()

			tx := db.Begin()
			t.Cleanup(func() { tx.Rollback() })
			require.NoError(t, tx.Exec("SELECT FROM legion_agents WHERE agent_id = 'a neighbour' FOR UPDATE").Error)
		},
		"its row referenced by an open INSERT": func(t *testing.T, db *gorm.DB) {
			t.Helper()

			require.NoError(t, db.Exec("CREATE TABLE messages (agent_id text REFERENCES legion_agents)").Error)

			tx := db.Begin()
			t.Cleanup(func() { tx.Rollback() })
			require.NoError(t, tx.Exec("INSERT INTO messages VALUES ('one')").Error)
		},
		"its connection cut again and again": func(t *testing.T, db *gorm.DB) {
			t.Helper()

			done := make(chan struct{})

			var cutting sync.WaitGroup

			cutting.Go(func() {
				for {
					select {
					case <-done:
						return
					case <-time.After(shortLease / 2):
						db.Exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'WITH asked AS%' AND datname = current_database() AND pid <> pg_backend_pid()")
					}
				}
			})
			t.Cleanup(func() {
				close(done)
				cutting.Wait()
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := pgtest.Open(t, pgtest.MaxOpenConnections(2))
			plugin := usePlugin(t, db, legion.WithLease(shortLease), legion.WithConnectionTimeout(longest))
			neighbour, err := plugin.Begin(t.Context(), "a neighbour", under(runningRule(2)))
			require.NoError(t, err)

			turn, err := plugin.Begin(t.Context(), "one", under(runningRule(2)))
			require.NoError(t, err)

			t.Run("disturbed", func(t *testing.T) {
				disturb(t, db)
				requireHolds(t, turn, 4)
			})

			require.ErrorIs(t, limiter.Enforce(db, "two", runningRule(1)), limiter.ErrExceeded)
			require.NoError(t, turn.End(t.Context()))

			if name == "another agent's row locked" {
				requireLost(t, neighbour) // only the locked one
			} else {
				require.NoError(t, neighbour.Context().Err())
			}

			require.NoError(t, neighbour.End(t.Context()))
		})
	}
}

// A Begin that has waited for as long as a lease, for its locks or for its row.
func TestATurnThatWaitedToBeginHasAWholeLease(t *testing.T) {
	t.Parallel()

	for name, options := range map[string][]legion.Option{"statements": nil, "the server's function": {legion.WithServerFunction()}} {
		for _, table := range []string{"legion_agents_identities", "legion_agents"} {
			t.Run(name+" and "+table, func(t *testing.T) {
				t.Parallel()

				const lease = 2 * time.Second

				db, plugin := useTurns(t, append(options, legion.WithLease(lease))...)
				require.NoError(t, limiter.Enforce(db, "one", tokensRule(10)))

				locker := db.Begin()
				t.Cleanup(func() { locker.Rollback() })
				require.NoError(t, locker.Exec("SELECT FROM "+table+" FOR UPDATE").Error)

				began := make(chan *legion.Turn, 1)

				go func() {
					turn, err := plugin.Begin(t.Context(), "one", under(tokensRule(10)))
					began <- turn

					if err != nil {
						t.Error(err)
					}
				}()

				requireWaiting(t, db)
				time.Sleep(lease + lease/10)
				require.NoError(t, locker.Rollback().Error)

				turn := <-began
				require.NotNil(t, turn)
				time.Sleep(lease / 2)
				require.NoError(t, context.Cause(turn.Context()))
				require.NoError(t, turn.End(t.Context()))
			})
		}
	}
}

func TestALockedRowIsRenewedAsSoonAsItIsFree(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t, legion.WithLease(shortLease))

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)

	// From before the first renewal until shortly before the lease is over.
	tx := db.Begin()
	t.Cleanup(func() { tx.Rollback() })
	require.NoError(t, tx.Exec("SELECT FROM legion_agents FOR UPDATE").Error)
	requireHolds(t, turn, 0.6)
	require.NoError(t, tx.Rollback().Error)

	requireHolds(t, turn, 2)
	require.NoError(t, turn.End(t.Context()))
}

func TestALostLeaseEndsTheTurn(t *testing.T) {
	t.Parallel()

	for name, lose := range map[string]string{
		"it is over":        "UPDATE legion_agents SET lease_expires_at = now() - interval '1 millisecond'",
		"it was revoked":    "UPDATE legion_agents SET lease_expires_at = NULL",
		"another run began": "UPDATE legion_agents SET run_id = 'another'",
		"it was ended":      "UPDATE legion_agents SET status = 'idle', lease_expires_at = NULL",
		"its row is gone":   "DELETE FROM legion_agents",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, plugin := useTurns(t, legion.WithLease(shortLease))

			turn, err := plugin.Begin(t.Context(), "one", legion.TurnOptions{Rules: []limiter.Rule{runningRule(1)}, PerStep: true})
			require.NoError(t, err)

			child, err := plugin.Begin(turn.Context(), "child", legion.TurnOptions{Rules: []limiter.Rule{}})
			if err == nil {
				require.NoError(t, child.End(t.Context()))
			}

			require.NoError(t, db.Exec(lose+" WHERE agent_id = 'one'").Error)
			requireLost(t, turn)
			require.ErrorIs(t, turn.Checkpoint(t.Context(), []byte("late")), legion.ErrLeaseLost)

			err = turn.End(t.Context())

			switch name {
			case "it is over", "it was ended":
				require.NoError(t, err) // nobody has taken it
				requireIdle(t, db, "one")
			default:
				require.ErrorIs(t, err, legion.ErrLeaseLost)
				require.ErrorIs(t, turn.End(t.Context()), legion.ErrLeaseLost, "again")
			}
		})
	}
}

func TestATurnThatCannotBeRenewedEndsBeforeItsLease(t *testing.T) {
	t.Parallel()

	// The application's pool works, and the plugin's own connection does not.
	refused := func(context.Context) (*pgx.Conn, error) {
		return nil, fmt.Errorf("refused: %w", context.DeadlineExceeded)
	}
	db, plugin := useTurns(t, legion.WithLease(shortLease), legion.WithConnect(refused))

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	requireLost(t, turn)

	var left float64
	require.NoError(t, db.Raw("SELECT extract(epoch FROM lease_expires_at - clock_timestamp()) FROM legion_agents").Scan(&left).Error)
	require.Greater(t, left, -shortLease.Seconds()/4, "it noticed in time")

	// It is over, and nobody has taken the slot: it ends like any other.
	require.NoError(t, turn.End(t.Context()))
	requireIdle(t, db, "one")
}

func TestOneStatementRenewsAllTurnsOfAProcess(t *testing.T) {
	t.Parallel()

	const turns = 1000

	dsn := pgtest.Database(t)
	tracer := &countingTracer{}
	lease := 4500 * time.Millisecond

	db := pgtest.OpenDSN(t, dsn)
	plugin := usePlugin(t, db, legion.WithLease(lease), legion.WithConnect(func(ctx context.Context) (*pgx.Conn, error) {
		config, err := pgx.ParseConfig(dsn)
		if err != nil {
			return nil, err
		}

		config.Tracer = tracer

		return pgx.ConnectConfig(ctx, config)
	}))

	begun := make([]*legion.Turn, turns)

	var beginning sync.WaitGroup

	for worker := range 8 {
		beginning.Go(func() {
			for i := worker; i < turns; i += 8 {
				turn, err := plugin.Begin(context.WithoutCancel(t.Context()), fmt.Sprint("agent ", i), legion.TurnOptions{})
				if err == nil {
					begun[i] = turn
				}
			}
		})
	}

	beginning.Wait()
	require.NotContains(t, begun, (*legion.Turn)(nil))

	statistics := func() (updates, hot int64) {
		require.NoError(t, db.Exec("SELECT pg_stat_clear_snapshot()").Error)
		require.NoError(t, db.Raw("SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'legion_agents'").Row().Scan(&updates, &hot))

		return updates, hot
	}

	renewalsBefore, started := tracer.queries.Load(), time.Now()

	require.Eventually(t, func() bool { return tracer.queries.Load() >= renewalsBefore+6 }, longest, 10*time.Millisecond)

	renewals := tracer.queries.Load() - renewalsBefore
	periods := time.Since(started).Seconds() / (lease.Seconds() / 3)
	require.InDelta(t, periods, float64(renewals), 1.5, "one statement a period, a little more often for the jitter")

	for _, turn := range begun {
		require.NoError(t, turn.Context().Err())
	}

	// The first rounds spread the rows over pages that have room. The statistics of a
	// backend arrive with some delay, so that they may hold several rounds.
	lastUpdates, lastHot := statistics()

	require.Eventually(t, func() bool {
		updates, hot := statistics()
		if updates-lastUpdates < turns {
			return false
		}

		share := float64(hot-lastHot) / float64(updates-lastUpdates)
		lastUpdates, lastHot = updates, hot

		return share > 0.95
	}, longest, 100*time.Millisecond, "renewals are heap-only updates")

	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()

	require.NoError(t, plugin.Shutdown(ctx))

	var running int64
	require.NoError(t, db.Model(&models.LegionAgent{}).Where("status = 'running'").Count(&running).Error)
	require.Zero(t, running)
	// That no goroutine is left is checked by pgtest.Main, once all tests have ended.
}

type countingTracer struct{ queries atomic.Int64 }

func (c *countingTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.queries.Add(1)

	return ctx
}

func (c *countingTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// patient returns how to make connections on which a statement that takes too long is not
// cancelled, as when the network has swallowed the request to cancel it.
func patient(dsn string) legion.Option {
	return legion.WithConnect(func(ctx context.Context) (*pgx.Conn, error) {
		config, err := pgx.ParseConfig(dsn)
		if err != nil {
			return nil, err
		}

		config.BuildContextWatcherHandler = func(*pgconn.PgConn) ctxwatch.Handler { return noCancel{} }

		return pgx.ConnectConfig(ctx, config)
	})
}

type noCancel struct{}

func (noCancel) HandleCancel(context.Context) {}
func (noCancel) HandleUnwatchAfterCancel()    {}

// stallRenewals makes half of the renewals take so long, between their look at the lease
// and their commit, that it may be over by then.
func stallRenewals(t *testing.T, db *gorm.DB, longest time.Duration) {
	t.Helper()

	require.NoError(t, db.Exec(fmt.Sprintf(`
		CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF random() < 0.5 THEN PERFORM pg_sleep(random() * %f); END IF;
			RETURN NEW;
		END $$;
		CREATE TRIGGER stall BEFORE UPDATE ON legion_agents FOR EACH ROW
			WHEN (NEW.status = 'running' AND OLD.run_id = NEW.run_id AND OLD.lease_expires_at < NEW.lease_expires_at) EXECUTE FUNCTION stall()`,
		longest.Seconds())).Error)
}

func TestARevokedSlotIsNeverHeldTwice(t *testing.T) {
	t.Parallel()

	const lease = 120 * time.Millisecond

	dsn := pgtest.Database(t)
	db := pgtest.OpenDSN(t, dsn)

	var plugins []*legion.Plugin
	for range 4 {
		plugins = append(plugins, usePlugin(t, pgtest.OpenDSN(t, dsn), legion.WithLease(lease), patient(dsn)))
	}

	stallRenewals(t, db, lease)

	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
	defer cancel()

	var (
		working                    sync.WaitGroup
		tries, begun, lost, shared atomic.Int64
	)

	for i, plugin := range plugins {
		for j := range 2 {
			working.Go(func() {
				for ctx.Err() == nil {
					tries.Add(1)

					turn, err := plugin.Begin(ctx, fmt.Sprint("agent ", i, j), under(runningRule(1)))
					if err != nil {
						continue
					}

					begun.Add(1)

					select {
					case <-turn.Context().Done():
						lost.Add(1)
						time.Sleep(lease * time.Duration(j)) // as one that does not notice at once
					case <-time.After(3 * lease):
					}

					_ = turn.End(context.WithoutCancel(ctx))
				}
			})
		}
	}

	// One statement is one snapshot, with one reading of the clock.
	for ctx.Err() == nil {
		var live int64

		err := db.WithContext(ctx).Raw(`WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
			SELECT count(*) FROM legion_agents, clock WHERE status = 'running' AND lease_expires_at > clock.now`).Scan(&live).Error
		if err == nil && live > 1 {
			shared.Add(1)
		}
	}

	working.Wait()
	t.Logf("%d tries, %d turns, of which %d lost their lease", tries.Load(), begun.Load(), lost.Load())
	require.Zero(t, shared.Load(), "moments at which two held the only slot")
	require.Positive(t, lost.Load())
}

func TestASlotIsRevokedThoughAnOpenTransactionReferencesItsAgent(t *testing.T) {
	t.Parallel()

	for name, options := range paths() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, plugin := useTurns(t, options...)
			crash(t, db, 0, "crashed")
			require.NoError(t, db.Exec("CREATE TABLE messages (agent_id text REFERENCES legion_agents)").Error)

			tx := db.Begin()
			t.Cleanup(func() { tx.Rollback() })
			require.NoError(t, tx.Exec("INSERT INTO messages VALUES ('crashed')").Error)

			ctx, cancel := context.WithTimeout(t.Context(), longest)
			defer cancel()

			require.NoError(t, limiter.Enforce(db.WithContext(ctx), "next", runningRule(1)))
			require.Nil(t, rowOf(t, db, "crashed").LeaseExpiresAt)
			require.NoError(t, limiter.Release(db, "next"))

			report, err := plugin.Recover(ctx, recoverUnder(runningRule(1)), func(context.Context, *legion.Turn) error { return nil })
			require.NoError(t, err)
			require.Equal(t, []string{"crashed"}, report.Resumed)
			require.NoError(t, tx.Commit().Error)
		})
	}
}

func TestCrashedAgentsBeginAgainUnderOverlappingRulesWithoutADeadlock(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	email := limiter.Rule{Identity: limiter.Identity{"email": "someone@example.com"}, Policy: limiter.Policy{Window: time.Hour, MaxRunningAgents: limiter.Max(1)}}

	for range 30 {
		require.NoError(t, db.Exec(`INSERT INTO legion_agents (agent_id, metadata, status, run_id, lease_expires_at)
			VALUES ('a', '{"tenant": "acme", "email": "someone@example.com"}', 'running', 'gone', now() - interval '1 second'),
			       ('b', '{"tenant": "acme", "email": "someone@example.com"}', 'running', 'gone too', now() - interval '1 second')
			ON CONFLICT (agent_id) DO UPDATE SET metadata = excluded.metadata, status = 'running', run_id = excluded.run_id, lease_expires_at = excluded.lease_expires_at`).Error)

		var begins sync.WaitGroup

		turns, errs := make([]*legion.Turn, 2), make([]error, 2)
		begins.Go(func() { turns[0], errs[0] = plugin.Begin(t.Context(), "a", under(runningRule(1))) })
		begins.Go(func() { turns[1], errs[1] = plugin.Begin(t.Context(), "b", under(email)) })
		begins.Wait()

		for i, err := range errs {
			if err == nil {
				require.NoError(t, turns[i].End(t.Context()))
			} else {
				require.ErrorIs(t, err, limiter.ErrExceeded)
			}
		}
	}

	var deadlocks int64
	require.NoError(t, db.Raw("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").Scan(&deadlocks).Error)
	require.Zero(t, deadlocks)
}
