// Bench measures what a verdict costs, as ratios to what an application would pay anyway.
// It brings its own PostgreSQL:
//
//	go run ./bench -rounds 5 -out docs   # everything: docs/performance.md, .json and growth.svg
//	go run ./bench -run 'one rule'       # some of it, on the terminal only
//	go run ./bench -quick                # whether it runs
//	go run ./bench -plot docs            # docs/growth.svg again, from docs/performance.json
//	go run ./bench -steady 2m            # vacuum and HOT under steady load
//
// A benchmark is a floor and contenders, see benchmark.go. The paths of Legion that are
// measured stand in paths.go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"

	"github.com/legion-gorm/legion/internal/pgtest"
)

// Exit codes.
const (
	failed     = 1
	wrongUsage = 2
)

const minimumRounds = 5

var errUsage = errors.New("wrong usage")

type options struct {
	rounds int
	out    string
	run    *regexp.Regexp
	quick  bool
	plot   string
	steady time.Duration
}

func main() {
	os.Exit(command(os.Args[1:], os.Stdout, os.Stderr))
}

func command(arguments []string, stdout, stderr io.Writer) int {
	options, err := parseOptions(arguments, stderr)

	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return wrongUsage
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	switch err = execute(ctx, options, stdout, stderr); {
	case err == nil:
		return 0
	case ctx.Err() != nil:
		_, _ = fmt.Fprintln(stderr, "bench: interrupted")
	default:
		_, _ = fmt.Fprintln(stderr, "bench:", err)
	}

	return failed
}

func parseOptions(arguments []string, stderr io.Writer) (options, error) {
	var options options

	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&options.rounds, "rounds", minimumRounds, "rounds of each benchmark, of which the medians are shown")
	flags.StringVar(&options.out, "out", "", "the folder to write "+tableFile+", "+jsonFile+" and "+plotFile+" to (default: a table on the terminal only)")
	flags.BoolVar(&options.quick, "quick", false, "one short round of each on small tables: whether it runs, not how fast")
	flags.StringVar(&options.plot, "plot", "", "draw growth.svg in this folder from its performance.json, and measure nothing")
	flags.DurationVar(&options.steady, "steady", 0, "for so long, watch the tables under steady load, and measure nothing else")

	run := flags.String("run", "", "a regular expression for the names of the benchmarks to run")

	if err := flags.Parse(arguments); err != nil {
		return options, err //nolint:wrapcheck // the flag set has printed it
	}

	complain := func(text string) error {
		_, _ = fmt.Fprintln(stderr, "bench:", text)

		return errUsage
	}

	var err error

	switch options.run, err = regexp.Compile(*run); {
	case err != nil:
		return options, complain("-run: " + err.Error())
	case flags.NArg() > 0:
		return options, complain("there are arguments behind the flags")
	case options.out != "" && *run != "":
		return options, complain("-run measures a part, which would replace the figures of all in -out: leave one of them out")
	case options.out != "" && !options.quick && options.rounds < minimumRounds:
		return options, complain(fmt.Sprintf("-rounds: figures to publish need at least %d", minimumRounds))
	case options.rounds < 1:
		return options, complain("-rounds: at least 1")
	}

	return options, nil
}

func execute(ctx context.Context, options options, stdout, progress io.Writer) (err error) {
	if options.plot != "" {
		return plotAgain(options.plot)
	}

	server, err := pgtest.Start(ctx, pgtest.WithDurability(),
		// Room for a million agents, and no checkpoint because of them in the middle.
		pgtest.WithSetting("shared_buffers", "512MB"),
		pgtest.WithSetting("max_wal_size", "8GB"),
		// A minute is a long time between two looks at a table under load.
		pgtest.WithSetting("autovacuum_naptime", "5s"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()

	scale := fullScale
	scale.rounds = options.rounds

	if options.quick {
		scale = quickScale
	}

	if options.steady > 0 {
		return steady(ctx, server, options.steady, scale, stdout)
	}

	report, err := measureAll(ctx, &harness{server: server, scale: scale, progress: progress}, options.run)
	if err != nil {
		return err
	}

	if options.out != "" {
		return errors.Join(report.write(stdout), report.save(options.out))
	}

	return report.write(stdout)
}

// measureAll runs the benchmarks whose names match.
func measureAll(ctx context.Context, harness *harness, names *regexp.Regexp) (*report, error) {
	report, err := newReport(ctx, harness)
	if err != nil {
		return nil, err
	}

	for _, benchmark := range benchmarks(harness.scale) {
		if !names.MatchString(benchmark.name) {
			continue
		}

		if err := report.add(ctx, harness, benchmark); err != nil {
			return nil, err
		}
	}

	return report, nil
}
