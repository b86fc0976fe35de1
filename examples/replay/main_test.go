package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/internal/testhook"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// setup returns a database, with a connection for each worker, and a silent progress.
func setup(t *testing.T, options options) (*gorm.DB, *progress) {
	t.Helper()

	db := pgtest.Open(t, pgtest.MaxOpenConnections(options.workers+1))

	return db, newProgressLines(io.Discard, 0, time.Now())
}

func TestAShortReplayExceedsNoLimit(t *testing.T) {
	t.Parallel()

	options := options{workers: 8, limit: 300, seed: 1}
	trace, err := load(options)
	require.NoError(t, err)

	db, progress := setup(t, options)

	var out bytes.Buffer

	require.NoError(t, tell(t.Context(), db, trace, options, progress, &out))
	require.Contains(t, out.String(), "Replaying 300 turns of a trace that is generated from seed 1")
	require.Contains(t, out.String(), "No limit was exceeded.")

	findings, err := check(t.Context(), db)
	require.NoError(t, err)
	require.Len(t, findings, 6)

	for _, finding := range findings {
		require.Greater(t, finding.Admissions, int64(200))
		require.Positive(t, finding.Peak)
		require.Zero(t, finding.Violations)
	}
}

func TestAReplayAtAFixedSpeedKeepsIt(t *testing.T) {
	t.Parallel()

	options := options{workers: 4, limit: 40, seed: 1, speed: 10}
	trace, err := load(options)
	require.NoError(t, err)

	db, progress := setup(t, options)
	started := time.Now()

	require.NoError(t, tell(t.Context(), db, trace, options, progress, io.Discard))
	require.GreaterOrEqual(t, time.Since(started), scale(trace.turns[len(trace.turns)-1].offset, options.speed))
}

// burst is the hardest case: everybody at once, in one tenant.
func burst(turns int) trace {
	trace := trace{source: "a burst"}

	for i := range turns {
		turn := turn{
			request: request{contextTokens: 10, generatedTokens: 50},
			number:  int64(i) + 1,
			tenant:  "tenant",
			user:    string(rune('a' + i)),
		}
		turn.agentID = turn.user
		trace.turns = append(trace.turns, turn)
	}

	return trace
}

func TestABurstExceedsNoLimit(t *testing.T) {
	t.Parallel()

	options := options{workers: 24, speed: 1}
	db, progress := setup(t, options)

	require.NoError(t, tell(t.Context(), db, burst(options.workers), options, progress, io.Discard))
}

// Without locks nothing keeps all turns of a burst from being admitted before the first of
// them commits. So that this happens for certain, each waits there for the others.
func TestWithoutLocksTheCheckFails(t *testing.T) {
	t.Parallel()

	options := options{workers: 24, speed: 1, withoutLocks: true}
	burst := burst(options.workers)
	db, progress := setup(t, options)

	// The tenant is registered before, or else all wait for the one that registers it.
	require.NoError(t, legion.Migrate(db))
	require.NoError(t, limiter.Enforce(db, "earlier", burst.turns[0].rules(window)...))
	require.NoError(t, db.Unscoped().Delete(&models.LegionAgent{AgentID: "earlier"}).Error)

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)

	var recorded atomic.Int64

	together := make(chan struct{})

	hooked := testhook.With(ctx, testhook.Hooks{At: func(point testhook.Point) {
		if point == testhook.Recorded {
			if recorded.Add(1) == int64(len(burst.turns)) {
				close(together)
			}

			select {
			case <-together:
			case <-ctx.Done():
			}
		}
	}})

	err := tell(hooked, db, burst, options, progress, io.Discard)
	require.ErrorIs(t, err, errExceeded)

	findings, err := check(t.Context(), db)
	require.NoError(t, err)
	require.Contains(t, findings, finding{
		Rule: tenantRule, Limit: limiter.LimitAgents,
		Admissions: 24, Peak: 24, Max: tenantLimits.agents, Violations: 24,
	})
}

func TestAReplayThatIsInterruptedEnds(t *testing.T) {
	t.Parallel()

	options := options{workers: 4, limit: 100_000, seed: 1}
	trace, err := load(options)
	require.NoError(t, err)

	db, progress := setup(t, options)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	t.Cleanup(cancel)

	require.ErrorIs(t, tell(ctx, db, trace, options, progress, io.Discard), context.DeadlineExceeded)
}

func TestAReplayThatWaitsForTheTraceIsInterrupted(t *testing.T) {
	t.Parallel()

	options := options{workers: 1, speed: 1}
	db, progress := setup(t, options)
	require.NoError(t, legion.Migrate(db))
	require.NoError(t, db.AutoMigrate(&admission{}))

	trace := burst(2)
	trace.turns[1].offset = time.Hour
	replay := replay{db: db, turns: trace.turns, workers: options.workers, speed: options.speed, progress: progress}
	interrupted := errors.New("interrupted")

	// Once the first turn is over there is nothing to do for an hour.
	ctx, cancel := context.WithCancelCause(t.Context())
	t.Cleanup(func() { cancel(nil) })
	time.AfterFunc(5*time.Second, func() { cancel(interrupted) })

	_, err := replay.run(ctx)
	require.ErrorIs(t, err, interrupted)
}

func TestAnErrorOfTheDatabaseEndsTheReplay(t *testing.T) {
	t.Parallel()

	options := options{workers: 4}
	db, progress := setup(t, options)
	replay := replay{db: db, turns: burst(8).turns, workers: options.workers, progress: progress}

	_, err := replay.run(t.Context())
	require.ErrorContains(t, err, "turn ")
	require.ErrorContains(t, err, "legion.Migrate")
}

func TestLoadReadsTheTraceThatIsNamed(t *testing.T) {
	t.Parallel()

	name := filepath.Join(t.TempDir(), "trace.csv")
	require.NoError(t, os.WriteFile(name, []byte("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"), 0o600))

	trace, err := load(options{trace: name})
	require.NoError(t, err)
	require.Equal(t, name, trace.source)
	require.Len(t, trace.turns, 1)
	require.Equal(t, int64(418), trace.turns[0].tokens())

	_, err = load(options{trace: name + ".gz"})
	require.ErrorIs(t, err, os.ErrNotExist)
}
