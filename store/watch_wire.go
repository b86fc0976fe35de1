package store

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// closing bounds how long a connection takes to say goodbye.
const closing = time.Second

// wire is the connection of a watch. It speaks the protocol by itself, over what pgx has
// connected, for three reasons. pgx hands a notification to the handler in its
// configuration, which in a copy of the pool's configuration is that of the pool's
// connection. When a statement of pgx's runs into its deadline, the connection stays
// behind in a goroutine for up to 15 seconds. And here no tracer of the application's
// sees a statement every half minute.
type wire struct {
	connection *pgx.Conn
	network    net.Conn
	frontend   *pgproto3.Frontend
	ctx        context.Context //nolint:containedctx // the wire lives no longer than the call that made it
	release    func() bool
	answer     time.Duration
	notified   func(agentID string)
}

// newWire takes over a connection, until close. It calls notified for each notification;
// the connection listens on one channel only.
func newWire(ctx context.Context, connection *pgx.Conn, answer time.Duration, notified func(agentID string)) *wire {
	network := connection.PgConn().Conn()

	return &wire{
		connection: connection,
		network:    network,
		frontend:   connection.PgConn().Frontend(),
		ctx:        ctx,
		release:    context.AfterFunc(ctx, func() { _ = network.SetDeadline(time.Unix(1, 0)) }),
		answer:     answer,
		notified:   notified,
	}
}

// close ends the session, also one that hears nothing any more.
func (w *wire) close() {
	w.release()

	_ = w.network.SetDeadline(time.Now().Add(closing))

	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.ctx), closing)
	defer cancel()

	_ = w.connection.Close(ctx)
}

// hear takes in notifications until there has been none for so long. An error is that of
// a connection that is lost, or the context's.
func (w *wire) hear(idle time.Duration) error {
	for {
		message, err := w.receive(idle)

		if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() && w.ctx.Err() == nil {
			return nil
		}

		if err != nil {
			return err
		}

		if failure, ok := message.(*pgproto3.ErrorResponse); ok {
			return lost(pgconn.ErrorResponseToPgError(failure))
		}
	}
}

// ask runs one statement, in a transaction of its own, and returns its rows as text. It
// takes in the notifications that come along.
func (w *wire) ask(statement string) (rows [][]string, err error) {
	if err := w.limit(w.answer); err != nil {
		return nil, err
	}

	w.frontend.SendQuery(&pgproto3.Query{String: statement})

	if err := w.frontend.Flush(); err != nil {
		return nil, lost(err)
	}

	var failed error

	for {
		message, err := w.receive(w.answer)
		if err != nil {
			return nil, errors.Join(failed, err)
		}

		switch message := message.(type) {
		case *pgproto3.DataRow:
			row := make([]string, len(message.Values))
			for i, value := range message.Values {
				row[i] = string(value)
			}

			rows = append(rows, row)
		case *pgproto3.ErrorResponse:
			failed = lost(pgconn.ErrorResponseToPgError(message))
		case *pgproto3.ReadyForQuery:
			return rows, failed
		}
	}
}

// receive returns the next message, which is valid until the one after it, or an error
// when there is none within the time.
func (w *wire) receive(within time.Duration) (pgproto3.BackendMessage, error) { //nolint:ireturn // what pgx's messages have in common
	if err := w.limit(within); err != nil {
		return nil, err
	}

	message, err := w.frontend.Receive()
	if err != nil {
		return nil, lost(err)
	}

	if notification, ok := message.(*pgproto3.NotificationResponse); ok && notification.Payload != "" {
		w.notified(notification.Payload)
	}

	return message, nil
}

// limit sets the deadline of what comes next. A context that ends afterwards moves it to
// the past; one that has ended before is its error.
func (w *wire) limit(within time.Duration) error {
	if err := w.network.SetDeadline(time.Now().Add(within)); err != nil {
		return lost(err)
	}

	return w.ctx.Err()
}

func lost(err error) error { return fmt.Errorf("legion: watch: %w", err) }
