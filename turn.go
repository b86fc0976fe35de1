package legion

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// settleTime is how long Record and End go on after their context has ended: what was
// spent must be counted, and a slot given back, most of all when the caller is on its way
// out.
const settleTime = 10 * time.Second

// A Turn is one agent at work: admitted, holding its slot by a lease that the plugin
// renews, until End. Begin it with [Plugin.Begin] or [Plugin.Run]. Its methods may be
// called concurrently.
//
// Its methods write to the plugin's own database, outside any transaction of the
// application's. So what was recorded stays recorded when such a transaction rolls back:
// the tokens were spent. Usage that should share a transaction's fate is appended with
// store.For(tx).
type Turn struct {
	plugin   *Plugin
	run      run.Run
	rules    []limiter.Rule
	decision *limiter.Decision

	// elsewhere is the store of a turn whose usage and state are not in the plugin's own
	// table, or nil.
	elsewhere TurnStore
	perStep   bool

	ctx    context.Context //nolint:containedctx // the turn's own, handed to the work
	cancel context.CancelCauseFunc

	// ending makes calls of End follow each other: it has room for one. It is no mutex, since
	// the one before may wait for a row, and those behind it have contexts that end. finished
	// says that one has come to a result, and with which.
	ending      chan struct{}
	finished    bool
	finishError error

	mutex sync.Mutex
	state []byte // of the last Checkpoint; nil: there was none
	ended bool
}

// AgentID is the agent whose turn it is.
func (t *Turn) AgentID() string { return t.run.AgentID }

// RunID is the turn's own ID, as it stands in the agent's row.
func (t *Turn) RunID() string { return t.run.ID }

// Decision is the verdict that admitted the turn, with what was left of each rule.
func (t *Turn) Decision() *limiter.Decision { return t.decision }

// Context is the context for the work of the turn. It descends from the one that was
// given to Begin, and [TurnFrom] finds the turn in it. It ends with the turn; its cause,
// which context.Cause returns, is then [ErrTurnEnded], [ErrLeaseLost], [ErrShutdown], or
// what ended the context that it descends from.
func (t *Turn) Context() context.Context { return t.ctx }

type turnKey struct{}

// TurnFrom returns the turn that ctx descends from, and whether there is one.
func TurnFrom(ctx context.Context) (*Turn, bool) {
	turn, ok := ctx.Value(turnKey{}).(*Turn)

	return turn, ok
}

// Record appends usage to the agent, as store.AppendUsage does, and lowers what the turn
// holds reserved by as many tokens. An entry that was recorded before, by its ID, is not
// recorded again. An error means that the entry may not be recorded: record it again, with
// an ID of your own to be safe.
//
// Tokens that were spent count, so Record works after the turn has ended or lost its lease,
// and goes on for some seconds when ctx has ended.
//
// Errors: [store.ErrInvalidUsage]; [ErrInvalidConfig] under [WithoutUsageTracking]; those
// of the database.
func (t *Turn) Record(ctx context.Context, usage models.Usage) error {
	if t.plugin.settings.WithoutUsage {
		return fmt.Errorf("%w: usage is recorded by a plugin that has WithoutUsageTracking: leave that option out", fault.ErrInvalidConfig)
	}

	ctx, cancel := outlive(ctx, settleTime)
	defer cancel()

	var err error
	if t.elsewhere != nil {
		_, err = t.elsewhere.AppendUsage(ctx, t.run.AgentID, usage)
	} else {
		_, err = t.plugin.store.AppendTurnUsage(ctx, t.run, usage)
	}

	return err
}

// Checkpoint hands over the state of the conversation, of which it keeps a copy. By
// default End writes it. With [TurnOptions.PerStep] Checkpoint writes it at once, so that
// an interrupted turn can be resumed from here. Nil is the empty state.
//
// Errors: [ErrTurnEnded]; [ErrLeaseLost]; those of the database, with PerStep.
func (t *Turn) Checkpoint(ctx context.Context, state []byte) error {
	if state = slices.Clone(state); state == nil {
		state = []byte{}
	}

	t.mutex.Lock()
	ended := t.ended

	if !ended {
		t.state = state
	}
	t.mutex.Unlock()

	switch {
	case ended:
		return ErrTurnEnded
	case t.isLost():
		return context.Cause(t.ctx)
	case !t.perStep:
		return nil
	}

	if err := t.plugin.atDatabase(ctx, func(tx *gorm.DB) error {
		if t.elsewhere != nil {
			return t.run.Confirm(tx, t.plugin.agents())
		}

		return t.run.Checkpoint(tx, t.plugin.agents(), state)
	}); err != nil {
		return err
	}

	if t.elsewhere != nil {
		return t.elsewhere.Save(ctx, store.Patch{AgentID: t.run.AgentID, ConversationState: state})
	}

	return nil
}

// End ends the turn: the agent is idle, its slot and what it still holds reserved are free
// at once, and the state of the last Checkpoint is written. It ends the turn's context.
// Defer it. Calling it again does nothing, or tries again what has failed.
//
// It goes on for some seconds when ctx has ended, so that a cancelled turn gives its slot
// back. Where that fails, the slot is free when the lease is over. So long it also waits for
// an End that was called before it.
//
// Errors: [ErrLeaseLost] when the turn has lost its slot or its agent to another, whose row
// then stays as it is; those of the database. A turn whose lease is over, but whose slot
// nobody has taken, ends like any other.
func (t *Turn) End(ctx context.Context) error {
	ctx, cancel := outlive(ctx, settleTime)
	defer cancel()

	select {
	case t.ending <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}

	defer func() { <-t.ending }()

	if t.finished {
		return t.finishError
	}

	t.mutex.Lock()
	state := t.state
	t.ended = true
	t.mutex.Unlock()

	// Who calls End works no longer: if it fails, the lease must run out.
	t.plugin.turns.keeper.Remove(t.run)
	t.cancel(ErrTurnEnded)

	err := t.end(ctx, state)
	if err == nil || isLeaseLost(err) {
		t.finished, t.finishError = true, err
		t.plugin.turns.remove(t)
	} else {
		t.plugin.turns.failed()
	}

	return err
}

// isAtWork reports whether End has not been called yet.
func (t *Turn) isAtWork() bool {
	t.mutex.Lock()
	defer t.mutex.Unlock()

	return !t.ended
}

func (t *Turn) end(ctx context.Context, state []byte) error {
	agents := t.plugin.agents()

	if t.elsewhere != nil && state != nil && !t.perStep {
		if err := t.plugin.atDatabase(ctx, func(tx *gorm.DB) error { return t.run.Confirm(tx, agents) }); err != nil {
			return err
		}

		if err := t.elsewhere.Save(ctx, store.Patch{AgentID: t.run.AgentID, ConversationState: state}); err != nil {
			return err
		}
	}

	if t.elsewhere != nil || t.perStep {
		state = nil // it is written
	}

	return t.plugin.atDatabase(ctx, func(tx *gorm.DB) error { return t.run.End(tx, agents, state) })
}

// lose is called when the turn has lost its lease.
func (t *Turn) lose() {
	t.cancel(fmt.Errorf("%w: it could not be renewed in time: stop the work, Recover resumes it", ErrLeaseLost))
}

func (t *Turn) isLost() bool {
	return t.ctx.Err() != nil && isLeaseLost(context.Cause(t.ctx))
}

// atDatabase runs body outside a transaction, see database.Autocommit.
func (p *Plugin) atDatabase(ctx context.Context, body func(tx *gorm.DB) error) error {
	session := p.db.Session(&gorm.Session{NewDB: true, Context: ctx})

	return database.Autocommit(session, p.settings.WithDefaults().ConnectionTimeout, body)
}

// outlive returns a context with the values of ctx that ends some time after it.
func outlive(ctx context.Context, grace time.Duration) (context.Context, context.CancelFunc) {
	outliving, cancel := context.WithCancelCause(context.WithoutCancel(ctx))

	var (
		mutex sync.Mutex
		timer *time.Timer
	)

	stop := context.AfterFunc(ctx, func() {
		mutex.Lock()
		defer mutex.Unlock()

		timer = time.AfterFunc(grace, func() { cancel(context.Cause(ctx)) })
	})

	return outliving, func() {
		stop()
		cancel(nil)

		mutex.Lock()
		defer mutex.Unlock()

		if timer != nil {
			timer.Stop()
		}
	}
}
