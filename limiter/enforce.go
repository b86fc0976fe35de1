package limiter

import (
	"errors"
	"fmt"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/agentid"
	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/testhook"
)

// Enforce admits the agent under all rules and records it, or denies and changes
// nothing.
//
// The rules are checked in the order given, at one moment of the database's clock.
// The first that is violated denies with an [*ExceededError], which names every
// violated limit of that rule. When all allow, the merged identity of the rules
// becomes the agent's metadata, its start is now unless it has started before, and
// where a rule sets MaxRunningAgents it holds a slot for one lease.
//
// Enforcing the same agent again counts it once, moves it to the new identity, and
// restores it if it was deleted. So a retry is safe.
//
// If db is in a transaction, Enforce joins it inside a savepoint: an error leaves the
// transaction usable and without locks of this call, success holds the locks until
// the transaction ends, and a rollback takes the admission back. The transaction must
// be READ COMMITTED. Otherwise Enforce opens its own, and retries deadlocks and lost
// connections a few times. In a hook, pass the hook's tx.
//
// Errors: [ErrExceeded] is a denial; [ErrInvalidRule] and [ErrInvalidAgentID] are
// found before the database is touched; [ErrIsolation], [ErrNotMigrated],
// [ErrNoConnection] and [ErrContention] are explained at their names. Any other error
// is the database's. No error is ever an admission that took effect, but for a COMMIT
// whose reply was lost and could not be retried.
func Enforce(db *gorm.DB, agentID string, rules ...Rule) error {
	_, err := Admit(db, agentID, rules...)

	return err
}

// Admit is [Enforce], and says what is left of each rule after the admission. On an
// error the decision is nil.
func Admit(db *gorm.DB, agentID string, rules ...Rule) (*Decision, error) {
	call, err := newCall(db, agentID, rules)
	if err != nil {
		return nil, err
	}

	if database.InTransaction(call.db) {
		return call.joined()
	}

	leave, err := call.queue()
	if err != nil {
		return nil, err
	}
	defer leave()

	return call.alone()
}

// A call is one admission on its way to a verdict.
type call struct {
	request

	db       *gorm.DB
	settings database.Settings
	tables   database.Tables
	hooks    *testhook.Hooks
}

// A policyProvider is a plugin that has a default policy.
type policyProvider interface{ LegionDefaultPolicy() *Policy }

func newCall(db *gorm.DB, agentID string, rules []Rule) (*call, error) {
	session, err := database.Session(db)
	if err != nil {
		return nil, err
	}

	if err := agentid.Validate(agentID); err != nil {
		return nil, err
	}

	var defaultPolicy *Policy
	if provider, ok := session.Plugins[database.PluginName].(policyProvider); ok {
		defaultPolicy = provider.LegionDefaultPolicy()
	}

	prepared, merged, err := prepareRules(rules, defaultPolicy)
	if err != nil {
		return nil, err
	}

	settings := database.SettingsOf(session)

	tables, err := database.TablesOf(session, settings)
	if err != nil {
		return nil, err
	}

	return &call{
		request:  request{agentID: agentID, rules: prepared, merged: merged},
		db:       session,
		settings: settings,
		tables:   tables,
		hooks:    testhook.From(session.Statement.Context),
	}, nil
}

// alone decides in transactions of its own.
func (c *call) alone() (*Decision, error) {
	if c.hooks.RegisterInside {
		return c.aloneInside()
	}

	for range maxRounds {
		var outcome outcome

		err := c.withRegistry(func() error {
			return database.Transaction(c.db, c.settings.ConnectionTimeout, func(tx *gorm.DB) (err error) {
				outcome, err = c.decide(tx, nil)
				if err == nil && !outcome.wrote {
					return database.ErrRollback
				}

				return err
			})
		})
		if err != nil {
			return nil, err
		}

		if len(outcome.missing) == 0 {
			return outcome.decision, nil
		}

		for _, identity := range outcome.missing {
			if err := c.register(identity); err != nil {
				return nil, err
			}
		}
	}

	return nil, errRounds
}

func (c *call) aloneInside() (decision *Decision, err error) {
	err = database.Transaction(c.db, c.settings.ConnectionTimeout, func(tx *gorm.DB) error {
		inner := *c
		inner.db = tx
		decision, err = inner.joined()

		return err
	})

	return decision, err
}

// joined decides inside the caller's transaction.
func (c *call) joined() (decision *Decision, err error) {
	err = c.withRegistry(func() error {
		return database.InSavepoint(c.db, func(point *database.Savepoint) error {
			decision, err = c.decideInside(point)

			return err
		})
	})
	if err != nil {
		return nil, err
	}

	return decision, nil
}

func (c *call) decideInside(point *database.Savepoint) (*Decision, error) {
	// Everything that was found missing so far: starting again undoes the
	// registrations of the rounds before.
	var registering []document

	for range maxRounds {
		outcome, err := c.decide(c.db, registering)
		if err == nil && outcome.busy {
			err = point.Restart()
			if err == nil {
				outcome, err = c.decideExclusively(c.db, registering)
			}
		}

		if err != nil {
			return nil, err
		}

		if len(outcome.missing) == 0 {
			return outcome.decision, nil
		}

		registering = union(registering, outcome.missing)

		if err := point.Restart(); err != nil {
			return nil, err
		}
	}

	return nil, errRounds
}

// An outcome is what one pass through the protocol came to, if not to a denial.
type outcome struct {
	decision *Decision

	// missing are identities of the call that must be registered before it can pass.
	missing []document

	// busy says that registering needs the stronger locks from the start.
	busy bool

	// wrote says that the transaction changed something.
	wrote bool
}

// decide makes one pass through the protocol of locks.go, registering what is asked
// for between the field locks and the identity locks.
func (c *call) decide(tx *gorm.DB, registering []document) (outcome, error) {
	if err := c.lockFields(tx, nil); err != nil {
		return outcome{}, err
	}

	if len(registering) > 0 {
		registered, err := c.registerInside(tx, registering)
		if err != nil || !registered {
			return outcome{busy: true}, err
		}
	}

	return c.decideLocked(tx)
}

// decideExclusively is decide with the locks of the registration taken in the one
// sorted pass, for when they could not be had on top of the shared ones.
func (c *call) decideExclusively(tx *gorm.DB, registering []document) (outcome, error) {
	if err := c.lockFields(tx, waitingFields(registering)); err != nil {
		return outcome{}, err
	}

	if err := c.insertIdentities(tx, registering); err != nil {
		return outcome{}, err
	}

	return c.decideLocked(tx)
}

func (c *call) decideLocked(tx *gorm.DB) (outcome, error) {
	missing, err := c.lockIdentities(tx)
	if err != nil {
		return outcome{}, err
	}

	measurement, err := c.measure(tx)
	if err != nil {
		return outcome{}, err
	}

	revoked := false

	if c.deniesButForExpired(measurement) {
		if revoked, err = c.revoke(tx, measurement); err != nil {
			return outcome{}, err
		}

		if measurement, err = c.measure(tx); err != nil {
			return outcome{}, err
		}
	}

	c.hooks.Reach(testhook.Measured)

	// A denial needs no registration: it changes nothing, so it is right in any
	// snapshot. So a first use that is denied leaves nothing behind.
	if err := c.verdict(measurement); err != nil {
		return outcome{}, err
	}

	if len(missing) > 0 {
		return outcome{missing: missing}, nil
	}

	wrote, err := c.record(tx, measurement.own)
	if err != nil {
		return outcome{}, err
	}

	c.hooks.Reach(testhook.Recorded)

	return outcome{decision: c.decision(measurement), wrote: wrote || revoked}, nil
}

// verdict returns the denial of the first rule that is violated.
func (c *call) verdict(measurement measurement) error {
	for i, rule := range c.rules {
		usage := measurement.usage(i)

		var violations []Quota

		for _, quota := range rule.Policy.quotas(usage) {
			if quota.exceeded() {
				violations = append(violations, quota)
			}
		}

		if len(violations) > 0 {
			return &ExceededError{AgentID: c.agentID, Rule: rule.Rule, RuleIndex: i, Usage: usage, Violations: violations}
		}
	}

	return nil
}

func (c *call) decision(measurement measurement) *Decision {
	states := make([]RuleState, len(c.rules))

	for i, rule := range c.rules {
		usage := measurement.usage(i)
		states[i] = RuleState{Rule: rule.Rule, Usage: usage, Quotas: rule.Policy.quotas(usage)}
	}

	return &Decision{AgentID: c.agentID, Rules: states}
}

// withRegistry runs body once the registry is there. A database whose tables were
// dropped and made again, or a search_path that leads elsewhere, may prove the
// memory of it wrong: then it looks again, once.
func (c *call) withRegistry(body func() error) error {
	remembered, err := c.ensureRegistry()
	if err != nil {
		return err
	}

	err = body()
	if err == nil || !remembered || !errors.Is(err, fault.ErrNotMigrated) {
		return err
	}

	c.forgetRegistry()

	if _, again := c.ensureRegistry(); again != nil {
		return fmt.Errorf("%w (after %w)", again, err)
	}

	return body()
}
