package limiter

import (
	"errors"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/run"
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
// In a DryRun session, as that of db.ToSQL, it only validates the rules.
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
	decisions, err := admitAll(db, []Admission{{AgentID: agentID, Rules: rules}})
	if err != nil {
		return nil, err
	}

	return decisions[0], nil
}

// An Admission is an agent that asks to be admitted under its rules.
type Admission struct {
	AgentID string
	Rules   []Rule
}

// EnforceAll is [Enforce] for several agents at once: all are admitted, or none. Each
// is measured after those before it, so that two agents of one group count each other.
//
// It is the way to admit several agents in one transaction, since it locks for all of
// them in one pass: Enforces that follow each other in one transaction can deadlock
// with others. The denial of one, which its AgentID names, denies all. No admissions at
// all are allowed, and do nothing.
func EnforceAll(db *gorm.DB, admissions ...Admission) error {
	if len(admissions) == 0 {
		return nil
	}

	_, err := admitAll(db, admissions)

	return err
}

// A call is one or more requests on their way to a verdict.
type call struct {
	requests []*request

	db       *gorm.DB
	settings database.Settings
	tables   database.Tables
	hooks    *testhook.Hooks

	// denied is the request that was denied, for the observer.
	denied *request

	// began and locked are when the call began, and when it last held its locks, for
	// the observer.
	began, locked time.Time

	// leased is when the lease of a turn was asked for.
	leased time.Time
}

func admitAll(db *gorm.DB, admissions []Admission) ([]*Decision, error) {
	call, err := newCall(db, admissions, nil)
	if err != nil {
		return nil, err
	}

	if call.db.DryRun {
		return call.undecided(), nil
	}

	decisions, err := call.run()
	call.observe(decisions, err)

	return decisions, err
}

// undecided are the decisions of a dry run, which has no database to ask.
func (c *call) undecided() []*Decision {
	decisions := make([]*Decision, len(c.requests))

	for i, request := range c.requests {
		states := make([]RuleState, len(request.rules))
		for j, rule := range request.rules {
			states[j] = RuleState{Rule: rule.Rule, Quotas: request.quotas(rule.Policy, Usage{})}
		}

		decisions[i] = &Decision{AgentID: request.agentID, Rules: states}
	}

	return decisions
}

func (c *call) run() ([]*Decision, error) {
	if denial := c.deniedAtOnce(); denial != nil {
		c.noteDenial(denial)

		return nil, denial
	}

	decisions, err := c.runLocked()
	if denial, ok := errors.AsType[*ExceededError](err); ok {
		c.noteDenial(denial)
	}

	return decisions, err
}

// runLocked decides by the protocol of locks.go.
func (c *call) runLocked() ([]*Decision, error) {
	joined := database.InTransaction(c.db)

	if !joined {
		leave, err := c.queue()
		if err != nil {
			return nil, err
		}
		defer leave()
	}

	if c.usesFunction() {
		decisions, err := c.byFunction()
		if !errors.Is(err, errBusy) {
			return decisions, err
		}
	}

	if joined {
		return c.joined()
	}

	return c.alone()
}

// A policyProvider is a plugin that has a default policy.
type policyProvider interface{ LegionDefaultPolicy() *Policy }

// newCall validates the admissions, and the turn that begins with the only one of them,
// if it is not nil.
func newCall(db *gorm.DB, admissions []Admission, turn *run.Begin) (*call, error) {
	session, err := database.Session(db)
	if err != nil {
		return nil, err
	}

	var defaultPolicy *Policy
	if provider, ok := session.Plugins[database.PluginName].(policyProvider); ok {
		defaultPolicy = provider.LegionDefaultPolicy()
	}

	settings := database.SettingsOf(session)
	requests := make([]*request, len(admissions))

	for i, admission := range admissions {
		request, err := prepare(admission.AgentID, admission.Rules, defaultPolicy)
		if err != nil {
			return nil, err
		}

		if len(admission.Rules) == 0 && turn == nil {
			return nil, errNoRules
		}

		if settings.WithoutUsage && request.limitsUsage() {
			return nil, errWithoutUsage
		}

		if turn != nil {
			if err := request.beginTurn(turn, settings); err != nil {
				return nil, err
			}
		}

		requests[i] = &request
	}

	tables, err := database.TablesOf(session, settings)
	if err != nil {
		return nil, err
	}

	return &call{
		requests: requests,
		db:       session,
		settings: settings,
		tables:   tables,
		hooks:    testhook.From(session.Statement.Context),
		began:    time.Now(),
	}, nil
}

// alone decides in transactions of its own.
func (c *call) alone() ([]*Decision, error) {
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
			return nil, c.forecast(err)
		}

		if outcome.moved {
			continue
		}

		if len(outcome.missing) == 0 {
			return outcome.decisions, nil
		}

		for _, identity := range outcome.missing {
			if err := c.register(identity); err != nil {
				return nil, err
			}
		}
	}

	return nil, errRounds
}

func (c *call) aloneInside() (decisions []*Decision, err error) {
	err = database.Transaction(c.db, c.settings.ConnectionTimeout, func(tx *gorm.DB) error {
		inner := *c
		inner.db = tx
		decisions, err = inner.joined()

		return err
	})

	return decisions, err
}

// joined decides inside the caller's transaction.
func (c *call) joined() (decisions []*Decision, err error) {
	err = c.withRegistry(func() error {
		return database.InSavepoint(c.db, func(point *database.Savepoint) error {
			decisions, err = c.decideInside(point)

			return err
		})
	})
	if err != nil {
		return nil, err
	}

	return decisions, nil
}

func (c *call) decideInside(point *database.Savepoint) ([]*Decision, error) {
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
			return outcome.decisions, nil
		}

		registering = distinct(append(registering, outcome.missing...))

		if err := point.Restart(); err != nil {
			return nil, err
		}
	}

	return nil, errRounds
}

// An outcome is what one pass through the protocol came to, if not to a denial.
type outcome struct {
	decisions []*Decision

	// missing are identities of the call that must be registered before it can pass.
	missing []document

	// busy says that registering needs the stronger locks from the start.
	busy bool

	// moved says that the agent of a turn without rules is no longer in the groups that
	// were locked.
	moved bool

	// wrote says that the transaction changed something.
	wrote bool
}

// decide makes one pass through the protocol of locks.go, registering what is asked
// for between the field locks and the identity locks.
func (c *call) decide(tx *gorm.DB, registering []document) (outcome, error) {
	if request := c.requests[0]; request.keepsGroups() {
		if err := c.readGroups(tx, request); err != nil {
			return outcome{}, err
		}
	}

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

	c.locked = time.Now()

	if len(c.requests) > 1 && c.mayRevoke() {
		// A later request cannot wait for its row any more once an earlier one is recorded.
		if err := c.lockOwnRows(tx); err != nil {
			return outcome{}, err
		}
	}

	decided := outcome{decisions: make([]*Decision, len(c.requests)), missing: missing}

	for i, request := range c.requests {
		measurement, begun, revoked, err := c.measureRevoking(tx, request)
		if err != nil {
			return outcome{}, err
		}

		c.hooks.Reach(testhook.Measured)

		if request.keepsGroups() && !measurement.own.unchanged {
			return outcome{moved: true}, nil
		}

		// A denial needs no registration: it changes nothing, so it is right in any
		// snapshot. So a first use that is denied leaves nothing behind.
		if denial := measurement.denial(request); denial != nil && !begun {
			c.denied = request

			if !c.forecastsLater() {
				denial.RetryAfter = c.retryAfter(tx, request, denial)
			}

			return outcome{}, denial
		}

		if len(missing) > 0 && len(c.requests) == 1 {
			return outcome{missing: missing}, nil
		}

		recorded, err := c.record(tx, request, measurement.own, begun)
		if err != nil {
			return outcome{}, err
		}

		decided.wrote = decided.wrote || recorded || revoked
		decided.decisions[i] = measurement.decision(request)
	}

	if len(missing) > 0 {
		return outcome{missing: missing}, nil
	}

	c.hooks.Reach(testhook.Recorded)

	return decided, nil
}

// measureRevoking measures the request, and where slots or reservations whose lease is
// over would deny it, takes them first. It reports whether the turn of the request has
// begun already, which then takes nothing from others, and whether it took any.
func (c *call) measureRevoking(tx *gorm.DB, request *request) (measured measurement, begun, revoked bool, err error) {
	measured, begun, err = c.measureTurn(tx, request)
	if err != nil || begun || !measured.deniesButForExpired(request) {
		return measured, begun, false, err
	}

	if c.hooks.ExpiredAreFree {
		measured.freeExpired()

		return measured, begun, false, nil
	}

	c.hooks.Reach(testhook.Expired)

	if len(c.requests) == 1 && !c.hooks.WithoutOwnRow {
		if err := c.lockOwnRows(tx); err != nil {
			return measurement{}, false, false, err
		}
	}

	if revoked, err = c.revoke(tx, request, measured); err != nil {
		return measurement{}, false, false, err
	}

	c.hooks.Reach(testhook.Revoked)

	// A renewal that began in time may have kept the caller's own run alive meanwhile.
	measured, begun, err = c.measureTurn(tx, request)

	return measured, begun, revoked, err
}

// measureTurn measures the request, and reports whether its turn has begun already. The
// error is also that of a turn that cannot begin, whatever the rules say.
func (c *call) measureTurn(tx *gorm.DB, request *request) (measured measurement, begun bool, err error) {
	measured, err = c.measure(tx, request)
	if err == nil && request.turn != nil {
		begun, err = request.mayBegin(measured.own)
	}

	return measured, begun, err
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
