package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/examples/internal/table"
	"github.com/legion-gorm/legion/limiter"
)

// perAddress is a rule: a group, here all agents of one IP address, and its limits.
var perAddress = limiter.Rule{
	Name:     "per address",
	Identity: limiter.Identity{"ip": "203.0.113.42"},
	Policy:   limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(5)},
}

// limitStarts starts ten agents. Enforce decides and records in one transaction, so the
// sixth is denied whether the ten come one by one or all at once, from one process or
// from many.
func limitStarts(_ context.Context, db *gorm.DB, out io.Writer) error {
	shown := table.New("agent", "verdict")

	for i := range 10 {
		agentID := fmt.Sprintf("chat-%d", i+1)

		text, err := verdict(limiter.Enforce(db, agentID, perAddress))
		if err != nil {
			return err
		}

		shown.Add(agentID, text)
	}

	return shown.Write(out)
}
