package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/examples/internal/table"
	"github.com/legion-gorm/legion/limiter"
)

var (
	tenant = limiter.Rule{
		Name:     "per tenant",
		Identity: limiter.Identity{"tenant": "acme"},
		Policy:   limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(4)},
	}
	ada = person("ada@example.com")
	ben = person("ben@example.com")
)

func person(email string) limiter.Rule {
	return limiter.Rule{
		Name:     "per person",
		Identity: limiter.Identity{"tenant": "acme", "email": email},
		Policy:   limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(2)},
	}
}

// limitOverlappingGroups shows what a group is: an identity counts every agent whose own
// identity contains it. Ada's agents name her and her tenant, so they count for both,
// even where only her own rule was asked.
func limitOverlappingGroups(_ context.Context, db *gorm.DB, out io.Writer) error {
	calls := []struct {
		agentID string
		rules   []limiter.Rule
	}{
		{"ada-1", []limiter.Rule{ada}},
		{"ada-2", []limiter.Rule{ada}},
		{"ada-3", []limiter.Rule{ada}},
		{"nightly-report", []limiter.Rule{tenant}},
		{"ben-1", []limiter.Rule{ben, tenant}},
		{"ben-2", []limiter.Rule{ben, tenant}},
	}

	shown := table.New("agent", "rules", "verdict", "left")

	for _, call := range calls {
		// Admit is Enforce that also says what is left.
		decision, err := limiter.Admit(db, call.agentID, call.rules...)

		text, err := verdict(err)
		if err != nil {
			return err
		}

		shown.Add(call.agentID, names(call.rules), text, left(decision))
	}

	return shown.Write(out)
}

func names(rules []limiter.Rule) string {
	texts := make([]string, len(rules))
	for i, rule := range rules {
		texts[i] = rule.Name
	}

	return strings.Join(texts, ", ")
}

// left says what remains of each rule, and nothing after a denial.
func left(decision *limiter.Decision) string {
	if decision == nil {
		return ""
	}

	var texts []string

	for _, state := range decision.Rules {
		for _, quota := range state.Quotas {
			texts = append(texts, fmt.Sprintf("%s %d", state.Rule.Name, quota.Remaining()))
		}
	}

	return strings.Join(texts, ", ")
}
