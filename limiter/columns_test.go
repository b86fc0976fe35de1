package limiter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// PostgreSQL takes a bare name for a column wherever one is in sight, also for one of a
// query further out, and only then for a row. So a column of the application's must not be
// in sight of a bare name.
func TestColumnsThatAreNamedLikeAPartOfAStatementChangeNoVerdict(t *testing.T) {
	t.Parallel()

	for name, byFunction := range map[string]bool{"statements": false, "server function": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setup(t)
			if byFunction {
				useFunction(t, db, plugin{})
			}

			for _, column := range []string{
				"agent", "amount", "at", "clock", "counted", "document", "element", "entry", "evals", "expires",
				"forecast", "held", "item", "now", "own", "started", "total_tokens", "unpacked", "value",
			} {
				require.NoError(t, db.Exec(`ALTER TABLE legion_agents ADD COLUMN `+column+` jsonb DEFAULT '{"at": 9e15, "total_tokens": 7, "evals": 7}'`).Error)
			}

			at := ago(time.Minute)
			insert(t, db, models.LegionAgent{
				AgentID: "spent", Metadata: document(t, tenant), StartedAt: &at, Usage: usage(t, models.Usage{At: at, TotalTokens: 100, Evals: 10}),
			})

			report, err := limiter.Check(db, "agent", everyLimit(tenant))
			require.NoError(t, err)
			require.Equal(t, limiter.Usage{Agents: 1, Tokens: 100, Evals: 10}, report.Rules[0].Usage)

			exceeded := requireDenied(t, limiter.Enforce(db, "agent", maxAgents(tenant, 1)), limiter.LimitAgents)
			require.InDelta(t, window-time.Minute, exceeded.RetryAfter, float64(30*time.Second))

			exceeded = requireDenied(t, limiter.Enforce(db, "agent", maxTokens(tenant, 100)), limiter.LimitTokens)
			require.InDelta(t, window-time.Minute, exceeded.RetryAfter, float64(30*time.Second))

			decision, err := limiter.Admit(db, "agent", everyLimit(tenant))
			require.NoError(t, err)
			require.Equal(t, limiter.Usage{Agents: 2, RunningAgents: 1, Tokens: 100, Evals: 10}, decision.Rules[0].Usage)
		})
	}
}
