package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/limiter"
)

// A replay takes the turns of a trace, in its order and at its pace, with several workers
// at once.
type replay struct {
	db       *gorm.DB
	turns    []turn
	workers  int
	speed    float64 // 0: as fast as possible
	progress *progress
}

// A result is how an event went.
type result struct {
	event

	latency time.Duration
	denial  *limiter.ExceededError
	err     error
}

// run replays all turns, or stops at the first error that is no denial.
func (r *replay) run(ctx context.Context) (*tally, error) {
	defer r.progress.finish()

	ctx, cancel := context.WithCancel(ctx)
	started := time.Now()
	pace := newPace(r.speed, started)
	events := make(chan event)
	results := make(chan result)

	var workers sync.WaitGroup

	for range r.workers {
		workers.Go(func() {
			for event := range events {
				select {
				case results <- r.play(ctx, event, pace):
				case <-ctx.Done():
				}
			}
		})
	}

	tally, err := r.dispatch(ctx, pace, events, results)

	cancel()
	close(events)
	workers.Wait()

	if err != nil {
		return nil, err
	}

	tally.elapsed = time.Since(started)

	return tally, nil
}

// dispatch hands each event to a worker when it is due. It alone knows the schedule.
func (r *replay) dispatch(ctx context.Context, pace *pace, events chan<- event, results <-chan result) (*tally, error) {
	schedule := newSchedule(r.turns)
	tally := newTally()

	for !schedule.done() {
		var (
			due  chan<- event
			wake <-chan time.Time
		)

		next, ok := schedule.next()
		if wait := pace.wait(next.due, time.Now()); ok && wait <= 0 {
			due = events
		} else if ok {
			wake = time.After(wait)
		}

		select {
		case due <- next:
			schedule.take()
			pace.reached(next.due, time.Now())
		case result := <-results:
			if result.err != nil && ctx.Err() != nil {
				return nil, context.Cause(ctx)
			} else if result.err != nil {
				return nil, fmt.Errorf("turn %d: %w", result.turn.number, result.err)
			}

			if !result.ends {
				tally.add(result)
				r.progress.add(time.Now())
			}

			if result.ends || result.denial != nil {
				schedule.ended(result.turn)
			} else {
				schedule.admitted(result.turn)
			}
		case <-wake:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}

	return tally, nil
}

// play is what a worker does with an event.
func (r *replay) play(ctx context.Context, event event, pace *pace) result {
	played := result{event: event}

	if event.ends {
		played.err = end(ctx, r.db, event.turn)

		return played
	}

	played.latency, played.err = begin(ctx, r.db, event.turn, pace.window(event.turn.offset, window, time.Now()))
	if errors.As(played.err, &played.denial) {
		played.err = nil
	}

	return played
}
