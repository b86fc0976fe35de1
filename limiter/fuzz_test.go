package limiter_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/internal/reference"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// oddTexts are seeds for names, values and IDs.
var oddTexts = []string{
	"", "a", "tenant", "\x00", "a\x00b", "\xff\xfe", "é", "e\u0301", "\u2028", "🙂", `"`, `\`, `\u0000`, "'", "$1", "?", "@name", "{}", "null",
	strings.Repeat("x", 64), strings.Repeat("x", 65), strings.Repeat("y", 512), strings.Repeat("y", 513), strings.Repeat("z", 2001),
}

// FuzzEnforce gives any texts and numbers as an identity and an agent's ID: they are refused
// with an error of ours, or recorded as they are and counted as the model says.
func FuzzEnforce(f *testing.F) {
	for i, text := range oddTexts {
		f.Add(text, "value", "agent", "1", false)
		f.Add("tenant", text, "agent", "1.0", false)
		f.Add("tenant", "value", text, "1e3", true)
		f.Add("tenant", "value", "agent", text, true)
		f.Add(text, oddTexts[len(oddTexts)-1-i], text, "-0.00", true)
	}

	for _, number := range []string{"0", "-0", "1", "1.0", "10e-1", "1e400", "1e-400", "9007199254740993", "18446744073709551616", "0x10", "01", " 1", "1 ", "NaN"} {
		f.Add("tenant", "value", "agent", number, true)
	}

	db := fuzzDatabase(f)

	f.Fuzz(func(t *testing.T, name, value, agentID, number string, numeric bool) {
		require.NoError(t, db.Exec("TRUNCATE legion_agents, legion_agents_identities").Error)

		identity := limiter.Identity{name: value}
		if numeric {
			identity = limiter.Identity{name: json.Number(number)}
		}

		err := limiter.Enforce(db, agentID, maxAgents(identity, 1))
		if err != nil {
			requireOurs(t, err, value, number)
			require.Empty(t, agentIDs(t, db))

			return
		}

		modelled, err := reference.NewIdentity(identity)
		require.NoError(t, err, "the model refuses what was admitted")

		again, err := reference.NewIdentity(fuzzIdentity(t, find(t, db, agentID).Metadata))
		require.NoError(t, err)
		require.Equal(t, modelled, again)

		// The agent itself counts once, and another one is denied.
		require.NoError(t, limiter.Enforce(db, agentID, maxAgents(identity, 1)))
		requireDenied(t, limiter.Enforce(db, "another", maxAgents(identity, 1)), limiter.LimitAgents)
	})
}

func fuzzDatabase(f *testing.F) *gorm.DB {
	f.Helper()

	db := pgtest.Open(f)
	require.NoError(f, db.AutoMigrate(&models.LegionAgent{}, &models.LegionIdentity{}))

	return db
}

func fuzzIdentity(t *testing.T, metadata []byte) (identity limiter.Identity) {
	t.Helper()

	decoder := json.NewDecoder(strings.NewReader(string(metadata)))
	decoder.UseNumber()
	require.NoError(t, decoder.Decode(&identity))

	return identity
}

// requireOurs is for errors that were found before the database was touched, and say
// nothing of what a user gave.
func requireOurs(t *testing.T, err error, secrets ...string) {
	t.Helper()

	require.True(t, errors.Is(err, limiter.ErrInvalidRule) || errors.Is(err, limiter.ErrInvalidAgentID), "%v", err)
	require.False(t, database.HasCode(err, "22021", "22P02", "22P05", "54000"), "%v", err)

	for _, secret := range secrets {
		if len(secret) > len("a value that is long enough to be no word") {
			require.NotContains(t, err.Error(), secret)
		}
	}
}

// FuzzUsageInARow puts any JSON where the usage of a row is: a verdict, a check and its
// forecast go on, and what is a proper entry counts.
func FuzzUsageInARow(f *testing.F) {
	for _, usage := range []string{
		`[]`, `{}`, `null`, `"text"`, `1`, `[null]`, `[[]]`, `[{"at": "now"}]`, `[{"at": 1e400, "total_tokens": 1}]`, `[{"at": -1, "total_tokens": 1e400}]`,
		`[{"at": 9e18, "total_tokens": "5"}]`, `[{"at": 1.5, "total_tokens": -5, "evals": 0.5}]`, `[{"at": 9223372036854775807, "total_tokens": 9223372036854775807}]`,
		`[{"total_tokens": {"at": 1}}]`, `[{"at": 1e30, "total_tokens": 1e-30}]`,
	} {
		f.Add(usage)
	}

	db := fuzzDatabase(f)
	rule := limiter.Rule{Identity: tenant, Policy: limiter.Policy{Window: window, MaxTokens: limiter.Max(1 << 62), MaxEvals: limiter.Max(1 << 62)}}

	f.Fuzz(func(t *testing.T, usage string) {
		require.NoError(t, db.Exec("TRUNCATE legion_agents, legion_agents_identities").Error)

		if err := db.Exec(`INSERT INTO legion_agents (agent_id, metadata, usage) VALUES ('odd', '{"tenant": "acme"}', ?::text::jsonb)`, usage).Error; err != nil {
			t.Skip("it is no jsonb")
		}

		before := fuzzTokens(t, db, rule)
		require.NoError(t, db.Exec(`INSERT INTO legion_agents (agent_id, metadata, usage) VALUES ('proper', '{"tenant": "acme"}',
			jsonb_build_array(jsonb_build_object('at', (extract(epoch FROM clock_timestamp()) * 1000)::bigint, 'total_tokens', 7)))`).Error)

		after := fuzzTokens(t, db, rule)
		require.True(t, after == before+7 || after == 1<<63-1, fmt.Sprint(before, after))

		if err := limiter.Enforce(db, "next", rule); err != nil {
			require.ErrorIs(t, err, limiter.ErrExceeded)
		}
	})
}

func fuzzTokens(t *testing.T, db *gorm.DB, rule limiter.Rule) int64 {
	t.Helper()

	report, err := limiter.Check(db, "", rule)
	require.NoError(t, err)

	return report.Rules[0].Usage.Tokens
}
