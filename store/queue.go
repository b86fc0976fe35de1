package store

import (
	"context"
	"sync"

	"github.com/legion-gorm/legion/internal/database"
)

// Appends to one agent follow each other in the database anyway. If each waited there,
// every one would hold a connection while it waits, and one busy agent could use up the
// pool for the whole application. So the appends of this process wait here first, in
// order of arrival. That also keeps a retry close behind its first attempt.
//
// An append in a caller's transaction holds its connection already and does not queue.
var appendQueue = queue{lines: make(map[agentKey]*line)}

type agentKey struct {
	pool    database.Pool
	table   string
	agentID string
}

type queue struct {
	mutex sync.Mutex
	lines map[agentKey]*line
}

// A line is the queue of one agent. Whoever has sent to its channel has the turn; those
// that block on sending are served in order of arrival.
type line struct {
	turn  chan struct{}
	users int // that wait or have the turn
}

// enter waits for the turn of the caller, or for the end of ctx. leave gives it to the
// next.
func (q *queue) enter(ctx context.Context, key agentKey) (leave func(), err error) {
	entered := q.join(key)

	select {
	case entered.turn <- struct{}{}:
		return func() {
			<-entered.turn
			q.quit(key, entered)
		}, nil
	case <-ctx.Done():
		q.quit(key, entered)

		return nil, context.Cause(ctx)
	}
}

func (q *queue) join(key agentKey) *line {
	q.mutex.Lock()
	defer q.mutex.Unlock()

	joined, ok := q.lines[key]
	if !ok {
		joined = &line{turn: make(chan struct{}, 1)}
		q.lines[key] = joined
	}

	joined.users++

	return joined
}

func (q *queue) quit(key agentKey, left *line) {
	q.mutex.Lock()
	defer q.mutex.Unlock()

	left.users--
	if left.users == 0 {
		delete(q.lines, key)
	}
}
