package legion

import (
	"errors"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
)

// These errors are for errors.Is. The texts of what is returned say more: the field
// or the limit, and what to do. The packages limiter and store return the same ones,
// and have further ones of their own.
var (
	// ErrNotMigrated is returned where a table, a column or an index is missing or is
	// not what it should be, or where the role may not make it. Call [Migrate] at
	// start-up, with a role that owns the schema.
	ErrNotMigrated = fault.ErrNotMigrated

	// ErrInvalidConfig is returned for options that cannot work: a dialect other than
	// PostgreSQL, a nil *gorm.DB, a model that GORM cannot parse.
	ErrInvalidConfig = fault.ErrInvalidConfig

	// ErrNoConnection is returned when no connection of the pool became free in time.
	// The usual cause is a *gorm.DB that was captured outside a hook and is used in it,
	// which waits for the hook's own transaction.
	ErrNoConnection = fault.ErrNoConnection

	// ErrIsolation is returned inside a caller's transaction at REPEATABLE READ or
	// SERIALIZABLE, whose snapshot may be older than the locks that it takes. Begin it
	// at READ COMMITTED, PostgreSQL's default.
	ErrIsolation = fault.ErrIsolation

	// ErrContention is returned when others were first every time. It is [Retryable].
	ErrContention = fault.ErrContention

	// ErrAgentRunning is returned for what cannot be done while the agent is in the
	// middle of a turn: wait for its end.
	ErrAgentRunning = fault.ErrAgentRunning

	// ErrLeaseLost is the end of a turn that was not renewed in time: a verdict may have
	// given its slot to another agent. It is the cause of the turn's context, and what
	// Checkpoint and End then return. Stop the work; [Plugin.Recover] resumes it.
	ErrLeaseLost = fault.ErrLeaseLost

	// ErrInvalidTurn is returned for [TurnOptions] that cannot work. The database was not
	// touched, but for a RunID that turns out to be used.
	ErrInvalidTurn = fault.ErrInvalidTurn

	// ErrTurnEnded is the cause of the context of a turn that has ended, and what its
	// Checkpoint returns then.
	ErrTurnEnded = errors.New("legion: the turn has ended")

	// ErrShutdown is returned for turns that are begun after [Plugin.Shutdown], and the
	// cause of the contexts of those that it finds running.
	ErrShutdown = errors.New("legion: the plugin is shut down")

	// ErrNotFound is returned for an agent that has no row, or whose row was deleted.
	// It is gorm.ErrRecordNotFound too.
	ErrNotFound = fault.ErrNotFound
)

// Retryable reports whether the same call, or the transaction that it was part of,
// can succeed when it is run again from its beginning: it lost a deadlock or a race,
// or the connection or the server went away. A denial and a context that has ended are
// not retryable. Nil is not.
//
// Legion retries by itself in transactions of its own. In a transaction of the caller's
// it cannot, since that has to begin again as a whole.
func Retryable(err error) bool { return database.Retryable(err) }
