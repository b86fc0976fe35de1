package measure

import (
	"context"
	"errors"
	"sync"
	"time"
)

// A Call is one call of what is measured. The number differs from that of every other
// call of the same contender; the batch is the one that the call is part of.
type Call func(ctx context.Context, batch, number int) error

// A Batch is calls that were made together.
type Batch struct {
	// Latencies are those of the single calls.
	Latencies []time.Duration

	// PerCall is the time of the whole batch, divided by its calls.
	PerCall time.Duration
}

// Run makes calls from so many callers at once, and returns how long they took. The
// numbers of the calls begin at first. The first error ends the batch.
func Run(ctx context.Context, call Call, callers, perCaller, batch, first int) (Batch, error) {
	latencies := make([]time.Duration, callers*perCaller)
	errs := make([]error, callers)

	work := func(caller int) {
		for i := caller * perCaller; i < (caller+1)*perCaller; i++ {
			began := time.Now()

			if errs[caller] = call(ctx, batch, first+i); errs[caller] != nil {
				return
			}

			latencies[i] = time.Since(began)
		}
	}

	began := time.Now()

	if callers == 1 {
		work(0)
	} else {
		var group sync.WaitGroup
		for caller := range callers {
			group.Go(func() { work(caller) })
		}

		group.Wait()
	}

	elapsed := time.Since(began)

	return Batch{Latencies: latencies, PerCall: elapsed / time.Duration(len(latencies))}, errors.Join(errs...)
}

// A Round is the batches of one contender in one round.
type Round []Batch

// Time is what stands for a call of the round: the median latency of callers that come
// one after the other. Of callers at the same time it is the median over the batches of
// the time per call, since a queue is longer than what it is for.
func (r Round) Time(callers int) time.Duration {
	var times []time.Duration

	for _, batch := range r {
		if callers == 1 {
			times = append(times, batch.Latencies...)
		} else {
			times = append(times, batch.PerCall)
		}
	}

	return Median(times)
}
