package main

import (
	"context"
	"io"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/examples/internal/table"
	"github.com/legion-gorm/legion/limiter"
)

// limitRunning holds slots and gives one back. A slot whose process has died comes free
// by itself, one lease later.
func limitRunning(_ context.Context, db *gorm.DB, out io.Writer) error {
	rule := limiter.Rule{
		Name:     "workers",
		Identity: limiter.Identity{"queue": "documents"},
		Policy:   limiter.Policy{Window: time.Hour, MaxRunningAgents: limiter.Max(2)},
	}

	type action struct {
		name string
		do   func(agentID string) (string, error)
	}

	start := action{"starts", func(agentID string) (string, error) { return verdict(limiter.Enforce(db, agentID, rule)) }}
	finish := action{"is done", func(agentID string) (string, error) { return "idle", limiter.Release(db, agentID) }}

	shown := table.New("agent", "does", "then it is")

	for _, step := range []struct {
		action

		agentID string
	}{{start, "job-1"}, {start, "job-2"}, {start, "job-3"}, {finish, "job-1"}, {start, "job-3"}} {
		text, err := step.do(step.agentID)
		if err != nil {
			return err
		}

		shown.Add(step.agentID, step.name, text)
	}

	return shown.Write(out)
}
