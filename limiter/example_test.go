package limiter_test

import (
	"errors"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// openDatabase returns a migrated database, and a function that drops it.
func openDatabase() (db *gorm.DB, drop func()) {
	db, drop = pgtest.OpenForExample()
	if err := db.AutoMigrate(&models.LegionAgent{}); err != nil {
		panic(err)
	}

	return db, drop
}

// Two agents of one address may start within a minute. The third is denied.
func ExampleEnforce() {
	db, drop := openDatabase()
	defer drop()

	rule := limiter.Rule{
		Name:     "per address",
		Identity: limiter.Identity{"ip": "203.0.113.42"},
		Policy:   limiter.Policy{Window: time.Minute, MaxAgents: limiter.Max(2)},
	}

	fmt.Println(limiter.Enforce(db, "chat-1", rule))
	fmt.Println(limiter.Enforce(db, "chat-2", rule))
	fmt.Println(errors.Is(limiter.Enforce(db, "chat-3", rule), limiter.ErrExceeded))

	// An agent that was admitted is not counted twice.
	fmt.Println(limiter.Enforce(db, "chat-2", rule))
	// Output:
	// <nil>
	// <nil>
	// true
	// <nil>
}

// The admission is part of the application's own transaction: rolled back together,
// committed together.
func ExampleEnforce_insideATransaction() {
	db, drop := openDatabase()
	defer drop()

	rule := limiter.Rule{
		Identity: limiter.Identity{"tenant": "acme"},
		Policy:   limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(1)},
	}

	err := db.Transaction(func(tx *gorm.DB) error {
		if err := limiter.Enforce(tx, "chat-1", rule); err != nil {
			return err
		}

		return errors.New("the application could not go on")
	})
	fmt.Println(err)

	// So the one place is still free. A denial, on the other hand, leaves the
	// transaction usable.
	err = db.Transaction(func(tx *gorm.DB) error {
		if err := limiter.Enforce(tx, "chat-2", rule); err != nil {
			return err
		}

		fmt.Println(errors.Is(limiter.Enforce(tx, "chat-3", rule), limiter.ErrExceeded))

		return nil
	})
	fmt.Println(err)
	// Output:
	// the application could not go on
	// true
	// <nil>
}

// Several agents are admitted together or not at all.
func ExampleEnforceAll() {
	db, drop := openDatabase()
	defer drop()

	rules := []limiter.Rule{{
		Identity: limiter.Identity{"tenant": "acme"},
		Policy:   limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(2)},
	}}

	err := limiter.EnforceAll(db,
		limiter.Admission{AgentID: "planner", Rules: rules},
		limiter.Admission{AgentID: "researcher", Rules: rules},
		limiter.Admission{AgentID: "writer", Rules: rules},
	)

	if exceeded, ok := errors.AsType[*limiter.ExceededError](err); ok {
		fmt.Println("no place for the", exceeded.AgentID)
	}

	var agents int64

	db.Model(&models.LegionAgent{}).Count(&agents)
	fmt.Println(agents, "agents were admitted")
	// Output:
	// no place for the writer
	// 0 agents were admitted
}

// Admit also says what is left of each rule.
func ExampleAdmit() {
	db, drop := openDatabase()
	defer drop()

	decision, err := limiter.Admit(db, "chat-1",
		limiter.Rule{
			Name:     "user",
			Identity: limiter.Identity{"tenant": "acme", "email": "someone@example.com"},
			Policy:   limiter.Policy{Window: time.Minute, MaxRunningAgents: limiter.Max(3)},
		},
		limiter.Rule{
			Name:     "tenant",
			Identity: limiter.Identity{"tenant": "acme"},
			Policy:   limiter.Policy{Window: 24 * time.Hour, MaxAgents: limiter.Max(100), MaxTokens: limiter.Max(1_000_000)},
		},
	)
	if err != nil {
		fmt.Println(err)

		return
	}

	for _, state := range decision.Rules {
		for _, quota := range state.Quotas {
			fmt.Printf("%s: %d %s left\n", state.Rule.Name, quota.Remaining(), quota.Limit)
		}
	}
	// Output:
	// user: 2 running agents left
	// tenant: 99 agents left
	// tenant: 1000000 tokens left
}

// A rule that limits running agents takes a slot. Release gives it back before its
// lease is over.
func ExampleRelease() {
	db, drop := openDatabase()
	defer drop()

	rule := limiter.Rule{
		Identity: limiter.Identity{"tenant": "acme"},
		Policy:   limiter.Policy{Window: time.Hour, MaxRunningAgents: limiter.Max(1)},
	}

	fmt.Println(limiter.Enforce(db, "chat-1", rule))
	fmt.Println(errors.Is(limiter.Enforce(db, "chat-2", rule), limiter.ErrExceeded))
	fmt.Println(limiter.Release(db, "chat-1"))
	fmt.Println(limiter.Enforce(db, "chat-2", rule))
	// Output:
	// <nil>
	// true
	// <nil>
	// <nil>
}

// Everyone is a cap on the whole application.
func ExampleEveryone() {
	db, drop := openDatabase()
	defer drop()

	everyone := limiter.Rule{
		Identity: limiter.Everyone(),
		Policy:   limiter.Policy{Window: time.Second, MaxAgents: limiter.Max(1000), MaxRunningAgents: limiter.Max(2)},
	}

	for _, tenant := range []string{"acme", "globex", "initech"} {
		err := limiter.Enforce(db, "chat of "+tenant, everyone, limiter.Rule{
			Identity: limiter.Identity{"tenant": tenant},
			Policy:   limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(10)},
		})
		fmt.Println(tenant, "admitted:", err == nil)
	}
	// Output:
	// acme admitted: true
	// globex admitted: true
	// initech admitted: false
}

// A limit is a pointer, so that there is a way to say none.
func ExampleMax() {
	policy := limiter.Policy{
		Window:    time.Minute,
		MaxAgents: limiter.Max(10),
		MaxTokens: limiter.Max(0), // denies always
		// MaxRunningAgents and MaxEvals are nil: unlimited.
	}

	fmt.Println(*policy.MaxAgents, *policy.MaxTokens, policy.MaxEvals == nil)
	// Output: 10 0 true
}

// A denial says which rule denied, and which of its limits.
func ExampleExceededError() {
	db, drop := openDatabase()
	defer drop()

	err := limiter.Enforce(db, "chat-1", limiter.Rule{
		Name:     "free plan",
		Identity: limiter.Identity{"email": "someone@example.com"},
		Policy:   limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(0), MaxTokens: limiter.Max(0), MaxEvals: limiter.Max(5)},
	})

	if exceeded, ok := errors.AsType[*limiter.ExceededError](err); ok {
		fmt.Println("rule:", exceeded.Rule.Name)

		for _, violation := range exceeded.Violations {
			fmt.Printf("%s: %d of %d\n", violation.Limit, violation.Used, violation.Max)
		}
	}

	// The text is fit for a log: there is nobody's address in it.
	fmt.Println(err)
	// Output:
	// rule: free plan
	// agents: 1 of 0
	// tokens: 0 of 0
	// legion: rule "free plan" (email) denies: 0 agents allowed, 0 of 0 tokens used in 1h0m0s
}

// Check answers without admitting anybody.
func ExampleCheck() {
	db, drop := openDatabase()
	defer drop()

	rule := limiter.Rule{
		Identity: limiter.Identity{"tenant": "acme"},
		Policy:   limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(1)},
	}

	report, err := limiter.Check(db, "chat-1", rule)
	fmt.Println(report.Allowed, err)

	_ = limiter.Enforce(db, "chat-1", rule)

	report, err = limiter.Check(db, "chat-2", rule)
	fmt.Println(report.Allowed, report.RetryAfter.Round(time.Hour), err)
	// Output:
	// true <nil>
	// false 1h0m0s <nil>
}
