package queue

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// fill enters as often as the queue is wide, and returns what leaves.
func fill(t *testing.T, queue *Queue[string], key string) (leave []func()) {
	t.Helper()

	for range queue.width {
		left, err := queue.Enter(t.Context(), key)
		require.NoError(t, err, "it does not wait")

		leave = append(leave, left)
	}

	return leave
}

func each(calls []func()) {
	for _, call := range calls {
		call()
	}
}

func TestALineServesAsManyAsItIsWideInOrderOfArrival(t *testing.T) {
	t.Parallel()

	for _, width := range []int{1, 2, 3} {
		t.Run(fmt.Sprint(width), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const callers = 20

				queue := New[string](width)
				leave := fill(t, queue, "busy")

				var served []int

				for i := range callers {
					go func() {
						if left, err := queue.Enter(t.Context(), "busy"); err == nil {
							served = append(served, i)
							leave = append(leave, left)
						}
					}()
					synctest.Wait()
				}

				require.Empty(t, served, "no more than %d at a time", width)

				for i := range callers {
					leave[i]()
					synctest.Wait()
					require.Len(t, served, i+1, "one comes for one that leaves")
					require.Equal(t, i, served[i])
				}

				each(leave[callers:])
				require.Empty(t, queue.lines)
			})
		})
	}
}

func TestAContextThatEndsLeavesTheLine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		queue := New[string](2)
		leave := fill(t, queue, "busy")
		gaveUp := errors.New("gave up")
		ctx, cancel := context.WithCancelCause(t.Context())

		var impatient, patient error

		go func() { _, impatient = queue.Enter(ctx, "busy") }()
		synctest.Wait()

		entered := false

		go func() {
			var left func()

			left, patient = queue.Enter(t.Context(), "busy")
			leave = append(leave, left)
			entered = true
		}()
		synctest.Wait()

		cancel(gaveUp)
		synctest.Wait()
		require.ErrorIs(t, impatient, gaveUp)
		require.False(t, entered, "its place was not anybody's")

		leave[0]()
		synctest.Wait()
		require.True(t, entered)
		require.NoError(t, patient)

		each(leave[1:])
		require.Empty(t, queue.lines)
	})
}

func TestLinesAreApart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		queue := New[string](2)
		busy, idle := fill(t, queue, "busy"), fill(t, queue, "idle")

		require.Len(t, queue.lines, 2)
		each(busy)
		require.Len(t, queue.lines, 1)
		each(idle)
		require.Empty(t, queue.lines)
	})
}

func TestCallersOfSeveralLinesInOneOrderDoNotWaitInACircle(t *testing.T) {
	t.Parallel()

	const callers = 50

	queue := New[int](2)
	done := make(chan error, callers)

	for i := range callers {
		go func() {
			var leave []func()

			for _, key := range []int{i % 3, 3 + i%2} {
				left, err := queue.Enter(t.Context(), key)
				if err != nil {
					done <- err

					return
				}

				leave = append(leave, left)
			}

			each(leave)

			done <- nil
		}()
	}

	for range callers {
		require.NoError(t, <-done)
	}

	require.Empty(t, queue.lines)
}
