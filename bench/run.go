package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/legion-gorm/legion/bench/internal/measure"
	"github.com/legion-gorm/legion/internal/pgtest"
)

// A harness runs benchmarks on a server.
type harness struct {
	server   *pgtest.Server
	scale    scale
	progress io.Writer

	// sizes are those of the largest table so far.
	sizes []size
}

// A racer is a contender in a race, with and without waiting for the disk.
type racer struct {
	contender contender
	lanes     []*lane
	counters  *counters
}

// counters tell calls and batches of one contender apart, over all steps of a benchmark.
type counters struct{ calls, batches int }

// A lane is a contender at the database in one mode of synchronous_commit.
type lane struct {
	session *session
	call    measure.Call
	rounds  []measure.Round
}

// run measures every step of the benchmark.
func (h *harness) run(ctx context.Context, benchmark benchmark) (results []result, err error) {
	scene, err := openScene(ctx, h.server, h.scale)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, scene.close()) }()

	if err := benchmark.prepare(ctx, scene); err != nil {
		return nil, err
	}

	steps := benchmark.steps
	if len(steps) == 0 {
		steps = []step{{}}
	}

	counted := make(map[string]*counters)

	for _, step := range steps {
		began := time.Now()

		measured, err := h.runStep(ctx, scene, benchmark, step, counted)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", benchmark.title(step), err)
		}

		results = append(results, measured...)

		_, _ = fmt.Fprintf(h.progress, "%5.1f s  %s\n", time.Since(began).Seconds(), benchmark.title(step))
	}

	return results, nil
}

func (h *harness) runStep(
	ctx context.Context, scene *scene, benchmark benchmark, step step, counted map[string]*counters,
) (results []result, err error) {
	scene.step = step

	if step.prepare != nil {
		if err := step.prepare(ctx, scene); err != nil {
			return nil, err
		}
	}

	if step.isLargest {
		if h.sizes, err = readSizes(ctx, scene); err != nil {
			return nil, err
		}
	}

	race := h.newRace(scene, benchmark, step)
	defer func() { err = errors.Join(err, race.close()) }()

	if err := race.enter(ctx, counted); err != nil {
		return nil, err
	}

	if err := race.run(ctx); err != nil {
		return nil, err
	}

	return race.results(ctx)
}

// A race lets the contenders of a benchmark take turns.
type race struct {
	scene     *scene
	benchmark benchmark
	step      step

	callers, calls, batches, samples, warmUp int

	racers []*racer
	closes []func() error
}

func (h *harness) newRace(scene *scene, benchmark benchmark, step step) *race {
	race := &race{
		scene: scene, benchmark: benchmark, step: step,
		callers: max(1, benchmark.callers, step.callers),
		calls:   h.scale.calls, batches: h.scale.batches, samples: h.scale.samples, warmUp: h.scale.warmUp,
	}

	if race.callers > 1 {
		race.calls, race.batches = h.scale.crowdCalls, h.scale.crowdBatches
	}

	if benchmark.slow {
		race.calls, race.batches, race.samples = h.scale.slowCalls, h.scale.slowBatches, h.scale.slowSamples
	}

	return race
}

func (r *race) close() error {
	var errs []error
	for _, each := range r.closes {
		errs = append(errs, each())
	}

	return errors.Join(errs...)
}

// enter opens the sessions of all contenders, of which the floor is the first.
func (r *race) enter(ctx context.Context, counted map[string]*counters) error {
	modes := []bool{true, false}
	if r.benchmark.durableOnly {
		modes = modes[:1]
	}

	for _, contender := range append([]contender{r.benchmark.floor}, r.benchmark.contenders...) {
		if counted[contender.name] == nil {
			counted[contender.name] = new(counters)
		}

		racer := &racer{contender: contender, counters: counted[contender.name]}

		for _, durable := range modes {
			session, closeSession, err := r.scene.begin(ctx, contender, r.callers, durable)
			if err != nil {
				return fmt.Errorf("%s: %w", contender.name, err)
			}

			r.closes = append(r.closes, closeSession)
			racer.lanes = append(racer.lanes, &lane{session: session, call: contender.begin(session)})
		}

		r.racers = append(r.racers, racer)
	}

	return nil
}

// run warms up, and then goes through the rounds: in each, short batches of the contenders
// follow each other in turn, so that what else the machine does hits all of them.
func (r *race) run(ctx context.Context) error {
	for mode := range r.racers[0].lanes {
		for _, racer := range r.racers {
			if _, err := racer.batch(ctx, mode, r.callers, r.warmUp); err != nil {
				return err
			}
		}
	}

	for range r.scene.scale.rounds {
		for mode := range r.racers[0].lanes {
			if err := r.round(ctx, mode); err != nil {
				return err
			}
		}
	}

	return nil
}

func (r *race) round(ctx context.Context, mode int) error {
	if r.benchmark.reset != nil {
		if err := r.benchmark.reset(ctx, r.scene); err != nil {
			return err
		}
	}

	rounds := make([]measure.Round, len(r.racers))

	for batch := range r.batches {
		for i := range r.racers {
			// Nobody is always the one who comes after the same other.
			which := (i + batch) % len(r.racers)

			measured, err := r.racers[which].batch(ctx, mode, r.callers, r.calls)
			if err != nil {
				return err
			}

			rounds[which] = append(rounds[which], measured)
		}
	}

	for i, racer := range r.racers {
		racer.lanes[mode].rounds = append(racer.lanes[mode].rounds, rounds[i])
	}

	return nil
}

func (r *racer) batch(ctx context.Context, mode, callers, calls int) (measure.Batch, error) {
	batch, err := measure.Run(ctx, r.lanes[mode].call, callers, calls, r.counters.batches, r.counters.calls)
	r.counters.batches++
	r.counters.calls += callers * calls

	if err != nil {
		return measure.Batch{}, fmt.Errorf("%s: %w", r.contender.name, err)
	}

	return batch, nil
}

// results compares every contender with the floor, the first one.
func (r *race) results(ctx context.Context) ([]result, error) {
	monitor, err := openMonitor(ctx, r.scene)
	if err != nil {
		return nil, err
	}
	defer monitor.close()

	results := make([]result, len(r.racers))
	floor := r.racers[0]

	for i, racer := range r.racers {
		durable := racer.lanes[0]

		result := result{
			Name: r.benchmark.title(r.step), Path: racer.contender.name,
			Ratio:    r.ratio(durable.rounds, floor.lanes[0].rounds),
			Callers:  r.callers,
			PerCall:  microseconds(r.median(durable.rounds)),
			P50:      microseconds(measure.Quantile(latencies(durable.rounds), 0.5)),
			P99:      microseconds(measure.Quantile(latencies(durable.rounds), 0.99)),
			Floor:    floor.contender.name,
			FloorP50: microseconds(measure.Quantile(latencies(floor.lanes[0].rounds), 0.5)),
			FloorP99: microseconds(measure.Quantile(latencies(floor.lanes[0].rounds), 0.99)),
			Axis:     r.step.axis, At: r.step.at,
		}

		if target, ok := r.benchmark.targets[racer.contender.name]; ok {
			result.Target = &target
		}

		if len(racer.lanes) > 1 {
			ratio := r.ratio(racer.lanes[1].rounds, floor.lanes[1].rounds)
			result.RatioWithoutFlush = &ratio
		}

		if result.Budget, err = racer.budget(ctx, monitor, r.samples); err != nil {
			return nil, err
		}

		results[i] = result
	}

	return results, nil
}

// ratio is the median over the rounds of what a call takes in comparison with the floor in
// the same round.
func (r *race) ratio(rounds, floor []measure.Round) float64 {
	ratios := make([]float64, len(rounds))
	for i := range rounds {
		ratios[i] = float64(rounds[i].Time(r.callers)) / float64(floor[i].Time(r.callers))
	}

	return measure.Median(ratios)
}

func (r *race) median(rounds []measure.Round) time.Duration {
	times := make([]time.Duration, len(rounds))
	for i, round := range rounds {
		times[i] = round.Time(r.callers)
	}

	return measure.Median(times)
}

func latencies(rounds []measure.Round) []time.Duration {
	var all []time.Duration

	for _, round := range rounds {
		for _, batch := range round {
			all = append(all, batch.Latencies...)
		}
	}

	return all
}

func microseconds(duration time.Duration) float64 { return float64(duration.Nanoseconds()) / 1000 }
