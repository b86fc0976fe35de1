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

type migrateOptions = migration.Options

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
	return func(options *migrateOptions) { options.Concurrently = true }
}

// WithNotify makes changes of agents known to store.Watch: Migrate then also makes
// triggers on the agents' table that NOTIFY the ID of each agent that was inserted,
// changed or deleted, and their function, in the table's schema. They are there until
// [MigrateDown]; a later Migrate without the option leaves them as they are.
//
// A write that was rolled back or that changed nothing notifies nobody, nor does one
// that only renews a lease, or TRUNCATE.
//
// It is an option because PostgreSQL lets the transactions that notify commit one after
// the other, in all databases of the server: each holds one lock while it flushes its
// commit to disk. The writes of agents then share that pace. And a listener that holds
// still in a long transaction keeps the server's queue of notifications from being
// emptied; store.Watch never does. A transaction that notifies cannot be PREPAREd for a
// commit in two phases.
//
// It needs the right to create functions in the schema of the table, or is
// [ErrNotMigrated]. A function of the application's that has the name of the table and
// _notify is an error, and stays.
func WithNotify() MigrateOption {
	return func(options *migrateOptions) { options.Notify = true }
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
// to must be there already. How the agents' table is stored and vacuumed it chooses where
// nobody has: fillfactor, when autovacuum starts, and the compression of usage. A bare
// AutoMigrate leaves these as PostgreSQL has them; docs/profile.md says what they gain.
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

	return migration.Up(session, settings, choose(options))
}

// MigrateDown drops both tables, and with them every agent, its usage and its saved
// state, and what [WithNotify] has made. Where they are missing it does nothing. Objects of the application that depend on
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
// With [WithNotify] it has the triggers and their function too. The function has
// semicolons inside, so a goose file needs it between -- +goose StatementBegin and
// -- +goose StatementEnd. [WithConcurrentIndexes] changes nothing here.
//
// It leaves out what depends on how the server was built: where it can, Migrate has the
// usage compressed by lz4 (ALTER TABLE legion_agents ALTER COLUMN usage SET COMPRESSION
// lz4), by which an append takes about half of the time.
//
// It uses the dialect, the NamingStrategy and the plugin of db, and runs nothing.
func DDL(db *gorm.DB, options ...MigrateOption) ([]string, error) {
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

		ddl = append(ddl, statements...)
	}

	if choose(options).Notify {
		ddl = append(ddl, tables[0].Notify()...)
	}

	for i := range ddl {
		ddl[i] += ";"
	}

	return ddl, nil
}

func choose(options []MigrateOption) (chosen migrateOptions) {
	for _, option := range options {
		option(&chosen)
	}

	return chosen
}

func open(db *gorm.DB) (*gorm.DB, database.Settings, error) {
	session, err := database.Session(db)
	if err != nil {
		return nil, database.Settings{}, err
	}

	return session, database.SettingsOf(session), nil
}
