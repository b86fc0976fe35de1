package limiter_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/internal/testhook"
)

// The schedules of section "Why a verdict is exact" in locks.go. Each is run with the
// protocol and without the part of it that the schedule needs.

// The overlap: A and B share no rule, and each joins the other's group.
func TestCallsOnOverlappingGroupsFollowEachOther(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "i", "t", "it")

	a := scene.call("a", atMost("i", 1), atMost("t", 1)).pausing(testhook.Measured).start()
	b := scene.call("b", atMost("it", 1)).start()
	b.waits()

	a.resume().admitted()
	b.denied(0)
	scene.requireSerial()
}

func TestWithOwnIdentitiesOnlyOverlappingGroupsAreOverfilled(t *testing.T) {
	t.Parallel()

	hooks := testhook.Hooks{OwnIdentitiesOnly: true}
	scene := newConcurrentScene(t, "i", "t", "it")

	a := scene.call("a", atMost("i", 1), atMost("t", 1)).with(hooks).pausing(testhook.Measured).start()
	scene.call("b", atMost("it", 1)).with(hooks).start().admitted()
	a.resume().admitted()
	scene.requireFault()
}

// The same without any lock, where even two calls under one rule pass.
func TestWithoutLocksAGroupIsOverfilled(t *testing.T) {
	t.Parallel()

	hooks := testhook.Hooks{WithoutLocks: true}
	scene := newConcurrentScene(t, "i")

	a := scene.call("a", atMost("i", 1)).with(hooks).pausing(testhook.Measured).start()
	scene.call("b", atMost("i", 1)).with(hooks).start().admitted()
	a.resume().admitted()
	scene.requireFault()
}

// The pair with Everyone: B has looked up what to lock before E's first use of {a}
// registers it, and joins {a}.
func TestAFirstUseWaitsForCallsThatJoinItsGroup(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "", "ab")

	b := scene.call("b", atMost("", 1), atMost("ab", 3)).pausing(testhook.Measured).start()
	e := scene.call("e", atMost("a", 1)).start()
	e.waits()

	b.resume().admitted()
	e.denied(0)
	scene.requireSerial()
}

func TestWithoutFieldLocksAFirstUseOverlooksWhoJoinsItsGroup(t *testing.T) {
	t.Parallel()

	hooks := testhook.Hooks{WithoutFieldLocks: true}
	scene := newConcurrentScene(t, "", "ab")

	b := scene.call("b", atMost("", 1), atMost("ab", 3)).with(hooks).pausing(testhook.Measured).start()
	scene.call("e", atMost("a", 1)).with(hooks).start().admitted()
	b.resume().admitted()
	scene.requireFault()
}

// The cycle of three: each joins the group that the one before it checks. W's first use
// of {b} comes while X, which joins {b}, is under way, and Y's turn is after X and
// before W's end.
func TestACycleOfThreeFirstUsesHasAnOrder(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "a", "ab", "bc", "ac")

	x := scene.call("x", atMost("a", 1), atMost("ab", 3)).pausing(testhook.Measured).start()
	w := scene.call("w", atMost("b", 1), atMost("bc", 3)).start()
	w.waits()

	x.resume().admitted()
	w.denied(0)
	scene.call("y", atMost("c", 1), atMost("ac", 3)).start().admitted()
	scene.requireSerial()
}

func TestWithoutFieldLocksACycleOfThreeFirstUsesHasNoOrder(t *testing.T) {
	t.Parallel()

	hooks := testhook.Hooks{WithoutFieldLocks: true}
	scene := newConcurrentScene(t, "a", "ab", "bc", "ac")

	x := scene.call("x", atMost("a", 1), atMost("ab", 3)).with(hooks).pausing(testhook.Measured).start()
	w := scene.call("w", atMost("b", 1), atMost("bc", 3)).with(hooks).pausing(testhook.Recorded).start()
	x.resume().admitted()
	scene.call("y", atMost("c", 1), atMost("ac", 3)).with(hooks).start().admitted()
	w.resume().admitted()
	scene.requireFault()
}

// Two calls for one agent: the first stands at its count of everyone, since Y, which
// came after that count, would have made it too many. So the second, which came after
// Y, must have the last word.
func TestCallsForOneAgentFollowEachOther(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "", "a", "b", "c")

	first := scene.call("x", atMost("", 1), atMost("a", 3)).pausing(testhook.Measured).start()
	scene.call("y", atMost("b", 3)).start().admitted()

	second := scene.call("x", atMost("c", 3)).start()
	second.waits()

	first.resume().admitted()
	second.admitted()
	scene.requireSerial()
	require.Equal(t, "c", readConcurrentState(t, scene.db)["x"].fields)
}

func TestWithoutTheAgentLockCallsForOneAgentAreReordered(t *testing.T) {
	t.Parallel()

	hooks := testhook.Hooks{WithoutAgentLock: true}
	scene := newConcurrentScene(t, "", "a", "b", "c")

	first := scene.call("x", atMost("", 1), atMost("a", 3)).with(hooks).pausing(testhook.Measured).start()
	scene.call("y", atMost("b", 3)).with(hooks).start().admitted()
	scene.call("x", atMost("c", 3)).with(hooks).start().admitted()
	first.resume().admitted()
	scene.requireFault()
	require.Equal(t, "a", readConcurrentState(t, scene.db)["x"].fields)
}

// A first use is registered in a transaction that is over before the admission, so that
// a field which it has in common with others is free again. {n} alone would do, but the
// first field of {a,n} is the one that is tried first.
func TestAFirstUseDoesNotBlockTheOtherCallsOnItsFields(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "au")

	first := scene.call("first", atMost("an", 1)).pausing(testhook.Recorded).start()
	scene.call("other", atMost("au", 1)).start().admitted()
	first.resume().admitted()
	scene.requireSerial()
}

func TestRegisteringInsideTheAdmissionBlocksTheOtherCallsOnItsFields(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "au")

	first := scene.call("first", atMost("an", 1)).with(testhook.Hooks{RegisterInside: true}).pausing(testhook.Recorded).start()
	other := scene.call("other", atMost("au", 1)).start()
	other.waits()

	first.resume().admitted()
	other.admitted()
	scene.requireSerial()
}

// Two calls want the same identities, and have both begun to take them when the one
// that they wait for is free again.
func TestIdentityLocksAreTakenInOneOrder(t *testing.T) {
	t.Parallel()

	require.Zero(t, lockingDeadlocks(t, 20, testhook.Hooks{}))
}

func TestUnsortedIdentityLocksDeadlock(t *testing.T) {
	t.Parallel()

	require.NotZero(t, lockingDeadlocks(t, 100, testhook.Hooks{Unsorted: true}))
}

// lockingDeadlocks returns the number of the try that deadlocked, or 0.
func lockingDeadlocks(t *testing.T, tries int, hooks testhook.Hooks) int {
	t.Helper()

	scene := newConcurrentScene(t, "a", "b", "c", "ab", "ac", "bc", "abc")
	pools := concurrentPools(t, pgtest.DSN(scene.db), 2)

	// In transactions of callers, which are not run again.
	calls := []concurrentOperation{
		{Admissions: []concurrentAdmission{{"x", []concurrentRule{atMost("abc", 3)}}}, Nested: true},
		{Admissions: []concurrentAdmission{{"y", []concurrentRule{atMost("abc", 3)}}}, Nested: true},
	}

	for try := range tries {
		holder := begin(t, scene.db)
		require.NoError(t, holder.Exec(`SELECT FROM legion_agents_identities WHERE identity = '{"b": 1}' FOR UPDATE`).Error)

		ended := make(chan []concurrentOutcome, 1)

		go func() { ended <- runConcurrently(t.Context(), pools, calls, hooks, scene.begun) }()

		concurrentEventually(t, func() bool { return len(concurrentWaiters(t, scene.db)) == len(calls) })
		require.NoError(t, holder.Commit().Error)

		for _, outcome := range <-ended {
			if strings.Contains(outcome.Failure, "40P01") {
				return 1 + try
			}
		}
	}

	return 0
}
