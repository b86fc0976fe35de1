package store

import (
	"database/sql"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
)

// pruneBatch is how many keys one transaction of Prune looks at.
const pruneBatch = 200

// keyset walks through a table in the order of its primary key. Every batch begins behind
// the last, so the walk ends, whatever is locked or comes along meanwhile.
type keyset struct {
	table  clause.Table
	column string

	// kind is the SQL type of the column.
	kind string
}

// lastOfBatch returns the last key, as text, of the batch behind after. Nil: there is
// none.
func (k keyset) lastOfBatch(tx *gorm.DB, after *string) (last *string, err error) {
	err = database.Query(tx, k.lastOfBatchStatement(after), func(rows *sql.Rows) error { return rows.Scan(&last) })

	return last, err
}

func (k keyset) lastOfBatchStatement(after *string) clause.Expression {
	column := clause.Column{Name: k.column}

	return expression("SELECT ?::text FROM (SELECT ? FROM ? WHERE ? ORDER BY ? LIMIT ?) AS batch ORDER BY ? DESC LIMIT 1",
		column, column, k.table, k.behind(after), column, pruneBatch, column)
}

// between is the condition that a key is behind after and not behind last.
func (k keyset) between(after *string, last string) clause.Expression {
	return expression("? AND ? <= ?::"+k.kind, k.behind(after), clause.Column{Name: k.column}, last)
}

func (k keyset) behind(after *string) clause.Expression {
	if after == nil {
		return expression("true")
	}

	return expression("? > ?::"+k.kind, clause.Column{Name: k.column}, *after)
}

func lockDeletedStatement(agents clause.Table, batch clause.Expression, before time.Time) clause.Expression {
	return expression(`SELECT agent.agent_id, 0 FROM ? AS agent
WHERE ? AND agent.deleted_at < ?::timestamptz AND agent.updated_at < ?::timestamptz
  AND (agent.started_at IS NULL OR agent.started_at < ?::timestamptz)
  AND (agent.lease_expires_at IS NULL OR agent.lease_expires_at <= clock_timestamp())
ORDER BY agent.agent_id FOR UPDATE SKIP LOCKED`, agents, batch, before, before, before)
}

func deleteAgentsStatement(agents clause.Table, keys string) clause.Expression {
	return expression(`DELETE FROM ? AS agent USING jsonb_array_elements_text(?::jsonb) AS locked (key)
WHERE agent.agent_id = locked.key`, agents, keys)
}

// lockSpentStatement counts in scalar subqueries: when a row has changed before it could
// be locked, they are evaluated again on its new version, which a subquery in FROM is not.
//
// FOR NO KEY UPDATE lets others insert rows that reference the agent.
func lockSpentStatement(agents clause.Table, batch clause.Expression, before time.Time) clause.Expression {
	spent := expression("(SELECT count(*) FROM "+usageElements+" WHERE coalesce(?, false))", isSpent(before))

	return expression(`SELECT agent.agent_id, ? FROM ? AS agent
WHERE ? AND ? > 0
ORDER BY agent.agent_id FOR NO KEY UPDATE SKIP LOCKED`, spent, agents, batch, spent)
}

func dropUsageStatement(agents clause.Table, keys string, before time.Time) clause.Expression {
	return expression(`UPDATE ? AS agent
SET usage = (SELECT coalesce(jsonb_agg(entry.element ORDER BY entry.position), '[]') FROM `+usageElements+` WHERE NOT coalesce(?, false))
FROM jsonb_array_elements_text(?::jsonb) AS locked (key)
WHERE agent.agent_id = locked.key`, agents, isSpent(before), keys)
}

// usageElements are the elements of the usage of the row "agent". What is no array has
// none.
const usageElements = `jsonb_array_elements(CASE jsonb_typeof(agent.usage) WHEN 'array' THEN agent.usage ELSE '[]' END) ` +
	`WITH ORDINALITY AS entry (element, position)`

// isSpent is the condition that a usage element is from before the time. It is NULL for
// one without a time.
func isSpent(before time.Time) clause.Expression {
	return expression(entryTime("entry.element")+" < ?::bigint", before.UnixMilli())
}

func lockIdentitiesStatement(identities clause.Table, batch clause.Expression) clause.Expression {
	return expression(`SELECT registered.identity::text, 0 FROM ? AS registered
WHERE ?
ORDER BY registered.identity FOR UPDATE SKIP LOCKED`, identities, batch)
}

// deleteIdentitiesStatement asks for each identity with the GIN index on metadata: that
// serves the bare column only, and only as what contains.
func deleteIdentitiesStatement(identities, agents clause.Table, keys string) clause.Expression {
	return expression(`DELETE FROM ? AS registered USING jsonb_array_elements_text(?::jsonb) AS locked (key)
WHERE registered.identity = locked.key::jsonb
  AND NOT EXISTS (SELECT FROM ? AS agent WHERE agent.metadata @> registered.identity)`, identities, keys, agents)
}
