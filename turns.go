package legion

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/lease"
	"github.com/legion-gorm/legion/internal/run"
)

// turns are those of one plugin in this process.
type turns struct {
	// connecting has room for the one who makes the keeper. It is no mutex, since he waits
	// for a connection of the pool, and those behind him have contexts that end.
	connecting chan struct{}

	mutex  sync.Mutex
	keeper *lease.Keeper
	live   map[*Turn]struct{}
	closed bool

	// abandoned are the runs that are being given back, each with a channel that is closed
	// when that is done.
	abandoned map[run.Run]chan struct{}

	// shutdown ends the beginnings that are under way.
	shutdown    context.Context //nolint:containedctx // the plugin's own
	setShutdown context.CancelCauseFunc

	// idle is closed and replaced whenever a turn has ended, or failed to.
	idle chan struct{}

	// busy counts what Shutdown waits for beside the turns: beginnings and clean-ups.
	busy sync.WaitGroup
}

func newTurns() *turns {
	made := &turns{live: make(map[*Turn]struct{}), abandoned: make(map[run.Run]chan struct{}), idle: make(chan struct{}), connecting: make(chan struct{}, 1)}
	made.shutdown, made.setShutdown = context.WithCancelCause(context.Background())

	return made
}

// enter says that a turn is about to begin, until leave is called. The context that it
// returns also ends with the plugin.
func (t *turns) enter(ctx context.Context) (entered context.Context, leave func(), err error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()

	if t.closed {
		return nil, nil, ErrShutdown
	}

	t.busy.Add(1)

	entered, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(t.shutdown, func() { cancel(ErrShutdown) })

	return entered, func() {
		stop()
		cancel(nil)
		t.busy.Done()
	}, nil
}

// connect makes the keeper, if there is none yet.
func (t *turns) connect(ctx context.Context, plugin *Plugin) error {
	select {
	case t.connecting <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}

	defer func() { <-t.connecting }()

	if t.keeper != nil {
		return nil
	}

	settings := plugin.settings.WithDefaults()
	session := plugin.db.Session(&gorm.Session{NewDB: true, Context: ctx})

	connect, err := database.ConnectOf(session, settings)
	if err != nil {
		return err
	}

	plugin.store = plugin.agentStore()
	t.keeper = lease.NewKeeper(settings.Lease, session.Statement.Quote(plugin.agents()), connect)

	return nil
}

// add remembers the turn, unless the plugin was shut down meanwhile, and reports whether it
// has.
func (t *turns) add(turn *Turn) bool {
	t.mutex.Lock()
	defer t.mutex.Unlock()

	if !t.closed {
		t.live[turn] = struct{}{}
	}

	return !t.closed
}

func (t *turns) remove(turn *Turn) {
	t.mutex.Lock()
	defer t.mutex.Unlock()

	delete(t.live, turn)
	t.changed()
}

// failed is called when a turn's End has failed.
func (t *turns) failed() {
	t.mutex.Lock()
	defer t.mutex.Unlock()

	t.changed()
}

// changed is called under the mutex.
func (t *turns) changed() {
	close(t.idle)
	t.idle = make(chan struct{})
}

// abandon gives back, in the background, what a run may hold although its Begin has failed.
// One that resumes another is left to be resumed: nobody has worked on it.
func (t *turns) abandon(plugin *Plugin, abandoned run.Run, resumes bool) {
	t.mutex.Lock()
	defer t.mutex.Unlock()

	done := make(chan struct{})
	t.abandoned[abandoned] = done

	// Shutdown may be waiting for the Begin that calls this, so its count is not zero.
	t.busy.Go(func() {
		defer t.forget(abandoned, done)

		ctx, cancel := context.WithTimeout(context.Background(), settleTime)
		defer cancel()

		// If it fails, the lease runs out.
		_ = plugin.atDatabase(ctx, func(tx *gorm.DB) error {
			if resumes {
				return abandoned.Interrupt(tx, plugin.agents())
			}

			return abandoned.End(tx, plugin.agents(), nil)
		})
	})
}

func (t *turns) forget(abandoned run.Run, done chan struct{}) {
	t.mutex.Lock()
	defer t.mutex.Unlock()

	if t.abandoned[abandoned] == done {
		delete(t.abandoned, abandoned)
	}

	close(done)
}

// awaitAbandoned waits while the run is given back, which would end a turn that began under
// the same ID.
func (t *turns) awaitAbandoned(ctx context.Context, again run.Run) error {
	t.mutex.Lock()
	done := t.abandoned[again]
	t.mutex.Unlock()

	if done == nil {
		return nil
	}

	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// close refuses new turns, and returns those that there are.
func (t *turns) close() []*Turn {
	t.mutex.Lock()
	defer t.mutex.Unlock()

	t.closed = true
	t.setShutdown(ErrShutdown)

	return slices.Collect(maps.Keys(t.live))
}

// left returns the turns that there are, and a channel that is closed when one has ended or
// failed to.
func (t *turns) left() ([]*Turn, <-chan struct{}) {
	t.mutex.Lock()
	defer t.mutex.Unlock()

	return slices.Collect(maps.Keys(t.live)), t.idle
}

// Shutdown ends the plugin's turns in this process, for its end. New turns get
// [ErrShutdown]. The contexts of those that run are cancelled with that cause, and
// Shutdown waits for their End until ctx ends, but not for those whose End has failed. Then
// it ends what is left itself, so that their slots are free at once; what is still at work on
// them should stop.
//
// It returns nil when all turns have ended, by themselves or not; otherwise the errors of
// those that could not be ended, whose slots are free when their leases are over. After it,
// nothing of the plugin runs in the background. Calls of [limiter.Enforce] and of the store
// are not affected, nor does it close the database.
func (p *Plugin) Shutdown(ctx context.Context) error {
	for _, turn := range p.turns.close() {
		turn.cancel(ErrShutdown)
	}

	p.turns.await(ctx)

	left, _ := p.turns.left()
	errs := make([]error, len(left))

	var ends sync.WaitGroup

	for i, turn := range left {
		ends.Go(func() {
			if err := turn.End(ctx); !isLeaseLost(err) {
				errs[i] = err
			}
		})
	}

	ends.Wait()
	p.turns.busy.Wait()

	// What began in the last moment ends by itself, in Begin.
	p.turns.connecting <- struct{}{}
	defer func() { <-p.turns.connecting }()

	if p.turns.keeper != nil {
		p.turns.keeper.Close()
	}

	return errors.Join(errs...)
}

// await waits until every turn has ended, or tried to: nobody has to call End again after
// an error, as Run does not. It waits no longer than ctx.
func (t *turns) await(ctx context.Context) {
	for {
		left, changed := t.left()
		if !slices.ContainsFunc(left, (*Turn).isAtWork) {
			return
		}

		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

func isLeaseLost(err error) bool { return errors.Is(err, ErrLeaseLost) }
