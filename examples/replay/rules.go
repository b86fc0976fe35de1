package main

import (
	"time"

	"github.com/legion-gorm/legion/limiter"
)

// window is how far back the limits on starts and tokens look, in the time of the trace.
const window = time.Minute

// The rules that every turn is under: those of its user, then those of its tenant.
const (
	userRule   = "user"
	tenantRule = "tenant"
)

// limits are the same for every group of a rule. They bite where a tenant or a user is
// far busier than the others.
type limits struct {
	agents  int64 // conversations that start within the window
	running int64 // turns at work at once
	tokens  int64 // recorded within the window
}

var (
	userLimits   = limits{agents: 3, running: 2, tokens: 10_000}
	tenantLimits = limits{agents: 18, running: 5, tokens: 65_000}
)

func (l limits) policy(window time.Duration) limiter.Policy {
	return limiter.Policy{
		Window:           window,
		MaxAgents:        limiter.Max(l.agents),
		MaxRunningAgents: limiter.Max(l.running),
		MaxTokens:        limiter.Max(l.tokens),
	}
}

// rules are the rules of a turn. The window is that of the database's clock.
func (t turn) rules(window time.Duration) []limiter.Rule {
	return []limiter.Rule{
		{
			Name:     userRule,
			Identity: limiter.Identity{"tenant": t.tenant, "user": t.user},
			Policy:   userLimits.policy(window),
		},
		{
			Name:     tenantRule,
			Identity: limiter.Identity{"tenant": t.tenant},
			Policy:   tenantLimits.policy(window),
		},
	}
}

// group names the group of a rule in the log.
func (t turn) group(rule limiter.Rule) string {
	if rule.Name == tenantRule {
		return t.tenant
	}

	return t.tenant + "/" + t.user
}
