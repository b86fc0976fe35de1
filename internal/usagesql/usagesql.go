// Package usagesql is the one home of the rule how usage entries are read in SQL: the
// limiter sums with it, by its statements and by the server's function, and the store
// folds with it.
//
// The database may hold usage that is not ours: a column that is no array, elements that
// are no objects, counts that are no numbers. None of it may raise or lower a sum.
//
// What these functions take is SQL of our own, never a caller's text.
package usagesql

import (
	"fmt"
	"time"
)

// maxCount is what a count or a sum saturates at, the largest bigint.
const maxCount = "9223372036854775807"

// UpdatedSlack is how far the updated_at of a row may lag behind its newest usage
// without that usage being missed. The store keeps them together; the slack is for an
// application that updates columns of its own through GORM, which stamps updated_at
// with the clock of the application's machine.
const UpdatedSlack = 5 * time.Minute

// Count is the SQL of the count that a jsonb expression holds: a non-negative numeric.
// What is no number counts 0, as a negative number does, and a number beyond bigint
// counts as the largest one. It never raises. Fractions stay, to be rounded once in the
// sum.
func Count(value string) string {
	return fmt.Sprintf("CASE jsonb_typeof(%[1]s) WHEN 'number' THEN least(%[2]s, greatest(0, (%[1]s)::numeric)) ELSE 0 END", value, maxCount)
}

// Saturate is the SQL of a sum of counts as a bigint: a fraction is rounded up, since
// a sum must never be too low, and NULL, the sum of nothing, is 0.
func Saturate(sum string) string {
	return fmt.Sprintf("least(%s, ceil(coalesce(%s, 0)))::bigint", maxCount, sum)
}

// Sum is the SQL of the sum of a key of [Entries].
func Sum(key string) string { return Saturate("sum(" + Count(key) + ")") }

// SumIf is [Sum] where a condition on the whole query holds, and 0 elsewhere.
func SumIf(condition, key string) string {
	return Saturate("sum(" + Count(key) + ") FILTER (WHERE " + condition + ")")
}

// IsAfter is the SQL of whether the time of an entry, the key "at" of [Entries], is after
// that many milliseconds of the Unix epoch. What has no time is not.
//
// random() < 0 is false. A volatile function keeps PostgreSQL from memoizing the entries by
// the document that they are from: it would hash and copy each document, to find none
// twice. That took nearly twice as long, of 1,000 conversations.
func IsAfter(at, milliseconds string) string {
	return fmt.Sprintf("CASE jsonb_typeof(%[1]s) WHEN 'number' THEN (%[1]s)::numeric > %[2]s ELSE random() < 0 END", at, milliseconds)
}

// Entries joins a FROM with the entries of a row's usage, as "entry" with the jsonb columns
// at, total_tokens and evals.
//
// Each OFFSET 0 keeps PostgreSQL from putting the expression wherever its result is used:
// the usage would be decompressed for each of them, and each key looked up twice. That
// took a quarter longer, of 1,000 conversations of 300 entries. An empty path is the
// document itself, decompressed.
func Entries(usage string) string {
	return fmt.Sprintf(`CROSS JOIN LATERAL (SELECT %s #> '{}' AS document OFFSET 0) AS unpacked
    CROSS JOIN LATERAL (
      SELECT element.value -> 'at' AS at, element.value -> 'total_tokens' AS total_tokens, element.value -> 'evals' AS evals
      FROM jsonb_array_elements(CASE jsonb_typeof(unpacked.document) WHEN 'array' THEN unpacked.document ELSE '[]' END) AS element (value)
      OFFSET 0) AS entry`, usage)
}
