package legion_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// startWithClock starts a server whose clock is off by so many seconds, as faketime reads
// them. Its own timeouts, of statements and locks and for deadlocks, are not to be relied on:
// libfaketime shows the true time to what interrupts a wait.
func startWithClock(t *testing.T, off string) *pgtest.Server {
	t.Helper()

	var libraries []string

	for _, pattern := range []string{"/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1"} {
		found, err := filepath.Glob(pattern)
		require.NoError(t, err)

		libraries = append(libraries, found...)
	}

	if len(libraries) == 0 {
		t.Skip("libfaketime is not on this machine: install the package faketime")
	}

	server, err := pgtest.Start(t.Context(), pgtest.WithEnvironment("LD_PRELOAD", libraries[0]),
		pgtest.WithEnvironment("FAKETIME", off), pgtest.WithEnvironment("FAKETIME_DONT_FAKE_MONOTONIC", "1"))
	if errors.Is(err, pgtest.ErrElsewhere) {
		t.Skip("a server with another clock needs its binaries on this machine: ", err)
	}

	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })

	return server
}

// requireClock is for a database whose clock is off by that much, in all that it is asked for.
func requireClock(t *testing.T, db *gorm.DB, off time.Duration) {
	t.Helper()

	for _, clock := range []string{"now()", "clock_timestamp()"} {
		var seconds float64

		require.NoError(t, db.Raw("SELECT extract(epoch FROM "+clock+")").Row().Scan(&seconds))
		require.InDelta(t, off.Seconds(), seconds-float64(time.Now().UnixMilli())/1000, 10, clock)
	}
}

// useClock is useTurns, for a server's database. through is the plugin's way to it.
func useClock(t *testing.T, server *pgtest.Server, options ...legion.Option) (db *gorm.DB, plugin *legion.Plugin, through *pgtest.Proxy) {
	t.Helper()

	dsn, err := server.CreateDatabase(t.Context())
	require.NoError(t, err)

	db = pgtest.OpenDSN(t, dsn)
	require.NoError(t, db.Use(legion.New(append(options, legion.WithMigrate(legion.WithNotify()), legion.WithObserver(nil))...)))

	through, proxied := pgtest.StartProxyBefore(t, dsn)
	plugin = legion.New(append([]legion.Option{legion.WithLease(shortLease), legion.WithObserver(nil)}, options...)...)
	require.NoError(t, pgtest.OpenDSN(t, proxied).Use(plugin))

	// In this order: the last cleanup is the first.
	shutDownAfter(t, plugin, longest)
	t.Cleanup(func() { through.Set(pgtest.ProxyPasses) })

	return db, plugin, through
}

func TestAServersClockDecidesAloneHoweverFarOffItIs(t *testing.T) {
	t.Parallel()

	for off, apart := range map[string]time.Duration{"+90s": 90 * time.Second, "-90s": -90 * time.Second} {
		t.Run(off, func(t *testing.T) {
			t.Parallel()

			server := startWithClock(t, off)

			for name, options := range paths() {
				for what, require := range map[string]func(t *testing.T, server *pgtest.Server, apart time.Duration, options ...legion.Option){
					"windows": requireWindows, "usage": requireUsage, "leases": requireLeases, "recovery": requireRecovery, "load": requireLoad,
				} {
					t.Run(name+", "+what, func(t *testing.T) {
						t.Parallel()
						require(t, server, apart, options...)
					})
				}
			}
		})
	}
}

func requireWindows(t *testing.T, server *pgtest.Server, apart time.Duration, options ...legion.Option) {
	t.Helper()

	db, _, _ := useClock(t, server, options...)
	requireClock(t, db, apart)

	minute := limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Minute, MaxAgents: limiter.Max(1)}}
	require.NoError(t, limiter.Enforce(db, "one", minute))

	exceeded := &limiter.ExceededError{}
	require.ErrorAs(t, limiter.Enforce(db, "two", minute), &exceeded)
	require.InDelta(t, 60, exceeded.RetryAfter.Seconds(), 10)

	report, err := limiter.Check(db, "two", minute)
	require.NoError(t, err)
	require.InDelta(t, 60, report.Rules[0].Quotas[0].ResetAfter.Seconds(), 10)

	// What a clock does in a minute.
	require.NoError(t, db.Exec("UPDATE legion_agents SET started_at = started_at - interval '50 seconds'").Error)
	require.ErrorAs(t, limiter.Enforce(db, "two", minute), &exceeded)
	require.InDelta(t, 5, exceeded.RetryAfter.Seconds(), 6)
	require.NoError(t, db.Exec("UPDATE legion_agents SET started_at = started_at - interval '10 seconds'").Error)
	require.NoError(t, limiter.Enforce(db, "two", minute))
}

func requireUsage(t *testing.T, server *pgtest.Server, apart time.Duration, options ...legion.Option) {
	t.Helper()

	db, plugin, _ := useClock(t, server, options...)
	minute := limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Minute, MaxTokens: limiter.Max(1000)}}
	hour := limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Hour, MaxTokens: limiter.Max(1000)}}

	turn, err := plugin.Begin(t.Context(), "one", under(minute, hour))
	require.NoError(t, err)
	require.NoError(t, turn.Record(t.Context(), models.Usage{TotalTokens: 1}))
	require.NoError(t, turn.Record(t.Context(), models.Usage{At: time.Now(), TotalTokens: 10}))

	_, err = store.For[models.LegionAgent](db).AppendUsage(t.Context(), "one", models.Usage{At: time.Now(), TotalTokens: 100})
	require.NoError(t, err)
	require.NoError(t, turn.End(t.Context()))

	// To a server that is ahead, what the application stamps is as old as it says, for one that
	// is behind it is of this moment.
	inMinute := int64(111)
	if apart > 0 {
		inMinute = 1
	}

	report, err := limiter.Check(db, "", minute, hour)
	require.NoError(t, err)
	require.Equal(t, inMinute, report.Rules[0].Usage.Tokens)
	require.EqualValues(t, 111, report.Rules[1].Usage.Tokens)
	require.InDelta(t, 60, report.Rules[0].Quotas[0].ResetAfter.Seconds(), 10)

	full := limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Minute, MaxTokens: limiter.Max(inMinute)}}
	exceeded := &limiter.ExceededError{}
	require.ErrorAs(t, limiter.Enforce(db, "two", full), &exceeded)
	require.InDelta(t, 60, exceeded.RetryAfter.Seconds(), 10)
}

func requireLeases(t *testing.T, server *pgtest.Server, _ time.Duration, options ...legion.Option) {
	t.Helper()

	db, plugin, through := useClock(t, server, options...)

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	requireHolds(t, turn, 1.3)

	exceeded := &limiter.ExceededError{}
	require.ErrorAs(t, limiter.Enforce(db, "two", runningRule(1)), &exceeded)
	require.Positive(t, exceeded.RetryAfter)
	require.LessOrEqual(t, exceeded.RetryAfter, shortLease)
	require.NoError(t, turn.End(t.Context()))

	// A slot that nobody renews: it is free one lease later, and not before its holder knows.
	turn, err = plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	requireHolds(t, turn, 0.4)
	through.Set(pgtest.ProxySwallows)

	cut := time.Now()

	require.Eventually(t, func() bool {
		err := limiter.Enforce(db, "two", runningRule(1))
		if err == nil {
			require.ErrorIs(t, context.Cause(turn.Context()), legion.ErrLeaseLost)
		}

		return err == nil
	}, longest, 2*time.Millisecond)
	require.Less(t, time.Since(cut), 2*shortLease)

	through.Set(pgtest.ProxyPasses)
	require.ErrorIs(t, turn.End(t.Context()), legion.ErrLeaseLost)

	// A slot without a turn lasts as long as a lease, of which nobody has said how long.
	require.ErrorAs(t, limiter.Enforce(db, "three", runningRule(1)), &exceeded)
	require.InDelta(t, database.DefaultLease.Seconds(), exceeded.RetryAfter.Seconds(), 10)
	require.NoError(t, limiter.Release(db, "two"))
	require.NoError(t, limiter.Enforce(db, "three", runningRule(1)))
}

func requireRecovery(t *testing.T, server *pgtest.Server, _ time.Duration, options ...legion.Option) {
	t.Helper()

	db, plugin, through := useClock(t, server, options...)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	told := make(chan string, 100)

	go func() {
		defer close(told)

		for event, err := range store.For[models.LegionAgent](db).Watch(ctx) {
			if err == nil && !event.Missed {
				told <- event.AgentID
			} else if err == nil {
				told <- "listening"
			}
		}
	}()

	require.Equal(t, "listening", <-told)

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	require.Equal(t, "one", <-told)

	rescuer := legion.New(append([]legion.Option{legion.WithLease(shortLease), legion.WithObserver(nil)}, options...)...)
	require.NoError(t, pgtest.OpenDSN(t, pgtest.DSN(db)).Use(rescuer))

	recovered := func() []string {
		report, err := rescuer.Recover(t.Context(), recoverUnder(runningRule(1)), doNothing)
		require.NoError(t, err)
		require.Empty(t, report.Failed)

		return report.Resumed
	}

	// Nothing is interrupted while its lease is renewed.
	for range 2 {
		requireHolds(t, turn, 0.6)
		require.Empty(t, recovered())
	}

	through.Set(pgtest.ProxySwallows)
	require.Eventually(t, func() bool { return len(recovered()) == 1 }, longest, 5*time.Millisecond)
	require.ErrorIs(t, context.Cause(turn.Context()), legion.ErrLeaseLost)
	requireIdle(t, db, "one")

	through.Set(pgtest.ProxyPasses)
	require.ErrorIs(t, turn.End(t.Context()), legion.ErrLeaseLost)
	require.NoError(t, rescuer.Shutdown(t.Context()))
	cancel()

	for range told { // until it has ended
	}
}

func requireLoad(t *testing.T, server *pgtest.Server, _ time.Duration, options ...legion.Option) {
	t.Helper()

	db, plugin, _ := useClock(t, server, options...)

	const workers = 8

	load, stop := startLoad(t, plugin, workers)
	watched := watchLoad(t.Context(), pgtest.OpenDSN(t, pgtest.DSN(db)))

	require.Eventually(t, func() bool { return load.turns.Load() > 60 }, longest, time.Millisecond)
	stop()

	snapshots, over := watched()
	require.Positive(t, snapshots)
	require.Zero(t, over, "more slots were held than there are")
	require.LessOrEqual(t, load.failed.Load(), int64(workers), "but for those that were stopped")
	load.requireKept(t, db, shortLease)
}
