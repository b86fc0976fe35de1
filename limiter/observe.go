package limiter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
)

// An Observer is told of every decision, on the goroutine of the call and before it
// returns. It cannot change the verdict: what it does to the Observation reaches nobody,
// and a panic in it is logged and goes no further. It must not block for long, since a
// call in a caller's transaction still holds its locks.
//
// Set it with legion.WithObserver. The default writes denials to slog.Default at Info
// and admissions at Debug, without identity values.
type Observer func(Observation)

// An Observation is one decision. Errors that are no denial are no decisions.
type Observation struct {
	// Context is that of the call.
	Context context.Context //nolint:containedctx // handed over for the length of one call

	// AgentID is the agent that asked.
	AgentID string

	// Rules are the rules of the call. On a denial, only what was measured of the rule
	// that denies is filled in.
	Rules []RuleState

	// Denial is the denial, or nil where the agent was admitted.
	Denial *ExceededError

	// InTransaction says that the call joined a caller's transaction, which may still
	// roll the admission back.
	InTransaction bool

	// Waited is the time until the locks were held: in this process's queue, for a
	// connection, and for other calls in the database.
	Waited time.Duration

	// Took is the time of the whole call, Waited included.
	Took time.Duration
}

// An observerProvider is a plugin that has an observer; nil stands for the default.
type observerProvider interface{ LegionObserver() Observer }

// observe tells the observer what became of the call.
func (c *call) observe(decisions []*Decision, err error) {
	observer := observerOf(c.db)
	if observer == nil {
		observer = log
	}

	observation := Observation{
		Context:       c.db.Statement.Context,
		InTransaction: database.InTransaction(c.db),
		Waited:        c.locked.Sub(c.began),
		Took:          time.Since(c.began),
	}

	if denial, ok := errors.AsType[*ExceededError](err); ok {
		observation.AgentID, observation.Denial = denial.AgentID, denial
		observation.Rules = c.deniedRules(denial)
		tell(observer, observation)

		return
	}

	for _, decision := range decisions {
		observation.AgentID, observation.Rules = decision.AgentID, decision.Rules
		tell(observer, observation)
	}
}

// deniedRules are the rules of the agent that was denied, in their order.
func (c *call) deniedRules(denial *ExceededError) []RuleState {
	states := make([]RuleState, len(c.denied.rules))
	for i, rule := range c.denied.rules {
		states[i].Rule = rule.Rule
	}

	states[denial.RuleIndex].Usage = denial.Usage
	states[denial.RuleIndex].Quotas = c.denied.quotas(denial.Rule.Policy, denial.Usage)

	return states
}

func observerOf(db *gorm.DB) Observer {
	if provider, ok := db.Plugins[database.PluginName].(observerProvider); ok {
		return provider.LegionObserver()
	}

	return nil
}

func tell(observer Observer, observation Observation) {
	defer func() {
		if value := recover(); value != nil {
			slog.ErrorContext(observation.Context, "legion: the observer panicked", "panic", fmt.Sprintf("%T", value))
		}
	}()

	observer(observation)
}

// log is the default observer. An agent's ID may be a person's, so it is left out, as
// the values of identities are.
func log(observation Observation) {
	if denial := observation.Denial; denial != nil {
		slog.InfoContext(observation.Context, "legion: denied",
			"rule", denial.Rule.Name, "index", denial.RuleIndex, "reason", denial.Error(), "took", observation.Took)

		return
	}

	slog.DebugContext(observation.Context, "legion: admitted", "rules", len(observation.Rules), "took", observation.Took)
}
