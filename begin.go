package legion

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// TurnOptions say how a turn begins. The zero value is a turn without limits.
type TurnOptions struct {
	// Rules are enforced before the turn begins, see [limiter.Enforce]. None: the turn is
	// not limited by itself. In the groups of its agent, if it has been in any before, it
	// counts all the same.
	//
	// A turn that is begun under the context of another one inherits that one's rules, in
	// front of these.
	Rules []limiter.Rule

	// Reserve holds so many tokens back from the groups of all rules with MaxTokens, from
	// the admission until they are recorded or the turn ends: so that turns that run at
	// the same time cannot overshoot the budget together. The turn is denied where they do
	// not fit. It may record more. 0: nothing is held back.
	Reserve int64

	// RunID names the run, 1 to 128 bytes. A Begin that is called again after an error with
	// the same RunID finds the turn that it may have begun. No other Begin may have it.
	// Empty: a random one.
	RunID string

	// AgentType says what kind of agent it is, in the application's words. Empty: as it
	// was.
	AgentType string

	// PerStep writes the state at every Checkpoint. Otherwise it is written once, by End.
	// A turn under another one's context does as that one does, or as is said here.
	PerStep bool

	// Store keeps the usage and the state of the turn elsewhere than in the plugin's own
	// table, which then has the slot only. What is measured in that table cannot be limited
	// then: MaxTokens, MaxEvals, MaxRunningAgents and Reserve are errors. Nil: the plugin's
	// table, or the store of the turn that ctx descends from.
	Store TurnStore
}

// A TurnStore keeps what turns record. [store.Store] is one.
type TurnStore interface {
	// AppendUsage records an entry once, however often it is called with its ID, and
	// reports whether it was new.
	AppendUsage(ctx context.Context, agentID string, entry models.Usage) (bool, error)

	// Save writes the fields that are not nil.
	Save(ctx context.Context, patch store.Patch) error
}

var _ TurnStore = (*store.Store[models.LegionAgent])(nil)

// Begin enforces the rules and begins a turn of the agent, in one transaction. The agent
// is marked as running, and holds its slot by a lease that the plugin renews until the
// turn's End, or until the process dies: then it is free one lease later. See [WithLease].
//
//	turn, err := plugin.Begin(ctx, agentID, legion.TurnOptions{Rules: rules})
//	if err != nil {
//		return err
//	}
//	defer turn.End(ctx)
//
// [Plugin.Run] does this around a function. A turn that is begun under the context of
// another turn has that one's agent as its parent, and its rules and its store. It is an
// agent of its own in every group, so that under MaxRunningAgents 1 a parent has no room
// for a child.
//
// Begin does not join a transaction. Renewing needs one connection beside the pool, see
// [WithConnect].
//
// Errors: [limiter.ErrExceeded] is a denial; [ErrAgentRunning] when the agent is running
// another turn; [ErrShutdown]; [ErrInvalidTurn], [ErrInvalidConfig] and the errors of
// [limiter.Enforce]. After any error the turn is not to be worked on. Where the context
// ended in the moment of the commit, the plugin gives the slot back.
func (p *Plugin) Begin(ctx context.Context, agentID string, options TurnOptions) (*Turn, error) {
	return p.begin(ctx, agentID, options, run.Begin{ID: options.RunID, AgentType: options.AgentType, Reserve: options.Reserve})
}

// Run begins a turn, calls work with its context, and ends it, also when work panics. It
// returns the error of Begin, with work not called; or else what work and End return.
//
// Where work fails because the turn has lost its lease or was shut down, the error is also
// that one. A panic of work goes on once the turn has ended.
func (p *Plugin) Run(ctx context.Context, agentID string, options TurnOptions, work func(ctx context.Context, turn *Turn) error) error {
	turn, err := p.Begin(ctx, agentID, options)
	if err != nil {
		return err
	}

	return turn.do(ctx, work)
}

func (t *Turn) do(ctx context.Context, work func(ctx context.Context, turn *Turn) error) (err error) {
	defer func() {
		// Also after a panic, which goes on by itself.
		err = errors.Join(err, t.End(ctx))
	}()

	err = work(t.ctx, t)

	if cause := context.Cause(t.ctx); err != nil && cause != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w (%w)", err, cause)
	}

	return err
}

func (p *Plugin) begin(ctx context.Context, agentID string, options TurnOptions, begin run.Begin) (*Turn, error) {
	if p.db == nil {
		return nil, errNoDatabase
	}

	if begin.ID == "" {
		begin.ID = run.NewID()
	}

	if given := reflect.ValueOf(options.Store); given.Kind() == reflect.Pointer && given.IsNil() {
		return nil, fmt.Errorf("%w: Store is a nil %T: leave it out for the plugin's own table", fault.ErrInvalidTurn, options.Store)
	}

	if parent, ok := TurnFrom(ctx); ok && parent.plugin == p {
		options = options.under(parent)
		begin.ParentID = parent.run.AgentID
	}

	turn := &Turn{
		plugin: p, run: run.Run{AgentID: agentID, ID: begin.ID}, rules: options.Rules, perStep: options.PerStep,
		ending: make(chan struct{}, 1),
	}
	if options.Store != nil && !p.isOwnStore(options.Store) {
		turn.elsewhere = options.Store
		begin.ElsewhereStored = true
	}

	entered, leave, err := p.turns.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()

	if err := p.turns.connect(entered, p); err != nil {
		return nil, err
	}

	if err := p.turns.awaitAbandoned(entered, turn.run); err != nil {
		return nil, err
	}

	decision, leased, err := limiter.AdmitTurn(p.db.Session(&gorm.Session{NewDB: true, Context: entered}),
		limiter.Admission{AgentID: agentID, Rules: options.Rules}, begin)
	if err != nil {
		if entered.Err() != nil {
			p.turns.abandon(p, turn.run, begin.Resumes != "")

			err = fmt.Errorf("%w: %w", context.Cause(entered), err)
		}

		return nil, err
	}

	turn.decision = decision
	turn.ctx, turn.cancel = context.WithCancelCause(context.WithValue(ctx, turnKey{}, turn))

	if !p.turns.add(turn) {
		turn.cancel(ErrShutdown)
		p.turns.abandon(p, turn.run, begin.Resumes != "")

		return nil, ErrShutdown
	}

	p.turns.keeper.Add(turn.run, leased, turn.lose)

	return turn, nil
}

// under are the options of a turn that is begun by another one's work.
func (o TurnOptions) under(parent *Turn) TurnOptions {
	inherited := slices.Clone(parent.rules)

	for _, rule := range o.Rules {
		isKnown := func(known limiter.Rule) bool { return reflect.DeepEqual(known, rule) }
		if !slices.ContainsFunc(inherited, isKnown) {
			inherited = append(inherited, rule)
		}
	}

	o.Rules = inherited
	o.PerStep = o.PerStep || parent.perStep

	if o.Store == nil && parent.elsewhere != nil {
		o.Store = parent.elsewhere
	}

	return o
}

// isOwnStore reports whether the store writes to the plugin's own table.
func (p *Plugin) isOwnStore(given TurnStore) bool {
	placed, ok := given.(interface {
		LegionTable() (database.Pool, string)
	})
	if !ok {
		return false
	}

	pool, table := placed.LegionTable()

	return pool != (database.Pool{}) && pool == database.PoolOf(p.db) && table == p.tables.Agents
}

// errNoDatabase is returned for turns of a plugin that no db.Use has initialized.
var errNoDatabase = fmt.Errorf("%w: the plugin has no database: call db.Use(plugin) first", fault.ErrInvalidConfig)

// agentStore is the store of the plugin's own table. It is not made by Initialize, since
// it asks the db for its plugin, which that knows only afterwards.
func (p *Plugin) agentStore() *store.Store[models.LegionAgent] {
	return store.For[models.LegionAgent](p.db)
}

func (p *Plugin) agents() clause.Table { return clause.Table{Name: p.tables.Agents} }
