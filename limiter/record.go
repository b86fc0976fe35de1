package limiter

import (
	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/run"
)

// record writes the admission, and reports whether there was anything to write.
//
// Between the measurement and this statement others may still have written to the row,
// since the store takes no locks but the row's. So the statement decides on the row
// as it finds it: a start time that is there is kept, and so is the slot of a turn that
// was renewed at the last moment. And the start time that it would insert is the one
// that was measured, in case the row was pruned in between.
//
// begun says that the turn of the request has begun in an earlier attempt.
func (c *call) record(tx *gorm.DB, request *request, own ownRow, begun bool) (bool, error) {
	if request.turn != nil {
		return true, c.recordTurn(tx, request, own, begun)
	}

	// A live turn keeps its run, its lease and its reservation: it has its slot.
	takesSlot := request.limitsRunning() && !own.live
	if own.unchanged && own.startedAt.Valid && !takesSlot {
		return false, nil
	}

	values, updates := expression("'idle', NULL"), expression("")
	if takesSlot {
		lease := expression("clock_timestamp() + ?", interval(c.settings.Lease))
		values = expression("'running', ?", lease)
		updates = expression(`, status = 'running', (run_id, reserved_tokens, lease_expires_at) = (
    SELECT CASE WHEN live THEN agent.run_id END,
      CASE WHEN live THEN agent.reserved_tokens ELSE 0 END,
      CASE WHEN live THEN agent.lease_expires_at ELSE ? END
    FROM (SELECT `+run.Live("agent", run.Now)+` AS live) AS own)`, lease)
	}

	startedAt := expression("clock_timestamp()")
	if own.startedAt.Valid {
		startedAt = expression("?::timestamptz", own.startedAt.Time)
	}

	// updated_at is indexed, so renewing a slot leaves it alone: the update stays
	// heap-only.
	updatedAt := expression("clock_timestamp()")
	if own.unchanged && own.startedAt.Valid {
		updatedAt = expression("agent.updated_at")
	}

	_, err := database.Exec(tx, expression(`INSERT INTO ? AS agent
  (agent_id, metadata, started_at, created_at, updated_at, status, lease_expires_at)
VALUES (?, ?, ?, clock_timestamp(), clock_timestamp(), ?)
ON CONFLICT (agent_id) DO UPDATE SET
  metadata = excluded.metadata, started_at = coalesce(agent.started_at, excluded.started_at), deleted_at = NULL, updated_at = ??`,
		clause.Table{Name: c.tables.Agents}, request.agentID, jsonb(request.merged.text), startedAt, values, updatedAt, updates))

	return err == nil, err
}
