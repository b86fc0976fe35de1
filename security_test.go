package legion_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// newRole makes a role that has no right at all, and drops it with the test.
func newRole(t *testing.T, owner *gorm.DB) string {
	t.Helper()

	var superuser bool
	require.NoError(t, owner.Raw("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").Scan(&superuser).Error)

	if !superuser {
		t.Skip("the server's role is no superuser, so it cannot make another one")
	}

	role := "legion_test_" + strings.ToLower(rand.Text())
	require.NoError(t, owner.Exec("CREATE ROLE "+role).Error)
	require.NoError(t, owner.Exec("REVOKE ALL ON SCHEMA public FROM PUBLIC").Error)
	t.Cleanup(func() {
		require.NoError(t, owner.Exec("DROP OWNED BY "+role).Error)
		require.NoError(t, owner.Exec("DROP ROLE "+role).Error)
	})

	return role
}

// grants are those that SECURITY.md lists, for the role.
func grants(t *testing.T, role string) []string {
	t.Helper()

	text, err := os.ReadFile("SECURITY.md")
	require.NoError(t, err)

	listed := regexp.MustCompile("(?s)```sql\n(.*?)```").FindSubmatch(text)
	require.NotNil(t, listed)

	bare := regexp.MustCompile("(?m)--.*$").ReplaceAllString(string(listed[1]), "")
	statements := strings.Split(strings.ReplaceAll(bare, "application_role", role), ";")

	return statements[:len(statements)-1] // what follows the last semicolon is white space
}

// openAs is a pool whose connections have the rights of the role.
func openAs(t *testing.T, owner *gorm.DB, role string) *gorm.DB {
	t.Helper()

	return pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.DSN(owner), "role", role))
}

func TestTheGrantsThatAreListedAreEnough(t *testing.T) {
	t.Parallel()

	for name, options := range map[string][]legion.Option{
		"statements":            nil,
		"the server's function": {legion.WithServerFunction()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			owner := pgtest.Open(t)
			require.NoError(t, owner.Use(legion.New(append(options, legion.WithMigrate(legion.WithNotify()))...)))

			role := newRole(t, owner)
			for _, grant := range grants(t, role) {
				require.NoError(t, owner.Exec(grant).Error, grant)
			}

			db := openAs(t, owner, role)
			plugin := usePlugin(t, db, append(options, legion.WithMigrate(legion.WithNotify()))...)
			requireFunctionInUse(t, plugin, len(options) > 0)

			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()

			told := make(chan store.Event, 100)

			go func() {
				defer close(told)

				for event, err := range store.For[models.LegionAgent](db).Watch(ctx) {
					if err == nil {
						told <- event
					}
				}
			}()

			require.True(t, (<-told).Missed)

			err := plugin.Run(ctx, "one", reserving(100, runningRule(1), tokensRule(1000)), func(ctx context.Context, turn *legion.Turn) error {
				require.ErrorIs(t, limiter.Enforce(db, "two", runningRule(1)), limiter.ErrExceeded)
				require.NoError(t, turn.Record(ctx, models.Usage{TotalTokens: 10}))

				return turn.Checkpoint(ctx, []byte("state"))
			})
			require.NoError(t, err)
			require.Equal(t, "one", (<-told).AgentID)

			useStoreAs(t, db)
			cancel()

			require.Error(t, db.Exec("CREATE TABLE public.own (id int)").Error, "it has no right to change the schema")
		})
	}
}

// useStoreAs uses what needs further rights.
func useStoreAs(t *testing.T, db *gorm.DB) {
	t.Helper()

	agents := store.For[models.LegionAgent](db)
	require.NoError(t, agents.Save(t.Context(), store.Patch{AgentID: "saved"}))
	require.NoError(t, agents.Delete(t.Context(), "saved"))
	require.Eventually(t, func() bool {
		removed, err := agents.Prune(t.Context(), time.Now().Add(-time.Millisecond))
		require.NoError(t, err)

		return removed.Agents == 1
	}, longest, 10*time.Millisecond)

	_, err := limiter.Check(db, "", tokensRule(1))
	require.NoError(t, err)
	require.NoError(t, limiter.Enforce(db, "released", runningRule(1)))
	require.NoError(t, limiter.Release(db, "released"))
}

func TestNoVerdictIsGivenOnTheRowsThatAPolicyShows(t *testing.T) {
	t.Parallel()

	for _, table := range []string{"legion_agents", "legion_agents_identities"} {
		t.Run(table, func(t *testing.T) {
			t.Parallel()

			owner := pgtest.Open(t)
			require.NoError(t, owner.Use(legion.New(legion.WithMigrate(), legion.WithObserver(nil))))
			require.NoError(t, limiter.Enforce(owner, "hidden", runningRule(1)))

			role := newRole(t, owner)
			for _, grant := range grants(t, role) {
				require.NoError(t, owner.Exec(grant).Error, grant)
			}

			require.NoError(t, owner.Exec("ALTER TABLE "+table+" ENABLE ROW LEVEL SECURITY").Error)

			db := openAs(t, owner, role)
			for _, tx := range []*gorm.DB{db, db.Begin()} {
				err := limiter.Enforce(tx, "another", runningRule(1))
				require.ErrorIs(t, err, limiter.ErrInvalidConfig)
				require.ErrorContains(t, err, "BYPASSRLS")

				if tx != db {
					require.NoError(t, tx.Rollback().Error)
				}
			}

			// The owner sees all, and policies bind nobody else who does.
			require.ErrorIs(t, limiter.Enforce(owner, "another", runningRule(1)), limiter.ErrExceeded)
			require.NoError(t, owner.Exec("ALTER ROLE "+role+" BYPASSRLS").Error)
			require.ErrorIs(t, limiter.Enforce(openAs(t, owner, role), "another", runningRule(1)), limiter.ErrExceeded)
		})
	}
}

// What a caller gives is a parameter, whatever it looks like.
func TestNoTextOfACallerIsSQL(t *testing.T) {
	t.Parallel()

	for name, options := range map[string][]legion.Option{
		"statements":            nil,
		"the server's function": {legion.WithServerFunction()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, plugin := useTurns(t, options...)
			agents := store.For[models.LegionAgent](db)

			for _, text := range []string{
				`'; DROP TABLE legion_agents; --`, `$1`, `?`, `@name`, `"`, `\`, `{}`, `{"a",NULL}`, `%s`, "a\nb", `E'\''`, `$legion$`, `/*`, `:x`, "ünï → 🙂", `NULL`,
			} {
				rule := limiter.Rule{Name: text, Identity: limiter.Identity{text: text}, Policy: limiter.Policy{
					Window: time.Hour, MaxRunningAgents: limiter.Max(1), MaxTokens: limiter.Max(1000),
				}}

				err := plugin.Run(t.Context(), text, legion.TurnOptions{Rules: []limiter.Rule{rule}, RunID: text, AgentType: text, Reserve: 1, PerStep: true},
					func(ctx context.Context, turn *legion.Turn) error {
						require.ErrorIs(t, limiter.Enforce(db, text+"!", rule), limiter.ErrExceeded)
						require.NoError(t, turn.Record(ctx, models.Usage{ID: text, TotalTokens: 1, Model: text, Extra: map[string]any{text: text}}))

						return turn.Checkpoint(ctx, []byte(text))
					})
				require.NoError(t, err)

				agent, err := agents.Get(t.Context(), text)
				require.NoError(t, err)
				require.Equal(t, text, agent.AgentID)
				require.Equal(t, text, *agent.AgentType)
				require.Equal(t, text, *agent.RunID)
				require.Equal(t, text, string(agent.ConversationState))
				require.EqualValues(t, 1, tokensOf(t, db, text))
				require.JSONEq(t, string(mustJSON(t, map[string]string{text: text})), agent.Metadata.String())
			}
		})
	}
}

func mustJSON(t *testing.T, value any) []byte {
	t.Helper()

	text, err := json.Marshal(value)
	require.NoError(t, err)

	return text
}
