package store

import (
	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/queue"
)

// Appends to one agent follow each other in the database anyway. If each waited there,
// every one would hold a connection while it waits, and one busy agent could use up the
// pool for the whole application. So the appends of this process wait here first, in
// order of arrival. One at a time also keeps a retry close behind its first attempt.
//
// An append in a caller's transaction holds its connection already and does not queue.
var appendQueue = queue.New[agentKey](1)

type agentKey struct {
	pool    database.Pool
	table   string
	agentID string
}
