package main

import (
	"cmp"
	"container/heap"
	"time"
)

// An event is the begin of a turn, or the end of one that was admitted.
type event struct {
	turn turn
	due  time.Duration // in the time of the trace
	ends bool
}

// A schedule hands out the events in the order of the trace. The turns of one agent
// follow each other: one that comes while the turn before is still being replayed waits
// for its end.
type schedule struct {
	events   eventHeap
	busy     map[string]bool    // agents with a turn that has begun and not ended
	waiting  map[string][]event // begins of busy agents, in order
	inFlight int                // turns that have begun and not ended
}

func newSchedule(turns []turn) *schedule {
	s := &schedule{busy: make(map[string]bool), waiting: make(map[string][]event)}

	for _, turn := range turns {
		s.events = append(s.events, event{turn: turn, due: turn.offset})
	}

	heap.Init(&s.events)

	return s
}

// done reports whether every turn has ended.
func (s *schedule) done() bool { return len(s.events) == 0 && s.inFlight == 0 }

// next is the event that is due next, if there is one that need not wait for another.
func (s *schedule) next() (event, bool) {
	for len(s.events) > 0 {
		next := s.events[0]
		if next.ends || !s.busy[next.turn.agentID] {
			return next, true
		}

		heap.Pop(&s.events)
		s.waiting[next.turn.agentID] = append(s.waiting[next.turn.agentID], next)
	}

	return event{}, false
}

// take removes the event that next has returned, which is now being replayed.
func (s *schedule) take() {
	taken, ok := heap.Pop(&s.events).(event)
	if ok && !taken.ends {
		s.busy[taken.turn.agentID] = true
		s.inFlight++
	}
}

// admitted schedules the end of a turn that has begun.
func (s *schedule) admitted(turn turn) {
	heap.Push(&s.events, event{turn: turn, due: turn.offset + turn.duration(), ends: true})
}

// ended says that a turn is over, or was denied.
func (s *schedule) ended(turn turn) {
	s.inFlight--
	delete(s.busy, turn.agentID)

	if waiting := s.waiting[turn.agentID]; len(waiting) > 0 {
		for _, event := range waiting {
			heap.Push(&s.events, event)
		}

		delete(s.waiting, turn.agentID)
	}
}

// eventHeap is a heap of events, the one that is due first on top. At the same moment
// turns end before others begin, as a slot that is given back is free.
type eventHeap []event

func (h *eventHeap) Len() int { return len(*h) }

func (h *eventHeap) Less(i, j int) bool {
	a, b := (*h)[i], (*h)[j]
	if a.due == b.due && a.ends != b.ends {
		return a.ends
	}

	return cmp.Or(cmp.Compare(a.due, b.due), cmp.Compare(a.turn.number, b.turn.number)) < 0
}

func (h *eventHeap) Swap(i, j int) { (*h)[i], (*h)[j] = (*h)[j], (*h)[i] }

func (h *eventHeap) Push(pushed any) {
	if event, ok := pushed.(event); ok {
		*h = append(*h, event)
	}
}

func (h *eventHeap) Pop() any {
	last := len(*h) - 1
	popped := (*h)[last]
	*h = (*h)[:last]

	return popped
}
