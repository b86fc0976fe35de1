package models_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorm.io/datatypes"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
)

type ChatAgent struct {
	models.LegionAgent

	Title *string `gorm:"index"`
}

func TestAutoMigrateMakesTheAgentsTable(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))

	require.Equal(t, []string{
		"agent_id text NOT NULL",
		"agent_type text",
		"parent_agent_id text",
		"status text NOT NULL DEFAULT 'idle'::text",
		"metadata jsonb",
		"usage jsonb NOT NULL DEFAULT jsonb_build_array()",
		"conversation_state bytea",
		"reserved_tokens bigint NOT NULL DEFAULT 0",
		"run_id text",
		"lease_expires_at timestamp with time zone",
		"started_at timestamp with time zone",
		"created_at timestamp with time zone NOT NULL DEFAULT now()",
		"updated_at timestamp with time zone NOT NULL DEFAULT now()",
		"deleted_at timestamp with time zone",
	}, columns(t, db, "legion_agents"))

	require.Equal(t, []string{
		"CREATE INDEX idx_legion_agents_metadata ON public.legion_agents USING gin (metadata jsonb_path_ops) WITH (fastupdate=off)",
		"CREATE INDEX idx_legion_agents_running ON public.legion_agents USING gin (metadata jsonb_path_ops) WITH (fastupdate=off) WHERE (status = 'running'::text)",
		"CREATE INDEX idx_legion_agents_started_at ON public.legion_agents USING btree (started_at)",
		"CREATE INDEX idx_legion_agents_updated_at ON public.legion_agents USING btree (updated_at)",
		"CREATE UNIQUE INDEX legion_agents_pkey ON public.legion_agents USING btree (agent_id)",
	}, indexes(t, db, "legion_agents"))
}

func TestAutoMigrateMakesTheRegistry(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.AutoMigrate(&models.LegionIdentity{}))

	require.Equal(t, []string{
		"identity jsonb NOT NULL",
		"created_at timestamp with time zone NOT NULL DEFAULT now()",
	}, columns(t, db, "legion_agents_identities"))
	require.Equal(t, []string{
		"CREATE UNIQUE INDEX legion_agents_identities_pkey ON public.legion_agents_identities USING btree (identity)",
	}, indexes(t, db, "legion_agents_identities"))
}

func TestASecondAutoMigrateIssuesNoDDL(t *testing.T) {
	t.Parallel()

	statements := &ddlRecorder{Interface: logger.Discard}
	db := pgtest.Open(t, &gorm.Config{Logger: statements})

	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}, &models.LegionIdentity{}, &ChatAgent{}))
	require.NotEmpty(t, statements.take())
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}, &models.LegionIdentity{}, &ChatAgent{}))
	require.Empty(t, statements.take())
}

func TestAModelThatEmbedsHasATableAndIndexesOfItsOwn(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}, &ChatAgent{}))

	require.Len(t, indexes(t, db, "legion_agents"), 5)
	require.Equal(t, []string{
		"CREATE INDEX idx_chat_agents_metadata ON public.chat_agents USING gin (metadata jsonb_path_ops) WITH (fastupdate=off)",
		"CREATE INDEX idx_chat_agents_running ON public.chat_agents USING gin (metadata jsonb_path_ops) WITH (fastupdate=off) WHERE (status = 'running'::text)",
		"CREATE INDEX idx_chat_agents_started_at ON public.chat_agents USING btree (started_at)",
		"CREATE INDEX idx_chat_agents_title ON public.chat_agents USING btree (title)",
		"CREATE INDEX idx_chat_agents_updated_at ON public.chat_agents USING btree (updated_at)",
		"CREATE UNIQUE INDEX chat_agents_pkey ON public.chat_agents USING btree (agent_id)",
	}, indexes(t, db, "chat_agents"))

	require.ErrorContains(t, db.Exec("INSERT INTO chat_agents (agent_id, status) VALUES ('one', 'asleep')").Error,
		"chk_chat_agents_status")
}

func TestTheGINIndexesServeJSONContains(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))
	require.NoError(t, db.Exec(`INSERT INTO legion_agents (agent_id, status, metadata)
		SELECT number, CASE WHEN number % 2 = 0 THEN 'running' ELSE 'idle' END, jsonb_build_object('tenant', number % 500, 'app', 'chat')
		FROM generate_series(1, 5000) AS number`).Error)
	require.NoError(t, db.Exec("ANALYZE legion_agents").Error)

	tenant := models.JSONContains("metadata", map[string]any{"tenant": 42})

	require.Contains(t, explain(t, db.Where(tenant)), "Bitmap Index Scan on idx_legion_agents_metadata")
	require.Contains(t, explain(t, db.Where(tenant).Where("status = 'running'")), "Bitmap Index Scan on idx_legion_agents_running")

	var count int64
	require.NoError(t, db.Model(&models.LegionAgent{}).Where(tenant).Count(&count).Error)
	require.EqualValues(t, 10, count)
}

// explain returns the plan of the query for agents.
func explain(t *testing.T, query *gorm.DB) string {
	t.Helper()

	statement := query.Session(&gorm.Session{DryRun: true}).Find(&[]models.LegionAgent{}).Statement
	pool, err := query.DB()
	require.NoError(t, err)

	rows, err := pool.QueryContext(t.Context(), "EXPLAIN "+statement.SQL.String(), statement.Vars...)
	require.NoError(t, err)

	defer func() { require.NoError(t, rows.Close()) }()

	var plan strings.Builder

	for rows.Next() {
		var line string
		require.NoError(t, rows.Scan(&line))
		fmt.Fprintln(&plan, line)
	}

	require.NoError(t, rows.Err())

	return plan.String()
}

func TestDefaultsOfANewRow(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))

	created := models.LegionAgent{AgentID: "one"}
	require.NoError(t, db.Create(&created).Error)

	var read models.LegionAgent
	require.NoError(t, db.First(&read).Error)
	require.Equal(t, models.StatusIdle, read.Status)
	require.Nil(t, read.Metadata)
	require.JSONEq(t, "[]", read.Usage.String())
	require.Zero(t, read.ReservedTokens)
	require.Nil(t, read.StartedAt)
	require.False(t, read.CreatedAt.IsZero())
	require.Equal(t, read.CreatedAt, read.UpdatedAt)

	entries, err := read.UsageEntries()
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestUsageEntriesSkipsWhatIsNoEntry(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		column string
		ids    []string
	}{
		"NULL":            {column: "", ids: nil},
		"empty":           {column: "[]", ids: nil},
		"entries":         {column: `[{"id": "a"}, {"id": "b", "extra": 1e400}]`, ids: []string{"a", "b"}},
		"other elements":  {column: `[null, 7, "text", [{"id": "x"}], {"id": "a"}, true]`, ids: []string{"a"}},
		"an object":       {column: `{"id": "a"}`, ids: nil},
		"JSON null":       {column: `null`, ids: nil},
		"a string":        {column: `"a"`, ids: nil},
		"malformed entry": {column: `[{"id": {}, "total_tokens": "7", "at": []}]`, ids: []string{""}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			agent := models.LegionAgent{Usage: datatypes.JSON(test.column)}
			entries, err := agent.UsageEntries()
			require.NoError(t, err)

			var ids []string
			for _, entry := range entries {
				ids = append(ids, entry.ID)
			}

			require.Equal(t, test.ids, ids)
		})
	}

	t.Run("but reports what is no JSON", func(t *testing.T) {
		t.Parallel()

		agent := models.LegionAgent{Usage: datatypes.JSON(`[{"id": "a"}`)}
		_, err := agent.UsageEntries()
		require.ErrorContains(t, err, "legion: the usage column is not JSON")
	})
}

func columns(t *testing.T, db *gorm.DB, table string) []string {
	t.Helper()

	return texts(t, db, `SELECT attname || ' ' || format_type(atttypid, atttypmod) ||
			CASE WHEN attnotnull THEN ' NOT NULL' ELSE '' END || coalesce(' DEFAULT ' || pg_get_expr(adbin, adrelid), '')
		FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
		WHERE attrelid = ?::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum`, table)
}

func indexes(t *testing.T, db *gorm.DB, table string) []string {
	t.Helper()

	return texts(t, db, "SELECT indexdef FROM pg_indexes WHERE tablename = ? ORDER BY indexdef", table)
}

func texts(t *testing.T, db *gorm.DB, query, parameter string) []string {
	t.Helper()

	var result []string
	require.NoError(t, db.Raw(query, parameter).Scan(&result).Error)

	return result
}
