package main

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/limiter"
)

func TestATallyCountsADenialOnceAndEachOfItsViolations(t *testing.T) {
	t.Parallel()

	tally := newTally()
	tally.add(result{event: event{turn: scheduled(1, "a", 0, 40)}, latency: time.Millisecond})
	tally.add(result{latency: 2 * time.Millisecond, denial: &limiter.ExceededError{
		Rule:       limiter.Rule{Name: tenantRule},
		Violations: []limiter.Quota{{Limit: limiter.LimitAgents}, {Limit: limiter.LimitTokens}},
	}})

	require.Equal(t, 1, tally.admitted)
	require.Equal(t, 1, tally.denied)
	require.Equal(t, int64(40), tally.tokens)
	require.Equal(t, map[string]int{tenantRule: 1}, tally.deniedBy)
	require.Equal(t, map[violation]int{
		{tenantRule, limiter.LimitAgents}: 1,
		{tenantRule, limiter.LimitTokens}: 1,
	}, tally.violations)
}

func TestPercentilesAreTheNearestRank(t *testing.T) {
	t.Parallel()

	tally := newTally()
	require.Equal(t, []time.Duration{0, 0}, tally.percentiles(50, 99))

	for i := 10; i >= 1; i-- {
		tally.latencies = append(tally.latencies, time.Duration(i))
	}

	require.Equal(t, []time.Duration{5, 10, 10, 10}, tally.percentiles(50, 91, 99, 100))
}

func TestReportTally(t *testing.T) {
	t.Parallel()

	tally := &tally{
		admitted:   1900,
		denied:     100,
		tokens:     2_645_672,
		elapsed:    10 * time.Second,
		latencies:  []time.Duration{time.Millisecond, 1500 * time.Microsecond},
		deniedBy:   map[string]int{userRule: 40, tenantRule: 60},
		violations: map[violation]int{{userRule, limiter.LimitAgents}: 40, {tenantRule, limiter.LimitTokens}: 60},
	}

	var out bytes.Buffer

	require.NoError(t, reportTally(&out, tally, 5*time.Minute))
	require.Equal(t, `
2,000 turns in 10.0 s, 200 a second: the trace's 5m0s at 30 times its speed
1,900 admitted with 2,645,672 tokens, 100 denied (5.0 %)
Enforce took 1.0 ms (p50), 1.5 ms (p95), 1.5 ms (p99)

  rule    limit                           asked  allowed  denied  share
  user    3 conversations start in 1m0s   2,000    1,960      40  2.0 %
  user    2 turns at once                 2,000    2,000       0  0.0 %
  user    10,000 tokens in 1m0s           2,000    2,000       0  0.0 %
  user    all of them                     2,000    1,960      40  2.0 %
  tenant  18 conversations start in 1m0s  1,960    1,960       0  0.0 %
  tenant  5 turns at once                 1,960    1,960       0  0.0 %
  tenant  65,000 tokens in 1m0s           1,960    1,900      60  3.1 %
  tenant  all of them                     1,960    1,900      60  3.1 %
`, out.String())
}

func TestReportCheck(t *testing.T) {
	t.Parallel()

	findings := []finding{
		{Rule: tenantRule, Limit: limiter.LimitAgents, Admissions: 1200, Peak: 18, Max: 18},
		{Rule: tenantRule, Limit: limiter.LimitTokens, Admissions: 1200, Peak: 64_999, Max: 65_000},
	}

	var out bytes.Buffer

	require.NoError(t, reportCheck(&out, findings))
	require.Contains(t, out.String(), `
  rule    limit on  admissions  most found  limit         exceeded
  tenant  agents         1,200          18  18                   0
  tenant  tokens         1,200      64,999  under 65,000         0

No limit was exceeded.
`)

	findings[0].Violations = 2
	findings[1].Violations = 1

	require.EqualError(t, reportCheck(&out, findings), "a limit was exceeded: admissions that should have been denied: 3")
}

func TestProgressLinesComeNowAndThen(t *testing.T) {
	t.Parallel()

	var out bytes.Buffer

	progress := newProgressLines(&out, 2000, noon)
	progress.add(noon)
	progress.add(noon.Add(lineInterval - 1))
	require.Empty(t, out.String())

	progress.add(noon.Add(lineInterval))
	progress.add(noon.Add(lineInterval + 1))
	progress.finish()
	require.Equal(t, "3 of 2,000 turns\n", out.String())
}

func TestThousands(t *testing.T) {
	t.Parallel()

	for number, expected := range map[int]string{0: "0", 999: "999", 1000: "1,000", 22_361_870: "22,361,870"} {
		require.Equal(t, expected, thousands(number))
	}
}
