package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/bench/internal/measure"
	"github.com/legion-gorm/legion/limiter"
)

// A floor is what an application would have to pay anyway, without a limit.
const (
	nameA = "floor A"
	nameB = "floor B"
	nameC = "floor C"
)

const upsert = `
INSERT INTO legion_agents (agent_id, metadata, started_at, created_at, updated_at, status)
VALUES (?, ?::jsonb, clock_timestamp(), clock_timestamp(), clock_timestamp(), 'idle')
ON CONFLICT (agent_id) DO UPDATE SET metadata = excluded.metadata, updated_at = excluded.updated_at`

// floorA is the bare upsert of the scenario's agent, into the same table with the same
// indexes, in a GORM transaction.
func (s scenario) floorA() contender {
	return contender{name: nameA, begin: func(session *session) measure.Call {
		return func(ctx context.Context, batch, number int) error {
			metadata, err := merged(s.rules(session, batch, number))
			if err != nil {
				return err
			}

			agent := newAgent(session, number)

			return session.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
				return tx.Exec(upsert, agent, metadata).Error
			})
		}
	}}
}

// floorB is one row that all callers update, each in a GORM transaction of its own.
func floorB() contender {
	return contender{name: nameB, begin: func(session *session) measure.Call {
		return func(ctx context.Context, batch, _ int) error {
			return session.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
				return requireOneRow(tx.Exec("UPDATE bench_counters SET value = value + 1 WHERE id = ?", batch))
			})
		}
	}}
}

// floorC is the bare append of an entry of usage, a statement that commits by itself, to
// agents that have so many.
func floorC(name string, entries int) contender {
	return contender{name: name, begin: func(session *session) measure.Call {
		return func(ctx context.Context, _, number int) error {
			return requireOneRow(session.db.WithContext(ctx).Exec("UPDATE legion_agents SET usage = usage || ?::jsonb WHERE agent_id = ?",
				fmt.Sprintf(`[{"id": "%s %d", "at": 1700000000000, "total_tokens": 1234, "input_tokens": 1000, "output_tokens": 234, "evals": 1}]`,
					session.name, number), usageAgent(session, entries, number)))
		}
	}}
}

func requireOneRow(result *gorm.DB) error {
	if result.Error == nil && result.RowsAffected != 1 {
		return fmt.Errorf("%w: it changed %d rows", errVerdict, result.RowsAffected)
	}

	return result.Error
}

// merged is the metadata of an agent under the rules.
func merged(rules []limiter.Rule) (string, error) {
	all := limiter.Identity{}
	for _, rule := range rules {
		maps.Copy(all, rule.Identity)
	}

	text, err := json.Marshal(all)

	return string(text), err
}
