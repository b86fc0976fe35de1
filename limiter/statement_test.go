package limiter_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/limiter"
)

var update = flag.Bool("update", false, "write the golden files in testdata anew")

// What a call sends to the server, statement by statement, stands in testdata. A
// change there is a change of the protocol or of a plan: read it as such.
func TestStatements(t *testing.T) {
	t.Parallel()

	full := limiter.Rule{Name: "tenant", Identity: tenant, Policy: limiter.Policy{
		Window: time.Minute, MaxAgents: limiter.Max(10), MaxRunningAgents: limiter.Max(5), MaxTokens: limiter.Max(1000), MaxEvals: limiter.Max(100),
	}}
	everyone := limiter.Rule{Identity: limiter.Everyone(), Policy: limiter.Policy{Window: 24 * time.Hour, MaxAgents: limiter.Max(100), MaxTokens: limiter.Max(50)}}

	for _, test := range []struct {
		name    string
		prepare func(t *testing.T, db *gorm.DB)
		call    func(t *testing.T, db *gorm.DB)
	}{
		{
			name:    "admission",
			prepare: known(recordOnly(tenant)),
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Enforce(db, "agent", full))
			},
		},
		{
			name:    "admission_under_several_rules",
			prepare: known(recordOnly(tenant), recordOnly(member), recordOnly(limiter.Everyone())),
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Enforce(db, "agent", maxAgents(tenant, 5), maxRunning(member, 1), everyone))
			},
		},
		{
			name: "nothing_to_write",
			prepare: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Enforce(db, "agent", recordOnly(tenant)))
			},
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Enforce(db, "agent", maxAgents(tenant, 5)))
			},
		},
		{
			name: "renewal_of_a_slot",
			prepare: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Enforce(db, "agent", maxRunning(tenant, 5)))
			},
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Enforce(db, "agent", maxRunning(tenant, 5)))
			},
		},
		{
			name:    "denial",
			prepare: known(recordOnly(tenant)),
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				requireDenied(t, limiter.Enforce(db, "agent", maxEvals(tenant, 0)), limiter.LimitEvals)
			},
		},
		{
			name: "revocation",
			prepare: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				known(recordOnly(tenant), recordOnly(otherTenant))(t, db)
				insert(t, db, turn(t, "expired", tenant, -time.Second))
			},
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Enforce(db, "agent", maxRunning(tenant, 1)))
			},
		},
		{
			name:    "first_use",
			prepare: known(recordOnly(otherTenant)),
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Enforce(db, "agent", recordOnly(member)))
			},
		},
		{
			name:    "first_use_in_a_callers_transaction",
			prepare: known(recordOnly(otherTenant)),
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, db.Transaction(func(tx *gorm.DB) error { return limiter.Enforce(tx, "agent", recordOnly(member)) }))
			},
		},
		{
			name:    "denial_in_a_callers_transaction",
			prepare: known(recordOnly(tenant)),
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
					requireDenied(t, limiter.Enforce(tx, "agent", maxAgents(tenant, 0)), limiter.LimitAgents)

					return nil
				}))
			},
		},
		{
			name: "first_call_of_all",
			prepare: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, db.Exec("DROP TABLE legion_agents_identities").Error)
			},
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Enforce(db, "agent", recordOnly(tenant)))
			},
		},
		{
			name:    "several_agents",
			prepare: known(recordOnly(tenant), recordOnly(otherTenant)),
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.EnforceAll(db,
					limiter.Admission{AgentID: "agent", Rules: []limiter.Rule{maxAgents(tenant, 5)}},
					limiter.Admission{AgentID: "another", Rules: []limiter.Rule{maxRunning(otherTenant, 5)}},
				))
			},
		},
		{
			name:    "turn",
			prepare: known(recordOnly(tenant)),
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				requireBegins(t, db, run.Begin{ID: "run", AgentType: "research", ParentID: "parent", Reserve: 100}, full)
			},
		},
		{
			name: "turn_without_rules",
			prepare: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Enforce(db, "agent", recordOnly(tenant)))
			},
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				requireBegins(t, db, run.Begin{ID: "run"})
			},
		},
		{
			name: "turn_that_had_begun",
			prepare: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				requireBegins(t, db, run.Begin{ID: "run"}, recordOnly(tenant))
			},
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				requireBegins(t, db, run.Begin{ID: "run"}, recordOnly(tenant))
			},
		},
		{
			name: "turn_that_resumes",
			prepare: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				known(recordOnly(tenant))(t, db)
				insert(t, db, turn(t, "agent", tenant, -time.Second))
			},
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				requireBegins(t, db, run.Begin{ID: "next", Resumes: *find(t, db, "agent").RunID, Reserve: 7}, full)
			},
		},
		{
			name: "release",
			prepare: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Enforce(db, "agent", maxRunning(tenant, 5)))
			},
			call: func(t *testing.T, db *gorm.DB) {
				t.Helper()
				require.NoError(t, limiter.Release(db, "agent"))
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db := setup(t)
			recorded, statements := openRecorded(t, db)
			test.prepare(t, recorded)
			statements.reset()
			test.call(t, recorded)
			requireGolden(t, filepath.Join("testdata", "statements", test.name+".sql"), render(t, statements.take()))
		})
	}
}

func requireBegins(t *testing.T, db *gorm.DB, begin run.Begin, rules ...limiter.Rule) {
	t.Helper()

	_, _, err := limiter.AdmitTurn(db, limiter.Admission{AgentID: "agent", Rules: rules}, begin)
	require.NoError(t, err)
}

// known makes the rules' identities known to the registry, and the registry to this
// pool.
func known(rules ...limiter.Rule) func(*testing.T, *gorm.DB) {
	return func(t *testing.T, db *gorm.DB) {
		t.Helper()

		for _, rule := range rules {
			for range 2 {
				require.NoError(t, limiter.Enforce(db, fmt.Sprintf("earlier agent of %v", rule.Identity), rule))
			}
		}
	}
}

// render writes statements as they could be run, each with its parameters below.
func render(t *testing.T, statements []recordedStatement) string {
	t.Helper()

	var text strings.Builder

	for _, statement := range statements {
		fmt.Fprintf(&text, "%s;\n", statement.text)

		for i, argument := range statement.arguments {
			switch argument := argument.(type) {
			case time.Time:
				fmt.Fprintf(&text, "-- $%d = a time\n", i+1)
			case string:
				fmt.Fprintf(&text, "-- $%d = '%s'\n", i+1, argument)
			default:
				fmt.Fprintf(&text, "-- $%d = %v\n", i+1, argument)
			}
		}

		text.WriteString("\n")
	}

	return text.String()
}

func requireGolden(t *testing.T, path, actual string) {
	t.Helper()

	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(actual), 0o600))
	}

	expected, err := os.ReadFile(path)
	require.NoError(t, err, "go test ./limiter -run TestStatements -update writes it")

	// One by one, so that a failure shows the statement that differs and no other.
	expectedStatements, actualStatements := strings.Split(string(expected), "\n\n"), strings.Split(actual, "\n\n")
	for i := range min(len(expectedStatements), len(actualStatements)) {
		require.Equal(t, expectedStatements[i], actualStatements[i], "statement %d", i+1)
	}

	require.Len(t, actualStatements, len(expectedStatements))
}
