package legion_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

func reserving(tokens int64, rules ...limiter.Rule) legion.TurnOptions {
	return legion.TurnOptions{Rules: rules, Reserve: tokens}
}

func TestConcurrentTurnsCannotOvershootABudgetThatTheyReserve(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	var (
		turns         sync.WaitGroup
		begun, denied atomic.Int64
	)

	allTried := make(chan struct{})

	for i := range 20 {
		turns.Go(func() {
			err := plugin.Run(t.Context(), fmt.Sprint("agent ", i), reserving(300, tokensRule(1000)), func(ctx context.Context, turn *legion.Turn) error {
				begun.Add(1)
				<-allTried

				for range 3 {
					if err := turn.Record(ctx, models.Usage{TotalTokens: 100}); err != nil {
						return err
					}
				}

				return nil
			})

			if errors.Is(err, limiter.ErrExceeded) {
				denied.Add(1)
			}

			if begun.Load()+denied.Load() == 20 && begun.Load() == 3 {
				select {
				case <-allTried:
				default:
					close(allTried)
				}
			}
		})
	}

	turns.Wait()
	require.EqualValues(t, 3, begun.Load())
	require.EqualValues(t, 17, denied.Load())

	var tokens int64
	require.NoError(t, db.Raw("SELECT sum((entry ->> 'total_tokens')::bigint) FROM legion_agents, jsonb_array_elements(usage) AS entry").Scan(&tokens).Error)
	require.EqualValues(t, 900, tokens)

	var reserved int64
	require.NoError(t, db.Raw("SELECT sum(reserved_tokens) FROM legion_agents").Scan(&reserved).Error)
	require.Zero(t, reserved)
}

func TestAReservationIsGrantedAsAWholeOrNotAtAll(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", reserving(600, tokensRule(1000)))
	require.NoError(t, err)

	for _, fits := range []int64{0, 400} {
		other, err := plugin.Begin(t.Context(), "two", reserving(fits, tokensRule(1000)))
		require.NoError(t, err)
		require.NoError(t, other.End(t.Context()))
	}

	for _, tooMuch := range []int64{401, 1000, 1001} {
		_, err := plugin.Begin(t.Context(), "two", reserving(tooMuch, tokensRule(1000)))

		exceeded := &limiter.ExceededError{}
		require.ErrorAs(t, err, &exceeded)
		require.Equal(t, []limiter.Quota{{Limit: limiter.LimitTokens, Max: 1000, Used: 600, Requested: tooMuch}}, exceeded.Violations)
		require.ErrorContains(t, err, fmt.Sprintf("600 of 1000 tokens used in 1h0m0s, and %d more to be reserved", tooMuch))

		if tooMuch > 1000 {
			require.Zero(t, exceeded.RetryAfter, "it never fits")
		} else {
			require.InDelta(t, 30, exceeded.RetryAfter.Seconds(), 5, "when the other's lease is over")
		}
	}

	require.NoError(t, turn.End(t.Context()))
	require.NoError(t, limiter.Enforce(db, "three", tokensRule(1)))
}

func TestRecordingMoreThanWasReservedIsRecordedAllTheSame(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", reserving(100, tokensRule(1000)))
	require.NoError(t, err)

	check := func(wantTokens, wantReserved int64) {
		report, err := limiter.Check(db, "", tokensRule(1000))
		require.NoError(t, err)
		require.Equal(t, wantTokens+wantReserved, report.Rules[0].Quotas[0].Used)
		require.Equal(t, wantReserved, rowOf(t, db, "one").ReservedTokens)
	}

	check(0, 100)
	require.NoError(t, turn.Record(t.Context(), models.Usage{TotalTokens: 60}))
	check(60, 40)
	require.NoError(t, turn.Record(t.Context(), models.Usage{TotalTokens: 900}))
	check(960, 0)
	require.NoError(t, turn.End(t.Context()))
	check(960, 0)
}

func TestAParentAndItsChildrenAreAgentsOfTheirOwnInEveryGroup(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	mine := limiter.Rule{Identity: limiter.Identity{"job": 7}, Policy: limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(10)}}
	group := limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(6), MaxTokens: limiter.Max(1000)}}

	err := plugin.Run(t.Context(), "parent", under(group), func(ctx context.Context, parent *legion.Turn) error {
		require.NoError(t, parent.Record(ctx, models.Usage{TotalTokens: 1}))

		for i := range 5 {
			// The child names rules of its own, and cannot drop those of its parent.
			if err := plugin.Run(ctx, fmt.Sprint("child ", i), under(mine), func(ctx context.Context, child *legion.Turn) error {
				found, ok := legion.TurnFrom(ctx)
				require.True(t, ok)
				require.Same(t, child, found)

				return child.Record(ctx, models.Usage{TotalTokens: 10})
			}); err != nil {
				return err
			}
		}

		// One too many for the group, an error like any other.
		err := plugin.Run(ctx, "child 5", legion.TurnOptions{}, func(context.Context, *legion.Turn) error { return nil })
		require.ErrorIs(t, err, limiter.ErrExceeded)
		require.NoError(t, ctx.Err())

		return nil
	})
	require.NoError(t, err)

	report, err := limiter.Check(db, "", group, mine)
	require.NoError(t, err)
	require.Equal(t, limiter.Usage{Agents: 6, Tokens: 51}, report.Rules[0].Usage)
	require.EqualValues(t, 5, report.Rules[1].Usage.Agents)
	require.Equal(t, "parent", *rowOf(t, db, "child 3").ParentAgentID)
	require.Nil(t, rowOf(t, db, "parent").ParentAgentID)
}

func TestAChildHasNoRoomBesideAParentThatHoldsTheOnlySlot(t *testing.T) {
	t.Parallel()

	_, plugin := useTurns(t)

	require.NoError(t, plugin.Run(t.Context(), "parent", under(runningRule(1)), func(ctx context.Context, _ *legion.Turn) error {
		_, err := plugin.Begin(ctx, "child", legion.TurnOptions{})
		require.ErrorIs(t, err, limiter.ErrExceeded)

		_, err = plugin.Begin(ctx, "parent", legion.TurnOptions{})
		require.ErrorIs(t, err, legion.ErrAgentRunning)

		return nil
	}))
}

func TestAChildWorksInItsParentsWay(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	elsewhere := &memoryStore{}

	require.NoError(t, plugin.Run(t.Context(), "parent", legion.TurnOptions{Store: elsewhere, PerStep: true}, func(ctx context.Context, _ *legion.Turn) error {
		child, err := plugin.Begin(ctx, "child", legion.TurnOptions{})
		require.NoError(t, err)
		require.NoError(t, child.Record(ctx, models.Usage{TotalTokens: 5}))
		require.NoError(t, child.Checkpoint(ctx, []byte("state")))
		require.Equal(t, []string{"child: 5 tokens", "child: state"}, elsewhere.log)

		return child.End(ctx)
	}))
	require.Zero(t, tokensOf(t, db, "child"))
}

// memoryStore is a store of an application's own.
type memoryStore struct{ log []string }

func (m *memoryStore) AppendUsage(_ context.Context, agentID string, entry models.Usage) (bool, error) {
	m.log = append(m.log, fmt.Sprintf("%s: %d tokens", agentID, entry.TotalTokens))

	return true, nil
}

func (m *memoryStore) Save(_ context.Context, patch store.Patch) error {
	m.log = append(m.log, fmt.Sprintf("%s: %s", patch.AgentID, patch.ConversationState))

	return nil
}

func TestUsageOutsideATransactionSurvivesItsRollback(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)

	turn, err := plugin.Begin(t.Context(), "one", under(tokensRule(1000)))
	require.NoError(t, err)

	require.ErrorIs(t, db.Transaction(func(tx *gorm.DB) error {
		// Inside, it would hold the agent's row, for which Record below would wait.
		require.NoError(t, tx.Exec("CREATE TABLE messages (id int)").Error)
		require.NoError(t, turn.Record(t.Context(), models.Usage{TotalTokens: 10}))

		return gorm.ErrInvalidTransaction
	}), gorm.ErrInvalidTransaction)

	require.ErrorIs(t, db.Transaction(func(tx *gorm.DB) error {
		_, err := store.For[models.LegionAgent](tx).AppendUsage(t.Context(), "one", models.Usage{TotalTokens: 500})
		require.NoError(t, err)

		return gorm.ErrInvalidTransaction
	}), gorm.ErrInvalidTransaction)

	require.EqualValues(t, 10, tokensOf(t, db, "one"))
	require.NoError(t, turn.End(t.Context()))
}
