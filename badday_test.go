package legion_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// A load is agents at work while something goes wrong, with a book of what was
// acknowledged to them.
type load struct {
	plugin *legion.Plugin
	rule   limiter.Rule

	mutex sync.Mutex
	// acknowledged are the tokens of each agent whose Record has returned nil; attempted
	// are those of all that were tried.
	acknowledged, attempted map[string]int64

	turns, failed atomic.Int64
}

const loadSlots = 4

// startLoad runs workers until the returned function is called.
func startLoad(t *testing.T, plugin *legion.Plugin, workers int) (*load, func()) {
	t.Helper()

	started := &load{
		plugin: plugin, acknowledged: map[string]int64{}, attempted: map[string]int64{},
		rule: limiter.Rule{Identity: acme, Policy: limiter.Policy{
			Window: time.Hour, MaxRunningAgents: limiter.Max(loadSlots), MaxTokens: limiter.Max(1_000_000),
		}},
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))

	var working sync.WaitGroup

	for worker := range workers {
		working.Go(func() {
			for turn := 0; ctx.Err() == nil; turn++ {
				started.work(ctx, fmt.Sprintf("agent %d-%d", worker, turn%5))
			}
		})
	}

	return started, func() {
		cancel()
		working.Wait()
	}
}

func (l *load) work(ctx context.Context, agentID string) {
	err := l.plugin.Run(ctx, agentID, legion.TurnOptions{Rules: []limiter.Rule{l.rule}, Reserve: 30}, func(ctx context.Context, turn *legion.Turn) error {
		l.turns.Add(1)

		for range 3 {
			tokens := 1 + rand.Int64N(10)
			l.book(l.attempted, agentID, tokens)

			if err := turn.Record(ctx, models.Usage{TotalTokens: tokens}); err != nil {
				return err
			}

			l.book(l.acknowledged, agentID, tokens)
		}

		return nil
	})
	if err != nil && !errors.Is(err, limiter.ErrExceeded) {
		l.failed.Add(1)
		time.Sleep(10 * time.Millisecond)
	}
}

func (l *load) book(where map[string]int64, agentID string, tokens int64) {
	l.mutex.Lock()
	defer l.mutex.Unlock()

	where[agentID] += tokens
}

// requireKept is what must hold after a bad day, of which all workers have ended.
func (l *load) requireKept(t *testing.T, db *gorm.DB, lease time.Duration) {
	t.Helper()

	require.Positive(t, l.turns.Load())

	// Every slot is free, one lease later at the latest.
	deadline := time.Now().Add(lease + longest)
	freed := func() bool {
		return limiter.Enforce(db, "a new one", limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Hour, MaxRunningAgents: limiter.Max(1)}}) == nil
	}

	for !freed() {
		require.True(t, time.Now().Before(deadline), "a slot is stuck")
		time.Sleep(50 * time.Millisecond)
	}

	require.NoError(t, limiter.Release(db, "a new one"))

	for agentID, acknowledged := range l.acknowledged {
		recorded := tokensOf(t, db, agentID)
		require.GreaterOrEqual(t, recorded, acknowledged, "an acknowledged token is lost")
		require.LessOrEqual(t, recorded, l.attempted[agentID], "a token counts twice")
	}
}

// watchLoad counts the moments at which more slots were held than there are.
func watchLoad(ctx context.Context, db *gorm.DB) (stop func() (snapshots, over int64)) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))

	var (
		watching        sync.WaitGroup
		snapshots, over int64
	)

	watching.Go(func() {
		for ctx.Err() == nil {
			var held int64

			err := db.WithContext(ctx).Raw(`WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
				SELECT count(*) FROM legion_agents, clock WHERE status = 'running' AND lease_expires_at > clock.now`).Scan(&held).Error
			if err == nil {
				snapshots++
			}

			if held > loadSlots {
				over++
			}

			time.Sleep(2 * time.Millisecond)
		}
	})

	return func() (int64, int64) {
		cancel()
		watching.Wait()

		return snapshots, over
	}
}

// paths are the two ways to decide.
func paths() map[string][]legion.Option {
	return map[string][]legion.Option{"statements": nil, "the server's function": {legion.WithServerFunction()}}
}

func TestAServerThatGoesDownUnderLoadLosesNothing(t *testing.T) {
	t.Parallel()

	const lease = 2 * time.Second

	for name, options := range paths() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			server, err := pgtest.Start(t.Context(), pgtest.WithDurability(), pgtest.WithRestarts())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, server.Stop()) })

			if err := server.Signal(syscall.Signal(0)); errors.Is(err, pgtest.ErrElsewhere) {
				t.Skip("the server is not this machine's to stop")
			}

			dsn, err := server.CreateDatabase(t.Context())
			require.NoError(t, err)

			db := pgtest.OpenDSN(t, dsn)
			plugin := usePlugin(t, db, append(options, legion.WithLease(lease))...)
			load, stop := startLoad(t, plugin, 8)
			watched := watchLoad(t.Context(), pgtest.OpenDSN(t, dsn))

			for _, signal := range []os.Signal{syscall.SIGINT, syscall.SIGQUIT, syscall.SIGKILL} {
				turns := load.turns.Load()
				require.Eventually(t, func() bool { return load.turns.Load() > turns+20 }, longest, time.Millisecond, "work goes on")
				require.NoError(t, server.Signal(signal))
			}

			turns := load.turns.Load()
			require.Eventually(t, func() bool { return load.turns.Load() > turns+20 }, longest, time.Millisecond, "work goes on")
			stop()

			snapshots, over := watched()
			t.Logf("%d turns, %d failed, %d snapshots", load.turns.Load(), load.failed.Load(), snapshots)
			require.Zero(t, over, "more slots were held than there are")
			load.requireKept(t, db, lease)
		})
	}
}

func TestBackendsThatAreTerminatedLoseNothing(t *testing.T) {
	t.Parallel()

	const lease = 2 * time.Second

	for name, options := range paths() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, plugin := useTurns(t, append(options, legion.WithLease(lease))...)
			load, stop := startLoad(t, plugin, 8)
			killer := pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.DSN(db), "application_name", "killer"))
			watched := watchLoad(t.Context(), killer)

			for range 60 {
				require.NoError(t, killer.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
					WHERE datname = current_database() AND application_name <> 'killer' AND random() < 0.5`).Error)
				time.Sleep(30 * time.Millisecond)
			}

			stop()

			_, over := watched()
			t.Logf("%d turns, %d failed", load.turns.Load(), load.failed.Load())
			require.Zero(t, over, "more slots were held than there are")
			load.requireKept(t, db, lease)
		})
	}
}

func TestContextsThatEndAtAnyStepLeaveThePoolWholeAndNoLock(t *testing.T) {
	t.Parallel()

	const tries = 500 // of each way

	for name, options := range paths() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, plugin := useTurns(t, options...)
			rules := []limiter.Rule{runningRule(1000), tokensRule(1_000_000)}
			require.NoError(t, limiter.Enforce(db, "warm", rules...))

			// The time of one call, over which the ends are spread.
			began := time.Now()
			require.NoError(t, plugin.Run(t.Context(), "measured", under(rules...), func(ctx context.Context, turn *legion.Turn) error {
				return turn.Record(ctx, models.Usage{TotalTokens: 1})
			}))

			took := time.Since(began)

			var trying sync.WaitGroup

			for worker := range 4 {
				trying.Go(func() {
					for i := worker; i < tries; i += 4 {
						ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), rand.N(took+1))

						if i%2 == 0 {
							_ = limiter.Enforce(db.WithContext(ctx), fmt.Sprint("agent ", i), rules...)
						} else {
							_ = plugin.Run(ctx, fmt.Sprint("agent ", i), under(rules...), func(ctx context.Context, turn *legion.Turn) error {
								return turn.Record(ctx, models.Usage{TotalTokens: 1})
							})
						}

						cancel()
					}
				})
			}

			trying.Wait()

			pool, err := db.DB()
			require.NoError(t, err)
			require.Eventually(t, func() bool { return pool.Stats().InUse == 0 }, longest, time.Millisecond)
			require.Eventually(t, func() bool {
				var held, open int64

				err := errors.Join(
					db.Raw("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())").Scan(&held).Error,
					db.Raw("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'").Scan(&open).Error,
				)

				return err == nil && held == 0 && open == 0
			}, longest, 10*time.Millisecond, "no lock is held, no transaction open")

			require.NoError(t, limiter.Enforce(db, "another", rules...))
		})
	}
}

func TestANetworkThatIsCutAtAnyStepIsHarmless(t *testing.T) {
	t.Parallel()

	for name, options := range paths() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			network, db, plugin := useNetwork(t, options...)
			require.NoError(t, migrateFor(db, options))

			turn := func(agentID string) {
				// A cut may end an attempt, and a second one cannot come: so all succeed.
				require.NoError(t, plugin.Run(t.Context(), agentID, legion.TurnOptions{
					Rules: []limiter.Rule{runningRule(1), tokensRule(1_000_000)}, Reserve: 20, PerStep: true,
				}, func(ctx context.Context, turn *legion.Turn) error {
					return errors.Join(turn.Record(ctx, models.Usage{TotalTokens: 7}), turn.Checkpoint(ctx, []byte("state")))
				}))
			}

			turn("warm") // so that every later turn takes the same steps
			cuts := 0

			for step := int64(1); ; step++ {
				network.steps.Store(step)

				agentID := fmt.Sprint("agent ", step)
				turn(agentID)
				requireIdle(t, db, agentID)
				require.EqualValues(t, 7, tokensOf(t, db, agentID))
				require.Equal(t, []byte("state"), rowOf(t, db, agentID).ConversationState)

				if network.steps.Swap(0) > 0 {
					break // the turn was over before the step came
				}

				cuts++
			}

			t.Logf("%d steps were cut", cuts)
			require.Greater(t, cuts, 4)
			require.NoError(t, limiter.Enforce(db, "after", runningRule(1)))
		})
	}
}

// migrateFor makes what the options need.
func migrateFor(db *gorm.DB, options []legion.Option) error {
	return db.Use(legion.New(append(options, legion.WithMigrate(), legion.WithObserver(nil))...))
}

func TestTimeoutsOfTheServerAreErrorsAndNoVerdicts(t *testing.T) {
	t.Parallel()

	for name, options := range paths() {
		for parameter, code := range map[string]string{"lock_timeout": "55P03", "statement_timeout": "57014"} {
			t.Run(name+", "+parameter, func(t *testing.T) {
				t.Parallel()

				db, _ := useTurns(t, options...)
				require.NoError(t, limiter.Enforce(db, "first", runningRule(5)))

				impatient := pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.DSN(db), parameter, "100"))
				require.NoError(t, impatient.Use(legion.New(append(options, legion.WithObserver(nil))...)))
				require.NoError(t, limiter.Enforce(impatient, "first", runningRule(5)))

				holder := db.Begin()
				t.Cleanup(func() { holder.Rollback() })
				require.NoError(t, limiter.Enforce(holder, "holder", runningRule(5)))

				tx := impatient.Begin()

				for _, call := range []*gorm.DB{impatient, tx} {
					err := limiter.Enforce(call, "next", runningRule(5))
					require.Error(t, err)
					require.NotErrorIs(t, err, limiter.ErrExceeded)
					requireCode(t, err, code)
				}

				// The caller's transaction is usable, and holds nothing.
				require.NoError(t, tx.Exec("SELECT 1").Error)
				require.NoError(t, holder.Commit().Error)
				require.NoError(t, limiter.Enforce(tx, "next", runningRule(5)))
				require.NoError(t, tx.Commit().Error)
			})
		}
	}
}

func TestADiskThatIsFullIsAnErrorAndNoVerdict(t *testing.T) {
	t.Parallel()

	for name, options := range paths() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, plugin := useTurns(t, options...)
			turn, err := plugin.Begin(t.Context(), "running", under(runningRule(5), tokensRule(1000)))
			require.NoError(t, err)

			// What the server says when it cannot extend a file.
			require.NoError(t, db.Exec(`
				CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
				BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$;
				CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON legion_agents FOR EACH ROW EXECUTE FUNCTION full_disk()`).Error)

			for _, failing := range []error{
				limiter.Enforce(db, "next", runningRule(5)),
				turn.Record(t.Context(), models.Usage{ID: "usage", TotalTokens: 10}),
				turn.End(t.Context()),
			} {
				requireCode(t, failing, "53100")
			}

			_, err = plugin.Begin(t.Context(), "next", under(runningRule(5)))
			requireCode(t, err, "53100")

			require.NoError(t, db.Exec("DROP TRIGGER full_disk ON legion_agents").Error)
			require.NoError(t, turn.Record(t.Context(), models.Usage{ID: "usage", TotalTokens: 10}))
			require.NoError(t, turn.End(t.Context()))
			require.EqualValues(t, 10, tokensOf(t, db, "running"))
			requireIdle(t, db, "running")

			var rows int64
			require.NoError(t, db.Model(&models.LegionAgent{}).Count(&rows).Error)
			require.EqualValues(t, 1, rows)
		})
	}
}

func requireCode(t *testing.T, err error, code string) {
	t.Helper()

	var server *pgconn.PgError

	require.ErrorAs(t, err, &server)
	require.Equal(t, code, server.Code)
}
