package legion_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// budget is what the examples' turns are begun under.
var budget = limiter.Rule{Name: "budget", Identity: limiter.Identity{"tenant": "acme"}, Policy: limiter.Policy{
	Window: time.Hour, MaxRunningAgents: limiter.Max(2), MaxTokens: limiter.Max(1000),
}}

func openForTurns() (db *gorm.DB, plugin *legion.Plugin, done func()) {
	db, drop := pgtest.OpenForExample()

	plugin = legion.New(legion.WithMigrate(), legion.WithObserver(nil))
	if err := db.Use(plugin); err != nil {
		panic(err)
	}

	return db, plugin, func() {
		if err := plugin.Shutdown(context.Background()); err != nil {
			panic(err)
		}

		drop()
	}
}

// Run is the whole of a turn: it enforces the rules, holds the slot however long the work
// takes, and gives it back however the work ends. Tokens that are reserved cannot be spent
// by another agent meanwhile.
func ExamplePlugin_Run() {
	db, plugin, done := openForTurns()
	defer done()

	ctx := context.Background()

	err := plugin.Run(ctx, "chat-1", legion.TurnOptions{Rules: []limiter.Rule{budget}, Reserve: 600},
		func(ctx context.Context, turn *legion.Turn) error {
			// ... call the model with ctx, which ends if the turn loses its slot ...
			return turn.Record(ctx, models.Usage{ID: "request-1", TotalTokens: 450})
		})
	fmt.Println("turn:", err)

	report, err := limiter.Check(db, "", budget)
	fmt.Println("used:", report.Rules[0].Usage.Tokens, "running:", report.Rules[0].Usage.RunningAgents, err)

	err = plugin.Run(ctx, "chat-2", legion.TurnOptions{Rules: []limiter.Rule{budget}, Reserve: 600},
		func(context.Context, *legion.Turn) error { return errors.New("this is not called") })
	fmt.Println("too much:", errors.Is(err, limiter.ErrExceeded))

	// Output:
	// turn: <nil>
	// used: 450 running: 0 <nil>
	// too much: true
}

// Begin and End are for work that is no function. End is safe in a defer.
func ExamplePlugin_Begin() {
	db, plugin, done := openForTurns()
	defer done()

	ctx := context.Background()

	turn, err := plugin.Begin(ctx, "chat-1", legion.TurnOptions{Rules: []limiter.Rule{budget}, PerStep: true})
	if err != nil {
		panic(err)
	}

	_, err = plugin.Begin(ctx, "chat-1", legion.TurnOptions{Rules: []limiter.Rule{budget}})
	fmt.Println("again:", err)

	if err := errors.Join(
		turn.Record(turn.Context(), models.Usage{InputTokens: 300, OutputTokens: 40}),
		turn.Checkpoint(turn.Context(), []byte("after the first step")),
		turn.End(ctx),
	); err != nil {
		panic(err)
	}

	agent, err := store.For[models.LegionAgent](db).Get(ctx, "chat-1")
	if err != nil {
		panic(err)
	}

	fmt.Println(agent.Status, string(agent.ConversationState))

	// Output:
	// again: legion: the agent is running a turn: wait for its end, or give this turn an agent of its own
	// idle after the first step
}

// What a turn begins is its child: another agent, under its parent's rules and its own.
func ExampleTurnFrom() {
	db, plugin, done := openForTurns()
	defer done()

	research := func(ctx context.Context) error {
		parent, _ := legion.TurnFrom(ctx)

		return plugin.Run(ctx, parent.AgentID()+"/search", legion.TurnOptions{}, func(ctx context.Context, child *legion.Turn) error {
			return child.Record(ctx, models.Usage{TotalTokens: 20})
		})
	}

	err := plugin.Run(context.Background(), "chat-1", legion.TurnOptions{Rules: []limiter.Rule{budget}},
		func(ctx context.Context, _ *legion.Turn) error { return research(ctx) })
	if err != nil {
		panic(err)
	}

	child, err := store.For[models.LegionAgent](db).Get(context.Background(), "chat-1/search")
	fmt.Println(*child.ParentAgentID, string(child.Metadata), err)

	// Output:
	// chat-1 {"tenant": "acme"} <nil>
}

// A process that starts looks for the work of those that died, now and then.
func ExamplePlugin_Recover() {
	db, plugin, done := openForTurns()
	defer done()

	// What a process leaves behind that was killed a minute ago.
	db.Exec(`INSERT INTO legion_agents (agent_id, status, run_id, lease_expires_at, conversation_state)
		VALUES ('chat-1', 'running', 'a run', now() - interval '1 minute', 'after the first step')`)

	rulesOf := func(context.Context, *models.LegionAgent) ([]limiter.Rule, error) { return []limiter.Rule{budget}, nil }
	report, err := plugin.Recover(context.Background(), legion.RecoverOptions{Rules: rulesOf},
		func(ctx context.Context, turn *legion.Turn) error {
			agent, err := store.For[models.LegionAgent](db).Get(ctx, turn.AgentID())
			fmt.Println("resumed:", agent.AgentID, string(agent.ConversationState))

			return err
		})
	fmt.Println(report.Resumed, report.Left, err)

	// Output:
	// resumed: chat-1 after the first step
	// [chat-1] [] <nil>
}

// At the end of a process its turns end, one way or the other.
func ExamplePlugin_Shutdown() {
	db, plugin, done := openForTurns()
	defer done()

	turn, err := plugin.Begin(context.Background(), "chat-1", legion.TurnOptions{Rules: []limiter.Rule{budget}})
	if err != nil {
		panic(err)
	}

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()

	fmt.Println(plugin.Shutdown(ctx), "-", context.Cause(turn.Context()))

	agent, err := store.For[models.LegionAgent](db).Get(context.Background(), "chat-1")
	fmt.Println(agent.Status, err)

	// Output:
	// <nil> - legion: the plugin is shut down
	// idle <nil>
}
