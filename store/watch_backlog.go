package store

import "sync"

// backlog is what a watch has heard and its reader has not yet taken: each agent at most
// once, in the order in which they were heard of first.
type backlog struct {
	limit int

	// ready holds a value when there may be something to take.
	ready chan struct{}

	mutex    sync.Mutex
	missed   bool
	agentIDs []string
	waiting  map[string]struct{} // the same
}

func newBacklog(limit int) *backlog {
	return &backlog{limit: limit, ready: make(chan struct{}, 1), waiting: make(map[string]struct{})}
}

// add puts an agent at the end, unless it waits already. When there are too many, what
// waits becomes one event.
func (b *backlog) add(agentID string) {
	b.mutex.Lock()
	defer b.mutex.Unlock()

	if _, waits := b.waiting[agentID]; waits {
		return
	}

	if len(b.agentIDs) == b.limit {
		b.missed = true
		b.agentIDs = nil
		b.waiting = make(map[string]struct{})
	} else {
		b.agentIDs = append(b.agentIDs, agentID)
		b.waiting[agentID] = struct{}{}
	}

	b.wake()
}

// miss says that events may have been lost. What waits goes on waiting.
func (b *backlog) miss() {
	b.mutex.Lock()
	defer b.mutex.Unlock()

	b.missed = true
	b.wake()
}

// wake does not block: one value is enough, since whoever receives it takes all.
func (b *backlog) wake() {
	select {
	case b.ready <- struct{}{}:
	default:
	}
}

// take returns the next event. Missed comes first, so that what was read because of it is
// read before what has changed since.
func (b *backlog) take() (event Event, ok bool) {
	b.mutex.Lock()
	defer b.mutex.Unlock()

	switch {
	case b.missed:
		b.missed = false

		return Event{Missed: true}, true
	case len(b.agentIDs) > 0:
		agentID := b.agentIDs[0]
		b.agentIDs = b.agentIDs[1:]
		delete(b.waiting, agentID)

		return Event{AgentID: agentID}, true
	default:
		return Event{}, false
	}
}
