package main

import (
	"context"
	"fmt"
	"time"

	"github.com/legion-gorm/legion/limiter"
)

// The axes along which verdicts are plotted.
const (
	axisHistory      = "agents in the table"
	axisWindow       = "agents in the table, all in the window"
	axisConversation = "conversations in the group"
	axisCallers      = "callers of one identity"
)

const maxAgents = 1000

func growthBenchmarks(scale scale) []benchmark {
	spread := scenario{agent: newAgent, rules: oneRule}
	large := scenario{agent: newAgent, rules: largeTenant, either: true}
	busy := scenario{agent: newAgent, rules: busyTenant}
	hot := scenario{agent: newAgent, rules: oneHotIdentity}

	return []benchmark{
		{
			name: fmt.Sprintf("MaxAgents %s, tenant with 10 %% of the rows", thousands(maxAgents)),
			how: "A verdict for a new agent of the tenant. The agents started evenly over a year, so that with a million of them 270 of the tenant's " +
				"are within 24 hours; or the window is as long as the history, and counting stops at the limit where there are more.",
			slow: true, floor: spread.floorA(), contenders: large.contenders(),
			steps: historySteps(scale.histories), prepare: registerTenants, reset: removeOwnAgents,
		},
		{
			name: fmt.Sprintf("MaxTokens, conversations of %d entries", scale.entries),
			how:  "A verdict for a new agent of the group. Every entry of the others lies within the window.",
			slow: true, floor: spread.floorA(), contenders: busy.contenders(),
			steps: conversationSteps(scale.conversations), prepare: registerTenants, reset: removeOwnAgents,
		},
		{
			name:  "one hot identity, admitted",
			how:   "As above, with more and more callers. The time is that of all calls of a batch, divided by their number.",
			floor: floorB(), contenders: hot.contenders(),
			steps: callerSteps(scale.crowds), prepare: prepareHotGroups, durableOnly: true,
		},
	}
}

// largeTenant is the rule on the tenant with a tenth of the rows.
func largeTenant(session *session, _, _ int) []limiter.Rule {
	window := 24 * time.Hour
	if session.scene.step.axis == axisWindow {
		window = 366 * 24 * time.Hour
	}

	return []limiter.Rule{{
		Identity: limiter.Identity{tenantField: "large"},
		Policy:   limiter.Policy{Window: window, MaxAgents: limiter.Max(maxAgents)},
	}}
}

func busyTenant(*session, int, int) []limiter.Rule {
	return []limiter.Rule{{
		Identity: limiter.Identity{tenantField: "busy"},
		Policy:   limiter.Policy{Window: time.Hour, MaxTokens: limiter.Max(plenty)},
	}}
}

// historySteps have larger and larger tables, of agents that started evenly over the year
// and were inserted in that order, as they would have been.
func historySteps(sizes []int) []step {
	steps := make([]step, 0, 2*len(sizes))

	for _, size := range sizes {
		steps = append(steps,
			step{
				label: fmt.Sprintf("24 h window, history of %s agents", thousands(size)), axis: axisHistory, at: size,
				isLargest: size == sizes[len(sizes)-1],
				prepare: func(ctx context.Context, scene *scene) error {
					if err := scene.execute(ctx, "TRUNCATE legion_agents"); err != nil {
						return err
					}

					if err := scene.execute(ctx, `
INSERT INTO legion_agents (agent_id, metadata, usage, started_at, created_at, updated_at)
SELECT 'history ' || n,
  jsonb_build_object('tenant', CASE n % 10 WHEN 0 THEN 'large' ELSE 'tenant ' || n % ?::int END, 'email', 'email ' || n),
  jsonb_build_array(jsonb_build_object('id', 'request', 'at', (extract(epoch FROM moment) * 1000)::bigint, 'total_tokens', 1234)),
  moment, moment, moment
FROM generate_series(1, ?::int) AS n
CROSS JOIN LATERAL (SELECT now() - (?::int - n) / ?::float8 * interval '365 days' AS moment) AS clock`,
						scene.scale.identities, size, size, size); err != nil {
						return err
					}

					return scene.vacuum(ctx)
				},
			},
			step{label: fmt.Sprintf("all of a history of %s agents in the window", thousands(size)), axis: axisWindow, at: size},
		)
	}

	return steps
}

func conversationSteps(sizes []int) []step {
	steps := make([]step, 0, len(sizes))
	before := 0

	for _, size := range sizes {
		first := before + 1
		before = size

		steps = append(steps, step{
			label: "group of " + thousands(size), axis: axisConversation, at: size,
			prepare: func(ctx context.Context, scene *scene) error {
				if err := scene.execute(ctx, `
INSERT INTO legion_agents (agent_id, metadata, started_at, usage)
SELECT 'conversation ' || n, jsonb_build_object('tenant', 'busy', 'email', 'email ' || n), now(), (
  SELECT jsonb_agg(jsonb_build_object('id', 'request ' || n || '/' || m, 'at', (extract(epoch FROM now()) * 1000)::bigint - m,
    'total_tokens', 1234, 'input_tokens', 1000, 'output_tokens', 234, 'evals', 1))
  FROM generate_series(1, ?::int) AS m)
FROM generate_series(?::int, ?::int) AS n`, scene.scale.entries, first, size); err != nil {
					return err
				}

				return scene.vacuum(ctx)
			},
		})
	}

	return steps
}

func callerSteps(crowds []int) []step {
	steps := make([]step, len(crowds))
	for i, callers := range crowds {
		steps[i] = step{label: fmt.Sprintf("callers: %d", callers), axis: axisCallers, at: callers, callers: callers}
	}

	return steps
}

// registerTenants registers the groups of these benchmarks, whose agents are added step by
// step.
func registerTenants(ctx context.Context, scene *scene) error {
	return scene.execute(ctx, `
INSERT INTO legion_agents_identities (identity)
SELECT jsonb_build_object('tenant', name) FROM unnest(ARRAY['large', 'busy']) AS name`)
}

// removeOwnAgents takes the agents of the last round out of the groups.
func removeOwnAgents(ctx context.Context, scene *scene) error {
	if err := scene.execute(ctx, "DELETE FROM legion_agents WHERE starts_with(agent_id, ?)", ownPrefix); err != nil {
		return err
	}

	return scene.vacuum(ctx)
}
