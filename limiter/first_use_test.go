package limiter_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/internal/testhook"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// firstCalls are 20 calls under rules on identities that were never seen, each for an
// agent of its own. Every rule allows one agent.
func firstCalls(change func(i int, call *concurrentOperation), identities ...string) []concurrentOperation {
	calls := make([]concurrentOperation, 20)

	for i := range calls {
		admission := concurrentAdmission{Agent: fmt.Sprintf("agent %d", i)}

		for _, fields := range identities {
			admission.Rules = append(admission.Rules, atMost(fields, 1))
		}

		calls[i].Admissions = []concurrentAdmission{admission}
		change(i, &calls[i])
	}

	return calls
}

func plainFirstCall(int, *concurrentOperation) {}

func nestedFirstCall(_ int, call *concurrentOperation) {
	call.Nested, call.Hold = true, 2*time.Millisecond
}

// mixedFirstCall gives the calls the six orders of three rules.
func mixedFirstCall(i int, call *concurrentOperation) {
	rules := call.Admissions[0].Rules
	orders := [][3]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}}
	order := orders[i%len(orders)]
	call.Admissions[0].Rules = []concurrentRule{rules[order[0]], rules[order[1]], rules[order[2]]}
}

func spelledFirstCall(i int, call *concurrentOperation) { call.Decimal = i%2 == 0 }

func anyFirstCall(i int, call *concurrentOperation) {
	mixedFirstCall(i, call)
	spelledFirstCall(i, call)

	if i%3 == 0 {
		nestedFirstCall(i, call)
	}
}

func TestOneOfTwentyConcurrentFirstCallsPasses(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		calls []concurrentOperation

		// run makes the calls. Nil: this process does, each on a pool of its own.
		run func(t *testing.T, db *gorm.DB, calls []concurrentOperation) []concurrentOutcome

		// withoutRegistry leaves it to the calls to make the registry's table.
		withoutRegistry bool
	}{
		"transactions of their own":           {calls: firstCalls(plainFirstCall, "a")},
		"on one pool":                         {calls: firstCalls(plainFirstCall, "a"), run: onOnePool},
		"inside callers' transactions":        {calls: firstCalls(nestedFirstCall, "a")},
		"under everyone":                      {calls: firstCalls(plainFirstCall, "")},
		"under everyone inside transactions":  {calls: firstCalls(nestedFirstCall, "")},
		"rules in mixed order":                {calls: firstCalls(mixedFirstCall, "a", "b", "ab")},
		"1 and 1.0":                           {calls: firstCalls(spelledFirstCall, "ab")},
		"from two processes":                  {calls: firstCalls(plainFirstCall, "a"), run: fromTwoProcesses},
		"all of it":                           {calls: firstCalls(anyFirstCall, "a", "ab", "abc"), run: fromTwoProcesses},
		"all of it, with everyone":            {calls: firstCalls(anyFirstCall, "", "b", "ab")},
		"before there is a registry":          {calls: firstCalls(plainFirstCall, "a"), withoutRegistry: true},
		"inside them, before there is one":    {calls: firstCalls(nestedFirstCall, "a"), withoutRegistry: true},
		"all of it, before there is one":      {calls: firstCalls(anyFirstCall, "", "b", "ab"), withoutRegistry: true},
		"from two processes, before there is": {calls: firstCalls(nestedFirstCall, "a"), run: fromTwoProcesses, withoutRegistry: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			waitToBeWide(t)

			db := setupBare(t)

			if !test.withoutRegistry {
				require.NoError(t, db.AutoMigrate(&models.LegionIdentity{}))
			}

			if test.run == nil {
				test.run = onPoolsOfTheirOwn
			}

			requireOneAdmitted(t, db, test.calls, test.run(t, db, test.calls))
			require.Zero(t, concurrentDeadlocks(t, pgtest.DSN(db), db))
		})
	}
}

func onOnePool(t *testing.T, db *gorm.DB, calls []concurrentOperation) []concurrentOutcome {
	t.Helper()

	return runConcurrently(t.Context(), []*gorm.DB{db}, calls, testhook.Hooks{}, time.Now())
}

func onPoolsOfTheirOwn(t *testing.T, db *gorm.DB, calls []concurrentOperation) []concurrentOutcome {
	t.Helper()

	pools := concurrentPools(t, pgtest.DSN(db), len(calls))
	outcomes := runConcurrently(t.Context(), pools, calls, testhook.Hooks{}, time.Now())
	closeConcurrentPools(t, pools...)

	return outcomes
}

func fromTwoProcesses(t *testing.T, db *gorm.DB, calls []concurrentOperation) []concurrentOutcome {
	t.Helper()

	processes := startConcurrentProcesses(t, pgtest.DSN(db))
	outcomes := processes.run(t, calls, time.Now())
	processes.stop(t)

	return outcomes
}

// requireOneAdmitted is for calls whose rules each allow one agent.
func requireOneAdmitted(t *testing.T, db *gorm.DB, calls []concurrentOperation, outcomes []concurrentOutcome) {
	t.Helper()

	var admitted []string

	for i, outcome := range outcomes {
		require.Empty(t, outcome.Failure, "%s", calls[i])

		if outcome.Denied == concurrentAdmitted {
			admitted = append(admitted, calls[i].Admissions[0].Agent)
		} else {
			require.Zero(t, outcome.Denied, "every rule of %s is violated, so the first denies", calls[i])
		}
	}

	require.Len(t, admitted, 1)
	require.Equal(t, admitted, agentIDs(t, db))
	require.Equal(t, concurrentState{admitted[0]: {fields: calls[0].Admissions[0].merged()}}, readConcurrentState(t, db))

	var identities []string
	for _, rule := range calls[0].Admissions[0].Rules {
		identities = append(identities, rule.Fields)
	}

	require.ElementsMatch(t, identities, concurrentRegistry(t, db), "each identity is registered once")
}

// concurrentRegistry are the identities of the registry, as letters.
func concurrentRegistry(t *testing.T, db *gorm.DB) []string {
	t.Helper()

	var identities []string

	require.NoError(t, db.Raw(`SELECT coalesce((SELECT string_agg(name, '' ORDER BY name) FROM jsonb_object_keys(identity) AS name), '')
FROM legion_agents_identities`).Scan(&identities).Error)

	return identities
}

func TestAFirstUseThatIsDeniedRegistersNothing(t *testing.T) {
	t.Parallel()

	for name, prepare := range map[string]func(*concurrentCall) *concurrentCall{
		"transaction of its own":        func(call *concurrentCall) *concurrentCall { return call },
		"inside a caller's transaction": (*concurrentCall).nested,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			scene := newConcurrentScene(t, "ab")
			scene.call("x", atMost("ab", 3)).start().admitted()

			call := prepare(scene.call("y", atMost("c", 3), atMost("a", 1))).start().denied(1)
			if call.operation.Nested {
				call.commit()
			}

			require.Equal(t, []string{"ab"}, concurrentRegistry(t, scene.db))
		})
	}
}

// While a first use waits for a field, nobody waits for it on another.
func TestAFirstUseThatWaitsHoldsNoLock(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "ab", "z")

	busy := scene.call("busy", atMost("ab", 3)).nested().start().admitted()
	first := scene.call("first", atMost("z", 3), atMost("a", 3)).start()
	first.waits()

	waiters := concurrentWaiters(t, scene.db)
	require.Len(t, waiters, 1)

	var locks []string

	require.NoError(t, scene.db.Raw(`SELECT locktype || ' ' || mode || CASE WHEN granted THEN '' ELSE ' waited for' END
FROM pg_locks WHERE pid = ? AND locktype <> 'virtualxid'`, waiters[0]).Scan(&locks).Error)
	require.Equal(t, []string{"advisory ExclusiveLock waited for"}, locks)

	scene.call("other", atMost("z", 3)).start().admitted()

	busy.commit()
	first.admitted()
	scene.requireSerial()
}

// In a caller's transaction the exclusive lock is tried for on top of the shared ones.
// If the field is busy, all are given back and waited for in order, in their stronger
// modes.
func TestAFirstUseInsideATransactionWaitsForABusyField(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		end     func(*concurrentCall)
		verdict func(*concurrentCall)
	}{
		"and counts who commits":          {end: (*concurrentCall).commit, verdict: func(c *concurrentCall) { c.denied(1) }},
		"and counts nobody who is undone": {end: (*concurrentCall).rollback, verdict: func(c *concurrentCall) { c.admitted() }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			scene := newConcurrentScene(t, "ab", "z")

			busy := scene.call("busy", atMost("ab", 3)).nested().start().admitted()
			first := scene.call("first", atMost("z", 3), atMost("a", 1)).nested().start()
			first.waits()

			// It has given back the identity that it had locked before.
			scene.call("other", atMost("z", 3)).start().admitted()

			test.end(busy)
			test.verdict(first)
			first.commit()
			scene.requireSerial()
		})
	}
}

func TestSeveralIdentitiesAreFirstUsedAtOnce(t *testing.T) {
	t.Parallel()

	rules := []concurrentRule{atMost("", 5), atMost("a", 5), atMost("b", 5), atMost("ab", 5)}
	identities := []string{"", "a", "b", "ab"}

	t.Run("transaction of its own", func(t *testing.T) {
		t.Parallel()

		scene := newConcurrentScene(t)
		scene.call("x", rules...).start().admitted()
		require.ElementsMatch(t, identities, concurrentRegistry(t, scene.db))
	})

	t.Run("inside a caller's transaction", func(t *testing.T) {
		t.Parallel()

		scene := newConcurrentScene(t)
		scene.call("x", rules...).nested().start().admitted().commit()
		require.ElementsMatch(t, identities, concurrentRegistry(t, scene.db))
	})

	t.Run("while all their fields are busy", func(t *testing.T) {
		t.Parallel()

		scene := newConcurrentScene(t, "ac", "bc")
		busy := []*concurrentCall{
			scene.call("busy a", atMost("ac", 3)).nested().start().admitted(),
			scene.call("busy b", atMost("bc", 3)).nested().start().admitted(),
		}
		inside := scene.call("inside", rules...).nested().start()
		inside.waits()

		own := scene.call("own", rules...).start()
		own.waits(inside)

		for _, call := range busy {
			call.commit()
		}

		inside.admitted().commit()
		own.admitted()
		scene.requireSerial()
		require.ElementsMatch(t, append([]string{"ac", "bc"}, identities...), concurrentRegistry(t, scene.db))
	})
}

// A call that starts again has lost what it had registered before, and must not forget
// it for what it finds missing now.
func TestAFirstUseRemembersWhatItHasToRegister(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "b")
	passes := 0
	call := scene.call("x", atMost("a", 1), atMost("b", 1)).nested()
	call.atPoint = func(point testhook.Point) {
		if point != testhook.FieldLocks {
			return
		}

		// In the first pass {a} is missing. Then {b} is pruned.
		passes++
		if passes == 2 {
			require.Equal(t, 1, pruneConcurrentIdentity(t, scene.db, "b"))
		}
	}

	call.start().admitted().commit()
	require.Equal(t, 3, passes)
	require.ElementsMatch(t, []string{"a", "b"}, concurrentRegistry(t, scene.db))
}

// pruneConcurrentIdentity deletes it from the registry if nobody has it locked.
func pruneConcurrentIdentity(t *testing.T, db *gorm.DB, fields string) int {
	t.Helper()

	text := "{" + strings.Join(strings.Split(fields, ""), `": 1, "`) + `": 1}`
	text = strings.Replace(text, "{", `{"`, 1)
	result := db.Exec(`DELETE FROM legion_agents_identities WHERE identity =
(SELECT identity FROM legion_agents_identities WHERE identity = ?::jsonb FOR UPDATE SKIP LOCKED)`, text)
	require.NoError(t, result.Error)

	return int(result.RowsAffected)
}

// A pruner that is faster than the call every time cannot keep it going for ever.
func TestAFirstUseGivesUpWhenItIsPrunedEveryTime(t *testing.T) {
	t.Parallel()

	t.Run("transaction of its own", func(t *testing.T) {
		t.Parallel()

		scene := newConcurrentScene(t)
		passes := 0
		call := scene.call("x", atMost("a", 1))
		call.atPoint = func(point testhook.Point) {
			if point == testhook.FieldLocks {
				passes++

				pruneConcurrentIdentity(t, scene.db, "a")
			}
		}

		requireConcurrentContention(t, call.start().wait().err)
		require.Equal(t, 10, passes)
		require.Empty(t, readConcurrentState(t, scene.db))
	})

	t.Run("inside a caller's transaction", func(t *testing.T) {
		t.Parallel()

		scene := newConcurrentScene(t, "z")
		passes := 0
		call := scene.call("x", atMost("z", 1), atMost("a", 1)).nested()

		// Somebody registers {a} right before the call would, and prunes it right after.
		call.atPoint = func(point testhook.Point) {
			if point == testhook.FieldLocks {
				passes++

				require.NoError(t, scene.db.Exec(`INSERT INTO legion_agents_identities VALUES ('{"a": 1}') ON CONFLICT DO NOTHING`).Error)
			}
		}

		require.NoError(t, scene.db.Callback().Row().Before("gorm:row").Register("prune", func(tx *gorm.DB) {
			if _, locks := tx.Statement.Clauses["FOR"]; locks {
				require.Equal(t, 1, pruneConcurrentIdentity(t, scene.db.Session(&gorm.Session{NewDB: true}), "a"))
			}
		}))

		requireConcurrentContention(t, call.start().wait().err)
		require.Equal(t, 10, passes)
		require.NoError(t, scene.db.Callback().Row().Remove("prune"))

		// The transaction is usable, and its locks are free.
		scene.call("y", atMost("z", 1)).start().admitted()
		require.NoError(t, limiter.Enforce(call.tx, "x", atMost("a", 1).rule(false)))
		require.NoError(t, call.tx.Commit().Error)
	})
}

func requireConcurrentContention(t *testing.T, err error) {
	t.Helper()

	require.ErrorIs(t, err, limiter.ErrContention)
	require.True(t, limiter.Retryable(err))
}

// An application may call before the migration of its next version has committed.
func TestAFirstUseWaitsForTheMigrationThatMakesTheRegistry(t *testing.T) {
	t.Parallel()

	for name, inside := range map[string]bool{"transaction of its own": false, "inside a caller's transaction": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setupBare(t)
			migration := begin(t, db)
			require.NoError(t, migration.AutoMigrate(&models.LegionIdentity{}))

			enforced := make(chan error, 1)

			go func() {
				enforce := func(tx *gorm.DB) error { return limiter.Enforce(tx, "x", atMost("a", 1).rule(false)) }

				if inside {
					enforced <- db.Transaction(enforce)
				} else {
					enforced <- enforce(db)
				}
			}()

			concurrentEventually(t, func() bool { return len(concurrentWaiters(t, db)) == 1 })
			require.NoError(t, migration.Commit().Error)
			require.NoError(t, <-enforced)
			require.Equal(t, []string{"x"}, agentIDs(t, db))
		})
	}
}
