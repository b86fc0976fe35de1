// Agents runs 50 agents with sub-agents in two processes over one database, under a token
// budget and a limit on how many are at work. Half way, one process is killed. The other
// one takes over what that left behind, and the end state in the database shows that no
// limit was exceeded and no token lost. It brings its own PostgreSQL:
//
//	go run ./examples/agents
//
// agent.go is what an application would write, worker.go a process that does, and check.go
// how the outcome is judged.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/examples/internal/server"
	"github.com/legion-gorm/legion/internal/pgtest"
)

const (
	// connections are those of each process.
	connections = 8

	agentsEach = 25

	// The second process is killed once it has recorded so many LLM calls, in the middle of
	// so many agents.
	killAfter = 20
	killAmid  = 3
)

func main() {
	if isWorker() {
		os.Exit(workerMain())
	}

	server.Main("agents", connections, run)
}

// run is the parent of the two processes.
func run(ctx context.Context, db *gorm.DB, out io.Writer) error {
	db = db.WithContext(ctx)

	if err := legion.Migrate(db); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}

	if _, err := fmt.Fprintf(out, "%d agents in 2 processes, at most %d at work at once, %d tokens in all. One process will be killed.\n\n",
		2*agentsEach, slots, budget); err != nil {
		return fmt.Errorf("print: %w", err)
	}

	began := time.Now()
	watched := watchSlots(ctx, db)

	survivor, err := startWorker(ctx, pgtest.DSN(db), "survivor")
	if err != nil {
		return err
	}

	victim, err := startWorker(ctx, pgtest.DSN(db), "victim")
	if err != nil {
		return err
	}

	victim.awaitMiddle(killAfter, killAmid)

	if err := victim.kill(); err != nil {
		return err
	}

	killed := time.Since(began)

	if err := survivor.wait(); err != nil {
		return err
	}

	snapshots, most := watched()

	outcome, err := judge(db, survivor.lines(), victim.lines())
	if err != nil {
		return err
	}

	outcome.snapshots, outcome.mostSlots = snapshots, most
	outcome.killedAfter, outcome.took = killed, time.Since(began)

	return outcome.print(out)
}
