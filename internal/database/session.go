// Package database is how the public packages talk to PostgreSQL through GORM:
// sessions that inherit nothing from the statement that they are called in, the
// names of the tables, transactions and savepoints that undo what they should, and
// the reading of the driver's errors.
package database

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"time"
	"weak"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion/internal/fault"
)

var errNilDB = fmt.Errorf("%w: the *gorm.DB is nil: pass the connection that gorm.Open returned", fault.ErrInvalidConfig)

// Session returns a fresh session on the connection, transaction and context of db.
//
// In a hook db carries the outer statement: its table, its clauses and its error.
// None of them may reach our statements, so everything but the connection and the
// context is new. Errors come untranslated, since we read the driver's codes, and
// values stay out of the log, since they are people's addresses and names.
func Session(db *gorm.DB) (*gorm.DB, error) {
	if db == nil || db.Config == nil || db.Statement == nil {
		return nil, errNilDB
	}

	if db.Error != nil {
		return nil, fmt.Errorf("legion: the *gorm.DB that was passed has failed before: %w", db.Error)
	}

	if db.Name() != "postgres" {
		return nil, fmt.Errorf("%w: the dialect is %q: Legion needs gorm.io/driver/postgres", fault.ErrInvalidConfig, db.Name())
	}

	session := db.Session(&gorm.Session{
		NewDB:   true,
		Context: db.Statement.Context,
		Logger:  withoutValues{db.Logger},
	})
	// NewDB alone leaves the outer statement in reach: WithContext, which our own
	// transactions need, would bring it back.
	session.Statement = &gorm.Statement{
		DB:       session,
		ConnPool: db.Statement.ConnPool,
		Context:  db.Statement.Context,
		Clauses:  make(map[string]clause.Clause),
	}
	// Session has copied the Config, so this touches nobody else's.
	session.TranslateError = false

	return session, nil
}

// InTransaction reports whether db is inside a transaction that GORM knows of.
func InTransaction(db *gorm.DB) bool {
	committer, ok := db.Statement.ConnPool.(gorm.TxCommitter)

	return ok && committer != nil
}

// Pool identifies the connection pool that db belongs to. It is comparable, does
// not keep the pool alive, and is the zero value where the pool is not known.
type Pool = weak.Pointer[sql.DB]

// PoolOf returns the pool of db.
func PoolOf(db *gorm.DB) Pool {
	if pool := sqlDB(db); pool != nil {
		return weak.Make(pool)
	}

	return Pool{}
}

// OnPoolGone calls forget when the pool of db is no longer in use by anybody.
func OnPoolGone(db *gorm.DB, forget func(Pool)) {
	if pool := sqlDB(db); pool != nil {
		runtime.AddCleanup(pool, forget, weak.Make(pool))
	}
}

func sqlDB(db *gorm.DB) *sql.DB {
	// The pool of the Config, not that of the statement, which inside a transaction
	// is the transaction.
	switch pool := db.Config.ConnPool.(type) {
	case *sql.DB:
		return pool
	case gorm.GetDBConnector:
		if found, err := pool.GetDBConn(); err == nil {
			return found
		}
	}

	return nil
}

// Primary begins a SELECT outside a transaction that must not be answered by a replica: it
// writes, as a call of a function may, or what it reads is decided on. Resolver plugins
// such as dbresolver take what begins with SELECT for a read. The comment is pgpool's own
// word for it.
const Primary = "/*NO LOAD BALANCE*/ "

// Exec runs one statement and returns how many rows it changed. The expression
// holds the parameters; going through Raw("?") instead of Exec(sql, values) keeps
// GORM's named-argument parsing away from the operator @>.
func Exec(tx *gorm.DB, statement any) (int64, error) {
	result := tx.Exec("?", statement)

	return result.RowsAffected, Explain(result.Error)
}

// Query runs one statement and calls scan for each of its rows. It always reads
// or closes the whole result, so that the connection is free afterwards.
func Query(tx *gorm.DB, statement any, scan func(rows *sql.Rows) error) (err error) {
	return read(tx.Raw("?", statement), scan)
}

// Find runs the query that GORM's builder has been given, like [Query].
func Find(query *gorm.DB, scan func(rows *sql.Rows) error) error {
	return read(query, scan)
}

func read(query *gorm.DB, scan func(rows *sql.Rows) error) (err error) {
	rows, err := query.Rows()
	if err != nil {
		return Explain(err)
	}

	defer func() { err = errors.Join(err, Explain(rows.Close())) }()

	for rows.Next() {
		if err := scan(rows); err != nil {
			return Explain(err)
		}
	}

	return Explain(rows.Err())
}

// withoutValues is the application's logger, kept from printing parameters.
type withoutValues struct{ logger.Interface }

func (l withoutValues) LogMode(level logger.LogLevel) logger.Interface {
	return withoutValues{l.Interface.LogMode(level)}
}

// Trace leaves out the errors that are verdicts: the functions of serverfunction raise
// them so that nothing is committed.
func (l withoutValues) Trace(ctx context.Context, begin time.Time, statement func() (sql string, rows int64), err error) {
	if HasVerdict(err) {
		err = nil
	}

	l.Interface.Trace(ctx, begin, statement, err)
}

// ParamsFilter implements gorm.ParamsFilter.
func (withoutValues) ParamsFilter(_ context.Context, sql string, _ ...any) (string, []any) {
	return sql, nil
}
