package limiter_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/datatypes"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

func TestMaxTokensDeniesOnceTheSumHasReachedTheLimit(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db,
		models.LegionAgent{AgentID: "first", Metadata: document(t, member), Usage: usage(t,
			models.Usage{At: ago(time.Minute), TotalTokens: 60},
			models.Usage{At: ago(time.Second), InputTokens: 25, OutputTokens: 10},
		)},
		models.LegionAgent{AgentID: "second", Metadata: document(t, tenant), Usage: usage(t, models.Usage{At: ago(time.Minute), TotalTokens: 5})},
	)

	exceeded := requireDenied(t, limiter.Enforce(db, "agent", maxTokens(tenant, 100)), limiter.LimitTokens)
	require.EqualValues(t, 100, exceeded.Usage.Tokens)
	require.Equal(t, []limiter.Quota{{Limit: limiter.LimitTokens, Max: 100, Used: 100}}, exceeded.Violations)
	requireDenied(t, limiter.Enforce(db, "agent", maxTokens(tenant, 99)), limiter.LimitTokens)

	decision, err := limiter.Admit(db, "agent", maxTokens(tenant, 101))
	require.NoError(t, err)
	require.EqualValues(t, 1, decision.Rules[0].Quotas[0].Remaining())

	// A narrower identity has fewer of them.
	require.NoError(t, limiter.Enforce(db, "agent", maxTokens(member, 96)))
	requireDenied(t, limiter.Enforce(db, "agent", maxTokens(member, 95)), limiter.LimitTokens)
}

func TestEvalsAreNotTokens(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, models.LegionAgent{AgentID: "busy", Metadata: document(t, tenant), Usage: usage(t,
		models.Usage{At: ago(time.Minute), TotalTokens: 1000, Evals: 2},
		models.Usage{At: ago(time.Minute), Evals: 1},
	)})

	require.NoError(t, limiter.Enforce(db, "agent", maxEvals(tenant, 4)))
	exceeded := requireDenied(t, limiter.Enforce(db, "agent", maxEvals(tenant, 3)), limiter.LimitEvals)
	require.Equal(t, limiter.Usage{Evals: 3}, exceeded.Usage)

	require.NoError(t, limiter.Enforce(db, "agent", maxTokens(tenant, 1001)))
	exceeded = requireDenied(t, limiter.Enforce(db, "agent", maxTokens(tenant, 1000)), limiter.LimitTokens)
	require.Equal(t, limiter.Usage{Tokens: 1000}, exceeded.Usage)
}

func TestUsageCountsByItsOwnTimeNotByTheAgentsStart(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db,
		models.LegionAgent{
			AgentID: "started before the window", Metadata: document(t, tenant), StartedAt: pointer(ago(10 * window)), CreatedAt: ago(10 * window),
			Usage: usage(t,
				models.Usage{At: ago(9 * window), TotalTokens: 100_000, Evals: 100},
				models.Usage{At: ago(window + time.Minute), TotalTokens: 10_000, Evals: 10},
				models.Usage{At: ago(window - time.Minute), TotalTokens: 1000, Evals: 1},
				models.Usage{At: ago(time.Second), TotalTokens: 7, Evals: 2},
			),
		},
		// Its clock runs ahead. What is in the future is inside every window.
		models.LegionAgent{
			AgentID: "from the future", Metadata: document(t, tenant), StartedAt: pointer(time.Now().Add(time.Hour)),
			Usage: usage(t, models.Usage{At: time.Now().Add(time.Hour), TotalTokens: 300, Evals: 4}),
		},
	)

	require.Equal(t, limiter.Usage{Agents: 2, RunningAgents: 1, Tokens: 1307, Evals: 7}, measured(t, db, everyLimit(tenant)))
}

// An application that updates its own columns through GORM stamps updated_at with the
// clock of its machine.
func TestUsageOfARowThatWasStampedByALaggingClockCounts(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, models.LegionAgent{
		AgentID: "agent", Metadata: document(t, tenant), Usage: usage(t, models.Usage{At: ago(window - time.Minute), TotalTokens: 10, Evals: 1}),
	})
	change(t, db, "agent", map[string]any{"updated_at": ago(window + 4*time.Minute)})
	require.Equal(t, limiter.Usage{Tokens: 10, Evals: 1}, sums(t, db, "another", tenant))
}

func TestAnAgentsOwnUsageCountsWhateverItsIdentityWas(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, models.LegionAgent{
		AgentID: "moving", Metadata: document(t, otherTenant), Usage: usage(t, models.Usage{At: ago(time.Minute), TotalTokens: 10, Evals: 1}),
	})

	requireDenied(t, limiter.Enforce(db, "moving", maxTokens(tenant, 10)), limiter.LimitTokens)
	requireDenied(t, limiter.Enforce(db, "moving", maxEvals(tenant, 1)), limiter.LimitEvals)
	require.NoError(t, limiter.Enforce(db, "staying", maxTokens(tenant, 10)), "it has not moved")

	require.NoError(t, limiter.Enforce(db, "moving", maxTokens(tenant, 11)))
	requireDenied(t, limiter.Enforce(db, "staying", maxTokens(tenant, 10)), limiter.LimitTokens)
	require.NoError(t, limiter.Enforce(db, "another", maxTokens(otherTenant, 1)))
}

func TestReservationsOfOthersCountAsUsedAndTheOwnDoesNot(t *testing.T) {
	t.Parallel()

	db := setup(t)
	reserving := turn(t, "reserving", member, time.Hour)
	reserving.ReservedTokens = 60
	reserving.Usage = usage(t, models.Usage{At: ago(time.Minute), TotalTokens: 30})
	elsewhere := turn(t, "elsewhere", otherTenant, time.Hour)
	elsewhere.ReservedTokens = 1000
	insert(t, db, reserving, elsewhere)

	exceeded := requireDenied(t, limiter.Enforce(db, "agent", maxTokens(tenant, 90)), limiter.LimitTokens)
	require.Equal(t, limiter.Usage{Tokens: 30, ReservedTokens: 60}, exceeded.Usage)
	require.Equal(t, []limiter.Quota{{Limit: limiter.LimitTokens, Max: 90, Used: 90}}, exceeded.Violations)
	require.NoError(t, limiter.Enforce(db, "agent", maxTokens(tenant, 91)))

	// What it holds back for itself does not keep it out.
	decision, err := limiter.Admit(db, "reserving", maxTokens(member, 31))
	require.NoError(t, err)
	require.Equal(t, limiter.Usage{Tokens: 30}, decision.Rules[0].Usage)
	require.EqualValues(t, 60, find(t, db, "reserving").ReservedTokens)
}

func TestAReservationCountsWhileItsRowHoldsASlot(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name   string
		counts bool
		change map[string]any
	}{
		{"a live turn", true, nil},
		{"a live turn of a deleted agent", true, map[string]any{"deleted_at": time.Now()}},
		{"an idle row", false, map[string]any{"status": models.StatusIdle}},
		{"a turn that lost its lease", false, map[string]any{"lease_expires_at": nil}},
		{"a turn whose lease is over", false, map[string]any{"lease_expires_at": ago(time.Second)}},
		{"a negative one", false, map[string]any{"reserved_tokens": -60}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db := setup(t)
			reserving := turn(t, "reserving", tenant, time.Hour)
			reserving.ReservedTokens = 60
			insert(t, db, reserving)

			if test.change != nil {
				change(t, db, "reserving", test.change)
			}

			err := limiter.Enforce(db, "agent", maxTokens(tenant, 60))
			if test.counts {
				requireDenied(t, err, limiter.LimitTokens)
			} else {
				require.NoError(t, err)
			}
		})
	}
}

// Usage that is in a row already may come from anybody. It neither raises, nor breaks
// nor lowers a sum.
func TestMalformedUsageIsReadAsFarAsItIsANumber(t *testing.T) {
	t.Parallel()

	db := setup(t)
	now := time.Now().UnixMilli()
	entry := func(format string) string { return fmt.Sprintf(format, now) }

	for name, test := range map[string]struct {
		usage  string
		tokens int64
		evals  int64
	}{
		"a fraction is rounded up":      {entry(`[{"at": %d, "total_tokens": 1.5, "evals": 0.1}]`), 2, 1},
		"fractions are rounded as one":  {entry(`[{"at": %[1]d, "total_tokens": 0.5}, {"at": %[1]d, "total_tokens": 0.25}]`), 1, 0},
		"a number as text":              {entry(`[{"at": %d, "total_tokens": "12", "evals": "12"}]`), 0, 0},
		"text":                          {entry(`[{"at": %d, "total_tokens": "many", "evals": ""}]`), 0, 0},
		"null":                          {entry(`[{"at": %d, "total_tokens": null, "evals": null}]`), 0, 0},
		"a boolean":                     {entry(`[{"at": %d, "total_tokens": true, "evals": false}]`), 0, 0},
		"an object and an array":        {entry(`[{"at": %d, "total_tokens": {"n": 1}, "evals": [1]}]`), 0, 0},
		"negative":                      {entry(`[{"at": %d, "total_tokens": -5, "evals": -1e300}]`), 0, 0},
		"nothing":                       {entry(`[{"at": %d}]`), 0, 0},
		"nothing at all":                {`[{}]`, 0, 0},
		"one beyond int64":              {entry(`[{"at": %d, "total_tokens": 9223372036854775808}]`), math.MaxInt64, 0},
		"far beyond int64":              {entry(`[{"at": %d, "total_tokens": 1e400, "evals": 1e40}]`), math.MaxInt64, math.MaxInt64},
		"as large as jsonb can hold":    {entry(`[{"at": %d, "total_tokens": 1e131000}]`), math.MaxInt64, 0},
		"as small as jsonb can hold":    {entry(`[{"at": %d, "total_tokens": 1e-16000}]`), 1, 0},
		"elements that are no objects":  {`[1, "text", null, true, [{"at": 9e15, "total_tokens": 5}], []]`, 0, 0},
		"an object instead of an array": {entry(`{"at": %d, "total_tokens": 5}`), 0, 0},
		"a number instead of an array":  {`5`, 0, 0},
		"text instead of an array":      {`"[]"`, 0, 0},
		"null instead of an array":      {`null`, 0, 0},
		"a time as text":                {entry(`[{"at": "%d", "total_tokens": 5, "evals": 5}]`), 0, 0},
		"no time":                       {`[{"total_tokens": 5, "evals": 5}]`, 0, 0},
		"a null time":                   {`[{"at": null, "total_tokens": 5, "evals": 5}]`, 0, 0},
		"a negative time":               {`[{"at": -1e300, "total_tokens": 5, "evals": 5}]`, 0, 0},
		"a time with a fraction":        {entry(`[{"at": %d.5, "total_tokens": 5, "evals": 5}]`), 5, 5},
		"a time beyond all dates":       {`[{"at": 1e400, "total_tokens": 5, "evals": 5}]`, 5, 5},
		"a time as large as can be":     {`[{"at": 9e131071, "total_tokens": 5, "evals": 5}]`, 5, 5},
	} {
		// The malformed usage alone, as the caller's own, and beside other that is sound.
		group, elsewhere := limiter.Identity{"case": name}, limiter.Identity{"elsewhere": name}
		insert(t, db, models.LegionAgent{AgentID: name, Metadata: document(t, group), Usage: datatypes.JSON(test.usage)})
		require.Equal(t, limiter.Usage{Tokens: test.tokens, Evals: test.evals}, sums(t, db, "another", group), name)
		require.Equal(t, limiter.Usage{Tokens: test.tokens, Evals: test.evals}, sums(t, db, name, elsewhere), name)

		report, err := limiter.Check(db, "another", maxTokens(group, 1), maxEvals(group, 1))
		require.NoError(t, err, name)
		require.Equal(t, test.tokens, report.Rules[0].Usage.Tokens, name)
		require.Equal(t, test.evals, report.Rules[1].Usage.Evals, name)

		insert(t, db, models.LegionAgent{
			AgentID: name + ", sound", Metadata: document(t, group), Usage: usage(t, models.Usage{At: ago(time.Minute), TotalTokens: 100, Evals: 10}),
		})
		require.Equal(t, limiter.Usage{Tokens: saturated(test.tokens, 100), Evals: saturated(test.evals, 10)}, sums(t, db, "another", group), name)
	}
}

// sums are those of the group and of the agent, as a denial tells them.
func sums(t *testing.T, db *gorm.DB, agentID string, group limiter.Identity) limiter.Usage {
	t.Helper()

	return requireDenied(t, limiter.Enforce(db, agentID, limiter.Rule{
		Identity: group,
		Policy:   limiter.Policy{Window: window, MaxTokens: limiter.Max(0), MaxEvals: limiter.Max(0)},
	}), limiter.LimitTokens, limiter.LimitEvals).Usage
}

func saturated(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}

	return a + b
}

func TestTotalsBeyondInt32AndInt64(t *testing.T) {
	t.Parallel()

	const billion = 1_000_000_000

	db := setup(t)
	reserving := turn(t, "reserving", tenant, time.Hour)
	reserving.ReservedTokens = 3 * billion
	insert(t, db, reserving,
		models.LegionAgent{AgentID: "large", Metadata: document(t, tenant), Usage: usage(t,
			models.Usage{At: ago(time.Minute), TotalTokens: 2 * billion, Evals: 2 * billion},
			models.Usage{At: ago(time.Minute), TotalTokens: 2 * billion, Evals: 2 * billion},
		)},
	)

	require.Equal(t, limiter.Usage{Tokens: 4 * billion, ReservedTokens: 3 * billion, Evals: 4 * billion}, sums(t, db, "another", tenant))
	requireDenied(t, limiter.Enforce(db, "agent", maxTokens(tenant, 7*billion)), limiter.LimitTokens)
	require.NoError(t, limiter.Enforce(db, "agent", maxTokens(tenant, 7*billion+1)))

	// The largest numbers three times over are still the largest, and deny.
	for _, agentID := range []string{"first", "second", "third"} {
		huge := turn(t, agentID, tenant, time.Hour)
		huge.ReservedTokens = math.MaxInt64
		huge.Usage = usage(t,
			models.Usage{At: ago(time.Minute), TotalTokens: math.MaxInt64, Evals: math.MaxInt64},
			models.Usage{At: ago(time.Second), TotalTokens: math.MaxInt64, Evals: math.MaxInt64},
		)
		insert(t, db, huge)
	}

	require.Equal(t, limiter.Usage{Tokens: math.MaxInt64, ReservedTokens: math.MaxInt64, Evals: math.MaxInt64}, sums(t, db, "another", tenant))

	exceeded := requireDenied(t, limiter.Enforce(db, "agent", maxTokens(tenant, math.MaxInt64)), limiter.LimitTokens)
	require.Equal(t, []limiter.Quota{{Limit: limiter.LimitTokens, Max: math.MaxInt64, Used: math.MaxInt64}}, exceeded.Violations)
	requireDenied(t, limiter.Enforce(db, "agent", maxEvals(tenant, math.MaxInt64)), limiter.LimitEvals)
}

func TestTheLargestLimitsAndWindowsAreLimitsLikeOthers(t *testing.T) {
	t.Parallel()

	db := setup(t)
	insert(t, db, models.LegionAgent{
		AgentID: "ancient", Metadata: document(t, tenant), StartedAt: pointer(ago(24 * 365 * 200 * time.Hour)),
		Usage: usage(t, models.Usage{At: time.UnixMilli(1), TotalTokens: 5}),
	})

	policy := everyLimit(tenant).Policy
	policy.Window = math.MaxInt64

	decision, err := limiter.Admit(db, "agent", limiter.Rule{Identity: tenant, Policy: policy})
	require.NoError(t, err)
	require.Equal(t, limiter.Usage{Agents: 2, RunningAgents: 1, Tokens: 5}, decision.Rules[0].Usage)

	policy.Window = time.Microsecond
	decision, err = limiter.Admit(db, "another", limiter.Rule{Identity: tenant, Policy: policy})
	require.NoError(t, err)
	require.Equal(t, limiter.Usage{Agents: 1, RunningAgents: 2}, decision.Rules[0].Usage)
}
