package limiter

import (
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
)

// A Report says how the rules of an agent stand. It is [Check]'s answer.
type Report struct {
	// Allowed says that an Enforce would have admitted the agent at that moment.
	Allowed bool

	// RetryAfter is the shortest wait after which it would be admitted if nothing else
	// happened. Zero: it is allowed, or never will be, because a limit is 0.
	RetryAfter time.Duration

	// Rules are the rules of the call in its order. Unlike those of a [Decision], their
	// figures are what is used without the admission, and exact.
	Rules []RuleState
}

// Check says whether the agent would be admitted under the rules, how much of each
// limit is used, and when it will be free again. It measures all rules at one moment,
// takes no locks and writes nothing, so that by the time it returns others may have used
// what is left: it is for showing, [Enforce] is for deciding.
//
// The empty agentID stands for an agent that has never been admitted.
//
// Check joins the transaction that db is in, at any isolation level. Otherwise it reads
// in one of its own, from the primary where a plugin such as dbresolver has replicas.
//
// Errors: [ErrInvalidRule], [ErrInvalidAgentID], [ErrNotMigrated], [ErrNoConnection],
// and the database's.
func Check(db *gorm.DB, agentID string, rules ...Rule) (*Report, error) {
	call, err := newCheck(db, agentID, rules)
	if err != nil {
		return nil, err
	}

	var report *Report

	check := func(tx *gorm.DB) error {
		forecasts, err := call.forecastLimits(tx, call.requests[0])
		report = newReport(call.requests[0], forecasts)

		return err
	}

	if database.InTransaction(call.db) {
		err = database.InSavepoint(call.db, func(*database.Savepoint) error { return check(call.db) })
	} else {
		err = database.Transaction(call.db, call.settings.ConnectionTimeout, func(tx *gorm.DB) error {
			if err := check(tx); err != nil {
				return err
			}

			return database.ErrRollback
		})
	}

	if err != nil {
		return nil, err
	}

	return report, nil
}

// newCheck is newCall for an agent that may have no ID.
func newCheck(db *gorm.DB, agentID string, rules []Rule) (*call, error) {
	const valid = "-"

	admission := Admission{AgentID: agentID, Rules: rules}
	if agentID == "" {
		admission.AgentID = valid
	}

	call, err := newCall(db, []Admission{admission}, nil)
	if err != nil {
		return nil, err
	}

	call.requests[0].agentID = agentID // no row has an empty one

	return call, nil
}

func newReport(request *request, forecasts [][]quotaForecast) *Report {
	report := &Report{Allowed: true, Rules: make([]RuleState, len(request.rules))}
	never := false

	for i, rule := range request.rules {
		state := RuleState{Rule: rule.Rule, Quotas: rule.Policy.quotas(Usage{})}

		for j, forecast := range forecasts[i] {
			quota := &state.Quotas[j]
			quota.Used, quota.ResetAfter = forecast.used, forecast.resetAfter
			state.Usage.set(quota.Limit, forecast.used)

			if quota.Max == 0 || forecast.blockedFor > 0 {
				report.Allowed = false
			}

			never = never || quota.Max == 0
			report.RetryAfter = max(report.RetryAfter, forecast.blockedFor)
		}

		report.Rules[i] = state
	}

	if never {
		report.RetryAfter = 0
	}

	return report
}
