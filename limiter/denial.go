package limiter

import (
	"sync"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
)

// A denial changes nothing, so it is right in any snapshot, also in one that was taken
// without a lock: it then stands at that moment, and who is admitted after it comes later.
// An admission is not, so what the snapshot allows is decided as ever.
//
// So where an identity has just been denied, the next calls first look without locks. A
// tenant that has used up its limit, and whose callers come back all the same, then costs
// two queries for each of them, which wait for nobody and hold up nobody. Elsewhere the look
// would be one query more for a call that passes.

const (
	// denialMemory is how long a denial makes the next calls look first.
	denialMemory = time.Second

	// maxDenials bounds what is remembered. Beyond it, all is forgotten, which costs no more
	// than the time that it saves.
	maxDenials = 10_000
)

type denialTimes struct {
	mutex sync.Mutex
	until map[queueKey]time.Time
}

var recentDenials = denialTimes{until: make(map[queueKey]time.Time)}

func (d *denialTimes) note(key queueKey) {
	d.mutex.Lock()
	defer d.mutex.Unlock()

	if len(d.until) >= maxDenials {
		clear(d.until)
	}

	d.until[key] = time.Now().Add(denialMemory)
}

func (d *denialTimes) isRecent(key queueKey) bool {
	d.mutex.Lock()
	defer d.mutex.Unlock()

	until, ok := d.until[key]
	if ok && time.Now().After(until) {
		delete(d.until, key)

		return false
	}

	return ok
}

// noteDenial remembers the identity that has denied.
func (c *call) noteDenial(denial *ExceededError) {
	recentDenials.note(c.queueKey(c.denied.rules[denial.RuleIndex].document))
}

// wasDenied reports whether an identity of the call was denied a moment ago.
func (c *call) wasDenied() bool {
	for _, identity := range c.own() {
		if recentDenials.isRecent(c.queueKey(identity)) {
			return true
		}
	}

	return false
}

// deniedAtOnce returns a denial that can be given without locks, or nil.
func (c *call) deniedAtOnce() *ExceededError {
	if len(c.requests) > 1 || c.hooks.Given() || database.InTransaction(c.db) || !c.wasDenied() {
		return nil
	}

	var denial *ExceededError

	request := c.requests[0]
	look := func(tx *gorm.DB) error {
		measured, begun, err := c.measureTurn(tx, request)
		if err != nil {
			return err
		}

		denial = measured.denial(request)

		// A slot whose lease is over may be taken, and a turn that has begun already needs no
		// verdict: both take locks.
		if denial == nil || begun || measured.deniesButForExpired(request) {
			denial = nil

			return nil
		}

		denial.RetryAfter = c.retryAfter(tx, request, denial)

		return nil
	}

	if err := database.Autocommit(c.db, c.settings.ConnectionTimeout, look); err != nil {
		return nil //nolint:nilerr // what is in the way of looking is in the way of the call, which will say so
	}

	if denial == nil {
		return nil
	}

	c.denied = request
	c.locked = c.began

	return denial
}
