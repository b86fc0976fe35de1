// Package store reads and writes agents, typed as the application's own model:
//
//	agents := store.For[models.LegionAgent](db)
//	agent, err := agents.Get(ctx, agentID)
//
// What limits an agent is written by verdicts, its usage by appends, and all else by
// [Store.Save].
//
// # Transactions
//
// Where db is a transaction, every method joins it: what it writes is seen inside at
// once, and committed or rolled back with the rest. As with any statement, an error
// that the database raises then leaves the transaction unusable; the errors of this
// package's own, such as [ErrNotFound], do not. In one transaction the safe order is to
// enforce limits first, then to save or append, for one agent only; other orders can
// deadlock with each other.
//
// Where db is no transaction, every method commits by itself, and runs again a few
// times when it lost a deadlock or the connection. Waiting for a connection ends with
// the context, or after the plugin's connection timeout with [ErrNoConnection].
//
// Reads go where a resolver plugin sends reads. Inside a transaction they see what it
// has written.
package store

import (
	"context"
	"fmt"
	"reflect"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"
	"gorm.io/gorm/schema"

	"github.com/legion-gorm/legion/internal/agentid"
	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/models"
)

// MaxListLimit is the most agents that one List returns.
const MaxListLimit = 1000

// A Store is the agents of one table. Make it with [For]. It is as safe for concurrent
// use as the db that it was made from: a pool is, a transaction is not.
type Store[T any] struct {
	db       *gorm.DB
	settings database.Settings
	tables   database.Tables
	err      error
}

// For returns the store of the agents in db, which may be a connection pool or a
// transaction. T is models.LegionAgent, or a struct that embeds it.
//
// The table is the one that the plugin of db limits. Where db has no plugin, it is T's
// own. A db or a T that cannot be worked with is reported by every method of the store,
// as [ErrInvalidConfig].
func For[T any](db *gorm.DB) *Store[T] {
	session, err := database.Session(db)
	if err != nil {
		return &Store[T]{err: err}
	}

	if session.DryRun {
		return &Store[T]{err: fmt.Errorf("legion: a store answers from what the database says: %w", gorm.ErrDryRunModeUnsupported)}
	}

	settings := database.SettingsOf(session)
	tables, err := tablesFor[T](session, settings)

	return &Store[T]{db: session, settings: settings, tables: tables, err: err}
}

// Get returns the agent. The error is [ErrNotFound] when there is none or it is
// deleted.
func (s *Store[T]) Get(ctx context.Context, agentID string) (*T, error) {
	if err := agentid.Validate(agentID); err != nil {
		return nil, err
	}

	var agents []T

	err := s.run(ctx, func(tx *gorm.DB) error {
		// A slice, since Find is quiet about one that stays empty; a new one, since GORM
		// leaves JSON fields of a reused struct as they were where the column is NULL.
		agents = nil
		agentID := clause.Eq{Column: clause.Column{Table: clause.CurrentTable, Name: agentIDColumn}, Value: agentID}

		return database.Explain(s.query(tx).Where(agentID).Limit(1).Find(&agents).Error)
	})

	switch {
	case err != nil:
		return nil, err
	case len(agents) == 0:
		return nil, ErrNotFound
	default:
		return &agents[0], nil
	}
}

// List returns the newest agents that are not deleted, newest first by created_at, those
// created at the same moment by agent_id. The limit is 1 to [MaxListLimit].
func (s *Store[T]) List(ctx context.Context, limit int) ([]T, error) {
	if limit < 1 || limit > MaxListLimit {
		return nil, fmt.Errorf("%w: the limit of List is %d: give 1 to %d", ErrInvalidArgument, limit, MaxListLimit)
	}

	var agents []T

	err := s.run(ctx, func(tx *gorm.DB) error {
		agents = nil
		order := clause.OrderBy{Columns: []clause.OrderByColumn{
			{Column: clause.Column{Table: clause.CurrentTable, Name: "created_at"}, Desc: true},
			{Column: clause.Column{Table: clause.CurrentTable, Name: agentIDColumn}},
		}}

		return database.Explain(s.query(tx).Clauses(order).Limit(limit).Find(&agents).Error)
	})
	if err != nil {
		return nil, err
	}

	return agents, nil
}

// Delete hides the agent from Get and List. Limits go on counting it: its start, its
// usage, and if it is running its slot until the lease ends. The next admission restores
// it; [Store.Prune] removes it for good.
//
// The error is [ErrNotFound] when there is no such agent or it is deleted already.
func (s *Store[T]) Delete(ctx context.Context, agentID string) error {
	if err := agentid.Validate(agentID); err != nil {
		return err
	}

	attempt := 0

	return s.run(ctx, func(tx *gorm.DB) error {
		attempt++

		deleted, err := database.Exec(tx, deleteStatement(s.agents(), agentID))
		if err != nil || deleted > 0 {
			return err
		}

		// The attempt before this one may have deleted it, and only its reply was lost.
		if attempt > 1 {
			if _, deleted, err := queryFlag(tx, isDeletedStatement(s.agents(), agentID)); err != nil || deleted {
				return err
			}
		}

		return ErrNotFound
	})
}

func deleteStatement(agents clause.Table, agentID string) clause.Expression {
	return expression(`UPDATE ? SET deleted_at = clock_timestamp(), updated_at = clock_timestamp()
WHERE agent_id = ? AND deleted_at IS NULL`, agents, agentID)
}

func isDeletedStatement(agents clause.Table, agentID string) clause.Expression {
	return expression(database.Primary+`SELECT deleted_at IS NOT NULL FROM ? WHERE agent_id = ?`, agents, agentID)
}

// run calls body with the caller's transaction, or with a session whose statements
// commit one by one; then body is called again when the connection was lost.
func (s *Store[T]) run(ctx context.Context, body func(tx *gorm.DB) error) error {
	if s.err != nil {
		return s.err
	}

	session := s.db.Session(&gorm.Session{NewDB: true, Context: ctx})
	if database.InTransaction(session) {
		return body(session)
	}

	return database.Autocommit(session, s.settings.ConnectionTimeout, body)
}

// query starts a query for rows of T in the table, under the name agent.
func (s *Store[T]) query(tx *gorm.DB) *gorm.DB {
	return tx.Model(new(T)).Table("? AS agent", s.agents())
}

// LegionTable is for the root package of this module: where the store's rows are. The pool
// is the zero value where it is not known.
func (s *Store[T]) LegionTable() (pool database.Pool, table string) {
	if s.err != nil {
		return database.Pool{}, ""
	}

	return database.PoolOf(s.db), s.tables.Agents
}

func (s *Store[T]) agents() clause.Table {
	return clause.Table{Name: s.tables.Agents}
}

// tablesFor returns the tables that T is stored in, when T can be.
func tablesFor[T any](session *gorm.DB, settings database.Settings) (database.Tables, error) {
	own, err := database.TablesOf(session, database.Settings{Model: new(T)})
	if err != nil {
		return database.Tables{}, err
	}

	if err := checkModel[T](session); err != nil {
		return database.Tables{}, err
	}

	if _, configured := session.Config.Plugins[database.PluginName].(database.Provider); !configured {
		return own, nil
	}

	limited, err := database.TablesOf(session, settings)
	if err != nil {
		return database.Tables{}, err
	}

	// A LegionAgent reads our columns of whatever model the plugin has, and a table that
	// was named explicitly is meant for every model. Any other difference is a plugin that
	// was not told of the model: what is stored here would never be counted.
	agent := reflect.TypeFor[T]()
	if settings.Table == "" && agent != reflect.TypeFor[models.LegionAgent]() && own.Agents != limited.Agents {
		return database.Tables{}, fmt.Errorf("%w: %s is stored in %q, but limits are counted in %q: pass legion.WithModel(&%s{}) to legion.New",
			fault.ErrInvalidConfig, agent, own.Agents, limited.Agents, agent.Name())
	}

	return limited, nil
}

// checkModel reports whether T has the columns of LegionAgent, under their own names.
func checkModel[T any](session *gorm.DB) error {
	agent := reflect.TypeFor[T]()
	if agent.Kind() != reflect.Struct {
		return fmt.Errorf("%w: %s is no struct: name the model itself, as in store.For[models.LegionAgent]", fault.ErrInvalidConfig, agent)
	}

	required, err := parse(session, &models.LegionAgent{})
	if err != nil {
		return err
	}

	parsed, err := parse(session, new(T))
	if err != nil {
		return err
	}

	for _, column := range required.DBNames {
		if parsed.FieldsByDBName[column] == nil {
			return fmt.Errorf("%w: %s has no column %q: embed models.LegionAgent, without a prefix", fault.ErrInvalidConfig, agent, column)
		}
	}

	if len(parsed.PrimaryFields) != 1 {
		return fmt.Errorf("%w: %s has a primary key of its own beside agent_id: make it a unique index", fault.ErrInvalidConfig, agent)
	}

	return nil
}

func parse(session *gorm.DB, model any) (*schema.Schema, error) {
	statement := &gorm.Statement{DB: session}
	if err := statement.Parse(model); err != nil {
		return nil, fmt.Errorf("%w: the agent model cannot be parsed: %w", fault.ErrInvalidConfig, err)
	}

	return statement.Schema, nil
}
