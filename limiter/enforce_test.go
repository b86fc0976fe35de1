package limiter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

func setup(t *testing.T, options ...gorm.Option) *gorm.DB {
	t.Helper()

	db := pgtest.Open(t, options...)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))

	return db
}

func byIP(policy limiter.Policy) limiter.Rule {
	return limiter.Rule{Identity: limiter.Identity{"ip": "203.0.113.42"}, Policy: policy}
}

func TestEnforceAllowsUpToTheLimitAndDeniesTheNext(t *testing.T) {
	t.Parallel()

	db := setup(t)
	rule := byIP(limiter.Policy{Window: time.Minute, MaxAgents: limiter.Max(2)})

	require.NoError(t, limiter.Enforce(db, "one", rule))
	require.NoError(t, limiter.Enforce(db, "two", rule))
	err := limiter.Enforce(db, "three", rule)
	require.ErrorIs(t, err, limiter.ErrExceeded)
	t.Log(err)
	rule.Policy = limiter.Policy{Window: time.Minute, MaxAgents: limiter.Max(3), MaxRunningAgents: limiter.Max(2), MaxTokens: limiter.Max(10), MaxEvals: limiter.Max(1)}
	d, err := limiter.Admit(db, "three", rule, limiter.Rule{Name: "all", Identity: limiter.Everyone(), Policy: rule.Policy})
	require.NoError(t, err)
	t.Logf("%+v", d)
	var rows []models.LegionAgent
	require.NoError(t, db.Find(&rows).Error)
	for _, r := range rows {
		t.Logf("%s %s %s %v %s", r.AgentID, r.Status, r.Metadata, r.StartedAt, r.Usage)
	}
	require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
		return limiter.Enforce(tx, "three", rule, limiter.Rule{Name: "new", Identity: limiter.Identity{"ip": "203.0.113.42", "tenant": 1.50}, Policy: rule.Policy})
	}))
}
