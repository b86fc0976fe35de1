package store_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

func TestGetReturnsTheWholeAgent(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	b.set(t, agentID, map[string]any{
		"agent_type": "chat", "metadata": `{"tenant": "acme"}`, "conversation_state": []byte{0, 1, 2}, "started_at": inHours(-1),
	})

	agent, err := b.agents.Get(t.Context(), agentID)
	require.NoError(t, err)
	require.Equal(t, b.row(t, agentID), *agent)
	require.Equal(t, "chat", *agent.AgentType)
	require.JSONEq(t, `{"tenant": "acme"}`, string(agent.Metadata))
	require.JSONEq(t, `[]`, string(agent.Usage))
	require.Equal(t, []byte{0, 1, 2}, agent.ConversationState)
	require.Equal(t, models.StatusIdle, agent.Status)
}

func TestGetOfAnAbsentAgentIsNotFoundAndLogsNothing(t *testing.T) {
	t.Parallel()

	log := &recorder{}
	b := setup(t, &gorm.Config{Logger: log})
	log.reset()

	agent, err := b.agents.Get(t.Context(), agentID)
	require.Nil(t, agent)
	require.ErrorIs(t, err, store.ErrNotFound)
	require.ErrorIs(t, err, gorm.ErrRecordNotFound)
	require.NotContains(t, err.Error(), agentID)

	require.NotEmpty(t, log.lines())
	for _, line := range log.lines() {
		require.NoError(t, line.err)
		require.NotContains(t, line.sql, agentID, "values stay out of the log")
	}
}

func TestListIsNewestFirstWithoutTheDeleted(t *testing.T) {
	t.Parallel()

	b := setup(t)

	for _, agent := range []struct {
		id    string
		hours int
	}{
		{"old", -3}, {"newest", 0}, {"deleted", -1}, {"same-d", -2}, {"same-b", -2}, {"same-c", -2}, {"same-a", -2},
	} {
		require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: agent.id}))
		b.set(t, agent.id, map[string]any{"created_at": gorm.Expr("timestamptz '2026-01-01' + make_interval(hours => ?)", agent.hours)})
	}

	require.NoError(t, b.agents.Delete(t.Context(), "deleted"))

	list, err := b.agents.List(t.Context(), 1000)
	require.NoError(t, err)
	require.Equal(t, []string{"newest", "same-a", "same-b", "same-c", "same-d", "old"}, ids(list))

	list, err = b.agents.List(t.Context(), 2)
	require.NoError(t, err)
	require.Equal(t, []string{"newest", "same-a"}, ids(list))
}

func TestListOfNoAgentsIsEmpty(t *testing.T) {
	t.Parallel()

	list, err := setup(t).agents.List(t.Context(), 1)
	require.NoError(t, err)
	require.Empty(t, list)
}

func TestListRefusesALimitOutOfRange(t *testing.T) {
	t.Parallel()

	b := setup(t)

	for _, limit := range []int{-1, 0, 1001} {
		_, err := b.agents.List(t.Context(), limit)
		require.ErrorIs(t, err, store.ErrInvalidArgument)
		require.ErrorContains(t, err, "give 1 to 1000")
	}
}

func TestDeleteHidesTheAgentAndKeepsItsRow(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	b.set(t, agentID, map[string]any{
		"status": "running", "run_id": "run", "lease_expires_at": inHours(1), "metadata": `{"tenant": "acme"}`, "updated_at": inHours(-1),
	})
	before := b.row(t, agentID)

	require.NoError(t, b.agents.Delete(t.Context(), agentID))

	_, err := b.agents.Get(t.Context(), agentID)
	require.ErrorIs(t, err, store.ErrNotFound)

	after := b.row(t, agentID)
	require.True(t, after.DeletedAt.Valid)
	require.WithinDuration(t, time.Now(), after.DeletedAt.Time, time.Minute)
	require.Greater(t, after.UpdatedAt, before.UpdatedAt)

	after.DeletedAt, after.UpdatedAt = before.DeletedAt, before.UpdatedAt
	require.Equal(t, before, after, "a running agent keeps its slot")
}

func TestDeleteOfAnAbsentOrDeletedAgentIsNotFound(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	require.ErrorIs(t, b.agents.Delete(t.Context(), "absent"), store.ErrNotFound)

	require.NoError(t, b.agents.Delete(t.Context(), agentID))
	deleted := b.row(t, agentID)
	require.ErrorIs(t, b.agents.Delete(t.Context(), agentID), store.ErrNotFound)
	require.Equal(t, deleted, b.row(t, agentID))
}

func TestInvalidAgentIDsDoNotReachTheDatabase(t *testing.T) {
	t.Parallel()

	// Nothing is migrated: whatever reached the database would be another error.
	agents := store.For[models.LegionAgent](pgtest.Open(t))

	for name, id := range map[string]string{
		"empty": "", "too long": strings.Repeat("x", 513), "invalid UTF-8": "a\xff", "NUL": "a\x00b",
	} {
		_, err := agents.Get(t.Context(), id)
		require.ErrorIs(t, err, store.ErrInvalidAgentID, name)
		require.ErrorIs(t, agents.Save(t.Context(), store.Patch{AgentID: id}), store.ErrInvalidAgentID, name)
		_, err = agents.AppendUsage(t.Context(), id, models.Usage{})
		require.ErrorIs(t, err, store.ErrInvalidAgentID, name)
		require.ErrorIs(t, agents.Delete(t.Context(), id), store.ErrInvalidAgentID, name)
	}
}

func TestTheLongestAgentIDWorks(t *testing.T) {
	t.Parallel()

	b := setup(t)
	id := strings.Repeat("é", 256)
	require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: id}))

	agent, err := b.agents.Get(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, id, agent.AgentID)
}

func TestAnUnmigratedDatabaseIsErrNotMigrated(t *testing.T) {
	t.Parallel()

	for name, err := range everyMethod(t, store.For[models.LegionAgent](pgtest.Open(t))) {
		require.ErrorIs(t, err, store.ErrNotMigrated, name)
		require.ErrorContains(t, err, "legion.Migrate", name)
	}
}

func TestAnUnreachableDatabaseIsAnError(t *testing.T) {
	t.Parallel()

	// Nobody listens on port 1.
	db := pgtest.OpenDSN(t, "host=127.0.0.1 port=1 user=nobody dbname=nothing sslmode=disable", &gorm.Config{DisableAutomaticPing: true})

	for name, err := range everyMethod(t, store.For[models.LegionAgent](db)) {
		var refused *pgconn.ConnectError
		require.ErrorAs(t, err, &refused, name)
	}
}

func TestADBThatCannotBeWorkedWithIsAnError(t *testing.T) {
	t.Parallel()

	db := setup(t).db
	failed := db.Session(&gorm.Session{})
	_ = failed.AddError(errors.New("failed before"))

	for name, test := range map[string]struct {
		db   *gorm.DB
		text string
	}{
		"nil":     {nil, "the *gorm.DB is nil"},
		"failed":  {failed, "failed before"},
		"dry run": {db.Session(&gorm.Session{DryRun: true}), "dry run"},
	} {
		for method, err := range everyMethod(t, store.For[models.LegionAgent](test.db)) {
			require.ErrorContains(t, err, test.text, "%s: %s", name, method)
		}
	}
}

// everyMethod calls every method with valid arguments, for the tests of what goes wrong
// in all of them.
func everyMethod[T any](t *testing.T, agents *store.Store[T]) map[string]error {
	t.Helper()

	results := make(map[string]error)
	_, results["Get"] = agents.Get(t.Context(), agentID)
	_, results["List"] = agents.List(t.Context(), 10)
	results["Save"] = agents.Save(t.Context(), store.Patch{AgentID: agentID, Status: pointer(models.StatusIdle)})
	_, results["AppendUsage"] = agents.AppendUsage(t.Context(), agentID, models.Usage{TotalTokens: 1})
	results["Delete"] = agents.Delete(t.Context(), agentID)
	_, results["Prune"] = agents.Prune(t.Context(), time.Now().Add(-time.Hour))

	return results
}

func ids(agents []models.LegionAgent) []string {
	ids := make([]string, 0, len(agents))
	for _, agent := range agents {
		ids = append(ids, agent.AgentID)
	}

	return ids
}

// chat is an application's own model: columns beside ours, hooks that must not run, and
// a table of its own in a schema of its own.
type chat struct {
	models.LegionAgent

	Title *string
	Stars int `gorm:"not null;default:5"`
}

func (chat) TableName() string           { return "app.chats" }
func (chat) BeforeSave(*gorm.DB) error   { return errors.New("the store runs no hooks") }
func (chat) BeforeUpdate(*gorm.DB) error { return errors.New("the store runs no hooks") }
func (chat) BeforeDelete(*gorm.DB) error { return errors.New("the store runs no hooks") }
func (c *chat) AfterFind(tx *gorm.DB) error {
	// What a hook of a read does in the database takes the same connection.
	return tx.Session(&gorm.Session{NewDB: true}).Transaction(func(tx *gorm.DB) error { return tx.Exec("SELECT 1").Error })
}

func setupChats(t *testing.T) (*gorm.DB, *store.Store[chat]) {
	t.Helper()

	db := pgtest.Open(t, pgtest.MaxOpenConnections(1))
	require.NoError(t, db.Exec("CREATE SCHEMA app").Error)
	migrate(t, db, &chat{}, "app.chats")

	return db, store.For[chat](db)
}

func TestAModelOfTheApplicationKeepsItsOwnColumns(t *testing.T) {
	t.Parallel()

	db, chats := setupChats(t)
	ctx := t.Context()

	require.NoError(t, chats.Save(ctx, store.Patch{AgentID: agentID, AgentType: pointer("chat")}))
	require.NoError(t, db.Exec("UPDATE app.chats SET title = 'Greetings', stars = 3").Error)
	require.NoError(t, chats.Save(ctx, store.Patch{AgentID: agentID, ConversationState: []byte("state"), Status: pointer(models.StatusIdle)}))

	appended, err := chats.AppendUsage(ctx, agentID, models.Usage{TotalTokens: 12})
	require.NoError(t, err)
	require.True(t, appended)

	found, err := chats.Get(ctx, agentID)
	require.NoError(t, err)
	require.Equal(t, "Greetings", *found.Title)
	require.Equal(t, 3, found.Stars)
	require.Equal(t, "state", string(found.ConversationState))

	list, err := chats.List(ctx, 10)
	require.NoError(t, err)
	require.Equal(t, []chat{*found}, list)

	require.NoError(t, chats.Delete(ctx, agentID))
	require.NoError(t, db.Exec(`UPDATE app.chats SET deleted_at = '2020-01-01', updated_at = '2020-01-01'`).Error)
	require.NoError(t, db.Exec(`INSERT INTO app.chats_identities VALUES ('{"a": 1}', now())`).Error)

	result, err := chats.Prune(ctx, time.Now().Add(-time.Hour))
	require.NoError(t, err)
	require.Equal(t, store.PruneResult{Agents: 1, Identities: 1}, result)
}

func TestTheTableIsTheOneThatThePluginLimits(t *testing.T) {
	t.Parallel()

	db, _ := setupChats(t)
	migrate(t, db, &models.LegionAgent{}, "legion_agents")
	migrate(t, db, &chat{}, "renamed")

	for name, test := range map[string]struct {
		settings database.Settings
		table    string
	}{
		"the plugin's model":       {database.Settings{Model: &chat{}}, "app.chats"},
		"the plugin's table":       {database.Settings{Model: &chat{}, Table: "renamed"}, "renamed"},
		"a table of default model": {database.Settings{Table: "renamed"}, "renamed"},
	} {
		db := pgtest.OpenDSN(t, pgtest.DSN(db))
		require.NoError(t, db.Use(plugin{test.settings}))

		require.NoError(t, store.For[chat](db).Save(t.Context(), store.Patch{AgentID: name}), name)

		// A LegionAgent is the part of the same row that is ours.
		agent, err := store.For[models.LegionAgent](db).Get(t.Context(), name)
		require.NoError(t, err, name)
		require.Equal(t, name, agent.AgentID)

		var count int64
		require.NoError(t, db.Table(test.table).Where("agent_id = ?", name).Count(&count).Error)
		require.EqualValues(t, 1, count, name)
	}
}

func TestAModelThatThePluginDoesNotLimitIsRefused(t *testing.T) {
	t.Parallel()

	db, _ := setupChats(t)
	require.NoError(t, db.Use(plugin{}))

	for name, err := range everyMethod(t, store.For[chat](db)) {
		require.ErrorIs(t, err, store.ErrInvalidConfig, name)
		require.ErrorContains(t, err, `store_test.chat is stored in "app.chats", but limits are counted in "legion_agents"`, name)
	}
}

func TestAModelThatIsNoAgentIsRefused(t *testing.T) {
	t.Parallel()

	type stranger struct{ ID int }

	type prefixed struct {
		models.LegionAgent `gorm:"embedded;embeddedPrefix:agent_"`
	}

	type keyed struct {
		models.LegionAgent

		Tenant string `gorm:"primaryKey"`
	}

	db := pgtest.Open(t)

	_, err := store.For[stranger](db).Get(t.Context(), agentID)
	require.ErrorIs(t, err, store.ErrInvalidConfig)
	require.ErrorContains(t, err, `has no column "agent_id"`)

	_, err = store.For[prefixed](db).Get(t.Context(), agentID)
	require.ErrorIs(t, err, store.ErrInvalidConfig)

	_, err = store.For[keyed](db).Get(t.Context(), agentID)
	require.ErrorIs(t, err, store.ErrInvalidConfig)
	require.ErrorContains(t, err, "primary key")

	_, err = store.For[*models.LegionAgent](db).Get(t.Context(), agentID)
	require.ErrorIs(t, err, store.ErrInvalidConfig)
	require.ErrorContains(t, err, "is no struct")
}

func TestEveryMethodWorksInEveryExecMode(t *testing.T) {
	t.Parallel()

	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol", "PrepareStmt"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()

			dsn := pgtest.Database(t)
			b := setupDSN(t, dsn)

			config := &gorm.Config{PrepareStmt: mode == "PrepareStmt"}
			if !config.PrepareStmt {
				dsn = pgtest.WithParameter(dsn, "default_query_exec_mode", mode)
			}

			ctx := t.Context()
			agents := store.For[models.LegionAgent](pgtest.OpenDSN(t, dsn, config))

			require.NoError(t, agents.Save(ctx, store.Patch{
				AgentID: agentID, AgentType: pointer("type"), ParentAgentID: pointer("parent"), ConversationState: []byte{0, 255},
				Status: pointer(models.StatusIdle),
			}))

			entry := models.Usage{ID: "entry", At: time.UnixMilli(1_000), TotalTokens: 7, Extra: map[string]any{"note": `a "quoted" <é>`}}
			for _, expected := range []bool{true, false} {
				appended, err := agents.AppendUsage(ctx, agentID, entry)
				require.NoError(t, err)
				require.Equal(t, expected, appended)
			}

			agent, err := agents.Get(ctx, agentID)
			require.NoError(t, err)
			require.Equal(t, []byte{0, 255}, agent.ConversationState)

			entries, err := agent.UsageEntries()
			require.NoError(t, err)
			require.Equal(t, []models.Usage{entry}, entries)

			list, err := agents.List(ctx, 10)
			require.NoError(t, err)
			require.Len(t, list, 1)

			result, err := agents.Prune(ctx, time.UnixMilli(2_000))
			require.NoError(t, err)
			require.Equal(t, store.PruneResult{UsageEntries: 1}, result)

			require.NoError(t, agents.Delete(ctx, agentID))
			b.set(t, agentID, map[string]any{"deleted_at": inHours(-2), "updated_at": inHours(-2)})
			b.exec(t, `INSERT INTO legion_agents_identities VALUES ('{"a": "é"}', now())`)

			result, err = agents.Prune(ctx, time.Now().Add(-time.Hour))
			require.NoError(t, err)
			require.Equal(t, store.PruneResult{Agents: 1, Identities: 1}, result)
		})
	}
}
