package pgtest

import (
	"context"
	"strconv"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
)

func setupTable(t *testing.T, db *gorm.DB) {
	t.Helper()

	require.NoError(t, db.Exec("CREATE TABLE notes (text text)").Error)
	require.NoError(t, db.Exec("INSERT INTO notes VALUES ('ä')").Error)
}

// requireDatabase asserts that the shared server has, or has not, the database of a DSN.
func requireDatabase(t *testing.T, exists bool, dsn string) {
	t.Helper()

	found, err := databaseExists(t.Context(), Shared(t), dsn)
	require.NoError(t, err)
	require.Equal(t, exists, found)
}

func databaseExists(ctx context.Context, server *Server, dsn string) (bool, error) {
	name, err := databaseOf(dsn)
	if err != nil {
		return false, err
	}
	var found bool
	row := server.admin.QueryRowContext(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name)

	err = row.Scan(&found)

	return found, err
}

func TestEveryOpenHasADatabaseOfItsOwn(t *testing.T) {
	t.Parallel()

	first, second := Open(t), Open(t)
	setupTable(t, first)
	require.NotEqual(t, DSN(first), DSN(second))
	require.False(t, second.Migrator().HasTable("notes"))

	var encoding string
	require.NoError(t, second.Raw("SHOW server_encoding").Scan(&encoding).Error)
	require.Equal(t, "UTF8", encoding)
}

func TestDatabasesCreatedTogetherAreDistinct(t *testing.T) {
	t.Parallel()

	const together = 12
	server := Shared(t)
	dsns, failures := make([]string, together), make([]error, together)
	var group sync.WaitGroup
	for i := range together {
		group.Go(func() { dsns[i], failures[i] = server.CreateDatabase(t.Context()) })
	}
	group.Wait()

	seen := map[string]bool{}
	for i, dsn := range dsns {
		require.NoError(t, failures[i])
		require.False(t, seen[dsn])
		seen[dsn] = true
		require.NoError(t, server.DropDatabase(t.Context(), dsn))
	}
}

func TestDatabaseIsDroppedWithItsTestThoughSomebodyIsConnected(t *testing.T) { //nolint:tparallel // looks at what its subtest left
	t.Parallel()

	var dsn string
	t.Run("a test", func(t *testing.T) {
		db := Open(t)
		setupTable(t, db)
		dsn = DSN(db)
		requireDatabase(t, true, dsn)

		forgotten, err := pgx.Connect(t.Context(), dsn)
		require.NoError(t, err)
		require.NoError(t, forgotten.Ping(t.Context()))
	})
	requireDatabase(t, false, dsn)
}

func TestDSNOpensTheSameDatabaseAgain(t *testing.T) {
	t.Parallel()

	db := Open(t)
	setupTable(t, db)
	for _, again := range []*gorm.DB{
		OpenDSN(t, DSN(db)),
		OpenDSN(t, WithParameter(DSN(db), "default_query_exec_mode", "simple_protocol")),
	} {
		var text string
		require.NoError(t, again.Raw("SELECT text FROM notes WHERE text = ?", "ä").Scan(&text).Error)
		require.Equal(t, "ä", text)
	}
}

func TestPoolIsLimited(t *testing.T) {
	t.Parallel()

	dsn := Database(t)
	for limit, options := range map[int][]gorm.Option{
		defaultMaxOpenConnections: nil,
		1:                         {MaxOpenConnections(1), &gorm.Config{}},
	} {
		t.Run(strconv.Itoa(limit), func(t *testing.T) {
			t.Parallel()

			pool, err := OpenDSN(t, dsn, options...).DB()
			require.NoError(t, err)
			require.Equal(t, limit, pool.Stats().MaxOpenConnections)
		})
	}
}

func TestLoggerIsSilentUnlessTheTestBringsItsOwn(t *testing.T) {
	t.Parallel()

	dsn := Database(t)
	require.Equal(t, logger.Discard, OpenDSN(t, dsn, &gorm.Config{SkipDefaultTransaction: true}).Logger)
	require.Equal(t, logger.Default, OpenDSN(t, dsn, &gorm.Config{Logger: logger.Default}).Logger)
}

func TestOptionsOfTheCallerAreLeftAlone(t *testing.T) {
	t.Parallel()

	options := make([]gorm.Option, 0, 2)
	options = append(options, MaxOpenConnections(2), &gorm.Config{PrepareStmt: true})
	db := OpenDSN(t, Database(t), options...)
	require.True(t, db.PrepareStmt)
	require.Equal(t, MaxOpenConnections(2), options[0])
}
