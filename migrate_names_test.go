package legion_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
)

func TestTheSQLOfDDLMakesWhatMigrateAndAutoMigrateMake(t *testing.T) {
	t.Parallel()

	for _, test := range namedTables() {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db, _ := test.setup(t)
			require.NoError(t, legion.Migrate(db))

			fromFile, statements := test.setup(t)
			ddl, err := legion.DDL(fromFile)
			require.NoError(t, err)
			pool, err := fromFile.DB()
			require.NoError(t, err)

			for _, statement := range ddl {
				_, err := pool.ExecContext(t.Context(), statement)
				require.NoError(t, err)
			}

			require.Equal(t, catalogue(t, db), catalogue(t, fromFile))

			// AutoMigrate knows nothing of the plugin.
			if test.table == "" {
				modelsOf := legion.Models()
				if test.model != nil {
					modelsOf = []any{test.model}
				}

				statements.take()
				require.NoError(t, fromFile.AutoMigrate(modelsOf...))
				require.Empty(t, statements.takeDDL(), "by AutoMigrate after DDL")
			}
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
