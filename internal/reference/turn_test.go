package reference_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/internal/reference"
)

func TestTurns(t *testing.T) {
	t.Parallel()

	var (
		pass   = reference.Advance{By: lease}
		slot   = rule(tenant, reference.Policy{MaxRunningAgents: new(int64(1))})
		tokens = rule(tenant, reference.Policy{MaxTokens: new(int64(10))})
		start  = rule(tenant, reference.Policy{MaxAgents: new(int64(1))})

		begin = func(agent, run string, reserve int64, rules ...reference.Rule) reference.Begin {
			return reference.Begin{Agent: agent, Run: run, Reserve: reserve, Rules: rules}
		}
		resume = func(resumes string, reserve int64, rules ...reference.Rule) reference.Begin {
			return reference.Begin{Agent: "one", Run: "second", Resumes: resumes, Reserve: reserve, Rules: rules}
		}
		end    = reference.End{Agent: "one", Run: "first"}
		renew  = reference.Renew{Agent: "one", Run: "first"}
		record = func(run string, tokens int64) reference.Record {
			return reference.Record{Agent: "one", Run: run, Entry: reference.Entry{ID: "entry", Tokens: tokens}}
		}
		keep = reference.Checkpoint{Agent: "one", Run: "first", Conversation: "step"}
	)

	for _, test := range []struct {
		name       string
		operations []reference.Operation
		outcome    reference.Outcome
	}{
		{"begin of a live agent, whatever the rules", []reference.Operation{begin("one", "first", 0), begin("one", "second", 0, slot, tokens)}, reference.AgentRunning},
		{"begin again", []reference.Operation{begin("one", "first", 0, slot), begin("two", "other", 0), begin("one", "first", 0, slot)}, reference.Admitted},
		{"begin after the end", []reference.Operation{begin("one", "first", 0), end, begin("one", "first", 0)}, reference.RunEnded},
		{"begin after a crash", []reference.Operation{begin("one", "first", 0, slot), pass, begin("one", "second", 0, slot)}, reference.Admitted},
		{"begin beside a live turn", []reference.Operation{begin("one", "first", 0, slot), begin("two", "other", 0, slot)}, reference.Denied},
		{"begin beside an interrupted one", []reference.Operation{begin("one", "first", 0, slot), pass, begin("two", "other", 0, slot)}, reference.Admitted},
		{"begin without rules", []reference.Operation{enforce("one", slot), begin("two", "other", 0)}, reference.Admitted},
		{"a turn without rules counts in the groups of its agent", []reference.Operation{
			enforce("one", start), begin("one", "first", 0), enforce("two", slot),
		}, reference.Denied},
		{"no room for a slot is left by a deleted agent's turn", []reference.Operation{
			begin("one", "first", 0, slot), reference.Delete{Agent: "one"}, enforce("two", slot),
		}, reference.Denied},

		{"a reservation that just fits", []reference.Operation{begin("one", "first", 6, tokens), begin("two", "other", 4, tokens)}, reference.Admitted},
		{"a reservation that does not fit", []reference.Operation{begin("one", "first", 6, tokens), begin("two", "other", 5, tokens)}, reference.Denied},
		{"a reservation that cannot be counted", []reference.Operation{
			begin("one", "first", 6, tokens), begin("two", "other", math.MaxInt64, rule(tenant, reference.Policy{MaxTokens: new(int64(math.MaxInt64))})),
		}, reference.Denied},
		{"no reservation, with the budget reserved", []reference.Operation{begin("one", "first", 10, tokens), begin("two", "other", 0, tokens)}, reference.Denied},
		{"a reservation after what was recorded", []reference.Operation{
			begin("one", "first", 6, tokens), record("first", 6), begin("two", "other", 4, tokens),
		}, reference.Admitted},
		{"a reservation that another run's record does not lower", []reference.Operation{
			begin("one", "first", 6, tokens), record("second", 1), begin("two", "other", 4, tokens),
		}, reference.Denied},
		{"a reservation after the end", []reference.Operation{begin("one", "first", 6, tokens), end, begin("two", "other", 10, tokens)}, reference.Admitted},

		{"resume", []reference.Operation{begin("one", "first", 0, slot), pass, resume("first", 0, slot)}, reference.Admitted},
		{"resume what is live", []reference.Operation{begin("one", "first", 0, slot), resume("first", 0, slot)}, reference.AgentRunning},
		{"resume what has ended", []reference.Operation{begin("one", "first", 0), end, resume("first", 0)}, reference.AgentRunning},
		{"resume another run", []reference.Operation{begin("one", "first", 0), pass, resume("other", 0)}, reference.AgentRunning},
		{"resume what was deleted, without room", []reference.Operation{
			begin("one", "first", 0, slot), pass, reference.Delete{Agent: "one"}, begin("two", "other", 0, slot), resume("first", 0, slot),
		}, reference.AgentRunning},
		{"resume again", []reference.Operation{begin("one", "first", 0), pass, resume("first", 0), resume("first", 0)}, reference.Admitted},
		{"resume again, late", []reference.Operation{begin("one", "first", 0), pass, resume("first", 0), pass, resume("first", 0)}, reference.Admitted},
		{"resume without a slot", []reference.Operation{
			begin("one", "first", 0, slot), pass, begin("two", "other", 0, slot), resume("first", 0, slot),
		}, reference.Denied},
		{"resume what is counted already", []reference.Operation{
			begin("one", "first", 0, start), record("first", 10), pass, enforce("two", rule(tenant, reference.Policy{})), resume("first", 0, start, tokens),
		}, reference.Admitted},
		{"resume without room for the reservation", []reference.Operation{
			begin("one", "first", 2, tokens), record("first", 9), pass, resume("first", 2, tokens),
		}, reference.Denied},

		{"renew", []reference.Operation{begin("one", "first", 0), renew}, reference.Done},
		{"renew too late", []reference.Operation{begin("one", "first", 0), pass, renew}, reference.LeaseLost},
		{"renew another's run", []reference.Operation{begin("one", "second", 0), renew}, reference.LeaseLost},
		{"renew makes the lease whole", []reference.Operation{
			begin("one", "first", 0, slot), reference.Advance{By: lease - 1}, renew, reference.Advance{By: lease - 1}, begin("two", "other", 0, slot),
		}, reference.Denied},

		{"end late", []reference.Operation{begin("one", "first", 0), pass, end}, reference.Done},
		{"end again", []reference.Operation{begin("one", "first", 0), end, end}, reference.Done},
		{"end after a revocation", []reference.Operation{begin("one", "first", 0, slot), pass, begin("two", "other", 0, slot), end}, reference.LeaseLost},
		{"end of a replaced run", []reference.Operation{begin("one", "first", 0), pass, begin("one", "second", 0), end}, reference.LeaseLost},
		{"end frees the slot", []reference.Operation{begin("one", "first", 0, slot), end, begin("two", "other", 0, slot)}, reference.Admitted},

		{"checkpoint late", []reference.Operation{begin("one", "first", 0), pass, keep}, reference.Done},
		{"checkpoint after the end", []reference.Operation{begin("one", "first", 0), end, keep}, reference.LeaseLost},
		{"checkpoint after a revocation", []reference.Operation{begin("one", "first", 0, slot), pass, begin("two", "other", 0, slot), keep}, reference.LeaseLost},

		{"record after a revocation", []reference.Operation{begin("one", "first", 0, slot), pass, begin("two", "other", 0, slot), record("first", 1)}, reference.Done},
		{"record twice", []reference.Operation{begin("one", "first", 0), record("first", 1), record("first", 1)}, reference.Recorded},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			_, result := play(test.operations...)
			require.Equal(t, test.outcome, result.Outcome)
		})
	}
}

func TestARaceLeavesSlotsThatAreLockedAndTakesThoseThatWereInTheWay(t *testing.T) {
	t.Parallel()

	running := func(limit int64) reference.Rule { return rule(tenant, reference.Policy{MaxRunningAgents: &limit}) }
	crashed, _ := play(
		reference.Begin{Agent: "one", Run: "first", Rules: []reference.Rule{running(2)}},
		reference.Begin{Agent: "two", Run: "first", Rules: []reference.Rule{running(2)}},
		reference.Advance{By: lease},
	)

	for _, test := range []struct {
		name    string
		race    reference.Race
		limit   int64
		outcome reference.Outcome
		left    []string
	}{
		{"none", reference.Race{}, 1, reference.Admitted, nil},
		{"one is locked, and there is room", reference.Race{Locked: []string{"one"}}, 2, reference.Admitted, []string{"one"}},
		{"one is locked, and there is none", reference.Race{Locked: []string{"one"}}, 1, reference.Denied, []string{"one", "two"}},
		{"they were in the way", reference.Race{Early: true}, 3, reference.Admitted, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			next, result := crashed.Racing(test.race).Step(reference.Begin{Agent: "three", Run: "first", Rules: []reference.Rule{running(test.limit)}})
			require.Equal(t, test.outcome, result.Outcome)

			var left []string

			for _, id := range []string{"one", "two"} {
				if agent, _ := next.Agent(id); agent.Lease.Known {
					left = append(left, id)
				}
			}

			require.Equal(t, test.left, left)
		})
	}
}
