package limiter

import (
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/legion-gorm/legion/internal/database"
)

// Calls on one identity follow each other in the database anyway. If each waited
// there, every one would hold a connection while it waits, and a single busy tenant
// could use up the pool for the whole application. So the calls of this process that
// would open a transaction of their own wait here first, in order of arrival.
//
// A call in a caller's transaction holds its connection already and does not queue.

// queueWidth is how many calls of one identity may be at the database: one that works
// and one that is ready to take over.
const queueWidth = 2

type queueKey struct {
	pool     database.Pool
	table    string
	identity string
}

// A line is the queue of one identity. Its channel holds a token for each call at the
// database; senders that block on it are served in order of arrival.
type line struct {
	tokens chan struct{}
	users  int // calls that wait or have a token
}

type queues struct {
	mutex sync.Mutex
	lines map[queueKey]*line
}

var identityQueues = queues{lines: make(map[queueKey]*line)}

// queue waits for the call's turn in the line of each of its identities, or for its
// context to end. It takes them in sorted order, so that two calls cannot wait for
// each other.
func (c *call) queue() (leave func(), err error) {
	pool := database.PoolOf(c.db)
	own := c.own()
	slices.SortFunc(own, func(a, b document) int { return strings.Compare(a.text, b.text) })

	var entered []queueKey

	leave = func() {
		for _, key := range entered {
			identityQueues.leave(key)
		}
	}

	for _, identity := range own {
		key := queueKey{pool, c.tables.Agents, identity.text}
		if err := identityQueues.enter(c.db.Statement.Context, key); err != nil {
			leave()

			return nil, err
		}

		entered = append(entered, key)
	}

	return leave, nil
}

func (q *queues) enter(ctx context.Context, key queueKey) error {
	waiting := q.join(key)

	select {
	case waiting.tokens <- struct{}{}:
		return nil
	case <-ctx.Done():
		q.quit(key, waiting)

		return context.Cause(ctx)
	}
}

func (q *queues) leave(key queueKey) {
	q.mutex.Lock()
	served := q.lines[key]
	q.mutex.Unlock()

	<-served.tokens
	q.quit(key, served)
}

func (q *queues) join(key queueKey) *line {
	q.mutex.Lock()
	defer q.mutex.Unlock()

	joined, ok := q.lines[key]
	if !ok {
		joined = &line{tokens: make(chan struct{}, queueWidth)}
		q.lines[key] = joined
	}

	joined.users++

	return joined
}

func (q *queues) quit(key queueKey, left *line) {
	q.mutex.Lock()
	defer q.mutex.Unlock()

	if left.users--; left.users == 0 {
		delete(q.lines, key)
	}
}
