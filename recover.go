package legion

import (
	"context"
	"fmt"
	"sync"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// DefaultRecoverConcurrency is how many turns one Recover resumes at the same time unless
// it is told otherwise.
const DefaultRecoverConcurrency = 4

// recoverPage is how many interrupted runs are read at once.
const recoverPage = 100

// RecoverOptions say how interrupted turns are resumed.
type RecoverOptions struct {
	// Rules says under which rules an agent is resumed: those that it was begun with,
	// which are not stored. Of their limits only those count that the work needs anew: a
	// slot under MaxRunningAgents, and under MaxTokens room for what the turn still held
	// reserved. What the agent started, spent and evaluated before is counted already. No
	// rules: it is resumed without a limit. An error leaves the run as it is. Nil is
	// [ErrInvalidTurn].
	Rules func(ctx context.Context, agent *models.LegionAgent) ([]limiter.Rule, error)

	// Concurrency is how many turns are resumed at the same time. 0:
	// [DefaultRecoverConcurrency].
	Concurrency int

	// PerStep and Store are those of [TurnOptions].
	PerStep bool
	Store   TurnStore
}

// A RecoverReport says what one [Plugin.Recover] has done.
type RecoverReport struct {
	// Resumed are the agents whose work was resumed and ended without an error.
	Resumed []string

	// Failed are those whose work was resumed, and returned this error. They are idle
	// now, unless the error is ErrLeaseLost.
	Failed []RecoverFailure

	// Left are those that were not resumed, and why: there is no room under a limit
	// ([limiter.ErrExceeded]), or another process was first ([ErrAgentRunning]).
	Left []RecoverFailure
}

// A RecoverFailure is an agent and what kept it from being resumed, or from ending well.
type RecoverFailure struct {
	AgentID string
	Err     error
}

// Recover resumes the work of processes that have died: of agents whose row says that they
// are running, and whose lease is over. For each it takes over the run, with a slot and
// the reservation, in one transaction under the locks of its rules, so that of several
// processes that recover only one gets it and no limit is exceeded; then it calls resume in
// a turn of its own, as [Plugin.Run] does.
//
//	report, err := plugin.Recover(ctx, legion.RecoverOptions{Rules: rulesOf}, resume)
//
// A panic of resume ends the process, as on any goroutine, once its turn has ended. A nil
// resume is [ErrInvalidTurn], before the database is touched.
//
// It makes one pass and returns when all that it resumed has ended. Those for which there
// is no room keep their interrupted run: call it again later, for example every minute.
//
// Agents with a parent are not resumed: their parents begin them again. A deleted agent is
// not either.
//
// The error is what ended the pass early: that of ctx, [ErrShutdown] or the database's. The
// report, never nil, says how far it came.
func (p *Plugin) Recover(ctx context.Context, options RecoverOptions, resume func(ctx context.Context, turn *Turn) error) (*RecoverReport, error) {
	report := &RecoverReport{}

	switch {
	case p.db == nil:
		return report, errNoDatabase
	case options.Rules == nil:
		return report, fmt.Errorf("%w: RecoverOptions.Rules is nil: say under which rules interrupted agents are resumed", fault.ErrInvalidTurn)
	case resume == nil:
		return report, fmt.Errorf("%w: resume is nil: say what an interrupted agent goes on with", fault.ErrInvalidTurn)
	case options.Concurrency < 0:
		return report, fmt.Errorf("%w: RecoverOptions.Concurrency is negative: leave it 0 for %d", fault.ErrInvalidTurn, DefaultRecoverConcurrency)
	case options.Concurrency == 0:
		options.Concurrency = DefaultRecoverConcurrency
	}

	recovery := recovery{plugin: p, options: options, resume: resume, report: report}

	return report, recovery.run(ctx)
}

// A recovery is one pass.
type recovery struct {
	plugin  *Plugin
	options RecoverOptions
	resume  func(ctx context.Context, turn *Turn) error

	mutex  sync.Mutex
	report *RecoverReport
}

func (r *recovery) run(ctx context.Context) error {
	// Work that was resumed is not cut short by what ends the pass, unless ctx does.
	var working sync.WaitGroup
	defer working.Wait()

	slots := make(chan struct{}, r.options.Concurrency)
	after := ""

	for {
		var found []run.Interrupted

		err := r.plugin.atDatabase(ctx, func(tx *gorm.DB) (err error) {
			found, err = run.ListInterrupted(tx, r.plugin.agents(), after, recoverPage)

			return err
		})
		if err != nil || len(found) == 0 {
			return err
		}

		after = found[len(found)-1].AgentID

		for _, interrupted := range found {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-r.plugin.turns.shutdown.Done():
				return ErrShutdown
			}

			working.Go(func() {
				defer func() { <-slots }()

				r.one(ctx, interrupted)
			})
		}
	}
}

// one resumes one run, or says why it does not.
func (r *recovery) one(ctx context.Context, interrupted run.Interrupted) {
	turn, err := r.claim(ctx, interrupted)
	if err != nil {
		r.note(&r.report.Left, interrupted.AgentID, err)

		return
	}

	if err := turn.do(ctx, r.resume); err != nil {
		r.note(&r.report.Failed, interrupted.AgentID, err)

		return
	}

	r.mutex.Lock()
	defer r.mutex.Unlock()

	r.report.Resumed = append(r.report.Resumed, interrupted.AgentID)
}

func (r *recovery) claim(ctx context.Context, interrupted run.Interrupted) (*Turn, error) {
	agent, err := r.read(ctx, interrupted.AgentID)
	if err != nil {
		return nil, err
	}

	rules, err := r.options.Rules(ctx, agent)
	if err != nil {
		return nil, err
	}

	options := TurnOptions{Rules: rules, PerStep: r.options.PerStep, Store: r.options.Store}

	return r.plugin.begin(ctx, interrupted.AgentID, options, run.Begin{Resumes: interrupted.ID, Reserve: interrupted.Reserved})
}

// read reads in a transaction, since outside a resolver plugin would ask a replica, which may
// not know the agent yet.
func (r *recovery) read(ctx context.Context, agentID string) (agent *models.LegionAgent, err error) {
	session := r.plugin.db.Session(&gorm.Session{NewDB: true, Context: ctx})

	err = database.Transaction(session, r.plugin.settings.WithDefaults().ConnectionTimeout, func(tx *gorm.DB) (err error) {
		agent, err = store.For[models.LegionAgent](tx).Get(ctx, agentID)

		return err
	})

	return agent, err
}

func (r *recovery) note(where *[]RecoverFailure, agentID string, err error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()

	*where = append(*where, RecoverFailure{AgentID: agentID, Err: err})
}
