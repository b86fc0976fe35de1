package main

import (
	"errors"
	"fmt"
	"io"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/examples/internal/table"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/store"
)

// tell shows what the users do and what becomes of it.
func tell(db *gorm.DB, out io.Writer) error {
	const (
		tenant = "acme"
		ada    = "ada@example.com"
	)

	events := []struct {
		what string
		do   func() error
	}{
		{"ada signs up and gets a first chat", func() error {
			return signUp(db, User{Email: ada, Tenant: tenant}, Chat{ID: "chat-1"})
		}},
		{"ada opens a second chat", func() error {
			return db.Create(&Chat{ID: "chat-2", Tenant: tenant, Email: ada}).Error
		}},
		{"ada opens a third chat", func() error {
			return db.Create(&Chat{ID: "chat-3", Tenant: tenant, Email: ada}).Error
		}},
		{"ada saves her first chat again", func() error {
			return db.Save(&Chat{ID: "chat-1", Tenant: tenant, Email: ada}).Error
		}},
		{"the tenant asks for two reports at once", func() error {
			return db.Create([]*Report{{ID: "report-1", Tenant: tenant, Title: "Sales"}, {ID: "report-2", Tenant: tenant, Title: "Costs"}}).Error
		}},
		{"the tenant asks for one report", func() error {
			return db.Create(&Report{ID: "report-1", Tenant: tenant, Title: "Sales"}).Error
		}},
		{"ben signs up, and his first chat is one agent too many", func() error {
			return signUp(db, User{Email: "ben@example.com", Tenant: tenant}, Chat{ID: "chat-4"})
		}},
	}

	verdicts := table.New("what happens", "what becomes of it")

	for _, event := range events {
		text, err := verdict(event.do())
		if err != nil {
			return err
		}

		verdicts.Add(event.what, text)
	}

	if err := verdicts.Write(out); err != nil {
		return err
	}

	if _, err := fmt.Fprint(out, "\nWhat is in the database: a denial took back the whole transaction, ben's sign-up included.\n\n"); err != nil {
		return fmt.Errorf("print: %w", err)
	}

	return tellRows(db, out)
}

// verdict says in words how an event has ended. The database failing is no verdict.
func verdict(err error) (string, error) {
	var exceeded *limiter.ExceededError

	switch {
	case err == nil:
		return "done", nil
	case errors.As(err, &exceeded):
		quota := exceeded.Violations[0]

		return fmt.Sprintf("denied by %q: at most %d %s in %s", exceeded.Rule.Name, quota.Max, quota.Limit, exceeded.Rule.Policy.Window), nil
	default:
		return "", err
	}
}

func tellRows(db *gorm.DB, out io.Writer) error {
	rows := table.New("table", "rows")

	for _, counted := range []struct {
		name  string
		model any
	}{
		{"users", &User{}},
		{"chats", &Chat{}},
		{"messages", &Message{}},
		{"reports", &Report{}},
		{"chat_agents", &ChatAgent{}},
	} {
		var count int64
		if err := db.Model(counted.model).Count(&count).Error; err != nil {
			return fmt.Errorf("count the %s: %w", counted.name, err)
		}

		rows.Add(counted.name, count)
	}

	if err := rows.Write(out); err != nil {
		return err
	}

	// The store reads agents as the application's own type.
	const most = 10

	agents, err := store.For[ChatAgent](db).List(db.Statement.Context, most)
	if err != nil {
		return fmt.Errorf("list the agents: %w", err)
	}

	listed := table.New("agent", "belongs to")
	for _, agent := range agents {
		listed.Add(agent.AgentID, agent.Metadata)
	}

	if _, err := fmt.Fprint(out, "\nThe agents, newest first.\n\n"); err != nil {
		return fmt.Errorf("print: %w", err)
	}

	return listed.Write(out)
}
