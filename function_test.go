package legion_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
)

// useFunction makes a plugin that decides by the server's function, and records the
// statements of its db.
func useFunction(t *testing.T, options ...legion.Option) (*gorm.DB, *legion.Plugin, *recorder) {
	t.Helper()

	statements := newRecorder()
	db := pgtest.Open(t, &gorm.Config{Logger: statements})
	plugin := usePlugin(t, db, append([]legion.Option{legion.WithServerFunction()}, options...)...)

	return db, plugin, statements
}

func requireFunctionInUse(t *testing.T, plugin *legion.Plugin, want bool) {
	t.Helper()

	inUse, err := plugin.ServerFunction(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, inUse)
}

func TestACallOfTheServerFunctionIsOneStatement(t *testing.T) {
	t.Parallel()

	db, plugin, statements := useFunction(t)
	requireFunctionInUse(t, plugin, true)
	require.NoError(t, limiter.Enforce(db, "first", runningRule(2))) // which looks for the registry and the function

	for name, call := range map[string]func(db *gorm.DB) error{
		"a first use": func(db *gorm.DB) error {
			return limiter.Enforce(db, "one", limiter.Rule{Identity: limiter.Identity{"new": 1}, Policy: runningRule(2).Policy})
		},
		"an admission":     func(db *gorm.DB) error { return limiter.Enforce(db, "one", runningRule(5)) },
		"nothing to write": func(db *gorm.DB) error { return limiter.Enforce(db, "one", tokensRule(5)) },
	} {
		statements.take()
		require.NoError(t, call(db), name)
		require.Len(t, statements.take(), 1, name)

		require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
			statements.take()
			require.NoError(t, call(tx), name)
			require.Len(t, statements.take(), 1, name)

			return nil
		}))
	}

	turn, err := plugin.Begin(t.Context(), "turn", reserving(10, tokensRule(1000)))
	require.NoError(t, err)
	require.NoError(t, turn.End(t.Context()))
}

func TestTheServerFunctionLogsNoErrorForAVerdict(t *testing.T) {
	t.Parallel()

	failures := &failureRecorder{Interface: logger.Discard}
	db := pgtest.Open(t, &gorm.Config{Logger: failures})
	usePlugin(t, db, legion.WithServerFunction())

	require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))
	require.ErrorIs(t, limiter.Enforce(db, "two", runningRule(1)), limiter.ErrExceeded)
	require.NoError(t, limiter.Enforce(db, "one", tokensRule(5)))
	require.Empty(t, failures.errors)
}

func TestATableOfAnyNameHasItsServerFunction(t *testing.T) {
	t.Parallel()

	for _, test := range namedTables() {
		test.options = []legion.Option{legion.WithServerFunction(), legion.WithObserver(nil)}

		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db, statements := test.setup(t)
			plugin, _ := legion.From(db)
			requireFunctionInUse(t, plugin, false)
			require.NoError(t, legion.Migrate(db))
			requireFunctionInUse(t, plugin, true)

			statements.take()
			require.NoError(t, legion.Migrate(db))
			require.Empty(t, statements.takeDDL(), "by a second Migrate")

			require.NoError(t, limiter.Enforce(db, "a", runningRule(1)))
			require.ErrorIs(t, limiter.Enforce(db, "b", runningRule(1)), limiter.ErrExceeded)
			require.EqualValues(t, 1, rowsOf(t, db, test.agents))
			require.EqualValues(t, 1, rowsOf(t, db, test.identities()))

			require.NoError(t, legion.MigrateDown(db))
			requireFunctionInUse(t, plugin, false)
			require.Empty(t, functions(t, db))
		})
	}
}

// functions are the names of the functions of the application's schemas.
func functions(t *testing.T, db *gorm.DB) (names []string) {
	t.Helper()

	require.NoError(t, db.Raw(`SELECT proname FROM pg_proc JOIN pg_namespace ON pg_namespace.oid = pronamespace
		WHERE nspname NOT LIKE 'pg\_%' AND nspname <> 'information_schema' ORDER BY 1`).Scan(&names).Error)

	return names
}

func TestTheLimiterGoesOnWithoutTheServerFunction(t *testing.T) {
	t.Parallel()

	t.Run("that was never made", func(t *testing.T) {
		t.Parallel()

		db := pgtest.Open(t)
		require.NoError(t, legion.Migrate(db))
		plugin := legion.New(legion.WithServerFunction(), legion.WithObserver(nil))
		require.NoError(t, db.Use(plugin))
		requireFunctionInUse(t, plugin, false)

		for _, tx := range []*gorm.DB{db, db.Begin()} {
			require.NoError(t, limiter.Enforce(tx, "one", runningRule(1)))
			require.ErrorIs(t, limiter.Enforce(tx, "two", runningRule(1)), limiter.ErrExceeded)
			require.NoError(t, limiter.Release(tx, "one"))

			if tx != db {
				require.NoError(t, tx.Commit().Error)
			}
		}
	})

	t.Run("that was dropped", func(t *testing.T) {
		t.Parallel()

		db, plugin, _ := useFunction(t)
		require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))
		require.NoError(t, db.Exec("DROP FUNCTION legion_agents_enforce_v1(jsonb)").Error)
		require.ErrorIs(t, limiter.Enforce(db, "two", runningRule(1)), limiter.ErrExceeded)
		require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))
		requireFunctionInUse(t, plugin, false)
	})
}

func TestATransactionThatMissesTheServerFunctionIsRunAgain(t *testing.T) {
	t.Parallel()

	db, _, _ := useFunction(t)
	require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))
	require.NoError(t, db.Exec("DROP FUNCTION legion_agents_enforce_v1(jsonb)").Error)

	enforce := func(tx *gorm.DB) error { return limiter.Enforce(tx, "one", runningRule(1)) }
	err := db.Transaction(enforce)
	require.ErrorIs(t, err, legion.ErrContention)
	require.True(t, legion.Retryable(err))
	require.NoError(t, db.Transaction(enforce))
}

func TestATransactionGoesOnWithoutAFunctionThatTheServerFunctionCalls(t *testing.T) {
	t.Parallel()

	db, plugin, _ := useFunction(t)
	require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))
	require.NoError(t, db.Exec("DROP FUNCTION legion_agents_revoke_v1(text, jsonb, jsonb), legion_agents_decide_v1(jsonb)").Error)
	requireFunctionInUse(t, plugin, false)

	require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
		require.ErrorIs(t, limiter.Enforce(tx, "two", runningRule(1)), limiter.ErrExceeded)

		return limiter.Enforce(tx, "one", runningRule(1))
	}))
}

func TestARoleThatMayNotCallTheServerFunctionGoesOnWithoutIt(t *testing.T) {
	t.Parallel()

	owner, _, _ := useFunction(t)
	require.NoError(t, owner.Exec("REVOKE EXECUTE ON FUNCTION legion_agents_measure_v1(text, jsonb, jsonb, numeric) FROM PUBLIC").Error)

	application := pgtest.OpenDSN(t, pgtest.DSN(owner), pgtest.MaxOpenConnections(1))
	require.NoError(t, application.Exec("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO pg_monitor").Error)
	require.NoError(t, application.Exec("SET ROLE pg_monitor").Error)

	plugin := legion.New(legion.WithServerFunction(), legion.WithObserver(nil))
	require.NoError(t, application.Use(plugin))
	requireFunctionInUse(t, plugin, false)
	require.NoError(t, limiter.Enforce(application, "one", runningRule(1)))
	require.ErrorIs(t, limiter.Enforce(application, "two", runningRule(1)), limiter.ErrExceeded)
}

func TestAStricterDefaultIsolationIsNoObstacleToTheServerFunction(t *testing.T) {
	t.Parallel()

	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()

			db := pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.Database(t), "default_transaction_isolation", level))
			plugin := usePlugin(t, db, legion.WithServerFunction())
			requireFunctionInUse(t, plugin, true)

			for range 2 {
				require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))
			}

			require.ErrorIs(t, limiter.Enforce(db, "two", runningRule(1)), limiter.ErrExceeded)
			require.ErrorIs(t, limiter.Enforce(begin(t, db), "two", runningRule(1)), legion.ErrIsolation)
		})
	}
}

func TestMigrateWithoutTheRightToCreateFunctionsSaysSo(t *testing.T) {
	t.Parallel()

	owner := pgtest.Open(t)
	require.NoError(t, legion.Migrate(owner))
	require.NoError(t, owner.Exec("REVOKE CREATE ON SCHEMA public FROM PUBLIC").Error)

	application := pgtest.OpenDSN(t, pgtest.DSN(owner), pgtest.MaxOpenConnections(1))
	require.NoError(t, application.Exec("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO pg_monitor").Error)
	require.NoError(t, application.Exec("SET ROLE pg_monitor").Error)

	plugin := legion.New(legion.WithServerFunction(), legion.WithObserver(nil))
	require.NoError(t, application.Use(plugin))
	require.ErrorIs(t, legion.Migrate(application), legion.ErrNotMigrated)

	requireFunctionInUse(t, plugin, false)
	require.NoError(t, limiter.Enforce(application, "one", runningRule(1)))
	require.ErrorIs(t, limiter.Enforce(application, "two", runningRule(1)), limiter.ErrExceeded)
}

func TestAHostileSchemaInFrontChangesNoVerdict(t *testing.T) {
	t.Parallel()

	db, plugin, _ := useFunction(t)
	require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))

	// Names that the functions use, with the arguments that they use them with.
	for _, hostile := range []string{
		"CREATE SCHEMA hostile",
		"CREATE FUNCTION hostile.pg_advisory_xact_lock_shared(bigint) RETURNS void LANGUAGE sql AS 'SELECT'",
		"CREATE FUNCTION hostile.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$SELECT 'epoch'::timestamptz$$",
		"CREATE FUNCTION hostile.jsonb_array_length(jsonb) RETURNS int LANGUAGE sql AS 'SELECT 0'",
		"CREATE FUNCTION hostile.never(jsonb, jsonb) RETURNS boolean LANGUAGE sql AS 'SELECT false'",
		"CREATE OPERATOR hostile.@> (LEFTARG = jsonb, RIGHTARG = jsonb, FUNCTION = hostile.never)",
	} {
		require.NoError(t, db.Exec("?", gorm.Expr(hostile)).Error)
	}

	hostile := pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.DSN(db), "search_path", "hostile, public, pg_catalog"))
	require.NoError(t, hostile.Use(legion.New(legion.WithServerFunction(), legion.WithObserver(nil))))
	requireFunctionInUse(t, plugin, true)
	require.ErrorIs(t, limiter.Enforce(hostile, "two", runningRule(1)), limiter.ErrExceeded)
}

func TestTwoVersionsWorkOnOneDatabase(t *testing.T) {
	t.Parallel()

	// An application without the option, and one with it, in the middle of a deployment.
	db, _, _ := useFunction(t)
	older := pgtest.OpenDSN(t, pgtest.DSN(db))
	require.NoError(t, older.Use(legion.New(legion.WithObserver(nil))))

	const limit, callers = 5, 24

	admitted := make(chan bool, callers)

	for i := range callers {
		go func() {
			use := []*gorm.DB{db, older}[i%2]
			admitted <- limiter.Enforce(use, string(rune('a'+i)), runningRule(limit)) == nil
		}()
	}

	count := 0

	for range callers {
		if <-admitted {
			count++
		}
	}

	require.Equal(t, limit, count)
	require.NoError(t, legion.Migrate(older), "leaves the functions alone")
	require.Len(t, functions(t, db), 4)
}

// failureRecorder is a logger that keeps the errors it is told of.
type failureRecorder struct {
	logger.Interface

	errors []error
}

func (f *failureRecorder) Trace(_ context.Context, _ time.Time, _ func() (string, int64), err error) {
	if err != nil {
		f.errors = append(f.errors, err)
	}
}

func TestNoCommitButItsOwnIsMadeWithoutAFlush(t *testing.T) {
	t.Parallel()

	db, _, _ := useFunction(t)
	require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))

	setting := func(tx *gorm.DB) (value string) {
		require.NoError(t, tx.Raw("SHOW synchronous_commit").Scan(&value).Error)

		return value
	}

	before := setting(db)

	require.NoError(t, db.Connection(func(session *gorm.DB) error {
		require.ErrorIs(t, limiter.Enforce(session, "two", runningRule(1)), limiter.ErrExceeded)
		require.NoError(t, limiter.Enforce(session, "one", tokensRule(9)))
		require.Equal(t, before, setting(session))

		return nil
	}))
	require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
		require.ErrorIs(t, limiter.Enforce(tx, "two", runningRule(1)), limiter.ErrExceeded)
		require.NoError(t, limiter.Enforce(tx, "one", tokensRule(9)))
		require.Equal(t, before, setting(tx))

		return nil
	}))
}
