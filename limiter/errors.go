package limiter

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
)

// Sentinels for errors.Is.
var (
	// ErrExceeded is what every [ExceededError] is.
	ErrExceeded = fault.ErrExceeded

	// ErrInvalidRule is a rule, identity or policy that cannot be enforced. The text
	// names the rule, the field and the remedy. The database was not touched.
	ErrInvalidRule = fault.ErrInvalidRule

	// ErrInvalidAgentID is an agent ID that is not 1 to 512 bytes of valid UTF-8
	// without NUL. The database was not touched.
	ErrInvalidAgentID = fault.ErrInvalidAgentID

	// ErrInvalidConfig is a *gorm.DB that cannot be worked on: nil, or of a dialect
	// other than PostgreSQL.
	ErrInvalidConfig = fault.ErrInvalidConfig

	// ErrIsolation is a caller's transaction at REPEATABLE READ or SERIALIZABLE, which
	// would count from an old snapshot. Open it at READ COMMITTED, PostgreSQL's
	// default.
	ErrIsolation = fault.ErrIsolation

	// ErrNotMigrated is a database without our tables or columns. Call
	// legion.Migrate.
	ErrNotMigrated = fault.ErrNotMigrated

	// ErrNoConnection is a pool that had no connection within the connection timeout.
	// Inside a hook its usual cause is a captured db: use the hook's own.
	ErrNoConnection = fault.ErrNoConnection

	// ErrAgentRunning is an agent whose slot belongs to a turn.
	ErrAgentRunning = fault.ErrAgentRunning

	// ErrNotFound is an agent that has no row. It is also gorm.ErrRecordNotFound.
	ErrNotFound = fault.ErrNotFound

	// ErrContention is a call that met one first use of an identity after another
	// and gave up. It is retryable.
	ErrContention = fault.ErrContention
)

// Retryable reports whether the same call may succeed when it is made again: a
// deadlock, a lost connection, [ErrContention]. Calls that open their own
// transaction have retried already. In a caller's transaction the whole
// transaction must be run again.
func Retryable(err error) bool { return database.Retryable(err) }

// ExceededError is a denial. It is [ErrExceeded] for errors.Is.
//
// Its text names the rule, the limits and their figures, and never a value of the
// identity.
type ExceededError struct {
	// AgentID is the agent that was denied.
	AgentID string

	// Rule is the first rule, in the order of the call, that denies.
	Rule Rule

	// RuleIndex is its position, from 0.
	RuleIndex int

	// Usage is what was measured of the rule.
	Usage Usage

	// Violations are the limits of the rule that deny, all of them, in the order
	// agents, running agents, tokens, evals.
	Violations []Quota

	// RetryAfter is the shortest wait after which the call passes if nothing else
	// happens. Zero: not known, or never.
	RetryAfter time.Duration
}

// Error implements error.
func (e *ExceededError) Error() string {
	violations := make([]string, len(e.Violations))
	for i, violation := range e.Violations {
		violations[i] = describe(violation, e.Rule.Policy.Window)
	}

	text := fmt.Sprintf("legion: rule %s denies: %s", describeRule(e.Rule, e.RuleIndex), strings.Join(violations, ", "))
	if e.RetryAfter > 0 {
		text += fmt.Sprintf("; retry after %s", e.RetryAfter)
	}

	return text
}

// Unwrap makes the error [ErrExceeded].
func (*ExceededError) Unwrap() error { return fault.ErrExceeded }

func describe(violation Quota, window time.Duration) string {
	switch violation.Limit {
	case LimitAgents:
		if violation.Max == 0 {
			return "0 agents allowed"
		}

		return fmt.Sprintf("at most %d agents start in %s", violation.Max, window)
	case LimitRunningAgents:
		return fmt.Sprintf("at most %d agents run at once", violation.Max)
	default:
		used := fmt.Sprintf("%d of %d %s used in %s", violation.Used, violation.Max, violation.Limit, window)
		if violation.Requested > 0 {
			used += fmt.Sprintf(", and %d more to be reserved", violation.Requested)
		}

		return used
	}
}

func describeRule(rule Rule, index int) string {
	group := "everyone"
	if len(rule.Identity) > 0 {
		group = strings.Join(slices.Sorted(maps.Keys(rule.Identity)), ", ")
	}

	if rule.Name != "" {
		return fmt.Sprintf("%q (%s)", rule.Name, group)
	}

	return fmt.Sprintf("%d (%s)", index+1, group)
}
