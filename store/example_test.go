package store_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

func ExampleFor() {
	db, closeDB := openDatabase()
	defer closeDB()

	ctx := context.Background()

	// In a transaction the store joins it, and what it wrote is rolled back with the rest.
	err := db.Transaction(func(tx *gorm.DB) error {
		agents := store.For[models.LegionAgent](tx)
		if err := agents.Save(ctx, store.Patch{AgentID: "chat-1"}); err != nil {
			return err
		}

		return errors.New("something else went wrong")
	})
	fmt.Println(err)

	_, err = store.For[models.LegionAgent](db).Get(ctx, "chat-1")
	fmt.Println(err)

	// Output:
	// something else went wrong
	// legion: no such agent: record not found
}

func ExampleStore_Save() {
	db, closeDB := openDatabase()
	defer closeDB()

	ctx := context.Background()
	agents := store.For[models.LegionAgent](db)
	agentType := "support"

	// The first call inserts the agent. The second writes its state, and nothing else.
	err := errors.Join(
		agents.Save(ctx, store.Patch{AgentID: "chat-1", AgentType: &agentType}),
		agents.Save(ctx, store.Patch{AgentID: "chat-1", ConversationState: []byte("turn 1")}),
	)
	if err != nil {
		panic(err)
	}

	agent, err := agents.Get(ctx, "chat-1")
	if err != nil {
		panic(err)
	}

	fmt.Printf("%s %s %q\n", *agent.AgentType, agent.Status, agent.ConversationState)

	// An agent becomes running when it is admitted, and in no other way.
	running := models.StatusRunning
	err = agents.Save(ctx, store.Patch{AgentID: "chat-1", Status: &running})
	fmt.Println(errors.Is(err, store.ErrInvalidArgument))

	// Output:
	// support idle "turn 1"
	// true
}

func ExampleStore_Get() {
	db, closeDB := openDatabase()
	defer closeDB()

	ctx := context.Background()
	agents := store.For[models.LegionAgent](db)

	_, err := agents.Get(ctx, "chat-1")
	fmt.Println(errors.Is(err, store.ErrNotFound), errors.Is(err, gorm.ErrRecordNotFound))

	if err := agents.Save(ctx, store.Patch{AgentID: "chat-1"}); err != nil {
		panic(err)
	}

	agent, err := agents.Get(ctx, "chat-1")
	fmt.Println(agent.AgentID, err)

	// Output:
	// true true
	// chat-1 <nil>
}

func ExampleStore_List() {
	db, closeDB := openDatabase()
	defer closeDB()

	ctx := context.Background()
	agents := store.For[models.LegionAgent](db)

	for _, agentID := range []string{"oldest", "older", "newest"} {
		if err := agents.Save(ctx, store.Patch{AgentID: agentID}); err != nil {
			panic(err)
		}
	}

	list, err := agents.List(ctx, 2)
	if err != nil {
		panic(err)
	}

	for _, agent := range list {
		fmt.Println(agent.AgentID)
	}

	// Output:
	// newest
	// older
}

func ExampleStore_AppendUsage() {
	db, closeDB := openDatabase()
	defer closeDB()

	ctx := context.Background()
	agents := store.For[models.LegionAgent](db)

	if err := agents.Save(ctx, store.Patch{AgentID: "chat-1"}); err != nil {
		panic(err)
	}

	// The application names the request, so that a retry is counted once.
	request := models.Usage{ID: "request-1", InputTokens: 900, OutputTokens: 100, Model: "large"}
	for range 2 {
		appended, err := agents.AppendUsage(ctx, "chat-1", request)
		fmt.Println(appended, err)
	}

	agent, err := agents.Get(ctx, "chat-1")
	if err != nil {
		panic(err)
	}

	entries, err := agent.UsageEntries()
	fmt.Println(len(entries), entries[0].TotalTokens, err)

	// Output:
	// true <nil>
	// false <nil>
	// 1 1000 <nil>
}

func ExampleStore_Delete() {
	db, closeDB := openDatabase()
	defer closeDB()

	ctx := context.Background()
	agents := store.For[models.LegionAgent](db)

	if err := agents.Save(ctx, store.Patch{AgentID: "chat-1"}); err != nil {
		panic(err)
	}

	fmt.Println(agents.Delete(ctx, "chat-1"))

	_, err := agents.Get(ctx, "chat-1")
	fmt.Println(err)

	// The row is still there, and limits count it.
	var rows int64
	err = db.Unscoped().Model(&models.LegionAgent{}).Count(&rows).Error
	fmt.Println(rows, err)

	// Output:
	// <nil>
	// legion: no such agent: record not found
	// 1 <nil>
}

func ExampleStore_Prune() {
	db, closeDB := openDatabase()
	defer closeDB()

	ctx := context.Background()
	agents := store.For[models.LegionAgent](db)

	if err := agents.Save(ctx, store.Patch{AgentID: "chat-1"}); err != nil {
		panic(err)
	}

	for _, age := range []time.Duration{40 * 24 * time.Hour, time.Hour} {
		if _, err := agents.AppendUsage(ctx, "chat-1", models.Usage{At: time.Now().Add(-age), TotalTokens: 1000}); err != nil {
			panic(err)
		}
	}

	// The longest window of this application's rules is 30 days.
	result, err := agents.Prune(ctx, time.Now().Add(-31*24*time.Hour))
	fmt.Printf("%+v %v\n", result, err)

	// Output:
	// {Agents:0 UsageEntries:1 Identities:0} <nil>
}

func ExampleStore_Watch() {
	db, closeDB := openDatabase()
	defer closeDB()

	// An application calls legion.Migrate with legion.WithNotify().
	if err := notify(db); err != nil {
		panic(err)
	}

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	agents := store.For[models.LegionAgent](db)

	for event, err := range agents.Watch(ctx) {
		switch {
		case err != nil:
			fmt.Println(err)
		case event.Missed:
			// From here on every change is told. Read now what is kept.
			list, err := agents.List(ctx, 100)
			fmt.Println("agents:", len(list), err)

			if err := agents.Save(ctx, store.Patch{AgentID: "chat-1", ConversationState: []byte("turn 1")}); err != nil {
				panic(err)
			}
		default:
			agent, err := agents.Get(ctx, event.AgentID)
			fmt.Printf("%s: %s %v\n", event.AgentID, agent.ConversationState, err)

			return // leaving the loop ends the watch
		}
	}

	// Output:
	// agents: 0 <nil>
	// chat-1: turn 1 <nil>
}

// openDatabase returns a migrated database, and a function that drops it.
func openDatabase() (db *gorm.DB, drop func()) {
	db, drop = pgtest.OpenForExample()
	if err := db.AutoMigrate(&models.LegionAgent{}); err != nil {
		panic(err)
	}

	return db, drop
}
