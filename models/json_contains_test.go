package models_test

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"gorm.io/datatypes"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	"gorm.io/gorm/utils/tests"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
)

func TestJSONContainsSQL(t *testing.T) {
	t.Parallel()

	acme := map[string]any{"tenant": "acme"}

	for name, test := range map[string]struct {
		query      func(db *gorm.DB) *gorm.DB
		where      string
		parameters []any
	}{
		"plain column": {
			query:      func(db *gorm.DB) *gorm.DB { return db.Where(models.JSONContains("metadata", acme)) },
			where:      `"metadata" @> $1::jsonb`,
			parameters: []any{`{"tenant":"acme"}`},
		},
		"column of a table": {
			query:      func(db *gorm.DB) *gorm.DB { return db.Where(models.JSONContains("legion_agents.metadata", acme)) },
			where:      `"legion_agents"."metadata" @> $1::jsonb`,
			parameters: []any{`{"tenant":"acme"}`},
		},
		"column with a quote in it": {
			query:      func(db *gorm.DB) *gorm.DB { return db.Where(models.JSONContains(`meta"data`, acme)) },
			where:      `"meta""data" @> $1::jsonb`,
			parameters: []any{`{"tenant":"acme"}`},
		},
		"JSON text as bytes": {
			query: func(db *gorm.DB) *gorm.DB {
				return db.Where(models.JSONContains("metadata", []byte(`{"tenant": "acme"}`)))
			},
			where:      `"metadata" @> $1::jsonb`,
			parameters: []any{`{"tenant": "acme"}`},
		},
		"negated": {
			query:      func(db *gorm.DB) *gorm.DB { return db.Not(models.JSONContains("metadata", acme)) },
			where:      `NOT ("metadata" @> $1::jsonb)`,
			parameters: []any{`{"tenant":"acme"}`},
		},
		"both of two": {
			query: func(db *gorm.DB) *gorm.DB {
				return db.Where("status = ?", models.StatusRunning).Where(models.JSONContains("metadata", acme))
			},
			where:      `status = $1 AND "metadata" @> $2::jsonb`,
			parameters: []any{models.StatusRunning, `{"tenant":"acme"}`},
		},
		"either of two": {
			query: func(db *gorm.DB) *gorm.DB {
				return db.Where(models.JSONContains("metadata", acme)).Or(models.JSONContains("metadata", map[string]any{"ip": 1}))
			},
			where:      `"metadata" @> $1::jsonb OR "metadata" @> $2::jsonb`,
			parameters: []any{`{"tenant":"acme"}`, `{"ip":1}`},
		},
		"neither of two": {
			query: func(db *gorm.DB) *gorm.DB {
				return db.Not(models.JSONContains("metadata", acme)).Not(models.JSONContains("usage", []int{1}))
			},
			where:      `NOT ("metadata" @> $1::jsonb) AND NOT ("usage" @> $2::jsonb)`,
			parameters: []any{`{"tenant":"acme"}`, `[1]`},
		},
		"in a subquery": {
			query: func(db *gorm.DB) *gorm.DB {
				matching := db.Session(&gorm.Session{NewDB: true}).Model(&models.LegionAgent{}).Unscoped().
					Select("agent_id").Where(models.JSONContains("metadata", acme))

				return db.Where("agent_id IN (?)", matching)
			},
			where:      `agent_id IN (SELECT "agent_id" FROM "legion_agents" WHERE "metadata" @> $1::jsonb)`,
			parameters: []any{`{"tenant":"acme"}`},
		},
		"JSON text": {
			query: func(db *gorm.DB) *gorm.DB {
				return db.Where(models.JSONContains("metadata", json.RawMessage(`{"id": 9007199254740993}`)))
			},
			where:      `"metadata" @> $1::jsonb`,
			parameters: []any{`{"id": 9007199254740993}`},
		},
		"JSON text of datatypes": {
			query: func(db *gorm.DB) *gorm.DB {
				return db.Where(models.JSONContains("metadata", datatypes.JSON(`{"id": 1.50}`)))
			},
			where:      `"metadata" @> $1::jsonb`,
			parameters: []any{`{"id":1.50}`},
		},
		"nothing": {
			query:      func(db *gorm.DB) *gorm.DB { return db.Where(models.JSONContains("metadata", nil)) },
			where:      `"metadata" @> $1::jsonb`,
			parameters: []any{`null`},
		},
		"values that look like SQL and placeholders": {
			query: func(db *gorm.DB) *gorm.DB {
				return db.Where(models.JSONContains("metadata", map[string]any{"@name ?": `'; DROP TABLE legion_agents; -- $1`}))
			},
			where:      `"metadata" @> $1::jsonb`,
			parameters: []any{`{"@name ?":"'; DROP TABLE legion_agents; -- $1"}`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			var agents []models.LegionAgent

			statement := test.query(dryRun(t).Unscoped()).Find(&agents)
			require.NoError(t, statement.Error)
			require.Equal(t, `SELECT * FROM "legion_agents" WHERE `+test.where, statement.Statement.SQL.String())
			require.Equal(t, test.parameters, statement.Statement.Vars)
		})
	}
}

func TestJSONContainsInUpdateAndDelete(t *testing.T) {
	t.Parallel()

	db := dryRun(t)
	condition := models.JSONContains("metadata", map[string]any{"tenant": "acme"})

	update := db.Model(&models.LegionAgent{}).Where(condition).UpdateColumn("agent_type", "chat")
	require.NoError(t, update.Error)
	require.Equal(t, `UPDATE "legion_agents" SET "agent_type"=$1 WHERE "metadata" @> $2::jsonb AND "legion_agents"."deleted_at" IS NULL`,
		update.Statement.SQL.String())

	remove := db.Unscoped().Where(condition).Delete(&models.LegionAgent{})
	require.NoError(t, remove.Error)
	require.Equal(t, `DELETE FROM "legion_agents" WHERE "metadata" @> $1::jsonb`, remove.Statement.SQL.String())
}

func TestJSONContainsReportsADocumentThatIsNoJSON(t *testing.T) {
	t.Parallel()

	for name, document := range map[string]any{
		"channel":                make(chan int),
		"function in a map":      map[string]any{"secret": func() {}},
		"malformed JSON text":    json.RawMessage(`{"secret":`),
		"malformed bytes":        []byte(`{"secret":`),
		"malformed datatypes":    datatypes.JSON(`{"secret"`),
		"marshaller that failed": failingMarshaller{},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			var agents []models.LegionAgent

			err := dryRun(t).Where(models.JSONContains("metadata", document)).Find(&agents).Error
			require.ErrorContains(t, err, `legion: JSONContains on column "metadata": the document cannot be written as JSON: `)
			require.NotContains(t, err.Error(), "secret")
		})
	}

	t.Run("with its cause", func(t *testing.T) {
		t.Parallel()

		err := dryRun(t).Where(models.JSONContains("metadata", failingMarshaller{})).Find(&[]models.LegionAgent{}).Error
		require.ErrorIs(t, err, errMarshal)
	})
}

var errMarshal = errors.New("no JSON today")

type failingMarshaller struct{}

func (failingMarshaller) MarshalJSON() ([]byte, error) { return nil, errMarshal }

func TestJSONContainsReportsAnotherDialect(t *testing.T) {
	t.Parallel()

	db, err := gorm.Open(tests.DummyDialector{}, &gorm.Config{DryRun: true, Logger: logger.Discard})
	require.NoError(t, err)

	condition := models.JSONContains("metadata", map[string]any{"tenant": "acme"})
	for _, query := range []*gorm.DB{db.Where(condition), db.Not(condition)} {
		require.EqualError(t, query.Find(&[]models.LegionAgent{}).Error,
			"legion: JSONContains needs PostgreSQL: open the connection with gorm.io/driver/postgres")
	}
}

func TestJSONContainsOnPostgresInEveryExecMode(t *testing.T) {
	t.Parallel()

	dsn := pgtest.Database(t)
	db := pgtest.OpenDSN(t, dsn)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))
	require.NoError(t, db.Create([]models.LegionAgent{
		{AgentID: "acme", Metadata: datatypes.JSON(`{"tenant": "acme", "ip": "203.0.113.42"}`)},
		{AgentID: "globex", Metadata: datatypes.JSON(`{"tenant": "globex", "seats": 1}`)},
		{AgentID: "odd", Metadata: datatypes.JSON(`{"it's": "\"?\" @name \\ é 😀"}`)},
		{AgentID: "unlimited"},
	}).Error)

	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()

			db := pgtest.OpenDSN(t, pgtest.WithParameter(dsn, "default_query_exec_mode", mode))

			for name, test := range map[string]struct {
				query *gorm.DB
				found []string
			}{
				"a part": {
					query: db.Where(models.JSONContains("metadata", map[string]any{"tenant": "acme"})),
					found: []string{"acme"},
				},
				"a number that is written differently": {
					query: db.Where(models.JSONContains("metadata", json.RawMessage(`{"seats": 1.0}`))),
					found: []string{"globex"},
				},
				"a number as a string": {
					query: db.Where(models.JSONContains("metadata", map[string]any{"seats": "1"})),
					found: []string{},
				},
				"the empty document": {
					query: db.Where(models.JSONContains("metadata", map[string]any{})),
					found: []string{"acme", "globex", "odd"},
				},
				"quotes, placeholders and letters": {
					query: db.Where(models.JSONContains("legion_agents.metadata", map[string]any{"it's": "\"?\" @name \\ é 😀"})),
					found: []string{"odd"},
				},
				"not": {
					query: db.Not(models.JSONContains("metadata", map[string]any{"tenant": "acme"})),
					found: []string{"globex", "odd"},
				},
				"either": {
					query: db.Where(models.JSONContains("metadata", map[string]any{"tenant": "acme"})).
						Or(models.JSONContains("metadata", map[string]any{"seats": 1})),
					found: []string{"acme", "globex"},
				},
			} {
				found := []string{}
				require.NoError(t, test.query.Model(&models.LegionAgent{}).Order("agent_id").Pluck("agent_id", &found).Error, name)
				require.Equal(t, test.found, found, name)
			}
		})
	}
}

// GORM forgets the error of a subquery. What is left of it must not match anything,
// least of all everything.
func TestJSONContainsFailsInASubqueryToo(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))
	require.NoError(t, db.Create(&models.LegionAgent{AgentID: "kept", Metadata: datatypes.JSON(`{}`)}).Error)

	condition := models.JSONContains("metadata", make(chan int))
	for name, subquery := range map[string]*gorm.DB{
		"plain":   db.Model(&models.LegionAgent{}).Select("agent_id").Where(condition),
		"negated": db.Model(&models.LegionAgent{}).Select("agent_id").Not(condition),
	} {
		for _, operator := range []string{"IN", "NOT IN"} {
			err := db.Where("agent_id "+operator+" (?)", subquery).Delete(&models.LegionAgent{}).Error
			require.ErrorContains(t, err, "legion: JSONContains has no document", "%s, %s", operator, name)
		}
	}

	require.NoError(t, db.First(&models.LegionAgent{}, "agent_id = ?", "kept").Error)
}
