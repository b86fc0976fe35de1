// Package lease keeps the leases of this process's runs alive: with one statement for all
// of them, on a connection that is not of the application's pool.
package lease

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/run"
)

// retries is how many attempts fit into the pause between two renewals, once one has
// failed or met a locked row.
const retries = 6

// A Keeper renews leases every third of their length, until they are removed or lost. It
// has a goroutine and a connection only as long as there is something to renew.
type Keeper struct {
	length    time.Duration
	statement string
	connect   database.Connect

	mutex  sync.Mutex
	held   map[run.Run]*held
	closed bool

	// stop ends the goroutine, which renews as long as this is not nil.
	stop       context.CancelFunc
	goroutines sync.WaitGroup
}

// held is one lease.
type held struct {
	// until is the moment, by this process's monotonic clock, until which the lease
	// certainly lasts. It is counted from when the last successful renewal was sent, so it
	// lies before the one in the database.
	until time.Time

	// expiry calls lost at that moment. It is a timer and not the work of the goroutine,
	// which may be waiting for a network that has gone away.
	expiry *time.Timer
	lost   func()
}

// NewKeeper makes a keeper for leases of this length on the rows of the quoted table.
func NewKeeper(length time.Duration, quotedTable string, connect database.Connect) *Keeper {
	return &Keeper{
		length:    length,
		statement: RenewStatement(quotedTable, length),
		connect:   connect,
		held:      make(map[run.Run]*held),
	}
}

// Add renews the lease of the run from now on. asked is a moment before the lease began.
// When it is lost, lost is called once, on a goroutine of its own, and the run is no longer
// renewed.
func (k *Keeper) Add(kept run.Run, asked time.Time, lost func()) {
	k.mutex.Lock()
	defer k.mutex.Unlock()

	added := &held{until: asked.Add(k.length), lost: lost}
	added.expiry = time.AfterFunc(time.Until(added.until), func() { k.expire(kept, added) })
	k.held[kept] = added

	if k.stop == nil && !k.closed {
		ctx, cancel := context.WithCancel(context.Background())
		k.stop = cancel

		k.goroutines.Go(func() { k.keep(ctx) })
	}
}

// Remove renews the lease of the run no longer.
func (k *Keeper) Remove(kept run.Run) {
	k.mutex.Lock()
	defer k.mutex.Unlock()

	if removed, ok := k.held[kept]; ok {
		removed.expiry.Stop()
		delete(k.held, kept)
	}
}

// Close ends the renewals and waits for the goroutine. Leases that are still held run
// out.
func (k *Keeper) Close() {
	k.mutex.Lock()
	k.closed = true

	if k.stop != nil {
		k.stop()
	}

	k.mutex.Unlock()
	k.goroutines.Wait()
}

// expire is called by the timer. A renewal may have moved the end meanwhile.
func (k *Keeper) expire(kept run.Run, expired *held) {
	k.mutex.Lock()

	if k.held[kept] != expired {
		k.mutex.Unlock()

		return
	}

	if left := time.Until(expired.until); left > 0 {
		expired.expiry.Reset(left)
		k.mutex.Unlock()

		return
	}

	delete(k.held, kept)
	k.mutex.Unlock()

	expired.lost()
}

// keep is the goroutine. It ends when ctx does, or when there is nothing left to renew.
func (k *Keeper) keep(ctx context.Context) {
	renewer := renewer{length: k.length, statement: k.statement, connect: k.connect}
	defer renewer.close()

	// The jitter keeps processes that were started together from renewing together.
	pause := k.length/3 - rand.N(k.length/30+1)

	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}

		runs := k.runs()
		if len(runs) == 0 {
			return
		}

		pause = k.length/3 - rand.N(k.length/30+1)

		if !k.renew(ctx, &renewer, runs) {
			// Soon, but a server that is not there is not asked in a tight loop.
			pause /= retries
		}
	}
}

// runs returns the runs that are held. If there are none, the goroutine is about to end,
// and the next Add starts another one.
func (k *Keeper) runs() []run.Run {
	k.mutex.Lock()
	defer k.mutex.Unlock()

	if len(k.held) == 0 {
		k.stop()
		k.stop = nil
	}

	runs := make([]run.Run, 0, len(k.held))
	for kept := range k.held {
		runs = append(runs, kept)
	}

	return runs
}

// renew reports whether all runs were renewed or lost. Rows that somebody else has locked
// are neither: they are tried again, by themselves.
func (k *Keeper) renew(ctx context.Context, renewer *renewer, runs []run.Run) bool {
	asked := time.Now()

	answers, err := renewer.renew(ctx, runs)
	if err != nil {
		if ctx.Err() == nil {
			slog.WarnContext(ctx, "legion: leases were not renewed, trying again", "leases", len(runs), "error", err)
		}

		return false
	}

	var lost []*held

	k.mutex.Lock()

	skipped := false

	for _, answer := range answers {
		kept, ok := k.held[answer.run]

		switch {
		case !ok: // it was removed meanwhile
		case answer.renewed:
			kept.until = asked.Add(k.length)
			kept.expiry.Reset(time.Until(kept.until))
		case answer.held:
			skipped = true
		default:
			kept.expiry.Stop()
			delete(k.held, answer.run)

			lost = append(lost, kept)
		}
	}

	k.mutex.Unlock()

	for _, one := range lost {
		go one.lost()
	}

	return !skipped
}
