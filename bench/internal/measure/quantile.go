// Package measure is what benchmarks count and time with.
package measure

import (
	"cmp"
	"math"
	"slices"
)

// Median returns the middle of the values, or the mean of the two in the middle. It is
// zero where there are none.
func Median[T ~int | ~int64 | ~float64](values []T) T {
	if len(values) == 0 {
		return 0
	}

	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2

	if len(sorted)%2 == 1 {
		return sorted[middle]
	}

	return sorted[middle-1] + (sorted[middle]-sorted[middle-1])/2
}

// Quantile returns the smallest of the values that at least this share of them do not
// exceed: 0.99 is p99. It is zero where there are none.
func Quantile[T cmp.Ordered](values []T, share float64) T {
	if len(values) == 0 {
		var zero T

		return zero
	}

	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(share * float64(len(sorted))))

	return sorted[min(max(rank, 1), len(sorted))-1]
}
