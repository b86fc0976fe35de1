package legion

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"gorm.io/gorm/schema"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/limiter"
)

// An Option configures the plugin that [New] makes.
type Option func(*Plugin)

// WithDefaultPolicy sets what the zero limiter.Policy of a rule stands for, so that
// rules need only name their groups. There is no default: without it, such a rule is
// invalid. The policy is checked by db.Use.
func WithDefaultPolicy(policy limiter.Policy) Option {
	return func(p *Plugin) { p.defaultPolicy = &policy }
}

// WithModel sets the agent model: a pointer to a struct that embeds
// models.LegionAgent and adds columns. The columns that it adds are nullable or have a
// default, since Legion inserts rows without them; its only primary key is the agent's
// ID. db.Use checks both. The default is &models.LegionAgent{}.
//
// Its table is named as GORM names the table of any model: by TableName(), or by the
// NamingStrategy.
func WithModel(model any) Option {
	return func(p *Plugin) { p.settings.Model = model }
}

// WithTable overrides the name of the agents' table, which may be qualified with its
// schema. The registry is named after it, with _identities at the end, so that it may have
// 52 bytes: PostgreSQL keeps 63 of a name. The default is the model's own name.
func WithTable(name string) Option {
	return func(p *Plugin) { p.settings.Table = name }
}

// WithLease sets how long a slot under MaxRunningAgents is held unless it is renewed,
// which is how long a process that died keeps it. The default is 30 seconds. It must be
// positive.
func WithLease(lease time.Duration) Option {
	return func(p *Plugin) {
		p.settings.Lease = lease
		if lease <= 0 {
			p.rejectf("WithLease(%s): a lease must be positive", lease)
		}
	}
}

// WithConnectionTimeout sets how long a call waits for a connection of the pool before
// it fails with [ErrNoConnection]. The context of the call may end the wait sooner. The
// default is 5 seconds. It must be positive.
func WithConnectionTimeout(timeout time.Duration) Option {
	return func(p *Plugin) {
		p.settings.ConnectionTimeout = timeout
		if timeout <= 0 {
			p.rejectf("WithConnectionTimeout(%s): the time must be positive", timeout)
		}
	}
}

// WithConnect sets how a connection that is not of the pool is opened. Turns renew their
// leases on one, so that a pool which is used up cannot starve them, and store.Watch
// listens on one. It is closed when it is no longer needed.
//
// The default is to connect as the pool has, which it reads off one of the pool's own
// connections. That is possible with the driver that gorm.io/driver/postgres uses, also
// where the pool was made with pgx's stdlib package. It is needed where the driver is
// wrapped, for example for tracing, where passwords do not last, and where a hook prepares
// the pool's connections, for example by setting the search_path.
func WithConnect(connect func(ctx context.Context) (*pgx.Conn, error)) Option {
	return func(p *Plugin) {
		p.settings.Connect = connect
		if connect == nil {
			p.rejectf("WithConnect(nil): leave the option out to connect as the pool does")
		}
	}
}

// WithoutUsageTracking says that the application records no usage with this plugin.
// Rules with MaxTokens or MaxEvals, which nothing would ever fill, are then invalid
// instead of silently unlimited.
func WithoutUsageTracking() Option {
	return func(p *Plugin) { p.settings.WithoutUsage = true }
}

// WithServerFunction lets the database decide in one round trip: [Migrate] makes functions
// beside the agents' table, and limiter.Enforce and [Plugin.Begin] call one where they
// would otherwise send five statements or more. The verdicts are the same, and calls of
// both kinds are exact together, also while an application is deployed whose versions
// differ. [Plugin.ServerFunction] tells whether it is in use.
//
// Several agents in one call, turns without rules and turns that are resumed are decided
// by statements all the same. So is everything where the function is not there: Migrate is
// an error without the right to create functions, and the limiter goes on without them.
//
// A call that does not admit, or has nothing to write, commits without waiting for a flush to
// disk (synchronous_commit is off in it). A few that have something to undo, such as the
// denial of a first use, end with an error of the SQLSTATE class LG. It stands in the
// server's log, with no identity in it but in the driver's simple protocol, where the
// statement has its parameters inside; it does not reach the application.
//
// Since the statement is the whole call, one that has waited for a lock may be let in although
// its context has just ended.
func WithServerFunction() Option {
	return func(p *Plugin) { p.settings.ServerFunction = true }
}

// WithObserver sets who is told of every decision, in place of the default that writes
// denials to slog.Default at Info and admissions at Debug. See [limiter.Observer]. Nil
// tells nobody.
func WithObserver(observer limiter.Observer) Option {
	return func(p *Plugin) {
		p.observer = observer
		if observer == nil {
			p.observer = func(limiter.Observation) {}
		}
	}
}

// WithMigrate makes db.Use call [Migrate] with these options. Without it, db.Use runs no
// statement at all.
func WithMigrate(options ...MigrateOption) Option {
	return func(p *Plugin) {
		p.migrates = true
		p.migrateOptions = options
	}
}

// rejectf remembers the first option that cannot work, for Initialize to report.
func (p *Plugin) rejectf(format string, args ...any) {
	if p.rejected == nil {
		p.rejected = fmt.Errorf("%w: "+format, append([]any{fault.ErrInvalidConfig}, args...)...)
	}
}

// checkModel reports why the limiter's inserts into the model's table would fail.
func checkModel(parsed, agent *schema.Schema) error {
	for _, column := range agent.DBNames {
		if parsed.FieldsByDBName[column] == nil {
			return fmt.Errorf("%w: the agent model %s has no column %q: embed models.LegionAgent, without embeddedPrefix",
				fault.ErrInvalidConfig, parsed.Name, column)
		}
	}

	for _, field := range parsed.PrimaryFields {
		if field.DBName != agent.PrioritizedPrimaryField.DBName {
			return fmt.Errorf("%w: the agent model %s has the primary key %q beside %q: embed models.LegionAgent without gorm.Model "+
				"or other primary keys", fault.ErrInvalidConfig, parsed.Name, field.DBName, agent.PrioritizedPrimaryField.DBName)
		}
	}

	for _, column := range parsed.DBNames {
		field := parsed.FieldsByDBName[column]
		if agent.FieldsByDBName[column] == nil && field.NotNull && !field.HasDefaultValue {
			return fmt.Errorf("%w: the column %q of the agent model %s is NOT NULL without a default, so that agents cannot be inserted: "+
				"make it nullable or give it a default", fault.ErrInvalidConfig, column, parsed.Name)
		}
	}

	return nil
}

// LegionSettings is for the packages of this module.
func (p *Plugin) LegionSettings() database.Settings { return p.settings }

// LegionDefaultPolicy is for the packages of this module.
func (p *Plugin) LegionDefaultPolicy() *limiter.Policy { return p.defaultPolicy }

// LegionObserver is for the packages of this module. Nil: the default.
func (p *Plugin) LegionObserver() limiter.Observer { return p.observer }
