package legion_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// A network stands before the server, and a test can lose a reply on it, or everything.
type network struct {
	*pgtest.Proxy

	// lose is what a client has to say, one of them, for its connection to be cut once the
	// server has answered, or, with before, once the server would have heard it. It happens
	// once.
	lose atomic.Pointer[loss]

	// steps is how many times the clients may say something before one is cut off in the
	// same way, once. 0: none is.
	steps atomic.Int64

	lost atomic.Int64
}

type loss struct {
	said   []string
	before bool

	// answered, if it is not nil, is called once the server has answered.
	answered func()
}

func (l *loss) isIn(said []byte) bool {
	return slices.ContainsFunc(l.said, func(word string) bool { return bytes.Contains(said, []byte(word)) })
}

// judge says what becomes of what a client has said.
func (n *network) judge(said []byte) *pgtest.Loss {
	if n.steps.Load() > 0 && n.steps.Add(-1) == 0 {
		return &pgtest.Loss{Before: n.lost.Add(1)%2 == 1}
	}

	expected := n.lose.Load()
	if expected == nil || !expected.isIn(said) || !n.lose.CompareAndSwap(expected, nil) {
		return nil
	}

	n.lost.Add(1)

	return &pgtest.Loss{Before: expected.before, Answered: expected.answered}
}

// useNetwork is useTurns through a network. direct is a connection past it.
func useNetwork(t *testing.T, options ...legion.Option) (lossy *network, direct *gorm.DB, plugin *legion.Plugin) {
	t.Helper()

	dsn := pgtest.Database(t)
	direct = pgtest.OpenDSN(t, dsn)
	require.NoError(t, legion.Migrate(direct))

	proxy, through := pgtest.StartProxyBefore(t, dsn)
	lossy = &network{Proxy: proxy}
	proxy.Judge(lossy.judge)

	plugin = legion.New(append([]legion.Option{legion.WithObserver(nil)}, options...)...)
	require.NoError(t, pgtest.OpenDSN(t, through).Use(plugin))

	// In this order: the last cleanup is the first.
	shutDownAfter(t, plugin, longest)
	t.Cleanup(func() { proxy.Set(pgtest.ProxyPasses) })

	return lossy, direct, plugin
}

func TestALostReplyIsHarmless(t *testing.T) {
	t.Parallel()

	for name, before := range map[string]bool{"the server has heard it": false, "the server has not": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			network, db, plugin := useNetwork(t)
			losing := func(said ...string) { network.lose.Store(&loss{said: said, before: before}) }

			losing("commit")

			turn, err := plugin.Begin(t.Context(), "one", legion.TurnOptions{
				Rules: []limiter.Rule{runningRule(1), tokensRule(1000)}, Reserve: 500, RunID: "run of the test", PerStep: true,
			})
			require.NoError(t, err)
			require.EqualValues(t, 1, network.lost.Load())
			require.Equal(t, "run of the test", *rowOf(t, db, "one").RunID)
			require.EqualValues(t, 500, rowOf(t, db, "one").ReservedTokens)

			losing("usage of the test")
			require.NoError(t, turn.Record(t.Context(), models.Usage{ID: "usage of the test", TotalTokens: 100}))
			require.EqualValues(t, 2, network.lost.Load())
			require.EqualValues(t, 100, tokensOf(t, db, "one"))
			require.EqualValues(t, 400, rowOf(t, db, "one").ReservedTokens)

			losing("state of the test", hex.EncodeToString([]byte("state of the test"))) // bytes as text, in some modes
			require.NoError(t, turn.Checkpoint(t.Context(), []byte("state of the test")))
			require.EqualValues(t, 3, network.lost.Load())
			require.Equal(t, []byte("state of the test"), rowOf(t, db, "one").ConversationState)

			losing("run of the test")
			require.NoError(t, turn.End(t.Context()))
			require.EqualValues(t, 4, network.lost.Load())
			requireIdle(t, db, "one")
			require.NoError(t, limiter.Enforce(db, "two", runningRule(1)))
		})
	}
}

func TestABeginWaitsUntilItsRunIsGivenBack(t *testing.T) {
	t.Parallel()

	network, db, plugin := useNetwork(t)
	turn, err := plugin.Begin(t.Context(), "another", under(runningRule(2))) // which registers and connects
	require.NoError(t, err)
	require.NoError(t, turn.End(t.Context()))

	locker := db.Begin()
	t.Cleanup(func() { locker.Rollback() })

	ctx, cancel := context.WithCancel(t.Context())
	network.lose.Store(&loss{said: []string{"commit\x00"}, answered: func() {
		if err := locker.Exec("SELECT FROM legion_agents FOR UPDATE").Error; err != nil {
			t.Error(err)
		}

		cancel()
	}})

	options := under(runningRule(2))
	options.RunID = "run"

	_, err = plugin.Begin(ctx, "one", options)
	require.ErrorIs(t, err, context.Canceled)

	began := make(chan error, 1)

	go func() {
		_, err := plugin.Begin(t.Context(), "one", options)
		began <- err
	}()

	requireWaiting(t, db)
	time.Sleep(100 * time.Millisecond) // for a Begin that does not wait to be behind in the line
	require.NoError(t, locker.Rollback().Error)
	require.ErrorIs(t, <-began, legion.ErrInvalidTurn, "the run has begun, and ended")
	requireIdle(t, db, "one")
}

func TestATurnThatIsCutOffEndsBeforeAnotherAgentIsAdmitted(t *testing.T) {
	t.Parallel()

	network, db, plugin := useNetwork(t, legion.WithLease(shortLease))

	turn, err := plugin.Begin(t.Context(), "held", under(runningRule(1)))
	require.NoError(t, err)
	requireHolds(t, turn, 1.5)

	network.Set(pgtest.ProxySwallows)

	require.Eventually(t, func() bool {
		err := limiter.Enforce(db, "next", runningRule(1))
		if err == nil {
			require.ErrorIs(t, context.Cause(turn.Context()), legion.ErrLeaseLost)
		}

		return err == nil
	}, longest, 2*time.Millisecond)

	network.Set(pgtest.ProxyPasses)
	require.ErrorIs(t, turn.End(t.Context()), legion.ErrLeaseLost)
	require.NoError(t, turn.Record(t.Context(), models.Usage{TotalTokens: 5}))
	require.EqualValues(t, 5, tokensOf(t, db, "held"))
}
