package legion_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// The plugin holds what an application configures once. WithMigrate makes the tables at
// db.Use; an application that migrates apart leaves it out and calls Migrate.
func ExampleNew() {
	db, done := pgtest.OpenForExample()
	defer done()

	plugin := legion.New(
		legion.WithMigrate(),
		legion.WithDefaultPolicy(limiter.Policy{Window: time.Minute, MaxAgents: limiter.Max(1)}),
		legion.WithObserver(func(decision limiter.Observation) {
			fmt.Println("observed:", decision.AgentID, "denied:", decision.Denial != nil)
		}),
	)
	if err := db.Use(plugin); err != nil {
		panic(err)
	}

	rule := limiter.Rule{Name: "per address", Identity: limiter.Identity{"ip": "203.0.113.42"}}
	fmt.Println(limiter.Enforce(db, "chat-1", rule))
	fmt.Println(errors.Is(limiter.Enforce(db, "chat-2", rule), limiter.ErrExceeded))

	// Output:
	// observed: chat-1 denied: false
	// <nil>
	// observed: chat-2 denied: true
	// true
}

// ResearchAgent is an application's own agent model.
type ResearchAgent struct {
	models.LegionAgent

	Topic *string
}

func ExampleWithModel() {
	db, done := pgtest.OpenForExample()
	defer done()

	if err := db.Use(legion.New(legion.WithModel(&ResearchAgent{}), legion.WithMigrate())); err != nil {
		panic(err)
	}

	rule := limiter.Rule{Identity: limiter.Identity{"tenant": "acme"}, Policy: limiter.Policy{Window: time.Hour}}
	if err := limiter.Enforce(db, "research-1", rule); err != nil {
		panic(err)
	}

	// The application fills its own columns as it likes.
	if err := db.Model(&ResearchAgent{}).Where("agent_id = ?", "research-1").Update("topic", "GIN indexes").Error; err != nil {
		panic(err)
	}

	agent, err := store.For[ResearchAgent](db).Get(context.Background(), "research-1")
	if err != nil {
		panic(err)
	}

	fmt.Println(agent.AgentID, *agent.Topic, agent.Metadata)

	// Output:
	// research-1 GIN indexes {"tenant": "acme"}
}

// Import is a model whose rows start an agent each.
type Import struct {
	ID     string `gorm:"primaryKey"`
	Tenant string
}

func (i *Import) LegionRules(context.Context) (string, []limiter.Rule, error) {
	return i.ID, []limiter.Rule{{
		Name:     "imports",
		Identity: limiter.Identity{"tenant": i.Tenant},
		Policy:   limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(2)},
	}}, nil
}

// The model says what limits it, and the plugin enforces that before each INSERT.
func ExampleLimited() {
	db, done := pgtest.OpenForExample()
	defer done()

	if err := errors.Join(db.Use(legion.New(legion.WithMigrate(), legion.WithObserver(nil))), db.AutoMigrate(&Import{})); err != nil {
		panic(err)
	}

	fmt.Println(db.Create([]*Import{{ID: "import-1", Tenant: "acme"}, {ID: "import-2", Tenant: "acme"}}).Error)

	var exceeded *limiter.ExceededError
	fmt.Println(errors.As(db.Create(&Import{ID: "import-3", Tenant: "acme"}).Error, &exceeded), exceeded.Rule.Name)

	var rows int64

	db.Model(&Import{}).Count(&rows)
	fmt.Println("rows:", rows)

	// Output:
	// <nil>
	// true imports
	// rows: 2
}

// A restore of rows that existed before is no new work.
func ExampleSkip() {
	db, done := pgtest.OpenForExample()
	defer done()

	if err := errors.Join(db.Use(legion.New(legion.WithMigrate(), legion.WithObserver(nil))), db.AutoMigrate(&Import{})); err != nil {
		panic(err)
	}

	restored := []*Import{{ID: "import-1", Tenant: "acme"}, {ID: "import-2", Tenant: "acme"}, {ID: "import-3", Tenant: "acme"}}
	fmt.Println(legion.Skip(db).Create(restored).Error)

	// Output:
	// <nil>
}

// Code that is given a *gorm.DB can ask whether it limits anything.
func ExampleFrom() {
	db, done := pgtest.OpenForExample()
	defer done()

	_, used := legion.From(db)
	fmt.Println(used)

	if err := db.Use(legion.New()); err != nil {
		panic(err)
	}

	plugin, used := legion.From(db)
	fmt.Println(used, plugin.Name())

	// Output:
	// false
	// true gorm:legion
}

func ExampleMigrate() {
	db, done := pgtest.OpenForExample()
	defer done()

	fmt.Println(legion.Migrate(db))
	fmt.Println(db.Migrator().HasTable("legion_agents"), db.Migrator().HasTable("legion_agents_identities"))

	fmt.Println(legion.MigrateDown(db))
	fmt.Println(db.Migrator().HasTable("legion_agents"))

	// Output:
	// <nil>
	// true true
	// <nil>
	// false
}

// AutoMigrate is enough for an application that has one process.
func ExampleModels() {
	db, done := pgtest.OpenForExample()
	defer done()

	fmt.Println(db.AutoMigrate(append(legion.Models(), &Import{})...))

	// Output:
	// <nil>
}
