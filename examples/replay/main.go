// Replay takes the turns of a trace of requests to a language model, spread over tenants
// and their users, under limits on both. In the end it checks in the database that no
// limit was exceeded. It brings its own PostgreSQL:
//
//	go run ./examples/replay
//	go run ./examples/replay -trace trace.csv -speed 60 -workers 16
//	go run ./examples/replay -workers 16 -without-locks
//
// The last one switches Legion's locks off, and the check fails.
//
// What an application would write is in rules.go and turn.go, and how the check can be
// trusted in check.go. The rest is the replay.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/examples/internal/server"
	"github.com/legion-gorm/legion/internal/testhook"
)

// Exit codes.
const (
	failed     = 1
	wrongUsage = 2
)

func main() {
	os.Exit(command(os.Args[1:]))
}

func command(arguments []string) int {
	options, err := parseOptions(arguments, os.Stderr)

	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return wrongUsage
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	err = run(ctx, options)

	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "replay: interrupted")
	default:
		fmt.Fprintln(os.Stderr, "replay:", err)
	}

	return failed
}

func run(ctx context.Context, options options) error {
	trace, err := load(options)
	if err != nil {
		return err
	}

	// One connection for each worker, and one for what else there is.
	return server.With(ctx, options.workers+1, func(db *gorm.DB) error {
		return tell(ctx, db, trace, options, newProgress(os.Stderr, len(trace.turns)), os.Stdout)
	})
}

// A trace is what is replayed, and where it is from.
type trace struct {
	turns  []turn
	source string
}

func load(options options) (trace, error) {
	if options.trace != "" {
		requests, err := readTrace(options.trace, options.limit)

		return trace{populate(requests, options.seed), options.trace}, err
	}

	count := options.limit
	if count == 0 {
		count = generatedRequests
	}

	return trace{
		turns:  populate(generateTrace(options.seed, count), options.seed),
		source: fmt.Sprintf("a trace that is generated from seed %d (-trace replays a real one, see -help)", options.seed),
	}, nil
}

// tell replays the trace, and prints to out how that went and what the check has found.
func tell(ctx context.Context, db *gorm.DB, trace trace, options options, progress *progress, out io.Writer) error {
	db = db.WithContext(ctx)

	// The report counts the denials. Without WithObserver(nil) each would also be logged.
	if err := db.Use(legion.New(legion.WithMigrate(), legion.WithObserver(nil))); err != nil {
		return fmt.Errorf("use the plugin: %w", err)
	}

	if err := db.AutoMigrate(&admission{}); err != nil {
		return fmt.Errorf("migrate the log: %w", err)
	}

	if err := reportStart(out, trace, options); err != nil {
		return err
	}

	limited := ctx
	if options.withoutLocks {
		hooks := *testhook.From(ctx)
		hooks.WithoutLocks = true
		limited = testhook.With(ctx, hooks)
	}

	replay := replay{db: db, turns: trace.turns, workers: options.workers, speed: options.speed, progress: progress}

	tally, err := replay.run(limited)
	if err != nil {
		return fmt.Errorf("replay: %w", err)
	}

	if err := reportTally(out, tally, trace.turns[len(trace.turns)-1].offset); err != nil {
		return err
	}

	if err := compareBooks(ctx, db); err != nil {
		return err
	}

	findings, err := check(ctx, db)
	if err != nil {
		return err
	}

	return reportCheck(out, findings)
}
