package legion_test

import (
	"context"
	"errors"
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

var acme = limiter.Identity{"tenant": "acme"}

func runningRule(limit int64) limiter.Rule {
	return limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Hour, MaxRunningAgents: limiter.Max(limit)}}
}

func tokensRule(limit int64) limiter.Rule {
	return limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Hour, MaxTokens: limiter.Max(limit)}}
}

func under(rules ...limiter.Rule) legion.TurnOptions { return legion.TurnOptions{Rules: rules} }

// useTurns makes a plugin for a fresh database, which is shut down with the test.
func useTurns(t *testing.T, options ...legion.Option) (*gorm.DB, *legion.Plugin) {
	t.Helper()

	db := pgtest.Open(t)

	return db, usePlugin(t, db, options...)
}

func usePlugin(t *testing.T, db *gorm.DB, options ...legion.Option) *legion.Plugin {
	t.Helper()

	plugin := legion.New(append([]legion.Option{legion.WithMigrate(), legion.WithObserver(nil)}, options...)...)
	require.NoError(t, db.Use(plugin))

	shutDownAfter(t, plugin, time.Second)

	return plugin
}

// shutDownAfter shuts the plugin down when the test has ended.
func shutDownAfter(t *testing.T, plugin *legion.Plugin, within time.Duration) {
	t.Helper()

	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), within)
		defer cancel()

		require.NoError(t, plugin.Shutdown(ctx))
	})
}

func rowOf(t *testing.T, db *gorm.DB, agentID string) models.LegionAgent {
	t.Helper()

	var agent models.LegionAgent
	require.NoError(t, db.Unscoped().Take(&agent, "agent_id = ?", agentID).Error)

	return agent
}

// tokensOf sums what is recorded of the agent.
func tokensOf(t *testing.T, db *gorm.DB, agentID string) (tokens int64) {
	t.Helper()

	row := rowOf(t, db, agentID)
	entries, err := row.UsageEntries()
	require.NoError(t, err)

	for _, entry := range entries {
		tokens += entry.Tokens()
	}

	return tokens
}

// requireIdle is for rows that hold no slot and nothing reserved.
func requireIdle(t *testing.T, db *gorm.DB, agentID string) {
	t.Helper()

	row := rowOf(t, db, agentID)
	require.Equal(t, models.StatusIdle, row.Status)
	require.Nil(t, row.LeaseExpiresAt)
	require.Zero(t, row.ReservedTokens)
}

func TestATurnHoldsItsSlotUntilItEnds(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	require.Equal(t, "one", turn.AgentID())
	require.EqualValues(t, 1, turn.Decision().Rules[0].Usage.RunningAgents)

	row := rowOf(t, db, "one")
	require.Equal(t, models.StatusRunning, row.Status)
	require.Equal(t, turn.RunID(), *row.RunID)
	require.NotNil(t, row.StartedAt)
	require.JSONEq(t, `{"tenant": "acme"}`, row.Metadata.String())

	_, err = plugin.Begin(t.Context(), "two", under(runningRule(1)))
	require.ErrorIs(t, err, limiter.ErrExceeded)
	require.ErrorIs(t, limiter.Enforce(db, "two", runningRule(1)), limiter.ErrExceeded)

	require.NoError(t, turn.End(t.Context()))
	requireIdle(t, db, "one")
	require.Equal(t, turn.RunID(), *rowOf(t, db, "one").RunID)
	require.ErrorIs(t, context.Cause(turn.Context()), legion.ErrTurnEnded)

	require.NoError(t, limiter.Enforce(db, "two", runningRule(1)))
}

func TestEndTwiceIsOneEnd(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	require.NoError(t, turn.End(t.Context()))

	again, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)

	require.NoError(t, turn.End(t.Context()))
	require.Equal(t, models.StatusRunning, rowOf(t, db, "one").Status)
	require.NoError(t, again.End(t.Context()))
}

func TestATurnEndsHoweverItsWorkEnds(t *testing.T) {
	t.Parallel()

	failure := errors.New("the model is down")

	for name, test := range map[string]struct {
		work    func(ctx context.Context, cancel context.CancelFunc) error
		wantErr error
	}{
		"return": {work: func(context.Context, context.CancelFunc) error { return nil }},
		"error":  {work: func(context.Context, context.CancelFunc) error { return failure }, wantErr: failure},
		"panic":  {work: func(context.Context, context.CancelFunc) error { panic(failure) }},
		"cancelled": {work: func(ctx context.Context, cancel context.CancelFunc) error {
			cancel()
			<-ctx.Done()

			return ctx.Err()
		}, wantErr: context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, plugin := useTurns(t)
			ctx, cancel := context.WithCancel(t.Context())
			t.Cleanup(cancel)

			run := func() error {
				return plugin.Run(ctx, "one", under(runningRule(1), tokensRule(1000)), func(ctx context.Context, turn *legion.Turn) error {
					require.NoError(t, turn.Record(ctx, models.Usage{TotalTokens: 30}))
					require.NoError(t, turn.Checkpoint(ctx, []byte("state")))

					return test.work(ctx, cancel)
				})
			}

			if name == "panic" {
				require.PanicsWithError(t, failure.Error(), func() { _ = run() })
			} else {
				require.ErrorIs(t, run(), test.wantErr)
			}

			requireIdle(t, db, "one")
			require.EqualValues(t, 30, tokensOf(t, db, "one"))
			require.Equal(t, []byte("state"), rowOf(t, db, "one").ConversationState)
			require.NoError(t, limiter.Enforce(db, "two", runningRule(1)))
		})
	}
}

func TestEndAndRecordOutliveTheirContext(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	ctx, cancel := context.WithCancel(t.Context())

	turn, err := plugin.Begin(ctx, "one", under(runningRule(1), tokensRule(100)))
	require.NoError(t, err)

	cancel()
	require.NoError(t, turn.Record(turn.Context(), models.Usage{TotalTokens: 7}))
	require.NoError(t, turn.End(ctx))
	requireIdle(t, db, "one")
	require.EqualValues(t, 7, tokensOf(t, db, "one"))
}

func TestEndWaitsOnlySomeTimeOnceItsContextHasEnded(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)

	locker := db.Begin()
	t.Cleanup(func() { locker.Rollback() })
	require.NoError(t, locker.Exec("SELECT FROM legion_agents WHERE agent_id = 'one' FOR UPDATE").Error)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, turn.End(ctx), context.Canceled)

	// What has failed is tried again.
	require.NoError(t, locker.Rollback().Error)
	require.NoError(t, turn.End(t.Context()))
	requireIdle(t, db, "one")
}

func TestUsageThatIsRecordedAfterTheEndCounts(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", under(tokensRule(100)))
	require.NoError(t, err)
	require.NoError(t, turn.End(t.Context()))
	require.NoError(t, turn.Record(turn.Context(), models.Usage{TotalTokens: 100}))
	require.ErrorIs(t, turn.Checkpoint(t.Context(), []byte("late")), legion.ErrTurnEnded)

	require.ErrorIs(t, limiter.Enforce(db, "two", tokensRule(100)), limiter.ErrExceeded)
	require.Nil(t, rowOf(t, db, "one").ConversationState)
}

func TestARetriedRecordIsCountedOnce(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", legion.TurnOptions{Rules: []limiter.Rule{tokensRule(1000)}, Reserve: 500})
	require.NoError(t, err)

	for range 3 {
		require.NoError(t, turn.Record(t.Context(), models.Usage{ID: "request 1", InputTokens: 100, OutputTokens: 50}))
	}

	require.EqualValues(t, 150, tokensOf(t, db, "one"))
	require.EqualValues(t, 350, rowOf(t, db, "one").ReservedTokens)
	require.NoError(t, turn.End(t.Context()))
}

func TestTheStateIsWrittenAtTheEndOrAtEachStep(t *testing.T) {
	t.Parallel()

	for name, perStep := range map[string]bool{"at the end": false, "per step": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, plugin := useTurns(t)

			turn, err := plugin.Begin(t.Context(), "one", legion.TurnOptions{PerStep: perStep})
			require.NoError(t, err)

			state := []byte("first")
			require.NoError(t, turn.Checkpoint(t.Context(), state))
			copy(state, "-----")

			if perStep {
				require.Equal(t, []byte("first"), rowOf(t, db, "one").ConversationState)
			} else {
				require.Nil(t, rowOf(t, db, "one").ConversationState)
			}

			require.NoError(t, turn.Checkpoint(t.Context(), []byte("second")))
			require.NoError(t, turn.End(t.Context()))
			require.Equal(t, []byte("second"), rowOf(t, db, "one").ConversationState)

			empty, err := plugin.Begin(t.Context(), "one", legion.TurnOptions{PerStep: perStep})
			require.NoError(t, err)
			require.NoError(t, empty.End(t.Context()))
			require.Equal(t, []byte("second"), rowOf(t, db, "one").ConversationState, "no checkpoint, no change")

			cleared, err := plugin.Begin(t.Context(), "one", legion.TurnOptions{PerStep: perStep})
			require.NoError(t, err)
			require.NoError(t, cleared.Checkpoint(t.Context(), nil))
			require.NoError(t, cleared.End(t.Context()))
			require.Empty(t, rowOf(t, db, "one").ConversationState)
		})
	}
}

func TestOneAgentRunsOneTurn(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	other := usePlugin(t, pgtest.OpenDSN(t, pgtest.DSN(db)))

	const tries = 8

	turns := make([]*legion.Turn, tries)
	errs := make([]error, tries)

	var group sync.WaitGroup

	for i := range tries {
		group.Go(func() {
			turns[i], errs[i] = []*legion.Plugin{plugin, other}[i%2].Begin(t.Context(), "one", under(runningRule(10)))
		})
	}

	group.Wait()

	var begun []*legion.Turn

	for i, err := range errs {
		if err == nil {
			begun = append(begun, turns[i])
		} else {
			require.ErrorIs(t, err, legion.ErrAgentRunning)
		}
	}

	require.Len(t, begun, 1)
	require.Equal(t, begun[0].RunID(), *rowOf(t, db, "one").RunID)

	// A bare Enforce leaves the run alone, and so do Save and Release.
	before := rowOf(t, db, "one")
	require.NoError(t, limiter.Enforce(db, "one", runningRule(10)))
	require.ErrorIs(t, limiter.Release(db, "one"), legion.ErrAgentRunning)

	idle := models.StatusIdle
	require.ErrorIs(t, store.For[models.LegionAgent](db).Save(t.Context(), store.Patch{AgentID: "one", Status: &idle}), legion.ErrAgentRunning)

	after := rowOf(t, db, "one")
	require.Equal(t, before.RunID, after.RunID)
	require.Equal(t, before.LeaseExpiresAt, after.LeaseExpiresAt)
	require.NoError(t, begun[0].End(t.Context()))
}

func TestBeginAdoptsTheSlotOfABareEnforce(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	require.Equal(t, turn.RunID(), *rowOf(t, db, "one").RunID)
	require.NoError(t, turn.End(t.Context()))
}

func TestARunIDFindsItsOwnTurn(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	options := legion.TurnOptions{Rules: []limiter.Rule{runningRule(1), tokensRule(1000)}, RunID: "job 7", Reserve: 300}

	first, err := plugin.Begin(t.Context(), "one", options)
	require.NoError(t, err)

	// What others have recorded meanwhile does not deny what was admitted before.
	require.NoError(t, store.For[models.LegionAgent](db).Save(t.Context(), store.Patch{AgentID: "two"}))
	require.NoError(t, db.Exec(`UPDATE legion_agents SET metadata = '{"tenant": "acme"}' WHERE agent_id = 'two'`).Error)
	_, err = store.For[models.LegionAgent](db).AppendUsage(t.Context(), "two", models.Usage{TotalTokens: 5000})
	require.NoError(t, err)

	retried, err := plugin.Begin(t.Context(), "one", options)
	require.NoError(t, err)
	require.Equal(t, first.RunID(), retried.RunID())
	require.EqualValues(t, 300, rowOf(t, db, "one").ReservedTokens)

	require.NoError(t, retried.End(t.Context()))

	_, err = plugin.Begin(t.Context(), "one", options)
	require.ErrorIs(t, err, legion.ErrInvalidTurn)
	require.ErrorContains(t, err, "RunID")
	require.NoError(t, first.End(t.Context()))
}

func TestATurnWithoutRulesIsNotLimitedAndKeepsItsGroups(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "new", legion.TurnOptions{})
	require.NoError(t, err)

	row := rowOf(t, db, "new")
	require.Nil(t, row.Metadata)
	require.Nil(t, row.StartedAt)
	require.Empty(t, turn.Decision().Rules)
	require.NoError(t, turn.End(t.Context()))

	require.NoError(t, limiter.Enforce(db, "old", limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Hour}}))
	started := rowOf(t, db, "old").StartedAt

	turn, err = plugin.Begin(t.Context(), "old", legion.TurnOptions{})
	require.NoError(t, err)
	require.JSONEq(t, `{"tenant": "acme"}`, rowOf(t, db, "old").Metadata.String())
	require.Equal(t, started, rowOf(t, db, "old").StartedAt)
	require.ErrorIs(t, limiter.Enforce(db, "other", runningRule(1)), limiter.ErrExceeded)
	require.NoError(t, turn.End(t.Context()))
}

func TestBeginRestoresADeletedAgent(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	agents := store.For[models.LegionAgent](db)

	for _, options := range []legion.TurnOptions{{}, under(runningRule(1))} {
		require.NoError(t, agents.Save(t.Context(), store.Patch{AgentID: "one"}))
		require.NoError(t, agents.Delete(t.Context(), "one"))
		require.NoError(t, plugin.Run(t.Context(), "one", options, func(ctx context.Context, _ *legion.Turn) error {
			_, err := agents.Get(ctx, "one")

			return err
		}))
	}
}

func TestOptionsThatCannotWork(t *testing.T) {
	t.Parallel()

	_, plugin := useTurns(t)
	_, untracked := useTurns(t, legion.WithoutUsageTracking())
	elsewhere := store.For[models.LegionAgent](pgtest.Open(t))
	evals := limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Hour, MaxEvals: limiter.Max(1)}}

	for name, test := range map[string]struct {
		plugin  *legion.Plugin
		agentID string
		options legion.TurnOptions
		want    error
		says    string
	}{
		"no agent ID":           {agentID: "", want: limiter.ErrInvalidAgentID, says: "empty"},
		"negative reservation":  {agentID: "a", options: legion.TurnOptions{Reserve: -1}, want: legion.ErrInvalidTurn, says: "Reserve is negative"},
		"long run ID":           {agentID: "a", options: legion.TurnOptions{RunID: string(make([]byte, 129))}, want: legion.ErrInvalidTurn, says: "RunID has 129 bytes"},
		"run ID with NUL":       {agentID: "a", options: legion.TurnOptions{RunID: "a\x00"}, want: legion.ErrInvalidTurn, says: "RunID"},
		"an invalid rule":       {agentID: "a", options: under(limiter.Rule{}), want: limiter.ErrInvalidRule, says: "identity is nil"},
		"tokens elsewhere":      {agentID: "a", options: legion.TurnOptions{Rules: []limiter.Rule{tokensRule(1)}, Store: elsewhere}, want: limiter.ErrInvalidRule, says: "Store elsewhere"},
		"evals elsewhere":       {agentID: "a", options: legion.TurnOptions{Rules: []limiter.Rule{evals}, Store: elsewhere}, want: limiter.ErrInvalidRule, says: "Store elsewhere"},
		"running elsewhere":     {agentID: "a", options: legion.TurnOptions{Rules: []limiter.Rule{runningRule(1)}, Store: elsewhere}, want: limiter.ErrInvalidRule, says: "Store elsewhere"},
		"reserved elsewhere":    {agentID: "a", options: legion.TurnOptions{Reserve: 1, Store: elsewhere}, want: legion.ErrInvalidTurn, says: "Reserve"},
		"tokens untracked":      {plugin: untracked, agentID: "a", options: under(tokensRule(1)), want: limiter.ErrInvalidRule, says: "WithoutUsageTracking"},
		"evals untracked":       {plugin: untracked, agentID: "a", options: under(evals), want: limiter.ErrInvalidRule, says: "WithoutUsageTracking"},
		"reservation untracked": {plugin: untracked, agentID: "a", options: legion.TurnOptions{Reserve: 1}, want: legion.ErrInvalidTurn, says: "WithoutUsageTracking"},
		"a store that is nil":   {agentID: "a", options: legion.TurnOptions{Store: (*store.Store[models.LegionAgent])(nil)}, want: legion.ErrInvalidTurn, says: "Store is a nil"},
		"a plugin without a db": {plugin: legion.New(), agentID: "a", want: legion.ErrInvalidConfig, says: "db.Use"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			using := plugin
			if test.plugin != nil {
				using = test.plugin
			}

			turn, err := using.Begin(t.Context(), test.agentID, test.options)
			require.ErrorIs(t, err, test.want)
			require.ErrorContains(t, err, test.says)
			require.Nil(t, turn)
		})
	}
}

func TestALeaseMustBePositive(t *testing.T) {
	t.Parallel()

	for _, lease := range []time.Duration{0, -time.Second} {
		err := pgtest.Open(t).Use(legion.New(legion.WithLease(lease)))
		require.ErrorIs(t, err, legion.ErrInvalidConfig)
		require.ErrorContains(t, err, "a lease must be positive")
	}
}

func TestRecordWithoutUsageTrackingIsAnError(t *testing.T) {
	t.Parallel()

	_, plugin := useTurns(t, legion.WithoutUsageTracking())

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	require.ErrorIs(t, turn.Record(t.Context(), models.Usage{TotalTokens: 1}), legion.ErrInvalidConfig)
	require.NoError(t, turn.End(t.Context()))
}

func TestATurnWithAStoreElsewhere(t *testing.T) {
	t.Parallel()

	for name, perStep := range map[string]bool{"at the end": false, "per step": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, plugin := useTurns(t)
			elsewhere := pgtest.Open(t)
			require.NoError(t, legion.Migrate(elsewhere))

			agents := store.For[models.LegionAgent](elsewhere)
			require.NoError(t, agents.Save(t.Context(), store.Patch{AgentID: "one"}))

			starts := limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(1)}}
			turn, err := plugin.Begin(t.Context(), "one", legion.TurnOptions{Rules: []limiter.Rule{starts}, Store: agents, PerStep: perStep})
			require.NoError(t, err)
			require.NoError(t, turn.Record(t.Context(), models.Usage{TotalTokens: 9}))
			require.NoError(t, turn.Checkpoint(t.Context(), []byte("state")))
			require.Equal(t, perStep, rowOf(t, elsewhere, "one").ConversationState != nil)
			require.NoError(t, turn.End(t.Context()))

			requireIdle(t, db, "one")
			require.Nil(t, rowOf(t, db, "one").ConversationState)
			require.Zero(t, tokensOf(t, db, "one"))
			require.EqualValues(t, 9, tokensOf(t, elsewhere, "one"))
			require.Equal(t, []byte("state"), rowOf(t, elsewhere, "one").ConversationState)
		})
	}

	t.Run("the plugin's own table is not elsewhere", func(t *testing.T) {
		t.Parallel()

		db, plugin := useTurns(t)
		options := legion.TurnOptions{Rules: []limiter.Rule{tokensRule(10)}, Store: store.For[models.LegionAgent](db)}
		require.NoError(t, plugin.Run(t.Context(), "one", options, func(ctx context.Context, turn *legion.Turn) error {
			return turn.Record(ctx, models.Usage{TotalTokens: 3})
		}))
		require.EqualValues(t, 3, tokensOf(t, db, "one"))
	})
}

func TestAPluginServesOneDatabase(t *testing.T) {
	t.Parallel()

	plugin := legion.New()
	require.NoError(t, pgtest.Open(t).Use(plugin))

	err := pgtest.Open(t).Use(plugin)
	require.ErrorIs(t, err, legion.ErrInvalidConfig)
	require.ErrorContains(t, err, "make one for each")
}
