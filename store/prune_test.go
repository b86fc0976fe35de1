package store_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// before is the time that the tests prune by.
func before() time.Time { return time.Now().Add(-time.Hour) }

// insertAgents inserts agents that were deleted two hours ago and have not changed since.
func (b bundle) insertDeleted(t *testing.T, ids ...string) {
	t.Helper()

	for _, id := range ids {
		b.exec(t, `INSERT INTO legion_agents (agent_id, metadata, started_at, deleted_at, updated_at, created_at)
			VALUES (?, jsonb_build_object('agent', ?::text), ?, ?, ?, ?)`, id, id, inHours(-3), inHours(-2), inHours(-2), inHours(-3))
	}
}

func TestPruneRemovesWhatWasDeletedBefore(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		change map[string]any
		goes   bool
	}{
		"deleted, and nothing since":             {nil, true},
		"never started":                          {map[string]any{"started_at": nil}, true},
		"running, with a lease that is over":     {map[string]any{"status": "running", "run_id": "run", "lease_expires_at": inHours(-0.1)}, true},
		"running, without a lease":               {map[string]any{"status": "running", "run_id": "run"}, true},
		"not deleted":                            {map[string]any{"deleted_at": nil}, false},
		"deleted since":                          {map[string]any{"deleted_at": inHours(-0.5)}, false},
		"changed since":                          {map[string]any{"updated_at": inHours(-0.5)}, false},
		"started since":                          {map[string]any{"started_at": inHours(-0.5)}, false},
		"running, with a lease that is not over": {map[string]any{"status": "running", "run_id": "run", "lease_expires_at": inHours(0.1)}, false},
		"an unowned slot that is not over":       {map[string]any{"status": "running", "lease_expires_at": inHours(0.1)}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			b.insertDeleted(t, agentID)

			if test.change != nil {
				b.set(t, agentID, test.change)
			}

			result, err := b.agents.Prune(t.Context(), before())
			require.NoError(t, err)

			if test.goes {
				require.Equal(t, store.PruneResult{Agents: 1}, result)
				require.Zero(t, b.count(t, "legion_agents"))
			} else {
				require.Equal(t, store.PruneResult{}, result)
				require.EqualValues(t, 1, b.count(t, "legion_agents"))
			}
		})
	}
}

func TestPruneDropsUsageFromBefore(t *testing.T) {
	t.Parallel()

	at := before()
	kept := []string{
		fmt.Sprintf(`{"id": "at the time", "at": %d}`, at.UnixMilli()),
		`null`, `5`, `"text"`, `[{"at": 1}]`, `{}`, `{"at": "1"}`, `{"at": null}`, `{"at": 1e400}`,
	}
	gone := []string{
		fmt.Sprintf(`{"id": "just before", "at": %d}`, at.UnixMilli()-1),
		`{"at": 0}`, `{"at": -5}`, `{"at": 1.5}`, `{"at": 1, "folded": 7}`,
	}

	for name, test := range map[string]struct {
		usage, expected string
		removed         int64
	}{
		"all of it":       {list(gone), `[]`, 5},
		"some of it":      {list([]string{gone[0], kept[0], gone[1], kept[1], gone[2]}), list(kept[:2]), 3},
		"none of it":      {list(kept), list(kept), 0},
		"no array":        {`{"at": 1}`, `{"at": 1}`, 0},
		"an empty array":  {`[]`, `[]`, 0},
		"no usage at all": {`null`, `null`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			b := setupAgent(t)
			b.set(t, agentID, map[string]any{"usage": test.usage, "updated_at": inHours(-5)})
			before, version := b.row(t, agentID), b.version(t, agentID)

			result, err := b.agents.Prune(t.Context(), at)
			require.NoError(t, err)
			require.Equal(t, store.PruneResult{UsageEntries: test.removed}, result)

			after := b.row(t, agentID)
			require.Equal(t, b.normalised(t, test.expected), string(after.Usage))

			before.Usage = after.Usage
			require.Equal(t, before, after, "updated_at too")

			if test.removed == 0 {
				require.Equal(t, version, b.version(t, agentID))
			}
		})
	}
}

func list(elements []string) string { return "[" + strings.Join(elements, ",") + "]" }

func TestPruneRemovesIdentitiesThatNoAgentHas(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	b.set(t, agentID, map[string]any{"metadata": `{"tenant": "acme", "email": "a@example.com", "level": 1}`})
	b.insertDeleted(t, "recently deleted")
	b.set(t, "recently deleted", map[string]any{"deleted_at": inHours(0), "metadata": `{"tenant": "gone"}`})

	used := []string{
		`{}`, `{"tenant": "acme"}`, `{"tenant": "acme", "email": "a@example.com"}`, `{"level": 1.0}`, `{"tenant": "gone"}`,
	}
	unused := []string{`{"tenant": "other"}`, `{"tenant": "acme", "email": "b@example.com"}`, `{"level": "1"}`, `{"ip": "203.0.113.42"}`}

	for _, identity := range append(used, unused...) {
		b.exec(t, `INSERT INTO legion_agents_identities (identity) VALUES (?::text::jsonb)`, identity)
	}

	result, err := b.agents.Prune(t.Context(), before())
	require.NoError(t, err)
	require.Equal(t, store.PruneResult{Identities: int64(len(unused))}, result)

	var left int64
	require.NoError(t, b.db.Raw(`SELECT count(*) FROM legion_agents_identities WHERE identity = ANY (ARRAY(SELECT jsonb_array_elements(?::text::jsonb)))`,
		list(used)).Scan(&left).Error)
	require.EqualValues(t, len(used), left)
}

func TestPruneRemovesEveryonesIdentityWhenNobodyWasEverLimited(t *testing.T) {
	t.Parallel()

	b := setupAgent(t) // without metadata
	b.exec(t, `INSERT INTO legion_agents_identities (identity) VALUES ('{}')`)

	result, err := b.agents.Prune(t.Context(), before())
	require.NoError(t, err)
	require.Equal(t, store.PruneResult{Identities: 1}, result)
}

// More than two batches of everything, and somebody has a row locked in the middle of
// each.
func TestPruneWorksThroughEverythingButLockedRows(t *testing.T) {
	t.Parallel()

	const rows = 450

	b := setup(t)
	b.exec(t, `INSERT INTO legion_agents (agent_id, deleted_at, updated_at) SELECT 'deleted-' || n, ?, ? FROM generate_series(1, ?::int) AS n`,
		inHours(-2), inHours(-2), rows)
	b.exec(t, `INSERT INTO legion_agents (agent_id, usage) SELECT 'spent-' || n, '[{"at": 1}, {"at": 2}]' FROM generate_series(1, ?::int) AS n`, rows)
	b.exec(t, `INSERT INTO legion_agents_identities (identity) SELECT jsonb_build_object('n', n) FROM generate_series(1, ?::int) AS n`, rows)

	require.NoError(t, b.db.Transaction(func(tx *gorm.DB) error {
		locked := tx.Exec(`SELECT FROM legion_agents WHERE agent_id IN ('deleted-17', 'deleted-300', 'spent-17', 'spent-300') FOR UPDATE`)
		require.EqualValues(t, 4, locked.RowsAffected)
		locked = tx.Exec(`SELECT FROM legion_agents_identities WHERE identity IN ('{"n": 17}', '{"n": 300}') FOR UPDATE`)
		require.EqualValues(t, 2, locked.RowsAffected)

		result, err := b.agents.Prune(t.Context(), before())
		require.NoError(t, err)
		require.Equal(t, store.PruneResult{Agents: rows - 2, UsageEntries: 2 * (rows - 2), Identities: rows - 2}, result)

		return nil
	}))

	result, err := b.agents.Prune(t.Context(), before())
	require.NoError(t, err)
	require.Equal(t, store.PruneResult{Agents: 2, UsageEntries: 4, Identities: 2}, result)
}

// An admission that holds the lock of an identity commits an agent that has it, just when
// Prune has looked for such agents.
func TestPruneJudgesAnIdentityByWhatWasCommittedBeforeItsLock(t *testing.T) {
	t.Parallel()

	b := setup(t)
	b.exec(t, `INSERT INTO legion_agents_identities (identity) VALUES ('{"tenant": "acme"}')`)

	prune := b.db.Begin(&sql.TxOptions{Isolation: sql.LevelReadCommitted})
	defer prune.Rollback()

	// A snapshot from before the admission.
	require.NoError(t, prune.Exec("SELECT count(*) FROM legion_agents").Error)
	b.exec(t, `INSERT INTO legion_agents (agent_id, metadata) VALUES (?, '{"tenant": "acme"}')`, agentID)

	result, err := store.For[models.LegionAgent](prune).Prune(t.Context(), before())
	require.NoError(t, err)
	require.Equal(t, store.PruneResult{}, result)
}

func TestPruneRefusesATransactionWithAnOldSnapshot(t *testing.T) {
	t.Parallel()

	b := setup(t)
	b.insertDeleted(t, agentID)

	for _, isolation := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelSerializable} {
		err := b.db.Transaction(func(tx *gorm.DB) error {
			_, err := store.For[models.LegionAgent](tx).Prune(t.Context(), before())

			return err
		}, &sql.TxOptions{Isolation: isolation})
		require.ErrorIs(t, err, store.ErrIsolation)
	}

	require.EqualValues(t, 1, b.count(t, "legion_agents"))
}

func TestPruneRefusesATimeThatIsNotPast(t *testing.T) {
	t.Parallel()

	b := setup(t)
	b.insertDeleted(t, agentID)

	_, err := b.agents.Prune(t.Context(), time.Now().Add(time.Minute))
	require.ErrorIs(t, err, store.ErrInvalidArgument)
	require.ErrorContains(t, err, "before is not in the past")
	require.EqualValues(t, 1, b.count(t, "legion_agents"))
}

// A bare AutoMigrate makes no registry: the first admission does.
func TestPruneWorksWithoutARegistry(t *testing.T) {
	t.Parallel()

	b := setup(t)
	b.exec(t, `DROP TABLE legion_agents_identities`)
	b.insertDeleted(t, agentID)

	result, err := b.agents.Prune(t.Context(), before())
	require.NoError(t, err)
	require.Equal(t, store.PruneResult{Agents: 1}, result)
}

func TestPruneEndsWithItsContext(t *testing.T) {
	t.Parallel()

	b := setup(t)
	b.insertDeleted(t, agentID)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()

	_, err := b.agents.Prune(ctx, before())
	require.ErrorIs(t, err, ctx.Err())
	require.EqualValues(t, 1, b.count(t, "legion_agents"))
}

// Appends go on while usage is pruned, on the same row. They are too few to be folded.
func TestPruneAndAppendsDoNotLoseEachOthersWork(t *testing.T) {
	t.Parallel()

	const writers, appends = 4, 60

	b := setupAgent(t)
	pruned := make(chan int64, 1)
	done := make(chan struct{})

	go func() {
		var total int64

		for {
			result, err := b.agents.Prune(t.Context(), before())
			if err != nil {
				total = -1
			}

			total += result.UsageEntries

			select {
			case <-done:
				pruned <- total

				return
			default:
			}
		}
	}()

	inParallel(t, writers, func(int) error {
		for range appends {
			for _, at := range []time.Time{{}, time.UnixMilli(1)} {
				if _, err := b.agents.AppendUsage(t.Context(), agentID, models.Usage{At: at, TotalTokens: 1}); err != nil {
					return err
				}
			}
		}

		return nil
	})
	close(done)

	removed := <-pruned
	require.Positive(t, removed)

	last, err := b.agents.Prune(t.Context(), before())
	require.NoError(t, err)

	var tokens int64
	for _, entry := range b.usage(t, agentID) {
		tokens += entry.TotalTokens
	}

	require.EqualValues(t, writers*appends, tokens, "the new ones")
	require.EqualValues(t, writers*appends, removed+last.UsageEntries, "the old ones")
}
