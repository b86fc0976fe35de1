package database

import (
	"fmt"
	"strings"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/models"
)

// PluginName is the name under which the plugin is registered with GORM.
const PluginName = "gorm:legion"

const (
	// DefaultLease is how long a slot is held without being renewed.
	DefaultLease = 30 * time.Second

	// DefaultConnectionTimeout is how long a call waits for a connection.
	DefaultConnectionTimeout = 5 * time.Second
)

// Settings is what the plugin says about the database. The zero value stands for
// the defaults.
type Settings struct {
	// Model is a pointer to the agent model. Nil: &models.LegionAgent{}.
	Model any

	// Table overrides the table's name. Empty: the model's.
	Table string

	// Lease is how long a slot is held without renewal. Zero: DefaultLease.
	Lease time.Duration

	// ConnectionTimeout bounds the wait for a connection. Zero: DefaultConnectionTimeout.
	ConnectionTimeout time.Duration

	// WithoutUsage says that nothing records usage, so that limits on it are an error.
	WithoutUsage bool

	// ServerFunction asks for the function in the database that decides in one round trip.
	ServerFunction bool

	// Connect opens a connection that is not of the pool. Nil: as the pool's driver does,
	// see ConnectOf.
	Connect Connect
}

// WithDefaults fills in the defaults.
func (s Settings) WithDefaults() Settings {
	if s.Model == nil {
		s.Model = &models.LegionAgent{}
	}

	if s.Lease == 0 {
		s.Lease = DefaultLease
	}

	if s.ConnectionTimeout == 0 {
		s.ConnectionTimeout = DefaultConnectionTimeout
	}

	return s
}

// A Provider is a GORM plugin that has settings: the root package's.
type Provider interface{ LegionSettings() Settings }

// SettingsOf returns the settings of the plugin that db uses, with the defaults
// filled in.
func SettingsOf(db *gorm.DB) Settings {
	var settings Settings
	if provider, ok := db.Config.Plugins[PluginName].(Provider); ok {
		settings = provider.LegionSettings()
	}

	return settings.WithDefaults()
}

// MaxNameBytes is the longest name that PostgreSQL keeps. It cuts longer ones off without
// an error: two of them may become one, and catalogue queries find neither.
const MaxNameBytes = 63

const identitiesSuffix = "_identities"

// Tables are the names of the two tables, unquoted, with their schema if they
// have one.
type Tables struct {
	Agents     string
	Identities string
}

// TablesOf returns the names that the settings give with the NamingStrategy of db. The
// error is ErrInvalidConfig where PostgreSQL would cut one of them.
func TablesOf(db *gorm.DB, settings Settings) (Tables, error) {
	statement := &gorm.Statement{DB: db}
	if err := statement.ParseWithSpecialTableName(settings.Model, settings.Table); err != nil {
		return Tables{}, fmt.Errorf("%w: the agent model cannot be parsed: %w", fault.ErrInvalidConfig, err)
	}

	agents := statement.Schema.Table
	if settings.Table != "" {
		agents = settings.Table
	}

	if err := checkLength(agents); err != nil {
		return Tables{}, err
	}

	return Tables{Agents: agents, Identities: agents + identitiesSuffix}, nil
}

func checkLength(agents string) error {
	qualifier, table := "", agents
	if dot := strings.LastIndexByte(agents, '.'); dot >= 0 {
		qualifier, table = agents[:dot], agents[dot+1:]
	}

	if table = strings.Trim(table, `"`); len(table)+len(identitiesSuffix) > MaxNameBytes {
		return fmt.Errorf("%w: the name of the agents' table, %q, has %d bytes, the limit is %d: choose a shorter one. "+
			"PostgreSQL keeps %d bytes of a name, and the registry's is this one and %q", fault.ErrInvalidConfig,
			table, len(table), MaxNameBytes-len(identitiesSuffix), MaxNameBytes, identitiesSuffix)
	}

	if qualifier = strings.Trim(qualifier, `"`); len(qualifier) > MaxNameBytes {
		return fmt.Errorf("%w: the name of the agents' schema, %q, has %d bytes, the limit is %d, which is what PostgreSQL keeps of a name: "+
			"choose a shorter one", fault.ErrInvalidConfig, qualifier, len(qualifier), MaxNameBytes)
	}

	return nil
}
