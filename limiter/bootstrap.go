package limiter

import (
	"database/sql"
	"fmt"
	"sync"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/models"
)

// An application that runs no more than db.AutoMigrate(&models.LegionAgent{}) has no
// registry. The first call makes it.

// seenRegistries remembers where the registry was seen by a transaction that had not
// made it itself, since one that makes it may still be rolled back.
var seenRegistries sync.Map // registryKey -> struct{}

type registryKey struct {
	pool  database.Pool
	table string
}

func (c *call) registryKey() registryKey {
	return registryKey{database.PoolOf(c.db), c.tables.Identities}
}

func (c *call) forgetRegistry() { seenRegistries.Delete(c.registryKey()) }

// ensureRegistry makes the registry if it is missing. It reports whether it relied on
// its memory.
func (c *call) ensureRegistry() (remembered bool, err error) {
	key := c.registryKey()
	if _, ok := seenRegistries.Load(key); ok {
		return true, nil
	}

	var found foundTables

	look := func(tx *gorm.DB) (err error) {
		found, err = c.findTables(tx)

		return err
	}

	// On its own it needs a transaction too, for the bound on the wait for a connection.
	if database.InTransaction(c.db) {
		err = look(c.db)
	} else {
		err = database.Transaction(c.db, c.settings.ConnectionTimeout, look)
	}

	if err != nil {
		return false, err
	}

	if !found.agents {
		return false, fmt.Errorf("%w: the agents' table is missing: call legion.Migrate(db) at start-up", fault.ErrNotMigrated)
	}

	if found.filtered {
		return false, errFiltered
	}

	if found.identities {
		if _, known := seenRegistries.LoadOrStore(key, struct{}{}); !known && !database.InTransaction(c.db) {
			database.OnPoolGone(c.db, func(database.Pool) { seenRegistries.Delete(key) })
		}

		return false, nil
	}

	if err := c.createRegistry(); err != nil {
		return false, fmt.Errorf("%w: the table of identities is missing and could not be made: call legion.Migrate(db) "+
			"with a role that may create tables: %w", fault.ErrNotMigrated, err)
	}

	return false, nil
}

// foundTables says which tables are there, and whether policies hide rows of theirs from
// this role.
type foundTables struct{ agents, identities, filtered bool }

// errFiltered is returned instead of a verdict on the agents that this role may see.
var errFiltered = fmt.Errorf("%w: row-level security of the agents' table or of the registry applies to this role, so that a limit would not see "+
	"all agents: let the limiter's role have BYPASSRLS or own the tables, and keep the policies for others", fault.ErrInvalidConfig)

// findTables asks in a way that is no error where a table is missing: an error would
// end the caller's transaction.
func (c *call) findTables(tx *gorm.DB) (found foundTables, err error) {
	statement := expression(`SELECT agents IS NOT NULL, identities IS NOT NULL,
  coalesce(row_security_active(agents), false) OR coalesce(row_security_active(identities), false)
FROM (SELECT to_regclass(?)::oid AS agents, to_regclass(?)::oid AS identities) AS tables`,
		tx.Statement.Quote(c.tables.Agents), tx.Statement.Quote(c.tables.Identities))
	err = database.Query(tx, statement, func(rows *sql.Rows) error { return rows.Scan(&found.agents, &found.identities, &found.filtered) })

	return found, err
}

func (c *call) createRegistry() (err error) {
	if database.InTransaction(c.db) {
		err = database.InSavepoint(c.db, func(*database.Savepoint) error { return c.createRegistryIn(c.db) })
	} else {
		err = database.Transaction(c.db, c.settings.ConnectionTimeout, c.createRegistryIn)
	}

	// to_regclass answers from a cache that the wait for an advisory lock leaves as it
	// is, so a table that was made meanwhile may show only now. A migration that makes
	// it in this moment shows as a duplicate key of a system catalog.
	if database.HasCode(err, database.CodeDuplicateTable, database.CodeUniqueViolation) {
		return nil
	}

	return err
}

func (c *call) createRegistryIn(tx *gorm.DB) error {
	// Two that create one table at once fail on each other, even with IF NOT EXISTS.
	lock := clause.Expr{SQL: "SELECT pg_advisory_xact_lock(?::bigint)", Vars: []any{hashKey(registryKind)}, WithoutParentheses: true}
	if _, err := database.Exec(tx, lock); err != nil {
		return err
	}

	if found, err := c.findTables(tx); err != nil || found.identities {
		return err
	}

	return tx.Table("?", clause.Table{Name: c.tables.Identities}).Migrator().CreateTable(&models.LegionIdentity{})
}
