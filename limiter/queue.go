package limiter

import (
	"slices"
	"strings"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/queue"
)

// Calls on one identity follow each other in the database anyway. If each waited
// there, every one would hold a connection while it waits, and a single busy tenant
// could use up the pool for the whole application. So the calls of this process that
// would open a transaction of their own wait here first, in order of arrival.
//
// A call in a caller's transaction holds its connection already and does not queue.
var identityQueue = queue.New[queueKey](queueWidth)

// queueWidth is how many calls of one identity may be at the database: one that works
// and one that is ready to take over.
const queueWidth = 2

type queueKey struct {
	pool     database.Pool
	table    string
	identity string
}

func (c *call) queueKey(identity document) queueKey {
	return queueKey{database.PoolOf(c.db), c.tables.Agents, identity.text}
}

// queue waits for the call's turn in the line of each of its identities, or for its
// context to end. It takes them in sorted order, so that two calls cannot wait for
// each other.
func (c *call) queue() (leave func(), err error) {
	own := c.own()
	slices.SortFunc(own, func(a, b document) int { return strings.Compare(a.text, b.text) })

	var entered []func()

	leave = func() {
		for _, left := range entered {
			left()
		}
	}

	for _, identity := range own {
		left, err := identityQueue.Enter(c.db.Statement.Context, c.queueKey(identity))
		if err != nil {
			leave()

			return nil, err
		}

		entered = append(entered, left)
	}

	return leave, nil
}
