package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAGeneratedTraceDependsOnItsSeedAlone(t *testing.T) {
	t.Parallel()

	const count = 1000

	requests := generateTrace(1, count)
	again := generateTrace(1, count)

	require.Equal(t, requests, again)
	require.Equal(t, requests[:10], generateTrace(1, 10))
	require.NotEqual(t, requests, generateTrace(2, count))
}

func TestAGeneratedTraceHasTheShapeOfTheRealOne(t *testing.T) {
	t.Parallel()

	const count = 20_000

	requests := generateTrace(7, count)
	require.Len(t, requests, count)

	var contextTokens, generatedTokens int64

	for i, request := range requests {
		contextTokens += request.contextTokens
		generatedTokens += request.generatedTokens

		require.GreaterOrEqual(t, request.contextTokens, int64(2))
		require.LessOrEqual(t, request.contextTokens, int64(14_050))
		require.GreaterOrEqual(t, request.generatedTokens, int64(7))
		require.LessOrEqual(t, request.generatedTokens, int64(1_000))

		if i > 0 {
			require.GreaterOrEqual(t, request.offset, requests[i-1].offset)
		}
	}

	// The means of the conversation trace.
	require.InEpsilon(t, 1154.7, float64(contextTokens)/count, 0.1)
	require.InEpsilon(t, 211.1, float64(generatedTokens)/count, 0.1)
	require.InEpsilon(t, 181.0, float64(requests[count-1].offset/time.Millisecond)/count, 0.1)
	require.Zero(t, requests[0].offset)
}
