package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/examples/internal/table"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// limitUsage takes turns with two agents until each has used up what its owner has. What
// a turn will use is known only afterwards, so the last one may go over the limit, and
// the next one is denied.
func limitUsage(ctx context.Context, db *gorm.DB, out io.Writer) error {
	turns := []struct {
		agentID string
		owner   string
		turn    models.Usage
	}{
		{"essay", "grace", models.Usage{TotalTokens: 4000}},
		{"notebook", "alan", models.Usage{TotalTokens: 500, Evals: 2}},
	}

	agents := store.For[models.LegionAgent](db)

	shown := table.New("agent", "turn", "has left", "verdict", "then uses")

	for _, agent := range turns {
		rule := limiter.Rule{
			Name:     "budget",
			Identity: limiter.Identity{"owner": agent.owner},
			Policy:   limiter.Policy{Window: time.Hour, MaxTokens: limiter.Max(10_000), MaxEvals: limiter.Max(5)},
		}

		for turn := 1; ; turn++ {
			decision, err := limiter.Admit(db, agent.agentID, rule)

			text, err := verdict(err)
			if err != nil {
				return err
			}

			if decision == nil {
				shown.Add(agent.agentID, turn, "", text, "")

				break
			}

			// Here the application would call its model.
			if _, err := agents.AppendUsage(ctx, agent.agentID, agent.turn); err != nil {
				return fmt.Errorf("append the usage of %s: %w", agent.agentID, err)
			}

			tokens, evals := decision.Rules[0].Quotas[0], decision.Rules[0].Quotas[1]
			shown.Add(agent.agentID, turn, amount(tokens.Remaining(), evals.Remaining()), text,
				amount(agent.turn.TotalTokens, agent.turn.Evals))
		}
	}

	return shown.Write(out)
}

func amount(tokens, evals int64) string {
	return fmt.Sprintf("%d tokens, %d evals", tokens, evals)
}
