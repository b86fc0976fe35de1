package migration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
)

// lockKey is the advisory lock that every migration in a database takes, whatever
// the names of its tables: "legion" in ASCII, then "mi". It is fixed so that
// processes of different versions exclude each other.
//
// It is held by the transaction that changes the schema, and by the session that
// builds indexes concurrently. Nobody waits for it inside the server, all ask again:
// a statement that waits holds a snapshot, and the concurrent build waits for
// every snapshot that is older than its own, so the two would wait for each other.
const lockKey int64 = 0x6c6567696f6e6d69

const (
	// busyPause is how long to wait, at most, before asking for the lock again.
	busyPause = 100 * time.Millisecond

	// lockTimeout is how long a statement waits for a table. While it waits for an
	// idle transaction, everybody else who wants the table waits behind it.
	lockTimeout = 2 * time.Second

	// lockTimeoutPause lets those through before the next attempt.
	lockTimeoutPause = time.Second

	// duplicates bounds how often somebody outside the lock may be first: a bare
	// AutoMigrate, or the limiter's own making of the registry.
	duplicates = 5
)

// joinedWait bounds the wait for the lock inside a caller's transaction. What that
// transaction did before can be what the holder of the lock waits for, and the
// server does not see such a circle, since nobody waits in it.
const joinedWait = 30 * time.Second

// SQLSTATE codes. Source: PostgreSQL's documentation, appendix A.
const (
	codeLockNotAvailable  = "55P03"
	codeDuplicateTable    = "42P07" // and index
	codeDuplicateColumn   = "42701"
	codeDuplicateObject   = "42710" // a constraint
	codeUniqueViolation   = "23505" // of the catalogue, by a racing CREATE
	codeInvalidSchemaName = "3F000"
	codeDependentObjects  = "2BP01"
)

var errBusy = errors.New("another process is migrating the database, or building indexes")

// locked runs body under the migration's lock: in the transaction that db is in, and
// in a savepoint of it, or in a transaction of its own. body may run several times.
// check runs first and without the lock, and answers whether body is needed.
func locked(db *gorm.DB, settings database.Settings, wait time.Duration, check func(tx *gorm.DB) (bool, error), body func(tx *gorm.DB) error) error {
	joined := database.InTransaction(db)
	attempt := func(tx *gorm.DB) error {
		needed, err := check(tx)
		if err != nil {
			return err
		}

		if !needed {
			return database.ErrRollback
		}

		if err := lockTransaction(tx); err != nil {
			return err
		}

		if !joined {
			if err := setLockTimeout(tx); err != nil {
				return err
			}
		}

		return body(tx)
	}

	started := time.Now()

	for overtaken := 0; ; {
		err := transaction(db, settings, joined, attempt)

		var pause time.Duration

		switch {
		case errors.Is(err, errBusy) && joined && time.Since(started) > wait:
			return fmt.Errorf("%w: %w for %s: call Migrate outside a transaction, or run this one again", fault.ErrContention, errBusy, wait)
		case errors.Is(err, errBusy):
			pause = busyPause/2 + rand.N(busyPause/2)
		case !joined && database.HasCode(err, codeLockNotAvailable):
			pause = lockTimeoutPause
		case overtaken < duplicates && database.HasCode(err,
			codeDuplicateTable, codeDuplicateColumn, codeDuplicateObject, codeUniqueViolation):
			overtaken++
		default:
			return err
		}

		if err := sleep(db.Statement.Context, pause); err != nil {
			return err
		}
	}
}

func transaction(db *gorm.DB, settings database.Settings, joined bool, body func(tx *gorm.DB) error) error {
	if !joined {
		return database.Transaction(db, settings.ConnectionTimeout, body)
	}

	err := database.InSavepoint(db, func(*database.Savepoint) error { return body(db) })
	if errors.Is(err, database.ErrRollback) {
		return nil
	}

	return err
}

// lockTransaction takes the lock to the end of the transaction, or returns errBusy.
func lockTransaction(tx *gorm.DB) error {
	var (
		taken     bool
		isolation string
	)

	ask := clause.Expr{
		SQL:                "SELECT pg_try_advisory_xact_lock(?::bigint), current_setting('transaction_isolation')",
		Vars:               []any{lockKey},
		WithoutParentheses: true,
	}
	if err := database.Query(tx, ask, func(rows *sql.Rows) error { return rows.Scan(&taken, &isolation) }); err != nil {
		return err
	}

	// An older snapshot would show the schema as it was before the last holder of the
	// lock changed it.
	if isolation == "repeatable read" || isolation == "serializable" {
		return fmt.Errorf("%w: call Migrate outside of it, or begin it with sql.LevelReadCommitted", fault.ErrIsolation)
	}

	if !taken {
		return errBusy
	}

	return nil
}

// setLockTimeout bounds the waits of the transaction, unless the application has
// bounded them by itself.
func setLockTimeout(tx *gorm.DB) error {
	_, err := database.Exec(tx, clause.Expr{
		SQL:                "SELECT set_config('lock_timeout', ?::text, true) WHERE current_setting('lock_timeout') = '0'",
		Vars:               []any{strconv.FormatInt(lockTimeout.Milliseconds(), 10)},
		WithoutParentheses: true,
	})

	return err
}

func sleep(ctx context.Context, pause time.Duration) error {
	select {
	case <-ctx.Done():
		return fmt.Errorf("legion: migrate: %w", context.Cause(ctx))
	case <-time.After(pause):
		return nil
	}
}
