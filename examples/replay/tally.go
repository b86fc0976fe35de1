package main

import (
	"slices"
	"time"

	"github.com/legion-gorm/legion/limiter"
)

// A tally counts how the turns went.
type tally struct {
	admitted, denied int
	tokens           int64 // of the admitted turns

	// deniedBy counts the denials of each rule, and violations those of each of its
	// limits: one denial may violate several.
	deniedBy   map[string]int
	violations map[violation]int

	latencies []time.Duration // of Enforce
	elapsed   time.Duration
}

type violation struct {
	rule  string
	limit limiter.Limit
}

func newTally() *tally {
	return &tally{deniedBy: make(map[string]int), violations: make(map[violation]int)}
}

// add counts a turn that was admitted or denied.
func (t *tally) add(result result) {
	t.latencies = append(t.latencies, result.latency)

	if result.denial == nil {
		t.admitted++
		t.tokens += result.turn.tokens()

		return
	}

	t.denied++
	t.deniedBy[result.denial.Rule.Name]++

	for _, quota := range result.denial.Violations {
		t.violations[violation{result.denial.Rule.Name, quota.Limit}]++
	}
}

func (t *tally) turns() int { return t.admitted + t.denied }

// percentiles returns the latencies that so many percent of the calls did not exceed.
func (t *tally) percentiles(percents ...int) []time.Duration {
	sorted := slices.Sorted(slices.Values(t.latencies))
	values := make([]time.Duration, len(percents))

	for i, percent := range percents {
		if len(sorted) > 0 {
			// The nearest rank: the smallest value that at least so many do not exceed.
			rank := (percent*len(sorted) + 99) / 100
			values[i] = sorted[max(rank, 1)-1]
		}
	}

	return values
}
