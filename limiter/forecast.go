package limiter

import (
	"database/sql"
	"errors"
	"math"
	"strings"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/usagesql"
)

// A quotaForecast is one limit of one rule as it stands now, and how it goes on if
// nothing else happens.
type quotaForecast struct {
	used int64

	// resetAfter is when nothing of what is used now counts any more.
	resetAfter time.Duration

	// blockedFor is when the limit will let the request pass. Zero: now.
	blockedFor time.Duration
}

// forecastLimits measures the limits of a request exactly, without locks, in the order of the
// rules and of their quotas.
//
// Every limit bounds a sum of items, each of which counts until a moment that is known:
// a start, a slot, an entry of usage, a reservation. So what has to be waited for is the
// first item, from the last to expire backwards, with which the sum reaches the bound.
func (c *call) forecastLimits(tx *gorm.DB, request *request) ([][]quotaForecast, error) {
	return c.forecastBy(tx, request, c.limitStatement)
}

// forecastWaits is forecastLimits with nothing but blockedFor, which takes less: it reads no
// more starts than the limit is.
func (c *call) forecastWaits(tx *gorm.DB, request *request) ([][]quotaForecast, error) {
	return c.forecastBy(tx, request, c.waitStatement)
}

// A quotaStatement forecasts one limit of a rule: what is used, when it resets, and until
// when it denies, in microseconds.
type quotaStatement func(rule preparedRule, quota Quota, agentID string) clause.Expression

func (c *call) forecastBy(tx *gorm.DB, request *request, each quotaStatement) ([][]quotaForecast, error) {
	forecasts := make([][]quotaForecast, len(request.rules))

	statement := forecastStatement(request, each)
	if statement == nil {
		return forecasts, nil
	}

	err := database.Query(tx, statement, func(rows *sql.Rows) error {
		var (
			rule                int
			forecast            quotaForecast
			now                 int64
			resetsAt, blockedTo sql.NullInt64
		)

		if err := rows.Scan(&rule, &now, &forecast.used, &resetsAt, &blockedTo); err != nil {
			return err
		}

		forecast.resetAfter = after(now, resetsAt)
		forecast.blockedFor = after(now, blockedTo)
		forecasts[rule] = append(forecasts[rule], forecast)

		return nil
	})

	return forecasts, err
}

// after is the time from one moment to another, both in microseconds.
func after(now int64, then sql.NullInt64) time.Duration {
	if !then.Valid {
		return 0
	}

	return time.Duration(min(then.Int64-now, math.MaxInt64/int64(time.Microsecond))) * time.Microsecond
}

// forecastStatement yields one row for each limit of each rule, or is nil where the
// rules have no limit.
func forecastStatement(request *request, each quotaStatement) clause.Expression {
	var limits []any

	for i, rule := range request.rules {
		for _, quota := range request.quotas(rule.Policy, Usage{}) {
			limits = append(limits, expression(`SELECT ?::int AS rule, ?::int AS quota, forecast.* FROM (?) AS forecast`,
				i, len(limits), each(rule, quota, request.agentID)))
		}
	}

	if len(limits) == 0 {
		return nil
	}

	return expression(`WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT forecast.rule, (extract(epoch FROM clock.now) * 1000000)::bigint, forecast.used, forecast.resets_at, forecast.blocked_to
FROM clock CROSS JOIN (
`+strings.Repeat("?\nUNION ALL\n", len(limits)-1)+`?
) AS forecast
ORDER BY forecast.quota`, limits...)
}

func (c *call) limitStatement(rule preparedRule, quota Quota, agentID string) clause.Expression {
	items, bound := c.items(rule, quota, agentID)

	// least() inside max(), since it would make a number of the NULL of no rows.
	const moment = "(max(least(9223372036854775807, expires)) FILTER (WHERE ?))::bigint"

	return expression(`SELECT `+usagesql.Saturate("sum(amount)")+` AS used, `+moment+` AS resets_at, `+moment+` AS blocked_to
  FROM (
    SELECT amount, expires, ceil(sum(CASE WHEN own THEN 0 ELSE amount END) OVER (ORDER BY expires DESC)) AS held FROM (?) AS item
  ) AS held`,
		expression("amount > 0"), expression("held >= ?", bound), items)
}

// waitStatement is limitStatement without what is used. Of starts, which count one each, it
// needs the one as far back from the newest as the limit is. They are materialized without
// a LIMIT for the reason that agentsStatement gives; where they come from the index in
// their order, no more of them are read all the same.
func (c *call) waitStatement(rule preparedRule, quota Quota, agentID string) clause.Expression {
	if quota.Limit != LimitAgents {
		return c.limitStatement(rule, quota, agentID)
	}

	return expression(`SELECT 0 AS used, NULL::bigint AS resets_at, (
    WITH started AS MATERIALIZED (SELECT agent.started_at FROM ? ORDER BY agent.started_at DESC)
    SELECT least(9223372036854775807, extract(epoch FROM started_at + ?) * 1000000)::bigint FROM started OFFSET greatest(0, ? - 1)::bigint LIMIT 1
  ) AS blocked_to`,
		c.startsWithin(rule, agentID), interval(rule.Policy.Window), c.startsBound(quota, agentID))
}

// startsWithin is a FROM with the rows "agent" of the group that started within the window,
// the caller's among them.
func (c *call) startsWithin(rule preparedRule, agentID string) clause.Expression {
	window := interval(rule.Policy.Window)

	return expression(`? AS agent
  WHERE (? OR agent.agent_id = ?) AND agent.started_at > (SELECT now - ? FROM clock) AND agent.started_at > now() - ?`,
		clause.Table{Name: c.tables.Agents}, rule.matches(), agentID, window, window)
}

// startsBound is the number of starts at which the limit denies. A new agent would start
// now, and so leaves room for one less.
func (c *call) startsBound(quota Quota, agentID string) clause.Expression {
	return expression("(?::numeric + (SELECT count(started_at) FROM ? WHERE agent_id = ?))", quota.Max, clause.Table{Name: c.tables.Agents}, agentID)
}

// items are what counts towards a limit: an amount, the moment until which it counts in
// microseconds, and whether it is the caller's own and so does not keep it out. The
// bound is the sum at which the limit denies.
func (c *call) items(rule preparedRule, quota Quota, agentID string) (items, bound clause.Expression) {
	agents := clause.Table{Name: c.tables.Agents}
	bound = expression("?::numeric", quota.Max)

	switch quota.Limit {
	case LimitAgents:
		return expression(`SELECT 1::numeric AS amount, extract(epoch FROM agent.started_at + ?) * 1000000 AS expires, false AS own
  FROM ?`,
			interval(rule.Policy.Window), c.startsWithin(rule, agentID)), c.startsBound(quota, agentID)
	case LimitRunningAgents:
		return expression(`SELECT 1::numeric AS amount, extract(epoch FROM agent.lease_expires_at) * 1000000 AS expires, agent.agent_id = ? AS own
  FROM ? AS agent
  WHERE (? OR agent.agent_id = ?) AND agent.status = 'running' AND agent.lease_expires_at > (SELECT now FROM clock)`,
			agentID, agents, rule.matches(), agentID), bound
	case LimitTokens:
		if quota.Requested > 0 {
			// All of it must fit.
			bound = expression("?::numeric", max(0, quota.Max-quota.Requested+1))
		}

		return expression(`?
  UNION ALL
  SELECT greatest(0, agent.reserved_tokens)::numeric, extract(epoch FROM agent.lease_expires_at) * 1000000, false
  FROM ? AS agent
  WHERE ? AND agent.agent_id <> ? AND agent.status = 'running' AND agent.lease_expires_at > (SELECT now FROM clock)`,
			c.usageItems(rule, "total_tokens", agentID), agents, rule.matches(), agentID), bound
	default:
		return c.usageItems(rule, "evals", agentID), bound
	}
}

func (c *call) usageItems(rule preparedRule, key, agentID string) clause.Expression {
	return expression(`SELECT `+usagesql.Count("entry."+key)+` AS amount,
    least(9223372036854775807, entry.at::numeric) * 1000 + ?::bigint AS expires, false AS own
  FROM ?`,
		rule.Policy.Window.Microseconds(), c.usageWithin(rule, agentID))
}

// forecastsLater reports whether a denial is given its RetryAfter once the locks are free,
// so that the others under its identities need not wait for it. In a caller's transaction
// it has no other moment; nor for several agents, of which each is measured after those
// that are then rolled back.
func (c *call) forecastsLater() bool {
	return !database.InTransaction(c.db) && len(c.requests) == 1
}

// forecast gives a denial its RetryAfter, outside a transaction. It returns the error.
func (c *call) forecast(err error) error {
	denial, denied := errors.AsType[*ExceededError](err)
	if !denied || !c.forecastsLater() {
		return err
	}

	// The verdict stands without it.
	_ = database.Autocommit(c.db, c.settings.ConnectionTimeout, func(tx *gorm.DB) error {
		denial.RetryAfter = c.retryAfter(tx, c.denied, denial)

		return nil
	})

	return err
}

// retryAfter is the wait after which a denied request passes if nothing else happens,
// or zero where that is not known or never comes.
func (c *call) retryAfter(tx *gorm.DB, request *request, denial *ExceededError) time.Duration {
	forecasts, err := c.forecastWaits(tx, request)
	if err != nil {
		return 0 // The verdict stands without it.
	}

	var wait time.Duration

	for i, rule := range request.rules {
		for j, quota := range request.quotas(rule.Policy, Usage{}) {
			blockedFor := forecasts[i][j].blockedFor

			// A limit that denies and is not seen to: a slot whose lease is over but whose
			// row is locked, or room that was made in this moment.
			unknown := i == denial.RuleIndex && blockedFor == 0 && denial.violates(quota.Limit)
			if quota.Max == 0 || quota.Requested > quota.Max || unknown {
				return 0
			}

			wait = max(wait, blockedFor)
		}
	}

	return wait
}

func (e *ExceededError) violates(limit Limit) bool {
	for _, violation := range e.Violations {
		if violation.Limit == limit {
			return true
		}
	}

	return false
}
