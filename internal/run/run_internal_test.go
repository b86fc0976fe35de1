package run

import (
	"database/sql"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/fault"
)

var update = flag.Bool("update", false, "rewrite the golden SQL in testdata")

// What we send, word by word, with a table in a schema whose name needs its quotes.
func TestStatements(t *testing.T) {
	t.Parallel()

	db, err := gorm.Open(postgres.New(postgres.Config{Conn: &sql.DB{}}), &gorm.Config{DryRun: true, DisableAutomaticPing: true})
	require.NoError(t, err)

	agents := clause.Table{Name: "app.Agents"}
	turn := Run{AgentID: "agent", ID: "run"}

	for name, test := range map[string]struct {
		statement clause.Expression
		vars      []any
	}{
		"checkpoint":  {turn.checkpointStatement(agents, []byte("state")), []any{[]byte("state"), "agent", "run"}},
		"end":         {turn.endStatement(agents, nil), []any{"agent", "run"}},
		"end_state":   {turn.endStatement(agents, []byte("state")), []any{[]byte("state"), "agent", "run"}},
		"interrupt":   {turn.interruptStatement(agents), []any{"agent", "run"}},
		"interrupted": {interruptedStatement(agents, "after", 5), []any{"after", 5}},
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

func TestValidateID(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		id    string
		valid bool
	}{
		"one byte":      {"a", true},
		"the longest":   {strings.Repeat("é", MaxIDBytes/2), true},
		"a random one":  {NewID(), true},
		"empty":         {"", false},
		"too long":      {strings.Repeat("a", MaxIDBytes+1), false},
		"NUL":           {"a\x00", false},
		"invalid UTF-8": {"\xff", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			err := ValidateID(test.id)
			if test.valid {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, fault.ErrInvalidTurn)
				require.ErrorContains(t, err, "RunID")
			}
		})
	}
}
