package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/examples/internal/table"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// explainDenial reads a denial field by field, and shows that it has left nothing behind:
// no row, and nothing used up of the rule that allowed.
func explainDenial(ctx context.Context, db *gorm.DB, out io.Writer) error {
	err := limiter.Enforce(db, "chat-11", ben, perAddress)

	var exceeded *limiter.ExceededError

	switch {
	case err == nil:
		return errors.New("chat-11 was admitted")
	case !errors.As(err, &exceeded):
		return err
	}

	shown := table.New("field", "value")
	shown.Add("AgentID", exceeded.AgentID)
	shown.Add("Rule.Name", exceeded.Rule.Name)
	shown.Add("Rule.Identity", exceeded.Rule.Identity)
	shown.Add("Rule.Policy.Window", exceeded.Rule.Policy.Window)
	shown.Add("RuleIndex", exceeded.RuleIndex)

	for i, quota := range exceeded.Violations {
		shown.Add(fmt.Sprintf("Violations[%d].Limit", i), quota.Limit)
		shown.Add(fmt.Sprintf("Violations[%d].Max", i), quota.Max)
		shown.Add(fmt.Sprintf("Violations[%d].Used", i), quota.Used)
	}

	// There is also exceeded.RetryAfter, left out because it depends on the clock.

	_, err = store.For[models.LegionAgent](db).Get(ctx, exceeded.AgentID)

	switch {
	case errors.Is(err, store.ErrNotFound):
		shown.Add("the agent's row", "there is none")
	case err != nil:
		return fmt.Errorf("look for the row of a denied agent: %w", err)
	default:
		shown.Add("the agent's row", "there is one")
	}

	return shown.Write(out)
}
