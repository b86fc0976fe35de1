package limiter_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// turn is the row of an agent that a turn holds, or held, until the given time from
// now.
func turn(t *testing.T, agentID string, identity limiter.Identity, until time.Duration) models.LegionAgent {
	t.Helper()

	return models.LegionAgent{
		AgentID:        agentID,
		Metadata:       document(t, identity),
		Status:         models.StatusRunning,
		RunID:          pointer("run of " + agentID),
		LeaseExpiresAt: pointer(time.Now().Add(until).UTC().Truncate(time.Microsecond)),
		StartedAt:      pointer(ago(time.Minute)),
	}
}

// unowned is the row of an agent with the slot of a bare Enforce.
func unowned(t *testing.T, agentID string, identity limiter.Identity, until time.Duration) models.LegionAgent {
	t.Helper()

	agent := turn(t, agentID, identity, until)
	agent.RunID = nil

	return agent
}

func TestMaxRunningAgentsAdmitsUpToTheLimitAndDeniesTheNext(t *testing.T) {
	t.Parallel()

	db := setup(t)
	rule := maxRunning(tenant, 2)

	require.NoError(t, limiter.Enforce(db, "first", rule))
	require.NoError(t, limiter.Enforce(db, "second", rule))

	exceeded := requireDenied(t, limiter.Enforce(db, "third", rule), limiter.LimitRunningAgents)
	require.EqualValues(t, 3, exceeded.Usage.RunningAgents)
	require.Zero(t, exceeded.Usage.Agents, "no limit asks for it")

	// An agent that runs already counts once.
	require.NoError(t, limiter.Enforce(db, "first", rule))

	agent := find(t, db, "first")
	require.Equal(t, models.StatusRunning, agent.Status)
	require.Nil(t, agent.RunID)
	require.WithinDuration(t, time.Now().Add(database.DefaultLease), *agent.LeaseExpiresAt, 10*time.Second)

	require.NoError(t, limiter.Release(db, "second"))
	require.NoError(t, limiter.Enforce(db, "third", rule))
}

func TestASlotLastsForThePluginsLease(t *testing.T) {
	t.Parallel()

	db := setupWith(t, plugin{settings: database.Settings{Lease: 3 * time.Hour}})
	require.NoError(t, limiter.Enforce(db, "agent", maxRunning(tenant, 1)))
	require.WithinDuration(t, time.Now().Add(3*time.Hour), *find(t, db, "agent").LeaseExpiresAt, time.Minute)
}

func TestAnUnownedSlotIsFreeOnceItsLeaseIsOver(t *testing.T) {
	t.Parallel()

	db := setupWith(t, plugin{settings: database.Settings{Lease: 3 * time.Second}})
	require.NoError(t, limiter.Enforce(db, "first", maxRunning(tenant, 1)))
	requireDenied(t, limiter.Enforce(db, "second", maxRunning(tenant, 1)), limiter.LimitRunningAgents)

	require.Eventually(t, func() bool {
		return limiter.Enforce(db, "second", maxRunning(tenant, 1)) == nil
	}, 30*time.Second, 20*time.Millisecond)
}

func TestRunningAgentsAreTheRowsThatHoldASlot(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name   string
		holds  bool
		change func(agent *models.LegionAgent)
	}{
		{"a live turn", true, func(*models.LegionAgent) {}},
		{"a live turn that started before the window", true, func(agent *models.LegionAgent) { agent.StartedAt = pointer(ago(5 * window)) }},
		{"a live turn of a deleted agent", true, func(agent *models.LegionAgent) {
			agent.DeletedAt = gorm.DeletedAt{Time: time.Now(), Valid: true}
		}},
		{"a live unowned slot", true, func(agent *models.LegionAgent) { agent.RunID = nil }},
		{"an unowned slot whose lease is over", false, func(agent *models.LegionAgent) {
			agent.RunID, agent.LeaseExpiresAt = nil, pointer(ago(time.Second))
		}},
		{"a turn without a lease", false, func(agent *models.LegionAgent) { agent.LeaseExpiresAt = nil }},
		{"an unowned row without a lease", false, func(agent *models.LegionAgent) { agent.RunID, agent.LeaseExpiresAt = nil, nil }},
		{"an idle row with a lease", false, func(agent *models.LegionAgent) { agent.Status = models.StatusIdle }},
		{"an idle row that a turn has left", false, func(agent *models.LegionAgent) {
			agent.Status, agent.LeaseExpiresAt = models.StatusIdle, nil
		}},
		{"a turn in another group", false, func(agent *models.LegionAgent) { agent.Metadata = document(t, otherTenant) }},
		{"a turn that is not limited", false, func(agent *models.LegionAgent) { agent.Metadata = nil }},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db := setup(t)
			agent := turn(t, "running", member, time.Hour)
			test.change(&agent)
			insert(t, db, agent)

			before := find(t, db, "running")

			err := limiter.Enforce(db, "another", maxRunning(tenant, 1))
			if test.holds {
				requireDenied(t, err, limiter.LimitRunningAgents)
			} else {
				require.NoError(t, err)
			}

			require.Equal(t, before, find(t, db, "running"))
		})
	}
}

func TestStatusIsUntouchedWhereNoRuleLimitsRunningAgents(t *testing.T) {
	t.Parallel()

	db := setup(t)

	for _, agent := range []models.LegionAgent{
		{AgentID: "idle", Metadata: document(t, otherTenant)},
		turn(t, "turn", otherTenant, time.Hour),
		turn(t, "expired turn", otherTenant, -time.Hour),
		unowned(t, "unowned", otherTenant, time.Hour),
		unowned(t, "expired unowned", otherTenant, -time.Hour),
	} {
		agent.ReservedTokens = 7
		insert(t, db, agent)

		before := find(t, db, agent.AgentID)

		require.NoError(t, limiter.Enforce(db, agent.AgentID, maxAgents(tenant, 10), maxTokens(tenant, 1000), maxEvals(tenant, 10)))

		after := find(t, db, agent.AgentID)
		require.JSONEq(t, `{"tenant": "acme"}`, string(after.Metadata))
		require.Equal(t, before.Status, after.Status, agent.AgentID)
		require.Equal(t, before.RunID, after.RunID, agent.AgentID)
		require.Equal(t, before.LeaseExpiresAt, after.LeaseExpiresAt, agent.AgentID)
		require.Equal(t, before.ReservedTokens, after.ReservedTokens, agent.AgentID)
	}

	require.NoError(t, limiter.Enforce(db, "new", maxAgents(tenant, 10)))
	require.Equal(t, models.StatusIdle, find(t, db, "new").Status)
}

func TestABareEnforceLeavesALiveTurnAlone(t *testing.T) {
	t.Parallel()

	db := setup(t)
	agent := turn(t, "turn", tenant, time.Hour)
	agent.ReservedTokens = 500
	insert(t, db, agent)

	// The agent holds the only slot already, under its turn.
	before := snapshot(t, db)

	require.NoError(t, limiter.Enforce(db, "turn", maxRunning(tenant, 1)))
	require.Equal(t, append(before, snapshotOfRegistry(t, db)...), snapshot(t, db))

	// Moving it moves its slot, and nothing else of it.
	require.NoError(t, limiter.Enforce(db, "turn", maxRunning(otherTenant, 1)))

	moved := find(t, db, "turn")
	require.JSONEq(t, `{"tenant": "globex"}`, string(moved.Metadata))
	require.Equal(t, models.StatusRunning, moved.Status)
	require.Equal(t, agent.RunID, moved.RunID)
	require.True(t, agent.LeaseExpiresAt.Equal(*moved.LeaseExpiresAt))
	require.EqualValues(t, 500, moved.ReservedTokens)

	requireDenied(t, limiter.Enforce(db, "another", maxRunning(otherTenant, 1)), limiter.LimitRunningAgents)
	require.NoError(t, limiter.Enforce(db, "another", maxRunning(tenant, 1)))
}

func TestABareEnforceTakesTheSlotOfTheAgentsOwnTurnThatIsOver(t *testing.T) {
	t.Parallel()

	db := setup(t)

	for _, until := range []time.Duration{-time.Second, -time.Hour} {
		agent := turn(t, fmt.Sprintf("expired for %s", -until), limiter.Identity{"case": until}, until)
		agent.ReservedTokens = 500
		insert(t, db, agent)
		require.NoError(t, limiter.Enforce(db, agent.AgentID, maxRunning(limiter.Identity{"case": until}, 1)))

		after := find(t, db, agent.AgentID)
		require.Equal(t, models.StatusRunning, after.Status)
		require.Nil(t, after.RunID, "the turn cannot come back")
		require.Zero(t, after.ReservedTokens)
		require.WithinDuration(t, time.Now().Add(database.DefaultLease), *after.LeaseExpiresAt, 10*time.Second)
	}
}

func TestEnforcingAgainRenewsAnUnownedSlot(t *testing.T) {
	t.Parallel()

	db := setup(t)
	rule := maxRunning(tenant, 1)
	require.NoError(t, limiter.Enforce(db, "agent", rule))
	change(t, db, "agent", map[string]any{"lease_expires_at": time.Now().Add(time.Second)})

	before := find(t, db, "agent")

	tx := begin(t, db)
	hot := heapOnlyUpdates(t, tx)
	require.NoError(t, limiter.Enforce(tx, "agent", rule))
	require.Equal(t, hot+1, heapOnlyUpdates(t, tx), "a renewal touches no index, so it is cheap however often it comes")
	require.NoError(t, tx.Commit().Error)

	after := find(t, db, "agent")
	require.WithinDuration(t, time.Now().Add(database.DefaultLease), *after.LeaseExpiresAt, 10*time.Second)

	after.LeaseExpiresAt = before.LeaseExpiresAt
	require.Equal(t, before, after, "all else stays")

	// One that is over, too, if nobody else has the slot by now.
	change(t, db, "agent", map[string]any{"lease_expires_at": ago(time.Second)})
	require.NoError(t, limiter.Enforce(db, "agent", rule))
	require.WithinDuration(t, time.Now().Add(database.DefaultLease), *find(t, db, "agent").LeaseExpiresAt, 10*time.Second)

	change(t, db, "agent", map[string]any{"lease_expires_at": ago(time.Second)})
	require.NoError(t, limiter.Enforce(db, "another", rule))
	requireDenied(t, limiter.Enforce(db, "agent", rule), limiter.LimitRunningAgents)
}

func heapOnlyUpdates(t *testing.T, tx *gorm.DB) (updates int) {
	t.Helper()

	require.NoError(t, tx.Raw("SELECT n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = 'legion_agents'").Scan(&updates).Error)

	return updates
}

func TestAVerdictRevokesTheExpiredTurnsThatItNeeds(t *testing.T) {
	t.Parallel()

	db := setup(t)
	expired := turn(t, "expired", member, -time.Second)
	expired.ReservedTokens = 900
	insert(t, db, expired, turn(t, "live", tenant, time.Hour))

	before := find(t, db, "expired")

	decision, err := limiter.Admit(db, "agent", maxRunning(tenant, 2))
	require.NoError(t, err)
	require.EqualValues(t, 2, decision.Rules[0].Usage.RunningAgents)

	// Its turn finds its lease gone; run and status stay for those who resume it.
	revoked := find(t, db, "expired")
	require.Nil(t, revoked.LeaseExpiresAt)

	revoked.LeaseExpiresAt = before.LeaseExpiresAt
	require.Equal(t, before, revoked)

	require.NotNil(t, find(t, db, "live").LeaseExpiresAt)
}

func TestAVerdictRevokesTheExpiredReservationsThatItNeeds(t *testing.T) {
	t.Parallel()

	db := setup(t)
	expired := turn(t, "expired", member, -time.Second)
	expired.ReservedTokens = 900
	live := turn(t, "live", tenant, time.Hour)
	live.ReservedTokens = 90
	insert(t, db, expired, live)

	decision, err := limiter.Admit(db, "agent", maxTokens(tenant, 100))
	require.NoError(t, err)
	require.EqualValues(t, 90, decision.Rules[0].Usage.ReservedTokens)
	require.Nil(t, find(t, db, "expired").LeaseExpiresAt)
	require.NotNil(t, find(t, db, "live").LeaseExpiresAt)
	require.Equal(t, models.StatusIdle, find(t, db, "agent").Status)
}

func TestARevocationIsKeptThoughNothingElseIsWritten(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "agent", recordOnly(tenant)))

	expired := turn(t, "expired", tenant, -time.Second)
	expired.ReservedTokens = 900
	insert(t, db, expired)
	before := find(t, db, "agent")

	require.NoError(t, limiter.Enforce(db, "agent", maxTokens(tenant, 100)))
	require.Equal(t, before, find(t, db, "agent"))
	require.Nil(t, find(t, db, "expired").LeaseExpiresAt)
}

func TestAVerdictLeavesExpiredTurnsAloneThatItDoesNotNeed(t *testing.T) {
	t.Parallel()

	reserving := func(agent models.LegionAgent) models.LegionAgent {
		agent.ReservedTokens = 40

		return agent
	}

	for _, test := range []struct {
		name   string
		rules  []limiter.Rule
		denied bool
	}{
		{"there is room with them", []limiter.Rule{maxRunning(tenant, 3), maxTokens(tenant, 41)}, false},
		{"they are in no group of the call", []limiter.Rule{maxRunning(otherTenant, 1)}, false},
		{"nothing counts slots or reservations", []limiter.Rule{maxAgents(tenant, 3), maxEvals(tenant, 1)}, false},
		{"another limit denies", []limiter.Rule{maxRunning(tenant, 3), maxAgents(tenant, 2)}, true},
		{"another limit denies, and so does theirs", []limiter.Rule{maxRunning(tenant, 2), maxAgents(tenant, 2)}, true},
		{"the live ones alone are too many", []limiter.Rule{maxRunning(tenant, 1)}, true},
		{"zero denies anyway", []limiter.Rule{maxRunning(tenant, 0)}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db := setup(t)
			insert(t, db, reserving(turn(t, "expired", tenant, -time.Second)), turn(t, "live", tenant, time.Hour))

			before := find(t, db, "expired")

			err := limiter.Enforce(db, "agent", test.rules...)
			if test.denied {
				require.ErrorIs(t, err, limiter.ErrExceeded)
			} else {
				require.NoError(t, err)
			}

			require.Equal(t, before, find(t, db, "expired"))
		})
	}
}

func TestRevokingTouchesOnlyExpiredTurnsOfTheGroup(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db,
		turn(t, "expired", tenant, -time.Second),
		turn(t, "live", tenant, time.Hour),
		unowned(t, "unowned", tenant, time.Hour),
		unowned(t, "expired unowned", tenant, -time.Second),
		turn(t, "expired elsewhere", otherTenant, -time.Second),
		models.LegionAgent{AgentID: "idle", Metadata: document(t, tenant), LeaseExpiresAt: pointer(ago(time.Second))},
	)

	others := []string{"expired elsewhere", "expired unowned", "idle", "live", "unowned"}
	versions := func() (rows []string) {
		require.NoError(t, db.Raw("SELECT xmin || ' ' || agent::text FROM legion_agents AS agent WHERE agent_id IN ? ORDER BY agent_id", others).
			Scan(&rows).Error)

		return rows
	}
	before := versions()

	tx := begin(t, db)
	require.NoError(t, limiter.Enforce(tx, "agent", maxRunning(tenant, 3)))

	// It has not even locked them: their turns go on while this transaction is open.
	var free []string

	require.NoError(t, db.Model(&models.LegionAgent{}).Where("agent_id <> ?", "agent").Order("agent_id").
		Clauses(clause.Locking{Strength: "UPDATE", Options: "SKIP LOCKED"}).Pluck("agent_id", &free).Error)
	require.Equal(t, others, free)

	require.NoError(t, tx.Commit().Error)
	require.Nil(t, find(t, db, "expired").LeaseExpiresAt)
	require.Equal(t, before, versions())
}

func TestAnExpiredTurnWhoseRowIsLockedCountsAsHeld(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, turn(t, "first", tenant, -time.Second), turn(t, "second", tenant, -time.Second))

	// What has the row may be a renewal that began in time.
	renewal := begin(t, db)
	require.NoError(t, renewal.Exec("UPDATE legion_agents SET conversation_state = 'x' WHERE agent_id = 'first'").Error)

	before := snapshot(t, db)
	requireDenied(t, limiter.Enforce(db.WithContext(impatient(t)), "agent", maxRunning(tenant, 1)), limiter.LimitRunningAgents)
	require.Equal(t, before, snapshot(t, db), "the other is not revoked for nothing")

	decision, err := limiter.Admit(db.WithContext(impatient(t)), "agent", maxRunning(tenant, 2))
	require.NoError(t, err)
	require.EqualValues(t, 2, decision.Rules[0].Usage.RunningAgents)
	require.NotNil(t, find(t, db, "first").LeaseExpiresAt)
	require.Nil(t, find(t, db, "second").LeaseExpiresAt)

	require.NoError(t, renewal.Rollback().Error)
	require.NoError(t, limiter.Enforce(db, "another", maxRunning(tenant, 2)))
	require.Nil(t, find(t, db, "first").LeaseExpiresAt)
}

func TestARowThatIsMerelyReferencedIsRevoked(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, turn(t, "expired", tenant, -time.Second))
	require.NoError(t, db.Exec("CREATE TABLE messages (agent_id text REFERENCES legion_agents)").Error)

	message := begin(t, db)
	require.NoError(t, message.Exec("INSERT INTO messages VALUES ('expired')").Error)

	require.NoError(t, limiter.Enforce(db.WithContext(impatient(t)), "agent", maxRunning(tenant, 1)))
	require.Nil(t, find(t, db, "expired").LeaseExpiresAt)
}

// snapshotOfRegistry is the part of snapshot that a first use adds.
func snapshotOfRegistry(t *testing.T, db *gorm.DB) []string {
	t.Helper()

	var rows []string

	require.NoError(t, db.Raw("SELECT 'identity ' || registered.xmin || ' ' || registered::text FROM legion_agents_identities AS registered").
		Scan(&rows).Error)

	return rows
}
