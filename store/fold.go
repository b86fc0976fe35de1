package store

import (
	"fmt"
	"strings"
	"time"

	"github.com/legion-gorm/legion/internal/usagesql"
)

const (
	// MaxUsageEntries is the most entries that the usage of an agent holds, whatever
	// [Store.AppendUsage] is given. Elements that are no entries, without a time or with
	// one in the future, are left alone and come on top; the store writes none.
	MaxUsageEntries = 512

	// unfoldedEntries are the newest entries, which keep their IDs: a retried append is
	// recognised by them.
	unfoldedEntries = 128
)

// month and year are a little longer than any, so that a window of one is exact.
const (
	day   = 24 * time.Hour
	week  = 7 * day
	month = 31 * day
	year  = 53 * week
)

// foldSteps say how wide a time one folded entry sums up, by the age of the entries.
//
// The ages are the windows that people choose: within a window of 7 days nothing is
// folded by more than an hour, since only what is older than 7 days is folded by the day.
// Each step is a multiple of the one before, so that folding again what was folded never
// spans two steps. And together they leave room below MaxUsageEntries: see
// TestFoldStepsNestAndFit.
var foldSteps = []struct{ olderThan, step time.Duration }{
	{olderThan: year, step: 2 * year},
	{olderThan: month, step: week},
	{olderThan: week, step: day},
	{olderThan: time.Hour, step: time.Hour},
	{olderThan: 0, step: time.Minute},
}

// boundedUsage is the SQL of the usage of the row "agent", folded when it is full. What
// is no array becomes the first element of one when an entry is appended.
var boundedUsage = fmt.Sprintf("(CASE WHEN %s < %d THEN agent.usage ELSE (%s) END)",
	"(CASE jsonb_typeof(agent.usage) WHEN 'array' THEN jsonb_array_length(agent.usage) ELSE 0 END)", MaxUsageEntries, foldedUsage())

// foldedUsage is the SQL of the usage of the row "agent", an array, with all but the
// newest entries folded.
//
// An element that cannot be folded has no "at" here, and makes a bucket of its own. The
// clock and the length are read once; OFFSET 0 keeps the planner from putting
// clock_timestamp() wherever they are used.
func foldedUsage() string {
	return fmt.Sprintf(`
  SELECT jsonb_agg(CASE WHEN bucket.at IS NULL THEN bucket.element ELSE bucket.folded END ORDER BY bucket.position)
  FROM (
    SELECT min(entry.position) AS position,
      max(entry.at) AS at,
      (array_agg(entry.element) FILTER (WHERE entry.at IS NULL))[1] AS element,
      jsonb_build_object(
        'at', max(entry.at),
        'folded', %s,
        'total_tokens', %s,
        'input_tokens', %s,
        'output_tokens', %s,
        'evals', %s) AS folded
    FROM (
      SELECT foldable.element, foldable.position, foldable.at,
        %s AS step
      FROM (
        SELECT timed.element, timed.position, timed.now,
          CASE WHEN timed.position <= timed.length - %d AND timed.at BETWEEN 0 AND timed.now THEN timed.at END AS at
        FROM (
          SELECT raw.element, raw.position, usage.length, usage.now, %s AS at
          FROM (SELECT jsonb_array_length(agent.usage) AS length, extract(epoch FROM clock_timestamp()) * 1000 AS now OFFSET 0) AS usage
          CROSS JOIN LATERAL jsonb_array_elements(agent.usage) WITH ORDINALITY AS raw (element, position)
        ) AS timed
      ) AS foldable
    ) AS entry
    GROUP BY entry.step, floor(entry.at / entry.step), CASE WHEN entry.at IS NULL THEN entry.position END
  ) AS bucket
`,
		saturatedSum("greatest(1, "+usagesql.Count("entry.element -> 'folded'")+")"),
		saturatedSum(usagesql.Count("entry.element -> 'total_tokens'")),
		saturatedSum(usagesql.Count("entry.element -> 'input_tokens'")),
		saturatedSum(usagesql.Count("entry.element -> 'output_tokens'")),
		saturatedSum(usagesql.Count("entry.element -> 'evals'")),
		foldStep(),
		unfoldedEntries, entryTime("raw.element"))
}

// saturatedSum keeps a fraction, which only the sum of a verdict rounds up: rounding in
// every fold would add up.
func saturatedSum(count string) string {
	return "least(9223372036854775807, sum(" + count + "))"
}

// entryTime is the SQL of the "at" of a usage element, a numeric, NULL where it is no
// number.
func entryTime(element string) string {
	return fmt.Sprintf("(CASE jsonb_typeof(%[1]s -> 'at') WHEN 'number' THEN (%[1]s ->> 'at')::numeric END)", element)
}

// foldStep is the SQL of the milliseconds that one folded entry sums up.
func foldStep() string {
	var step strings.Builder

	step.WriteString("CASE")

	for _, fold := range foldSteps {
		fmt.Fprintf(&step, "\n          WHEN foldable.at <= foldable.now - %d THEN %d", fold.olderThan.Milliseconds(), fold.step.Milliseconds())
	}

	step.WriteString("\n        END")

	return step.String()
}
