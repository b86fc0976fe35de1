package main

import (
	"sort"
	"sync"
	"time"
)

// shortestWindow is the least that a window may last by the database's clock. Usage is
// recorded to the millisecond, so a shorter one would count little but rounding.
const shortestWindow = 50 * time.Millisecond

// A pace translates between the time of the trace and that of the clocks. At a speed of
// 60 a minute of the trace lasts a second, and so must the windows of the limits, since
// the database counts by its own clock.
//
// As fast as possible is no fixed speed, and it changes as the replay goes. Then a window
// is measured: a minute of the trace is as long as it took to replay the last minute.
type pace struct {
	speed   float64 // 0: as fast as possible
	started time.Time

	mutex sync.RWMutex
	marks []mark // in order
}

// A mark says when the replay came to a moment of the trace.
type mark struct {
	offset time.Duration
	at     time.Time
}

func newPace(speed float64, started time.Time) *pace {
	return &pace{speed: speed, started: started}
}

// wait is how long it is until that moment of the trace, 0 or less when it is due.
func (p *pace) wait(offset time.Duration, now time.Time) time.Duration {
	if p.speed == 0 {
		return 0
	}

	return p.started.Add(scale(offset, p.speed)).Sub(now)
}

// reached notes that the replay has come to that moment of the trace.
func (p *pace) reached(offset time.Duration, now time.Time) {
	if p.speed != 0 {
		return
	}

	p.mutex.Lock()
	defer p.mutex.Unlock()

	// A turn that had to wait for the one before comes later than its moment.
	if last := len(p.marks) - 1; last < 0 || offset > p.marks[last].offset {
		p.marks = append(p.marks, mark{offset: offset, at: now})
	}
}

// window is what the given length of the trace, up to the given moment of it, lasts by
// the clocks.
func (p *pace) window(offset, length time.Duration, now time.Time) time.Duration {
	if p.speed != 0 {
		return scale(length, p.speed)
	}

	p.mutex.RLock()
	defer p.mutex.RUnlock()

	// The first mark that lies within the length.
	first := sort.Search(len(p.marks), func(i int) bool { return p.marks[i].offset > offset-length })
	if first == len(p.marks) {
		return shortestWindow
	}

	return max(shortestWindow, now.Sub(p.marks[first].at))
}

func scale(duration time.Duration, speed float64) time.Duration {
	return time.Duration(float64(duration) / speed)
}
