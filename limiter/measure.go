package limiter

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/internal/slotsql"
	"github.com/legion-gorm/legion/internal/usagesql"
	"github.com/legion-gorm/legion/models"
)

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
	measured := measurement{groups: make([]group, len(request.rules))}
	into := []any{
		&measured.now,
		&measured.own.startedAt, &measured.own.unchanged, &measured.own.live, &measured.own.runID, &measured.own.running, &measured.own.deleted,
	}

	var queries []any

	ask := func(query clause.Expression, answer any) {
		queries = append(queries, query)
		into = append(into, answer)
	}

	for i, rule := range request.rules {
		group := &measured.groups[i]
		group.rule = rule

		if rule.Policy.MaxAgents != nil {
			ask(c.agentsStatement(rule, request.agentID), &group.agents)
		}

		if rule.Policy.limitsSlots() {
			ask(c.slotsStatement(rule, request.agentID),
				counts{&group.running, &group.expiredRunning, &group.reserved, &group.expiredReserved})
		}

		if rule.Policy.limitsUsage() {
			ask(c.usageStatement(rule, request.agentID), counts{&group.tokens, &group.evals})
		}
	}

	err := database.Query(tx, c.measureStatement(request, queries), func(rows *sql.Rows) error { return rows.Scan(into...) })

	return measured, err
}

// counts scans a JSON array of as many numbers. One that is missing is an error, since a 0
// would allow.
type counts []*int64

var errCounts = errors.New("legion: the database's counts are not those that were asked for")

// Scan implements sql.Scanner.
func (c counts) Scan(value any) error {
	var text []byte

	switch value := value.(type) {
	case string:
		text = []byte(value)
	case []byte: // of a driver that is wrapped
		text = value
	}

	var found []*int64

	if err := json.Unmarshal(text, &found); err != nil {
		return fmt.Errorf("%w: %w", errCounts, err)
	}

	if len(found) != len(c) || slices.Contains(found, nil) {
		return errCounts
	}

	for i, into := range c {
		*into = *found[i]
	}

	return nil
}

// measureStatement yields one row: the caller's, and then what the queries of the rules'
// policies yield. They stand in the target list, where PostgreSQL plans each by itself:
// the time that planning takes grows with the rules, not with their combinations.
//
// The clock is read once, in a materialized CTE: clock_timestamp() itself in a WHERE
// would be evaluated for every row and keep the indexes from being used, while a
// scalar subquery is a parameter to them.
func (c *call) measureStatement(request *request, queries []any) clause.Expression {
	unchanged := expression("coalesce(own.metadata = ? AND own.deleted_at IS NULL, false)", jsonb(request.merged.text))

	switch {
	case request.keepsGroups() && request.limited:
		unchanged = expression("coalesce(own.metadata = ?, false)", jsonb(request.merged.text))
	case request.keepsGroups():
		unchanged = expression("own.metadata IS NULL")
	}

	vars := append([]any{unchanged}, queries...)

	return expression(`WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT clock.now,
  own.started_at,
  ?,
  `+run.Live("own", "clock.now")+`, own.run_id, coalesce(own.status = 'running', false), own.deleted_at IS NOT NULL`+
		strings.Repeat(",\n  (?)", len(queries))+`
FROM clock LEFT JOIN ? AS own ON own.agent_id = ?`,
		append(vars, clause.Table{Name: c.tables.Agents}, request.agentID)...)
}

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

	return expression(`WITH started AS MATERIALIZED (
    SELECT FROM ? AS agent
    WHERE ? AND agent.agent_id <> ?
      AND agent.started_at > (SELECT now - ? FROM clock) AND agent.started_at > now() - ?
  ) SELECT count(*) FROM (SELECT FROM started LIMIT ?::bigint) AS counted`,
		clause.Table{Name: c.tables.Agents}, rule.matches(), agentID, window, window, limit)
}

// slotsStatement counts the other agents that hold a slot, and what they reserve.
func (c *call) slotsStatement(rule preparedRule, agentID string) clause.Expression {
	return expression(`SELECT json_build_array(`+slotsql.Counts("agent", clockNow)+`)::text
    FROM ? AS agent
    WHERE ? AND agent.agent_id <> ? AND `+slotsql.IsHeld("agent", clockNow),
		clause.Table{Name: c.tables.Agents}, rule.matches(), agentID)
}

// clockNow is the moment of the measurement.
const clockNow = "(SELECT now FROM clock)"

// usageStatement sums what was recorded within the window: tokens and evals, each 0
// where the policy has no limit on it.
func (c *call) usageStatement(rule preparedRule, agentID string) clause.Expression {
	tokens, evals := "0", "0"
	if rule.Policy.MaxTokens != nil {
		tokens = usagesql.Sum("entry.total_tokens")
	}

	if rule.Policy.MaxEvals != nil {
		evals = usagesql.Sum("entry.evals")
	}

	return expression(`SELECT json_build_array(`+tokens+`, `+evals+`)::text
    FROM ?`, c.usageWithin(rule, agentID))
}

// usageWithin is a FROM that yields, as "entry", every entry of usage within the window
// by the agents of the group, the caller among them, whatever its identity was before.
func (c *call) usageWithin(rule preparedRule, agentID string) clause.Expression {
	window := interval(rule.Policy.Window)

	return expression(`? AS agent `+usagesql.Entries("agent.usage")+`
    WHERE (? OR agent.agent_id = ?) AND agent.updated_at > now() - ?
      AND `+usagesql.IsAfter("entry.at", "(SELECT extract(epoch FROM now - ?) * 1000 FROM clock)"),
		clause.Table{Name: c.tables.Agents}, rule.matches(), agentID, interval(lengthened(rule.Policy.Window)), window)
}

// lengthened adds the slack to a window, of which the longest stands for ever.
func lengthened(window time.Duration) time.Duration {
	return time.Duration(saturatingAdd(int64(window), int64(usagesql.UpdatedSlack)))
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
