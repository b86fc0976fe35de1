// Package usagesql is the one home of the rule how a count in a usage entry is read
// in SQL: the limiter sums with it, and the store folds with it.
package usagesql

import "fmt"

// maxCount is what a count or a sum saturates at, the largest bigint.
const maxCount = "9223372036854775807"

// Count is the SQL of the count under the key of a jsonb expression: a non-negative
// numeric. What is no number counts 0, as a negative number does, and a number beyond
// bigint counts as the largest one. It never raises. Fractions stay, to be rounded
// once in the sum.
//
// Entry and key are SQL and text of our own, never a caller's.
func Count(entry, key string) string {
	return fmt.Sprintf("CASE jsonb_typeof(%[1]s -> '%[2]s') WHEN 'number' THEN least(%[3]s, greatest(0, (%[1]s ->> '%[2]s')::numeric)) ELSE 0 END",
		entry, key, maxCount)
}

// Saturate is the SQL of a sum of counts as a bigint: a fraction is rounded up, since
// a sum must never be too low, and NULL, the sum of nothing, is 0.
func Saturate(sum string) string {
	return fmt.Sprintf("least(%s, ceil(coalesce(%s, 0)))::bigint", maxCount, sum)
}
