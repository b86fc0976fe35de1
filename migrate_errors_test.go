package legion_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/utils/tests"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
)

func TestMigrateJoinsTheCallersTransaction(t *testing.T) {
	t.Parallel()

	t.Run("on one connection", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t, pgtest.MaxOpenConnections(1))

		finishes(t, time.Minute, func() error {
			return db.Transaction(func(tx *gorm.DB) error { return legion.Migrate(tx) })
		})
		require.Len(t, tableNames(t, db), 2)
	})

	t.Run("rolled back with it", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t)
		tx := begin(t, db)
		require.NoError(t, legion.Migrate(tx))
		require.Len(t, tableNames(t, tx), 2)
		require.NoError(t, tx.Rollback().Error)
		require.Empty(t, tableNames(t, db))
	})

	t.Run("holding the lock to its end", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t)
		tx := begin(t, db)
		require.NoError(t, legion.Migrate(tx))

		var locks []int64
		require.NoError(t, db.Raw("SELECT classid::bigint << 32 | objid::bigint FROM pg_locks WHERE locktype = 'advisory' "+
			"AND database = (SELECT oid FROM pg_database WHERE datname = current_database())").Scan(&locks).Error)
		require.Equal(t, []int64{migrationLock}, locks)

		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, legion.Migrate(db.WithContext(ctx)), context.DeadlineExceeded)

		require.NoError(t, tx.Commit().Error)
		require.NoError(t, legion.Migrate(db))
	})

	t.Run("leaving it usable after an error", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t)
		require.NoError(t, db.Exec("CREATE VIEW legion_agents_identities AS SELECT 1 AS one").Error)

		tx := begin(t, db)
		err := legion.Migrate(tx)

		var server *pgconn.PgError
		require.ErrorAs(t, err, &server)
		require.Equal(t, "42P07", server.Code)
		require.Empty(t, tableNames(t, tx), "the agents' table was not rolled back")
	})

	t.Run("unless it has an older snapshot", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t)
		for _, level := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelSerializable} {
			tx := begin(t, db, &sql.TxOptions{Isolation: level})
			require.ErrorIs(t, legion.Migrate(tx), legion.ErrIsolation)
			require.Empty(t, tableNames(t, tx))
		}
	})
}

func TestMigrateWithoutTheRightToChangeTheSchema(t *testing.T) {
	t.Parallel()

	// A connection that has given up its rights: the role is one that every server has.
	setup := func(t *testing.T) (owner, application *gorm.DB) {
		t.Helper()

		owner, _ = setup(t)

		var superuser bool
		require.NoError(t, owner.Raw("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").Scan(&superuser).Error)

		if !superuser {
			t.Skip("the server's role is no superuser, so it cannot become another role")
		}

		require.NoError(t, owner.Exec("REVOKE CREATE ON SCHEMA public FROM PUBLIC").Error)

		application = pgtest.OpenDSN(t, pgtest.DSN(owner), pgtest.MaxOpenConnections(1))
		require.NoError(t, application.Exec("SET ROLE pg_monitor").Error)

		return owner, application
	}

	requireClear := func(t *testing.T, err error) {
		t.Helper()

		require.ErrorIs(t, err, legion.ErrNotMigrated)
		require.ErrorContains(t, err, "call legion.Migrate once as the owner")
		require.ErrorContains(t, err, "legion.DDL")

		var server *pgconn.PgError
		require.ErrorAs(t, err, &server)
		require.Equal(t, "42501", server.Code)
	}

	t.Run("on an empty database", func(t *testing.T) {
		t.Parallel()

		_, application := setup(t)
		requireClear(t, legion.Migrate(application))
	})

	t.Run("on an older table", func(t *testing.T) {
		t.Parallel()

		owner, application := setup(t)
		require.NoError(t, owner.Exec(olderTable).Error)
		requireClear(t, legion.Migrate(application))
		requireClear(t, legion.MigrateDown(application))
	})

	t.Run("works when there is nothing to change", func(t *testing.T) {
		t.Parallel()

		owner, application := setup(t)
		require.NoError(t, legion.Migrate(owner))
		require.NoError(t, legion.Migrate(application))
	})
}

func TestMigrateRefusesWhatItCannotMigrate(t *testing.T) {
	t.Parallel()

	t.Run("nil", func(t *testing.T) {
		t.Parallel()
		require.ErrorIs(t, legion.Migrate(nil), legion.ErrInvalidConfig)
		require.ErrorIs(t, legion.MigrateDown(nil), legion.ErrInvalidConfig)

		_, err := legion.DDL(nil)
		require.ErrorIs(t, err, legion.ErrInvalidConfig)
	})

	t.Run("another dialect", func(t *testing.T) {
		t.Parallel()

		db, err := gorm.Open(tests.DummyDialector{})
		require.NoError(t, err)
		require.ErrorIs(t, legion.Migrate(db), legion.ErrInvalidConfig)
		require.ErrorContains(t, legion.Migrate(db), "gorm.io/driver/postgres")
	})

	t.Run("a failed session", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t)
		failed := db.Session(&gorm.Session{})
		require.ErrorIs(t, failed.AddError(gorm.ErrInvalidData), gorm.ErrInvalidData)
		require.ErrorIs(t, legion.Migrate(failed), gorm.ErrInvalidData)
	})

	t.Run("an ended context", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, legion.Migrate(db.WithContext(ctx)), context.Canceled)
		require.Empty(t, tableNames(t, db))
	})

	t.Run("a column of another type", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t)
		require.NoError(t, db.Exec("CREATE TABLE legion_agents (agent_id text PRIMARY KEY, metadata json)").Error)
		before := versions(t, db)

		err := legion.Migrate(db)
		require.ErrorIs(t, err, legion.ErrNotMigrated)
		require.EqualError(t, err, `legion: the database is not migrated: column "metadata" of table "legion_agents" `+
			`has the type json: convert it to jsonb with ALTER TABLE`)
		require.Equal(t, before, versions(t, db))
	})

	t.Run("an index name that another table has taken", func(t *testing.T) {
		t.Parallel()

		db, _ := setup(t)
		require.NoError(t, db.Exec("CREATE TABLE others (number int); "+
			"CREATE INDEX idx_legion_agents_running ON others (number)").Error)

		err := legion.Migrate(db)
		require.ErrorContains(t, err, `"idx_legion_agents_running" already exists`)
		require.Equal(t, []string{"others"}, tableNames(t, db))
	})
}
