package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/bench/internal/measure"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// errDenied is a denial by what is not Legion.
var errDenied = errors.New("denied")

// enforceAsOriginal is the design that Legion for GORM follows, on the same table: in one
// transaction an advisory lock on a 32-bit hash of each rule's identity, an upsert of the
// agent, and then one query for each limit. It is not exact, see limiter/locks.go.
func (s scenario) enforceAsOriginal(session *session) measure.Call {
	return func(ctx context.Context, batch, number int) error {
		agentID, rules := s.agent(session, number), s.rules(session, batch, number)

		err := session.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error { return admitAsOriginal(tx, agentID, rules) })

		return s.expect(err, errDenied)
	}
}

func admitAsOriginal(tx *gorm.DB, agentID string, rules []limiter.Rule) error {
	identities := make([]string, len(rules))
	isRunning := false

	for i, rule := range rules {
		identity, err := json.Marshal(rule.Identity)
		if err != nil {
			return err
		}

		identities[i] = string(identity)
		isRunning = isRunning || rule.Policy.MaxRunningAgents != nil
	}

	for _, key := range lockKeys(identities) {
		if err := tx.Exec("SELECT pg_advisory_xact_lock(?::bigint)", key).Error; err != nil {
			return err
		}
	}

	metadata, err := merged(rules)
	if err != nil {
		return err
	}

	status := models.StatusIdle
	if isRunning {
		status = models.StatusRunning
	}

	err = tx.Exec(`
INSERT INTO legion_agents (agent_id, metadata, started_at, created_at, updated_at, status)
VALUES (?, ?::jsonb, now(), now(), now(), ?)
ON CONFLICT (agent_id) DO UPDATE SET metadata = excluded.metadata, status = excluded.status, updated_at = excluded.updated_at`,
		agentID, metadata, status).Error
	if err != nil {
		return err
	}

	for i, rule := range rules {
		if err := checkAsOriginal(tx, identities[i], rule.Policy); err != nil {
			return err
		}
	}

	return nil
}

func lockKeys(identities []string) []int64 {
	keys := make([]int64, len(identities))

	for i, identity := range identities {
		hash := fnv.New32a()
		_, _ = hash.Write([]byte(identity))
		keys[i] = int64(hash.Sum32())
	}

	slices.SortFunc(keys, cmp.Compare)

	return keys
}

// checkAsOriginal asks one query for each limit of the policy.
func checkAsOriginal(tx *gorm.DB, identity string, policy limiter.Policy) error {
	const usage = `
SELECT coalesce(sum((entry ->> '%s')::bigint), 0)
FROM legion_agents AS agent CROSS JOIN LATERAL jsonb_array_elements(agent.usage) AS entry
WHERE ? AND (entry ->> 'at')::bigint > (extract(epoch FROM now()) * 1000 - ?)::bigint`

	group := models.JSONContains("agent.metadata", json.RawMessage(identity))
	window := policy.Window.Milliseconds()

	checks := []struct {
		limit *int64

		// spent says that the limit may not be reached, rather than not be exceeded.
		spent bool
		query string
		vars  []any
	}{
		{policy.MaxAgents, false, `
SELECT count(*) FROM legion_agents AS agent WHERE ? AND agent.started_at > now() - ? * interval '1 millisecond'`, []any{group, window}},
		{policy.MaxRunningAgents, false, `
SELECT count(*) FROM legion_agents AS agent WHERE ? AND agent.status = 'running'`, []any{group}},
		{policy.MaxTokens, true, fmt.Sprintf(usage, "total_tokens"), []any{group, window}},
		{policy.MaxEvals, true, fmt.Sprintf(usage, "evals"), []any{group, window}},
	}

	for _, check := range checks {
		if check.limit == nil {
			continue
		}

		var used int64
		if err := tx.Raw(check.query, check.vars...).Scan(&used).Error; err != nil {
			return err
		}

		if used > *check.limit || (check.spent && used == *check.limit) {
			return errDenied
		}
	}

	return nil
}
