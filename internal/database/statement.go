package database

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"time"

	"gorm.io/gorm"
)

// Autocommit runs body outside a transaction, so that each of its statements commits
// by itself: one round trip where [Transaction] needs three. It is for bodies of one
// statement, or of one that writes and others that only read.
//
// Like Transaction it runs body again when that lost a deadlock, a race or the
// connection, also after a commit whose reply was lost, and bounds the wait for a
// connection with ErrNoConnection. body must be idempotent.
func Autocommit(db *gorm.DB, connectionTimeout time.Duration, body func(tx *gorm.DB) error) error {
	return retry(db.Statement.Context, func() error {
		err := autocommitOnce(db, connectionTimeout, body)
		if HasCode(err, CodeSerializationFailure) {
			// The default isolation of this database is stricter than READ COMMITTED: many
			// writers of one row would fail there for ever.
			return transactionOnce(db, connectionTimeout, body)
		}

		return err
	})
}

func autocommitOnce(db *gorm.DB, connectionTimeout time.Duration, body func(tx *gorm.DB) error) (err error) {
	tx := db.Session(&gorm.Session{NewDB: true, Context: db.Statement.Context})

	pool := statementPool(tx)
	if pool == nil {
		return body(tx)
	}

	connection := &boundedConnection{pool: pool, timeout: connectionTimeout}
	tx.Statement.ConnPool = connection

	defer func() { err = errors.Join(err, connection.close()) }()

	return body(tx)
}

// statementPool is the pool that a statement of db takes its connection from. Nil: it
// has one already, or a pool of the application's own making, which is left in charge.
func statementPool(db *gorm.DB) *sql.DB {
	switch pool := db.Statement.ConnPool.(type) {
	case *sql.DB:
		return pool
	case *gorm.PreparedStmtDB:
		if found, err := pool.GetDBConn(); err == nil {
			return found
		}
	}

	return nil
}

// retry calls attempt until it succeeds, fails for good, or has been called often
// enough, with a random pause in between.
func retry(ctx context.Context, attempt func() error) error {
	pause := firstPause

	for number := 1; ; number++ {
		err := attempt()
		if err == nil || number == attempts || !Retryable(err) {
			return err
		}

		select {
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		case <-time.After(rand.N(pause)):
		}

		pause *= 2
	}
}

// boundedConnection is a gorm.ConnPool that takes one connection from the pool, with a
// bound on the wait that does not bound the statement itself: database/sql has one
// context for both.
//
// It takes the connection when the first statement needs it. A resolver plugin may
// have exchanged the pool by then, and an unused connection would starve it.
type boundedConnection struct {
	pool    *sql.DB
	timeout time.Duration
	taken   *sql.Conn
}

func (c *boundedConnection) take(ctx context.Context) (*sql.Conn, error) {
	if c.taken != nil {
		return c.taken, nil
	}

	taken, err := connectionWithin(ctx, c.pool, c.timeout)
	if err != nil {
		return nil, err
	}

	c.taken = taken

	return taken, nil
}

// connectionWithin takes a connection from the pool, or gives up after the timeout.
func connectionWithin(ctx context.Context, pool *sql.DB, timeout time.Duration) (*sql.Conn, error) {
	wait, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	taken, err := pool.Conn(wait)
	if err != nil && ctx.Err() == nil && wait.Err() != nil {
		return nil, errNoConnection(timeout)
	}

	return taken, err
}

func (c *boundedConnection) close() error {
	if c.taken == nil {
		return nil
	}

	// A connection that broke meanwhile is gone already, and the statement has said so.
	if err := c.taken.Close(); err != nil && !errors.Is(err, sql.ErrConnDone) {
		return err
	}

	return nil
}

// PrepareContext implements gorm.ConnPool.
func (c *boundedConnection) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	connection, err := c.take(ctx)
	if err != nil {
		return nil, err
	}

	return connection.PrepareContext(ctx, query)
}

// ExecContext implements gorm.ConnPool.
func (c *boundedConnection) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	connection, err := c.take(ctx)
	if err != nil {
		return nil, err
	}

	return connection.ExecContext(ctx, query, args...)
}

// QueryContext implements gorm.ConnPool.
func (c *boundedConnection) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	connection, err := c.take(ctx)
	if err != nil {
		return nil, err
	}

	return connection.QueryContext(ctx, query, args...)
}

// QueryRowContext implements gorm.ConnPool.
func (c *boundedConnection) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	connection, err := c.take(ctx)
	if err != nil {
		// Nobody but database/sql can make a row that carries an error.
		ended, cancel := context.WithCancel(ctx)
		cancel()

		return c.pool.QueryRowContext(ended, query, args...)
	}

	return connection.QueryRowContext(ctx, query, args...)
}

// BeginTx implements gorm.TxBeginner, for hooks of the application's that open a
// transaction.
func (c *boundedConnection) BeginTx(ctx context.Context, options *sql.TxOptions) (*sql.Tx, error) {
	connection, err := c.take(ctx)
	if err != nil {
		return nil, err
	}

	return connection.BeginTx(ctx, options)
}

// GetDBConn implements gorm.GetDBConnector.
func (c *boundedConnection) GetDBConn() (*sql.DB, error) {
	return c.pool, nil
}

var (
	_ gorm.ConnPool       = (*boundedConnection)(nil)
	_ gorm.TxBeginner     = (*boundedConnection)(nil)
	_ gorm.GetDBConnector = (*boundedConnection)(nil)
)
