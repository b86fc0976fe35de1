// Quickstart tells on a terminal what Legion does, from the first denial to the last
// token. It brings its own PostgreSQL:
//
//	go run ./examples/quickstart
//
// Each step is one function in a file of its own, written as an application would write
// it.
package main

import (
	"context"
	"fmt"
	"io"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/examples/internal/server"
)

// connections is more than enough: the steps make one call after the other.
const connections = 2

func main() { server.Main("quickstart", connections, run) }

// run tells the whole story to out. What it says depends on nothing but the code.
func run(ctx context.Context, db *gorm.DB, out io.Writer) error {
	db = db.WithContext(ctx)

	// Once at start-up, by any number of processes. WithMigrate makes the tables. Without
	// WithObserver(nil) every denial would also be logged, in the middle of the story.
	if err := db.Use(legion.New(legion.WithMigrate(), legion.WithObserver(nil))); err != nil {
		return fmt.Errorf("use the plugin: %w", err)
	}

	steps := []struct {
		title  string
		lesson string
		show   func(ctx context.Context, db *gorm.DB, out io.Writer) error
	}{
		{
			"Ten agents of one IP address, where 5 may start in an hour",
			"A denied agent leaves nothing behind, so it counts for nobody.",
			limitStarts,
		},
		{
			"A tenant where 4 may start, and people who may start 2 each",
			"Ada's agents count for her tenant too, even where only her own rule was asked.",
			limitOverlappingGroups,
		},
		{
			"Two agents at work at once",
			"A slot counts until it is given back, and no longer than its lease.",
			limitRunning,
		},
		{
			"Tokens and code evaluations that run out",
			"A turn may go over the limit, since its use is known afterwards. Then the next one is denied.",
			limitUsage,
		},
		{
			"Why a call was denied",
			"Every rule must allow. The first that does not is in the error.",
			explainDenial,
		},
	}

	for i, step := range steps {
		if _, err := fmt.Fprintf(out, "%d. %s\n\n", i+1, step.title); err != nil {
			return fmt.Errorf("print: %w", err)
		}

		if err := step.show(ctx, db, out); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}

		if _, err := fmt.Fprintf(out, "\n  %s\n\n", step.lesson); err != nil {
			return fmt.Errorf("print: %w", err)
		}
	}

	return nil
}
