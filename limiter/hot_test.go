package limiter_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
)

// hotCallers ask for one identity, which a slow transaction holds, with few connections.
const (
	hotCallers     = 500
	hotConnections = 10
	hotLimit       = 100

	// queueWidth is how many calls of one identity wait at the database.
	queueWidth = 2
)

func TestAHotIdentityHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()

	db := setup(t, pgtest.MaxOpenConnections(hotConnections))
	known(recordOnly(tenant), recordOnly(otherTenant))(t, db)

	holder := begin(t, db)
	require.NoError(t, limiter.Enforce(holder, "holder", recordOnly(tenant)))

	hurried, cancel := context.WithCancel(t.Context())
	defer cancel()

	var (
		callers                   sync.WaitGroup
		admitted, denied, givenUp atomic.Int64
	)

	for i := range hotCallers {
		ctx := t.Context()
		if i%5 == 0 {
			ctx = hurried // these do not wait to the end
		}

		callers.Go(func() {
			switch err := limiter.Enforce(db.WithContext(ctx), fmt.Sprint("caller ", i), maxAgents(tenant, hotLimit)); {
			case err == nil:
				admitted.Add(1)
			case ctx.Err() != nil:
				givenUp.Add(1)
			default:
				requireExceeded(err)
				denied.Add(1)
			}
		})
	}

	waitForLockWaiters(t, db, 1)

	// Meanwhile others get their verdicts and their rows, with what is left of the pool.
	for i := range 50 {
		ctx := impatient(t)
		require.NoError(t, limiter.Enforce(db.WithContext(ctx), fmt.Sprint("other ", i), recordOnly(otherTenant)))
		require.NoError(t, limiter.Enforce(db.WithContext(ctx), fmt.Sprint("new ", i), recordOnly(limiter.Identity{"ip": i})))
		require.NoError(t, db.WithContext(ctx).Exec("SELECT 1").Error)
	}

	cancel()
	require.Eventually(t, func() bool { return givenUp.Load() == hotCallers/5 }, time.Minute, time.Millisecond, "a deadline is kept")
	require.Zero(t, admitted.Load()+denied.Load())

	require.NoError(t, holder.Commit().Error)
	callers.Wait()

	// The limit is used up, and no more. known has recorded one agent of the tenant, and the
	// holder is another; where one statement is the whole call, one whose caller has gone may
	// still be let in.
	require.EqualValues(t, hotLimit+1, measured(t, db, everyLimit(tenant)).Agents)
	require.InDelta(t, hotLimit-2, admitted.Load(), queueWidth)
	require.EqualValues(t, hotCallers-hotCallers/5, admitted.Load()+denied.Load())
}

func TestAFloodOfFirstUsesHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()

	db := setup(t, pgtest.MaxOpenConnections(hotConnections))
	known(recordOnly(tenant), recordOnly(otherTenant))(t, db)

	// Identities of one field each, so that a registration needs that field's lock, which
	// the holder shares.
	field := func(i int) limiter.Identity { return limiter.Identity{"ip": i % 20} }
	holder := begin(t, db)

	for i := range 4 {
		require.NoError(t, limiter.Enforce(holder, fmt.Sprint("holder ", i), recordOnly(limiter.Identity{"tenant": "acme", "ip": i})))
	}

	var callers sync.WaitGroup

	for i := range 200 {
		callers.Go(func() {
			requireExceeded(limiter.Enforce(db, fmt.Sprint("caller ", i), maxAgents(field(i), 3)))
		})
	}

	waitForLockWaiters(t, db, 1)

	for i := range 20 {
		ctx := impatient(t)
		require.NoError(t, limiter.Enforce(db.WithContext(ctx), fmt.Sprint("other ", i), recordOnly(otherTenant)))
		require.NoError(t, db.WithContext(ctx).Exec("SELECT 1").Error)
	}

	require.NoError(t, holder.Commit().Error)
	callers.Wait()

	for i := range 20 {
		require.EqualValues(t, 4, measured(t, db, everyLimit(field(i))).Agents, "3 and the one that measures")
	}
}

// requireExceeded panics on an error that is no denial: it runs on many goroutines.
func requireExceeded(err error) {
	if err != nil && !errors.Is(err, limiter.ErrExceeded) {
		panic(err)
	}
}

// A denial is right in any snapshot, so who comes back to an identity that has just denied
// waits for nobody.
func TestADeniedCallerThatComesBackWaitsForNobody(t *testing.T) {
	t.Parallel()

	db := setup(t, pgtest.MaxOpenConnections(3))
	require.NoError(t, limiter.Enforce(db, "first", maxAgents(tenant, 1)))
	requireDenied(t, limiter.Enforce(db, "second", maxAgents(tenant, 1)), limiter.LimitAgents)

	holder := begin(t, db)
	require.NoError(t, limiter.Enforce(holder, "first", recordOnly(tenant)))

	for range 20 {
		exceeded := requireDenied(t, limiter.Enforce(db.WithContext(impatient(t)), "second", maxAgents(tenant, 1)), limiter.LimitAgents)
		require.InDelta(t, window, exceeded.RetryAfter, float64(time.Minute))
	}

	// What is not denied takes its turn, also under the same identity.
	waiting := inBackground(func() error { return limiter.Enforce(db, "third", maxAgents(tenant, 2)) })

	waitForLockWaiters(t, db, 1)
	require.NoError(t, holder.Commit().Error)
	require.NoError(t, <-waiting)
}
