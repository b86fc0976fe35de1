package store_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// agentID is the agent of the tests that need one.
const agentID = "agent-1"

// bundle is a migrated database of the test's own and the store in it.
type bundle struct {
	db     *gorm.DB
	agents *store.Store[models.LegionAgent]
}

func setup(t *testing.T, options ...gorm.Option) bundle {
	t.Helper()

	return setupDSN(t, pgtest.Database(t), options...)
}

func setupDSN(t *testing.T, dsn string, options ...gorm.Option) bundle {
	t.Helper()

	db := pgtest.OpenDSN(t, dsn, options...)
	migrate(t, db, &models.LegionAgent{}, "legion_agents")

	return bundle{db: db, agents: store.For[models.LegionAgent](db)}
}

// setupAgent is setup with one agent that was never limited.
func setupAgent(t *testing.T, options ...gorm.Option) bundle {
	t.Helper()

	b := setup(t, options...)
	require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: agentID}))

	return b
}

func migrate(t *testing.T, db *gorm.DB, model any, table string) {
	t.Helper()
	require.NoError(t, db.Table(table).AutoMigrate(model))
	require.NoError(t, db.Table(table+"_identities").AutoMigrate(&models.LegionIdentity{}))
}

// processes are n bundles on the same database, each with a pool of its own: the store
// cannot tell them from other processes.
func (b bundle) processes(t *testing.T, n int, options ...gorm.Option) []bundle {
	t.Helper()

	bundles := make([]bundle, n)
	for i := range bundles {
		db := pgtest.OpenDSN(t, pgtest.DSN(b.db), options...)
		bundles[i] = bundle{db: db, agents: store.For[models.LegionAgent](db)}
	}

	return bundles
}

// setupClock is setup in a database whose clock_timestamp() stands still at a moment that
// setClock changes.
func setupClock(t *testing.T, now time.Time) bundle {
	t.Helper()

	dsn := pgtest.Database(t)
	db := pgtest.OpenDSN(t, dsn)

	// A function of this name that is found before pg_catalog's.
	for _, statement := range []string{
		`CREATE SCHEMA clock`,
		`CREATE TABLE clock.reading (now timestamptz)`,
		`INSERT INTO clock.reading VALUES (NULL)`,
		`CREATE FUNCTION clock.clock_timestamp() RETURNS timestamptz VOLATILE LANGUAGE sql AS 'SELECT now FROM clock.reading'`,
		`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = public, clock, pg_catalog', current_database()); END $$`,
	} {
		require.NoError(t, db.Exec(statement).Error)
	}

	b := setupDSN(t, dsn)
	b.setClock(t, now)
	require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: agentID}))

	return b
}

func (b bundle) setClock(t *testing.T, now time.Time) {
	t.Helper()
	b.exec(t, `UPDATE clock.reading SET now = ?`, now)
}

func (b bundle) exec(t *testing.T, query string, values ...any) {
	t.Helper()
	require.NoError(t, b.db.Exec(query, values...).Error)
}

// set writes columns of the agent behind the store's back. SQL goes in as gorm.Expr.
func (b bundle) set(t *testing.T, id string, columns map[string]any) {
	t.Helper()

	result := b.db.Table("legion_agents").Where("agent_id = ?", id).Updates(columns)
	require.NoError(t, result.Error)
	require.EqualValues(t, 1, result.RowsAffected)
}

// row is the agent as it is in the table, deleted or not.
func (b bundle) row(t *testing.T, id string) models.LegionAgent {
	t.Helper()

	var agent models.LegionAgent
	require.NoError(t, b.db.Unscoped().Take(&agent, "agent_id = ?", id).Error)

	return agent
}

// version changes whenever the row of the agent is written.
func (b bundle) version(t *testing.T, id string) string {
	t.Helper()

	var version string
	require.NoError(t, b.db.Raw(`SELECT ctid::text || '/' || xmin::text FROM legion_agents WHERE agent_id = ?`, id).Scan(&version).Error)

	return version
}

func (b bundle) usage(t *testing.T, id string) []models.Usage {
	t.Helper()

	agent := b.row(t, id)
	entries, err := agent.UsageEntries()
	require.NoError(t, err)

	return entries
}

func (b bundle) count(t *testing.T, table string) int64 {
	t.Helper()

	var count int64
	require.NoError(t, b.db.Table(table).Count(&count).Error)

	return count
}

// plugin stands for the one of the root package.
type plugin struct{ settings database.Settings }

func (plugin) Name() string                        { return database.PluginName }
func (plugin) Initialize(*gorm.DB) error           { return nil }
func (p plugin) LegionSettings() database.Settings { return p.settings }
func pointer[T any](value T) *T                    { return &value }
func numbered(name string, number int) string      { return fmt.Sprintf("%s-%03d", name, number) }
func inHours(hours float64) any {
	return gorm.Expr("clock_timestamp() + make_interval(secs => ?)", hours*3600)
}

// inParallel calls work in n goroutines at once, and fails the test with what they return.
func inParallel(t *testing.T, n int, work func(number int) error) {
	t.Helper()

	results := make(chan error, n)
	for number := range n {
		go func() { results <- work(number) }()
	}

	var failures []error
	for range n {
		failures = append(failures, <-results)
	}

	require.NoError(t, errors.Join(failures...))
}

// waitUntilBlocked returns when n sessions of the database wait for a lock.
func (b bundle) waitUntilBlocked(t *testing.T, n int64) {
	t.Helper()
	require.Eventually(t, func() bool {
		var waiting int64
		err := b.db.Raw(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).
			Scan(&waiting).Error

		return err == nil && waiting >= n
	}, time.Minute, 5*time.Millisecond)
}
