package store_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

func TestAppendUsageAddsTheEntryAtTheEnd(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	b.set(t, agentID, map[string]any{"updated_at": inHours(-1), "agent_type": "chat", "conversation_state": []byte("state")})
	before := b.row(t, agentID)

	entries := []models.Usage{
		{ID: "first", At: time.UnixMilli(1_700_000_000_000), InputTokens: 5, OutputTokens: 6, TotalTokens: 11, Model: "large", MessageIndex: pointer(int64(3))},
		{ID: "second", At: time.UnixMilli(1_600_000_000_000), TotalTokens: 1, Evals: 2, Extra: map[string]any{"note": "x"}},
	}
	for _, entry := range entries {
		appended, err := b.agents.AppendUsage(t.Context(), agentID, entry)
		require.NoError(t, err)
		require.True(t, appended)
	}

	require.Equal(t, entries, b.usage(t, agentID))

	after := b.row(t, agentID)
	require.WithinDuration(t, time.Now(), after.UpdatedAt, time.Minute)
	after.Usage, after.UpdatedAt = before.Usage, before.UpdatedAt
	require.Equal(t, before, after)
}

func TestAppendUsageStampsTheDatabasesTime(t *testing.T) {
	t.Parallel()

	// Between two milliseconds: the time of an entry is rounded up.
	now := time.Date(2026, 3, 1, 12, 0, 0, 1_400_000, time.UTC)
	b := setupClock(t, now)
	up := now.Truncate(time.Millisecond).Add(time.Millisecond)

	for name, test := range map[string]struct{ given, expected time.Time }{
		"zero":       {time.Time{}, up},
		"the future": {now.Add(time.Hour), up},
		"the past":   {now.Add(-time.Hour), now.Add(-time.Hour)},
	} {
		_, err := b.agents.AppendUsage(t.Context(), agentID, models.Usage{ID: name, At: test.given})
		require.NoError(t, err)

		entries := b.usage(t, agentID)
		require.Equal(t, name, entries[len(entries)-1].ID)
		require.Equal(t, test.expected.UnixMilli(), entries[len(entries)-1].At.UnixMilli(), name)
	}

	require.Equal(t, now, b.row(t, agentID).UpdatedAt.UTC())
}

func TestAppendUsageMakesAnIDWhereThereIsNone(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)

	for range 2 {
		appended, err := b.agents.AppendUsage(t.Context(), agentID, models.Usage{TotalTokens: 1})
		require.NoError(t, err)
		require.True(t, appended)
	}

	entries := b.usage(t, agentID)
	require.Len(t, entries, 2)
	require.Len(t, entries[0].ID, 26)
	require.NotEqual(t, entries[0].ID, entries[1].ID)
}

func TestAppendUsageOfAKnownIDChangesNothing(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	appended, err := b.agents.AppendUsage(t.Context(), agentID, models.Usage{ID: "entry", TotalTokens: 1})
	require.NoError(t, err)
	require.True(t, appended)

	version := b.version(t, agentID)
	appended, err = b.agents.AppendUsage(t.Context(), agentID, models.Usage{ID: "entry", TotalTokens: 2})
	require.NoError(t, err)
	require.False(t, appended)
	require.Equal(t, version, b.version(t, agentID))
}

func TestAppendUsageToAnAbsentAgentIsNotFound(t *testing.T) {
	t.Parallel()

	b := setup(t)
	appended, err := b.agents.AppendUsage(t.Context(), agentID, models.Usage{TotalTokens: 1})
	require.ErrorIs(t, err, store.ErrNotFound)
	require.False(t, appended)
	require.Zero(t, b.count(t, "legion_agents"))
}

func TestAppendUsageToADeletedAgentStillCounts(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	require.NoError(t, b.agents.Delete(t.Context(), agentID))

	appended, err := b.agents.AppendUsage(t.Context(), agentID, models.Usage{TotalTokens: 1})
	require.NoError(t, err)
	require.True(t, appended)
	require.True(t, b.row(t, agentID).DeletedAt.Valid)
	require.Len(t, b.usage(t, agentID), 1)
}

func TestAppendUsageRefusesAnInvalidEntry(t *testing.T) {
	t.Parallel()

	agents := store.For[models.LegionAgent](pgtest.Open(t)) // not migrated

	_, err := agents.AppendUsage(t.Context(), agentID, models.Usage{TotalTokens: -1})
	require.ErrorIs(t, err, store.ErrInvalidUsage)
	require.ErrorContains(t, err, "TotalTokens is negative")
}

// Other writers may have left anything that jsonb can hold.
func TestAppendUsageSurvivesMalformedUsage(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct{ usage, expected string }{
		"null":               {`null`, `[null, NEW]`},
		"a number":           {`5`, `[5, NEW]`},
		"a string":           {`"x"`, `["x", NEW]`},
		"an object":          {`{"at": 1, "id": "entry", "total_tokens": 5}`, `[{"at": 1, "id": "entry", "total_tokens": 5}, NEW]`},
		"an empty object":    {`{}`, `[{}, NEW]`},
		"no objects":         {`[null, 1, "x", [{"id": "entry"}], true]`, `[null, 1, "x", [{"id": "entry"}], true, NEW]`},
		"an id of no string": {`[{"id": 5}, {"id": {"id": "entry"}}]`, `[{"id": 5}, {"id": {"id": "entry"}}, NEW]`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			b := setupAgent(t)
			b.set(t, agentID, map[string]any{"usage": test.usage})

			appended, err := b.agents.AppendUsage(t.Context(), agentID, models.Usage{ID: "entry", At: time.UnixMilli(7), TotalTokens: 9})
			require.NoError(t, err)
			require.True(t, appended)

			entry := `{"id": "entry", "at": 7, "total_tokens": 9}`
			require.JSONEq(t, replaceNew(test.expected, entry), string(b.row(t, agentID).Usage))

			appended, err = b.agents.AppendUsage(t.Context(), agentID, models.Usage{ID: "entry", TotalTokens: 9})
			require.NoError(t, err)
			require.False(t, appended)
		})
	}
}

// 10,000 appends to one row, from several processes, folded on the way some dozens of
// times.
func TestConcurrentAppendsLoseNothing(t *testing.T) {
	t.Parallel()

	const writers, appends, every = 100, 100, 10

	b := setupAgent(t)
	processes := b.processes(t, 4, pgtest.MaxOpenConnections(3))

	var repeated atomic.Int64

	inParallel(t, writers, func(writer int) error {
		process := processes[writer%len(processes)]

		for number := range appends {
			entry := models.Usage{ID: fmt.Sprintf("%d-%d", writer, number), TotalTokens: int64(writer), Evals: 1}

			appended, err := process.agents.AppendUsage(t.Context(), agentID, entry)
			if err != nil || !appended {
				return fmt.Errorf("%s: appended is %t: %w", entry.ID, appended, err)
			}

			if number%every != 0 {
				continue
			}

			// Now and then the reply is lost. In a transaction the retry does not queue behind
			// all those others.
			err = process.db.Transaction(func(tx *gorm.DB) error {
				appended, err = store.For[models.LegionAgent](tx).AppendUsage(t.Context(), agentID, entry)

				return err
			})
			if err != nil || appended {
				return fmt.Errorf("%s again: appended is %t: %w", entry.ID, appended, err)
			}

			repeated.Add(1)
		}

		return nil
	})

	require.EqualValues(t, writers*appends/every, repeated.Load())

	var tokens, evals, requests int64

	entries := b.usage(t, agentID)
	for _, entry := range entries {
		tokens += entry.TotalTokens
		evals += entry.Evals
		requests += max(1, entry.Folded)
	}

	require.EqualValues(t, appends*writers*(writers-1)/2, tokens)
	require.EqualValues(t, appends*writers, evals)
	require.EqualValues(t, appends*writers, requests)
	require.LessOrEqual(t, len(entries), store.MaxUsageEntries)
}

// Appends with the same ID meet at the row, where the loser has to look again.
func TestConcurrentAppendsOfOneIDAreCountedOnce(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	processes := b.processes(t, 8, pgtest.MaxOpenConnections(1))

	for round := range 20 {
		var appends atomic.Int64

		inParallel(t, len(processes), func(number int) error {
			appended, err := processes[number].agents.AppendUsage(t.Context(), agentID, models.Usage{ID: numbered("entry", round), TotalTokens: 1})
			if appended {
				appends.Add(1)
			}

			return err
		})

		require.EqualValues(t, 1, appends.Load())
	}

	require.Len(t, b.usage(t, agentID), 20)
}

// The row version that the append waits for has other entries than the one that it began
// with.
func TestAnAppendThatWaitedFoldsWhatItFinds(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	result := make(chan error, 1)

	require.NoError(t, b.db.Transaction(func(tx *gorm.DB) error {
		require.NoError(t, tx.Exec(`UPDATE legion_agents SET usage = (SELECT jsonb_agg(jsonb_build_object('id', n::text, 'at', n, 'total_tokens', 1))
			FROM generate_series(1, 600) AS n)`).Error)

		go func() {
			_, err := b.agents.AppendUsage(t.Context(), agentID, models.Usage{ID: "last", TotalTokens: 1})
			result <- err
		}()
		b.waitUntilBlocked(t, 1)

		return nil
	}))
	require.NoError(t, <-result)

	entries := b.usage(t, agentID)
	require.Len(t, entries, 130, "one folded, 128 kept, one new")
	require.EqualValues(t, 600-128, entries[0].TotalTokens)
	require.Equal(t, "last", entries[129].ID)
}

func replaceNew(text, entry string) string { return strings.Replace(text, "NEW", entry, 1) }
