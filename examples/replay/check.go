package main

import (
	"context"
	"errors"
	"fmt"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/limiter"
)

// # The check
//
// Every admission is checked again, in the database, over its own window, from the log
// and not from what Legion has counted. It must find every limit that was exceeded and
// must not find one that was not. So for every comparison it matters on which side of the
// verdict its moments lie. In the order in which they come for one admission:
//
//	snapshot < the verdict's own count < started_at, the slot < admitted_at < commit
//
// and for the end of a turn:
//
//	ended_at < the tokens' own time, the slot is given back < commit
//
// Two admissions to one group exclude each other from before the count until the commit,
// so that what holds at the count still holds at admitted_at.
//
//   - Starts: no admission may find more than the limit within (admitted_at - window,
//     admitted_at]. The verdict's window ended earlier and began earlier, and nobody else
//     has started in between, so it has counted all of these, and perhaps more.
//   - Slots: no admission may find more than the limit of slots at admitted_at. A slot
//     lasts in the log from admitted_at to ended_at, or to the end of its lease. In truth
//     it lasts until the commit that gives it back, and no verdict can know of that
//     earlier; so the log never has more slots than the verdict has counted.
//   - Tokens: no admission may find that the tokens within (admitted_at - window,
//     admitted_at] had reached the limit before it. They are recorded when a turn ends, so
//     the turns that are at work when the limit is reached may go beyond it: that is what
//     a limit on recorded tokens allows. What has ended but not committed is not yet
//     recorded, for any verdict: so only what the snapshot sees counts.
//
// Without the locks the first two are violated: two calls count at once, and neither
// counts the other. The third is not: recorded tokens lie in the past for both.

// A finding is what the check says of one limit of one rule.
type finding struct {
	Rule  string
	Limit limiter.Limit `gorm:"-"`

	// Admissions were checked.
	Admissions int64

	// Peak is the most that an admission has found, itself included, and Max the limit.
	Peak int64
	Max  int64

	// Violations are the admissions that should have been denied.
	Violations int64
}

const startsCheck = `
SELECT this.rule, count(*) AS admissions, max(found.agents) AS peak, max(this.max_agents) AS max,
  count(*) FILTER (WHERE found.agents > this.max_agents) AS violations
FROM replay_admissions AS this
CROSS JOIN LATERAL (
  SELECT count(DISTINCT other.agent_id) AS agents
  FROM replay_admissions AS other
  WHERE other.rule = this.rule AND other.group_name = this.group_name
    AND other.started_at > this.admitted_at - this.window_microseconds * interval '1 microsecond'
    AND other.started_at <= this.admitted_at
) AS found
GROUP BY this.rule
ORDER BY this.rule DESC`

// slotsCheck goes through the begins and ends of the slots of a group in order, and counts
// up and down. A slot that ends at a moment is free for one that begins then.
const slotsCheck = `
WITH change AS (
  SELECT rule, group_name, admitted_at AS at, 1 AS slots, max_running_agents FROM replay_admissions
  UNION ALL
  SELECT rule, group_name, least(ended_at, lease_expires_at), -1, NULL FROM replay_admissions
), held AS (
  SELECT rule, slots AS change, max_running_agents,
    sum(slots) OVER (PARTITION BY rule, group_name ORDER BY at, slots) AS slots
  FROM change
)
SELECT rule, count(*) AS admissions, max(slots) AS peak, max(max_running_agents) AS max,
  count(*) FILTER (WHERE slots > max_running_agents) AS violations
FROM held
WHERE change = 1
GROUP BY rule
ORDER BY rule DESC`

const usageCheck = `
SELECT this.rule, count(*) AS admissions, max(found.tokens) AS peak, max(this.max_tokens) AS max,
  count(*) FILTER (WHERE found.tokens >= this.max_tokens) AS violations
FROM replay_admissions AS this
CROSS JOIN LATERAL (
  SELECT coalesce(sum(other.tokens), 0)::bigint AS tokens
  FROM replay_admissions AS other
  WHERE other.rule = this.rule AND other.group_name = this.group_name
    AND other.ended_at > this.admitted_at - this.window_microseconds * interval '1 microsecond'
    AND other.ended_at <= this.admitted_at
    AND pg_visible_in_snapshot(other.ended_by, this.snapshot)
) AS found
GROUP BY this.rule
ORDER BY this.rule DESC`

// check looks in the log for admissions beyond a limit.
func check(ctx context.Context, db *gorm.DB) ([]finding, error) {
	checks := []struct {
		limit limiter.Limit
		query string
	}{
		{limiter.LimitAgents, startsCheck},
		{limiter.LimitRunningAgents, slotsCheck},
		{limiter.LimitTokens, usageCheck},
	}

	var findings []finding

	for _, check := range checks {
		var found []finding
		if err := db.WithContext(ctx).Raw(check.query).Scan(&found).Error; err != nil {
			return nil, fmt.Errorf("check the limit on %s: %w", check.limit, err)
		}

		for _, finding := range found {
			finding.Limit = check.limit
			findings = append(findings, finding)
		}
	}

	return findings, nil
}

var errLogDisagrees = errors.New("the log and Legion's table disagree")

// booksQuery counts, of all agents that are in the log or in Legion's table, those for
// which the two disagree: on the tokens, on the start, which must lie within the
// transaction of the first admission, or on the slot, which must be free in the end.
const booksQuery = `
WITH logged AS (
  SELECT agent_id, sum(tokens) AS tokens, min(started_at) AS first_start, max(started_at) AS last_start,
    min(begun_at) AS begun_at, min(admitted_at) AS admitted_at
  FROM replay_admissions WHERE rule = ?
  GROUP BY agent_id
), recorded AS (
  SELECT agent_id, started_at, status,
    (SELECT coalesce(sum((entry ->> 'total_tokens')::bigint), 0) FROM jsonb_array_elements(usage) AS entry) AS tokens
  FROM legion_agents
)
SELECT count(*) FILTER (WHERE (
    logged.tokens = recorded.tokens
    AND logged.first_start = recorded.started_at AND logged.last_start = recorded.started_at
    AND recorded.started_at BETWEEN logged.begun_at AND logged.admitted_at
    AND recorded.status = 'idle'
  ) IS NOT TRUE)
FROM logged FULL JOIN recorded USING (agent_id)`

// compareBooks holds the log against Legion's own table: a check that reads a wrong log
// would prove nothing.
func compareBooks(ctx context.Context, db *gorm.DB) error {
	var disagreements int64
	if err := db.WithContext(ctx).Raw(booksQuery, tenantRule).Scan(&disagreements).Error; err != nil {
		return fmt.Errorf("compare the log with Legion's table: %w", err)
	}

	if disagreements > 0 {
		return fmt.Errorf("%w on %d agents", errLogDisagrees, disagreements)
	}

	return nil
}
