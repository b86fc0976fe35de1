package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

const (
	slots  = 8
	budget = 12_000

	// steps of an agent, each an LLM call. Step readStep is delegated to a sub-agent.
	steps         = 4
	readStep      = 1
	tokensPerStep = 100

	// lease is short for the sake of the story. An application keeps the default.
	lease = time.Second

	// callTime is what an LLM call takes.
	callTime = 60 * time.Millisecond

	// patience is how long a denied agent waits before it asks again.
	patience = 50 * time.Millisecond

	// readerSuffix makes the ID of a sub-agent from its parent's.
	readerSuffix = "/reader"

	// readerTries is how often an agent asks for a slot for its sub-agent, before it reads
	// by itself.
	readerTries = 5
)

// rule is what limits the tenant's agents, all together.
var rule = limiter.Rule{
	Name:     "acme",
	Identity: limiter.Identity{"tenant": "acme"},
	Policy:   limiter.Policy{Window: time.Hour, MaxRunningAgents: limiter.Max(slots), MaxTokens: limiter.Max(budget)},
}

// progress is the state of an agent's conversation: the step that is next.
type progress struct {
	Step int `json:"step"`
}

// A researcher runs agents with the plugin.
type researcher struct {
	plugin *legion.Plugin
	agents *store.Store[models.LegionAgent]

	// recorded is told of every LLM call once its tokens are recorded.
	recorded func(agentID, usageID string, tokens int64)
}

func newResearcher(db *gorm.DB, plugin *legion.Plugin, recorded func(agentID, usageID string, tokens int64)) *researcher {
	return &researcher{plugin: plugin, agents: store.For[models.LegionAgent](db), recorded: recorded}
}

// research runs an agent once it is admitted. It waits for a slot, and gives up when the
// budget is spent.
func (r *researcher) research(ctx context.Context, agentID string) error {
	options := legion.TurnOptions{Rules: []limiter.Rule{rule}, Reserve: steps * tokensPerStep, PerStep: true}

	for {
		err := r.plugin.Run(ctx, agentID, options, r.work)

		if isBudgetSpent(err) || !errors.Is(err, limiter.ErrExceeded) {
			return err
		}

		if err := sleep(ctx, patience); err != nil {
			return err
		}
	}
}

// isBudgetSpent tells a denial that stays from one that passes: what is only reserved may
// be given back, what is recorded stays until the window has passed.
func isBudgetSpent(err error) bool {
	exceeded, ok := errors.AsType[*limiter.ExceededError](err)

	return ok && exceeded.Usage.Tokens+steps*tokensPerStep > budget
}

// recover resumes the agents of processes that died.
func (r *researcher) recover(ctx context.Context) (*legion.RecoverReport, error) {
	return r.plugin.Recover(ctx, legion.RecoverOptions{
		Rules:   func(context.Context, *models.LegionAgent) ([]limiter.Rule, error) { return []limiter.Rule{rule}, nil },
		PerStep: true,
	}, r.work)
}

// work is the turn of an agent, from the step where it was interrupted.
func (r *researcher) work(ctx context.Context, turn *legion.Turn) error {
	agent, err := r.agents.Get(ctx, turn.AgentID())
	if err != nil {
		return fmt.Errorf("read the agent: %w", err)
	}

	var done progress
	if len(agent.ConversationState) > 0 {
		if err := json.Unmarshal(agent.ConversationState, &done); err != nil {
			return fmt.Errorf("read the agent's state: %w", err)
		}
	}

	for ; done.Step < steps; done.Step++ {
		if done.Step == readStep {
			err = r.delegate(ctx, turn, done.Step)
		} else {
			err = r.call(ctx, turn, done.Step)
		}

		if err != nil {
			return err
		}

		state, err := json.Marshal(progress{Step: done.Step + 1})
		if err != nil {
			return fmt.Errorf("write the agent's state: %w", err)
		}

		if err := turn.Checkpoint(ctx, state); err != nil {
			return err
		}
	}

	return nil
}

// delegate leaves a step to a sub-agent. That is an agent of its own, under its parent's
// rules, so there may be no slot for it. Then the parent does the step.
func (r *researcher) delegate(ctx context.Context, turn *legion.Turn, step int) error {
	for range readerTries {
		err := r.plugin.Run(ctx, turn.AgentID()+readerSuffix, legion.TurnOptions{}, func(ctx context.Context, reader *legion.Turn) error {
			return r.call(ctx, reader, step)
		})
		if !errors.Is(err, limiter.ErrExceeded) && !errors.Is(err, legion.ErrAgentRunning) {
			return err
		}

		if err := sleep(ctx, patience); err != nil {
			return err
		}
	}

	return r.call(ctx, turn, step)
}

// call is one LLM call. The ID of its usage is that of the step, so that the tokens of a
// step which is done again after a crash count once.
func (r *researcher) call(ctx context.Context, turn *legion.Turn, step int) error {
	if err := sleep(ctx, callTime); err != nil {
		return err
	}

	usageID := fmt.Sprintf("step %d", step)
	if err := turn.Record(ctx, models.Usage{ID: usageID, TotalTokens: tokensPerStep}); err != nil {
		return err
	}

	r.recorded(turn.AgentID(), usageID, tokensPerStep)

	return nil
}

func sleep(ctx context.Context, pause time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(pause):
		return nil
	}
}
