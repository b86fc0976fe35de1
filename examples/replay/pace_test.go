package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var noon = time.Date(2026, time.January, 1, 12, 0, 0, 0, time.UTC)

func TestAPaceOfAFixedSpeed(t *testing.T) {
	t.Parallel()

	pace := newPace(60, noon)
	pace.reached(time.Minute, noon.Add(time.Hour))

	require.Equal(t, time.Second, pace.wait(time.Minute, noon))
	require.Equal(t, time.Duration(0), pace.wait(time.Minute, noon.Add(time.Second)))
	require.Equal(t, -time.Second, pace.wait(time.Minute, noon.Add(2*time.Second)))

	require.Equal(t, time.Second, pace.window(time.Hour, time.Minute, noon.Add(time.Hour)))
}

func TestAPaceAsFastAsPossibleMeasuresItsWindows(t *testing.T) {
	t.Parallel()

	pace := newPace(0, noon)
	at := func(seconds int) time.Time { return noon.Add(time.Duration(seconds) * time.Second) }

	require.Zero(t, pace.wait(time.Hour, noon))
	require.Equal(t, shortestWindow, pace.window(0, time.Minute, noon), "nothing has happened yet")

	pace.reached(0, at(1))
	pace.reached(30*time.Second, at(2))
	pace.reached(20*time.Second, at(3)) // one that had to wait
	pace.reached(90*time.Second, at(4))
	pace.reached(150*time.Second, at(8))

	require.Equal(t, 4*time.Second, pace.window(30*time.Second, time.Minute, at(5)), "all since the first")
	require.Equal(t, 6*time.Second, pace.window(60*time.Second, time.Minute, at(8)), "the minute begins after the first")
	require.Equal(t, 6*time.Second, pace.window(85*time.Second, time.Minute, at(8)), "the one that had to wait is no mark")
	require.Equal(t, 4*time.Second, pace.window(90*time.Second, time.Minute, at(8)), "the minute begins after the second")
	require.Equal(t, shortestWindow, pace.window(150*time.Second, time.Minute, at(8)))
}
