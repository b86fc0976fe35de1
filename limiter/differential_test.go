package limiter_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store" //nolint:depguard // it makes the rows that verdicts count
)

// The same random calls, by statements in one database and by the server's function in
// another, come to the same.
func TestBothWaysComeToTheSame(t *testing.T) {
	t.Parallel()

	const calls = 600

	seed := concurrentSeed(t)
	random := rand.New(rand.NewPCG(seed, 0))
	byStatements, byFunction := setup(t), setup(t)
	delete(byStatements.Plugins, plugin{}.Name())
	useFunction(t, byFunction, plugin{})

	for call := range calls {
		agentID := fmt.Sprint("agent ", random.IntN(12))
		rules := differentialRules(random)
		begin := run.Begin{ID: fmt.Sprint("run ", random.IntN(40)), Reserve: random.Int64N(3) * 10}
		kind, tokens := random.IntN(6), random.Int64N(40)

		perform := func(db *gorm.DB) string {
			switch kind {
			case 0:
				_, _, err := limiter.AdmitTurn(db, limiter.Admission{AgentID: agentID, Rules: rules}, begin)

				return differentialOutcome(nil, err)
			case 1:
				agents := store.For[models.LegionAgent](db)
				_, err := agents.AppendTurnUsage(t.Context(), run.Run{AgentID: agentID, ID: begin.ID},
					models.Usage{ID: fmt.Sprint(call), TotalTokens: tokens, Evals: 1})

				return differentialOutcome(nil, err)
			case 2:
				// Slots end, and the leases of runs are over.
				return differentialOutcome(nil, db.Exec("UPDATE legion_agents SET lease_expires_at = now() - interval '1 second' WHERE agent_id = ?", agentID).Error)
			default:
				var (
					decision *limiter.Decision
					err      error
				)

				if kind == 3 {
					// Whatever it comes to, the transaction is usable.
					require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
						decision, err = limiter.Admit(tx, agentID, rules...)

						return nil
					}))
				} else {
					decision, err = limiter.Admit(db, agentID, rules...)
				}

				return differentialOutcome(decision, err)
			}
		}

		require.Equal(t, perform(byStatements), perform(byFunction), "call %d of seed %d", call, seed)
	}
}

func differentialRules(random *rand.Rand) []limiter.Rule {
	limit := func(most int64) *int64 {
		switch random.IntN(8) {
		case 0:
			return limiter.Max(math.MaxInt64)
		case 1, 2, 3:
			return limiter.Max(random.Int64N(most))
		default:
			return nil
		}
	}

	fields := limiter.Identity{"ip": random.IntN(3), "tenant": []any{"acme", "globex", 1.5}[random.IntN(3)], "vip": random.IntN(2) == 0}
	rules := make([]limiter.Rule, 1+random.IntN(3))

	for i := range rules {
		identity := limiter.Identity{}

		for name, value := range fields {
			if random.IntN(2) == 0 {
				identity[name] = value
			}
		}

		rules[i] = limiter.Rule{Identity: identity, Policy: limiter.Policy{
			Window: time.Hour, MaxAgents: limit(12), MaxRunningAgents: limit(6), MaxTokens: limit(500), MaxEvals: limit(20),
		}}
	}

	return rules
}

// differentialOutcome is what a caller is told, but for moments.
func differentialOutcome(decision *limiter.Decision, err error) string {
	if exceeded, ok := errors.AsType[*limiter.ExceededError](err); ok {
		return fmt.Sprintf("denied by %d: %+v %+v", exceeded.RuleIndex, exceeded.Usage, exceeded.Violations)
	}

	if err != nil || decision == nil {
		return fmt.Sprint(err)
	}

	told := "admitted"
	for _, state := range decision.Rules {
		told += fmt.Sprintf(" %+v %+v", state.Usage, state.Quotas)
	}

	return told
}
