package limiter_test

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/testhook"
)

// A concurrentScene is a schedule of calls that a test dictates, step by step.
type concurrentScene struct {
	t     *testing.T
	db    *gorm.DB
	begun time.Time

	mutex  sync.Mutex
	events []*concurrentEvent
}

// newConcurrentScene returns a scene in an empty database where the identities of
// these letters are registered and no agent is.
func newConcurrentScene(t *testing.T, registered ...string) *concurrentScene {
	t.Helper()

	scene := &concurrentScene{t: t, db: setup(t), begun: time.Now()}

	for _, fields := range registered {
		scene.call("a forerunner", atMost(fields, 1)).start().admitted()
		require.NoError(t, scene.db.Exec("DELETE FROM legion_agents").Error)
	}

	scene.events = nil

	return scene
}

// A concurrentCall is one call of a scene, on a goroutine of its own.
type concurrentCall struct {
	scene     *concurrentScene
	operation concurrentOperation
	hooks     testhook.Hooks
	outcome   concurrentOutcome
	err       error

	pauses  testhook.Point
	reached chan struct{}
	resumed chan struct{}
	paused  bool

	// atPoint is called at every point, on the goroutine of the call.
	atPoint func(testhook.Point)

	tx      *gorm.DB
	decided chan struct{}
}

// call is a call of Enforce that has not started.
func (s *concurrentScene) call(agent string, rules ...concurrentRule) *concurrentCall {
	return s.prepare(concurrentOperation{Admissions: []concurrentAdmission{{agent, rules}}})
}

// release is a call of Release.
func (s *concurrentScene) release(agent string) *concurrentCall {
	return s.prepare(concurrentOperation{Release: agent})
}

func (s *concurrentScene) prepare(operation concurrentOperation) *concurrentCall {
	return &concurrentCall{
		scene:     s,
		operation: operation,
		reached:   make(chan struct{}),
		resumed:   make(chan struct{}),
		decided:   make(chan struct{}),
	}
}

// with removes parts of the protocol.
func (c *concurrentCall) with(hooks testhook.Hooks) *concurrentCall {
	c.hooks = hooks

	return c
}

// pausing stops the call when it first reaches the point.
func (c *concurrentCall) pausing(point testhook.Point) *concurrentCall {
	c.pauses = point

	return c
}

// nested makes the call in a caller's transaction, which stays open until commit or
// rollback.
func (c *concurrentCall) nested() *concurrentCall {
	c.operation.Nested = true

	return c
}

// start starts the call. If it is to pause, it waits until it does.
func (c *concurrentCall) start() *concurrentCall {
	c.scene.t.Helper()

	c.launch()

	if c.pauses != "" {
		c.reach()
	}

	return c
}

// reach waits until the call pauses.
func (c *concurrentCall) reach() {
	c.scene.t.Helper()

	select {
	case <-c.reached:
	case <-c.decided:
		require.FailNow(c.scene.t, "the call is over without having reached its pause", "%s: %v", c.operation, c.err)
	case <-time.After(concurrentPatience):
		require.FailNow(c.scene.t, "the call does not reach its pause", "%s", c.operation)
	}
}

// launch starts the call and waits for nothing.
func (c *concurrentCall) launch() {
	hooks := c.hooks
	hooks.At = c.at
	db := c.scene.db.WithContext(testhook.With(c.scene.t.Context(), hooks))

	c.outcome.Call = time.Since(c.scene.begun).Nanoseconds()

	if c.operation.Nested {
		db = begin(c.scene.t, db)
		c.tx = db
	}

	go func() {
		defer close(c.decided)

		c.err = c.operation.call(db)
		c.outcome.answer(c.err)
		c.outcome.Verdict = time.Since(c.scene.begun).Nanoseconds()

		if !c.operation.Nested {
			c.record()
		}
	}()
}

func (c *concurrentCall) at(point testhook.Point) {
	if c.atPoint != nil {
		c.atPoint(point)
	}

	if point == c.pauses && !c.paused {
		c.paused = true
		close(c.reached)
		<-c.resumed
	}
}

// record adds the call to the history once it is over.
func (c *concurrentCall) record() {
	c.outcome.Return = time.Since(c.scene.begun).Nanoseconds()

	c.scene.mutex.Lock()
	defer c.scene.mutex.Unlock()

	c.scene.events = append(c.scene.events, &concurrentEvent{c.operation, c.outcome})
}

// resume lets a paused call go on.
func (c *concurrentCall) resume() *concurrentCall {
	close(c.resumed)

	return c
}

// waits is for a call that must be stopped by a lock, while as many others as given
// are stopped, too.
func (c *concurrentCall) waits(others ...*concurrentCall) {
	c.scene.t.Helper()

	concurrentEventually(c.scene.t, func() bool {
		return c.isDecided() || len(concurrentWaiters(c.scene.t, c.scene.db)) == 1+len(others)
	})
	require.False(c.scene.t, c.isDecided(), "%s went through: %v", c.operation, c.err)
}

func (c *concurrentCall) isDecided() bool {
	select {
	case <-c.decided:
		return true
	default:
		return false
	}
}

// wait waits for the verdict.
func (c *concurrentCall) wait() *concurrentCall {
	c.scene.t.Helper()

	select {
	case <-c.decided:
	case <-time.After(concurrentPatience):
		require.FailNow(c.scene.t, "the call does not end", "%s", c.operation)
	}

	return c
}

func (c *concurrentCall) admitted() *concurrentCall {
	c.scene.t.Helper()

	require.NoError(c.scene.t, c.wait().err, "%s", c.operation)

	return c
}

// denied is for a call that the rule at this position must deny.
func (c *concurrentCall) denied(rule int) *concurrentCall {
	c.scene.t.Helper()

	require.Empty(c.scene.t, c.wait().outcome.Failure)
	require.Equal(c.scene.t, rule, c.outcome.Denied, "%s: %v", c.operation, c.err)

	return c
}

// commit ends the caller's transaction.
func (c *concurrentCall) commit() {
	c.scene.t.Helper()

	require.NoError(c.scene.t, c.wait().tx.Commit().Error)
	c.record()
}

// rollback ends the caller's transaction.
func (c *concurrentCall) rollback() {
	c.scene.t.Helper()

	require.NoError(c.scene.t, c.wait().tx.Rollback().Error)
	c.operation.Undo = true
	c.record()
}

// requireSerial is for scenes whose verdicts must agree with some serial history.
func (s *concurrentScene) requireSerial() {
	s.t.Helper()

	end := readConcurrentState(s.t, s.db)
	require.True(s.t, concurrentSerial(s.events, end), "no serial history:\n%s\nand left %v", concurrentList(s.events), end)
}

// requireFault is for scenes that must show what goes wrong without a part of the
// protocol: no serial history explains them.
func (s *concurrentScene) requireFault() {
	s.t.Helper()

	end := readConcurrentState(s.t, s.db)
	require.False(s.t, concurrentSerial(s.events, end), "a serial history:\n%s\nand left %v", concurrentList(s.events), end)
}

// concurrentWaiters are the server processes that wait for a lock in the database.
func concurrentWaiters(t *testing.T, db *gorm.DB) (processes []int) {
	t.Helper()

	require.NoError(t, db.WithContext(t.Context()).Raw(`SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND wait_event_type = 'Lock'`).Scan(&processes).Error)

	return processes
}
