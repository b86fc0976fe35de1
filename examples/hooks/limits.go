package main

import (
	"context"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// ChatAgent is Legion's agent with a column of the application's own. Others can join it
// to their reports; Legion does not touch the column, so it is nullable.
type ChatAgent struct {
	models.LegionAgent

	Tenant *string `gorm:"index"`
}

var (
	// perTenant is the plugin's default policy.
	perTenant = limiter.Policy{Window: 24 * time.Hour, MaxAgents: limiter.Max(3)}

	perUser = limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(2)}
)

// BeforeCreate is the hook that was missing. It passes on the tx that it is given, so that
// the admission is part of the transaction that creates the chat: either both are there
// afterwards, or neither.
func (c *Chat) BeforeCreate(tx *gorm.DB) error {
	return limiter.Enforce(tx, c.ID,
		limiter.Rule{Name: "chats of a user", Identity: limiter.Identity{"email": c.Email}, Policy: perUser},
		limiter.Rule{Name: "agents of a tenant", Identity: limiter.Identity{"tenant": c.Tenant}},
	)
}

// LegionRules is the way without a hook: the plugin asks each report, and enforces a whole
// batch in one pass.
func (r *Report) LegionRules(context.Context) (string, []limiter.Rule, error) {
	return r.ID, []limiter.Rule{{Name: "agents of a tenant", Identity: limiter.Identity{"tenant": r.Tenant}}}, nil
}
