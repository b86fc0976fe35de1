package limiter_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/legion-gorm/legion/internal/reference"
	"github.com/legion-gorm/legion/models"
)

// What happens at one moment for the model takes a while in the database. So its ages
// are a little higher, and times are compared on the grid of modelGrain.
const (
	// modelEarly is how much younger an entry may seem, since its time is rounded up
	// to the millisecond.
	modelEarly = 2 * time.Millisecond

	// modelLate is how much time a sequence may take.
	modelLate = modelGrain / 3
)

// modelRows are the two tables at one moment.
type modelRows struct {
	Agents     []modelRow `json:"agents"`
	Identities []string   `json:"identities"`

	// Now is the database's clock.
	Now time.Time `json:"now"`
}

// modelRow is a row, with times as ages in seconds.
type modelRow struct {
	AgentID  string         `json:"agent_id"`
	Version  string         `json:"version"`
	Status   models.Status  `json:"status"`
	Metadata *string        `json:"metadata"`
	Parent   *string        `json:"parent"`
	State    *string        `json:"state"`
	Usage    []models.Usage `json:"usage"`
	Reserved int64          `json:"reserved"`
	Run      *string        `json:"run"`
	Lease    *float64       `json:"lease"`
	Started  *float64       `json:"started"`
	Updated  *float64       `json:"updated"`
	Deleted  *float64       `json:"deleted"`
}

// readRows reads everything in one statement. The metadata is text, in which numbers
// keep their precision.
func (m *modelMachine) readRows(t *rapid.T) modelRows {
	var text string

	require.NoError(t, m.db.Raw(`
SELECT json_build_object(
  'now', now,
  'agents', (SELECT coalesce(json_agg(json_build_object(
    'agent_id', agent_id, 'version', xmin::text || ctid::text, 'status', status, 'metadata', metadata::text, 'usage', usage,
    'parent', parent_agent_id, 'state', convert_from(conversation_state, 'UTF8'),
    'reserved', reserved_tokens, 'run', run_id, 'lease', extract(epoch FROM now - lease_expires_at),
    'started', extract(epoch FROM now - started_at), 'updated', extract(epoch FROM now - updated_at),
    'deleted', extract(epoch FROM now - deleted_at)) ORDER BY agent_id), '[]') FROM legion_agents),
  'identities', (SELECT coalesce(json_agg(identity::text), '[]') FROM legion_agents_identities))
FROM (SELECT clock_timestamp() AS now) AS clock`).Row().Scan(&text))

	var rows modelRows

	require.NoError(t, json.Unmarshal([]byte(text), &rows))

	return rows
}

// version changes with every write to the agent's row.
func (r modelRows) version(agentID string) string {
	for _, row := range r.Agents {
		if row.AgentID == agentID {
			return row.Version
		}
	}

	return "no row"
}

// identities returns the registered identities in the model's notation.
func (r modelRows) identities(t *rapid.T) []string {
	identities := make(map[string]reference.Identity)

	for _, text := range r.Identities {
		identity, err := reference.ParseIdentity(text)
		require.NoError(t, err)

		identities[identity.String()] = identity
	}

	require.Len(t, identities, len(r.Identities), "an identity is registered twice: %v", r.Identities)

	return modelSorted(identities)
}

func modelSorted(identities map[string]reference.Identity) []string {
	sorted := make([]string, 0, len(identities))
	for text := range identities {
		sorted = append(sorted, text)
	}

	slices.Sort(sorted)

	return sorted
}

// agents returns the rows in the model's terms.
func (r modelRows) agents(t *rapid.T, now time.Duration) []reference.Agent {
	agents := make([]reference.Agent, len(r.Agents))

	moment := func(age *float64) reference.Moment {
		if age == nil {
			return reference.Moment{}
		}

		return reference.At(now - modelAge(t, time.Duration(*age*float64(time.Second))))
	}

	for i, row := range r.Agents {
		agent := reference.Agent{
			ID:       row.AgentID,
			Started:  moment(row.Started),
			Running:  row.Status == models.StatusRunning,
			Lease:    moment(row.Lease),
			Reserved: row.Reserved,
			Updated:  moment(row.Updated).At,
			Deleted:  moment(row.Deleted),
		}

		for column, field := range map[*string]*string{row.Run: &agent.Run, row.Parent: &agent.Parent, row.State: &agent.Conversation} {
			if column != nil {
				*field = *column
			}
		}

		if row.Metadata != nil {
			identity, err := reference.ParseIdentity(*row.Metadata)
			require.NoError(t, err)

			agent.Identity = identity
		}

		for _, entry := range row.Usage {
			at := now - modelAge(t, r.Now.Sub(entry.At))
			agent.Usage = modelUnfold(agent.Usage, reference.Entry{ID: entry.ID, At: at, Tokens: entry.TotalTokens, Evals: entry.Evals})
		}

		agents[i] = agent
	}

	return agents
}

// modelAge returns the age that the model has in the place of the database's.
func modelAge(t *rapid.T, age time.Duration) time.Duration {
	age += modelEarly
	late := (age%modelGrain + modelGrain) % modelGrain

	require.Less(t, late, modelLate, "a time is off the grid")

	return age - late
}

// modelWait is modelAge for a time to wait, which the database gives a little shorter.
func modelWait(t *rapid.T, wait time.Duration) time.Duration { return -modelAge(t, -wait) }

// modelLines writes the rows for people to compare.
func modelLines(agents []reference.Agent) string {
	lines := make([]string, len(agents))
	for i, agent := range agents {
		lines[i] = agent.String()
	}

	return strings.Join(lines, "\n")
}

// shift moves all times of the tables into the past.
func (m *modelMachine) shift(by time.Duration) error {
	// What is then exactly as old as a window is long, for the model, must not be
	// younger because its time was rounded up.
	by += modelEarly
	interval := fmt.Sprintf("(%d * interval '1 microsecond')", by.Microseconds())

	return m.db.Exec(`
UPDATE legion_agents SET
  started_at = started_at - ` + interval + `,
  created_at = created_at - ` + interval + `,
  updated_at = updated_at - ` + interval + `,
  deleted_at = deleted_at - ` + interval + `,
  lease_expires_at = lease_expires_at - ` + interval + `,
  usage = (SELECT coalesce(jsonb_agg(entry || jsonb_build_object('at', (entry -> 'at')::bigint - ` + fmt.Sprint(by.Milliseconds()) + `)
      ORDER BY position), '[]')
    FROM jsonb_array_elements(usage) WITH ORDINALITY AS element (entry, position))`).Error
}

// writeTurn writes the columns of a turn, and reports whether there was a row.
func (m *modelMachine) writeTurn(turn modelTurn) (bool, error) {
	status := models.StatusIdle
	if turn.Running {
		status = models.StatusRunning
	}

	var run *string
	if turn.Run != "" {
		run = &turn.Run
	}

	lease := "NULL"
	if turn.HasLease {
		lease = fmt.Sprintf("clock_timestamp() + %d * interval '1 microsecond'", turn.Lease.Microseconds())
	}

	result := m.db.Exec(`UPDATE legion_agents SET status = ?, run_id = ?, reserved_tokens = ?, lease_expires_at = `+lease+` WHERE agent_id = ?`,
		status, run, turn.Reserved, turn.Agent)

	return result.RowsAffected > 0, result.Error
}
