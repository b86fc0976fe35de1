package limiter_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// setupBare is an application that has run no more than AutoMigrate on the agent model:
// there is no registry.
func setupBare(t *testing.T, options ...gorm.Option) *gorm.DB {
	t.Helper()

	db := pgtest.Open(t, options...)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))

	return db
}

func hasRegistry(t *testing.T, db *gorm.DB) (exists bool) {
	t.Helper()

	require.NoError(t, db.Raw("SELECT to_regclass('legion_agents_identities') IS NOT NULL").Scan(&exists).Error)

	return exists
}

func TestAutoMigrateAndEnforceAloneAreAWorkingApplication(t *testing.T) {
	t.Parallel()

	db := setupBare(t, pgtest.MaxOpenConnections(1))
	db = db.WithContext(impatient(t))

	require.NoError(t, limiter.Enforce(db, "first", maxAgents(tenant, 1)))
	requireDenied(t, limiter.Enforce(db, "second", maxAgents(tenant, 1)), limiter.LimitAgents)
	require.Equal(t, []string{`{"tenant": "acme"}`}, registered(t, db))
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}, &models.LegionIdentity{}), "a migration that comes later")
	require.NoError(t, limiter.Enforce(db, "first", maxAgents(tenant, 1)))
}

func TestAutoMigrateAndEnforceAloneWorkInACallersTransaction(t *testing.T) {
	t.Parallel()

	db := setupBare(t, pgtest.MaxOpenConnections(1))
	db = db.WithContext(impatient(t))

	require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
		require.NoError(t, limiter.Enforce(tx, "first", maxAgents(tenant, 1)))
		requireDenied(t, limiter.Enforce(tx, "second", maxAgents(tenant, 1)), limiter.LimitAgents)

		return nil
	}))
	require.Equal(t, []string{"first"}, agentIDs(t, db))
	requireDenied(t, limiter.Enforce(db, "second", maxAgents(tenant, 1)), limiter.LimitAgents)
}

func TestARegistryThatWasRolledBackIsMadeAgain(t *testing.T) {
	t.Parallel()

	for _, again := range []string{"outside", "in another transaction"} {
		t.Run(again, func(t *testing.T) {
			t.Parallel()

			db := setupBare(t)

			tx := begin(t, db)
			for _, agentID := range []string{"first", "second"} {
				require.NoError(t, limiter.Enforce(tx, agentID, maxAgents(tenant, 2)))
			}

			requireDenied(t, limiter.Enforce(tx, "third", maxAgents(tenant, 2)), limiter.LimitAgents)
			require.True(t, hasRegistry(t, tx))
			require.NoError(t, tx.Rollback().Error)
			require.False(t, hasRegistry(t, db))

			if again == "outside" {
				require.NoError(t, limiter.Enforce(db, "first", maxAgents(tenant, 1)))
			} else {
				tx = begin(t, db)
				require.NoError(t, limiter.Enforce(tx, "first", maxAgents(tenant, 1)))
				require.NoError(t, tx.Commit().Error)
			}

			require.True(t, hasRegistry(t, db))
			requireDenied(t, limiter.Enforce(db, "second", maxAgents(tenant, 1)), limiter.LimitAgents)
		})
	}
}

func TestFirstCallsOfManyGoroutinesMakeOneRegistry(t *testing.T) {
	t.Parallel()

	const callers = 12

	for _, end := range []string{"COMMIT", "ROLLBACK"} {
		t.Run("another that makes it ends with "+end, func(t *testing.T) {
			t.Parallel()

			db := setupBare(t, pgtest.MaxOpenConnections(callers+3))

			// All find no registry and wait, in one way or another, for a transaction that is
			// making it.
			another := begin(t, db)
			require.NoError(t, another.AutoMigrate(&models.LegionIdentity{}))

			results := make(chan error, callers)

			for i := range callers {
				agentID, rule := fmt.Sprintf("agent %d", i), maxAgents(limiter.Identity{"user": i}, 1)

				// Half of them in transactions of their callers'.
				go func() {
					if i%2 == 0 {
						results <- limiter.Enforce(db, agentID, rule)
					} else {
						results <- db.Transaction(func(tx *gorm.DB) error { return limiter.Enforce(tx, agentID, rule) })
					}
				}()
			}

			waitForLockWaiters(t, db, callers)

			if end == "COMMIT" {
				require.NoError(t, another.Commit().Error)
			} else {
				require.NoError(t, another.Rollback().Error)
			}

			for range callers {
				require.NoError(t, <-results)
			}

			require.Len(t, agentIDs(t, db), callers)
			require.Len(t, registered(t, db), callers)
		})
	}
}

// requireNotMigrated is for calls that must fail for want of a table or a column, and
// leave a caller's transaction as it was.
func requireNotMigrated(t *testing.T, db *gorm.DB) {
	t.Helper()

	for _, err := range []error{
		limiter.Enforce(db, "agent", maxAgents(tenant, 1)),
		limiter.Enforce(db, "agent", everyLimit(otherTenant)),
		db.Transaction(func(tx *gorm.DB) error {
			err := limiter.Enforce(tx, "agent", everyLimit(tenant))
			require.NoError(t, tx.Exec("SELECT 1").Error, "the transaction is still usable")

			return err
		}),
	} {
		require.ErrorIs(t, err, limiter.ErrNotMigrated)
		require.ErrorContains(t, err, "legion.Migrate(db)", "the remedy")
		require.NotErrorIs(t, err, limiter.ErrExceeded)
		require.False(t, limiter.Retryable(err))
	}

	require.ErrorIs(t, limiter.Release(db, "agent"), limiter.ErrNotMigrated)
}

func TestADatabaseWithoutTablesIsErrNotMigrated(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	requireNotMigrated(t, db)
	require.False(t, hasRegistry(t, db), "nor is the registry made alone")
}

func TestTablesThatWereDroppedAreErrNotMigratedUntilTheyAreBack(t *testing.T) {
	t.Parallel()

	db := setupBare(t)

	for range 2 {
		require.NoError(t, limiter.Enforce(db, "agent", maxAgents(tenant, 1)))
		require.NoError(t, limiter.Enforce(db, "agent", maxAgents(tenant, 1)), "now the registry is remembered")
		require.NoError(t, db.Migrator().DropTable(&models.LegionAgent{}, &models.LegionIdentity{}))
		requireNotMigrated(t, db)

		require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))
	}

	require.NoError(t, db.Transaction(func(tx *gorm.DB) error { return limiter.Enforce(tx, "agent", maxAgents(tenant, 1)) }))

	// Only the registry: it is made again, as it was at first.
	require.NoError(t, limiter.Enforce(db, "agent", maxAgents(tenant, 1)))
	require.NoError(t, db.Migrator().DropTable(&models.LegionIdentity{}))
	require.NoError(t, limiter.Enforce(db, "agent", maxAgents(otherTenant, 1)))
	require.NoError(t, db.Migrator().DropTable(&models.LegionIdentity{}))
	require.NoError(t, db.Transaction(func(tx *gorm.DB) error { return limiter.Enforce(tx, "agent", maxAgents(tenant, 1)) }))
	require.Equal(t, []string{`{"tenant": "acme"}`}, registered(t, db))
}

func TestATableOfAnOlderVersionIsErrNotMigrated(t *testing.T) {
	t.Parallel()

	for _, column := range []string{"metadata", "usage", "run_id", "lease_expires_at", "reserved_tokens", "started_at", "deleted_at", "created_at"} {
		t.Run(column, func(t *testing.T) {
			t.Parallel()

			// GORM's translation would hide which error it was.
			db := setup(t, &gorm.Config{TranslateError: true})
			require.NoError(t, db.Migrator().DropColumn(&models.LegionAgent{}, column))

			// Not every limit reads every column, but all together do.
			err := limiter.Enforce(db, "agent", everyLimit(tenant))
			require.ErrorIs(t, err, limiter.ErrNotMigrated)
			require.ErrorContains(t, err, "legion.Migrate(db)")
			require.ErrorContains(t, err, column)

			tx := begin(t, db)
			require.ErrorIs(t, limiter.Enforce(tx, "agent", everyLimit(tenant)), limiter.ErrNotMigrated)
			require.NoError(t, tx.Exec("SELECT 1").Error)
			require.NoError(t, tx.Commit().Error)

			require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))
			require.NoError(t, limiter.Enforce(db, "agent", everyLimit(tenant)))
		})
	}
}

func TestARoleThatMayNotCreateTablesIsToldWhatToCall(t *testing.T) {
	t.Parallel()

	db := setupBare(t)
	role := restrictedRole(t, db)
	restricted := pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.DSN(db), "options", "-c role="+role))

	requireNotMigrated := func(tx *gorm.DB) {
		err := limiter.Enforce(tx, "agent", maxAgents(tenant, 1))
		require.ErrorIs(t, err, limiter.ErrNotMigrated)
		require.ErrorContains(t, err, "legion.Migrate(db) with a role that may create tables")
	}
	requireNotMigrated(restricted)

	tx := begin(t, restricted)
	requireNotMigrated(tx)
	require.NoError(t, tx.Exec("SELECT 1").Error)
	require.Empty(t, locksOf(t, tx))
	require.NoError(t, tx.Commit().Error)

	// Rights on rows are enough once the table is there.
	require.NoError(t, db.AutoMigrate(&models.LegionIdentity{}))
	require.NoError(t, db.Exec("GRANT SELECT, INSERT, UPDATE, DELETE ON legion_agents_identities TO "+role).Error)
	require.NoError(t, limiter.Enforce(restricted, "agent", maxRunning(tenant, 1)))
	requireDenied(t, limiter.Enforce(restricted, "another", maxRunning(tenant, 1)), limiter.LimitRunningAgents)
	require.NoError(t, limiter.Release(restricted, "agent"))
}

// restrictedRole makes a role that may read and write the agents' rows and nothing
// else, and lets the test's own role become it.
func restrictedRole(t *testing.T, db *gorm.DB) string {
	t.Helper()

	var allowed bool

	require.NoError(t, db.Raw("SELECT rolcreaterole OR rolsuper FROM pg_roles WHERE rolname = current_user").Scan(&allowed).Error)

	if !allowed {
		t.Skip("the role that the tests connect with may not create roles")
	}

	var role string

	// Roles belong to the whole server, so its name is that of the test's database.
	require.NoError(t, db.Raw("SELECT current_database() || '_restricted'").Scan(&role).Error)

	for _, statement := range []string{
		"CREATE ROLE " + role,
		"GRANT " + role + " TO current_user",
		"REVOKE CREATE ON SCHEMA public FROM PUBLIC",
		"GRANT SELECT, INSERT, UPDATE, DELETE ON legion_agents TO " + role,
	} {
		require.NoError(t, db.Exec(statement).Error)
	}

	t.Cleanup(func() {
		require.NoError(t, db.Exec("DROP OWNED BY "+role).Error)
		require.NoError(t, db.Exec("DROP ROLE "+role).Error)
	})

	return role
}
