package limiter_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/internal/testhook"
	"github.com/legion-gorm/legion/limiter"
)

// The concurrency tests describe calls by values that can be printed, replayed, sent
// to another process and judged by a model. The fields of an identity are letters, all
// with the value 1: "ab" is {"a": 1, "b": 1}, and "" is everyone.

// concurrentUnlimited is the limit that a rule does not set.
const concurrentUnlimited = -1

// concurrentPatience bounds every wait: what has not happened by then never will.
const concurrentPatience = time.Minute

type concurrentRule struct {
	Fields  string `json:"fields"`
	Agents  int64  `json:"agents"`
	Running int64  `json:"running"`
}

// atMost is a rule that allows so many agents.
func atMost(fields string, agents int64) concurrentRule {
	return concurrentRule{Fields: fields, Agents: agents, Running: concurrentUnlimited}
}

// runningAtMost is a rule that allows so many running agents.
func runningAtMost(fields string, running int64) concurrentRule {
	return concurrentRule{Fields: fields, Agents: concurrentUnlimited, Running: running}
}

// concurrentIdentity is the identity of the letters. Its numbers are written as 1.0 or
// as 1, which are one value.
func concurrentIdentity(fields string, decimal bool) limiter.Identity {
	identity := limiter.Identity{}

	for _, letter := range fields {
		if decimal {
			identity[string(letter)] = json.Number("1.0")
		} else {
			identity[string(letter)] = 1
		}
	}

	return identity
}

func (r concurrentRule) rule(decimal bool) limiter.Rule {
	policy := limiter.Policy{Window: window}

	if r.Agents != concurrentUnlimited {
		policy.MaxAgents = limiter.Max(r.Agents)
	}

	if r.Running != concurrentUnlimited {
		policy.MaxRunningAgents = limiter.Max(r.Running)
	}

	return limiter.Rule{Identity: concurrentIdentity(r.Fields, decimal), Policy: policy}
}

func (r concurrentRule) String() string {
	text := "{" + r.Fields + "}"
	if r.Agents != concurrentUnlimited {
		text += fmt.Sprintf("<=%d", r.Agents)
	}

	if r.Running != concurrentUnlimited {
		text += fmt.Sprintf(" running<=%d", r.Running)
	}

	return text
}

// A concurrentAdmission is an agent and the rules that it asks to be admitted under.
type concurrentAdmission struct {
	Agent string           `json:"agent"`
	Rules []concurrentRule `json:"rules"`
}

// merged are the fields that the agent is recorded under.
func (a concurrentAdmission) merged() string {
	var letters []rune

	for _, rule := range a.Rules {
		letters = append(letters, []rune(rule.Fields)...)
	}

	slices.Sort(letters)

	return string(slices.Compact(letters))
}

func (a concurrentAdmission) limitsRunning() bool {
	return slices.ContainsFunc(a.Rules, func(rule concurrentRule) bool { return rule.Running != concurrentUnlimited })
}

// A concurrentOperation is one call, or one transaction of a caller with a call in it.
type concurrentOperation struct {
	// Admissions are those of Enforce, or of EnforceAll.
	Admissions []concurrentAdmission `json:"admissions,omitempty"`

	// Release is the agent of a call of Release, which has no admissions.
	Release string `json:"release,omitempty"`

	// Decimal writes numbers as 1.0.
	Decimal bool `json:"decimal,omitempty"`

	// Nested makes the call in a caller's transaction, which commits after Hold, or
	// rolls back if Undo says so.
	Nested bool          `json:"nested,omitempty"`
	Undo   bool          `json:"undo,omitempty"`
	Hold   time.Duration `json:"hold,omitempty"`

	// ByFunction lets the server's function decide, if the database has it. There are no
	// points in it at which to pause.
	ByFunction bool `json:"by_function,omitempty"`

	// Start is waited before the call, and Pauses at the points of its protocol.
	Start  time.Duration                    `json:"start,omitempty"`
	Pauses map[testhook.Point]time.Duration `json:"pauses,omitempty"`
}

func (o concurrentOperation) checksEveryone() bool {
	return slices.ContainsFunc(o.Admissions, func(admission concurrentAdmission) bool {
		return slices.ContainsFunc(admission.Rules, func(rule concurrentRule) bool { return rule.Fields == "" })
	})
}

func (o concurrentOperation) admits(agent string) bool {
	return slices.ContainsFunc(o.Admissions, func(admission concurrentAdmission) bool { return admission.Agent == agent })
}

func (o concurrentOperation) String() string {
	text := o.Release + " released"

	if o.Release == "" {
		text = fmt.Sprint(o.Admissions)
	}

	if o.Nested {
		text += fmt.Sprintf(" in a caller's transaction, undone: %t", o.Undo)
	}

	return text
}

// call makes the call itself.
func (o concurrentOperation) call(db *gorm.DB) error {
	if o.Release != "" {
		return limiter.Release(db, o.Release)
	}

	admissions := make([]limiter.Admission, len(o.Admissions))

	for i, admission := range o.Admissions {
		admissions[i].AgentID = admission.Agent

		for _, rule := range admission.Rules {
			admissions[i].Rules = append(admissions[i].Rules, rule.rule(o.Decimal))
		}
	}

	if len(admissions) == 1 {
		return limiter.Enforce(db, admissions[0].AgentID, admissions[0].Rules...)
	}

	return limiter.EnforceAll(db, admissions...)
}

// concurrentAdmitted is what stands for the position of the rule that denied, where
// none did.
const concurrentAdmitted = -1

// A concurrentOutcome is what a call came to, and when by a monotonic clock, in
// nanoseconds.
type concurrentOutcome struct {
	// Denied is the position of the rule that denied.
	Denied int `json:"denied"`

	// NotFound is a Release of an agent that has no row.
	NotFound bool `json:"not_found,omitempty"`

	// Failure is any error that is no answer.
	Failure string `json:"failure,omitempty"`

	// Call and Return span everything, the caller's transaction included. Verdict is
	// when Enforce returned.
	Call    int64 `json:"call"`
	Verdict int64 `json:"verdict"`
	Return  int64 `json:"return"`
}

func (o concurrentOutcome) String() string {
	verdict := "admitted"

	switch {
	case o.Failure != "":
		verdict = o.Failure
	case o.NotFound:
		verdict = "not found"
	case o.Denied != concurrentAdmitted:
		verdict = fmt.Sprintf("denied by rule %d", o.Denied)
	}

	return fmt.Sprintf("%s [%d to %d to %d]", verdict, o.Call, o.Verdict, o.Return)
}

// answer reads the verdict from the error of a call.
func (o *concurrentOutcome) answer(err error) {
	var exceeded *limiter.ExceededError

	o.Denied = concurrentAdmitted

	switch {
	case err == nil:
	case errors.As(err, &exceeded):
		o.Denied = exceeded.RuleIndex
	case errors.Is(err, limiter.ErrNotFound):
		o.NotFound = true
	default:
		o.Failure = err.Error()
	}
}

var errConcurrentUndo = errors.New("the caller rolls back")

// run makes the call where and when it is to be made, and measures its time from begun
// on.
func (o concurrentOperation) run(ctx context.Context, db *gorm.DB, hooks testhook.Hooks, begun time.Time) (outcome concurrentOutcome) {
	if !o.ByFunction {
		hooks.At = func(point testhook.Point) { concurrentSleep(o.Pauses[point]) }
		ctx = testhook.With(ctx, hooks)
	}

	db = db.WithContext(ctx)

	concurrentSleep(o.Start)

	call := func(db *gorm.DB) {
		outcome.answer(o.call(db))
		outcome.Verdict = time.Since(begun).Nanoseconds()
	}

	outcome.Call = time.Since(begun).Nanoseconds()

	if o.Nested {
		err := db.Transaction(func(tx *gorm.DB) error {
			call(tx)
			concurrentSleep(o.Hold)

			if o.Undo {
				return errConcurrentUndo
			}

			return nil
		})
		if err != nil && !errors.Is(err, errConcurrentUndo) {
			outcome.Failure = err.Error()
		}
	} else {
		call(db)
	}

	outcome.Return = time.Since(begun).Nanoseconds()

	return outcome
}

func concurrentSleep(duration time.Duration) {
	if duration > 0 {
		time.Sleep(duration)
	}
}

// concurrentWide lets two tests at a time open many connections, so that a machine with
// many cores does not use up those of the server.
var concurrentWide = make(chan struct{}, 2)

// waitToBeWide is for tests that open many connections. It comes first, so that they
// are closed before the next test may go on.
func waitToBeWide(t *testing.T) {
	t.Helper()

	concurrentWide <- struct{}{}

	t.Cleanup(func() { <-concurrentWide })
}

// concurrentPools opens a pool of one connection for each of so many workers. Calls
// that share a pool queue in memory for their identities, so that most of them would
// never meet in the database.
func concurrentPools(t *testing.T, dsn string, count int) []*gorm.DB {
	t.Helper()

	pools := make([]*gorm.DB, count)
	for i := range pools {
		pools[i] = pgtest.OpenDSN(t, dsn, pgtest.MaxOpenConnections(1))
	}

	return pools
}

// runConcurrently makes all calls at once, each on a pool of its own.
func runConcurrently(
	ctx context.Context, pools []*gorm.DB, operations []concurrentOperation, hooks testhook.Hooks, begun time.Time,
) []concurrentOutcome {
	outcomes := make([]concurrentOutcome, len(operations))

	var running sync.WaitGroup

	for i, operation := range operations {
		running.Go(func() { outcomes[i] = operation.run(ctx, pools[i%len(pools)], hooks, begun) })
	}

	running.Wait()

	return outcomes
}

// concurrentDeadlocks closes the pools and counts the deadlocks that the database has
// had, also those that a retry has hidden. A server process reports them at its end at
// the latest.
func concurrentDeadlocks(t *testing.T, dsn string, pools ...*gorm.DB) (deadlocks int) {
	t.Helper()

	closeConcurrentPools(t, pools...)

	observer := pgtest.OpenDSN(t, dsn, pgtest.MaxOpenConnections(1))

	concurrentEventually(t, func() bool {
		var others int

		require.NoError(t, observer.Raw(`SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()`).Scan(&others).Error)

		return others == 0
	})

	require.NoError(t, observer.Raw("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").Scan(&deadlocks).Error)

	return deadlocks
}

func closeConcurrentPools(t *testing.T, pools ...*gorm.DB) {
	t.Helper()

	for _, db := range pools {
		pool, err := db.DB()
		require.NoError(t, err)
		require.NoError(t, pool.Close())
	}
}

// concurrentEventually waits until it is so. It asks on the goroutine of the test, so
// that the question may end the test.
func concurrentEventually(t *testing.T, so func() bool) {
	t.Helper()

	for begun := time.Now(); !so(); time.Sleep(time.Millisecond) {
		require.Less(t, time.Since(begun), concurrentPatience, "it does not come to that")
	}
}

// concurrentCount multiplies the number of rounds by LEGION_TEST_COUNT.
func concurrentCount(t *testing.T, rounds int) int {
	t.Helper()

	text := os.Getenv("LEGION_TEST_COUNT")
	if text == "" {
		return rounds
	}

	factor, err := strconv.Atoi(text)
	require.NoError(t, err, "LEGION_TEST_COUNT is a whole number")

	return rounds * factor
}

// isConcurrentDeadlock reports whether the error is PostgreSQL's 40P01.
func isConcurrentDeadlock(err error) bool {
	return database.HasCode(err, database.CodeDeadlockDetected)
}

// concurrentList prints one thing a line.
func concurrentList[T fmt.Stringer](things []T) string {
	lines := make([]string, len(things))
	for i, thing := range things {
		lines[i] = thing.String()
	}

	return strings.Join(lines, "\n")
}
