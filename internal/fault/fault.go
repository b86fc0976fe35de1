// Package fault holds the errors that more than one public package returns, so
// that errors.Is answers the same whichever package's name is used. The public
// packages re-export them under names of their own.
package fault

import (
	"errors"
	"fmt"

	"gorm.io/gorm"
)

// Sentinels. The public packages document them.
var (
	ErrInvalidAgentID = errors.New("legion: invalid agent ID")
	ErrInvalidRule    = errors.New("legion: invalid rule")
	ErrInvalidUsage   = errors.New("legion: invalid usage")
	ErrInvalidConfig  = errors.New("legion: invalid configuration")
	ErrExceeded       = errors.New("legion: limit exceeded")
	ErrIsolation      = errors.New("legion: the transaction is not READ COMMITTED")
	ErrNotMigrated    = errors.New("legion: the database is not migrated")
	ErrNoConnection   = errors.New("legion: no database connection became free in time")
	ErrAgentRunning   = errors.New("legion: the agent is running a turn")
	ErrLeaseLost      = errors.New("legion: the turn has lost its lease")
	ErrInvalidTurn    = errors.New("legion: invalid turn")
	ErrContention     = errors.New("legion: too many retries under contention")
	ErrNotFound       = fmt.Errorf("legion: no such agent: %w", gorm.ErrRecordNotFound)
)
