package legion_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"net"
	"net/url"
	"slices"
	"sync"
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

// A network is a TCP proxy before the server, on which a test can lose a reply, or
// everything.
type network struct {
	listener net.Listener
	server   string

	// silent forwards nothing any more, and closes nothing.
	silent atomic.Bool

	// lose is what a client has to say, one of them, for its connection to be cut once the
	// server has answered, or, with before, once the server would have heard it. It happens
	// once.
	lose atomic.Pointer[loss]

	// steps is how many times the clients may say something before one is cut off in the
	// same way, once. 0: none is.
	steps atomic.Int64

	lost        atomic.Int64
	connections sync.WaitGroup
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

// startNetwork returns a network, and the DSN of the database as it is reached through
// it.
func startNetwork(t *testing.T, dsn string) (*network, string) {
	t.Helper()

	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)

	parsed, err := url.Parse(dsn)
	require.NoError(t, err)

	started := &network{listener: listener, server: parsed.Host}
	parsed.Host = listener.Addr().String()

	done, stop := context.WithCancel(context.WithoutCancel(t.Context()))

	started.connections.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}

			started.connections.Go(func() { started.connect(done, client) })
		}
	})

	t.Cleanup(func() {
		stop()
		require.NoError(t, listener.Close())
		started.connections.Wait()
	})

	return started, parsed.String()
}

func (n *network) connect(done context.Context, client net.Conn) {
	server, err := new(net.Dialer).DialContext(done, "tcp", n.server)
	if err != nil {
		_ = client.Close()

		return
	}

	ctx, cut := context.WithCancel(done)
	stop := context.AfterFunc(ctx, func() {
		_ = client.Close()
		_ = server.Close()
	})

	defer stop()
	defer cut()

	// answers is set when the server's next words are not to arrive.
	var answers atomic.Pointer[loss]

	var directions sync.WaitGroup

	directions.Go(func() {
		defer cut()
		n.forward(client, server, func(said []byte) bool {
			if n.steps.Load() > 0 && n.steps.Add(-1) == 0 {
				n.lost.Add(1)
				answers.Store(&loss{})

				return n.lost.Load()%2 == 0
			}

			expected := n.lose.Load()
			if expected == nil || !expected.isIn(said) || !n.lose.CompareAndSwap(expected, nil) {
				return true
			}

			n.lost.Add(1)
			answers.Store(expected)

			return !expected.before
		})
	})
	directions.Go(func() {
		defer cut()
		n.forward(server, client, func([]byte) bool {
			unheard := answers.Load()
			if unheard != nil && unheard.answered != nil {
				unheard.answered()
			}

			return unheard == nil
		})
	})
	directions.Wait()
}

// forward copies until hear says no, or either side is closed.
func (n *network) forward(from, to net.Conn, hear func([]byte) bool) {
	buffer := make([]byte, 64<<10)

	for {
		length, err := from.Read(buffer)
		if err != nil {
			return
		}

		for n.silent.Load() {
			time.Sleep(time.Millisecond)

			if _, err := to.Write(nil); err != nil {
				return
			}
		}

		if !hear(buffer[:length]) {
			return
		}

		if _, err := to.Write(buffer[:length]); err != nil {
			return
		}
	}
}

// useNetwork is useTurns through a network. direct is a connection past it.
func useNetwork(t *testing.T, options ...legion.Option) (network *network, direct *gorm.DB, plugin *legion.Plugin) {
	t.Helper()

	dsn := pgtest.Database(t)
	direct = pgtest.OpenDSN(t, dsn)
	require.NoError(t, legion.Migrate(direct))

	network, through := startNetwork(t, dsn)
	plugin = legion.New(append([]legion.Option{legion.WithObserver(nil)}, options...)...)
	require.NoError(t, pgtest.OpenDSN(t, through).Use(plugin))

	t.Cleanup(func() {
		network.silent.Store(false)

		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), longest)
		defer cancel()

		require.NoError(t, plugin.Shutdown(ctx))
	})

	return network, direct, plugin
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

	network.silent.Store(true)

	require.Eventually(t, func() bool {
		err := limiter.Enforce(db, "next", runningRule(1))
		if err == nil {
			require.ErrorIs(t, context.Cause(turn.Context()), legion.ErrLeaseLost)
		}

		return err == nil
	}, longest, 2*time.Millisecond)

	network.silent.Store(false)
	require.ErrorIs(t, turn.End(t.Context()), legion.ErrLeaseLost)
	require.NoError(t, turn.Record(t.Context(), models.Usage{TotalTokens: 5}))
	require.EqualValues(t, 5, tokensOf(t, db, "held"))
}
