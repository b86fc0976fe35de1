package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/internal/pgtest"
)

// durable is the server of the Go benchmarks. Those of tests do not wait for the disk.
var (
	isDurable atomic.Bool
	durable   = sync.OnceValues(func() (*pgtest.Server, error) {
		isDurable.Store(true)

		return pgtest.Start(context.Background(), pgtest.WithDurability())
	})
)

// suite stops that server.
type suite struct{ *testing.M }

func (s suite) Run() int {
	code := s.M.Run()

	if isDurable.Load() {
		server, err := durable()
		if err == nil {
			err = server.Stop()
		}

		if err != nil {
			fmt.Fprintln(os.Stderr, err)

			code = max(code, 1)
		}
	}

	return code
}

func TestMain(m *testing.M) { pgtest.Main(suite{m}) }

func quick(t *testing.T) *harness {
	t.Helper()

	return &harness{server: pgtest.Shared(t), scale: quickScale, progress: io.Discard}
}

func TestEachBenchmarkRunsAndCountsWhatACallTakes(t *testing.T) {
	t.Parallel()

	for _, benchmark := range benchmarks(quickScale) {
		t.Run(benchmark.name, func(t *testing.T) {
			t.Parallel()

			results, err := quick(t).run(t.Context(), benchmark)
			require.NoError(t, err)
			require.Len(t, results, max(1, len(benchmark.steps))*(1+len(benchmark.contenders)))

			for _, result := range results {
				require.Positive(t, result.Ratio, result.Path)
				require.Positive(t, result.Budget.RoundTrips, result.Path)
				require.GreaterOrEqual(t, result.Budget.Statements, result.Budget.RoundTrips, result.Path)
				require.Positive(t, result.Budget.Buffers, result.Path)
				require.Equal(t, benchmark.durableOnly, result.RatioWithoutFlush == nil, result.Path)

				if result.Path == result.Floor {
					require.InDelta(t, 1, result.Ratio, 0)
				}

				if result.isPath() && len(benchmark.targets) > 0 {
					target, ok := benchmark.targets[result.Path]
					require.Equal(t, ok, result.Target != nil)
					require.True(t, !ok || *result.Target == target)
				}
			}
		})
	}
}

func TestEveryPathHasATargetOrIsPublished(t *testing.T) {
	t.Parallel()

	published := []string{"turn of three LLM calls", "MaxAgents", "MaxTokens", "one hot identity, admitted"}

	for _, benchmark := range benchmarks(fullScale) {
		for _, path := range paths {
			_, ok := benchmark.targets[path.name]
			isPublished := false

			for _, name := range published {
				isPublished = isPublished || strings.HasPrefix(benchmark.name, name)
			}

			require.True(t, ok || isPublished, benchmark.name)
		}
	}
}

// What is not ours does not change, so its statements can be told exactly.
func TestStatementsOfFloorsAndOthersAreThoseOfTheirText(t *testing.T) {
	t.Parallel()

	const oneRuleName, threeRulesName = "one rule, new agents, spread identities, sequential", "three rules, all four limits each"

	expected := map[string]map[string]float64{
		// BEGIN, the statement, COMMIT.
		oneRuleName: {nameA: 3, tokenBucket: 3, originalDesign: 5},
		// And 3 locks and 3 times 4 queries.
		threeRulesName:                                  {nameA: 3, originalDesign: 18},
		"one hot identity, 4 callers, admitted":         {nameB: 3},
		"one hot identity, 4 callers, denied":           {nameB: 3, tokenBucket: 3, originalDesign: 5},
		"append of one usage, 10 requests recorded":     {nameC: 1, originalDesign: 1},
		"append of one usage, 1,000 requests recorded":  {nameC: 1, originalDesign: 1},
		"MaxTokens, conversations of 30 entries":        {nameA: 3, originalDesign: 5},
		"MaxAgents 1,000, tenant with 10 % of the rows": {nameA: 3, originalDesign: 5},
	}

	found := 0

	for _, benchmark := range benchmarks(quickScale) {
		statements := expected[benchmark.name]
		if statements == nil {
			continue
		}

		found++

		t.Run(benchmark.name, func(t *testing.T) {
			t.Parallel()

			results, err := quick(t).run(t.Context(), benchmark)
			require.NoError(t, err)

			for _, result := range results {
				if count, ok := statements[result.Path]; ok {
					require.InDelta(t, count, result.Budget.Statements, 0, result.Path)
					require.InDelta(t, count, result.Budget.RoundTrips, 0, result.Path)
				}
			}
		})
	}

	require.Len(t, expected, found)
}

func TestAVerdictThatIsNotToBeMeasuredEndsTheRun(t *testing.T) {
	t.Parallel()

	full := scenario{agent: newAgent, rules: oneFullIdentity, denied: true}
	room := scenario{agent: newAgent, rules: oneRule, denied: true}
	closed := scenario{agent: newAgent, rules: oneFullIdentity}

	for _, test := range []struct {
		name      string
		contender contender
		fails     bool
	}{
		{"a denial that is expected", onPaths(full.enforce)[0], false},
		{"an admission where a denial is expected", onPaths(room.enforce)[0], true},
		{"a denial where an admission is expected", onPaths(closed.enforce)[0], true},
		{"the same of the original's design", closed.contenders()[len(paths)], true},
		{"the same of the token bucket", room.contendersAndBucket()[len(paths)+1], true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			_, err := quick(t).run(t.Context(), benchmark{
				name: test.name, floor: floorB(), contenders: []contender{test.contender}, prepare: prepareFullGroup, durableOnly: true,
			})
			if test.fails {
				require.ErrorIs(t, err, errVerdict)
			} else {
				require.NoError(t, err)
			}
		})
	}
}

func TestSteadyLoadIsWatched(t *testing.T) {
	t.Parallel()

	var out bytes.Buffer

	require.NoError(t, steady(t.Context(), pgtest.Shared(t), 2*time.Second, quickScale, &out))
	require.Equal(t, 2+samplesOfSteady, strings.Count(out.String(), "\n|"), out.String())

	_, rows, _ := strings.Cut(out.String(), ": |\n")
	withoutTurns := regexp.MustCompile(`(?m)^\| \d+ \| 0 \|`).FindAllString(rows, -1)
	require.GreaterOrEqual(t, len(withoutTurns), samplesOfHeld, "at first the turns only hold their slots")
	require.Less(t, len(withoutTurns), samplesOfSteady, "then there are others")
}

func TestOptionsThatCannotWorkAreRefused(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		arguments []string
		text      string
	}{
		{[]string{"-run", "("}, "-run"},
		{[]string{"-run", "one", "-out", "docs"}, "-out"},
		{[]string{"-rounds", "4", "-out", "docs"}, "at least 5"},
		{[]string{"-rounds", "0"}, "at least 1"},
		{[]string{"docs"}, "arguments"},
		{[]string{"-plot", filepath.Join(t.TempDir(), "missing")}, "no such file"},
	} {
		t.Run(strings.Join(test.arguments, " "), func(t *testing.T) {
			t.Parallel()

			var out, errs bytes.Buffer

			require.NotZero(t, command(test.arguments, &out, &errs))
			require.Contains(t, errs.String(), test.text)
			require.Empty(t, out.String())
		})
	}
}
