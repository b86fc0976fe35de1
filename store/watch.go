package store

import (
	"context"
	"fmt"
	"iter"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
)

// An Event of [Store.Watch] says which agent has changed, or that changes may have been
// missed.
type Event struct {
	// AgentID is the agent whose row was inserted, changed or deleted. What it is now, Get
	// says: several changes may have become one event. Empty: Missed.
	AgentID string

	// Missed says that events before this one may have been lost, of whatever agent: read
	// again what you keep. It is the first event of every watch, since nobody knows what
	// happened before it.
	Missed bool
}

const (
	// watchIdle is how long a watch hears nothing before it asks whether the connection is
	// still one.
	watchIdle = 30 * time.Second

	// watchAnswer bounds the wait for each answer of the server, and for a connection.
	watchAnswer = 10 * time.Second

	// watchFirstWait and watchLastWait are the bounds of the wait before connecting again.
	watchFirstWait = 50 * time.Millisecond
	watchLastWait  = 30 * time.Second

	// watchPending is how many agents may wait for the reader: with the longest IDs, 2 MiB.
	watchPending = 4096
)

// Watch tells which agents change, whoever changes them, until ctx ends or the reader
// leaves the loop:
//
//	for event, err := range agents.Watch(ctx) {
//		switch {
//		case err != nil:
//			return err // the last round: ctx has ended, or there is nothing to watch
//		case event.Missed:
//			// read everything again that is kept
//		default:
//			// read event.AgentID again with Get
//		}
//	}
//
// It needs the triggers of legion.Migrate(db, legion.WithNotify()). An event comes after
// the commit, never for what was rolled back, and not for a lease that was only renewed.
// It has no more than the ID: Get has the agent, or [ErrNotFound] after its deletion. So
// what a reader keeps is right once it has read what each event names.
//
// The first event has Missed set, and comes when the watch listens: what is committed
// after that is told. Whenever the connection is lost, Watch connects again, after
// 50 ms at first and at most 30 s, logs a warning with slog.Default, and then says Missed
// again. A connection that has gone dead without a word is found out within a minute.
//
// A reader that is slower than the changes costs no memory beyond 4,096 agents: further
// changes of an agent that waits are one event, and when more agents wait, all of
// them become one event with Missed set. The database is never held up.
//
// It uses one connection outside the pool for as long as it runs, see
// legion.WithConnect, and takes one of the pool's for a moment when it starts. That
// connection has to be a session: behind PgBouncer in transaction mode nothing would
// be heard, so let legion.WithConnect connect to the server directly, or to a primary
// where the pool has replicas. When the loop is left, in whatever way, the connection is
// closed and nothing is left running. Each range over the result is a watch of its own.
//
// Errors, each in the last round of the loop: the cause of ctx when that has ended;
// [ErrNotMigrated] without the triggers; [ErrInvalidArgument] for a store of a
// transaction; [ErrInvalidConfig] where no connection beside the pool can be opened; and
// any other error of the first attempt to connect, but for a server that cannot be
// reached, for which Watch waits.
func (s *Store[T]) Watch(ctx context.Context) iter.Seq2[Event, error] {
	return s.watch().events(ctx)
}

// watch returns a watch of the store that is still to begin.
func (s *Store[T]) watch() *watch {
	w := &watch{
		err:       s.err,
		idle:      watchIdle,
		answer:    watchAnswer,
		firstWait: watchFirstWait,
		lastWait:  watchLastWait,
		pending:   watchPending,
	}

	switch {
	case s.err != nil:
	case database.InTransaction(s.db):
		w.err = fmt.Errorf("%w: Watch outlives any transaction: make its store with For from the pool's db", ErrInvalidArgument)
	default:
		w.table = s.db.Statement.Quote(s.agents())
		w.connectOf = func(ctx context.Context) (database.Connect, error) {
			return database.ConnectOf(s.db.Session(&gorm.Session{NewDB: true, Context: ctx}), s.settings)
		}
	}

	return w
}

// watch is what [Store.Watch] does, whatever the store's type. It is not changed once it
// has begun.
type watch struct {
	// err is why there is nothing to watch.
	err error

	// table is the quoted name of the agents' table.
	table string

	connectOf func(ctx context.Context) (database.Connect, error)

	// The constants of their names, for tests to change.
	idle, answer        time.Duration
	firstWait, lastWait time.Duration
	pending             int
}

// events runs the watch in the goroutine of its reader. Beside it a second one listens,
// since a listener that waits for its reader would hold up the server's queue. It has
// ended, and has closed its connection, when the loop is left.
func (w *watch) events(ctx context.Context) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		if w.err != nil {
			yield(Event{}, w.err)

			return
		}

		waiting := newBacklog(w.pending)
		listening, stop := context.WithCancel(ctx)
		ended := make(chan struct{})

		var listenError error

		go func() {
			defer close(ended)

			listenError = w.listen(listening, waiting)
		}()

		defer func() {
			stop()
			<-ended
		}()

		for {
			select {
			case <-ended:
				yield(Event{}, listenError)

				return
			case <-waiting.ready:
			}

			for event, ok := waiting.take(); ok; event, ok = waiting.take() {
				// An ended context ends the watch at once, whatever still waits.
				if ctx.Err() != nil {
					break
				}

				if !yield(event, nil) {
					return
				}
			}
		}
	}
}
