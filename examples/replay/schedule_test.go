package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// scheduled makes a turn that takes so many tokens of 20 ms.
func scheduled(number int64, agentID string, offset time.Duration, tokens int64) turn {
	return turn{
		number:  number,
		agentID: agentID,
		request: request{offset: offset, generatedTokens: tokens},
	}
}

// play takes events until there are none, admits or denies, and tells the order.
func play(schedule *schedule, denied map[int64]bool) []string {
	var order []string

	for !schedule.done() {
		next, ok := schedule.next()
		if !ok {
			return append(order, "stuck")
		}

		schedule.take()

		switch {
		case next.ends:
			order = append(order, fmt.Sprintf("%d ends", next.turn.number))
			schedule.ended(next.turn)
		case denied[next.turn.number]:
			order = append(order, fmt.Sprintf("%d is denied", next.turn.number))
			schedule.ended(next.turn)
		default:
			order = append(order, fmt.Sprintf("%d begins", next.turn.number))
			schedule.admitted(next.turn)
		}
	}

	return order
}

func TestAScheduleHasBeginsAndEndsInTheirOrder(t *testing.T) {
	t.Parallel()

	schedule := newSchedule([]turn{
		scheduled(1, "a", 0, 3),                   // ends at 60 ms
		scheduled(2, "b", 0, 0),                   // ends at once
		scheduled(3, "c", 60*time.Millisecond, 1), // when a slot has just become free
		scheduled(4, "d", 61*time.Millisecond, 1), // denied: it has no end
	})

	require.Equal(t, []string{
		"1 begins", "2 begins", "2 ends", "1 ends", "3 begins", "4 is denied", "3 ends",
	}, play(schedule, map[int64]bool{4: true}))
}

func TestTheTurnsOfAnAgentFollowEachOther(t *testing.T) {
	t.Parallel()

	schedule := newSchedule([]turn{
		scheduled(1, "a", 0, 5),
		scheduled(2, "a", 10*time.Millisecond, 1),
		scheduled(3, "a", 20*time.Millisecond, 1),
		scheduled(4, "b", 30*time.Millisecond, 1),
	})

	require.Equal(t, []string{
		"1 begins", "4 begins", "4 ends", "1 ends", "2 is denied", "3 begins", "3 ends",
	}, play(schedule, map[int64]bool{2: true}))
}

func TestAScheduleIsNotDoneWhileATurnIsBeingDecided(t *testing.T) {
	t.Parallel()

	schedule := newSchedule([]turn{scheduled(1, "a", 0, 1), scheduled(2, "a", 0, 1)})
	first, ok := schedule.next()
	require.True(t, ok)
	schedule.take()

	_, ok = schedule.next()
	require.False(t, ok, "the second turn waits for the first")
	require.False(t, schedule.done())

	schedule.ended(first.turn)
	second, ok := schedule.next()
	require.True(t, ok)
	require.Equal(t, int64(2), second.turn.number)
	schedule.take()
	require.False(t, schedule.done())

	schedule.ended(second.turn)
	require.True(t, schedule.done())
}
