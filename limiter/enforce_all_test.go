package limiter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/limiter"
)

func TestEnforceAllAdmitsAllOrNone(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(otherTenant)))

	// Each is measured after those before it, whichever of its rules names the group.
	admissions := []limiter.Admission{
		{AgentID: "second", Rules: []limiter.Rule{maxAgents(tenant, 2)}},
		{AgentID: "third", Rules: []limiter.Rule{maxAgents(limiter.Everyone(), 9), maxAgents(member, 2), maxRunning(tenant, 1)}},
		{AgentID: "fourth", Rules: []limiter.Rule{recordOnly(member), maxAgents(tenant, 2)}},
	}
	before := snapshot(t, db)

	exceeded := requireDenied(t, limiter.EnforceAll(db, admissions...), limiter.LimitAgents)
	require.Equal(t, "fourth", exceeded.AgentID)
	require.Equal(t, 1, exceeded.RuleIndex)
	require.Equal(t, before, snapshot(t, db))

	requireDenied(t, limiter.EnforceAll(begin(t, db), admissions...), limiter.LimitAgents)
	require.Equal(t, before, snapshot(t, db))

	admissions[0].Rules[0], admissions[2].Rules[1] = maxAgents(tenant, 3), maxAgents(tenant, 3)
	require.NoError(t, limiter.EnforceAll(db, admissions...))
	require.Equal(t, []string{"first", "fourth", "second", "third"}, agentIDs(t, db))
	require.JSONEq(t, `{"tenant": "acme", "email": "someone@example.com"}`, string(find(t, db, "third").Metadata))

	// Again, and in a caller's transaction, it is as idempotent as Enforce.
	require.NoError(t, db.Transaction(func(tx *gorm.DB) error { return limiter.EnforceAll(tx, admissions...) }))
	requireDenied(t, limiter.Enforce(db, "fifth", maxAgents(tenant, 3)), limiter.LimitAgents)
}

func TestEnforceAllOfNobodyDoesNothing(t *testing.T) {
	t.Parallel()

	require.NoError(t, limiter.EnforceAll(setupUnreachable(t)))
}

func TestEnforceAllRevokesTheExpiredTurnsThatItNeeds(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, turn(t, "expired", tenant, -time.Second), turn(t, "expired elsewhere", otherTenant, -time.Second))

	require.NoError(t, limiter.EnforceAll(db,
		limiter.Admission{AgentID: "first", Rules: []limiter.Rule{maxRunning(tenant, 1)}},
		limiter.Admission{AgentID: "expired elsewhere", Rules: []limiter.Rule{maxRunning(otherTenant, 1)}},
	))
	require.Nil(t, find(t, db, "expired").LeaseExpiresAt)
	require.Nil(t, find(t, db, "expired elsewhere").RunID)

	exceeded := requireDenied(t, limiter.EnforceAll(db,
		limiter.Admission{AgentID: "first", Rules: []limiter.Rule{maxRunning(tenant, 1)}},
		limiter.Admission{AgentID: "second", Rules: []limiter.Rule{maxRunning(tenant, 1)}},
	), limiter.LimitRunningAgents)
	require.Equal(t, "second", exceeded.AgentID)
}
