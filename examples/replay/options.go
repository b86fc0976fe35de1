package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

const (
	defaultWorkers = 8
	maxWorkers     = 64
)

// options are what the command line says.
type options struct {
	trace        string  // empty: generated
	speed        float64 // 0: as fast as possible
	workers      int
	limit        int // 0: all
	seed         uint64
	withoutLocks bool
}

const usageHead = `Replay takes the turns of a trace of requests to a language model, spread over 20 tenants
and their users, under limits on each tenant and on each user. In the end it checks in
the database that no limit was exceeded.

Usage: go run ./examples/replay [flags]

`

const usageTail = `
A trace is CSV with the header TIMESTAMP,ContextTokens,GeneratedTokens. Real ones are in
the AzurePublicDataset repository, under AzureLLMInferenceDataset2023
(https://github.com/Azure/AzurePublicDataset), licence CC-BY 4.0: Patel et al.,
"Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024.
A generated trace has the shape of the conversation trace there.

Traces name no users. A hash of the seed and of a request's position in the trace gives
each request a tenant and a user.
`

var (
	errArguments = errors.New("there are arguments that are no flags")
	errWorkers   = fmt.Errorf("-workers must be 1 to %d", maxWorkers)
	errLimit     = errors.New("-limit must not be negative")
	errSpeed     = fmt.Errorf("must be max, or 1 to %d", int(window/shortestWindow))
)

// parseOptions reads the command line. Where that is wrong, or asks for help, it has said
// so on output; the error is then flag.ErrHelp for help.
func parseOptions(arguments []string, output io.Writer) (options, error) {
	var parsed options

	flags := flag.NewFlagSet("replay", flag.ContinueOnError)
	flags.SetOutput(output)
	flags.Usage = func() {
		_, _ = io.WriteString(output, usageHead)

		flags.PrintDefaults()

		_, _ = io.WriteString(output, usageTail)
	}

	flags.StringVar(&parsed.trace, "trace", "", "replay the trace in this `file` (default: one is generated)")
	flags.Var((*speedFlag)(&parsed.speed), "speed",
		"`factor` by which to be faster than the trace, or max; the windows of the limits shrink with it (default max)")
	flags.IntVar(&parsed.workers, "workers", defaultWorkers, "`N` turns are at the database at once")
	flags.IntVar(&parsed.limit, "limit", 0,
		fmt.Sprintf("replay the first `N` requests (0: all, or %d of a generated trace)", generatedRequests))
	flags.Uint64Var(&parsed.seed, "seed", 1, "seed of the generated trace, and of who makes which request")
	flags.BoolVar(&parsed.withoutLocks, "without-locks", false, "switch Legion's locks off, to see the check fail")

	if err := flags.Parse(arguments); err != nil {
		return options{}, fmt.Errorf("parse the flags: %w", err)
	}

	if err := parsed.validate(flags.NArg()); err != nil {
		_, _ = fmt.Fprintf(output, "%v\nSee -help.\n", err)

		return options{}, err
	}

	return parsed, nil
}

func (o options) validate(arguments int) error {
	switch {
	case arguments > 0:
		return errArguments
	case o.workers < 1 || o.workers > maxWorkers:
		return errWorkers
	case o.limit < 0:
		return errLimit
	default:
		return nil
	}
}

// speedFlag is a factor, or 0 for as fast as possible. It is not under 1: the slot of a
// turn in slow motion would outlast its lease.
type speedFlag float64

const fastest = "max"

// String implements flag.Value.
func (s *speedFlag) String() string {
	if s == nil || *s == 0 {
		return fastest
	}

	return strconv.FormatFloat(float64(*s), 'g', -1, 64)
}

// Set implements flag.Value.
func (s *speedFlag) Set(text string) error {
	if strings.EqualFold(text, fastest) {
		*s = 0

		return nil
	}

	speed, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(speed) || speed != 0 && (speed < 1 || speed > float64(window/shortestWindow)) {
		return errSpeed
	}

	*s = speedFlag(speed)

	return nil
}
