package legion_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
)

// withoutIndexes is the work that is left to a concurrent build: a table with rows,
// without its indexes and with a constraint that is not validated.
const withoutIndexes = `
	DROP INDEX idx_legion_agents_metadata, idx_legion_agents_running, idx_legion_agents_started_at, idx_legion_agents_updated_at;
	ALTER TABLE legion_agents DROP CONSTRAINT chk_legion_agents_status;
	ALTER TABLE legion_agents ADD CONSTRAINT chk_legion_agents_status CHECK (status IN ('idle', 'running')) NOT VALID;
	INSERT INTO legion_agents (agent_id, metadata) SELECT number, jsonb_build_object('ip', number) FROM generate_series(1, 1000) AS number`

// setupBuild returns a database that needs a concurrent build, and what it should
// look like afterwards.
func setupBuild(t *testing.T, options ...gorm.Option) (db *gorm.DB, statements *recorder, complete []string) {
	t.Helper()

	db, statements = setup(t, options...)
	require.NoError(t, legion.Migrate(db))
	complete = catalogue(t, db)
	require.NoError(t, db.Exec(withoutIndexes).Error)
	require.NotEqual(t, complete, catalogue(t, db))
	statements.take()

	return db, statements, complete
}

// holdBuild begins a transaction that a concurrent build has to wait for.
func holdBuild(t *testing.T, db *gorm.DB) (release func()) {
	t.Helper()

	writer := begin(t, db)
	require.NoError(t, writer.Exec("INSERT INTO legion_agents (agent_id) VALUES ('writer')").Error)

	return func() { require.NoError(t, writer.Commit().Error) }
}

// awaitBuild waits until a build has begun, which then has an index that is not valid.
func awaitBuild(t *testing.T, db *gorm.DB) {
	t.Helper()

	require.Eventually(t, func() bool { return invalidIndexes(t, db) > 0 }, time.Minute, 10*time.Millisecond, "no build has begun")
}

func invalidIndexes(t *testing.T, db *gorm.DB) (count int64) {
	t.Helper()

	require.NoError(t, db.Raw("SELECT count(*) FROM pg_index WHERE NOT indisvalid").Scan(&count).Error)

	return count
}

func TestConcurrentIndexesLetWritersPass(t *testing.T) {
	t.Parallel()

	db, statements, complete := setupBuild(t)
	release := holdBuild(t, db)

	migrated := make(chan error, 1)
	go func() { migrated <- legion.Migrate(db, legion.WithConcurrentIndexes()) }()

	awaitBuild(t, db)
	finishes(t, time.Minute, func() error { return db.Exec("INSERT INTO legion_agents (agent_id) VALUES ('other')").Error })

	select {
	case err := <-migrated:
		t.Fatalf("the build did not wait for the older transaction: %v", err)
	default:
	}

	release()
	finishes(t, time.Minute, func() error { return <-migrated })
	require.Equal(t, complete, catalogue(t, db))

	ddl := statements.takeDDL()
	require.Contains(t, ddl, `CREATE INDEX CONCURRENTLY "idx_legion_agents_metadata" ON "legion_agents" USING gin (metadata jsonb_path_ops) WITH (fastupdate = off)`)
	require.NoError(t, legion.Migrate(db, legion.WithConcurrentIndexes()))
	require.Empty(t, statements.takeDDL())
}

func TestAnInterruptedBuildIsMadeGoodByALaterMigrate(t *testing.T) {
	t.Parallel()

	for name, options := range map[string][]legion.MigrateOption{
		"in one transaction":      nil,
		"with concurrent indexes": {legion.WithConcurrentIndexes()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, statements, complete := setupBuild(t)
			release := holdBuild(t, db)

			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()

			migrated := make(chan error, 1)
			go func() { migrated <- legion.Migrate(db.WithContext(ctx), legion.WithConcurrentIndexes()) }()

			awaitBuild(t, db)
			cancel()
			require.ErrorIs(t, <-migrated, context.Canceled)
			require.Eventually(t, func() bool {
				var builds int64

				err := db.Raw("SELECT count(*) FROM pg_stat_progress_create_index WHERE datname = current_database()").Scan(&builds).Error

				return err == nil && builds == 0
			}, time.Minute, 10*time.Millisecond, "the build goes on")
			release()
			require.EqualValues(t, 1, invalidIndexes(t, db))
			statements.take()

			require.NoError(t, legion.Migrate(db, options...))
			require.Equal(t, complete, catalogue(t, db))
			require.NoError(t, legion.Migrate(db))
		})
	}
}

func TestAnInvalidIndexIsReplacedWhereverItsTableLives(t *testing.T) {
	t.Parallel()

	for name, options := range map[string][]legion.MigrateOption{
		"in one transaction":      nil,
		"with concurrent indexes": {legion.WithConcurrentIndexes()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, _ := setup(t)
			require.NoError(t, db.Use(legion.New(legion.WithTable("audit.Agents"))))
			require.NoError(t, db.Exec("CREATE SCHEMA audit").Error)
			require.NoError(t, legion.Migrate(db))
			complete := catalogue(t, db)

			// A unique index that cannot be, since two rows have the same key.
			require.NoError(t, db.Exec(`INSERT INTO audit."Agents" (agent_id) VALUES ('one'), ('two')`).Error)
			require.NoError(t, db.Exec(`DROP INDEX audit."idx_audit_Agents_started_at"`).Error)
			require.Error(t, db.Exec(`CREATE UNIQUE INDEX CONCURRENTLY "idx_audit_Agents_started_at" ON audit."Agents" (status)`).Error)
			require.EqualValues(t, 1, invalidIndexes(t, db))

			require.NoError(t, legion.Migrate(db, options...))
			require.Equal(t, complete, catalogue(t, db))
		})
	}
}

func TestConcurrentIndexesComeWithAConstraintThatIsValidatedLater(t *testing.T) {
	t.Parallel()

	db, statements := setup(t)
	require.NoError(t, db.Exec(olderTable).Error)
	statements.take()
	require.NoError(t, legion.Migrate(db, legion.WithConcurrentIndexes()))

	ddl := statements.takeDDL()
	require.Contains(t, ddl, `ALTER TABLE "legion_agents" ADD CONSTRAINT "chk_legion_agents_status" CHECK (status IN ('idle', 'running')) NOT VALID`)
	require.Contains(t, ddl, `ALTER TABLE "legion_agents" VALIDATE CONSTRAINT "chk_legion_agents_status"`)
}

// Who waits for the lock in a statement holds a snapshot that the build waits for.
func TestMigrationsThatWaitDoNotHoldUpABuild(t *testing.T) {
	t.Parallel()

	db, _, complete := setupBuild(t)
	release := holdBuild(t, db)

	migrations := []func() error{
		func() error { return legion.Migrate(db, legion.WithConcurrentIndexes()) },
		func() error { return legion.Migrate(db, legion.WithConcurrentIndexes()) },
		func() error { return legion.Migrate(db) },
		func() error {
			// It waits for 30 seconds at most, which a busy machine can use up.
			for {
				err := db.Transaction(func(tx *gorm.DB) error { return legion.Migrate(tx) })
				if !legion.Retryable(err) {
					return err
				}
			}
		},
	}
	results := make(chan error, len(migrations))

	for i, migrate := range migrations {
		go func() { results <- migrate() }()

		if i == 0 {
			awaitBuild(t, db)
		}
	}

	// Longer than they pause between two attempts, and than the server's deadlock_timeout.
	time.Sleep(1500 * time.Millisecond)
	release()

	for range migrations {
		finishes(t, time.Minute, func() error { return <-results })
	}

	require.Equal(t, complete, catalogue(t, db))
}

func TestConcurrentIndexesOnAPoolOfOneConnection(t *testing.T) {
	t.Parallel()

	dsn := pgtest.WithParameter(pgtest.Database(t), "statement_timeout", "54321")
	db := pgtest.OpenDSN(t, dsn, pgtest.MaxOpenConnections(1))
	require.NoError(t, db.Exec(olderTable).Error)
	finishes(t, time.Minute, func() error { return legion.Migrate(db, legion.WithConcurrentIndexes()) })

	var timeout string
	require.NoError(t, db.Raw("SHOW statement_timeout").Scan(&timeout).Error)
	require.Equal(t, "54321ms", timeout, "the application got the settings of the build")

	require.Eventually(t, func() bool {
		var locks int64

		err := db.Raw("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND " +
			"database = (SELECT oid FROM pg_database WHERE datname = current_database())").Scan(&locks).Error

		return err == nil && locks == 0
	}, time.Minute, 10*time.Millisecond, "the lock of the build is still held")
}

func TestConcurrentIndexesOutlastTheRolesTimeouts(t *testing.T) {
	t.Parallel()

	db, _, complete := setupBuild(t)
	release := holdBuild(t, db)

	limited := pgtest.WithParameter(pgtest.WithParameter(pgtest.DSN(db), "statement_timeout", "200"), "lock_timeout", "200")
	migrated := make(chan error, 1)

	impatient := pgtest.OpenDSN(t, limited)
	go func() { migrated <- legion.Migrate(impatient, legion.WithConcurrentIndexes()) }()

	awaitBuild(t, db)
	time.Sleep(time.Second)
	release()
	finishes(t, time.Minute, func() error { return <-migrated })
	require.Equal(t, complete, catalogue(t, db))
}

func TestConcurrentIndexesCannotBeBuiltInATransaction(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	tx := begin(t, db)
	err := legion.Migrate(tx, legion.WithConcurrentIndexes())
	require.ErrorIs(t, err, legion.ErrInvalidConfig)
	require.ErrorContains(t, err, "call Migrate outside of it")
	require.Empty(t, tableNames(t, tx))
}

// A resolver sends each statement outside a transaction to a pool of its choice. The
// session that holds the lock must not lose its statements to another one.
func TestConcurrentIndexesStayOnTheirConnectionUnderAResolver(t *testing.T) {
	t.Parallel()

	db, _, complete := setupBuild(t)
	other, err := pgtest.Open(t).DB()
	require.NoError(t, err)

	resolve := func(tx *gorm.DB) {
		if _, inTransaction := tx.Statement.ConnPool.(gorm.TxCommitter); !inTransaction {
			tx.Statement.ConnPool = other
		}
	}

	resolved := pgtest.OpenDSN(t, pgtest.DSN(db))
	require.NoError(t, errors.Join(
		resolved.Callback().Raw().Before("*").Register("test:resolve_raw", resolve),
		resolved.Callback().Row().Before("*").Register("test:resolve_row", resolve),
	))

	require.NoError(t, legion.Migrate(resolved, legion.WithConcurrentIndexes()))
	require.Equal(t, complete, catalogue(t, db))
}

func TestMigrateGivesUpOnAPoolThatIsUsedUp(t *testing.T) {
	t.Parallel()

	for name, options := range map[string][]legion.MigrateOption{
		"in one transaction":      nil,
		"with concurrent indexes": {legion.WithConcurrentIndexes()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, _ := setup(t, pgtest.MaxOpenConnections(1))
			require.NoError(t, db.Use(legion.New(legion.WithConnectionTimeout(100*time.Millisecond))))
			begin(t, db)

			require.ErrorIs(t, legion.Migrate(db, options...), legion.ErrNoConnection)
		})
	}
}
