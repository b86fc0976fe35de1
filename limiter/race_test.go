package limiter_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/lease"
	"github.com/legion-gorm/legion/internal/reference"
	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/internal/testhook"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store" //nolint:depguard // it records what verdicts count
)

// Races are rounds of turns and verdicts. Like the rounds of Enforce they are made of
// values, which can be printed, replayed, sent to another process and judged by a model.

// raceLease is so long that no lease ends while a round goes on, but for those that are
// about to when it begins.
const raceLease = time.Hour

func racePlugin() gorm.Plugin {
	return modelPlugin{plugin{settings: database.Settings{Lease: raceLease}}}
}

type raceKind string

const (
	raceEnforce raceKind = "enforce"
	raceBegin   raceKind = "begin"
	raceRecord  raceKind = "record"
	raceEnd     raceKind = "end"
	raceRenew   raceKind = "renew"
)

type raceRule struct {
	concurrentRule

	Tokens int64 `json:"tokens"`
}

func (r raceRule) rule() limiter.Rule {
	rule := r.concurrentRule.rule(false)
	if r.Tokens != concurrentUnlimited {
		rule.Policy.MaxTokens = limiter.Max(r.Tokens)
	}

	return rule
}

// A raceStep is one call, or one transaction of a caller with a call in it.
type raceStep struct {
	Kind  raceKind `json:"kind"`
	Agent string   `json:"agent"`
	Run   string   `json:"run,omitempty"`

	// Resumes, Rules and Reserve are those of an admission, Entry and Tokens of usage.
	Resumes string     `json:"resumes,omitempty"`
	Rules   []raceRule `json:"rules,omitempty"`
	Reserve int64      `json:"reserve,omitempty"`
	Entry   string     `json:"entry,omitempty"`
	Tokens  int64      `json:"tokens,omitempty"`

	// Nested, Undo, Hold, Start and Pauses are as for a concurrentOperation.
	Nested bool                             `json:"nested,omitempty"`
	Undo   bool                             `json:"undo,omitempty"`
	Hold   time.Duration                    `json:"hold,omitempty"`
	Start  time.Duration                    `json:"start,omitempty"`
	Pauses map[testhook.Point]time.Duration `json:"pauses,omitempty"`
}

// A raceScript is the steps of one client, one after the other.
type raceScript []raceStep

func (s raceStep) rules() []limiter.Rule {
	rules := make([]limiter.Rule, len(s.Rules))
	for i, rule := range s.Rules {
		rules[i] = rule.rule()
	}

	return rules
}

// operation is the step in the model's terms.
func (s raceStep) operation() reference.Operation {
	switch s.Kind {
	case raceEnforce:
		return reference.Enforce{Agent: s.Agent, Rules: modelRules(s.rules())}
	case raceBegin:
		return reference.Begin{Agent: s.Agent, Run: s.Run, Resumes: s.Resumes, Rules: modelRules(s.rules()), Reserve: s.Reserve}
	case raceRecord:
		return reference.Record{Agent: s.Agent, Run: s.Run, Entry: reference.Entry{ID: s.Entry, Tokens: s.Tokens}}
	case raceEnd:
		return reference.End{Agent: s.Agent, Run: s.Run}
	default:
		return reference.Renew{Agent: s.Agent, Run: s.Run}
	}
}

func (s raceStep) String() string {
	text := s.operation().String()
	if s.Nested {
		text += fmt.Sprintf(" in a caller's transaction, undone: %t", s.Undo)
	}

	return text
}

// raceHeld is what a renewal says of a row that somebody has locked.
const raceHeld reference.Outcome = "held"

// A raceOutcome is what a step came to, and when by a monotonic clock, in nanoseconds.
type raceOutcome struct {
	Outcome reference.Outcome `json:"outcome"`

	// Denied is the position of the rule that denied.
	Denied int `json:"denied,omitempty"`

	// Failure is any error that is no answer. Deadlock says that it is PostgreSQL's.
	Failure  string `json:"failure,omitempty"`
	Deadlock bool   `json:"deadlock,omitempty"`

	// Call, Verdict and Return are as for a concurrentOutcome.
	Call    int64 `json:"call"`
	Verdict int64 `json:"verdict"`
	Return  int64 `json:"return"`
}

func (o raceOutcome) String() string {
	return fmt.Sprintf("%s %d %s [%d to %d to %d]", o.Outcome, o.Denied, o.Failure, o.Call, o.Verdict, o.Return)
}

// call makes the call itself. The outcome is that of a call without an error.
func (s raceStep) call(ctx context.Context, db *gorm.DB) (reference.Outcome, error) {
	held := run.Run{AgentID: s.Agent, ID: s.Run}

	switch s.Kind {
	case raceEnforce:
		return reference.Admitted, limiter.Enforce(db, s.Agent, s.rules()...)
	case raceBegin:
		return reference.Admitted, admitTurn(db, s.Agent, run.Begin{ID: s.Run, Resumes: s.Resumes, Reserve: s.Reserve}, s.rules()...)
	case raceRecord:
		appended, err := store.For[models.LegionAgent](db).AppendTurnUsage(ctx, held, models.Usage{ID: s.Entry, TotalTokens: s.Tokens})
		if !appended {
			return reference.Recorded, err
		}

		return reference.Done, err
	case raceEnd:
		return reference.Done, held.End(db, modelAgents, nil)
	default:
		return renewInRace(ctx, db, held)
	}
}

// renewInRace makes one attempt to renew the lease, as the keeper of leases does.
func renewInRace(ctx context.Context, db *gorm.DB, kept run.Run) (reference.Outcome, error) {
	var (
		agentID, runID string
		renewed, held  bool
	)

	statement := lease.RenewStatement("legion_agents", raceLease)
	err := db.Statement.ConnPool.QueryRowContext(ctx, statement, []string{kept.AgentID}, []string{kept.ID}).Scan(&agentID, &runID, &renewed, &held)

	switch {
	case renewed:
		return reference.Done, err
	case held:
		return raceHeld, err
	default:
		return reference.LeaseLost, err
	}
}

func (o *raceOutcome) answer(outcome reference.Outcome, err error) {
	var exceeded *limiter.ExceededError

	switch {
	case err == nil:
		o.Outcome = outcome
	case errors.As(err, &exceeded):
		o.Outcome, o.Denied = reference.Denied, exceeded.RuleIndex
	case errors.Is(err, fault.ErrAgentRunning):
		o.Outcome = reference.AgentRunning
	case errors.Is(err, fault.ErrLeaseLost):
		o.Outcome = reference.LeaseLost
	case errors.Is(err, fault.ErrInvalidTurn):
		o.Outcome = reference.RunEnded
	case errors.Is(err, fault.ErrNotFound):
		o.Outcome = reference.NotFound
	default:
		o.Failure, o.Deadlock = err.Error(), isConcurrentDeadlock(err)
	}
}

// run makes the call where and when it is to be made, and measures its time from begun
// on.
func (s raceStep) run(ctx context.Context, db *gorm.DB, hooks testhook.Hooks, begun time.Time) (outcome raceOutcome) {
	hooks.At = func(point testhook.Point) { concurrentSleep(s.Pauses[point]) }
	ctx = testhook.With(ctx, hooks)
	db = db.WithContext(ctx)

	concurrentSleep(s.Start)

	call := func(db *gorm.DB) {
		outcome.answer(s.call(ctx, db))
		outcome.Verdict = time.Since(begun).Nanoseconds()
	}

	outcome.Call = time.Since(begun).Nanoseconds()

	if s.Nested {
		err := db.Transaction(func(tx *gorm.DB) error {
			call(tx)
			concurrentSleep(s.Hold)

			if s.Undo {
				return errConcurrentUndo
			}

			return nil
		})
		if err != nil && !errors.Is(err, errConcurrentUndo) && outcome.Failure == "" {
			outcome.Failure = err.Error()
		}
	} else {
		call(db)
	}

	outcome.Return = time.Since(begun).Nanoseconds()

	return outcome
}

// runRace plays all scripts at once, each on a pool of its own.
func runRace(ctx context.Context, pools []*gorm.DB, scripts []raceScript, hooks testhook.Hooks, begun time.Time) [][]raceOutcome {
	outcomes := make([][]raceOutcome, len(scripts))

	var running sync.WaitGroup

	for i, script := range scripts {
		running.Go(func() {
			for _, step := range script {
				outcomes[i] = append(outcomes[i], step.run(ctx, pools[i%len(pools)], hooks, begun))
			}
		})
	}

	running.Wait()

	return outcomes
}

// A raceRow is an agent whose turn has begun before the round.
type raceRow struct {
	Agent, Fields, Run string
	Reserved           int64

	// Left is how long its lease lasts when the round begins.
	Left time.Duration
}

// waning says that the lease ends while the round goes on.
func (r raceRow) waning() bool { return r.Left > 0 && r.Left < raceLease }

// In the model no time passes. A lease lasts, or is over, or is about to be over.
var (
	raceWhole  = reference.At(raceLease)
	raceWaning = reference.At(1)
	raceOver   = reference.At(-1)
)

// raceStart is the state in which the round begins.
func raceStart(rows []raceRow) reference.State {
	state := reference.New(reference.Settings{Lease: raceLease})

	for _, row := range rows {
		until := raceWhole

		switch {
		case row.Left <= 0:
			until = raceOver
		case row.waning():
			until = raceWaning
		}

		group := raceRule{atMost(row.Fields, concurrentUnlimited), concurrentUnlimited}
		state, _ = state.Step(reference.Enforce{Agent: row.Agent, Rules: modelRules([]limiter.Rule{group.rule()})})
		state, _ = state.Step(reference.Turn{Agent: row.Agent, Running: true, Run: row.Run, Lease: until, Reserved: row.Reserved})
	}

	return state
}

func raceDescribe(rows []raceRow, events []*raceEvent) string {
	var text strings.Builder

	for _, row := range rows {
		_, _ = fmt.Fprintf(&text, "%+v\n", row)
	}

	return text.String() + concurrentList(events)
}
