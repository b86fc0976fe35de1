package limiter_test

import (
	"encoding/json"
	"strings"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/legion-gorm/legion/internal/reference"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store" //nolint:depguard // it folds the usage that verdicts count
)

// modelBurst is so many requests of an agent at one moment that the store folds the oldest
// of them. An agent that has usage already is left alone: its times would be folded too,
// by the hour where they are old, while the model's are exact.
type modelBurst struct{ Agent string }

// The requests that count are among the oldest, which are folded, but for the last.
const (
	burstID     = "burst"
	burstTokens = 4
	burstEvals  = 2
)

func (o modelBurst) applies(state reference.State) bool {
	agent, known := state.Agent(o.Agent)

	return known && len(agent.Usage) == 0
}

func (o modelBurst) expected(state reference.State) reference.Operation {
	if !o.applies(state) {
		return reference.Advance{}
	}

	return reference.Append{Agent: o.Agent, Entry: reference.Entry{ID: burstID, At: state.Now(), Tokens: burstTokens, Evals: burstEvals}}
}

func (o modelBurst) GoString() string { return "burst of requests of " + o.Agent }

func (o modelBurst) perform(t *rapid.T, m *modelMachine, _ reference.Result) {
	if !o.applies(m.state) {
		return
	}

	entries := make([]map[string]any, store.MaxUsageEntries)
	for number := range entries {
		entries[number] = map[string]any{"id": burstID, "at": m.rows.Now.UnixMilli()}
	}

	for number := range burstTokens - 1 {
		entries[number]["total_tokens"] = 1
	}

	for number := range burstEvals {
		entries[number]["evals"] = 1
	}

	text, err := json.Marshal(entries)
	require.NoError(t, err)
	require.NoError(t, m.db.Exec("UPDATE legion_agents SET usage = ?::jsonb WHERE agent_id = ?", string(text), o.Agent).Error)

	appended, err := m.store.AppendUsage(t.Context(), o.Agent, models.Usage{ID: burstID + ", the last", TotalTokens: 1})
	require.NoError(t, err)
	require.True(t, appended)

	var left int

	require.NoError(t, m.db.Raw("SELECT jsonb_array_length(usage) FROM legion_agents WHERE agent_id = ?", o.Agent).Scan(&left).Error)
	require.Less(t, left, store.MaxUsageEntries/2, "nothing was folded")

	m.seen["folded"]++
}

// modelUnfold adds an entry to those of a row: what is left of a burst is one, as it is in
// the model.
func modelUnfold(entries []reference.Entry, entry reference.Entry) []reference.Entry {
	if entry.ID != "" && !strings.HasPrefix(entry.ID, burstID) {
		return append(entries, entry)
	}

	entry.ID = burstID

	for i, other := range entries {
		if other.ID == burstID && other.At == entry.At {
			entries[i].Tokens += entry.Tokens
			entries[i].Evals += entry.Evals

			return entries
		}
	}

	return append(entries, entry)
}
