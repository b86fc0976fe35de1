package lease

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/models"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const (
	length  = 900 * time.Millisecond
	longest = time.Minute
)

// setup is a database with the agents' table, and a way to connect to it.
func setup(t *testing.T) (*gorm.DB, func(ctx context.Context) (*pgx.Conn, error)) {
	t.Helper()

	dsn := pgtest.Database(t)
	db := pgtest.OpenDSN(t, dsn)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))

	return db, func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, dsn) }
}

func insertRun(t *testing.T, db *gorm.DB, kept run.Run, left time.Duration) {
	t.Helper()

	require.NoError(t, db.Exec(`INSERT INTO legion_agents (agent_id, status, run_id, lease_expires_at)
		VALUES (?, 'running', ?, clock_timestamp() + ? * interval '1 second')`, kept.AgentID, kept.ID, left.Seconds()).Error)
}

func TestTheStatementIsTheGoldenFile(t *testing.T) {
	t.Parallel()

	expected, err := os.ReadFile(filepath.Join("testdata", "renew.sql"))
	require.NoError(t, err)
	require.Equal(t, strings.TrimSuffix(string(expected), "\n"), RenewStatement(`"app"."Agents"`, 30*time.Second))
}

func TestARenewalTellsWhatBecameOfEachLease(t *testing.T) {
	t.Parallel()

	db, connect := setup(t)
	held, locked, over, revoked, gone := run.Run{AgentID: "held", ID: "1"}, run.Run{AgentID: "locked", ID: "2"},
		run.Run{AgentID: "over", ID: "3"}, run.Run{AgentID: "revoked", ID: "4"}, run.Run{AgentID: "gone", ID: "5"}
	replaced := run.Run{AgentID: "held", ID: "an earlier run"}

	for _, kept := range []run.Run{held, locked, revoked} {
		insertRun(t, db, kept, time.Minute)
	}

	insertRun(t, db, over, -time.Millisecond)
	require.NoError(t, db.Exec("UPDATE legion_agents SET lease_expires_at = NULL WHERE agent_id = 'revoked'").Error)

	tx := db.Begin()
	t.Cleanup(func() { tx.Rollback() })
	require.NoError(t, tx.Exec("SELECT FROM legion_agents WHERE agent_id = 'locked' FOR UPDATE").Error)

	renewer := renewer{length: longest, statement: RenewStatement("legion_agents", time.Hour), connect: connect}
	t.Cleanup(renewer.close)

	answers, err := renewer.renew(t.Context(), []run.Run{held, locked, over, revoked, gone, replaced})
	require.NoError(t, err)
	require.ElementsMatch(t, []answer{
		{run: held, renewed: true, held: true},
		{run: locked, held: true},
		{run: over},
		{run: revoked},
		{run: gone},
		{run: replaced},
	}, answers)

	var renewed []string
	require.NoError(t, db.Raw("SELECT agent_id FROM legion_agents WHERE lease_expires_at > now() + interval '50 minutes'").Scan(&renewed).Error)
	require.Equal(t, []string{"held"}, renewed)
}

func TestARenewalWorksWhateverTheDefaultIsolation(t *testing.T) {
	t.Parallel()

	db, connect := setup(t)
	kept := run.Run{AgentID: "a", ID: "1"}
	insertRun(t, db, kept, time.Minute)

	renewer := renewer{length: longest, statement: RenewStatement("legion_agents", time.Hour), connect: connect, begins: true}
	t.Cleanup(renewer.close)

	answers, err := renewer.renew(t.Context(), []run.Run{kept})
	require.NoError(t, err)
	require.True(t, answers[0].renewed)
}

func TestARenewalOutlivesTheConnectionOfTheLastOne(t *testing.T) {
	t.Parallel()

	for parameter, end := range map[string]string{
		"application_name":     "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '100' AND datname = current_database()",
		"idle_session_timeout": "SELECT pg_sleep(0.3)",
	} {
		t.Run(parameter, func(t *testing.T) {
			t.Parallel()

			db, _ := setup(t)
			kept := run.Run{AgentID: "a", ID: "1"}
			insertRun(t, db, kept, time.Minute)

			var connected int

			renewer := renewer{length: longest, statement: RenewStatement("legion_agents", time.Hour), connect: func(ctx context.Context) (*pgx.Conn, error) {
				connected++

				return pgx.Connect(ctx, pgtest.WithParameter(pgtest.DSN(db), parameter, "100"))
			}}
			t.Cleanup(renewer.close)

			for range 3 {
				answers, err := renewer.renew(t.Context(), []run.Run{kept})
				require.NoError(t, err)
				require.Equal(t, []answer{{run: kept, renewed: true, held: true}}, answers)
				require.NoError(t, db.Exec(end).Error)
			}

			require.Equal(t, 3, connected)
		})
	}
}

func TestAKeeperWithoutLeasesHasNoGoroutineAndNoConnection(t *testing.T) {
	t.Parallel()

	db, connect := setup(t)

	var connected atomic.Int64

	keeper := NewKeeper(length, "legion_agents", func(ctx context.Context) (*pgx.Conn, error) {
		connected.Add(1)

		return connect(ctx)
	})

	working := func() bool {
		keeper.mutex.Lock()
		defer keeper.mutex.Unlock()

		return keeper.stop != nil
	}

	for round := range 2 {
		kept := run.Run{AgentID: "a", ID: string(rune('1' + round))}
		require.NoError(t, db.Exec("DELETE FROM legion_agents").Error)
		insertRun(t, db, kept, length)
		keeper.Add(kept, time.Now(), func() { t.Error("it was lost") })
		require.True(t, working())
		require.Eventually(t, func() bool { return connected.Load() == int64(round+1) }, longest, time.Millisecond, "it connects only to renew")

		keeper.Remove(kept)
		require.Eventually(t, func() bool { return !working() }, longest, time.Millisecond)
	}

	keeper.Close()
	require.Eventually(t, func() bool {
		var sessions int64
		err := db.Raw("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'WITH asked%'").Scan(&sessions).Error

		return err == nil && sessions == 0
	}, longest, 10*time.Millisecond)
}

func TestALeaseThatCannotBeRenewedIsLostInTime(t *testing.T) {
	t.Parallel()

	refused := errors.New("refused")
	keeper := NewKeeper(length, "legion_agents", func(context.Context) (*pgx.Conn, error) { return nil, refused })
	t.Cleanup(keeper.Close)

	lost := make(chan time.Time, 2)
	asked := time.Now()
	keeper.Add(run.Run{AgentID: "a", ID: "1"}, asked, func() { lost <- time.Now() })

	require.WithinDuration(t, asked.Add(length), <-lost, length/2)
	require.Empty(t, lost)
}

func TestARemovedLeaseIsNotLost(t *testing.T) {
	t.Parallel()

	keeper := NewKeeper(length, "legion_agents", func(context.Context) (*pgx.Conn, error) { return nil, context.Canceled })
	t.Cleanup(keeper.Close)

	kept := run.Run{AgentID: "a", ID: "1"}
	keeper.Add(kept, time.Now(), func() { t.Error("it was lost") })
	keeper.Remove(kept)
	keeper.Remove(kept)
	time.Sleep(length * 3 / 2)
}
