package legion_test

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
)

// migrationLock is the key of the advisory lock. Processes of different versions must
// agree on it.
const migrationLock = 0x6c6567696f6e6d69

// olderTable is the agents' table as a version without turns could have left it: the
// columns and indexes of turns are missing, and so are a default, a NOT NULL and the
// constraint.
const olderTable = `
	CREATE TABLE legion_agents (
		agent_id text PRIMARY KEY,
		status text,
		metadata jsonb,
		usage jsonb NOT NULL DEFAULT jsonb_build_array(),
		started_at timestamptz,
		created_at timestamptz NOT NULL DEFAULT now(),
		application_column text
	);
	CREATE INDEX idx_legion_agents_metadata ON legion_agents USING gin (metadata jsonb_path_ops) WITH (fastupdate = off);
	INSERT INTO legion_agents (agent_id, status, metadata, usage, started_at, application_column) VALUES
		('first', 'running', '{"tenant": "acme"}', '[{"id": "a", "at": 1, "total_tokens": 7}]', '2024-02-29 12:00:00+00', 'kept'),
		('second', NULL, NULL, '[]', NULL, NULL)`

func setup(t *testing.T, options ...gorm.Option) (*gorm.DB, *recorder) {
	t.Helper()

	statements := newRecorder()
	db := pgtest.Open(t, append([]gorm.Option{&gorm.Config{Logger: statements}}, options...)...)

	return db, statements
}

// finishes fails the test when call does not return in time.
func finishes(t *testing.T, within time.Duration, call func() error) {
	t.Helper()

	done := make(chan error, 1)
	go func() { done <- call() }()

	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(within):
		t.Fatalf("not done within %s", within)
	}
}

// begin returns a transaction that is rolled back when the test ends.
func begin(t *testing.T, db *gorm.DB, options ...*sql.TxOptions) *gorm.DB {
	t.Helper()

	tx := db.Begin(options...)
	require.NoError(t, tx.Error)
	t.Cleanup(func() { tx.Rollback() })

	return tx
}

func TestMigrateMakesWhatAutoMigrateMakes(t *testing.T) {
	t.Parallel()

	t.Run("of Models", func(t *testing.T) {
		t.Parallel()

		migrated, _ := setup(t)
		require.NoError(t, legion.Migrate(migrated))
		require.Equal(t, []string{"legion_agents", "legion_agents_identities"}, tableNames(t, migrated))

		autoMigrated, _ := setup(t)
		require.NoError(t, autoMigrated.AutoMigrate(legion.Models()...))
		require.Equal(t, catalogue(t, autoMigrated), catalogue(t, migrated))
	})

	t.Run("of an application's model", func(t *testing.T) {
		t.Parallel()

		migrated, _ := setup(t)
		require.NoError(t, migrated.Use(legion.New(legion.WithModel(&ChatAgent{}))))
		require.NoError(t, legion.Migrate(migrated))

		autoMigrated, _ := setup(t)
		require.NoError(t, autoMigrated.AutoMigrate(&ChatAgent{}))
		require.NoError(t, autoMigrated.Table("chat_agents_identities").AutoMigrate(&models.LegionIdentity{}))
		require.Equal(t, catalogue(t, autoMigrated), catalogue(t, migrated))
	})
}

func TestMigrateByTenProcessesAtOnce(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name         string
		concurrently bool
		before       string
	}{
		{name: "empty database"},
		{name: "empty database with concurrent indexes", concurrently: true},
		{name: "older table", before: olderTable},
		{name: "older table with concurrent indexes", concurrently: true, before: olderTable},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db, _ := setup(t)
			if test.before != "" {
				require.NoError(t, db.Exec(test.before).Error)
			}

			migrateInProcesses(t, pgtest.DSN(db), 10, test.concurrently)

			before := versions(t, db)
			require.NoError(t, legion.Migrate(db))
			require.Equal(t, before, versions(t, db), "something was left to do")
		})
	}
}

func migrateInProcesses(t *testing.T, dsn string, processes int, concurrently bool, environment ...string) {
	t.Helper()

	type child struct {
		command *exec.Cmd
		start   io.WriteCloser
		errors  *bytes.Buffer
	}

	children := make([]child, processes)
	for i := range children {
		command := exec.CommandContext(t.Context(), os.Args[0])
		command.Env = append(append(os.Environ(), environment...), childVariable+"="+dsn)

		if concurrently {
			command.Env = append(command.Env, childConcurrentlyVariable+"=1")
		}

		var stderr bytes.Buffer

		command.Stderr = &stderr
		start, err := command.StdinPipe()
		require.NoError(t, err)
		ready, err := command.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, command.Start())

		children[i] = child{command, start, &stderr}

		line, err := bufio.NewReader(ready).ReadString('\n')
		require.NoError(t, err, "%s", &stderr)
		require.Equal(t, "ready\n", line)
	}

	for _, each := range children {
		_, err := io.WriteString(each.start, "go\n")
		require.NoError(t, err)
	}

	for _, each := range children {
		require.NoError(t, each.command.Wait(), "%s", each.errors)
	}
}

func TestMigrateUpgradesAnOlderTableAndKeepsItsRows(t *testing.T) {
	t.Parallel()

	for name, options := range map[string][]legion.MigrateOption{
		"in one transaction":      nil,
		"with concurrent indexes": {legion.WithConcurrentIndexes()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, _ := setup(t)
			require.NoError(t, db.Exec(olderTable).Error)
			require.NoError(t, legion.Migrate(db, options...))

			var agents []models.LegionAgent
			require.NoError(t, db.Order("agent_id").Find(&agents).Error)
			require.Len(t, agents, 2)

			first, second := agents[0], agents[1]
			require.Equal(t, "first", first.AgentID)
			require.Equal(t, models.StatusRunning, first.Status)
			require.JSONEq(t, `{"tenant": "acme"}`, first.Metadata.String())
			require.JSONEq(t, `[{"id": "a", "at": 1, "total_tokens": 7}]`, first.Usage.String())
			require.Equal(t, "2024-02-29T12:00:00Z", first.StartedAt.UTC().Format(time.RFC3339))
			require.Zero(t, first.ReservedTokens)
			require.Nil(t, first.RunID)
			require.Nil(t, first.LeaseExpiresAt)
			require.WithinDuration(t, time.Now(), first.UpdatedAt, time.Hour)
			require.Equal(t, models.StatusIdle, second.Status)

			var kept string
			require.NoError(t, db.Raw("SELECT application_column FROM legion_agents WHERE agent_id = 'first'").Scan(&kept).Error)
			require.Equal(t, "kept", kept)

			// Apart from the order of the columns and the application's own, it is the new
			// table.
			fresh, _ := setup(t)
			require.NoError(t, legion.Migrate(fresh))
			require.NoError(t, db.Exec("ALTER TABLE legion_agents DROP COLUMN application_column").Error)
			require.ElementsMatch(t, withoutPositions(catalogue(t, fresh)), withoutPositions(catalogue(t, db)))
		})
	}
}

func withoutPositions(catalogue []string) []string {
	result := make([]string, len(catalogue))
	for i, line := range catalogue {
		words := strings.Fields(line)
		if words[1] == "column" {
			words[2] = ""
		}

		result[i] = strings.Join(words, " ")
	}

	return result
}

func TestMigrateLeavesColumnsOfTheApplicationAlone(t *testing.T) {
	t.Parallel()

	db, statements := setup(t)
	require.NoError(t, legion.Migrate(db))
	require.NoError(t, db.Exec("ALTER TABLE legion_agents ADD COLUMN title varchar(10) NOT NULL DEFAULT 'none'").Error)
	statements.take()

	require.NoError(t, legion.Migrate(db))
	require.Empty(t, statements.takeDDL())
}

func TestMigrateOfAnUpToDateSchemaIsOneQuery(t *testing.T) {
	t.Parallel()

	for name, options := range map[string][]legion.MigrateOption{
		"in one transaction":      nil,
		"with concurrent indexes": {legion.WithConcurrentIndexes()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, statements := setup(t)
			require.NoError(t, legion.Migrate(db))
			before := versions(t, db)
			statements.take()

			require.NoError(t, legion.Migrate(db, options...))
			ran := statements.take()
			require.Len(t, ran, 1, "%q", ran)
			require.Contains(t, ran[0], "pg_catalog.pg_class")
			require.Equal(t, before, versions(t, db))
		})
	}
}

func TestMigrateOfAnUpToDateSchemaWaitsForNobody(t *testing.T) {
	t.Parallel()

	for name, lock := range map[string]string{
		"idle reader":       "SELECT count(*) FROM legion_agents",
		"somebody's DDL":    "LOCK TABLE legion_agents, legion_agents_identities IN ACCESS EXCLUSIVE MODE",
		"another migration": fmt.Sprintf("SELECT pg_advisory_xact_lock(%d)", migrationLock),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, _ := setup(t)
			require.NoError(t, legion.Migrate(db))

			holder := begin(t, db)
			require.NoError(t, holder.Exec(lock).Error)

			finishes(t, time.Minute, func() error { return legion.Migrate(db) })
		})
	}
}

func TestMigrationsExcludeEachOther(t *testing.T) {
	t.Parallel()

	db, _, complete := setupBuild(t)
	before := versions(t, db)

	holder := begin(t, db)
	require.NoError(t, holder.Exec("SELECT pg_advisory_xact_lock(?)", migrationLock).Error)

	for name, migrate := range map[string]func(db *gorm.DB) error{
		"in one transaction":      func(db *gorm.DB) error { return legion.Migrate(db) },
		"with concurrent indexes": func(db *gorm.DB) error { return legion.Migrate(db, legion.WithConcurrentIndexes()) },
		"down":                    legion.MigrateDown,
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		t.Cleanup(cancel)

		require.ErrorIs(t, migrate(db.WithContext(ctx)), context.DeadlineExceeded, name)
		require.Equal(t, before, versions(t, db), name)
	}

	require.NoError(t, holder.Rollback().Error)
	require.NoError(t, legion.Migrate(db))
	require.Equal(t, complete, catalogue(t, db))
}

func TestMigrateThatHasToWaitForATableLetsOthersPass(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	require.NoError(t, db.Exec(olderTable).Error)

	reader := begin(t, db)
	require.NoError(t, reader.Exec("SELECT count(*) FROM legion_agents").Error)

	migrated := make(chan error, 1)
	go func() { migrated <- legion.Migrate(db) }()

	require.Eventually(t, func() bool {
		var waiting int64

		err := db.Raw("SELECT count(*) FROM pg_locks WHERE relation = 'legion_agents'::regclass AND NOT granted").Scan(&waiting).Error

		return err == nil && waiting > 0
	}, time.Minute, 10*time.Millisecond, "Migrate does not wait for the table")

	// This one queues behind the waiting ALTER TABLE, and passes while the first reader
	// is still there.
	finishes(t, time.Minute, func() error { return db.Exec("SELECT count(*) FROM legion_agents").Error })

	select {
	case err := <-migrated:
		t.Fatalf("Migrate did not wait for the reader: %v", err)
	default:
	}

	require.NoError(t, reader.Rollback().Error)
	finishes(t, time.Minute, func() error { return <-migrated })
	require.True(t, db.Migrator().HasColumn(&models.LegionAgent{}, "RunID"))
}

func TestMigrateWhileAutoMigrateRuns(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)

	// What AutoMigrate has made is not committed, so Migrate cannot see it, and finds the
	// name taken when it is.
	other := begin(t, db)
	require.NoError(t, other.AutoMigrate(legion.Models()...))

	migrated := make(chan error, 1)
	go func() { migrated <- legion.Migrate(db) }()

	require.Eventually(t, func() bool {
		var waiting int64

		err := db.Raw("SELECT count(*) FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted AND " +
			"pid IN (SELECT pid FROM pg_stat_activity WHERE datname = current_database())").Scan(&waiting).Error

		return err == nil && waiting > 0
	}, time.Minute, 10*time.Millisecond, "Migrate does not wait for the name")

	require.NoError(t, other.Commit().Error)
	finishes(t, time.Minute, func() error { return <-migrated })
	require.Equal(t, []string{"legion_agents", "legion_agents_identities"}, tableNames(t, db))
}

func TestMigrateDown(t *testing.T) {
	t.Parallel()

	t.Run("drops both tables", func(t *testing.T) {
		t.Parallel()

		db, statements := setup(t)
		require.NoError(t, legion.Migrate(db))
		require.NoError(t, legion.MigrateDown(db))
		require.Empty(t, tableNames(t, db))

		statements.take()
		require.NoError(t, legion.MigrateDown(db), "again")
		require.Empty(t, statements.takeDDL())

		require.NoError(t, legion.Migrate(db))
		require.Len(t, tableNames(t, db), 2)
	})

	t.Run("drops the one that is there", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t)
		require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))
		require.NoError(t, legion.MigrateDown(db))
		require.Empty(t, tableNames(t, db))
	})

	t.Run("keeps everything when a view of the application needs it", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t)
		require.NoError(t, legion.Migrate(db))
		require.NoError(t, db.Exec("CREATE VIEW running AS SELECT * FROM legion_agents WHERE status = 'running'").Error)

		require.ErrorContains(t, legion.MigrateDown(db), "legion: other objects depend on the tables")
		require.Len(t, tableNames(t, db), 2)
	})

	t.Run("joins the caller's transaction", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t)
		require.NoError(t, legion.Migrate(db))

		tx := begin(t, db)
		require.NoError(t, legion.MigrateDown(tx))
		require.Empty(t, tableNames(t, tx))
		require.NoError(t, tx.Rollback().Error)
		require.Len(t, tableNames(t, db), 2)
	})
}
