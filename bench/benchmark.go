package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// errVerdict is a verdict that a benchmark does not expect: it would measure something
// else than what it says.
var errVerdict = errors.New("the verdict is not the one that is measured")

// A benchmark compares contenders with a floor.
type benchmark struct {
	name string

	// how says what is measured, for the reader of the figures.
	how string

	// callers call at the same time. 0: one.
	callers int

	// slow says that a call takes so long that few have to do.
	slow bool

	floor      contender
	contenders []contender

	// targets are the ratios not to exceed, by path. None: the figure is published only.
	targets map[string]float64

	// prepare fills the tables.
	prepare func(ctx context.Context, scene *scene) error

	// reset undoes what the calls of a round have left behind, before the next.
	reset func(ctx context.Context, scene *scene) error

	// steps are points along an axis. None: there is one, without an axis.
	steps []step

	// durableOnly leaves the measurement with synchronous_commit off out.
	durableOnly bool
}

// A step is one point of a benchmark along its axis.
type step struct {
	label string

	// axis is what grows from step to step, and at where on it this one stands.
	axis string
	at   int

	// isLargest says that the tables' sizes are to be published.
	isLargest bool

	// callers is that of the benchmark where it is 0.
	callers int

	// prepare adds to what the steps before have prepared.
	prepare func(ctx context.Context, scene *scene) error
}

// A scale is how much is measured.
type scale struct {
	rounds int

	// batches are those of one round, calls those of one caller in a batch.
	batches int
	calls   int

	// crowdBatches and crowdCalls are those of callers at the same time, slowBatches and
	// slowCalls those of slow calls.
	crowdBatches, crowdCalls int
	slowBatches, slowCalls   int

	// warmUp is how many calls each caller makes before any is measured: more than the
	// five after which PostgreSQL may settle for a generic plan.
	warmUp int

	// samples is how many calls the budget is the median of.
	samples, slowSamples int

	// history is how many agents there are beside those of the calls; identities is how
	// many groups they are spread over.
	history    int
	identities int

	// agents is how many agents take usage in turn.
	agents int

	callers       int
	histories     []int
	conversations []int
	entries       int
	requests      []int
	crowds        []int
}

// fullScale is that of the published figures.
var fullScale = scale{
	rounds: 5, batches: 10, calls: 8, crowdBatches: 6, crowdCalls: 4, slowBatches: 3, slowCalls: 2,
	warmUp: 7, samples: 25, slowSamples: 5,
	history: 10_000, identities: 1000, agents: 100,
	callers:       16,
	histories:     []int{1000, 10_000, 100_000, 1_000_000},
	conversations: []int{1, 10, 100, 1000},
	entries:       300,
	requests:      []int{10, 300, 10_000},
	crowds:        []int{1, 2, 4, 8, 16, 32},
}

// quickScale shows that everything runs.
var quickScale = scale{
	rounds: 1, batches: 2, calls: 2, crowdBatches: 1, crowdCalls: 2, slowBatches: 1, slowCalls: 1,
	warmUp: 1, samples: 3, slowSamples: 3,
	history: 100, identities: 20, agents: 10,
	callers:       4,
	histories:     []int{100, 1000},
	conversations: []int{1, 10},
	entries:       30,
	requests:      []int{10, 300, 1000},
	crowds:        []int{1, 4},
}

func benchmarks(scale scale) []benchmark {
	all := append(verdictBenchmarks(scale), usageBenchmarks(scale)...)

	return append(all, growthBenchmarks(scale)...)
}

// targets are those for the two paths.
func targets(gorm, server float64) map[string]float64 {
	return map[string]float64{gormPath: gorm, serverPath: server}
}

// expect returns the error of a call, where its verdict is not the one to be measured.
func (s scenario) expect(err, denial error) error {
	switch {
	case s.either && errors.Is(err, denial):
		return nil
	case s.denied && err == nil:
		return fmt.Errorf("%w: it admits", errVerdict)
	case s.denied && errors.Is(err, denial):
		return nil
	case errors.Is(err, denial):
		return fmt.Errorf("%w: %w", errVerdict, err)
	default:
		return err
	}
}

// ownPrefix begins the names of the agents that calls add.
const ownPrefix = "own "

// agentName is an agent's ID.
func agentName(prefix string, number int) string { return fmt.Sprintf("%s %d", prefix, number) }

// title is the name of the benchmark at the step.
func (b benchmark) title(step step) string {
	if step.label == "" {
		return b.name
	}

	return b.name + ", " + step.label
}

// thousands writes 10000 as 10,000.
func thousands(number int) string {
	text := strconv.Itoa(number)

	var parts []string
	for len(text) > 3 {
		parts = append([]string{text[len(text)-3:]}, parts...)
		text = text[:len(text)-3]
	}

	return strings.Join(append([]string{text}, parts...), ",")
}
