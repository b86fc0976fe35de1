package limiter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/internal/testhook"
	"github.com/legion-gorm/legion/limiter"
)

func admitTurn(db *gorm.DB, agentID string, begin run.Begin, rules ...limiter.Rule) error {
	_, _, err := limiter.AdmitTurn(db, limiter.Admission{AgentID: agentID, Rules: rules}, begin)

	return err
}

// The turn has its slot: it takes none from a turn that may still come back.
func TestABeginThatIsRetriedRevokesNothing(t *testing.T) {
	t.Parallel()

	db := setup(t)
	begin := run.Begin{ID: "run"}

	require.NoError(t, admitTurn(db, "agent", begin, maxRunning(tenant, 1)))
	insert(t, db, turn(t, "late", tenant, -time.Second))

	before := find(t, db, "late")

	require.NoError(t, admitTurn(db, "agent", begin, maxRunning(tenant, 1)))
	require.Equal(t, before, find(t, db, "late"))
}

// A renewal that began in time may commit after the turn was measured.
func TestATurnThatIsRenewedAtTheLastMomentIsNotBegunOver(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		begin run.Begin
		err   error
	}{
		"its own":                 {begin: run.Begin{ID: "run of agent"}},
		"its own, resumed":        {begin: run.Begin{ID: "run of agent", Resumes: "an earlier one"}},
		"another one":             {begin: run.Begin{ID: "new"}, err: limiter.ErrAgentRunning},
		"the one that it resumes": {begin: run.Begin{ID: "new", Resumes: "run of agent"}, err: limiter.ErrAgentRunning},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setup(t)
			insert(t, db, turn(t, "agent", tenant, -time.Second))
			require.NoError(t, limiter.Enforce(db, "other", recordOnly(tenant)), "so that the turn is measured once")

			renewed := time.Now().Add(time.Hour).UTC().Truncate(time.Microsecond)
			hooks := testhook.Hooks{At: func(point testhook.Point) {
				if point == testhook.Measured {
					change(t, db, "agent", map[string]any{"lease_expires_at": renewed})
				}
			}}

			test.begin.Reserve = 5
			err := admitTurn(db.WithContext(testhook.With(t.Context(), hooks)), "agent", test.begin, recordOnly(tenant))
			require.ErrorIs(t, err, test.err)

			agent := find(t, db, "agent")
			require.Equal(t, "run of agent", *agent.RunID)
			require.Zero(t, agent.ReservedTokens)
			require.Equal(t, test.err == nil, !agent.LeaseExpiresAt.Equal(renewed), "the lease is whole again")
		})
	}
}

// So it may while the turn waits for its own row, before it takes the slots of others.
func TestATurnThatIsRenewedBeforeARevocationHasBegun(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db,
		turn(t, "agent", tenant, -time.Second), turn(t, "late", tenant, -time.Second), turn(t, "other", tenant, time.Hour))

	hooks := testhook.Hooks{At: func(point testhook.Point) {
		if point == testhook.Expired {
			change(t, db, "agent", map[string]any{"lease_expires_at": time.Now().Add(time.Hour)})
		}
	}}

	err := admitTurn(db.WithContext(testhook.With(t.Context(), hooks)), "agent", run.Begin{ID: "run of agent"}, maxRunning(tenant, 1))
	require.NoError(t, err, "there is no room for another one")
}

// That the work cannot be resumed by anybody is said before that there is no room for it
// now, and registers nothing.
func TestADeletedAgentsTurnIsRefusedBeforeTheRulesAreAsked(t *testing.T) {
	t.Parallel()

	for name, limit := range map[string]int64{"where there is room": 2, "where there is none": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setup(t)
			deleted := turn(t, "agent", tenant, -time.Second)
			deleted.DeletedAt = gorm.DeletedAt{Time: time.Now(), Valid: true}
			insert(t, db, deleted, turn(t, "other", tenant, time.Hour))

			err := admitTurn(db, "agent", run.Begin{ID: "run", Resumes: *deleted.RunID}, maxRunning(tenant, limit))
			require.ErrorIs(t, err, limiter.ErrAgentRunning)
			require.Empty(t, registered(t, db))
		})
	}
}
