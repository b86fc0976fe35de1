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
func (m measurement) deniesButForExpired(request *request) bool {
	for i, group := range m.groups {
		for _, quota := range request.quotas(group.rule.Policy, m.usage(i)) {
			expired := quota.Limit == LimitRunningAgents && group.expiredRunning > 0 ||
				quota.Limit == LimitTokens && group.expiredReserved > 0
			if expired && quota.exceeded() {
				return true
			}
		}
	}

	return false
}

// freeExpired leaves expired slots and reservations out of the measurement.
func (m measurement) freeExpired() {
	for i := range m.groups {
		group := &m.groups[i]
		group.running -= group.expiredRunning
		group.reserved -= group.expiredReserved
	}
}

// lockOwnRows locks the rows of the call's own agents, in their order.
//
// Two calls that revoke could each wait for a row that the other has locked, if their
// own rows are among those that expired. So each first locks its own, while it holds
// no other row of the table, and only then those of others, which it does not wait
// for.
func (c *call) lockOwnRows(tx *gorm.DB) error {
	agentIDs := make([]any, len(c.requests))
	for i, request := range c.requests {
		agentIDs[i] = request.agentID
	}

	query := tx.Table("?", clause.Table{Name: c.tables.Agents}).
		Select("agent_id").
		Where(clause.IN{Column: clause.Column{Name: "agent_id"}, Values: agentIDs}).
		Order("agent_id").
		Clauses(clause.Locking{Strength: lockingNoKeyUpdate})

	return database.Find(query, func(*sql.Rows) error { return nil })
}

// mayRevoke reports whether a request of the call has a limit that an expired slot or
// reservation can violate.
func (c *call) mayRevoke() bool {
	for _, request := range c.requests {
		for _, rule := range request.rules {
			if rule.Policy.MaxRunningAgents != nil || rule.Policy.MaxTokens != nil {
				return true
			}
		}
	}

	return false
}

// maxRevoked bounds what one verdict revokes, to less than a statement has parameters. The
// next verdict takes the rest.
const maxRevoked = 10_000

// revoke takes the slots of turns whose lease is over, and reports whether there was
// one. The run and the status stay, so that the turn can be recovered.
//
// An expired lease is not enough to count a slot as free: a renewal that began in time
// may commit after our snapshot, and then both would hold it. Taking it makes the
// turn's renewal fail, since that needs an unexpired lease. A row that is locked is
// passed over: its holder may be that very renewal, so it counts as held.
//
// Own rows are locked before: see lockOwnRows.
func (c *call) revoke(tx *gorm.DB, request *request, measurement measurement) (bool, error) {
	agents := clause.Table{Name: c.tables.Agents}

	var matching []clause.Expression

	for _, group := range measurement.groups {
		if group.expiredRunning > 0 || group.expiredReserved > 0 {
			matching = append(matching, group.rule.matches())
		}
	}

	var expired []any

	locking := clause.Locking{Strength: lockingNoKeyUpdate, Options: clause.LockingOptionsSkipLocked}
	stillExpired := expression(" AND lease_expires_at <= clock_timestamp()")

	if c.hooks.RevokeWaiting {
		locking.Options = ""
	}

	query := tx.Table("? AS agent", agents).
		Select("agent_id").
		Where("agent.agent_id <> ? AND agent.status = 'running' AND agent.run_id IS NOT NULL", request.agentID).
		Where("agent.lease_expires_at <= (SELECT clock_timestamp())").
		Where(clause.Or(matching...)).
		Order("agent_id").
		Limit(maxRevoked)

	if c.hooks.RevokeUnchecked {
		stillExpired = expression("")
	} else {
		query = query.Clauses(locking)
	}

	err := database.Find(query, func(rows *sql.Rows) error {
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
		"UPDATE ? SET lease_expires_at = NULL WHERE agent_id IN ? AND status = 'running'?", agents, expired, stillExpired))

	return revoked > 0, err
}
