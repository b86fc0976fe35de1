package migration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
)

var errNoPool = errors.New("indexes are built concurrently on a connection of their own: pass a *gorm.DB whose pool is a *sql.DB")

// buildAlone builds the indexes that are missing, one after the other, on a
// connection of its own that holds the lock as long as it lives.
func buildAlone(db *gorm.DB, settings database.Settings, tables []*Table) (err error) {
	session, closeConnection, err := ownConnection(db, settings.ConnectionTimeout)
	if err != nil {
		return err
	}

	defer closeConnection()

	if err := lockSession(session); err != nil {
		return err
	}

	// A build takes as long as it takes. One that a timeout cuts short leaves an index
	// behind that is not valid.
	unlimited := clause.Expr{
		SQL:                "SELECT set_config('statement_timeout', '0', false), set_config('lock_timeout', '0', false)",
		WithoutParentheses: true,
	}
	if _, err := database.Exec(session, unlimited); err != nil {
		return err
	}

	pending, err := compare(session, tables, Options{Concurrently: true})
	if err != nil {
		return err
	}

	for _, statement := range pending.alone {
		if err := run(session, statement); err != nil {
			return err
		}
	}

	left, err := compare(session, tables, Options{Concurrently: true})
	if err != nil {
		return err
	}

	if !left.empty() {
		return notConverged(left)
	}

	return nil
}

// lockSession takes the migration's lock for the session.
func lockSession(session *gorm.DB) error {
	ask := clause.Expr{SQL: "SELECT pg_try_advisory_lock(?::bigint)", Vars: []any{lockKey}, WithoutParentheses: true}

	for {
		var taken bool
		if err := database.Query(session, ask, func(rows *sql.Rows) error { return rows.Scan(&taken) }); err != nil {
			return err
		}

		if taken {
			return nil
		}

		if err := sleep(session.Statement.Context, busyPause/2+rand.N(busyPause/2)); err != nil {
			return err
		}
	}
}

// ownConnection takes one connection out of the pool. Closing it ends the session,
// and with it the lock and the settings, whatever has happened: the application
// gets neither.
func ownConnection(db *gorm.DB, timeout time.Duration) (session *gorm.DB, closeConnection func(), err error) {
	pool, err := db.DB()
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", fault.ErrInvalidConfig, errors.Join(errNoPool, err))
	}

	ctx, cancel := context.WithTimeoutCause(db.Statement.Context, timeout, fault.ErrNoConnection)
	defer cancel()

	connection, err := pool.Conn(ctx)
	if err != nil {
		if errors.Is(context.Cause(ctx), fault.ErrNoConnection) {
			return nil, nil, fmt.Errorf("%w: none within %s: the pool is used up: raise SetMaxOpenConns", fault.ErrNoConnection, timeout)
		}

		return nil, nil, err
	}

	session = db.Session(&gorm.Session{NewDB: true, Context: db.Statement.Context})
	session.Statement.ConnPool = ownSession{connection}

	return session, func() {
		// This error is how database/sql is told not to reuse a connection.
		_ = connection.Raw(func(any) error { return driver.ErrBadConn })
		_ = connection.Close()
	}, nil
}

// ownSession is a connection that looks like a transaction to plugins that choose
// the connection for each statement, so that they leave it alone.
type ownSession struct{ *sql.Conn }

func (ownSession) Commit() error   { return nil }
func (ownSession) Rollback() error { return nil }

var _ gorm.TxCommitter = ownSession{}
