package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/bench/internal/measure"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// manyRequests is from where on an agent's usage is so long that a round more or less makes
// no difference, and is made but once.
const manyRequests = 1000

// llmCalls is how many of them a turn makes.
const llmCalls = 3

func usageBenchmarks(scale scale) []benchmark {
	all := make([]benchmark, 0, len(scale.requests)+1)
	few := scale.requests[0]

	for _, requests := range scale.requests {
		all = append(all, benchmark{
			name: fmt.Sprintf("append of one usage, %s requests recorded", thousands(requests)),
			how: fmt.Sprintf("To agents whose usage is that of so many requests. The floor is the bare append at %d entries; that of the original's "+
				"design is the bare append at as many as there were requests.", few),
			floor: floorC(nameC, few),
			contenders: append(onPaths(appendUsage(requests)),
				floorC(originalDesign, requests)),
			targets: targets(3, 3),
			prepare: func(ctx context.Context, scene *scene) error { return prepareUsage(ctx, scene, few, requests) },
			reset:   resetUsage,
		})
	}

	turn := scenario{agent: newAgent, rules: threeRules}

	return append(all, benchmark{
		name: "turn of three LLM calls",
		how: "Begin, three Records and End of a new agent, under the three rules with all four limits each. The time is that of all five calls " +
			"together.",
		floor: turn.floorA(), contenders: onPaths(turn.takeTurn),
		targets: map[string]float64{serverPath: 10}, prepare: prepareGroups,
	})
}

func usageAgent(session *session, requests, number int) string {
	return agentName(usagePrefix(session.name, requests), number%usageAgents(session.scene.scale, requests))
}

func usagePrefix(contender string, requests int) string {
	return fmt.Sprintf("usage %s %d", contender, requests)
}

// usageAgents is how many agents take usage in turn.
func usageAgents(scale scale, requests int) int {
	if requests < manyRequests {
		return scale.agents
	}

	return max(1, scale.agents/5)
}

func appendUsage(requests int) func(session *session) measure.Call {
	return func(session *session) measure.Call {
		agents := store.For[models.LegionAgent](session.db)

		return func(ctx context.Context, _, number int) error {
			appended, err := agents.AppendUsage(ctx, usageAgent(session, requests, number), usageOfACall())
			if err == nil && !appended {
				return fmt.Errorf("%w: the usage is not new", errVerdict)
			}

			return err
		}
	}
}

func usageOfACall() models.Usage {
	return models.Usage{InputTokens: 1000, OutputTokens: 234, Evals: 1}
}

func (s scenario) takeTurn(session *session) measure.Call {
	return func(ctx context.Context, batch, number int) (err error) {
		turn, err := session.plugin.Begin(ctx, s.agent(session, number),
			legion.TurnOptions{Rules: s.rules(session, batch, number), Reserve: 4000})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, turn.End(ctx)) }()

		for range llmCalls {
			if err := turn.Record(ctx, usageOfACall()); err != nil {
				return err
			}
		}

		return nil
	}
}

// prepareUsage makes the agents that usage is appended to, each with that of so many
// requests, one a minute.
func prepareUsage(ctx context.Context, scene *scene, few, requests int) error {
	if err := prepareGroups(ctx, scene); err != nil {
		return err
	}

	recorded := map[string]int{nameC: few, originalDesign: requests}
	for _, name := range pathNames() {
		recorded[name] = requests
	}

	for name, requests := range recorded {
		if err := scene.execute(ctx, `
INSERT INTO legion_agents (agent_id, metadata, started_at, usage)
SELECT ? || n, jsonb_build_object('tenant', 'tenant ' || n), now(), (
  SELECT jsonb_agg(jsonb_build_object('id', 'request ' || m, 'at', (extract(epoch FROM now()) * 1000)::bigint - (?::int - m) * 60000,
    'total_tokens', 1234, 'input_tokens', 1000, 'output_tokens', 234, 'evals', 1) ORDER BY m)
  FROM generate_series(1, ?::int) AS m)
FROM generate_series(0, ?::int) AS n`,
			usagePrefix(name, requests)+" ", requests, requests, usageAgents(scene.scale, requests)-1); err != nil {
			return err
		}
	}

	if requests > store.MaxUsageEntries {
		for _, name := range pathNames() {
			if err := foldUsage(ctx, scene, name, requests); err != nil {
				return err
			}
		}
	}

	if err := scene.execute(ctx, `
INSERT INTO bench_usage (agent_id, usage) SELECT agent_id, usage FROM legion_agents
WHERE agent_id LIKE 'usage %' AND jsonb_array_length(usage) < ?`, manyRequests); err != nil {
		return err
	}

	return scene.vacuum(ctx)
}

// foldUsage brings the agents to where appending has kept them: folded, each with another
// number of entries since, so that one in some hundred appends folds again.
func foldUsage(ctx context.Context, scene *scene, name string, requests int) error {
	agents := store.For[models.LegionAgent](scene.db)
	count := usageAgents(scene.scale, requests)

	for number := range count {
		agentID := agentName(usagePrefix(name, requests), number)
		if _, err := agents.AppendUsage(ctx, agentID, usageOfACall()); err != nil {
			return err
		}

		err := scene.execute(ctx, `
UPDATE legion_agents SET usage = usage || (
  SELECT coalesce(jsonb_agg(jsonb_build_object('id', 'since ' || m, 'at', (extract(epoch FROM now()) * 1000)::bigint,
    'total_tokens', 1234, 'input_tokens', 1000, 'output_tokens', 234, 'evals', 1)), '[]')
  FROM generate_series(1, ?::int * (? - jsonb_array_length(usage)) / ?::int) AS m)
WHERE agent_id = ?`, number, store.MaxUsageEntries, count, agentID)
		if err != nil {
			return err
		}
	}

	return nil
}

// resetUsage takes back what the last round has appended, but where that makes no
// difference.
func resetUsage(ctx context.Context, scene *scene) error {
	if err := scene.execute(ctx, `
UPDATE legion_agents SET usage = bench_usage.usage FROM bench_usage WHERE bench_usage.agent_id = legion_agents.agent_id`); err != nil {
		return err
	}

	return scene.vacuum(ctx)
}
