package legion_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/schema"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// ChatAgent is an application's own agent model. What its tags hold is what SQL
// builders like to take for placeholders.
type ChatAgent struct {
	models.LegionAgent

	Title    *string
	Room     string    `gorm:"size:40;not null;default:'@lobby? $1'"`
	Priority int       `gorm:"index:,sort:desc,where:priority > 0;check:priority_range,priority BETWEEN 0 AND 9"`
	Slug     *string   `gorm:"unique"`
	OpenedAt time.Time `gorm:"comment:when the chat was opened;default:now()"`
}

type QualifiedChatAgent struct{ ChatAgent }

func (QualifiedChatAgent) TableName() string { return "audit.chats" }

// namedTable is one way to say what the agents' table is called.
type namedTable struct {
	name   string
	naming schema.NamingStrategy
	model  any
	table  string

	// agents is the name that the table then has in the catalogue, in parts if it is not
	// in the current schema; the registry's is that with _identities at its end.
	agents []string

	// options are further ones of the plugin.
	options []legion.Option

	// work uses the store of the model.
	work func(t *testing.T, db *gorm.DB)
}

func namedTables() []namedTable {
	return []namedTable{
		{name: "default", agents: []string{"legion_agents"}},
		{
			name:   "a table prefix",
			naming: schema.NamingStrategy{TablePrefix: "app_"}, agents: []string{"app_legion_agents"},
		},
		{
			name:   "singular",
			naming: schema.NamingStrategy{SingularTable: true}, agents: []string{"legion_agent"},
		},
		{
			name:   "a schema as prefix",
			naming: schema.NamingStrategy{TablePrefix: "agents_schema."}, agents: []string{"agents_schema", "legion_agents"},
		},
		{
			name:   "a schema as prefix, singular",
			naming: schema.NamingStrategy{TablePrefix: "agents_schema.", SingularTable: true}, agents: []string{"agents_schema", "legion_agent"},
		},
		{
			name:   "no lower case",
			naming: schema.NamingStrategy{NoLowerCase: true}, agents: []string{"LegionAgents"},
		},
		{
			name:   "names replaced",
			naming: schema.NamingStrategy{NameReplacer: strings.NewReplacer("Legion", "Group")}, agents: []string{"group_agents"},
		},
		{
			name:  "a model that embeds",
			model: &ChatAgent{}, agents: []string{"chat_agents"}, work: useStore[ChatAgent],
		},
		{
			name:   "a model that embeds, with a prefix",
			naming: schema.NamingStrategy{TablePrefix: "app_"},
			model:  &ChatAgent{}, agents: []string{"app_chat_agents"}, work: useStore[ChatAgent],
		},
		{
			name:  "a model with TableName",
			model: &QualifiedChatAgent{}, agents: []string{"audit", "chats"}, work: useStore[QualifiedChatAgent],
		},
		{
			name:  "a table",
			table: "crew", agents: []string{"crew"},
		},
		{
			name:  "a table in a schema",
			table: "agents_schema.crew", agents: []string{"agents_schema", "crew"},
		},
		{
			name:   "a table for a model that embeds, whatever the prefix",
			naming: schema.NamingStrategy{TablePrefix: "app_"},
			model:  &ChatAgent{}, table: "audit.Talks", agents: []string{"audit", "Talks"}, work: useStore[ChatAgent],
		},
		{
			name:  "a keyword",
			table: "order", agents: []string{"order"},
		},
		{
			name:  "a keyword in a schema that is one",
			table: "user.order", agents: []string{"user", "order"},
		},
		{
			name:  "capitals and a blank",
			table: "User Agents", agents: []string{"User Agents"},
		},
		{
			name:  "capitals and a blank, in a schema with such",
			table: "The App.User Agents", agents: []string{"The App", "User Agents"},
		},
		{
			name:  "a quote",
			table: `we"ird`, agents: []string{`we"ird`},
		},
		{
			name:  "a quote, in a schema with one",
			table: `we"ird.we"ird`, agents: []string{`we"ird`, `we"ird`},
		},
		{
			name:  "placeholders",
			table: "my agents? $1 @all", agents: []string{"my agents? $1 @all"},
		},
		{
			name:  "other letters",
			table: "Förderer.Агенты", agents: []string{"Förderer", "Агенты"},
		},
		{
			name:  "as long as can be",
			table: strings.Repeat("s", 63) + "." + strings.Repeat("a", 52), agents: []string{strings.Repeat("s", 63), strings.Repeat("a", 52)},
		},
		{
			name:  "as long as can be, in letters of two bytes",
			table: strings.Repeat("ä", 24), agents: []string{strings.Repeat("ä", 24)},
		},
		{
			name:   "as long as can be, with names for indexes that GORM does not shorten",
			naming: schema.NamingStrategy{IdentifierMaxLength: 64},
			table:  strings.Repeat("a", 48), agents: []string{strings.Repeat("a", 48)},
		},
	}
}

// setup returns a database with the plugin and the schema that the name needs, and what
// has run on it.
func (n namedTable) setup(t *testing.T) (*gorm.DB, *recorder) {
	t.Helper()

	db, statements := n.open(t, pgtest.Database(t))

	if len(n.agents) == 2 {
		require.NoError(t, db.Exec("CREATE SCHEMA "+pgx.Identifier{n.agents[0]}.Sanitize()).Error)
	}

	return db, statements
}

func (n namedTable) open(t *testing.T, dsn string) (*gorm.DB, *recorder) {
	t.Helper()

	options := slices.Clone(n.options)
	if n.model != nil {
		options = append(options, legion.WithModel(n.model))
	}

	if n.table != "" {
		options = append(options, legion.WithTable(n.table))
	}

	statements := newRecorder()
	db := pgtest.OpenDSN(t, dsn, &gorm.Config{Logger: statements, NamingStrategy: n.naming})
	require.NoError(t, db.Use(legion.New(options...)))

	return db, statements
}

// identities is the name of the registry in the catalogue.
func (n namedTable) identities() []string {
	last := len(n.agents) - 1

	return append(n.agents[:last:last], n.agents[last]+"_identities")
}

// catalogued returns the names of all tables of the application's schemas, in the form
// of namedTable.agents.
func catalogued(t *testing.T, db *gorm.DB) [][]string {
	t.Helper()

	names := [][]string{}

	for _, name := range lines(t, db, `
		SELECT CASE nspname WHEN current_schema() THEN '' ELSE nspname || E'\n' END || relname
		FROM tables JOIN pg_class USING (oid) JOIN pg_namespace ON pg_namespace.oid = relnamespace`) {
		names = append(names, strings.Split(name, "\n"))
	}

	return names
}

func rowsOf(t *testing.T, db *gorm.DB, table []string) (count int64) {
	t.Helper()
	require.NoError(t, db.Raw("SELECT count(*) FROM "+pgx.Identifier(table).Sanitize()).Scan(&count).Error)

	return count
}

func TestATableOfAnyNameMigratesEnforcesSavesAndReads(t *testing.T) {
	t.Parallel()

	for _, test := range namedTables() {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db, statements := test.setup(t)
			require.NoError(t, legion.Migrate(db))
			require.ElementsMatch(t, [][]string{test.agents, test.identities()}, catalogued(t, db))

			statements.take()
			require.NoError(t, legion.Migrate(db))
			require.Empty(t, statements.takeDDL(), "by a second Migrate")

			rule := limiter.Rule{
				Identity: limiter.Identity{"tenant": "acme"},
				Policy:   limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(1), MaxRunningAgents: limiter.Max(1)},
			}

			report, err := limiter.Check(db, "", rule)
			require.NoError(t, err)
			require.True(t, report.Allowed)
			require.NoError(t, limiter.Enforce(db, "a", rule))
			require.ErrorIs(t, limiter.Enforce(db, "b", rule), limiter.ErrExceeded)
			report, err = limiter.Check(db, "b", rule)
			require.NoError(t, err)
			require.False(t, report.Allowed)
			require.EqualValues(t, 1, report.Rules[0].Usage.Agents)
			require.NoError(t, limiter.Release(db, "a"))
			require.EqualValues(t, 1, rowsOf(t, db, test.agents))
			require.EqualValues(t, 1, rowsOf(t, db, test.identities()))

			if test.work != nil {
				test.work(t, db)
			} else {
				useStore[models.LegionAgent](t, db)
			}

			require.Zero(t, rowsOf(t, db, test.agents))
			require.Zero(t, rowsOf(t, db, test.identities()))

			// As after a bare AutoMigrate, the first call of a process makes the registry.
			require.NoError(t, db.Exec("DROP TABLE "+pgx.Identifier(test.identities()).Sanitize()).Error)
			another, _ := test.open(t, pgtest.DSN(db))
			require.NoError(t, limiter.Enforce(another, "a", rule))
			require.EqualValues(t, 1, rowsOf(t, db, test.identities()))

			require.NoError(t, legion.MigrateDown(db))
			require.Empty(t, catalogued(t, db))
		})
	}
}

// useStore uses every method of the store with the one agent that there is, "a", and
// leaves nothing of it.
func useStore[T any](t *testing.T, db *gorm.DB) {
	t.Helper()

	agents := store.For[T](db)
	kind := "chat"
	require.NoError(t, agents.Save(t.Context(), store.Patch{AgentID: "a", AgentType: &kind}))
	appended, err := agents.AppendUsage(t.Context(), "a", models.Usage{TotalTokens: 7})
	require.NoError(t, err)
	require.True(t, appended)

	_, err = agents.Get(t.Context(), "a")
	require.NoError(t, err)
	listed, err := agents.List(t.Context(), 10)
	require.NoError(t, err)
	require.Len(t, listed, 1)

	// A LegionAgent reads our columns of any model.
	agent, err := store.For[models.LegionAgent](db).Get(t.Context(), "a")
	require.NoError(t, err)
	require.Equal(t, &kind, agent.AgentType)
	entries, err := agent.UsageEntries()
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.EqualValues(t, 7, entries[0].TotalTokens)

	require.NoError(t, agents.Delete(t.Context(), "a"))
	_, err = agents.Get(t.Context(), "a")
	require.ErrorIs(t, err, store.ErrNotFound)
	removed, err := agents.Prune(t.Context(), time.Now().Add(-time.Hour))
	require.NoError(t, err)
	require.Zero(t, removed, "it is not old enough")
	require.Eventually(t, func() bool {
		removed, err = agents.Prune(t.Context(), time.Now().Add(-time.Millisecond))

		return err != nil || removed.Agents > 0
	}, 30*time.Second, 10*time.Millisecond)
	require.NoError(t, err)
	require.Equal(t, store.PruneResult{Agents: 1, Identities: 1}, removed)
}

func TestANameThatPostgresWouldCutIsRefused(t *testing.T) {
	t.Parallel()

	dsn := pgtest.Database(t)
	long := func(bytes int) string { return strings.Repeat("a", bytes) }

	for name, test := range map[string]struct {
		naming    schema.NamingStrategy
		fits, not legion.Option
		says      string
	}{
		"a table": {
			fits: legion.WithTable(long(52)), not: legion.WithTable(long(53)),
			says: `has 53 bytes, the limit is 52`,
		},
		"a table in a schema": {
			fits: legion.WithTable(long(63) + "." + long(52)), not: legion.WithTable("a." + long(53)),
			says: `has 53 bytes, the limit is 52`,
		},
		"a schema": {
			fits: legion.WithTable(long(63) + ".a"), not: legion.WithTable(long(64) + ".a"),
			says: `has 64 bytes, the limit is 63`,
		},
		"an index of letters of two bytes": {
			fits: legion.WithTable(strings.Repeat("ä", 24)), not: legion.WithTable(strings.Repeat("ä", 25)),
			says: `would be called "idx_`,
		},
		"an index as long as the application says": {
			naming: schema.NamingStrategy{IdentifierMaxLength: 64},
			fits:   legion.WithTable(long(48)), not: legion.WithTable(long(49)),
			says: `set IdentifierMaxLength of the NamingStrategy to 63`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			open := func() *gorm.DB { return pgtest.OpenDSN(t, dsn, &gorm.Config{NamingStrategy: test.naming}) }
			require.NoError(t, open().Use(legion.New(test.fits)))

			db := open()
			err := db.Use(legion.New(test.not))
			require.ErrorIs(t, err, legion.ErrInvalidConfig)
			require.ErrorContains(t, err, test.says)

			_, used := legion.From(db)
			require.False(t, used)
		})
	}
}

func TestANameThatPostgresWouldCutIsRefusedWithoutThePluginToo(t *testing.T) {
	t.Parallel()

	statements := newRecorder()
	db := pgtest.Open(t, &gorm.Config{Logger: statements, NamingStrategy: schema.NamingStrategy{
		TablePrefix: strings.Repeat("a", 53-len("legion_agents")),
	}})
	rule := limiter.Rule{Identity: limiter.Everyone(), Policy: limiter.Policy{Window: time.Hour}}
	_, checked := limiter.Check(db, "a", rule)
	_, got := store.For[models.LegionAgent](db).Get(t.Context(), "a")
	_, ddl := legion.DDL(db)

	for name, err := range map[string]error{
		"Enforce": limiter.Enforce(db, "a", rule), "Check": checked, "Release": limiter.Release(db, "a"),
		"Get": got, "Migrate": legion.Migrate(db), "MigrateDown": legion.MigrateDown(db), "DDL": ddl,
	} {
		require.ErrorIs(t, err, legion.ErrInvalidConfig, name)
		require.ErrorContains(t, err, "has 53 bytes, the limit is 52", name)
	}

	require.Empty(t, statements.take())
}
