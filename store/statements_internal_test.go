package store

import (
	"database/sql"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/models"
)

var update = flag.Bool("update", false, "rewrite the golden SQL in testdata")

// What we send, word by word, with a table in a schema whose name needs its quotes.
func TestStatements(t *testing.T) {
	t.Parallel()

	db, err := gorm.Open(postgres.New(postgres.Config{Conn: &sql.DB{}}), &gorm.Config{DryRun: true, DisableAutomaticPing: true})
	require.NoError(t, err)

	agents := clause.Table{Name: "app.Agents"}
	identities := clause.Table{Name: "app.Agents_identities"}
	before := time.UnixMilli(1_000)
	after := "after"
	agentIDs := keyset{table: agents, column: agentIDColumn, kind: "text"}
	documents := keyset{table: identities, column: "identity", kind: "jsonb"}
	batch := agentIDs.between(&after, "last")
	text := "text"
	idle := models.StatusIdle
	everything := Patch{AgentID: "a", AgentType: &text, ParentAgentID: &text, ConversationState: []byte{}}
	appended := usageAppend{agents: agents, agentID: "a", entry: `{"id": "e"}`, entryID: "e"}
	appendedAt := appended
	appendedAt.at = time.UnixMilli(5)
	appendedInTurn := appended
	appendedInTurn.runID, appendedInTurn.tokens = "run", 7

	for name, test := range map[string]struct {
		statement clause.Expression
		vars      []any
	}{
		"save":             {saveStatement(agents, everything), []any{"a", text, text, []byte{}}},
		"save_idle":        {saveStatement(agents, Patch{AgentID: "a", Status: &idle}), []any{"a"}},
		"save_id":          {saveStatement(agents, Patch{AgentID: "a"}), []any{"a"}},
		"delete":           {deleteStatement(agents, "a"), []any{"a"}},
		"is_deleted":       {isDeletedStatement(agents, "a"), []any{"a"}},
		"append":           {appended.update(), []any{`{"id": "e"}`, "a", "e"}},
		"append_at":        {appendedAt.update(), []any{`{"id": "e"}`, int64(5), "a", "e"}},
		"append_in_turn":   {appendedInTurn.update(), []any{`{"id": "e"}`, "run", int64(7), "a", "e"}},
		"append_look":      {appended.lookStatement(), []any{"e", "a"}},
		"prune_first":      {agentIDs.lastOfBatchStatement(nil), []any{pruneBatch}},
		"prune_next":       {documents.lastOfBatchStatement(&after), []any{after, pruneBatch}},
		"prune_deleted":    {lockDeletedStatement(agents, batch, before), []any{after, "last", before, before, before}},
		"prune_agents":     {deleteAgentsStatement(agents, `["a"]`), []any{`["a"]`}},
		"prune_spent":      {lockSpentStatement(agents, batch, before), []any{int64(1_000), after, "last", int64(1_000)}},
		"prune_usage":      {dropUsageStatement(agents, `["a"]`, before), []any{int64(1_000), `["a"]`}},
		"prune_registered": {lockIdentitiesStatement(identities, documents.between(nil, "last")), []any{"last"}},
		"prune_identities": {deleteIdentitiesStatement(identities, agents, `["{}"]`), []any{`["{}"]`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			statement := db.Exec("?", test.statement).Statement
			require.NoError(t, statement.Error)
			require.Equal(t, test.vars, statement.Vars)

			golden := filepath.Join("testdata", name+".sql")
			if *update {
				require.NoError(t, os.WriteFile(golden, []byte(statement.SQL.String()+"\n"), 0o600))
			}

			expected, err := os.ReadFile(golden)
			require.NoError(t, err)
			require.Equal(t, strings.TrimSuffix(string(expected), "\n"), statement.SQL.String())
		})
	}
}

func TestFoldStepsNestAndFit(t *testing.T) {
	t.Parallel()

	// The oldest is what comes after the first step's age, back to 1970. The next century
	// is far enough.
	olderThan := 130 * 365 * day
	entries := unfoldedEntries + 1 // what is appended

	for i, fold := range foldSteps {
		if i > 0 {
			require.Zero(t, foldSteps[i-1].step%fold.step, "a wider step is made of narrower ones")
		}

		// A range of n steps meets up to n+1 of them.
		entries += int((olderThan-fold.olderThan+fold.step-1)/fold.step) + 1
		olderThan = fold.olderThan
	}

	require.LessOrEqual(t, entries, MaxUsageEntries)
}
