package migration

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func setup(t *testing.T, options ...gorm.Option) (*gorm.DB, database.Settings) {
	t.Helper()

	session, err := database.Session(pgtest.Open(t, options...))
	require.NoError(t, err)

	return session, database.SettingsOf(session)
}

func TestTheWaitForTheLockIsBoundedInACallersTransaction(t *testing.T) {
	t.Parallel()

	db, settings := setup(t)
	holder := db.Begin()
	t.Cleanup(func() { holder.Rollback() })
	require.NoError(t, lockTransaction(holder))

	err := db.Transaction(func(tx *gorm.DB) error { return up(tx, settings, Options{}, 10*time.Millisecond) })
	require.ErrorIs(t, err, fault.ErrContention)
	require.True(t, database.Retryable(err))
	require.ErrorContains(t, err, "for 10ms: call Migrate outside a transaction")

	require.NoError(t, holder.Rollback().Error)
	require.NoError(t, Up(db, settings, Options{}))
}

func TestABuildGivesUpOnAPoolThatIsUsedUp(t *testing.T) {
	t.Parallel()

	db, settings := setup(t, pgtest.MaxOpenConnections(1))
	settings.ConnectionTimeout = 10 * time.Millisecond
	tables, err := TablesOf(db, settings)
	require.NoError(t, err)

	holder := db.Begin()
	t.Cleanup(func() { holder.Rollback() })
	require.ErrorIs(t, buildAlone(db, settings, tables), fault.ErrNoConnection)
}

func TestABuildNeedsAPoolToTakeAConnectionFrom(t *testing.T) {
	t.Parallel()

	db, settings := setup(t)
	tables, err := TablesOf(db, settings)
	require.NoError(t, err)

	require.NoError(t, db.Connection(func(tx *gorm.DB) error {
		require.ErrorIs(t, buildAlone(tx, settings, tables), fault.ErrInvalidConfig)

		return nil
	}))
}

func TestBreakLines(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct{ sql, broken string }{
		"columns": {
			sql:    `CREATE TABLE "a" ("b" text,"c" numeric(1,2),PRIMARY KEY ("b","c"))`,
			broken: "CREATE TABLE \"a\" (\n  \"b\" text,\n  \"c\" numeric(1,2),\n  PRIMARY KEY (\"b\",\"c\")\n)",
		},
		"literals": {
			sql:    `CREATE TABLE "a" ("b" text DEFAULT 'it''s (,',"c" text)`,
			broken: "CREATE TABLE \"a\" (\n  \"b\" text DEFAULT 'it''s (,',\n  \"c\" text\n)",
		},
		"names": {
			sql:    `CREATE TABLE "a(""," ("b'" text,"c" text)`,
			broken: "CREATE TABLE \"a(\"\",\" (\n  \"b'\" text,\n  \"c\" text\n)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, test.broken, breakLines(test.sql))
		})
	}
}
