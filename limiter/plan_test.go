package limiter_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// setupLarge is a table of many agents that started over the last 30 days: a third of
// them of one tenant, each with an email of its own, 50 of them running. They are 50,000;
// in a longer run, where LEGION_TEST_COUNT says so, 300,000.
func setupLarge(t *testing.T) *gorm.DB {
	t.Helper()

	size := 50_000
	if concurrentCount(t, 1) > 1 {
		size = 300_000
	}

	db := pgtest.Open(t)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}, &models.LegionIdentity{}))
	require.NoError(t, db.Exec(`
INSERT INTO legion_agents (agent_id, metadata, usage, status, lease_expires_at, started_at, created_at, updated_at)
SELECT 'agent ' || i,
  jsonb_build_object('tenant', CASE i % 3 WHEN 0 THEN 'large' ELSE 'tenant ' || i % 500 END, 'email', i || '@example.com'),
  jsonb_build_array(jsonb_build_object('at', (extract(epoch FROM moment) * 1000)::bigint, 'total_tokens', i, 'evals', 1)),
  CASE WHEN i > ?::int - 50 THEN 'running' ELSE 'idle' END,
  CASE WHEN i > ?::int - 50 THEN now() + interval '1 hour' END,
  moment, moment, moment
FROM generate_series(1, ?::int) AS i CROSS JOIN LATERAL (SELECT now() - (?::int - i) * interval '30 days' / ?::int AS moment) AS clock`,
		size, size, size, size, size).Error)
	require.NoError(t, db.Exec("VACUUM ANALYZE legion_agents").Error)

	return db
}

// plans returns the plans of the statement that measures the rules: as one for these
// parameters, and as one for any.
func plans(t *testing.T, db *gorm.DB, rules ...limiter.Rule) map[string]string {
	t.Helper()

	recorded, statements := openRecorded(t, db)
	requireAnyVerdict(t, recorded, rules)

	var measuring recordedStatement

	for _, statement := range statements.take() {
		if strings.HasPrefix(statement.text, "WITH clock") {
			measuring = statement
		}
	}

	require.NotEmpty(t, measuring.text)

	literals := make([]string, len(measuring.arguments))
	for i, argument := range measuring.arguments {
		literals[i] = "'" + strings.ReplaceAll(fmt.Sprint(argument), "'", "''") + "'"
	}

	session := connection(t, db)
	execute := func(statement string) {
		_, err := session.ExecContext(t.Context(), statement)
		require.NoError(t, err)
	}

	execute("PREPARE measuring AS " + measuring.text)

	plans := map[string]string{}

	for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
		execute("SET plan_cache_mode = " + mode)

		plans[mode] = strings.Join(texts(t, session, fmt.Sprintf("EXPLAIN EXECUTE measuring(%s)", strings.Join(literals, ", "))), "\n")
	}

	execute("DEALLOCATE measuring")

	return plans
}

func requireAnyVerdict(t *testing.T, db *gorm.DB, rules []limiter.Rule) {
	t.Helper()

	err := limiter.Enforce(db, "agent", rules...)
	if err != nil {
		require.ErrorIs(t, err, limiter.ErrExceeded)
	}
}

// texts runs a query in pgx's simplest form and returns its only column.
func texts(t *testing.T, session *sql.Conn, query string) (lines []string) {
	t.Helper()

	rows, err := session.QueryContext(context.WithoutCancel(t.Context()), query)
	require.NoError(t, err)

	defer func() { require.NoError(t, rows.Close()) }()

	for rows.Next() {
		var line string

		require.NoError(t, rows.Scan(&line))

		lines = append(lines, line)
	}

	require.NoError(t, rows.Err())

	return lines
}

func TestMeasuringUsesTheIndexes(t *testing.T) {
	t.Parallel()

	db := setupLarge(t)
	everyLimit := func(identity limiter.Identity, window time.Duration) limiter.Rule {
		return limiter.Rule{Identity: identity, Policy: limiter.Policy{
			Window: window, MaxAgents: limiter.Max(1000), MaxRunningAgents: limiter.Max(1000), MaxTokens: limiter.Max(1e9), MaxEvals: limiter.Max(1e9),
		}}
	}

	for _, test := range []struct {
		name  string
		rules []limiter.Rule
		uses  string
	}{
		{"a rare email, an hour", []limiter.Rule{everyLimit(limiter.Identity{"email": "777@example.com"}, time.Hour)}, ""},
		{"a rare email, 30 days", []limiter.Rule{everyLimit(limiter.Identity{"email": "777@example.com"}, 30*24*time.Hour)}, "Index Scan on idx_legion_agents_metadata"},
		{"a tenant with a third of the rows, an hour", []limiter.Rule{everyLimit(limiter.Identity{"tenant": "large"}, time.Hour)}, "Index Scan using idx_legion_agents_started_at"},
		{"everyone, a minute", []limiter.Rule{everyLimit(limiter.Everyone(), time.Minute)}, "Index Scan using idx_legion_agents_started_at"},
		{"everyone, an hour", []limiter.Rule{everyLimit(limiter.Everyone(), time.Hour)}, "Index Scan using idx_legion_agents_started_at"},
		{"several", []limiter.Rule{
			everyLimit(limiter.Identity{"email": "777@example.com"}, 24*time.Hour),
			everyLimit(limiter.Identity{"tenant": "large"}, time.Minute),
			everyLimit(limiter.Everyone(), time.Second),
		}, ""},
	} {
		for mode, plan := range plans(t, db, test.rules...) {
			t.Logf("%s, %s:\n%s", test.name, mode, plan)
			require.NotContains(t, plan, "Seq Scan on legion_agents", "%s, %s", test.name, mode)
			require.Contains(t, plan, test.uses, "%s, %s", test.name, mode)
		}
	}
}
