package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/notify"
)

// errSilent is a session that lives but no longer listens.
var errSilent = errors.New("legion: the session of Watch no longer listens, as behind a pooler in transaction mode: " +
	"connect to the server directly with legion.WithConnect")

// listen fills the backlog, over one connection after the other, until ctx ends or there
// is nothing to listen to.
func (w *watch) listen(ctx context.Context, waiting *backlog) error {
	var (
		connect database.Connect
		heard   bool
	)

	backoff := newBackoff(w.firstWait, w.lastWait)

	for {
		var since time.Time

		err := w.session(ctx, &connect, waiting, func() { since, heard = time.Now(), true })

		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case isFinal(err, heard):
			return err
		case !since.IsZero():
			backoff.held(time.Since(since))
		}

		wait := backoff.wait()
		slog.WarnContext(ctx, "legion: the watch has no connection and connects again", "error", err, "wait", wait)

		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
		}
	}
}

// isFinal reports whether connecting again is of no use. As long as no connection has
// been heard on, that is also what the server or the application refuses: it is more
// likely a mistake than a failure.
func isFinal(err error, heard bool) bool {
	if errors.Is(err, fault.ErrNotMigrated) || errors.Is(err, fault.ErrInvalidConfig) {
		return true
	}

	// The deadline is one of ours, since ctx has not ended.
	return !heard && !errors.Is(err, context.DeadlineExceeded) && !database.Retryable(err) &&
		!database.HasCode(err, database.CodeTooManyConnections)
}

// session listens on one connection until it is lost. Once it listens, it calls listening.
// It sets connect the first time that this is known.
func (w *watch) session(ctx context.Context, connect *database.Connect, waiting *backlog, listening func()) error {
	opened, err := w.open(ctx, connect)
	if err != nil {
		return err
	}

	server := newWire(ctx, opened, w.answer, waiting.add)
	defer server.close()

	channel, err := w.channel(server)
	if err != nil {
		return err
	}

	if _, err := server.ask(notify.Listen(channel)); err != nil {
		return err
	}

	// What is committed from here on is heard.
	waiting.miss()
	listening()

	for {
		if err := server.hear(w.idle); err != nil {
			return err
		}

		rows, err := server.ask(notify.Listening(channel))
		if err != nil {
			return err
		}

		if len(rows) == 0 {
			return errSilent
		}
	}
}

// open opens a connection.
func (w *watch) open(ctx context.Context, connect *database.Connect) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, w.answer)
	defer cancel()

	if *connect == nil {
		known, err := w.connectOf(ctx)
		if err != nil {
			return nil, err
		}

		*connect = known
	}

	opened, err := (*connect)(ctx)
	if err != nil {
		return nil, lost(err)
	}

	// An application's way to connect may have left something unread.
	if err := opened.PgConn().SyncConn(ctx); err != nil {
		return nil, errors.Join(lost(err), opened.Close(ctx))
	}

	return opened, nil
}

// channel asks which channel the triggers of the table notify on.
func (w *watch) channel(server *wire) (string, error) {
	rows, err := server.ask(notify.Find(w.table))

	switch {
	case err != nil:
		return "", err
	case len(rows) == 0:
		return "", fmt.Errorf("%w: there is no table of agents: call legion.Migrate(db, legion.WithNotify()) at start-up", ErrNotMigrated)
	case rows[0][1] != "t":
		return "", fmt.Errorf("%w: the agents' table has no triggers that notify, or they are switched off: "+
			"call legion.Migrate(db, legion.WithNotify()) at start-up", ErrNotMigrated)
	default:
		return rows[0][0], nil
	}
}
