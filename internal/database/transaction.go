package database

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/fault"
)

const (
	// attempts bounds how often a transaction of our own is run.
	attempts = 5

	// firstPause doubles with every attempt; what is slept is a random part of it.
	firstPause = 10 * time.Millisecond

	// undoTimeout bounds a rollback after the caller's context has ended.
	undoTimeout = 5 * time.Second

	savepoint = "legion"
)

// ErrRollback is returned by the body of a transaction that has succeeded and
// wants to be rolled back all the same: it wrote nothing, and after row locks a
// COMMIT would flush the WAL for nothing.
var ErrRollback = errors.New("legion: roll back")

// Transaction runs body in a READ COMMITTED transaction of its own, and runs it
// again when it lost a deadlock, a race or the connection, with a random pause in
// between. body must therefore be idempotent, also after a commit whose reply was
// lost.
//
// Waiting for a connection ends with the context of db, or after connectionTimeout
// with ErrNoConnection.
func Transaction(db *gorm.DB, connectionTimeout time.Duration, body func(tx *gorm.DB) error) error {
	return retry(db.Statement.Context, func() error { return transactionOnce(db, connectionTimeout, body) })
}

func transactionOnce(db *gorm.DB, connectionTimeout time.Duration, body func(tx *gorm.DB) error) error {
	// database/sql takes one context for the wait and for the whole transaction. So
	// the wait is ended by cancelling that context, with a timer that is stopped as
	// soon as there is a connection.
	ctx, cancel := context.WithCancelCause(db.Statement.Context)
	defer cancel(nil)

	timer := time.AfterFunc(connectionTimeout, func() { cancel(fault.ErrNoConnection) })
	defer timer.Stop()

	options := &sql.TxOptions{Isolation: sql.LevelReadCommitted}

	err := db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		if !timer.Stop() {
			return fault.ErrNoConnection
		}

		return body(tx)
	}, options)

	switch {
	case errors.Is(err, ErrRollback):
		return nil
	case err != nil && errors.Is(context.Cause(ctx), fault.ErrNoConnection):
		return errNoConnection(connectionTimeout)
	default:
		return err
	}
}

func errNoConnection(timeout time.Duration) error {
	return fmt.Errorf("%w: none within %s: the pool is used up, or a db that was captured outside a hook waits "+
		"for the hook's own transaction: pass the hook's tx, or raise SetMaxOpenConns", fault.ErrNoConnection, timeout)
}

// A Savepoint is a part of the caller's transaction that can be undone without the
// rest.
type Savepoint struct{ tx *gorm.DB }

// InSavepoint runs body inside the caller's transaction, in a savepoint of its
// own. When body fails or panics, what it did is undone, the locks that it took are
// free, and the caller's transaction can go on.
//
// GORM's own nested transactions are not enough: they ignore a failed SAVEPOINT,
// never release it, and are absent with DisableNestedTransaction.
func InSavepoint(tx *gorm.DB, body func(point *Savepoint) error) (err error) {
	if err := tx.Exec("SAVEPOINT " + savepoint).Error; err != nil {
		return fmt.Errorf("legion: the transaction takes no savepoint: %w", err)
	}

	point := &Savepoint{tx: tx}
	finished := false

	defer func() {
		if finished && err == nil {
			return
		}

		if undo := point.undo(true); undo != nil {
			err = fmt.Errorf("%w (the transaction could not be returned to its savepoint: %w)", err, undo)
		}
	}()

	err = body(point)
	finished = true

	if err != nil {
		return err
	}

	return tx.Exec("RELEASE SAVEPOINT " + savepoint).Error
}

// Restart undoes what has been done in the savepoint, and frees the locks that
// were taken in it. The savepoint itself stays.
func (s *Savepoint) Restart() error {
	return s.undo(false)
}

func (s *Savepoint) undo(release bool) error {
	// The caller's context may be what ended the call, while its transaction, on a
	// context of its own, lives on.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.tx.Statement.Context), undoTimeout)
	defer cancel()

	tx := s.tx.WithContext(ctx)
	if err := tx.Exec("ROLLBACK TO SAVEPOINT " + savepoint).Error; err != nil {
		return err
	}

	if release {
		return tx.Exec("RELEASE SAVEPOINT " + savepoint).Error
	}

	return nil
}
