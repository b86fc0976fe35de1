package main

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/bench/internal/measure"
)

// A diary is what happened in a race of contenders that do nothing.
type diary struct{ lines []string }

func (d *diary) contender(name string) contender {
	return contender{name: name, begin: func(session *session) measure.Call {
		return func(context.Context, int, int) error {
			var mode string

			err := session.db.Raw("SHOW synchronous_commit").Scan(&mode).Error
			d.lines = append(d.lines, name+" "+mode)

			return err
		}
	}}
}

func TestContendersTakeTurnsInEachRound(t *testing.T) {
	t.Parallel()

	var diary diary

	harness := quick(t)
	harness.scale.rounds, harness.scale.batches, harness.scale.calls, harness.scale.samples = 2, 3, 1, 1

	_, err := harness.run(t.Context(), benchmark{
		name: "diary", floor: diary.contender("floor"), contenders: []contender{diary.contender("a"), diary.contender("b")},
		prepare: func(context.Context, *scene) error {
			diary.lines = append(diary.lines, "prepare")

			return nil
		},
		reset: func(context.Context, *scene) error {
			diary.lines = append(diary.lines, "reset")

			return nil
		},
	})
	require.NoError(t, err)

	round := func(mode string) []string {
		return []string{
			"reset",
			"floor " + mode, "a " + mode, "b " + mode,
			"a " + mode, "b " + mode, "floor " + mode,
			"b " + mode, "floor " + mode, "a " + mode,
		}
	}
	budget := func(name string) []string { return slices.Repeat([]string{name + " on"}, 3) }

	require.Equal(t, slices.Concat(
		[]string{"prepare", "floor on", "a on", "b on", "floor off", "a off", "b off"}, // warm up
		round("on"), round("off"), round("on"), round("off"),
		budget("floor"), budget("a"), budget("b"),
	), diary.lines)
}

func TestCallsOfAContenderHaveNumbersOfTheirOwnOverAllSteps(t *testing.T) {
	t.Parallel()

	var mutex sync.Mutex

	batches := map[int]bool{}
	numbers := map[int]bool{}
	calls := 0

	counting := contender{name: "counting", begin: func(*session) measure.Call {
		return func(_ context.Context, batch, number int) error {
			mutex.Lock()
			defer mutex.Unlock()

			calls++
			batches[batch] = true
			numbers[number] = true

			return nil
		}
	}}

	_, err := quick(t).run(t.Context(), benchmark{
		name: "counting", callers: 4, floor: counting, prepare: func(context.Context, *scene) error { return nil },
		steps: []step{{label: "one"}, {label: "two"}},
	})
	require.NoError(t, err)
	require.Len(t, numbers, calls)

	// In each of two steps: in two modes one to warm up and one of a round, then the samples,
	// one more before them, and one for allocations.
	require.Len(t, batches, 2*(2*2+quickScale.samples+2))
}

func TestARatioIsTakenWithinARoundAndTheMedianOverRounds(t *testing.T) {
	t.Parallel()

	rounds := func(times ...time.Duration) []measure.Round {
		var rounds []measure.Round
		for _, each := range times {
			rounds = append(rounds, measure.Round{{Latencies: []time.Duration{each}, PerCall: 1}})
		}

		return rounds
	}

	one, several := &race{callers: 1}, &race{callers: 16}

	// The second round is slow for both, so that it says the same as the first.
	require.InDelta(t, 2, one.ratio(rounds(20, 2000, 90), rounds(10, 1000, 10)), 1e-9)

	// Of several callers it is the time of the batch.
	require.InDelta(t, 1, several.ratio(rounds(20, 30), rounds(10, 10)), 1e-9)
	require.Equal(t, 90*time.Nanosecond, one.median(rounds(20, 2000, 90)))
}
