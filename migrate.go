package legion

import (
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/migration"
	"github.com/legion-gorm/legion/models"
)

// Models returns the models of the two tables, for an application that runs
// AutoMigrate:
//
//	err := db.AutoMigrate(append(legion.Models(), &User{}, &Order{})...)
//
// They are the default ones: an application that has an agent model of its own names
// that one instead, or calls [Migrate].
//
// AutoMigrate takes no lock. Several processes that run it at once on an empty database
// fail with the SQLSTATE 23505 or 42P07, all but one; and every run reads a row of
// the table, so it waits for whoever has that locked. [Migrate] does neither.
func Models() []any {
	return []any{&models.LegionAgent{}, &models.LegionIdentity{}}
}

// A MigrateOption changes what [Migrate] does.
type MigrateOption func(*migrateOptions)

type migrateOptions struct {
	concurrentIndexes bool
}

// WithConcurrentIndexes lets an application go on writing to a large table while its
// indexes are built: with CREATE INDEX CONCURRENTLY, after the transaction that makes
// everything else, one after the other. A check constraint that is missing is added
// first and validated afterwards, for the same reason. The indexes of a new table are
// made with it.
//
// It needs a connection of its own from the pool, which is closed afterwards, and a
// session that lasts: behind PgBouncer, one in session mode. A build waits for every
// transaction in the database that is older, and is not bound by the role's
// statement_timeout. When it is cut short, the index stays behind and is not valid; the
// next Migrate, with this option or without it, builds it anew.
//
// Processes that call Migrate meanwhile wait until the indexes are there.
func WithConcurrentIndexes() MigrateOption {
	return func(options *migrateOptions) { options.concurrentIndexes = true }
}

// Migrate makes the tables of the agents and of the registry, or adds what an older
// version of them lacks and keeps their rows. Model and table name are those of the
// plugin that db uses, or else [models.LegionAgent]'s.
//
// Any number of processes may call it at once: what it changes, it changes in one
// transaction under an advisory lock. Where nothing is missing it runs one query of
// PostgreSQL's catalogue. It needs no rights then, and waits for nobody. Otherwise it
// waits for those who use the table, in turns of two seconds so that they do not all
// queue behind it, until the context of db ends.
//
// It adds missing columns, defaults, NOT NULL, check constraints and indexes. It
// converts no types: a column of Legion's that has another type is an
// [ErrNotMigrated]. Of the columns that an application has added to the model it adds
// the missing ones and leaves the others alone, and other tables that the model refers
// to must be there already.
//
// When db is in a transaction, Migrate joins it, keeps the lock to its end, waits for
// that lock 30 seconds at most ([ErrContention]), and leaves the transaction usable
// after an error. The transaction must be READ COMMITTED ([ErrIsolation]).
//
// A role that lacks the right to change the schema gets [ErrNotMigrated]. Errors of the
// database can be read with errors.As and *pgconn.PgError.
func Migrate(db *gorm.DB, options ...MigrateOption) error {
	session, settings, err := open(db)
	if err != nil {
		return err
	}

	var chosen migrateOptions
	for _, option := range options {
		option(&chosen)
	}

	return migration.Up(session, settings, chosen.concurrentIndexes)
}

// MigrateDown drops both tables, and with them every agent, its usage and its saved
// state. Where they are missing it does nothing. Objects of the application that depend on
// them, such as views and foreign keys, are an error and stay.
//
// It takes the same lock as [Migrate], and joins a transaction that db is in.
func MigrateDown(db *gorm.DB) error {
	session, settings, err := open(db)
	if err != nil {
		return err
	}

	return migration.Down(session, settings)
}

// DDL returns the SQL that [Migrate] runs on an empty database, for tools that keep a
// schema in files, such as goose or Atlas. Each statement ends with a semicolon. A
// schema that the table's name is qualified with must be created before.
//
// It uses the dialect, the NamingStrategy and the plugin of db, and runs nothing.
func DDL(db *gorm.DB) ([]string, error) {
	session, settings, err := open(db)
	if err != nil {
		return nil, err
	}

	tables, err := migration.TablesOf(session, settings)
	if err != nil {
		return nil, err
	}

	var ddl []string

	for _, table := range tables {
		statements, err := table.Create()
		if err != nil {
			return nil, err
		}

		for _, statement := range statements {
			ddl = append(ddl, statement+";")
		}
	}

	return ddl, nil
}

func open(db *gorm.DB) (*gorm.DB, database.Settings, error) {
	session, err := database.Session(db)
	if err != nil {
		return nil, database.Settings{}, err
	}

	return session, database.SettingsOf(session), nil
}
