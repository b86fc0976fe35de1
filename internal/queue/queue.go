// Package queue makes calls of this process wait for each other in memory, where they
// would otherwise wait in the database, each with a connection.
package queue

import (
	"context"
	"sync"
)

// A Queue holds one line for each key that somebody waits for or works on, and nothing
// for the others. It is safe for concurrent use.
type Queue[Key comparable] struct {
	width int

	mutex sync.Mutex
	lines map[Key]*line
}

// A line is the queue of one key. Its channel holds a token for each caller that has
// entered; senders that block on it are served in order of arrival.
type line struct {
	tokens chan struct{}
	users  int // callers that wait or have a token
}

// New makes a queue in which width callers at a time may have entered for one key.
func New[Key comparable](width int) *Queue[Key] {
	return &Queue[Key]{width: width, lines: make(map[Key]*line)}
}

// Enter waits for the caller's turn, or for ctx to end, whose cause it then returns.
// leave lets the next one in; call it once.
//
// Whoever enters for several keys does so in an order that all keep to, or two can wait
// for each other.
func (q *Queue[Key]) Enter(ctx context.Context, key Key) (leave func(), err error) {
	joined := q.join(key)

	select {
	case joined.tokens <- struct{}{}:
		return func() {
			<-joined.tokens
			q.quit(key, joined)
		}, nil
	case <-ctx.Done():
		q.quit(key, joined)

		return nil, context.Cause(ctx)
	}
}

func (q *Queue[Key]) join(key Key) *line {
	q.mutex.Lock()
	defer q.mutex.Unlock()

	joined, ok := q.lines[key]
	if !ok {
		joined = &line{tokens: make(chan struct{}, q.width)}
		q.lines[key] = joined
	}

	joined.users++

	return joined
}

func (q *Queue[Key]) quit(key Key, left *line) {
	q.mutex.Lock()
	defer q.mutex.Unlock()

	if left.users--; left.users == 0 {
		delete(q.lines, key)
	}
}
