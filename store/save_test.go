package store_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// everything is a row with a value of its own in every column. It is idle.
var everything = map[string]any{
	"agent_type": "chat", "parent_agent_id": "parent", "metadata": `{"tenant": "acme"}`, "usage": `[{"id": "a", "at": 1, "total_tokens": 5}]`,
	"conversation_state": []byte("state"), "run_id": "run", "started_at": "2026-01-01T00:00:00Z", "created_at": "2026-01-02T00:00:00Z",
	"updated_at": "2026-01-03T00:00:00Z",
}

func TestSaveInsertsANewAgentWithDefaults(t *testing.T) {
	t.Parallel()

	b := setup(t)
	require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: agentID, AgentType: pointer("chat"), Status: pointer(models.StatusIdle)}))

	agent := b.row(t, agentID)
	require.WithinDuration(t, time.Now(), agent.CreatedAt, time.Minute)
	require.WithinDuration(t, agent.CreatedAt, agent.UpdatedAt, time.Second)
	require.Equal(t, models.LegionAgent{
		AgentID: agentID, AgentType: pointer("chat"), Status: models.StatusIdle, Usage: []byte("[]"),
		CreatedAt: agent.CreatedAt, UpdatedAt: agent.UpdatedAt,
	}, agent)
}

func TestSaveWritesTheGivenFieldsAndNoOther(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		patch  store.Patch
		change func(*models.LegionAgent)
	}{
		"only a type":   {store.Patch{AgentType: pointer("tool")}, func(a *models.LegionAgent) { a.AgentType = pointer("tool") }},
		"only a parent": {store.Patch{ParentAgentID: pointer("other")}, func(a *models.LegionAgent) { a.ParentAgentID = pointer("other") }},
		"only a state":  {store.Patch{ConversationState: []byte{0, 255}}, func(a *models.LegionAgent) { a.ConversationState = []byte{0, 255} }},
		"only a status": {store.Patch{Status: pointer(models.StatusIdle)}, func(*models.LegionAgent) {}},
		"empty values": {
			store.Patch{AgentType: pointer(""), ParentAgentID: pointer(""), ConversationState: []byte{}},
			func(a *models.LegionAgent) {
				a.AgentType, a.ParentAgentID, a.ConversationState = pointer(""), pointer(""), []byte{}
			},
		},
		"all": {
			store.Patch{
				AgentType: pointer("tool"), ParentAgentID: pointer("other"), ConversationState: []byte("new"), Status: pointer(models.StatusIdle),
			},
			func(a *models.LegionAgent) {
				a.AgentType, a.ParentAgentID, a.ConversationState = pointer("tool"), pointer("other"), []byte("new")
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			b := setupAgent(t)
			b.set(t, agentID, everything)
			expected := b.row(t, agentID)

			test.patch.AgentID = agentID
			require.NoError(t, b.agents.Save(t.Context(), test.patch))

			actual := b.row(t, agentID)
			require.WithinDuration(t, time.Now(), actual.UpdatedAt, time.Minute)

			test.change(&expected)
			expected.UpdatedAt = actual.UpdatedAt
			require.Equal(t, expected, actual)
		})
	}
}

func TestSaveOfOnlyAnIDInsertsOrChangesNothing(t *testing.T) {
	t.Parallel()

	b := setup(t)
	require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: agentID}))
	version := b.version(t, agentID)

	require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: agentID}))
	require.Equal(t, version, b.version(t, agentID))
}

func TestSaveOfIdle(t *testing.T) {
	t.Parallel()

	type slot struct {
		Status         models.Status
		RunID          *string
		Lease          bool
		ReservedTokens int64
	}

	for name, test := range map[string]struct {
		runID, lease any
		after        slot
		err          error
	}{
		"frees an unowned slot":                  {nil, inHours(1), slot{Status: models.StatusIdle}, nil},
		"frees an unowned slot that is over":     {nil, inHours(-1), slot{Status: models.StatusIdle}, nil},
		"gives up a run whose lease is over":     {"run", inHours(-1), slot{Status: models.StatusIdle}, nil},
		"gives up a run whose slot was revoked":  {"run", nil, slot{Status: models.StatusIdle}, nil},
		"is refused under a live run, of course": {"run", inHours(1), slot{models.StatusRunning, pointer("run"), true, 40}, store.ErrAgentRunning},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			b := setupAgent(t)
			b.set(t, agentID, map[string]any{
				"status": "running", "run_id": test.runID, "lease_expires_at": test.lease, "reserved_tokens": 40, "agent_type": "before",
			})
			before := b.row(t, agentID)

			err := b.agents.Save(t.Context(), store.Patch{AgentID: agentID, AgentType: pointer("after"), Status: pointer(models.StatusIdle)})
			require.ErrorIs(t, err, test.err)

			after := b.row(t, agentID)
			held := slot{after.Status, after.RunID, after.LeaseExpiresAt != nil, after.ReservedTokens}
			require.Equal(t, test.after, held)

			if test.err != nil {
				require.Equal(t, before, after, "nothing is written")
			} else {
				require.Equal(t, "after", *after.AgentType)
			}
		})
	}
}

// By its ID an End that is retried knows its own.
func TestSaveOfIdleKeepsTheIDOfARunThatHasEnded(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	b.set(t, agentID, map[string]any{"status": "idle", "run_id": "run"})

	require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: agentID, Status: pointer(models.StatusIdle)}))
	require.Equal(t, "run", *b.row(t, agentID).RunID)
}

func TestSaveUnderALiveRunWritesWhatIsNotTheStatus(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	b.set(t, agentID, map[string]any{"status": "running", "run_id": "run", "lease_expires_at": inHours(1), "reserved_tokens": 40})
	expected := b.row(t, agentID)

	require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: agentID, ConversationState: []byte("step 1")}))

	actual := b.row(t, agentID)
	expected.ConversationState, expected.UpdatedAt = []byte("step 1"), actual.UpdatedAt
	require.Equal(t, expected, actual)
}

func TestSaveDoesNotRestoreADeletedAgent(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	require.NoError(t, b.agents.Delete(t.Context(), agentID))
	require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: agentID, ConversationState: []byte("late")}))

	agent := b.row(t, agentID)
	require.Equal(t, "late", string(agent.ConversationState))
	require.True(t, agent.DeletedAt.Valid)
}

func TestSaveRefusesWhatCannotBeSaved(t *testing.T) {
	t.Parallel()

	agents := store.For[models.LegionAgent](pgtest.Open(t)) // not migrated

	for name, test := range map[string]struct {
		patch store.Patch
		err   error
		text  string
	}{
		"running":          {store.Patch{Status: pointer(models.StatusRunning)}, store.ErrInvalidArgument, "Status"},
		"an unknown state": {store.Patch{Status: pointer(models.Status("secret"))}, store.ErrInvalidArgument, "Status"},
		"its own parent":   {store.Patch{ParentAgentID: pointer(agentID)}, store.ErrInvalidArgument, "ParentAgentID is the agent itself"},
		"a long parent":    {store.Patch{ParentAgentID: pointer(strings.Repeat("x", 513))}, store.ErrInvalidAgentID, "ParentAgentID"},
		"NUL in parent":    {store.Patch{ParentAgentID: pointer("secret\x00")}, store.ErrInvalidAgentID, "ParentAgentID"},
		"NUL in type":      {store.Patch{AgentType: pointer("secret\x00")}, store.ErrInvalidArgument, "AgentType"},
		"no text as type":  {store.Patch{AgentType: pointer("secret\xff")}, store.ErrInvalidArgument, "AgentType"},
	} {
		test.patch.AgentID = agentID
		err := agents.Save(t.Context(), test.patch)
		require.ErrorIs(t, err, test.err, name)
		require.ErrorContains(t, err, test.text, name)
		require.NotContains(t, err.Error(), "secret", name)
		require.True(t, strings.HasPrefix(err.Error(), "legion: "), name)
	}
}

func TestConcurrentSavesOfOneNewAgentAllSucceed(t *testing.T) {
	t.Parallel()

	b := setup(t)

	inParallel(t, 20, func(number int) error {
		patch := store.Patch{AgentID: agentID, AgentType: pointer("chat")}
		if number%2 == 0 {
			patch = store.Patch{AgentID: agentID, ConversationState: []byte("state"), Status: pointer(models.StatusIdle)}
		}

		return b.agents.Save(t.Context(), patch)
	})

	agent := b.row(t, agentID)
	require.Equal(t, "chat", *agent.AgentType)
	require.Equal(t, "state", string(agent.ConversationState))
}

// A verdict that is still under way holds the row: Save has to judge what that leaves.
func TestSaveOfIdleSeesTheRunThatItWaitedFor(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	result := make(chan error, 1)

	require.NoError(t, b.db.Transaction(func(tx *gorm.DB) error {
		err := tx.Exec(`UPDATE legion_agents SET status = 'running', run_id = 'run', lease_expires_at = clock_timestamp() + interval '1 hour'`).Error
		require.NoError(t, err)

		go func() {
			result <- b.agents.Save(t.Context(), store.Patch{AgentID: agentID, Status: pointer(models.StatusIdle)})
		}()
		b.waitUntilBlocked(t, 1)

		return nil
	}))

	require.ErrorIs(t, <-result, store.ErrAgentRunning)
	require.Equal(t, models.StatusRunning, b.row(t, agentID).Status)
}
