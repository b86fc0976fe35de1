package store

import (
	"errors"

	"github.com/legion-gorm/legion/internal/fault"
)

// Sentinels for errors.Is.
var (
	// ErrNotFound is an agent that is not there, or for Get and Delete one that is
	// deleted. It is also gorm.ErrRecordNotFound.
	ErrNotFound = fault.ErrNotFound

	// ErrInvalidAgentID is an agent ID that is not 1 to 512 bytes of valid UTF-8
	// without NUL. The database was not touched.
	ErrInvalidAgentID = fault.ErrInvalidAgentID

	// ErrInvalidUsage is a usage entry that cannot be recorded: see
	// [models.Usage.Validate]. The database was not touched.
	ErrInvalidUsage = fault.ErrInvalidUsage

	// ErrInvalidArgument is a limit, a [Patch] or a time that the method cannot work
	// with, or for Watch a store of a transaction. The text names the field and the remedy. Nothing was written.
	ErrInvalidArgument = errors.New("legion: invalid argument")

	// ErrInvalidConfig is a *gorm.DB or an agent model that cannot be worked with: a
	// nil or failed db, another dialect than PostgreSQL, a model that does not embed
	// models.LegionAgent or is not the table that limits are counted in.
	ErrInvalidConfig = fault.ErrInvalidConfig

	// ErrAgentRunning is an agent whose slot belongs to a live turn, so that Save
	// cannot make it idle. End the turn instead.
	ErrAgentRunning = fault.ErrAgentRunning

	// ErrNotMigrated is a database without our tables or columns, or for Watch without
	// the triggers of legion.WithNotify. Call legion.Migrate.
	ErrNotMigrated = fault.ErrNotMigrated

	// ErrNoConnection is a pool that had no connection within the connection timeout.
	// Inside a hook its usual cause is a captured db: use the hook's own.
	ErrNoConnection = fault.ErrNoConnection

	// ErrIsolation is a caller's transaction at REPEATABLE READ or SERIALIZABLE, from
	// whose old snapshot Prune cannot judge.
	ErrIsolation = fault.ErrIsolation
)
