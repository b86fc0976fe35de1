package limiter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/run"
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
