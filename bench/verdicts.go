package main

import (
	"context"
	"fmt"
	"time"

	"github.com/legion-gorm/legion/limiter"
)

// plenty is a limit that no benchmark reaches, fullGroup one that is reached.
const (
	plenty    = 1_000_000_000
	fullGroup = 10
)

// agentsOnly is a policy with one limit, allLimits one with all of them.
func agentsOnly(limit int64) limiter.Policy {
	return limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(limit)}
}

func allLimits() limiter.Policy {
	return limiter.Policy{
		Window:           time.Hour,
		MaxAgents:        limiter.Max(plenty),
		MaxRunningAgents: limiter.Max(plenty),
		MaxTokens:        limiter.Max(plenty),
		MaxEvals:         limiter.Max(plenty),
	}
}

// tenantField is in the identities of most rules here.
const tenantField = "tenant"

// The groups that the tables are prepared with.
func tenant(number int) limiter.Identity {
	return limiter.Identity{tenantField: fmt.Sprintf("tenant %d", number)}
}

func hotTenant(contender string, batch int) limiter.Identity {
	return limiter.Identity{tenantField: agentName("hot "+contender, batch)}
}

// oneRule spreads the calls over the groups.
func oneRule(session *session, _, number int) []limiter.Rule {
	return []limiter.Rule{{Identity: tenant(number % session.scene.scale.identities), Policy: agentsOnly(plenty)}}
}

func threeRules(session *session, _, number int) []limiter.Rule {
	group := number % session.scene.scale.identities

	return []limiter.Rule{
		{Name: "ip", Identity: limiter.Identity{"ip": fmt.Sprintf("ip %d", group)}, Policy: allLimits()},
		{Name: tenantField, Identity: tenant(group), Policy: allLimits()},
		{Name: "email", Identity: limiter.Identity{"email": fmt.Sprintf("email %d", group)}, Policy: allLimits()},
	}
}

// oneHotIdentity is the same group for all calls of a batch. The next batch has another
// one: what is measured is that they follow each other, not that the group grows.
func oneHotIdentity(session *session, batch, _ int) []limiter.Rule {
	return []limiter.Rule{{Identity: hotTenant(session.name, batch), Policy: agentsOnly(plenty)}}
}

func oneFullIdentity(*session, int, int) []limiter.Rule {
	return []limiter.Rule{{Identity: limiter.Identity{tenantField: "full"}, Policy: agentsOnly(fullGroup)}}
}

func newIdentity(session *session, _, number int) []limiter.Rule {
	return []limiter.Rule{{Identity: limiter.Identity{tenantField: agentName("first "+session.name, number)}, Policy: agentsOnly(plenty)}}
}

func verdictBenchmarks(scale scale) []benchmark {
	spread := scenario{agent: newAgent, rules: oneRule}
	three := scenario{agent: newAgent, rules: threeRules}
	hot := scenario{agent: newAgent, rules: oneHotIdentity}
	full := scenario{agent: newAgent, rules: oneFullIdentity, denied: true}
	first := scenario{agent: newAgent, rules: newIdentity}
	again := scenario{agent: knownAgent, rules: rulesOfKnownAgent}

	return []benchmark{
		{
			name: "one rule, new agents, spread identities, sequential",
			how: "One rule with MaxAgents, each call for a new agent, over " + thousands(scale.identities) + " registered identities in turn, beside " +
				thousands(scale.history) + " agents of the last day.",
			floor: spread.floorA(), contenders: spread.contendersAndBucket(),
			targets: targets(2.2, 1.3), prepare: prepareGroups,
		},
		{
			name:    fmt.Sprintf("one rule, new agents, spread identities, %d callers", scale.callers),
			how:     "The same from several callers at once.",
			callers: scale.callers,
			floor:   spread.floorA(), contenders: spread.contendersAndBucket(),
			targets: targets(2.2, 1.3), prepare: prepareGroups,
		},
		{
			name:  "three rules, all four limits each",
			how:   "The rules are on an IP, a tenant and an email, each with MaxAgents, MaxRunningAgents, MaxTokens and MaxEvals.",
			floor: three.floorA(), contenders: three.contenders(),
			targets: targets(3, 1.8), prepare: prepareGroups,
		},
		{
			name:    fmt.Sprintf("one hot identity, %d callers, admitted", scale.callers),
			how:     "Every call of a batch is for a new agent of one and the same group. Each batch has a group of its own, empty at its begin.",
			callers: scale.callers,
			floor:   floorB(), contenders: hot.contendersAndBucket(),
			targets: targets(3, 1.5), prepare: prepareHotGroups,
		},
		{
			name:    fmt.Sprintf("one hot identity, %d callers, denied", scale.callers),
			how:     "The group is full. A denial writes nothing, and its transaction ends without a flush of the WAL.",
			callers: scale.callers,
			floor:   floorB(), contenders: full.contendersAndBucket(),
			targets: targets(1, 0.6), prepare: prepareFullGroup,
		},
		{
			name:  "re-enforce, nothing to change",
			how:   "The agents are recorded under the same rule already.",
			floor: spread.floorA(), contenders: again.contenders(),
			targets: targets(1.5, 0.7), prepare: prepareKnownAgents,
		},
		{
			name:  "first use of an identity",
			how:   "Each call is for a new agent under an identity that nobody has used before.",
			floor: first.floorA(), contenders: first.contenders(),
			targets: targets(3, 1.6), prepare: prepareGroups,
		},
	}
}

// knownAgent is an agent that prepareKnownAgents has recorded.
func knownAgent(session *session, number int) string {
	return agentName("known "+session.name, number%session.scene.scale.agents)
}

func rulesOfKnownAgent(session *session, _, number int) []limiter.Rule {
	return []limiter.Rule{{Identity: tenant(number % session.scene.scale.agents % session.scene.scale.identities), Policy: agentsOnly(plenty)}}
}

func prepareKnownAgents(ctx context.Context, scene *scene) error {
	if err := prepareGroups(ctx, scene); err != nil {
		return err
	}

	for _, name := range append(pathNames(), originalDesign) {
		if err := scene.execute(ctx, `
INSERT INTO legion_agents (agent_id, metadata, started_at)
SELECT ? || n, jsonb_build_object('tenant', 'tenant ' || n % ?), now() FROM generate_series(0, ?) AS n`,
			"known "+name+" ", scene.scale.identities, scene.scale.agents-1); err != nil {
			return err
		}
	}

	return scene.vacuum(ctx)
}

func prepareGroups(ctx context.Context, scene *scene) error {
	if err := scene.addHistory(ctx); err != nil {
		return err
	}

	return scene.vacuum(ctx)
}

// hotGroups is more than the batches of any benchmark.
const hotGroups = 2000

func prepareHotGroups(ctx context.Context, scene *scene) error {
	if err := prepareGroups(ctx, scene); err != nil {
		return err
	}

	for _, name := range append(pathNames(), originalDesign) {
		if err := scene.execute(ctx, `
INSERT INTO legion_agents_identities (identity)
SELECT jsonb_build_object('tenant', ? || n) FROM generate_series(0, ?) AS n`, "hot "+name+" ", hotGroups); err != nil {
			return err
		}
	}

	// What floor B updates.
	return scene.execute(ctx, `
INSERT INTO bench_counters (id, value) SELECT n, 0 FROM generate_series(0, ?) AS n`, hotGroups)
}

func prepareFullGroup(ctx context.Context, scene *scene) error {
	if err := prepareHotGroups(ctx, scene); err != nil {
		return err
	}

	if err := scene.execute(ctx, `
INSERT INTO legion_agents (agent_id, metadata, started_at)
SELECT 'full ' || n, jsonb_build_object('tenant', 'full'), now() FROM generate_series(1, ?) AS n`, fullGroup); err != nil {
		return err
	}

	if err := scene.execute(ctx, `INSERT INTO legion_agents_identities (identity) VALUES ('{"tenant": "full"}')`); err != nil {
		return err
	}

	if err := scene.execute(ctx, `
INSERT INTO bench_buckets (key, burst, rate, tokens, at) VALUES ('{"tenant":"full"}', 1, 0, 0, now())`); err != nil {
		return err
	}

	return scene.vacuum(ctx)
}

func pathNames() []string {
	names := make([]string, len(paths))
	for i, path := range paths {
		names[i] = path.name
	}

	return names
}
