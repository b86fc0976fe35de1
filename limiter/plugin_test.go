package limiter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/schema"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

func TestTheZeroPolicyIsThePluginsDefault(t *testing.T) {
	t.Parallel()

	policy := limiter.Policy{Window: window, MaxAgents: limiter.Max(1)}
	db := setupWith(t, plugin{policy: &policy})

	decision, err := limiter.Admit(db, "first", limiter.Rule{Name: "default", Identity: tenant})
	require.NoError(t, err)
	require.Equal(t, limiter.Rule{Name: "default", Identity: tenant, Policy: policy}, decision.Rules[0].Rule)

	exceeded := requireDenied(t, limiter.Enforce(db, "second", limiter.Rule{Identity: tenant}), limiter.LimitAgents)
	require.Equal(t, policy, exceeded.Rule.Policy)

	// A policy of the rule's own is taken whole, not filled in.
	require.NoError(t, limiter.Enforce(db, "second", recordOnly(tenant)))

	err = limiter.Enforce(db, "third", limiter.Rule{Identity: tenant, Policy: limiter.Policy{MaxAgents: limiter.Max(5)}})
	require.ErrorIs(t, err, limiter.ErrInvalidRule)
	require.ErrorContains(t, err, "Window")
}

func TestTheZeroPolicyIsInvalidWithoutADefault(t *testing.T) {
	t.Parallel()

	for name, db := range map[string]*gorm.DB{
		"without a plugin":            setup(t),
		"the plugin has none":         setupWith(t, plugin{}),
		"the plugin has a wrong one":  setupWith(t, plugin{policy: &limiter.Policy{MaxAgents: limiter.Max(1)}}),
		"the plugin has an empty one": setupWith(t, plugin{policy: &limiter.Policy{}}),
	} {
		err := limiter.Enforce(db, "agent", limiter.Rule{Name: "hourly", Identity: tenant})
		require.ErrorIs(t, err, limiter.ErrInvalidRule, name)
		require.ErrorContains(t, err, `rule 1 ("hourly")`, name)
		require.Empty(t, agentIDs(t, db), name)
	}

	err := limiter.Enforce(setup(t), "agent", limiter.Rule{Identity: tenant})
	require.ErrorContains(t, err, "legion.WithDefaultPolicy", "the remedy")
}

func TestLimitsOnUsageAreInvalidWhereNoneIsRecorded(t *testing.T) {
	t.Parallel()

	db := setupWith(t, plugin{settings: database.Settings{WithoutUsage: true}})

	for _, rule := range []limiter.Rule{maxTokens(tenant, 5), maxEvals(tenant, 5)} {
		err := limiter.Enforce(db, "agent", recordOnly(tenant), rule)
		require.ErrorIs(t, err, limiter.ErrInvalidRule)
		require.ErrorContains(t, err, "leave that option out, or these limits", "the remedy")
	}

	require.Empty(t, agentIDs(t, db))
	require.NoError(t, limiter.Enforce(db, "agent", maxAgents(tenant, 5), maxRunning(tenant, 5)))
}

// chatAgent is an application's agent model with columns of its own.
type chatAgent struct {
	models.LegionAgent

	Title    *string
	Priority int64  `gorm:"not null;default:3"`
	Ignored  string `gorm:"-"`
}

// selectAgent is one whose name says a keyword, with capitals and quotes in it.
type selectAgent struct{ models.LegionAgent }

func (selectAgent) TableName() string { return `Select "agents"` }

type fixedAgent struct{ models.LegionAgent }

func (fixedAgent) TableName() string { return "conversations" }

func TestTablesAreNamedByModelPrefixSchemaAndTable(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name       string
		config     *gorm.Config
		settings   database.Settings
		schema     string
		agents     string
		identities string
	}{
		{name: "by default", config: &gorm.Config{}, agents: `public.legion_agents`, identities: `public.legion_agents_identities`},
		{
			name: "an embedding model", config: &gorm.Config{}, settings: database.Settings{Model: &chatAgent{}},
			agents: `public.chat_agents`, identities: `public.chat_agents_identities`,
		},
		{
			name: "a model that names its table", config: &gorm.Config{}, settings: database.Settings{Model: &fixedAgent{}},
			agents: `public.conversations`, identities: `public.conversations_identities`,
		},
		{
			name: "a prefix", config: &gorm.Config{NamingStrategy: schema.NamingStrategy{TablePrefix: "app_"}},
			agents: `public.app_legion_agents`, identities: `public.app_legion_agents_identities`,
		},
		{
			name: "a schema as prefix", config: &gorm.Config{NamingStrategy: schema.NamingStrategy{TablePrefix: "limits."}},
			schema: "limits", agents: `limits.legion_agents`, identities: `limits.legion_agents_identities`,
		},
		{
			name: "singular", config: &gorm.Config{NamingStrategy: schema.NamingStrategy{SingularTable: true}},
			agents: `public.legion_agent`, identities: `public.legion_agent_identities`,
		},
		{
			name: "a table", config: &gorm.Config{}, settings: database.Settings{Table: "order"},
			agents: `public."order"`, identities: `public.order_identities`,
		},
		{
			name: "a table in a schema", config: &gorm.Config{}, settings: database.Settings{Model: &chatAgent{}, Table: "limits.Agents"},
			schema: "limits", agents: `limits."Agents"`, identities: `limits."Agents_identities"`,
		},
		{
			name: "a keyword, capitals and quotes", config: &gorm.Config{}, settings: database.Settings{Model: &selectAgent{}},
			agents: `public."Select ""agents"""`, identities: `public."Select ""agents""_identities"`,
		},
		{
			name: "column names in capitals", config: &gorm.Config{NamingStrategy: schema.NamingStrategy{NoLowerCase: true}},
			agents: `public."LegionAgents"`, identities: `public."LegionAgents_identities"`,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db := pgtest.Open(t, test.config)
			require.NoError(t, db.Use(plugin{settings: test.settings}))

			if test.schema != "" {
				require.NoError(t, db.Exec("CREATE SCHEMA "+test.schema).Error)
			}

			migrated := db
			if test.settings.Table != "" {
				migrated = db.Table(test.settings.Table)
			}

			require.NoError(t, migrated.AutoMigrate(database.SettingsOf(db).Model))

			for _, tx := range []*gorm.DB{db, begin(t, db)} {
				require.NoError(t, limiter.Enforce(tx, "first", maxRunning(tenant, 1)))
				requireDenied(t, limiter.Enforce(tx, "second", maxRunning(tenant, 1)), limiter.LimitRunningAgents)
				require.NoError(t, limiter.Release(tx, "first"))
			}

			for table, wanted := range map[string]int64{test.agents: 1, test.identities: 1} {
				var rows int64

				require.NoError(t, db.Raw("SELECT count(*) FROM "+table).Scan(&rows).Error)
				require.Equal(t, wanted, rows, table)
			}
		})
	}
}

func TestColumnsThatTheApplicationAddsAreLeftAlone(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.Use(plugin{settings: database.Settings{Model: &chatAgent{}, Lease: time.Hour}}))
	require.NoError(t, db.AutoMigrate(&chatAgent{}))

	load := func() (agent chatAgent) {
		require.NoError(t, db.Take(&agent, "agent_id = ?", "agent").Error)

		return agent
	}

	require.NoError(t, limiter.Enforce(db, "agent", recordOnly(tenant)))
	require.Nil(t, load().Title)
	require.EqualValues(t, 3, load().Priority, "the column's default")

	require.NoError(t, db.Model(&chatAgent{}).Where("agent_id = ?", "agent").Updates(map[string]any{"title": "hello", "priority": 9}).Error)
	require.NoError(t, limiter.Enforce(db, "agent", maxRunning(otherTenant, 1)))
	require.Equal(t, "hello", *load().Title)
	require.EqualValues(t, 9, load().Priority)
	require.WithinDuration(t, time.Now().Add(time.Hour), *load().LeaseExpiresAt, time.Minute)
}

// auditedAgent has hooks, which are for the application's own writes.
type auditedAgent struct{ models.LegionAgent }

func (*auditedAgent) BeforeCreate(*gorm.DB) error { return gorm.ErrInvalidData }
func (*auditedAgent) BeforeSave(*gorm.DB) error   { return gorm.ErrInvalidData }
func (*auditedAgent) AfterFind(*gorm.DB) error    { return gorm.ErrInvalidData }

func TestHooksOfTheAgentModelAreNotOurs(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.Use(plugin{settings: database.Settings{Model: &auditedAgent{}}}))
	require.NoError(t, db.AutoMigrate(&auditedAgent{}))
	require.NoError(t, limiter.Enforce(db, "agent", maxRunning(tenant, 1)))
	require.NoError(t, limiter.Release(db, "agent"))
}

func TestTwoTablesAreTwoLimiters(t *testing.T) {
	t.Parallel()

	dsn := pgtest.Database(t)
	plain := pgtest.OpenDSN(t, dsn)
	prefixed := pgtest.OpenDSN(t, dsn, &gorm.Config{NamingStrategy: schema.NamingStrategy{TablePrefix: "app_"}})

	for _, db := range []*gorm.DB{plain, prefixed} {
		require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))
		require.NoError(t, limiter.Enforce(db, "agent", maxAgents(tenant, 1)))
		requireDenied(t, limiter.Enforce(db, "another", maxAgents(tenant, 1)), limiter.LimitAgents)
	}
}

func TestAnAgentModelThatIsNoModelIsAnError(t *testing.T) {
	t.Parallel()

	db := setupWith(t, plugin{settings: database.Settings{Model: new(int)}})
	require.ErrorIs(t, limiter.Enforce(db, "agent", recordOnly(tenant)), limiter.ErrInvalidConfig)
	require.ErrorIs(t, limiter.Release(db, "agent"), limiter.ErrInvalidConfig)
	require.Empty(t, agentIDs(t, db))
}
