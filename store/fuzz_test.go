package store_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// FuzzSaveAndAppend gives any texts and counts: they are refused with an error of ours, or
// read back as they were written.
func FuzzSaveAndAppend(f *testing.F) {
	for _, text := range []string{"", "a", "\x00", "\xff", "é", `"`, `\`, "'", "$1", "?", "{}", strings.Repeat("x", 513), strings.Repeat("y", 5000)} {
		f.Add("agent", text, "parent", []byte("state"), "entry", int64(1), int64(2))
		f.Add(text, "type", "parent", []byte(text), "entry", int64(-1), int64(2))
		f.Add("agent", "type", text, []byte{0, 255}, "entry", int64(math.MaxInt64), int64(math.MaxInt64))
		f.Add("agent", "type", "parent", []byte{}, text, int64(0), int64(0))
	}

	db := pgtest.Open(f)
	require.NoError(f, db.AutoMigrate(&models.LegionAgent{}, &models.LegionIdentity{}))

	agents := store.For[models.LegionAgent](db)
	ctx := context.Background()

	f.Fuzz(func(t *testing.T, agentID, agentType, parent string, state []byte, entryID string, tokens, evals int64) {
		require.NoError(t, db.Exec("TRUNCATE legion_agents, legion_agents_identities").Error)

		if state == nil {
			state = []byte{}
		}

		patch := store.Patch{AgentID: agentID, AgentType: &agentType, ParentAgentID: &parent, ConversationState: state}
		if err := agents.Save(ctx, patch); err != nil {
			require.True(t, errors.Is(err, store.ErrInvalidAgentID) || errors.Is(err, store.ErrInvalidArgument), "%v", err)

			return
		}

		saved, err := agents.Get(ctx, agentID)
		require.NoError(t, err)
		require.Equal(t, agentType, *saved.AgentType)
		require.Equal(t, parent, *saved.ParentAgentID)
		require.Equal(t, state, saved.ConversationState)

		appended, err := agents.AppendUsage(ctx, agentID, models.Usage{ID: entryID, TotalTokens: tokens, Evals: evals, Model: agentType})
		if err != nil {
			require.ErrorIs(t, err, store.ErrInvalidUsage)

			return
		}

		require.True(t, appended)

		saved, err = agents.Get(ctx, agentID)
		require.NoError(t, err)

		entries, err := saved.UsageEntries()
		require.NoError(t, err)
		require.Len(t, entries, 1)
		require.Equal(t, tokens, entries[0].TotalTokens)
		require.Equal(t, evals, entries[0].Evals)

		if entryID != "" {
			require.Equal(t, entryID, entries[0].ID)
		}
	})
}
