package limiter_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/internal/testhook"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// Schedules that were thought of to refute the argument in locks.go.

func TestADenialInATransactionFreesItsLocksAtOnce(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "a", "b")
	scene.call("x", atMost("a", 1)).start().admitted()

	denied := scene.call("y", atMost("b", 1), atMost("a", 1)).nested().start().denied(1)
	scene.call("z", atMost("a", 2), atMost("b", 1)).start().admitted()
	scene.call("y", atMost("a", 3)).start().admitted()
	denied.commit()
	scene.requireSerial()
}

func TestARollbackToASavepointOfTheCallersFreesTheLocks(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "a")
	tx := begin(t, scene.db)

	// The first use of {b} has registered it inside the transaction, under an exclusive
	// lock on its field.
	require.NoError(t, tx.SavePoint("callers").Error)
	require.NoError(t, limiter.Enforce(tx, "x", atMost("a", 1).rule(false), atMost("b", 1).rule(false)))
	require.NoError(t, tx.RollbackTo("callers").Error)

	scene.call("y", atMost("a", 1), atMost("b", 1)).start().admitted()
	requireDenied(t, limiter.Enforce(tx, "x", atMost("b", 1).rule(false)), limiter.LimitAgents)
	require.NoError(t, tx.Commit().Error)
	scene.requireSerial()
}

// The registration that the second waits for is undone, or is made.
func TestAFirstUseInsideATransactionIsOneWhenItCommits(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		end     func(*concurrentCall)
		verdict func(*concurrentCall)
	}{
		"commit":   {end: (*concurrentCall).commit, verdict: func(c *concurrentCall) { c.denied(0) }},
		"rollback": {end: (*concurrentCall).rollback, verdict: func(c *concurrentCall) { c.admitted() }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			scene := newConcurrentScene(t)
			first := scene.call("x", atMost("a", 1)).nested().start().admitted()
			second := scene.call("y", atMost("a", 1)).start()
			second.waits()

			test.end(first)
			test.verdict(second)
			scene.requireSerial()
			require.Equal(t, []string{"a"}, concurrentRegistry(t, scene.db))
		})
	}
}

// The identity is pruned while Y waits for its row, so that Y joins the group without a
// lock on it. The next to check the group registers it again, which waits for Y.
func TestAnIdentityThatIsPrunedUnderACallIsRegisteredAfterIt(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "", "a", "ab")

	pruner := begin(t, scene.db)
	require.NoError(t, pruner.Exec(`DELETE FROM legion_agents_identities WHERE identity = '{"a": 1}'`).Error)

	y := scene.call("y", atMost("", 1), atMost("ab", 3)).pausing(testhook.Measured)
	y.launch()
	y.waits()
	require.NoError(t, pruner.Commit().Error)
	y.reach()

	x := scene.call("x", atMost("a", 1)).start()
	x.waits()
	y.resume().admitted()
	x.denied(0)
	scene.requireSerial()
}

func TestAnIdentityInUseByACallIsNotPruned(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "a", "ab")
	call := scene.call("x", atMost("ab", 1)).pausing(testhook.Measured).start()
	require.Zero(t, pruneConcurrentIdentity(t, scene.db, "a"))
	require.Zero(t, pruneConcurrentIdentity(t, scene.db, "ab"))
	call.resume().admitted()
}

func TestAnAgentIsInItsOldGroupUntilItsMoveCommits(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "a", "b")
	scene.call("x", atMost("a", 1)).start().admitted()

	move := scene.call("x", atMost("b", 1)).nested().start().admitted()
	scene.call("y", atMost("a", 1)).start().denied(0)
	move.commit()
	scene.call("y", atMost("a", 1)).start().admitted()
	scene.requireSerial()
}

func TestACallThatWritesNothingIsOrderedWithOthersAllTheSame(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "a", "b")
	scene.call("x", atMost("a", 1)).start().admitted()

	again := scene.call("x", atMost("a", 1)).pausing(testhook.Recorded).start()
	move := scene.call("x", atMost("b", 1)).start()
	move.waits()

	other := scene.call("y", atMost("a", 1)).start()
	other.waits(move)

	again.resume().admitted()
	move.admitted()
	other.wait() // before the move or after it
	scene.requireSerial()
}

// Each has locked an identity that the other asks for next. PostgreSQL ends one, whose
// transaction can go on without that call.
func TestTwoCallsInOneTransactionCanDeadlockAndSaySo(t *testing.T) {
	t.Parallel()

	db := setup(t)
	rules := []limiter.Rule{atMost("a", 3).rule(false), atMost("b", 3).rule(false)}
	for i, rule := range rules {
		require.NoError(t, limiter.Enforce(db, fmt.Sprintf("forerunner %d", i), rule))
	}

	transactions := []*gorm.DB{begin(t, db), begin(t, db)}
	for i, tx := range transactions {
		require.NoError(t, limiter.Enforce(tx, fmt.Sprintf("first of %d", i), rules[i]))
	}

	failures := make(chan error, len(transactions))

	for i, tx := range transactions {
		go func() {
			err := limiter.Enforce(tx, fmt.Sprintf("second of %d", i), rules[1-i])
			failures <- errors.Join(err, tx.Commit().Error)
		}()
	}

	deadlock, other := <-failures, <-failures
	if deadlock == nil {
		deadlock, other = other, deadlock
	}

	require.NoError(t, other, "it passes once the other transaction has ended")
	require.True(t, isConcurrentDeadlock(deadlock), "%v", deadlock)
	require.True(t, limiter.Retryable(deadlock))
	require.Len(t, agentIDs(t, db), 2+3, "all but the call that failed")
}

// In one pass of locks the same is no deadlock.
func TestSeveralAgentsInOneCallDoNotDeadlock(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "a", "b")
	one, other := concurrentAdmission{"one", []concurrentRule{atMost("a", 3)}}, concurrentAdmission{"other", []concurrentRule{atMost("b", 3)}}
	third := concurrentAdmission{"third", []concurrentRule{atMost("b", 2)}}

	first := scene.prepare(concurrentOperation{Admissions: []concurrentAdmission{one, other}}).pausing(testhook.IdentityLocks).start()
	second := scene.prepare(concurrentOperation{Admissions: []concurrentAdmission{third, one}}).start()
	second.waits()

	first.resume().admitted()
	second.admitted()
	scene.requireSerial()
}

// Calls that check Everyone stand at their count. The three tests below show what
// follows from that, and no more: what others are told meanwhile is what has been
// committed.

func TestADenialSeesTheAgentWhereItWasBeforeACallThatStandsAtItsCount(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "", "a", "b", "c")
	scene.call("x", atMost("a", 3)).start().admitted()

	move := scene.call("x", atMost("", 1), atMost("b", 3)).pausing(testhook.Measured).start()
	scene.call("y", atMost("c", 3)).start().admitted() // so the move stands before it
	scene.call("z", atMost("a", 1)).start().denied(0)  // by x, which the move has not moved yet
	move.resume().admitted()
	scene.requireSerial()
}

func TestADenialNamesTheRuleThatIsViolatedInWhatIsCommitted(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "", "ab", "c")

	x := scene.call("x", atMost("", 1), atMost("ab", 3)).pausing(testhook.Measured).start()
	scene.call("y", atMost("c", 3)).start().admitted()
	scene.call("z", atMost("a", 1), atMost("c", 1)).start().denied(1) // though x, which stands before y, joins {a}
	x.resume().admitted()
	scene.requireSerial()
}

func TestASlotThatIsReleasedUnderACallThatStandsAtItsCountIsTakenAgain(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "", "a", "c")
	scene.call("x", runningAtMost("a", 3)).start().admitted()

	x := scene.call("x", atMost("", 1), runningAtMost("a", 3)).pausing(testhook.Measured).start()
	scene.call("y", atMost("c", 3)).start().admitted()
	scene.release("x").start().admitted()
	x.resume().admitted()
	scene.requireSerial()
	require.True(t, readConcurrentState(t, scene.db)["x"].slot)
}

// Of several agents in one call each is measured at a moment of its own. Only Everyone,
// whose group others join in between, shows it: there is no moment at which both agents
// could have been admitted.
func TestSeveralAgentsInOneCallAreMeasuredOneAfterTheOther(t *testing.T) {
	t.Parallel()

	scene := newConcurrentScene(t, "", "a", "b", "c")
	scene.call("x", atMost("a", 3)).start().admitted()

	several := scene.prepare(concurrentOperation{Admissions: []concurrentAdmission{
		{"first", []concurrentRule{atMost("", 2)}},
		{"second", []concurrentRule{atMost("a", 1)}},
	}}).pausing(testhook.Measured).start()
	scene.call("y", atMost("b", 3)).start().admitted() // now the first would be denied
	scene.call("x", atMost("c", 3)).start().admitted() // and only now the second is not
	several.resume().admitted()
	scene.requireFault()
}

// Agents whose own turns are over revoke each other's. Were it not for the lock on the
// own row, each would wait for the row that the other has revoked.
func TestCallsThatRevokeEachOtherDoNotDeadlock(t *testing.T) {
	t.Parallel()

	dsn := pgtest.Database(t)
	pools := concurrentPools(t, dsn, 2)
	require.NoError(t, pools[0].AutoMigrate(&models.LegionAgent{}, &models.LegionIdentity{}))

	operations := []concurrentOperation{
		{Admissions: []concurrentAdmission{{"x", []concurrentRule{runningAtMost("a", 1)}}}},
		{Admissions: []concurrentAdmission{{"y", []concurrentRule{runningAtMost("b", 1)}}}},
	}

	for range concurrentCount(t, 50) {
		require.NoError(t, pools[0].Exec("DELETE FROM legion_agents").Error)

		for _, agentID := range []string{"x", "y"} {
			insert(t, pools[0], models.LegionAgent{
				AgentID: agentID, Status: models.StatusRunning, RunID: pointer("a turn"), LeaseExpiresAt: pointer(ago(time.Minute)),
				Metadata: document(t, concurrentIdentity("ab", false)), StartedAt: pointer(ago(time.Minute)),
			})
		}

		for _, outcome := range runConcurrently(t.Context(), pools, operations, testhook.Hooks{}, time.Now()) {
			require.Empty(t, outcome.Failure)
		}
	}

	require.Zero(t, concurrentDeadlocks(t, dsn, pools...))
}

// A turn renews its lease just before it ends, and commits just after a bare Enforce of
// the agent has found it to be over.
func TestATurnThatIsRenewedAtTheLastMomentKeepsItsSlot(t *testing.T) {
	t.Parallel()

	db := setup(t)
	identity := concurrentIdentity("a", false)
	insert(t, db, models.LegionAgent{
		AgentID: "x", Status: models.StatusRunning, RunID: pointer("a turn"), LeaseExpiresAt: pointer(ago(time.Minute)),
		Metadata: document(t, identity), StartedAt: pointer(ago(time.Minute)), ReservedTokens: 7,
	})

	renewal := begin(t, db)
	change(t, renewal, "x", map[string]any{"lease_expires_at": time.Now().Add(time.Hour)})

	enforced := make(chan error, 1)

	go func() { enforced <- limiter.Enforce(db, "x", maxRunning(identity, 1)) }()

	concurrentEventually(t, func() bool { return len(concurrentWaiters(t, db)) == 1 })
	require.NoError(t, renewal.Commit().Error)
	require.NoError(t, <-enforced)

	agent := find(t, db, "x")
	require.Equal(t, pointer("a turn"), agent.RunID)
	require.EqualValues(t, 7, agent.ReservedTokens)
	require.Greater(t, time.Until(*agent.LeaseExpiresAt), 50*time.Minute)
}
