package limiter

import (
	"database/sql"
	"fmt"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/agentid"
	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/run"
)

// Release gives back the slot that an [Enforce] under MaxRunningAgents took, before
// its lease is over. It does nothing to an agent without a slot.
//
// It joins the transaction that db is in, inside a savepoint as Enforce does, and then
// takes effect when that commits.
//
// Errors: [ErrAgentRunning] when the slot belongs to a live turn, whose End gives it
// back; [ErrNotFound] when there is no such agent; [ErrInvalidAgentID];
// [ErrNotMigrated].
func Release(db *gorm.DB, agentID string) error {
	session, err := database.Session(db)
	if err != nil {
		return err
	}

	if err := agentid.Validate(agentID); err != nil {
		return err
	}

	settings := database.SettingsOf(session)

	tables, err := database.TablesOf(session, settings)
	if err != nil {
		return err
	}

	if database.InTransaction(session) {
		return database.InSavepoint(session, func(*database.Savepoint) error {
			_, err := release(session, tables, agentID)

			return err
		})
	}

	return database.Transaction(session, settings.ConnectionTimeout, func(tx *gorm.DB) error {
		released, err := release(tx, tables, agentID)
		if err == nil && !released {
			return database.ErrRollback
		}

		return err
	})
}

// release reports whether there was a slot to give back.
func release(tx *gorm.DB, tables database.Tables, agentID string) (bool, error) {
	agents := clause.Table{Name: tables.Agents}

	var found, live bool

	err := database.Query(tx, expression(`SELECT `+run.Live("agent", run.Now)+`
FROM ? AS agent WHERE agent.agent_id = ? FOR NO KEY UPDATE`, agents, agentID), func(rows *sql.Rows) error {
		found = true

		return rows.Scan(&live)
	})

	switch {
	case err != nil:
		return false, err
	case !found:
		return false, fault.ErrNotFound
	case live:
		return false, fmt.Errorf("%w: end the turn to give its slot back", fault.ErrAgentRunning)
	}

	released, err := database.Exec(tx, expression(
		"UPDATE ? SET status = 'idle', lease_expires_at = NULL, updated_at = clock_timestamp() WHERE agent_id = ? AND status = 'running' AND run_id IS NULL",
		agents, agentID))

	return released > 0, err
}
