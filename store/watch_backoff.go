package store

import (
	"math/rand/v2"
	"time"
)

// backoff is how long to wait before connecting again: twice as long each time, and a
// random part of that, of at least a half, so that not all processes come back at once.
type backoff struct{ first, last, next time.Duration }

func newBackoff(first, last time.Duration) *backoff {
	return &backoff{first: first, last: last, next: first}
}

// wait returns how long to wait this time.
func (b *backoff) wait() time.Duration {
	wait := b.next/2 + rand.N(b.next/2)
	b.next = min(2*b.next, b.last)

	return wait
}

// held says how long a connection was good. One that breaks again at once is no reason to
// hurry.
func (b *backoff) held(time time.Duration) {
	if time > b.next {
		b.next = b.first
	}
}
