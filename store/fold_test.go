package store_test

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/internal/usagesql"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// foldClock is a time in the middle of an hour, a day and a week, counted from 1970.
var foldClock = time.Date(2026, 3, 2, 12, 30, 30, 0, time.UTC)

func TestFoldingSumsUpByTheAgeOfTheEntries(t *testing.T) {
	t.Parallel()

	const day = 24 * time.Hour

	for name, test := range map[string]struct{ age, step time.Duration }{
		"minutes of the last hour":   {50 * time.Minute, time.Minute},
		"hours of the last week":     {6 * day, time.Hour},
		"days of the last month":     {30 * day, day},
		"weeks of the last year":     {365 * day, 7 * day},
		"two years of what is older": {10 * 365 * day, 106 * 7 * day},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			b := setupClock(t, foldClock)

			// Three entries in the same step, one in the step before, one in the step after.
			begin := foldClock.Add(-test.age).UnixMilli() / test.step.Milliseconds() * test.step.Milliseconds()
			b.fill(t, []models.Usage{
				{ID: "before", At: time.UnixMilli(begin - 1), TotalTokens: 1},
				{ID: "first", At: time.UnixMilli(begin), TotalTokens: 2, InputTokens: 3, OutputTokens: 4, Evals: 5, Model: "m", Extra: map[string]any{"k": 1}},
				{ID: "last", At: time.UnixMilli(begin + test.step.Milliseconds() - 1), TotalTokens: 20, InputTokens: 30, OutputTokens: 40, Evals: 50},
				{ID: "folded before", At: time.UnixMilli(begin + 1), TotalTokens: 200, InputTokens: 300, OutputTokens: 400, Evals: 500, Folded: 7},
				{ID: "after", At: time.UnixMilli(begin + test.step.Milliseconds()), TotalTokens: 1_000},
			})
			b.append(t, "new")

			require.Equal(t, []models.Usage{
				{At: time.UnixMilli(begin - 1), TotalTokens: 1, Folded: 1},
				{
					At: time.UnixMilli(begin + test.step.Milliseconds() - 1), TotalTokens: 222, InputTokens: 333, OutputTokens: 444, Evals: 555,
					Folded: 9,
				},
				{At: time.UnixMilli(begin + test.step.Milliseconds()), TotalTokens: 1_000, Folded: 1},
			}, b.usage(t, agentID)[:3])
		})
	}
}

func TestFoldingKeepsTheNewestEntriesAsTheyAre(t *testing.T) {
	t.Parallel()

	b := setupClock(t, foldClock)
	b.fill(t, nil)
	before := b.usage(t, agentID)
	require.Len(t, before, store.MaxUsageEntries)

	b.append(t, "new")
	after := b.usage(t, agentID)
	require.Equal(t, before[len(before)-128:], after[len(after)-129:len(after)-1])
	require.Equal(t, "new", after[len(after)-1].ID)

	// They are recognised, the others are not any more: that bounds how long an append
	// can be retried.
	oldestKept := before[len(before)-128]
	appended, err := b.agents.AppendUsage(t.Context(), agentID, oldestKept)
	require.NoError(t, err)
	require.False(t, appended)

	newestFolded := before[len(before)-129]
	appended, err = b.agents.AppendUsage(t.Context(), agentID, newestFolded)
	require.NoError(t, err)
	require.True(t, appended)
}

func TestFoldingBeginsWithAFullUsageOnly(t *testing.T) {
	t.Parallel()

	b := setupClock(t, foldClock)
	b.fill(t, nil)
	b.exec(t, `UPDATE legion_agents SET usage = usage - 0`)
	before := b.usage(t, agentID)

	b.append(t, "last")
	require.Equal(t, before, b.usage(t, agentID)[:store.MaxUsageEntries-1])

	b.append(t, "one too many")
	require.Less(t, len(b.usage(t, agentID)), store.MaxUsageEntries)
}

// What is no entry is kept as it is, and what is a strange entry counts as it did.
func TestFoldingNeitherRaisesNorLowersASumOfMalformedUsage(t *testing.T) {
	t.Parallel()

	b := setupClock(t, foldClock)
	now := foldClock.UnixMilli()
	hour := now/3_600_000*3_600_000 - 5*3_600_000

	kept := []string{
		`null`, `5`, `"text"`, `[{"at": 1, "total_tokens": 5}]`, `{}`, `true`,
		`{"total_tokens": 1}`,
		`{"at": "1700000000000", "total_tokens": 1}`,
		`{"at": null, "total_tokens": 1}`,
		`{"at": -1, "total_tokens": 1}`,
		fmt.Sprintf(`{"at": %d, "total_tokens": 1}`, now+1),
		`{"at": 1e400, "total_tokens": 1}`,
	}

	folded := make([]string, 0, 12)
	for _, tokens := range []string{
		`"7"`, `null`, `[1]`, `{"a": 1}`, `true`, `-5`, `1.5`, `0.25`, `1e-30`, `3`, `3.0`,
	} {
		folded = append(folded, fmt.Sprintf(`{"at": %d.5, "total_tokens": %s, "evals": %s, "folded": "x"}`, hour, tokens, tokens))
	}

	// Beyond bigint, and in an hour of their own so as not to hide the others.
	for _, tokens := range []string{`1e400`, `9223372036854775807`, `1`} {
		folded = append(folded, fmt.Sprintf(`{"at": %d, "total_tokens": %s, "folded": 1e30}`, hour-3_600_000, tokens))
	}

	b.fillText(t, append(kept, folded...))

	windows := []int64{0, hour - 3_600_001, hour - 1, hour, hour + 1, now - 1}
	before := b.windowSums(t, windows)
	b.append(t, "new")

	for i, after := range b.windowSums(t, windows) {
		if before[i] < math.MaxInt64 {
			after-- // the new one
		}

		require.Equal(t, before[i], after, windows[i])
	}

	var elements []json.RawMessage
	require.NoError(t, json.Unmarshal(b.row(t, agentID).Usage, &elements))
	require.LessOrEqual(t, len(elements), store.MaxUsageEntries)
	require.Greater(t, len(elements), len(kept)+2)

	for i, element := range kept {
		require.Equal(t, b.normalised(t, element), string(elements[i]))
	}

	// The two hours behind them.
	var saturated, exact models.Usage
	require.NoError(t, json.Unmarshal(elements[len(kept)], &exact))
	require.NoError(t, json.Unmarshal(elements[len(kept)+1], &saturated))
	require.EqualValues(t, 11, exact.Folded)
	require.EqualValues(t, math.MaxInt64, saturated.Folded)
	require.EqualValues(t, math.MaxInt64, saturated.TotalTokens)
}

// A month of one request a minute, and then some years: between two folds, the entries
// that an append would just add are added in one go.
func TestUsageIsBoundedAndNeverTooLow(t *testing.T) {
	t.Parallel()

	const day = 24 * time.Hour

	for name, test := range map[string]struct {
		every, span time.Duration
	}{
		"one request a minute for a month":    {time.Minute, 31 * day},
		"one request an hour for three years": {time.Hour, 3 * 365 * day},
		"one request a second for half a day": {time.Second, 12 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			b := setupClock(t, foldClock)
			requests := int(test.span / test.every)
			done := 0
			longest := 0

			for done < requests {
				length := len(b.usage(t, agentID))
				require.LessOrEqual(t, length, store.MaxUsageEntries)

				if room := min(store.MaxUsageEntries-length, requests-done); room > 0 {
					b.exec(t, `UPDATE legion_agents SET usage = usage || (SELECT jsonb_agg(
						jsonb_build_object('id', n::text, 'at', ?::bigint + n * ?::bigint, 'total_tokens', 1)) FROM generate_series(?::int, ?::int) AS n)`,
						foldClock.UnixMilli(), test.every.Milliseconds(), done+1, done+room)
					done += room
				}

				longest = max(longest, len(b.usage(t, agentID)))

				if done < requests {
					done++
					b.setClock(t, foldClock.Add(time.Duration(done)*test.every))
					b.append(t, fmt.Sprint(done))
				}
			}

			require.Equal(t, store.MaxUsageEntries, longest)

			now := foldClock.Add(time.Duration(done) * test.every)
			b.setClock(t, now)

			for window, step := range map[time.Duration]time.Duration{
				time.Hour: time.Minute, day: time.Hour, 7 * day: time.Hour, 31 * day: day, 365 * day: 7 * day, 100 * 365 * day: 0,
			} {
				exact := int64(min(time.Duration(requests), (window+test.every-1)/test.every))
				sum := b.windowSums(t, []int64{now.Add(-window).UnixMilli()})[0]
				require.GreaterOrEqual(t, sum, exact, window)
				require.LessOrEqual(t, sum, exact+int64(step/test.every), window)
			}
		})
	}
}

// Times of the application's choosing cannot make more entries than there is room for.
func TestUsageIsBoundedForTimesOfAllAges(t *testing.T) {
	t.Parallel()

	const appends = 200

	b := setupClock(t, foldClock)

	// Entries 50 seconds apart, then ever farther, back to 1970: every step of every age
	// has one.
	var entries []models.Usage
	for age := time.Duration(0); ; age += max(50*time.Second, age/200) {
		at := foldClock.Add(-age)
		if at.UnixMilli() < 0 {
			break
		}

		entries = append(entries, models.Usage{ID: fmt.Sprint(len(entries)), At: at, TotalTokens: 1})
	}

	require.Greater(t, len(entries), 2*store.MaxUsageEntries)

	document, err := json.Marshal(entries)
	require.NoError(t, err)
	b.set(t, agentID, map[string]any{"usage": string(document)})
	b.append(t, "first")

	for number := range appends {
		if number%20 == 0 {
			require.LessOrEqual(t, len(b.usage(t, agentID)), store.MaxUsageEntries)
		}

		_, err := b.agents.AppendUsage(t.Context(), agentID, models.Usage{At: entries[number%len(entries)].At, TotalTokens: 1})
		require.NoError(t, err)
	}

	require.EqualValues(t, 1+len(entries)+appends, b.windowSums(t, []int64{-1})[0])
}

func (b bundle) append(t *testing.T, id string) {
	t.Helper()

	appended, err := b.agents.AppendUsage(t.Context(), agentID, models.Usage{ID: id, TotalTokens: 1})
	require.NoError(t, err)
	require.True(t, appended)
}

// fill makes the usage full: the given entries, then new ones of this minute.
func (b bundle) fill(t *testing.T, entries []models.Usage) {
	t.Helper()

	texts := make([]string, 0, len(entries))
	for _, entry := range entries {
		text, err := json.Marshal(entry)
		require.NoError(t, err)

		texts = append(texts, string(text))
	}

	b.fillText(t, texts)
}

func (b bundle) fillText(t *testing.T, elements []string) {
	t.Helper()

	for number := len(elements); number < store.MaxUsageEntries; number++ {
		elements = append(elements, fmt.Sprintf(`{"id": "%d", "at": %d, "total_tokens": 1}`, number, foldClock.UnixMilli()))
	}

	b.set(t, agentID, map[string]any{"usage": "[" + strings.Join(elements, ",") + "]"})
}

// windowSums are the tokens after each cutoff as a verdict sums them.
func (b bundle) windowSums(t *testing.T, cutoffs []int64) []int64 {
	t.Helper()

	sums := make([]int64, len(cutoffs))
	for i, cutoff := range cutoffs {
		require.NoError(t, b.db.Raw(`SELECT `+usagesql.Saturate("sum("+usagesql.Count("entry -> 'total_tokens'")+")")+`
			FROM legion_agents, jsonb_array_elements(usage) AS entry
			WHERE CASE jsonb_typeof(entry -> 'at') WHEN 'number' THEN (entry ->> 'at')::numeric > ? END`, cutoff).Scan(&sums[i]).Error)
	}

	return sums
}

// normalised is the text as jsonb writes it.
func (b bundle) normalised(t *testing.T, text string) string {
	t.Helper()

	var normalised string
	require.NoError(t, b.db.Raw(`SELECT ?::text::jsonb::text`, text).Scan(&normalised).Error)

	return normalised
}
