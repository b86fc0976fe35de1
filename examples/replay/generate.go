package main

import (
	"math"
	"math/rand/v2"
	"time"
)

// generatedRequests is how many there are where no limit is given.
const generatedRequests = 5000

// The shape of a generated trace is that of the conversation trace of the
// AzureLLMInferenceDataset2023: the quantiles of its token counts, and its rate. The gaps
// between its requests are close to exponential.
const meanGap = 181 * time.Millisecond

// A quantile says that this share of the requests has at most so many tokens.
type quantile struct{ share, tokens float64 }

var (
	contextQuantiles = []quantile{
		{0, 2},
		{0.01, 29},
		{0.05, 181},
		{0.1, 207},
		{0.25, 396},
		{0.5, 1020},
		{0.75, 1189},
		{0.9, 2734},
		{0.95, 4083},
		{0.99, 4142},
		{1, 14050},
	}
	generatedQuantiles = []quantile{
		{0, 7},
		{0.01, 16},
		{0.05, 41},
		{0.1, 54},
		{0.25, 85},
		{0.5, 129},
		{0.75, 395},
		{0.9, 424},
		{0.95, 451},
		{0.99, 601},
		{1, 1000},
	}
)

// generateTrace makes a trace of so many requests. The same seed makes the same trace.
func generateTrace(seed uint64, count int) []request {
	random := rand.New(rand.NewPCG(seed, 0))
	requests := make([]request, count)

	var offset time.Duration

	for i := range requests {
		requests[i] = request{
			offset:          offset,
			contextTokens:   draw(random, contextQuantiles),
			generatedTokens: draw(random, generatedQuantiles),
		}
		offset += time.Duration(random.ExpFloat64() * float64(meanGap))
	}

	return requests
}

// draw returns a value of the distribution that has these quantiles. Between two of them
// it is log-uniform.
func draw(random *rand.Rand, quantiles []quantile) int64 {
	share := random.Float64()

	above := 1
	for quantiles[above].share < share {
		above++
	}

	low, high := quantiles[above-1], quantiles[above]
	position := (share - low.share) / (high.share - low.share)

	return int64(math.Round(low.tokens * math.Pow(high.tokens/low.tokens, position)))
}
