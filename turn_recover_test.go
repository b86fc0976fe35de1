package legion_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
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

// crash leaves the rows of turns whose process is gone, and whose leases are over.
func crash(t *testing.T, db *gorm.DB, reserved int64, agentIDs ...string) {
	t.Helper()

	for _, agentID := range agentIDs {
		require.NoError(t, db.Exec(`INSERT INTO legion_agents (agent_id, metadata, started_at, status, run_id, lease_expires_at, reserved_tokens)
			VALUES (?, '{"tenant": "acme"}', now(), 'running', 'gone', now() - interval '1 second', ?)
			ON CONFLICT (agent_id) DO UPDATE SET status = 'running', run_id = 'gone', lease_expires_at = excluded.lease_expires_at, reserved_tokens = excluded.reserved_tokens`,
			agentID, reserved).Error)
	}
}

func recoverUnder(rules ...limiter.Rule) legion.RecoverOptions {
	return legion.RecoverOptions{Rules: func(context.Context, *models.LegionAgent) ([]limiter.Rule, error) { return rules, nil }}
}

func failuresOf(failures []legion.RecoverFailure) (agentIDs []string) {
	for _, failure := range failures {
		agentIDs = append(agentIDs, failure.AgentID)
	}

	slices.Sort(agentIDs)

	return agentIDs
}

func TestRecoverResumesWhatWasInterruptedAndNothingElse(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	crash(t, db, 0, "expired", "revoked", "child", "deleted", "ended")
	require.NoError(t, db.Exec("UPDATE legion_agents SET lease_expires_at = NULL WHERE agent_id = 'revoked'").Error)
	require.NoError(t, db.Exec("UPDATE legion_agents SET parent_agent_id = 'expired' WHERE agent_id = 'child'").Error)
	require.NoError(t, db.Exec("UPDATE legion_agents SET status = 'idle', lease_expires_at = NULL WHERE agent_id = 'ended'").Error)
	require.NoError(t, store.For[models.LegionAgent](db).Delete(t.Context(), "deleted"))
	require.NoError(t, limiter.Enforce(db, "unowned", runningRule(10)))

	live, err := plugin.Begin(t.Context(), "live", under(runningRule(10)))
	require.NoError(t, err)

	var (
		mutex   sync.Mutex
		resumed []string
	)

	report, err := plugin.Recover(t.Context(), recoverUnder(runningRule(10)), func(ctx context.Context, turn *legion.Turn) error {
		mutex.Lock()
		defer mutex.Unlock()

		resumed = append(resumed, turn.AgentID())
		require.Equal(t, turn.RunID(), *rowOf(t, db, turn.AgentID()).RunID)

		return turn.Checkpoint(ctx, []byte("resumed"))
	})
	require.NoError(t, err)

	slices.Sort(resumed)
	slices.Sort(report.Resumed)
	require.Equal(t, []string{"expired", "revoked"}, resumed)
	require.Equal(t, resumed, report.Resumed)
	require.Empty(t, report.Failed)
	require.Empty(t, report.Left)
	requireIdle(t, db, "expired")
	requireIdle(t, db, "revoked")
	require.Equal(t, []byte("resumed"), rowOf(t, db, "expired").ConversationState)
	require.NoError(t, live.Context().Err())
	require.NoError(t, live.End(t.Context()))
}

func TestOneOfSeveralRecoverersResumesAnAgent(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	other := usePlugin(t, pgtest.OpenDSN(t, pgtest.DSN(db)))

	var crashed []string
	for i := range 20 {
		crashed = append(crashed, fmt.Sprintf("agent %02d", i))
	}

	crash(t, db, 0, crashed...)

	var (
		recoverers sync.WaitGroup
		mutex      sync.Mutex
		resumed    []string
	)

	for _, recoverer := range []*legion.Plugin{plugin, other} {
		recoverers.Go(func() {
			_, err := recoverer.Recover(t.Context(), recoverUnder(runningRule(100)), func(_ context.Context, turn *legion.Turn) error {
				mutex.Lock()
				defer mutex.Unlock()

				resumed = append(resumed, turn.AgentID())

				return nil
			})

			mutex.Lock()
			defer mutex.Unlock()

			require.NoError(t, err)
		})
	}

	recoverers.Wait()
	slices.Sort(resumed)
	require.Equal(t, crashed, resumed)
}

func TestRecoverLeavesWhatHasNoRoom(t *testing.T) {
	t.Parallel()

	nothing := func(context.Context, *legion.Turn) error { return nil }

	t.Run("every slot taken", func(t *testing.T) {
		t.Parallel()

		db, plugin := useTurns(t)
		crash(t, db, 0, "crashed")

		turn, err := plugin.Begin(t.Context(), "live", under(runningRule(1)))
		require.NoError(t, err)

		report, err := plugin.Recover(t.Context(), recoverUnder(runningRule(1)), nothing)
		require.NoError(t, err)
		require.Equal(t, []string{"crashed"}, failuresOf(report.Left))
		require.ErrorIs(t, report.Left[0].Err, limiter.ErrExceeded)
		require.Equal(t, "gone", *rowOf(t, db, "crashed").RunID)

		require.NoError(t, turn.End(t.Context()))

		report, err = plugin.Recover(t.Context(), recoverUnder(runningRule(1)), nothing)
		require.NoError(t, err)
		require.Equal(t, []string{"crashed"}, report.Resumed)
	})

	t.Run("the budget reserved by others", func(t *testing.T) {
		t.Parallel()

		db, plugin := useTurns(t)
		crash(t, db, 300, "crashed")

		turn, err := plugin.Begin(t.Context(), "live", reserving(800, tokensRule(1000)))
		require.NoError(t, err)

		report, err := plugin.Recover(t.Context(), recoverUnder(tokensRule(1000)), nothing)
		require.NoError(t, err)
		require.Equal(t, []string{"crashed"}, failuresOf(report.Left))

		require.NoError(t, turn.End(t.Context()))

		report, err = plugin.Recover(t.Context(), recoverUnder(tokensRule(1000)), func(context.Context, *legion.Turn) error {
			require.EqualValues(t, 300, rowOf(t, db, "crashed").ReservedTokens)

			return nil
		})
		require.NoError(t, err)
		require.Equal(t, []string{"crashed"}, report.Resumed)
		require.Zero(t, rowOf(t, db, "crashed").ReservedTokens)
	})
}

func TestWhatIsCountedAlreadyIsNotCheckedAgain(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	crash(t, db, 0, "crashed")
	require.NoError(t, db.Exec(`UPDATE legion_agents SET usage = jsonb_build_array(jsonb_build_object('total_tokens', 500, 'evals', 9,
		'at', (extract(epoch FROM clock_timestamp()) * 1000)::bigint))`).Error)

	full := limiter.Rule{Identity: acme, Policy: limiter.Policy{
		Window: time.Hour, MaxAgents: limiter.Max(1), MaxTokens: limiter.Max(100), MaxEvals: limiter.Max(1), MaxRunningAgents: limiter.Max(1),
	}}
	require.NoError(t, db.Exec(`INSERT INTO legion_agents (agent_id, metadata, started_at) VALUES ('another', '{"tenant": "acme"}', now())`).Error)

	report, err := plugin.Recover(t.Context(), recoverUnder(full), func(context.Context, *legion.Turn) error { return nil })
	require.NoError(t, err)
	require.Equal(t, []string{"crashed"}, report.Resumed)
	require.ErrorIs(t, limiter.Enforce(db, "new", full), limiter.ErrExceeded)
}

func TestATurnThatEndsAfterItsLeaseIsOverIsNotRecovered(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	require.NoError(t, db.Exec("UPDATE legion_agents SET lease_expires_at = now() - interval '1 second'").Error)
	require.NoError(t, turn.End(t.Context()))

	report, err := plugin.Recover(t.Context(), recoverUnder(runningRule(1)), func(context.Context, *legion.Turn) error { return nil })
	require.NoError(t, err)
	require.Equal(t, &legion.RecoverReport{}, report)
}

func TestRecoverReportsWhatFailed(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	crash(t, db, 0, "a", "b", "c")

	failure := errors.New("the model is down")
	options := legion.RecoverOptions{
		Concurrency: 1,
		Rules: func(_ context.Context, agent *models.LegionAgent) ([]limiter.Rule, error) {
			if agent.AgentID == "b" {
				return nil, failure
			}

			return nil, nil
		},
	}

	report, err := plugin.Recover(t.Context(), options, func(_ context.Context, turn *legion.Turn) error {
		if turn.AgentID() == "c" {
			return failure
		}

		return nil
	})
	require.NoError(t, err)
	require.Equal(t, []string{"a"}, report.Resumed)
	require.Equal(t, []string{"b"}, failuresOf(report.Left))
	require.ErrorIs(t, report.Left[0].Err, failure)
	require.Equal(t, []string{"c"}, failuresOf(report.Failed))
	require.ErrorIs(t, report.Failed[0].Err, failure)
	requireIdle(t, db, "c")
}

func TestRecoverHasABoundedNumberInFlight(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	var crashed []string
	for i := range 250 { // more than one page of them
		crashed = append(crashed, fmt.Sprintf("agent %03d", i))
	}

	crash(t, db, 0, crashed...)

	var (
		mutex        sync.Mutex
		flying, most int
	)

	options := recoverUnder()
	options.Concurrency = 3

	report, err := plugin.Recover(t.Context(), options, func(context.Context, *legion.Turn) error {
		mutex.Lock()
		flying++
		most = max(most, flying)
		mutex.Unlock()

		time.Sleep(time.Millisecond)

		mutex.Lock()
		flying--
		mutex.Unlock()

		return nil
	})
	require.NoError(t, err)
	require.Len(t, report.Resumed, 250)
	require.Equal(t, 3, most)
}

func TestRecoverEndsWithItsContext(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	crash(t, db, 0, "a", "b", "c")

	ctx, cancel := context.WithCancel(t.Context())
	options := recoverUnder()
	options.Concurrency = 1

	report, err := plugin.Recover(ctx, options, func(ctx context.Context, _ *legion.Turn) error {
		cancel()

		return ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Len(t, report.Failed, 1)
	require.Empty(t, report.Resumed)
	requireIdle(t, db, report.Failed[0].AgentID)
}

func TestARunThatIsClaimedButNotResumedIsLeftToBeRecovered(t *testing.T) {
	t.Parallel()

	requireInterrupted := func(t *testing.T, db *gorm.DB) {
		t.Helper()

		require.Eventually(t, func() bool {
			row := rowOf(t, db, "one")

			return row.Status == models.StatusRunning && row.ReservedTokens == 5 &&
				(row.LeaseExpiresAt == nil || row.LeaseExpiresAt.Before(time.Now()))
		}, longest, time.Millisecond)
	}

	t.Run("since the plugin was shut down", func(t *testing.T) {
		t.Parallel()

		closed := make(chan error, 1)

		var plugin *legion.Plugin

		db := pgtest.Open(t)
		plugin = usePlugin(t, db, legion.WithObserver(func(observed limiter.Observation) {
			go func() { closed <- plugin.Shutdown(context.WithoutCancel(observed.Context)) }()

			<-observed.Context.Done()
		}))
		crash(t, db, 5, "one")

		report, err := plugin.Recover(t.Context(), recoverUnder(runningRule(1)), doNothing)
		require.NoError(t, err)
		require.Len(t, report.Left, 1)
		require.ErrorIs(t, report.Left[0].Err, legion.ErrShutdown)
		require.NoError(t, <-closed)
		requireInterrupted(t, db)
	})

	t.Run("since the context has ended", func(t *testing.T) {
		t.Parallel()

		network, db, plugin := useNetwork(t)
		turn, err := plugin.Begin(t.Context(), "another", under(runningRule(1))) // which registers and connects
		require.NoError(t, err)
		require.NoError(t, turn.End(t.Context()))
		crash(t, db, 5, "one")

		ctx, cancel := context.WithCancel(t.Context())
		rules := func(context.Context, *models.LegionAgent) ([]limiter.Rule, error) {
			network.lose.Store(&loss{said: []string{"commit\x00"}, answered: cancel})

			return []limiter.Rule{runningRule(1)}, nil
		}

		report, _ := plugin.Recover(ctx, legion.RecoverOptions{Rules: rules}, doNothing)
		require.Len(t, report.Left, 1)
		require.ErrorIs(t, report.Left[0].Err, context.Canceled)
		require.NotEqual(t, "gone", *rowOf(t, db, "one").RunID, "it was claimed")
		requireInterrupted(t, db)
	})
}

func TestRecoverRefusesWhatCannotWorkBeforeItAsksTheDatabase(t *testing.T) {
	t.Parallel()

	// Not migrated: whatever asks for an agent fails.
	plugin := legion.New(legion.WithObserver(nil))
	require.NoError(t, pgtest.Open(t).Use(plugin))

	for says, refused := range map[string]struct {
		options legion.RecoverOptions
		resume  func(context.Context, *legion.Turn) error
	}{
		"Rules is nil":            {resume: doNothing},
		"resume is nil":           {options: legion.RecoverOptions{Rules: noRules}},
		"Concurrency is negative": {options: legion.RecoverOptions{Rules: noRules, Concurrency: -1}, resume: doNothing},
	} {
		report, err := plugin.Recover(t.Context(), refused.options, refused.resume)
		require.ErrorIs(t, err, legion.ErrInvalidTurn)
		require.ErrorContains(t, err, says)
		require.Equal(t, &legion.RecoverReport{}, report)
	}

	_, err := plugin.Recover(t.Context(), recoverUnder(), doNothing)
	require.ErrorIs(t, err, legion.ErrNotMigrated)
	_, err = legion.New().Recover(t.Context(), recoverUnder(), nil)
	require.ErrorIs(t, err, legion.ErrInvalidConfig)
}

// doNothing is work that has nothing left to do.
func doNothing(context.Context, *legion.Turn) error { return nil }
