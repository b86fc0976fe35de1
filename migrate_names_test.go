package legion_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/schema"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
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

func TestMigrateNamesTablesAsGORMDoes(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name       string
		naming     schema.NamingStrategy
		model      any
		table      string
		agents     string
		identities string
	}{
		{
			name:   "default",
			agents: "legion_agents", identities: "legion_agents_identities",
		},
		{
			name:   "table prefix",
			naming: schema.NamingStrategy{TablePrefix: "app_"},
			agents: "app_legion_agents", identities: "app_legion_agents_identities",
		},
		{
			name:   "singular table",
			naming: schema.NamingStrategy{SingularTable: true},
			agents: "legion_agent", identities: "legion_agent_identities",
		},
		{
			name:   "schema as a prefix",
			naming: schema.NamingStrategy{TablePrefix: "audit.", SingularTable: true},
			agents: "audit.legion_agent", identities: "audit.legion_agent_identities",
		},
		{
			name:   "no lower case",
			naming: schema.NamingStrategy{NoLowerCase: true},
			agents: `"LegionAgents"`, identities: `"LegionAgents_identities"`,
		},
		{
			name:   "names replaced",
			naming: schema.NamingStrategy{NameReplacer: strings.NewReplacer("Legion", "Group")},
			agents: "group_agents", identities: "group_agents_identities",
		},
		{
			name:   "model that embeds",
			model:  &ChatAgent{},
			agents: "chat_agents", identities: "chat_agents_identities",
		},
		{
			name:   "model that embeds, in a schema",
			model:  &QualifiedChatAgent{},
			agents: "audit.chats", identities: "audit.chats_identities",
		},
		{
			name:   "model that embeds, in a table of another name",
			naming: schema.NamingStrategy{TablePrefix: "app_"},
			model:  &ChatAgent{}, table: "audit.Talks",
			agents: `audit."Talks"`, identities: `audit."Talks_identities"`,
		},
		{
			name:   "keyword",
			table:  "order",
			agents: `"order"`, identities: "order_identities",
		},
		{
			name:   "quote",
			table:  `we"ird`,
			agents: `"we""ird"`, identities: `"we""ird_identities"`,
		},
		{
			name:   "blank and placeholders",
			table:  "my agents? $1 @all",
			agents: `"my agents? $1 @all"`, identities: `"my agents? $1 @all_identities"`,
		},
		{
			name:   "as long as can be",
			table:  strings.Repeat("a", 52),
			agents: strings.Repeat("a", 52), identities: strings.Repeat("a", 52) + "_identities",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			setupNamed := func() (*gorm.DB, *recorder) {
				statements := newRecorder()
				db := pgtest.Open(t, &gorm.Config{Logger: statements, NamingStrategy: test.naming})

				var options []legion.Option
				if test.model != nil {
					options = append(options, legion.WithModel(test.model))
				}

				if test.table != "" {
					options = append(options, legion.WithTable(test.table))
				}

				require.NoError(t, db.Use(legion.New(options...)))
				require.NoError(t, db.Exec("CREATE SCHEMA audit").Error)

				return db, statements
			}

			db, statements := setupNamed()
			require.NoError(t, legion.Migrate(db))
			require.ElementsMatch(t, []string{test.agents, test.identities}, tableNames(t, db))
			migrated := catalogue(t, db)

			statements.take()
			require.NoError(t, legion.Migrate(db))
			require.Empty(t, statements.takeDDL(), "by a second Migrate")

			// GORM finds the tables under the names that the settings give.
			tables, err := database.TablesOf(db, database.SettingsOf(db))
			require.NoError(t, err)

			for _, table := range []string{tables.Agents, tables.Identities} {
				require.NoError(t, db.Exec("SELECT * FROM "+db.Statement.Quote(table)).Error)
			}

			fromFile, fromFileStatements := setupNamed()
			ddl, err := legion.DDL(fromFile)
			require.NoError(t, err)
			pool, err := fromFile.DB()
			require.NoError(t, err)

			for _, statement := range ddl {
				_, err := pool.ExecContext(t.Context(), statement)
				require.NoError(t, err)
			}

			require.Equal(t, migrated, catalogue(t, fromFile), "made by DDL")

			// AutoMigrate knows nothing of the plugin.
			if test.table == "" {
				modelsOf := legion.Models()
				if test.model != nil {
					modelsOf = []any{test.model}
				}

				fromFileStatements.take()
				require.NoError(t, fromFile.AutoMigrate(modelsOf...))
				require.Empty(t, fromFileStatements.takeDDL(), "by AutoMigrate after DDL")
			}

			require.NoError(t, legion.MigrateDown(db))
			require.Empty(t, tableNames(t, db))
		})
	}
}

type Room struct{ ID uint }

type RoomAgent struct {
	models.LegionAgent

	RoomID *uint
	Room   *Room
}

func TestMigrateMakesForeignKeysToTablesThatAreThere(t *testing.T) {
	t.Parallel()

	for name, options := range map[string][]legion.MigrateOption{
		"in one transaction":      nil,
		"with concurrent indexes": {legion.WithConcurrentIndexes()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, statements := setup(t)
			require.NoError(t, db.Use(legion.New(legion.WithModel(&RoomAgent{}))))
			require.ErrorContains(t, legion.Migrate(db, options...), `"rooms" does not exist`)

			require.NoError(t, db.AutoMigrate(&Room{}))
			require.NoError(t, legion.Migrate(db, options...))
			complete := catalogue(t, db)
			require.Contains(t, strings.Join(complete, "\n"),
				"room_agents constraint fk_room_agents_room t FOREIGN KEY (room_id) REFERENCES rooms(id)")

			require.NoError(t, db.Exec("ALTER TABLE room_agents DROP CONSTRAINT fk_room_agents_room").Error)
			require.NoError(t, legion.Migrate(db, options...))
			require.Equal(t, complete, catalogue(t, db))

			statements.take()
			require.NoError(t, db.AutoMigrate(&RoomAgent{}))
			require.Empty(t, statements.takeDDL())
		})
	}
}

func TestMigrateRefusesATableNameThatPostgresWouldCut(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	require.NoError(t, db.Use(legion.New(legion.WithTable(strings.Repeat("a", 53)))))

	err := legion.Migrate(db)
	require.ErrorIs(t, err, legion.ErrInvalidConfig)
	require.ErrorContains(t, err, "has 64 bytes, the limit is 63")
}

func TestMigrateNeedsTheSchemaOfTheTable(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	require.NoError(t, db.Use(legion.New(legion.WithTable("missing.agents"))))

	err := legion.Migrate(db)
	require.ErrorIs(t, err, legion.ErrNotMigrated)
	require.ErrorContains(t, err, "create it first")
}

func TestMigrateKeepsToTheCurrentSchema(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	require.NoError(t, legion.Migrate(db))
	require.NoError(t, db.Exec("CREATE SCHEMA tenant").Error)

	tenant := pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.DSN(db), "search_path", "tenant,public"))
	require.NoError(t, legion.Migrate(tenant))
	require.Equal(t, []string{
		"legion_agents", "legion_agents_identities", "tenant.legion_agents", "tenant.legion_agents_identities",
	}, tableNames(t, db))

	require.NoError(t, legion.MigrateDown(tenant))
	require.Equal(t, []string{"legion_agents", "legion_agents_identities"}, tableNames(t, db))
}

func TestMigrateAddsWhatAnApplicationsModelHasGained(t *testing.T) {
	t.Parallel()

	for name, options := range map[string][]legion.MigrateOption{
		"in one transaction":      nil,
		"with concurrent indexes": {legion.WithConcurrentIndexes()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			fresh, _ := setup(t)
			require.NoError(t, fresh.Use(legion.New(legion.WithModel(&ChatAgent{}))))
			require.NoError(t, legion.Migrate(fresh))

			grown, _ := setup(t)
			require.NoError(t, grown.Table("chat_agents").AutoMigrate(&models.LegionAgent{}))
			require.NoError(t, grown.Exec("INSERT INTO chat_agents (agent_id) VALUES ('kept')").Error)
			require.NoError(t, grown.Use(legion.New(legion.WithModel(&ChatAgent{}))))
			require.NoError(t, legion.Migrate(grown, options...))
			require.Equal(t, withoutPositions(catalogue(t, fresh)), withoutPositions(catalogue(t, grown)))

			var kept ChatAgent
			require.NoError(t, grown.First(&kept, "agent_id = ?", "kept").Error)
			require.Equal(t, "@lobby? $1", kept.Room)
		})
	}
}
