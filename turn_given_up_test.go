package legion_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// An application that has given up a run for dead may be wrong: then the run is told, and
// its state does not vanish without a word.
func TestATurnThatWasGivenUpCannotEnd(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	agents := store.For[models.LegionAgent](db)
	idle := models.StatusIdle

	turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
	require.NoError(t, err)
	require.NoError(t, db.Exec("UPDATE legion_agents SET lease_expires_at = now() - interval '1 millisecond'").Error)
	require.NoError(t, agents.Save(t.Context(), store.Patch{AgentID: "one", Status: &idle, ConversationState: []byte("given up")}))

	// It is written by End, as the turn is not one of PerStep.
	require.NoError(t, turn.Checkpoint(t.Context(), []byte("late")))
	require.ErrorIs(t, turn.End(t.Context()), legion.ErrLeaseLost)

	agent, err := agents.Get(t.Context(), "one")
	require.NoError(t, err)
	require.Equal(t, "given up", string(agent.ConversationState))
	requireIdle(t, db, "one")
}
