package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/migration"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
)

// watched is a database with triggers, and a watch through a proxy that the test can cut.
type watched struct {
	*watch

	db     *gorm.DB
	agents *Store[models.LegionAgent]
	proxy  *pgtest.Proxy
	config *pgx.ConnConfig
}

func setupWatch(t *testing.T) watched {
	t.Helper()

	db := pgtest.Open(t)
	session, err := database.Session(db)
	require.NoError(t, err)
	require.NoError(t, migration.Up(session, database.SettingsOf(session), migration.Options{Notify: true}))

	config, err := pgx.ParseConfig(pgtest.WithParameter(pgtest.DSN(db), "application_name", "watch"))
	require.NoError(t, err)

	proxy := pgtest.StartProxy(t, net.JoinHostPort(config.Host, fmt.Sprint(config.Port)))
	direct := config.DialFunc
	config.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) { return direct(ctx, "tcp", proxy.Address()) }

	agents := For[models.LegionAgent](db)
	watch := agents.watch()
	watch.firstWait, watch.lastWait = time.Millisecond, 50*time.Millisecond
	watch.connectOf = func(context.Context) (database.Connect, error) {
		return func(ctx context.Context) (*pgx.Conn, error) { return pgx.ConnectConfig(ctx, config) }, nil
	}

	return watched{watch: watch, db: db, agents: agents, proxy: proxy, config: config}
}

// awaitDials waits for n more attempts to connect.
func (w watched) awaitDials(t *testing.T, n int) {
	t.Helper()

	before := w.proxy.Dials()
	require.Eventually(t, func() bool { return w.proxy.Dials() >= before+n }, time.Minute, time.Millisecond)
}

// started is a watch whose events the test receives one by one.
type started struct {
	events chan Event
	err    error
	ended  chan struct{}
	cancel context.CancelCauseFunc
}

func (w watched) start(t *testing.T) *started {
	t.Helper()

	ctx, cancel := context.WithCancelCause(t.Context())
	s := &started{events: make(chan Event), ended: make(chan struct{}), cancel: cancel}

	go func() {
		defer close(s.ended)

		for event, err := range w.events(ctx) {
			if err != nil {
				s.err = err

				continue
			}

			select {
			case s.events <- event:
			case <-ctx.Done():
			}
		}
	}()

	t.Cleanup(func() {
		cancel(nil)
		<-s.ended
	})
	require.Equal(t, Event{Missed: true}, s.next(t))

	return s
}

func (s *started) next(t *testing.T) Event {
	t.Helper()

	select {
	case event := <-s.events:
		return event
	case <-s.ended:
		t.Fatalf("the watch has ended: %v", s.err)
	case <-time.After(time.Minute):
		t.Fatal("no event")
	}

	return Event{}
}

func (s *started) end(t *testing.T) error {
	t.Helper()

	select {
	case <-s.ended:
		return s.err
	case <-time.After(time.Minute):
		t.Fatal("the watch does not end")
	}

	return nil
}

func (w watched) save(t *testing.T, agentID string) {
	t.Helper()
	require.NoError(t, w.agents.Save(t.Context(), Patch{AgentID: agentID}))
}

// connections are the sessions of the watch.
func (w watched) connections(t *testing.T) (count int64) {
	t.Helper()
	require.NoError(t, w.db.Raw("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'watch'").Scan(&count).Error)

	return count
}

func (w watched) terminate(t *testing.T) {
	t.Helper()

	var terminated []bool
	require.NoError(t, w.db.Raw("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'watch'").
		Scan(&terminated).Error)
	require.Equal(t, []bool{true}, terminated)
}

func TestALostConnectionIsToldAndReplaced(t *testing.T) {
	t.Parallel()

	for name, lose := range map[string]func(t *testing.T, w watched){
		"terminated by the server": func(t *testing.T, w watched) { t.Helper(); w.terminate(t) },
		"cut":                      func(_ *testing.T, w watched) { w.proxy.Set(pgtest.ProxyRefuses); w.proxy.Set(pgtest.ProxyPasses) },
		"refused for a while": func(t *testing.T, w watched) {
			t.Helper()
			w.proxy.Set(pgtest.ProxyRefuses)
			w.awaitDials(t, 5)
			w.proxy.Set(pgtest.ProxyPasses)
		},
		"swallowed": func(t *testing.T, w watched) {
			t.Helper()
			w.proxy.Set(pgtest.ProxySwallows)
			w.save(t, "unheard")
			w.awaitDials(t, 2)
			w.proxy.Set(pgtest.ProxyPasses)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			w := setupWatch(t)
			w.idle, w.answer = 50*time.Millisecond, 500*time.Millisecond
			s := w.start(t)

			for _, round := range []string{"first", "second"} {
				w.save(t, round+" before")
				require.Equal(t, Event{AgentID: round + " before"}, s.next(t))

				lose(t, w)
				require.Equal(t, Event{Missed: true}, s.next(t))

				w.save(t, round+" after")
				require.Equal(t, Event{AgentID: round + " after"}, s.next(t))
			}

			s.cancel(nil)
			require.ErrorIs(t, s.end(t), context.Canceled)
			require.Eventually(t, func() bool { return w.connections(t) == 0 }, time.Minute, 10*time.Millisecond)
		})
	}
}

func TestAWatchWhoseSessionsTheServerEndsGoesOn(t *testing.T) {
	t.Parallel()

	w := setupWatch(t)
	w.idle = time.Hour // it says nothing by itself
	w.config.RuntimeParams["idle_session_timeout"] = "100"
	s := w.start(t)
	heard, missed := false, 0

	// An event that is committed while there is no session is one that is missed.
	for !heard || missed < 3 {
		event := s.next(t)
		heard = heard || event.AgentID == "a"

		if event.Missed {
			missed++
			w.save(t, "a")
		}
	}
}

func TestAQuietConnectionIsKept(t *testing.T) {
	t.Parallel()

	w := setupWatch(t)
	w.idle = time.Millisecond
	s := w.start(t)

	// Several rounds of asking whether it is alive.
	before := w.proxy.Sent()
	require.Eventually(t, func() bool { return w.proxy.Sent() > before+10 }, time.Minute, time.Millisecond)

	w.save(t, "a")
	require.Equal(t, Event{AgentID: "a"}, s.next(t))
	require.Equal(t, 1, w.proxy.Dials())
}

func TestASessionThatNoLongerListensIsReplaced(t *testing.T) {
	t.Parallel()

	// What a pooler in transaction mode does: the session that is asked is another.
	w := setupWatch(t)
	w.idle = time.Millisecond
	direct := pgtest.DSN(w.db)
	opened := 0
	w.connectOf = func(context.Context) (database.Connect, error) {
		return func(ctx context.Context) (*pgx.Conn, error) {
			opened++
			config, err := pgx.ParseConfig(direct)
			if err != nil {
				return nil, err
			}

			if opened == 1 {
				config.DialFunc = forgetful
			}

			return pgx.ConnectConfig(ctx, config)
		}, nil
	}

	s := w.start(t)
	require.Equal(t, Event{Missed: true}, s.next(t))
	w.save(t, "a")
	require.Equal(t, Event{AgentID: "a"}, s.next(t))
}

// forgetful is a connection on which LISTEN has no effect.
func forgetful(ctx context.Context, network, address string) (net.Conn, error) {
	connection, err := new(net.Dialer).DialContext(ctx, network, address)

	return &forgetfulConnection{connection}, err
}

type forgetfulConnection struct{ net.Conn }

func (c *forgetfulConnection) Write(message []byte) (int, error) {
	return c.Conn.Write([]byte(strings.Replace(string(message), `LISTEN "legion_`, `LISTEN "nobody_`, 1)))
}

func TestASlowReaderIsToldThatItMissedEvents(t *testing.T) {
	t.Parallel()

	w := setupWatch(t)
	w.pending = 3
	missed, saved := 0, 0

	for event, err := range w.events(t.Context()) {
		require.NoError(t, err)

		// The reader hurries now, and is told of single agents again.
		if strings.HasPrefix(event.AgentID, "last") {
			break
		}

		switch {
		case event.Missed && missed > 0:
			missed++
			w.save(t, fmt.Sprint("last ", missed)) // which may be missed too
		case event.Missed:
			missed++

			fallthrough
		case missed == 1:
			for range 10 {
				saved++
				w.save(t, fmt.Sprint("agent ", saved))
			}
		}
	}

	require.GreaterOrEqual(t, missed, 2)
	require.Equal(t, 1, w.proxy.Dials())
}

func TestACancelledWatchEndsAtOnce(t *testing.T) {
	t.Parallel()

	for name, mode := range map[string]pgtest.ProxyMode{"while it listens": pgtest.ProxyPasses, "while the network is gone": pgtest.ProxySwallows, "while it waits to connect again": pgtest.ProxyRefuses} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			w := setupWatch(t)
			w.idle, w.answer, w.firstWait, w.lastWait = time.Hour, time.Hour, time.Hour, time.Hour
			s := w.start(t)
			w.proxy.Set(mode)

			s.cancel(io.ErrShortBuffer)
			require.ErrorIs(t, s.end(t), io.ErrShortBuffer)
		})
	}
}

func TestACancelledWatchTellsNothingMore(t *testing.T) {
	t.Parallel()

	w := setupWatch(t)
	ctx, cancel := context.WithCancel(t.Context())

	defer cancel()

	var told []Event

	for event, err := range w.events(ctx) {
		switch {
		case err != nil:
			require.ErrorIs(t, err, context.Canceled)
		case event.Missed:
			// All of them are heard at once.
			require.NoError(t, w.db.Exec("INSERT INTO legion_agents (agent_id) SELECT number FROM generate_series(1, 100) AS number").Error)
		default:
			told = append(told, event)

			cancel()
		}
	}

	require.Equal(t, []Event{{AgentID: "1"}}, told)
}

func TestTheWaitToConnectAgainGrowsToABound(t *testing.T) {
	t.Parallel()

	b := newBackoff(50*time.Millisecond, 30*time.Second)
	waits := func(longest time.Duration) {
		wait := b.wait()
		require.GreaterOrEqual(t, wait, longest/2)
		require.Less(t, wait, longest)
	}

	for longest := 50 * time.Millisecond; longest < 30*time.Second; longest *= 2 {
		waits(longest)
	}

	waits(30 * time.Second)
	waits(30 * time.Second)

	b.held(29 * time.Second)
	waits(30 * time.Second)

	b.held(31 * time.Second)
	waits(50 * time.Millisecond)
	waits(100 * time.Millisecond)
}

func TestTheFirstConnection(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		err   error
		waits bool
	}{
		"refused by the network":          {err: &net.OpError{Op: "dial", Err: errors.New("refused")}, waits: true},
		"out of time":                     {err: context.DeadlineExceeded, waits: true},
		"refused by a server that starts": {err: &pgconn.PgError{Code: "57P03"}, waits: true},
		"one too many":                    {err: &pgconn.PgError{Code: "53300"}, waits: true},
		"wrong password":                  {err: &pgconn.PgError{Code: "28P01"}},
		"mistake of the application":      {err: errors.New("no token")},
		"impossible":                      {err: fault.ErrInvalidConfig},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			w := setupWatch(t)
			connectOf := w.connectOf
			attempts := 0
			w.connectOf = func(ctx context.Context) (database.Connect, error) {
				attempts++
				if attempts == 1 {
					return nil, test.err
				}

				return connectOf(ctx)
			}

			if test.waits {
				w.start(t)
				require.Equal(t, 2, attempts)

				return
			}

			for event, err := range w.events(t.Context()) {
				require.Empty(t, event)
				require.ErrorIs(t, err, test.err)
			}

			require.Equal(t, 1, attempts)
		})
	}
}

func TestWatchGoesOnWhateverRefusesItLater(t *testing.T) {
	t.Parallel()

	w := setupWatch(t)
	connectOf := w.connectOf

	var refuse sync.Map

	w.connectOf = func(ctx context.Context) (database.Connect, error) {
		connect, err := connectOf(ctx)

		return func(ctx context.Context) (*pgx.Conn, error) {
			if _, refused := refuse.LoadAndDelete("password"); refused {
				return nil, &pgconn.PgError{Code: "28P01"}
			}

			return connect(ctx)
		}, err
	}

	s := w.start(t)
	refuse.Store("password", true)
	w.terminate(t)
	require.Equal(t, Event{Missed: true}, s.next(t))

	// Triggers that are gone will not come back by themselves.
	require.NoError(t, w.db.Exec("DROP FUNCTION legion_agents_notify() CASCADE").Error)
	w.terminate(t)
	require.ErrorIs(t, s.end(t), ErrNotMigrated)
}

func TestTheBacklogKeepsEachAgentOnceAndIsBounded(t *testing.T) {
	t.Parallel()

	b := newBacklog(3)
	takeAll := func() (events []Event) {
		for event, ok := b.take(); ok; event, ok = b.take() {
			events = append(events, event)
		}

		return events
	}

	require.Empty(t, takeAll())

	for _, agentID := range []string{"b", "a", "b", "c", "a"} {
		b.add(agentID)
	}

	b.miss()
	require.Equal(t, []Event{{Missed: true}, {AgentID: "b"}, {AgentID: "a"}, {AgentID: "c"}}, takeAll())

	for number := range 10_000 {
		b.add(fmt.Sprint(number))
		require.LessOrEqual(t, len(b.agentIDs), 3)
		require.Len(t, b.waiting, len(b.agentIDs))
	}

	require.Equal(t, []Event{{Missed: true}}, takeAll()[:1])
	b.add("9999")
	require.Equal(t, []Event{{AgentID: "9999"}}, takeAll(), "what was taken may come again")
}
