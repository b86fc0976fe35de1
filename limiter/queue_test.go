package limiter_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
)

// A hot identity must not use up the pool: what is not its turn yet waits without a
// connection.
func TestCallersOfABusyIdentityHoldTwoConnections(t *testing.T) {
	t.Parallel()

	const callers = 50

	// One for the transaction that holds the identity, two for callers that wait for it,
	// and one to spare.
	db := setup(t, pgtest.MaxOpenConnections(4))
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

	pool, err := db.DB()
	require.NoError(t, err)

	holder := begin(t, db)
	require.NoError(t, limiter.Enforce(holder, "holder", recordOnly(tenant)))

	results := make(chan error, callers)

	for i := range callers {
		go func() {
			rules := []limiter.Rule{maxAgents(tenant, callers+2)}
			if i%2 == 0 {
				rules = append(rules, recordOnly(limiter.Identity{"user": i}))
			}

			results <- limiter.Enforce(db, fmt.Sprintf("agent %d", i), rules...)
		}()
	}

	waitForLockWaiters(t, pgtest.OpenDSN(t, pgtest.DSN(db)), 2)

	impatientCtx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, limiter.Enforce(db.WithContext(impatientCtx), "impatient", recordOnly(tenant)), context.DeadlineExceeded)

	for range 20 {
		require.LessOrEqual(t, pool.Stats().InUse, 3)
		require.NoError(t, limiter.Enforce(db.WithContext(impatient(t)), "elsewhere", recordOnly(otherTenant)))
	}

	require.NoError(t, holder.Commit().Error)

	for range callers {
		require.NoError(t, <-results)
	}

	require.NotContains(t, agentIDs(t, db), "impatient")
	require.Len(t, agentIDs(t, db), callers+3)
}
