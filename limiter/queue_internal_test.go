package limiter

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

func newQueues() *queues { return &queues{lines: make(map[queueKey]*line)} }

func keyOf(identity string) queueKey { return queueKey{table: "legion_agents", identity: identity} }

func TestAQueueServesInOrderOfArrival(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const callers = 20

		queues, key := newQueues(), keyOf("busy")

		for range queueWidth {
			require.NoError(t, queues.enter(t.Context(), key))
		}

		var served []int

		for i := range callers {
			go func() {
				if queues.enter(t.Context(), key) == nil {
					served = append(served, i)
				}
			}()
			synctest.Wait()
		}

		require.Empty(t, served, "no more than %d at a time", queueWidth)

		for i := range callers {
			queues.leave(key)
			synctest.Wait()
			require.Len(t, served, i+1, "one comes for one that leaves")
			require.Equal(t, i, served[i])
		}

		for range queueWidth {
			queues.leave(key)
		}

		require.Empty(t, queues.lines)
	})
}

func TestAContextThatEndsLeavesTheQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		queues, key := newQueues(), keyOf("busy")

		for range queueWidth {
			require.NoError(t, queues.enter(t.Context(), key))
		}

		gaveUp := errors.New("gave up")
		ctx, cancel := context.WithCancelCause(t.Context())

		var impatient, patient error

		go func() { impatient = queues.enter(ctx, key) }()
		synctest.Wait()

		left := false

		go func() {
			patient = queues.enter(t.Context(), key)
			left = true
		}()
		synctest.Wait()

		cancel(gaveUp)
		synctest.Wait()
		require.ErrorIs(t, impatient, gaveUp)
		require.False(t, left, "its place was not anybody's")

		queues.leave(key)
		synctest.Wait()
		require.True(t, left)
		require.NoError(t, patient)

		for range queueWidth {
			queues.leave(key)
		}

		require.Empty(t, queues.lines)
	})
}

func TestQueuesOfOtherIdentitiesTablesAndPoolsAreApart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		queues := newQueues()
		keys := []queueKey{keyOf("busy"), keyOf("idle"), {table: "chat_agents", identity: "busy"}}

		for range queueWidth {
			for _, key := range keys {
				require.NoError(t, queues.enter(t.Context(), key), "it does not wait")
			}
		}

		require.Len(t, queues.lines, len(keys))

		for range queueWidth {
			for _, key := range keys {
				queues.leave(key)
			}
		}

		require.Empty(t, queues.lines)
	})
}

func TestCallsOfSeveralIdentitiesDoNotWaitForEachOtherInACircle(t *testing.T) {
	t.Parallel()

	const callers = 50

	queues := newQueues()
	done := make(chan error, callers)

	for i := range callers {
		go func() {
			// Sorted, as call.queue enters them.
			keys := []queueKey{keyOf(fmt.Sprint(i % 3)), keyOf(fmt.Sprint(3 + i%2))}
			for _, key := range keys {
				if err := queues.enter(t.Context(), key); err != nil {
					done <- err

					return
				}
			}

			for _, key := range keys {
				queues.leave(key)
			}

			done <- nil
		}()
	}

	for range callers {
		require.NoError(t, <-done)
	}

	require.Empty(t, queues.lines)
}
