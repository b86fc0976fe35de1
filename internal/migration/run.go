package migration

import (
	"fmt"
	"strings"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
)

// Options are what a caller of [Up] may choose.
type Options struct {
	// Concurrently leaves what scans a table that exists to a second step, outside the
	// transaction.
	Concurrently bool

	// Notify makes the triggers that tell changes of agents.
	Notify bool

	// ServerFunction makes the functions that decide in one round trip.
	ServerFunction bool
}

// Up makes the tables what their models declare.
func Up(db *gorm.DB, settings database.Settings, options Options) error {
	return up(db, settings, options, joinedWait)
}

func up(db *gorm.DB, settings database.Settings, options Options, wait time.Duration) error {
	if options.Concurrently && database.InTransaction(db) {
		return fmt.Errorf("%w: indexes cannot be built concurrently inside a transaction: call Migrate outside of it", fault.ErrInvalidConfig)
	}

	tables, err := TablesOf(db, settings)
	if err != nil {
		return err
	}

	options.ServerFunction = options.ServerFunction || settings.ServerFunction

	var pending *plan

	check := func(tx *gorm.DB) (_ bool, err error) {
		pending, err = compare(tx, tables, options)

		return err == nil && len(pending.together) > 0, err
	}

	err = locked(db, settings, wait, check, func(tx *gorm.DB) (err error) {
		pending, err = change(tx, tables, options)

		return err
	})
	if err == nil && len(pending.alone) > 0 {
		err = buildAlone(db, settings, tables)
	}

	return explain(err)
}

// change runs what belongs together, under the lock, and returns what is left.
func change(tx *gorm.DB, tables []*Table, options Options) (*plan, error) {
	pending, err := compare(tx, tables, options)
	if err != nil {
		return nil, err
	}

	for _, statement := range pending.together {
		if err := run(tx, statement); err != nil {
			return nil, err
		}
	}

	left, err := compare(tx, tables, options)
	if err != nil {
		return nil, err
	}

	if len(left.together) > 0 {
		return nil, notConverged(left)
	}

	return left, nil
}

// notConverged is for names that do not come back from the catalogue as they went in,
// such as one of a NamingStrategy of the application's own that is too long.
func notConverged(left *plan) error {
	return fmt.Errorf("%w: the schema is not what it should be after it was changed, this is left to do: %s", fault.ErrNotMigrated, left.first())
}

// Down drops the tables, and the functions beside them.
func Down(db *gorm.DB, settings database.Settings) error {
	tables, err := TablesOf(db, settings)
	if err != nil {
		return err
	}

	check := func(tx *gorm.DB) (bool, error) {
		state, err := read(tx, tables)

		return err == nil && (state[0].exists || state[1].exists || len(state[0].own()) > 0), err
	}

	err = locked(db, settings, joinedWait, check, func(tx *gorm.DB) error {
		state, err := read(tx, tables)
		if err != nil {
			return err
		}

		// The registry first, as an admission locks them in that order.
		if err := run(tx, "DROP TABLE IF EXISTS "+tables[1].quoted+", "+tables[0].quoted); err != nil {
			return err
		}

		for _, function := range state[0].own() {
			if err := run(tx, "DROP FUNCTION "+function); err != nil {
				return err
			}
		}

		return nil
	})

	return explain(err)
}

// run executes a statement as it stands: a "?" or "@" in it is part of it.
func run(tx *gorm.DB, statement string) error {
	return tx.Exec("?", clause.Expr{SQL: statement}).Error
}

func explain(err error) error {
	switch {
	case err == nil:
		return nil
	case database.HasCode(err, database.CodeInsufficientPrivilege):
		return fmt.Errorf("%w: the role may not change the schema: call legion.Migrate once as the owner of the schema and its tables, "+
			"or let the owner run the SQL of legion.DDL, with the same options: %w", fault.ErrNotMigrated, err)
	case database.HasCode(err, codeInvalidSchemaName):
		return fmt.Errorf("%w: the schema that the tables belong in is missing: create it first: %w", fault.ErrNotMigrated, err)
	case database.HasCode(err, codeDependentObjects):
		return fmt.Errorf("legion: other objects depend on the tables: drop those first: %w", err)
	case strings.HasPrefix(err.Error(), "legion: "):
		return err
	default:
		return fmt.Errorf("legion: migrate: %w", err)
	}
}
