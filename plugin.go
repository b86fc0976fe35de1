package legion

import (
	"context"
	"errors"
	"fmt"

	"gorm.io/gorm"
	"gorm.io/gorm/schema"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/migration"
	"github.com/legion-gorm/legion/internal/serverfunction"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// Name is the name of the plugin in gorm.Config.Plugins.
const Name = database.PluginName

// The names of the plugin's create callbacks, for other plugins to order theirs
// against. EnforceCallback runs after BeforeCreate hooks and before the INSERT,
// FinishCallback after everything else.
const (
	EnforceCallback = "legion:enforce"
	FinishCallback  = "legion:finish_transaction"
)

// Plugin is Legion as a GORM plugin. Make it with [New] and register it with db.Use,
// once for each *gorm.DB. Its methods may be called concurrently.
//
// The limiter and the store work without it, with their defaults. It holds what an
// application configures, and enforces for models that say what limits them: see
// [Limited].
type Plugin struct {
	settings       database.Settings
	defaultPolicy  *limiter.Policy
	observer       limiter.Observer
	migrates       bool
	migrateOptions []MigrateOption
	rejected       error

	// db, tables and store are those of the database that uses the plugin. The zero values:
	// none does yet.
	db     *gorm.DB
	tables database.Tables
	store  *store.Store[models.LegionAgent]
	turns  *turns
}

var _ gorm.Plugin = (*Plugin)(nil)

// New makes the plugin:
//
//	plugin := legion.New(legion.WithDefaultPolicy(limiter.Policy{
//		Window: time.Minute, MaxAgents: limiter.Max(10),
//	}))
//	err := db.Use(plugin)
//
// Options that cannot work are reported by db.Use, as [ErrInvalidConfig].
func New(options ...Option) *Plugin {
	plugin := &Plugin{turns: newTurns()}
	for _, option := range options {
		option(plugin)
	}

	return plugin
}

// From returns the plugin that db uses, and whether there is one.
func From(db *gorm.DB) (*Plugin, bool) {
	if db == nil || db.Config == nil {
		return nil, false
	}

	plugin, ok := db.Plugins[Name].(*Plugin)

	return plugin, ok
}

// Name implements gorm.Plugin. It is [Name].
func (p *Plugin) Name() string { return Name }

// ServerFunction reports whether the database has the function of [WithServerFunction],
// and this plugin is to use it. Without the function, or without the option, the limiter
// decides by statements of its own.
//
// Errors: [ErrInvalidConfig] before db.Use; [ErrNoConnection]; the database's.
func (p *Plugin) ServerFunction(ctx context.Context) (inUse bool, err error) {
	switch {
	case p.db == nil:
		return false, errNoDatabase
	case !p.settings.ServerFunction:
		return false, nil
	}

	err = p.atDatabase(ctx, func(tx *gorm.DB) (err error) {
		inUse, err = serverfunction.IsThere(tx, p.tables.Agents)

		return err
	})

	return inUse, err
}

// Initialize implements gorm.Plugin: db.Use calls it. It checks the options and the agent
// model, runs [Migrate] if [WithMigrate] asks for it, and registers the create callbacks.
// It starts no goroutine.
//
// Errors: [ErrInvalidConfig] for options or a model that cannot work, for names that are
// longer than PostgreSQL keeps, and for a dialect other than PostgreSQL; those of Migrate.
func (p *Plugin) Initialize(db *gorm.DB) error {
	session, err := database.Session(db)
	if err != nil {
		return err
	}

	if err := p.check(session); err != nil {
		return err
	}

	if p.db != nil {
		// A resolver plugin opens its further pools with a copy of this db's configuration,
		// and gorm.Open initializes the plugins in it once more.
		if session.Plugins[Name] == gorm.Plugin(p) {
			return nil
		}

		return fmt.Errorf("%w: the plugin is used by another database already: make one for each with New", fault.ErrInvalidConfig)
	}

	if p.migrates {
		if err := migration.Up(session, p.settings.WithDefaults(), choose(p.migrateOptions)); err != nil {
			return err
		}
	}

	if p.tables, err = database.TablesOf(session, p.settings.WithDefaults()); err != nil {
		return err
	}

	if err := registerCallbacks(db); err != nil {
		return err
	}

	p.db = session

	return nil
}

func (p *Plugin) check(db *gorm.DB) error {
	if p.rejected != nil {
		return p.rejected
	}

	if p.defaultPolicy != nil {
		if err := p.defaultPolicy.Validate(); err != nil {
			return fmt.Errorf("%w: WithDefaultPolicy: %w", fault.ErrInvalidConfig, err)
		}
	}

	agent, err := parse(db, &models.LegionAgent{})
	if err != nil {
		return err
	}

	model, err := parse(db, p.settings.WithDefaults().Model)
	if err != nil {
		return err
	}

	if err := checkModel(model, agent); err != nil {
		return err
	}

	// It checks the names of the tables and of all that belongs to them.
	_, err = migration.TablesOf(db, p.settings.WithDefaults())

	return err
}

func parse(db *gorm.DB, model any) (*schema.Schema, error) {
	statement := &gorm.Statement{DB: db}
	if err := statement.Parse(model); err != nil {
		return nil, fmt.Errorf("%w: the agent model %T cannot be parsed: %w", fault.ErrInvalidConfig, model, err)
	}

	return statement.Schema, nil
}

// registerCallbacks comes last in Initialize, and checks every error: after a failed
// registration GORM's whole create pipeline is empty, and creates nothing without an
// error.
func registerCallbacks(db *gorm.DB) error {
	create := db.Callback().Create()

	return errors.Join(
		create.After("gorm:before_create").Before("gorm:create").Register(EnforceCallback, enforceCreate),
		create.After("gorm:after_create").Register(FinishCallback, finishCreate),
	)
}
