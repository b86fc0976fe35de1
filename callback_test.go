package legion_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"github.com/uptrace/opentelemetry-go-extra/otelgorm"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"
	"gorm.io/plugin/dbresolver"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// Thread is a model of an application that says what limits it. Its agent is itself.
type Thread struct {
	ID       string `gorm:"primaryKey"`
	Tenant   string
	ForumID  *uint
	Messages []Note
	Panics   bool  `gorm:"-"`
	Fails    error `gorm:"-"`
}

func (t *Thread) LegionRules(context.Context) (string, []limiter.Rule, error) {
	if t.Panics {
		panic("a value of " + t.Tenant)
	}

	if t.Tenant == "" {
		return "", nil, t.Fails // not limited
	}

	return t.ID, []limiter.Rule{{Name: "threads", Identity: limiter.Identity{"tenant": t.Tenant}}}, t.Fails
}

// Note is a model without rules.
type Note struct {
	ID       uint `gorm:"primaryKey"`
	ThreadID string
	Text     string
}

// Forum has limited models as its association.
type Forum struct {
	ID      uint `gorm:"primaryKey"`
	Threads []Thread
}

// HookedThread calls Enforce itself.
type HookedThread struct {
	ID     string `gorm:"primaryKey"`
	Tenant string
}

func (t *HookedThread) BeforeCreate(tx *gorm.DB) error {
	return limiter.Enforce(tx, t.ID, limiter.Rule{Identity: limiter.Identity{"tenant": t.Tenant}})
}

// setupThreads returns a migrated database whose tenants may start two threads.
func setupThreads(t *testing.T, options ...gorm.Option) *gorm.DB {
	t.Helper()

	db := pgtest.Open(t, options...)
	useLegion(t, db)
	require.NoError(t, db.AutoMigrate(&Forum{}, &Thread{}, &Note{}, &HookedThread{}))

	return db
}

func useLegion(t *testing.T, db *gorm.DB) {
	t.Helper()

	require.NoError(t, db.Use(legion.New(
		legion.WithDefaultPolicy(limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(2)}),
		legion.WithMigrate(),
		legion.WithObserver(nil),
		legion.WithConnectionTimeout(2*time.Second),
	)))
}

func threads(t *testing.T, db *gorm.DB) []string {
	t.Helper()

	ids := []string{}
	require.NoError(t, db.Model(&Thread{}).Order("id").Pluck("id", &ids).Error)

	return ids
}

func agents(t *testing.T, db *gorm.DB) []string {
	t.Helper()

	ids := []string{}
	require.NoError(t, db.Model(&models.LegionAgent{}).Order("agent_id").Pluck("agent_id", &ids).Error)

	return ids
}

// requireNoLocks checks that nothing of a call is left open in the database.
func requireNoLocks(t *testing.T, db *gorm.DB) {
	t.Helper()

	var open int64

	require.NoError(t, db.Raw(`SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND locktype IN ('advisory', 'transactionid')`).Scan(&open).Error)
	require.Zero(t, open)
}

func TestAModelWithRulesIsEnforcedInItsOwnTransaction(t *testing.T) {
	t.Parallel()

	for name, db := range map[string]*gorm.DB{
		"default":                setupThreads(t),
		"SkipDefaultTransaction": setupThreads(t, &gorm.Config{SkipDefaultTransaction: true}),
		"PrepareStmt":            setupThreads(t, &gorm.Config{PrepareStmt: true, PrepareStmtTTL: 10 * 365 * 24 * time.Hour}),
		"TranslateError":         setupThreads(t, &gorm.Config{TranslateError: true}),
		"one connection":         setupThreads(t, pgtest.MaxOpenConnections(1)),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			require.NoError(t, db.Create(&Thread{ID: "a", Tenant: "acme"}).Error)
			require.NoError(t, db.Create(&Thread{ID: "b", Tenant: "acme"}).Error)
			require.ErrorIs(t, db.Create(&Thread{ID: "c", Tenant: "acme"}).Error, limiter.ErrExceeded)

			var exceeded *limiter.ExceededError

			require.ErrorAs(t, db.Create(&Thread{ID: "c", Tenant: "acme"}).Error, &exceeded)
			require.Equal(t, "threads", exceeded.Rule.Name)

			require.Equal(t, []string{"a", "b"}, threads(t, db))
			require.Equal(t, []string{"a", "b"}, agents(t, db))
			requireNoLocks(t, db)

			// The row fails after the admission: both are taken back.
			require.Error(t, db.Create(&Thread{ID: "a", Tenant: "globex"}).Error)

			var agent models.LegionAgent

			require.NoError(t, db.Take(&agent, "agent_id = ?", "a").Error)
			require.JSONEq(t, `{"tenant": "acme"}`, string(agent.Metadata))

			require.NoError(t, db.Create(&Thread{ID: "free"}).Error, "no rules, not limited")
			require.Equal(t, []string{"a", "b"}, agents(t, db))
		})
	}
}

func TestABatchIsEnforcedInItsOrderAndDeniedAsAWhole(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)

	var exceeded *limiter.ExceededError

	err := db.Create([]*Thread{{ID: "a", Tenant: "acme"}, {ID: "x", Tenant: "globex"}, {ID: "b", Tenant: "acme"}, {ID: "c", Tenant: "acme"}}).Error
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, "c", exceeded.AgentID, "each is measured after its predecessors")
	require.Empty(t, threads(t, db))
	require.Empty(t, agents(t, db))

	require.NoError(t, db.Create(&[]Thread{{ID: "a", Tenant: "acme"}, {ID: "free"}, {ID: "b", Tenant: "acme"}}).Error)
	require.Equal(t, []string{"a", "b", "free"}, threads(t, db))
	require.Equal(t, []string{"a", "b"}, agents(t, db))

	require.ErrorIs(t, db.CreateInBatches([]Thread{{ID: "y", Tenant: "globex"}, {ID: "z", Tenant: "acme"}}, 1).Error, limiter.ErrExceeded)
	require.Equal(t, []string{"a", "b", "free"}, threads(t, db))
}

func TestSaveWithAPresetKeyIsEnforcedOnceForANewRow(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)

	// GORM inserts these with SkipHooks: a BeforeCreate would not run.
	require.NoError(t, db.Save(&Thread{ID: "a", Tenant: "acme"}).Error)
	require.NoError(t, db.Save(&Thread{ID: "b", Tenant: "acme"}).Error)
	require.ErrorIs(t, db.Save(&Thread{ID: "c", Tenant: "acme"}).Error, limiter.ErrExceeded)
	require.NoError(t, db.Save(&Thread{ID: "a", Tenant: "acme"}).Error, "an update starts nothing")
	require.Equal(t, []string{"a", "b"}, threads(t, db))
	require.Equal(t, []string{"a", "b"}, agents(t, db))
}

func TestAssociationsThatAreSavedAgainAreNotEnforcedAgain(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)
	forum := Forum{Threads: []Thread{{ID: "a", Tenant: "acme"}, {ID: "b", Tenant: "acme"}}}

	require.NoError(t, db.Save(&forum).Error)
	require.Equal(t, []string{"a", "b"}, agents(t, db))

	// Were they enforced, they would move to a tenant that is full.
	require.NoError(t, db.Create([]*Thread{{ID: "x", Tenant: "globex"}, {ID: "y", Tenant: "globex"}}).Error)

	forum.Threads[0].Tenant, forum.Threads[1].Tenant = "globex", "globex"

	require.NoError(t, db.Save(&forum).Error)
	require.NoError(t, db.Session(&gorm.Session{FullSaveAssociations: true}).Save(&forum).Error)

	forum.Threads = append(forum.Threads, Thread{ID: "z", Tenant: "globex"})

	require.ErrorIs(t, db.Save(&forum).Error, limiter.ErrExceeded, "the new one is")
	require.Equal(t, []string{"a", "b", "x", "y"}, threads(t, db))
}

func TestAnUpsertEnforcesTheRowsThatAreNew(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)
	upsert := db.Clauses(clause.OnConflict{UpdateAll: true}).Session(&gorm.Session{})

	require.NoError(t, upsert.Create([]*Thread{{ID: "a", Tenant: "acme"}, {ID: "b", Tenant: "acme"}}).Error)
	require.NoError(t, upsert.Create([]*Thread{{ID: "b", Tenant: "acme"}, {ID: "a", Tenant: "acme"}}).Error)
	require.ErrorIs(t, upsert.Create([]*Thread{{ID: "a", Tenant: "acme"}, {ID: "c", Tenant: "acme"}}).Error, limiter.ErrExceeded)
	require.Equal(t, []string{"a", "b"}, threads(t, db))
}

func TestAPanicInLegionRulesIsAnErrorAndLeaksNothing(t *testing.T) {
	t.Parallel()

	for name, config := range map[string]*gorm.Config{"default": {}, "SkipDefaultTransaction": {SkipDefaultTransaction: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setupThreads(t, config, pgtest.MaxOpenConnections(1))

			var panicked *legion.PanicError

			for range 3 {
				err := db.Create([]*Thread{{ID: "a", Tenant: "acme"}, {ID: "b", Tenant: "acme", Panics: true}}).Error
				require.ErrorAs(t, err, &panicked)
			}

			require.Equal(t, "a value of acme", panicked.Value)
			require.NotContains(t, panicked.Error(), "acme")
			require.Contains(t, string(panicked.Stack), "LegionRules")
			require.Empty(t, threads(t, db))
			require.Empty(t, agents(t, db))
		})
	}
}

func TestAnErrorOfLegionRulesEndsTheCreate(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)
	failure := errors.New("no plan")

	require.ErrorIs(t, db.Create(&Thread{ID: "a", Tenant: "acme", Fails: failure}).Error, failure)
	require.Empty(t, threads(t, db))
}

func TestACreateFromAMapIsAnErrorUnlessSkipped(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)
	row := map[string]any{"id": "a", "tenant": "acme"}

	require.ErrorIs(t, db.Model(&Thread{}).Create(row).Error, legion.ErrInvalidConfig)
	require.Empty(t, threads(t, db))

	require.NoError(t, legion.Skip(db).Model(&Thread{}).Create(row).Error)
	require.NoError(t, legion.Skip(db).Create([]*Thread{{ID: "b", Tenant: "acme"}, {ID: "c", Tenant: "acme"}}).Error)
	require.Equal(t, []string{"a", "b", "c"}, threads(t, db))
	require.Empty(t, agents(t, db))

	require.NoError(t, db.Create(&Thread{ID: "d", Tenant: "acme"}).Error, "Skip is for its own session")
	require.Equal(t, []string{"d"}, agents(t, db))
}

func TestGenericsAndFirstOrCreateAreEnforced(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)

	require.NoError(t, gorm.G[Thread](db).Create(t.Context(), &Thread{ID: "a", Tenant: "acme"}))
	require.NoError(t, db.FirstOrCreate(&Thread{}, &Thread{ID: "b", Tenant: "acme"}).Error)
	require.NoError(t, db.FirstOrCreate(&Thread{}, &Thread{ID: "b", Tenant: "acme"}).Error)
	require.ErrorIs(t, gorm.G[Thread](db).Create(t.Context(), &Thread{ID: "c", Tenant: "acme"}), limiter.ErrExceeded)
	require.ErrorIs(t, db.FirstOrCreate(&Thread{}, &Thread{ID: "c", Tenant: "acme"}).Error, limiter.ErrExceeded)
	require.Equal(t, []string{"a", "b"}, threads(t, db))
}

func TestADryRunEnforcesNothing(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)

	statement := db.Session(&gorm.Session{DryRun: true}).Create(&Thread{ID: "a", Tenant: "acme"}).Statement
	require.Contains(t, statement.SQL.String(), "INSERT INTO")

	sql := db.ToSQL(func(tx *gorm.DB) *gorm.DB { return tx.Create(&HookedThread{ID: "a", Tenant: "acme"}) })
	require.Contains(t, sql, "INSERT INTO")
	require.Empty(t, agents(t, db))
}

func TestEnforceInBeforeCreateJoinsTheRowsTransaction(t *testing.T) {
	t.Parallel()

	db := setupThreads(t, pgtest.MaxOpenConnections(1))

	require.NoError(t, db.Create(&HookedThread{ID: "a", Tenant: "acme"}).Error)
	require.NoError(t, db.Create(&HookedThread{ID: "b", Tenant: "acme"}).Error)
	require.ErrorIs(t, db.Create(&HookedThread{ID: "c", Tenant: "acme"}).Error, limiter.ErrExceeded)
	require.ErrorIs(t, db.Create([]*HookedThread{{ID: "x", Tenant: "globex"}, {ID: "c", Tenant: "acme"}}).Error, limiter.ErrExceeded)
	require.Equal(t, []string{"a", "b"}, agents(t, db))

	var rows int64

	require.NoError(t, db.Model(&HookedThread{}).Count(&rows).Error)
	require.EqualValues(t, 2, rows)
}

// CapturingThread makes the mistake of using the application's db in its hook.
type CapturingThread struct {
	ID     string   `gorm:"primaryKey"`
	global *gorm.DB `gorm:"-"`
}

func (c *CapturingThread) BeforeCreate(*gorm.DB) error {
	return limiter.Enforce(c.global, c.ID, limiter.Rule{Identity: limiter.Identity{"tenant": "acme"}})
}

func TestACapturedDBInAHookEndsInAnErrorAndDoesNotHang(t *testing.T) {
	t.Parallel()

	db := setupThreads(t, pgtest.MaxOpenConnections(1))
	require.NoError(t, db.AutoMigrate(&CapturingThread{}))

	err := db.Create(&CapturingThread{ID: "a", global: db}).Error
	require.ErrorIs(t, err, legion.ErrNoConnection)
	require.ErrorContains(t, err, "pass the hook's tx")
	require.Empty(t, agents(t, db))
}

func TestEveryExecModeOfPgxEnforces(t *testing.T) {
	t.Parallel()

	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()

			config, err := pgx.ParseConfig(pgtest.Database(t))
			require.NoError(t, err)

			config.DefaultQueryExecMode = mode

			pool := stdlib.OpenDB(*config)
			t.Cleanup(func() { require.NoError(t, pool.Close()) })

			db, err := gorm.Open(postgres.New(postgres.Config{Conn: pool}), &gorm.Config{})
			require.NoError(t, err)
			useLegion(t, db)
			require.NoError(t, db.AutoMigrate(&Forum{}, &Thread{}, &Note{}))

			require.NoError(t, db.Create([]*Thread{{ID: "a", Tenant: "acme"}, {ID: "b", Tenant: "acme"}}).Error)
			require.NoError(t, db.Save(&Thread{ID: "a", Tenant: "acme"}).Error)
			require.ErrorIs(t, db.Create(&Thread{ID: "c", Tenant: "acme"}).Error, limiter.ErrExceeded)
			require.Equal(t, []string{"a", "b"}, threads(t, db))
		})
	}
}

func TestPluginsOfOtherVendorsWorkBesideIt(t *testing.T) {
	t.Parallel()

	for _, first := range []bool{true, false} {
		t.Run(fmt.Sprintf("ours first: %t", first), func(t *testing.T) {
			t.Parallel()

			// The replica is another server's database: behind, and without our tables.
			db := pgtest.Open(t)
			behind := dbresolver.Register(dbresolver.Config{Replicas: []gorm.Dialector{postgres.Open(pgtest.Database(t))}})

			if first {
				useLegion(t, db)
			}

			require.NoError(t, db.Use(behind))
			require.NoError(t, db.Use(otelgorm.NewPlugin(otelgorm.WithoutMetrics())))
			t.Cleanup(func() {
				require.NoError(t, behind.Call(func(pool gorm.ConnPool) error {
					if closer, ok := pool.(interface{ Close() error }); ok {
						return closer.Close()
					}

					return nil
				}))
			})

			if !first {
				useLegion(t, db)
			}

			require.NoError(t, db.AutoMigrate(&Forum{}, &Thread{}, &Note{}))

			require.NoError(t, db.Create(&Thread{ID: "a", Tenant: "acme"}).Error)
			require.NoError(t, db.Save(&Thread{ID: "b", Tenant: "acme"}).Error)
			require.ErrorIs(t, db.Create(&Thread{ID: "c", Tenant: "acme"}).Error, limiter.ErrExceeded)
			require.ErrorIs(t, limiter.Enforce(db, "d", limiter.Rule{Identity: limiter.Identity{"tenant": "acme"}}), limiter.ErrExceeded)

			report, err := limiter.Check(db, "", limiter.Rule{Identity: limiter.Identity{"tenant": "acme"}})
			require.NoError(t, err)
			require.EqualValues(t, 2, report.Rules[0].Usage.Agents, "Check reads the primary")

			require.Equal(t, []string{"a", "b"}, threads(t, db.Clauses(dbresolver.Write)))
		})
	}
}

// BotAgent is a second agent model of one database.
type BotAgent struct{ models.LegionAgent }

func TestTwoAgentModelsShareADatabaseWithOneDBEach(t *testing.T) {
	t.Parallel()

	dsn := pgtest.Database(t)
	people, bots := pgtest.OpenDSN(t, dsn), pgtest.OpenDSN(t, dsn)
	rule := limiter.Rule{Identity: limiter.Identity{"tenant": "acme"}, Policy: limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(1)}}

	require.NoError(t, people.Use(legion.New(legion.WithMigrate())))
	require.NoError(t, bots.Use(legion.New(legion.WithMigrate(), legion.WithModel(&BotAgent{}))))

	require.NoError(t, limiter.Enforce(people, "a", rule))
	require.NoError(t, limiter.Enforce(bots, "a", rule))
	require.ErrorIs(t, limiter.Enforce(people, "b", rule), limiter.ErrExceeded)
	require.ErrorIs(t, limiter.Enforce(bots, "b", rule), limiter.ErrExceeded)

	var tables []string

	require.NoError(t, people.Raw(`SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1`).Scan(&tables).Error)
	require.Equal(t, []string{"bot_agents", "bot_agents_identities", "legion_agents", "legion_agents_identities"}, tables)
}

// It does not run in parallel, since testing.AllocsPerRun counts the whole process.
func TestModelsWithoutRulesCostNothing(t *testing.T) { //nolint:paralleltest // as said
	plain, with := pgtest.Open(t), pgtest.Open(t)
	require.NoError(t, plain.AutoMigrate(&Note{}))
	useLegion(t, with)
	require.NoError(t, with.AutoMigrate(&Note{}))

	statements := func(db *gorm.DB) (count int) {
		recorded := db.Session(&gorm.Session{Logger: statementCounter{count: &count}})
		require.NoError(t, recorded.Create(&Note{Text: "hello"}).Error)

		return count
	}
	require.Equal(t, statements(plain), statements(with))

	const runs = 200

	allocations := func(db *gorm.DB) float64 {
		dry := db.Session(&gorm.Session{DryRun: true, SkipDefaultTransaction: true})

		return testing.AllocsPerRun(runs, func() { dry.Create(&Note{Text: "hello"}) })
	}
	require.InDelta(t, allocations(plain), allocations(with), 1)
}
