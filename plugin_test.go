package legion_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	"gorm.io/gorm/utils/tests"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// statementCounter is a logger that counts what is run.
type statementCounter struct {
	logger.Interface

	count *int
}

func (c statementCounter) LogMode(logger.LogLevel) logger.Interface { return c }

func (c statementCounter) Trace(context.Context, time.Time, func() (string, int64), error) {
	*c.count++
}

// KeyedAgent has GORM's usual key beside ours.
type KeyedAgent struct {
	gorm.Model
	models.LegionAgent
}

// StrictAgent has a column that our INSERT cannot fill.
type StrictAgent struct {
	models.LegionAgent

	Title string `gorm:"not null"`
}

// PrefixedAgent has our columns under other names.
type PrefixedAgent struct {
	Agent models.LegionAgent `gorm:"embedded;embeddedPrefix:agent_"`
}

// LaxAgent has columns that are no obstacle.
type LaxAgent struct {
	models.LegionAgent

	Title   *string
	Room    string `gorm:"not null;default:lobby"`
	Visits  int64
	Secrets string `gorm:"-"`
}

func TestUseRejectsWhatCannotWork(t *testing.T) {
	t.Parallel()

	dsn := pgtest.Database(t)

	for _, test := range []struct {
		name    string
		options []legion.Option
		names   string
	}{
		{"a composite key", []legion.Option{legion.WithModel(&KeyedAgent{})}, "gorm.Model"},
		{"a column without default", []legion.Option{legion.WithModel(&StrictAgent{})}, `"title"`},
		{"a prefix", []legion.Option{legion.WithModel(&PrefixedAgent{})}, "embeddedPrefix"},
		{"no agent at all", []legion.Option{legion.WithModel(&Note{})}, "embed models.LegionAgent"},
		{"no model at all", []legion.Option{legion.WithModel(5)}, "cannot be parsed"},
		{"no window", []legion.Option{legion.WithDefaultPolicy(limiter.Policy{MaxAgents: limiter.Max(1)})}, "Window"},
		{"a negative limit", []legion.Option{legion.WithDefaultPolicy(limiter.Policy{Window: 1e9, MaxEvals: limiter.Max(-1)})}, "evals"},
		{"no lease", []legion.Option{legion.WithLease(0)}, "WithLease"},
		{"a negative timeout", []legion.Option{legion.WithConnectionTimeout(-1)}, "WithConnectionTimeout"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db := pgtest.OpenDSN(t, dsn)

			err := db.Use(legion.New(test.options...))
			require.ErrorIs(t, err, legion.ErrInvalidConfig)
			require.ErrorContains(t, err, test.names)

			_, used := legion.From(db)
			require.False(t, used)
			require.Nil(t, db.Callback().Create().Get(legion.EnforceCallback))
		})
	}
}

func TestUseRejectsAnotherDialect(t *testing.T) {
	t.Parallel()

	db, err := gorm.Open(tests.DummyDialector{}, &gorm.Config{})
	require.NoError(t, err)

	err = db.Use(legion.New())
	require.ErrorIs(t, err, legion.ErrInvalidConfig)
	require.ErrorContains(t, err, "gorm.io/driver/postgres")
}

func TestUseRunsNoStatementUnlessItMigrates(t *testing.T) {
	t.Parallel()

	count := 0
	db := pgtest.Open(t, &gorm.Config{Logger: statementCounter{Interface: logger.Discard, count: &count}})

	require.NoError(t, db.Use(legion.New(legion.WithModel(&LaxAgent{}))))
	require.Zero(t, count)
	require.False(t, db.Migrator().HasTable(&LaxAgent{}))

	require.ErrorIs(t, db.Use(legion.New()), gorm.ErrRegistered)
}

func TestFromFindsThePluginOfADB(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)

	_, used := legion.From(db)
	require.False(t, used)

	_, used = legion.From(nil)
	require.False(t, used)

	plugin := legion.New()
	require.NoError(t, db.Use(plugin))

	found, used := legion.From(db.WithContext(t.Context()))
	require.True(t, used)
	require.Same(t, plugin, found)
	require.Equal(t, "gorm:legion", plugin.Name())
}

func TestThePluginsSettingsReachTheLimiter(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.Use(legion.New(
		legion.WithModel(&LaxAgent{}), legion.WithTable("crew"), legion.WithMigrate(), legion.WithLease(time.Minute),
		legion.WithDefaultPolicy(limiter.Policy{Window: time.Hour, MaxRunningAgents: limiter.Max(1)}),
	)))

	rule := limiter.Rule{Identity: limiter.Identity{"tenant": "acme"}}
	require.NoError(t, limiter.Enforce(db, "a", rule))
	require.ErrorIs(t, limiter.Enforce(db, "b", rule), limiter.ErrExceeded)

	var left float64

	require.NoError(t, db.Raw(`SELECT extract(epoch FROM lease_expires_at - clock_timestamp()) FROM crew WHERE room = 'lobby'`).Scan(&left).Error)
	require.InDelta(t, 60, left, 10)
}

func TestWithoutUsageTrackingRejectsLimitsThatNothingFills(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.Use(legion.New(legion.WithMigrate(), legion.WithoutUsageTracking())))

	for _, policy := range []limiter.Policy{{Window: time.Hour, MaxTokens: limiter.Max(1)}, {Window: time.Hour, MaxEvals: limiter.Max(1)}} {
		err := limiter.Enforce(db, "a", limiter.Rule{Identity: limiter.Identity{"tenant": "acme"}, Policy: policy})
		require.ErrorIs(t, err, limiter.ErrInvalidRule)
		require.ErrorContains(t, err, "WithoutUsageTracking")
	}
}

func TestAnObserverIsToldOfEveryDecision(t *testing.T) {
	t.Parallel()

	var told []limiter.Observation

	db := pgtest.Open(t)
	require.NoError(t, db.Use(legion.New(legion.WithMigrate(), legion.WithObserver(func(observation limiter.Observation) {
		told = append(told, observation)

		panic("contained")
	}))))

	one := limiter.Rule{Name: "one", Identity: limiter.Identity{"tenant": "acme"}, Policy: limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(1)}}
	free := limiter.Rule{Identity: limiter.Everyone(), Policy: limiter.Policy{Window: time.Hour}}

	require.NoError(t, limiter.Enforce(db, "a", free, one))
	require.ErrorIs(t, limiter.Enforce(db, "b", free, one), limiter.ErrExceeded)
	require.Error(t, limiter.Enforce(db, "", one), "no decision")
	require.NoError(t, db.Transaction(func(tx *gorm.DB) error { return limiter.Enforce(tx, "a", one) }))

	require.Len(t, told, 3)
	require.Equal(t, "a", told[0].AgentID)
	require.Nil(t, told[0].Denial)
	require.EqualValues(t, 1, told[0].Rules[1].Usage.Agents)
	require.False(t, told[0].InTransaction)
	require.Positive(t, told[0].Waited)
	require.Greater(t, told[0].Took, told[0].Waited)

	require.Equal(t, "b", told[1].AgentID)
	require.Equal(t, 1, told[1].Denial.RuleIndex)
	require.Equal(t, "one", told[1].Rules[1].Rule.Name)
	require.EqualValues(t, 2, told[1].Rules[1].Usage.Agents)

	require.True(t, told[2].InTransaction)
}
