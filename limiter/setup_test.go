package limiter_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/datatypes"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/migration"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// window is that of most tests' policies: long enough that what a test writes now
// stays inside it, and short against the ages that tests give to rows.
const window = time.Hour

var (
	tenant      = limiter.Identity{"tenant": "acme"}
	otherTenant = limiter.Identity{"tenant": "globex"}
	member      = limiter.Identity{"tenant": "acme", "email": "someone@example.com"}
)

// setup returns a connection to a database of the test's own, with the tables.
func setup(t *testing.T, options ...gorm.Option) *gorm.DB {
	t.Helper()

	db := pgtest.Open(t, options...)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}, &models.LegionIdentity{}))

	if os.Getenv(functionVariable) != "" {
		useFunction(t, db, plugin{})
	}

	return db
}

// functionVariable makes the tests that call setup decide by the server's function. They
// are the conformance suite of both ways: make test-function runs them so.
const functionVariable = "LEGION_TEST_SERVER_FUNCTION"

// useFunction makes the function, and has db use it with a plugin in place of the one that
// it may have.
func useFunction(t *testing.T, db *gorm.DB, plugin plugin) {
	t.Helper()

	plugin.settings.ServerFunction = true
	session, err := database.Session(db)
	require.NoError(t, err)
	require.NoError(t, migration.Up(session, plugin.settings.WithDefaults(), migration.Options{}))

	db.Plugins[plugin.Name()] = plugin
}

// withPrepareStmt switches on GORM's cache of prepared statements. The goroutine that
// evicts from it never ends, unless the statements are to be kept for these ten years.
func withPrepareStmt() *gorm.Config {
	return &gorm.Config{PrepareStmt: true, PrepareStmtTTL: 10 * 365 * 24 * time.Hour}
}

// maxAgents is a rule on the identity that allows so many agents.
func maxAgents(identity limiter.Identity, limit int64) limiter.Rule {
	return limiter.Rule{Identity: identity, Policy: limiter.Policy{Window: window, MaxAgents: limiter.Max(limit)}}
}

func maxRunning(identity limiter.Identity, limit int64) limiter.Rule {
	return limiter.Rule{Identity: identity, Policy: limiter.Policy{Window: window, MaxRunningAgents: limiter.Max(limit)}}
}

func maxTokens(identity limiter.Identity, limit int64) limiter.Rule {
	return limiter.Rule{Identity: identity, Policy: limiter.Policy{Window: window, MaxTokens: limiter.Max(limit)}}
}

func maxEvals(identity limiter.Identity, limit int64) limiter.Rule {
	return limiter.Rule{Identity: identity, Policy: limiter.Policy{Window: window, MaxEvals: limiter.Max(limit)}}
}

// recordOnly is a rule that limits nothing.
func recordOnly(identity limiter.Identity) limiter.Rule {
	return limiter.Rule{Identity: identity, Policy: limiter.Policy{Window: window}}
}

// requireDenied is for errors that must be a denial by these limits of one rule.
func requireDenied(t *testing.T, err error, limits ...limiter.Limit) *limiter.ExceededError {
	t.Helper()

	require.ErrorIs(t, err, limiter.ErrExceeded)

	var exceeded *limiter.ExceededError

	require.ErrorAs(t, err, &exceeded)

	violated := make([]limiter.Limit, len(exceeded.Violations))
	for i, violation := range exceeded.Violations {
		violated[i] = violation.Limit
	}

	require.Equal(t, limits, violated)

	return exceeded
}

// measured admits a throwaway agent under the rule, with its limit lifted, and takes
// the admission back: what is left is what the rule's group uses by now, the throwaway
// included among the agents.
func measured(t *testing.T, db *gorm.DB, rule limiter.Rule) limiter.Usage {
	t.Helper()

	var decision *limiter.Decision

	err := db.Transaction(func(tx *gorm.DB) (err error) {
		decision, err = limiter.Admit(tx, "a throwaway that only measures", rule)
		if err != nil {
			return err
		}

		return errTakeBack
	})
	require.ErrorIs(t, err, errTakeBack)

	return decision.Rules[0].Usage
}

var errTakeBack = gorm.ErrInvalidTransaction

// everyLimit asks for all four figures of the group and denies nothing but what is
// beyond int64.
func everyLimit(identity limiter.Identity) limiter.Rule {
	const most = 1<<63 - 1

	return limiter.Rule{Identity: identity, Policy: limiter.Policy{
		Window:           window,
		MaxAgents:        limiter.Max(most),
		MaxRunningAgents: limiter.Max(most),
		MaxTokens:        limiter.Max(most),
		MaxEvals:         limiter.Max(most),
	}}
}

// insert writes a row as it is given, past the limiter.
func insert(t *testing.T, db *gorm.DB, agents ...models.LegionAgent) {
	t.Helper()

	for i := range agents {
		if agents[i].Usage == nil {
			agents[i].Usage = datatypes.JSON("[]")
		}
	}

	require.NoError(t, db.Create(&agents).Error)
}

// document is an identity as it stands in the metadata column.
func document(t *testing.T, identity limiter.Identity) datatypes.JSON {
	t.Helper()

	text, err := json.Marshal(identity)
	require.NoError(t, err)

	return text
}

// usage is a usage column with these entries.
func usage(t *testing.T, entries ...models.Usage) datatypes.JSON {
	t.Helper()

	text, err := json.Marshal(entries)
	require.NoError(t, err)

	return text
}

func pointer[T any](value T) *T { return &value }

func ago(duration time.Duration) time.Time { return time.Now().Add(-duration) }

// find returns the agent's row, deleted or not.
func find(t *testing.T, db *gorm.DB, agentID string) models.LegionAgent {
	t.Helper()

	var agent models.LegionAgent

	require.NoError(t, db.Unscoped().Where("agent_id = ?", agentID).Take(&agent).Error)

	return agent
}

// change updates columns of the agent's row past the limiter.
func change(t *testing.T, db *gorm.DB, agentID string, columns map[string]any) {
	t.Helper()

	result := db.Unscoped().Model(&models.LegionAgent{}).Where("agent_id = ?", agentID).UpdateColumns(columns)
	require.NoError(t, result.Error)
	require.EqualValues(t, 1, result.RowsAffected)
}

// snapshot is everything that stands in the two tables, with the version of each row:
// a row that was written and has the same content is another one.
func snapshot(t *testing.T, db *gorm.DB) []string {
	t.Helper()

	var rows []string

	require.NoError(t, db.Raw(`
SELECT 'agent ' || agent.xmin || ' ' || agent.ctid || ' ' || agent::text FROM legion_agents AS agent
UNION ALL
SELECT 'identity ' || registered.xmin || ' ' || registered::text FROM legion_agents_identities AS registered
ORDER BY 1`).Scan(&rows).Error)

	return rows
}

// agentIDs are those of all rows.
func agentIDs(t *testing.T, db *gorm.DB) []string {
	t.Helper()

	var ids []string

	require.NoError(t, db.Unscoped().Model(&models.LegionAgent{}).Order("agent_id").Pluck("agent_id", &ids).Error)

	return ids
}

// registered are the identities of the registry, as jsonb prints them.
func registered(t *testing.T, db *gorm.DB) []string {
	t.Helper()

	var identities []string

	require.NoError(t, db.Model(&models.LegionIdentity{}).Order("identity").Pluck("identity::text", &identities).Error)

	return identities
}

// connection takes one connection out of the pool, to look at the database while a
// test's transaction is open.
func connection(t *testing.T, db *gorm.DB) *sql.Conn {
	t.Helper()

	pool, err := db.DB()
	require.NoError(t, err)

	taken, err := pool.Conn(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, taken.Close()) })

	return taken
}

// closeAfter closes a pool that pgtest did not open at the end of the test.
func closeAfter(t *testing.T, db *gorm.DB) {
	t.Helper()

	pool, err := db.DB()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, pool.Close()) })
}

// begin opens a transaction that is rolled back at the end of the test, if it is
// still open then.
func begin(t *testing.T, db *gorm.DB, options ...*sql.TxOptions) *gorm.DB {
	t.Helper()

	tx := db.Begin(options...)
	require.NoError(t, tx.Error)
	t.Cleanup(func() { _ = tx.Rollback() })

	return tx
}

// impatient is a context for calls that must not wait: what waits fails the test.
func impatient(t *testing.T) context.Context {
	t.Helper()

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)

	return ctx
}

// plugin stands in for the root package's, through the interfaces by which the
// limiter finds it.
type plugin struct {
	settings database.Settings
	policy   *limiter.Policy
}

func (plugin) Name() string                           { return database.PluginName }
func (plugin) Initialize(*gorm.DB) error              { return nil }
func (p plugin) LegionSettings() database.Settings    { return p.settings }
func (p plugin) LegionDefaultPolicy() *limiter.Policy { return p.policy }

// setupWith is setup with a plugin.
func setupWith(t *testing.T, plugin plugin, options ...gorm.Option) *gorm.DB {
	t.Helper()

	db := setup(t, options...)

	switch _, used := db.Plugins[plugin.Name()]; {
	case used && plugin.settings.Model == nil:
		useFunction(t, db, plugin)
	case used:
		db.Plugins[plugin.Name()] = plugin // its table is not the one that has the function
	default:
		require.NoError(t, db.Use(plugin))
	}

	return db
}

// inBackground makes a call that will wait for something. It hands over what came of it.
func inBackground(call func() error) <-chan error {
	result := make(chan error, 1)
	go func() { result <- call() }()

	return result
}

// waitForLockWaiters returns once so many of the database's connections wait for a
// lock that another one holds.
func waitForLockWaiters(t *testing.T, db *gorm.DB, waiters int64) {
	t.Helper()

	require.Eventually(t, func() bool {
		var waiting int64

		err := db.Raw("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'").
			Scan(&waiting).Error

		return err == nil && waiting >= waiters
	}, 20*time.Second, 5*time.Millisecond)
}
