package limiter

import (
	"database/sql"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
)

// lockingNoKeyUpdate is the lock of an UPDATE that leaves the key alone. A plain FOR
// UPDATE would also wait for, or skip, a row that somebody's open transaction merely
// references by a foreign key.
const lockingNoKeyUpdate = "NO KEY UPDATE"

// deniesButForExpired reports whether a limit that is violated counts a slot or a
// reservation whose lease is over.
func (c *call) deniesButForExpired(measurement measurement) bool {
	for i, rule := range c.rules {
		group := measurement.groups[i]

		for _, quota := range rule.Policy.quotas(measurement.usage(i)) {
			expired := quota.Limit == LimitRunningAgents && group.expiredRunning > 0 ||
				quota.Limit == LimitTokens && group.expiredReserved > 0
			if expired && quota.exceeded() {
				return true
			}
		}
	}

	return false
}

// revoke takes the slots of turns whose lease is over, and reports whether there was
// one. The run and the status stay, so that the turn can be recovered.
//
// An expired lease is not enough to count a slot as free: a renewal that began in time
// may commit after our snapshot, and then both would hold it. Taking it makes the
// turn's renewal fail, since that needs an unexpired lease. A row that is locked is
// passed over: its holder may be that very renewal, so it counts as held.
//
// Two calls that revoke could each wait for a row that the other has locked, if their
// own rows are among those that expired. So each first locks its own row, while it
// holds no other row of the table, and only then those of others, which it does not
// wait for.
func (c *call) revoke(tx *gorm.DB, measurement measurement) (bool, error) {
	agents := clause.Table{Name: c.tables.Agents}

	_, err := database.Exec(tx, expression("SELECT FROM ? WHERE agent_id = ? FOR NO KEY UPDATE", agents, c.agentID))
	if err != nil {
		return false, err
	}

	var matching []clause.Expression

	for i, rule := range c.rules {
		if group := measurement.groups[i]; group.expiredRunning > 0 || group.expiredReserved > 0 {
			matching = append(matching, rule.matches())
		}
	}

	var expired []any

	query := tx.Table("? AS agent", agents).
		Select("agent_id").
		Where("agent.agent_id <> ? AND agent.status = 'running' AND agent.run_id IS NOT NULL", c.agentID).
		Where("agent.lease_expires_at <= (SELECT clock_timestamp())").
		Where(clause.Or(matching...)).
		Order("agent_id").
		Clauses(clause.Locking{Strength: lockingNoKeyUpdate, Options: clause.LockingOptionsSkipLocked})

	err = database.Find(query, func(rows *sql.Rows) error {
		var agentID string
		err := rows.Scan(&agentID)
		expired = append(expired, agentID)

		return err
	})
	if err != nil || len(expired) == 0 {
		return false, err
	}

	// Locking a row has read its newest version, but the condition on the lease is
	// checked again all the same: it is what the guarantee hangs on.
	revoked, err := database.Exec(tx, expression(
		"UPDATE ? SET lease_expires_at = NULL WHERE agent_id IN ? AND status = 'running' AND lease_expires_at <= clock_timestamp()",
		agents, expired))

	return revoked > 0, err
}
