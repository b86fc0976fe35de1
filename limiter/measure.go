package limiter

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/internal/usagesql"
	"github.com/legion-gorm/legion/models"
)

// updatedSlack is how far the updated_at of a row may lag behind its newest usage
// without that usage being missed. The store keeps them together; the slack is for an
// application that updates columns of its own through GORM, which stamps updated_at
// with the clock of the application's machine.
const updatedSlack = 5 * time.Minute

// A measurement is one snapshot of the caller's row and of every rule's group, with
// one reading of the database's clock.
type measurement struct {
	now    time.Time
	own    ownRow
	groups []group
}

// ownRow is the caller's row as it was before the call.
type ownRow struct {
	startedAt sql.NullTime

	// unchanged says that the row has the merged identity already, and is not deleted. For
	// a turn without rules it says that the groups are those that were read before.
	unchanged bool

	// live says that a run holds the row.
	live bool

	// runID is the run that holds the row or did so last; running is the row's status.
	runID   sql.NullString
	running bool
	deleted bool
}

// startedAfter reports whether the agent counts as started within a window that
// begins at the given time. A new agent starts now.
func (o ownRow) startedAfter(begin time.Time) bool {
	return !o.startedAt.Valid || o.startedAt.Time.After(begin)
}

// A group is what the other agents of a rule's group use, and for tokens and evals
// what the caller has used before.
type group struct {
	rule preparedRule

	// agents started within the window; counting stops one past the limit.
	agents int64

	// running hold a slot. expiredRunning of them have an owner whose lease is over:
	// they count until a verdict has revoked them.
	running, expiredRunning int64

	// reserved and expiredReserved are the same for reserved tokens.
	reserved, expiredReserved int64

	tokens, evals int64
}

// usage is what rule i's group uses with the caller admitted.
func (m measurement) usage(i int) Usage {
	group := m.groups[i]
	policy := group.rule.Policy

	var usage Usage

	if policy.MaxAgents != nil {
		usage.Agents = group.agents
		if m.own.startedAfter(m.now.Add(-policy.Window.Truncate(time.Microsecond))) {
			usage.Agents++
		}
	}

	if policy.MaxRunningAgents != nil {
		usage.RunningAgents = group.running + 1
	}

	if policy.MaxTokens != nil {
		usage.Tokens, usage.ReservedTokens = group.tokens, group.reserved
	}

	if policy.MaxEvals != nil {
		usage.Evals = group.evals
	}

	return usage
}

// denial returns the denial of the first rule that is violated, or nil.
func (m measurement) denial(request *request) *ExceededError {
	for i, group := range m.groups {
		usage := m.usage(i)

		var violations []Quota

		for _, quota := range request.quotas(group.rule.Policy, usage) {
			if quota.exceeded() {
				violations = append(violations, quota)
			}
		}

		if len(violations) > 0 {
			return &ExceededError{AgentID: request.agentID, Rule: group.rule.Rule, RuleIndex: i, Usage: usage, Violations: violations}
		}
	}

	return nil
}

func (m measurement) decision(request *request) *Decision {
	states := make([]RuleState, len(m.groups))

	for i, group := range m.groups {
		usage := m.usage(i)
		states[i] = RuleState{Rule: group.rule.Rule, Usage: usage, Quotas: request.quotas(group.rule.Policy, usage)}
	}

	return &Decision{AgentID: request.agentID, Rules: states}
}

// measure reads the caller's row and measures every rule, in one statement: one
// snapshot, taken after the locks are held.
func (c *call) measure(tx *gorm.DB, request *request) (measurement, error) {
	measured := measurement{groups: make([]group, 0, len(request.rules))}

	err := database.Query(tx, c.measureStatement(request), func(rows *sql.Rows) error {
		group := group{}
		if len(request.rules) > 0 {
			group.rule = request.rules[len(measured.groups)]
		}

		err := rows.Scan(
			&measured.now,
			&measured.own.startedAt, &measured.own.unchanged, &measured.own.live, &measured.own.runID, &measured.own.running, &measured.own.deleted,
			&group.agents,
			&group.running, &group.expiredRunning, &group.reserved, &group.expiredReserved,
			&group.tokens, &group.evals,
		)
		measured.groups = append(measured.groups, group)

		return err
	})

	if len(request.rules) == 0 {
		measured.groups = nil // there was one row, for the caller's own
	}

	return measured, err
}

// measureStatement yields one row for each rule, in their order, each with the
// caller's row in front.
//
// The clock is read once, in a materialized CTE: clock_timestamp() itself in a WHERE
// would be evaluated for every row and keep the indexes from being used, while a
// scalar subquery is a parameter to them.
func (c *call) measureStatement(request *request) clause.Expression {
	groups := make([]any, 0, max(1, len(request.rules)))
	for i, rule := range request.rules {
		groups = append(groups, c.groupStatement(i, rule, request.agentID))
	}

	if len(groups) == 0 {
		groups = append(groups, c.groupStatement(0, preparedRule{}, request.agentID))
	}

	agents := clause.Table{Name: c.tables.Agents}
	unchanged := expression("coalesce(own.metadata = ? AND own.deleted_at IS NULL, false)", jsonb(request.merged.text))

	switch {
	case request.keepsGroups() && request.limited:
		unchanged = expression("coalesce(own.metadata = ?, false)", jsonb(request.merged.text))
	case request.keepsGroups():
		unchanged = expression("own.metadata IS NULL")
	}

	return expression(`WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT clock.now,
  own.started_at,
  ?,
  `+run.Live("own", "clock.now")+`, own.run_id, coalesce(own.status = 'running', false), own.deleted_at IS NOT NULL,
  measured.agents,
  measured.running, measured.expired_running, measured.reserved, measured.expired_reserved,
  measured.tokens, measured.evals
FROM clock
LEFT JOIN ? AS own ON own.agent_id = ?
CROSS JOIN (
`+strings.Repeat("?\nUNION ALL\n", len(groups)-1)+`?
) AS measured
ORDER BY measured.rule`,
		append([]any{unchanged, agents, request.agentID}, groups...)...)
}

// groupStatement measures what the policy of one rule asks for, and zeros for the
// rest.
func (c *call) groupStatement(index int, rule preparedRule, agentID string) clause.Expression {
	agents, slots, used := expression("0"), noSlots, noUsage

	if rule.Policy.MaxAgents != nil {
		agents = c.agentsStatement(rule, agentID)
	}

	if rule.Policy.MaxRunningAgents != nil || rule.Policy.MaxTokens != nil {
		slots = c.slotsStatement(rule, agentID)
	}

	if rule.Policy.MaxTokens != nil || rule.Policy.MaxEvals != nil {
		used = c.usageStatement(rule, agentID)
	}

	return expression(`SELECT ?::int AS rule, ? AS agents, slots.*, used.* FROM (?) AS slots CROSS JOIN (?) AS used`,
		index, agents, slots, used)
}

var (
	noSlots = expression(`SELECT 0::bigint AS running, 0::bigint AS expired_running, 0::bigint AS reserved, 0::bigint AS expired_reserved`)
	noUsage = expression(`SELECT 0::bigint AS tokens, 0::bigint AS evals`)
)

// agentsStatement counts the other agents that started within the window, up to one
// past the limit.
//
// The bound on now(), the start of the transaction, lies behind the exact one and so
// excludes nothing. It is for the planner, which can estimate it, and so choose between
// the index on started_at, for a short window or a large group, and the one on metadata.
// The materialized CTE keeps the LIMIT from talking it into a scan that hopes to stop
// early.
func (c *call) agentsStatement(rule preparedRule, agentID string) clause.Expression {
	limit := min(*rule.Policy.MaxAgents, math.MaxInt64-1) + 1
	window := interval(rule.Policy.Window)

	return expression(`(WITH started AS MATERIALIZED (
  SELECT FROM ? AS agent
  WHERE ? AND agent.agent_id <> ?
    AND agent.started_at > (SELECT now - ? FROM clock) AND agent.started_at > now() - ?
) SELECT count(*) FROM (SELECT FROM started LIMIT ?::bigint) AS counted)`,
		clause.Table{Name: c.tables.Agents}, rule.matches(), agentID, window, window, limit)
}

// slotsStatement counts the other agents that hold a slot, and what they reserve.
//
// A slot with an owner counts until it is given back or revoked, even when its lease
// is over: its owner may be renewing it at this moment, unseen. The unowned slot of
// a bare Enforce is renewed under the identity locks only, so it is free as soon as its
// lease is over.
func (c *call) slotsStatement(rule preparedRule, agentID string) clause.Expression {
	return expression(`SELECT count(*) AS running,
    count(*) FILTER (WHERE agent.lease_expires_at <= (SELECT now FROM clock)) AS expired_running,
    ? AS reserved, ? AS expired_reserved
  FROM ? AS agent
  WHERE ? AND agent.agent_id <> ? AND agent.status = 'running' AND agent.lease_expires_at IS NOT NULL
    AND (agent.run_id IS NOT NULL OR agent.lease_expires_at > (SELECT now FROM clock))`,
		expression(usagesql.Saturate("sum(greatest(0, agent.reserved_tokens))")),
		expression(usagesql.Saturate("sum(greatest(0, agent.reserved_tokens)) FILTER (WHERE agent.lease_expires_at <= (SELECT now FROM clock))")),
		clause.Table{Name: c.tables.Agents}, rule.matches(), agentID)
}

// usageStatement sums what was recorded within the window.
func (c *call) usageStatement(rule preparedRule, agentID string) clause.Expression {
	return expression(`SELECT ? AS tokens, ? AS evals FROM ?`,
		expression(usagesql.Saturate("sum("+usagesql.Count("entry", "total_tokens")+")")),
		expression(usagesql.Saturate("sum("+usagesql.Count("entry", "evals")+")")),
		c.usageWithin(rule, agentID))
}

// usageWithin is a FROM that yields, as "entry", every entry of usage within the window
// by the agents of the group, the caller among them, whatever its identity was before.
//
// The database may hold usage that is not ours: a column that is no array, elements
// that are no objects, counts that are no numbers. None of it may raise or lower a sum.
func (c *call) usageWithin(rule preparedRule, agentID string) clause.Expression {
	return expression(`? AS agent
  CROSS JOIN LATERAL jsonb_array_elements(CASE jsonb_typeof(agent.usage) WHEN 'array' THEN agent.usage ELSE '[]' END) AS entry
  WHERE (? OR agent.agent_id = ?) AND agent.updated_at > now() - ?
    AND CASE jsonb_typeof(entry -> 'at') WHEN 'number'
      THEN (entry ->> 'at')::numeric > (SELECT extract(epoch FROM now - ?) * 1000 FROM clock) ELSE false END`,
		clause.Table{Name: c.tables.Agents}, rule.matches(), agentID,
		interval(lengthened(rule.Policy.Window)), interval(rule.Policy.Window))
}

// lengthened adds the slack to a window, of which the longest stands for ever.
func lengthened(window time.Duration) time.Duration {
	return time.Duration(saturatingAdd(int64(window), int64(updatedSlack)))
}

// matches is the condition that the row "agent" is in the rule's group. Everyone is
// spelled without containment, which would read the whole GIN index.
func (r preparedRule) matches() clause.Expression {
	if r.isEveryone() {
		return expression("agent.metadata IS NOT NULL")
	}

	return models.JSONContains("agent.metadata", json.RawMessage(r.text))
}

// interval is a duration as a constant. A parameter would leave the planner without an
// estimate of the window, and an application has few different windows. It is a product,
// since PostgreSQL 14 reads no more than 2^31 microseconds from a literal.
func interval(duration time.Duration) clause.Expression {
	return expression(fmt.Sprintf("(%d * interval '1 microsecond')", duration.Microseconds()))
}

// expression is SQL text with a ? for each var: a value becomes a parameter, a
// table a quoted name, an expression its own SQL.
func expression(query string, vars ...any) clause.Expression {
	return clause.Expr{SQL: query, Vars: vars}
}
