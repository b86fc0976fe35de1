package run

import (
	"database/sql"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
)

// Interrupted is a run whose process is gone: its row says running, and its lease is over
// or was revoked.
type Interrupted struct {
	Run

	// Reserved are the tokens that it still held back.
	Reserved int64
}

// ListInterrupted returns the interrupted runs of root agents that are not deleted, in the
// order of the agents' IDs, beginning after one of them. What a parent's turn began, its
// own resumption begins again.
func ListInterrupted(tx *gorm.DB, agents clause.Table, after string, limit int) ([]Interrupted, error) {
	var interrupted []Interrupted

	err := database.Query(tx, interruptedStatement(agents, after, limit), func(rows *sql.Rows) error {
		var found Interrupted
		err := rows.Scan(&found.AgentID, &found.ID, &found.Reserved)
		interrupted = append(interrupted, found)

		return err
	})

	return interrupted, err
}

func interruptedStatement(agents clause.Table, after string, limit int) clause.Expression {
	return clause.Expr{
		SQL: database.Primary + `SELECT agent.agent_id, agent.run_id, greatest(0, agent.reserved_tokens)
FROM ? AS agent
WHERE agent.agent_id > ? AND agent.status = 'running' AND agent.run_id IS NOT NULL
  AND (agent.lease_expires_at IS NULL OR agent.lease_expires_at <= clock_timestamp())
  AND coalesce(agent.parent_agent_id, '') = '' AND agent.deleted_at IS NULL
ORDER BY agent.agent_id LIMIT ?::bigint`,
		Vars: []any{agents, after, limit},
	}
}

// IsInterrupted is the condition that the row "agent" is still as ListInterrupted has
// found it.
func (r Run) IsInterrupted() clause.Expression {
	return clause.Expr{
		SQL: `agent.agent_id = ? AND agent.run_id = ? AND agent.status = 'running' AND agent.deleted_at IS NULL
  AND (agent.lease_expires_at IS NULL OR agent.lease_expires_at <= clock_timestamp())`,
		Vars: []any{r.AgentID, r.ID},
	}
}
