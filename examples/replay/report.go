package main

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/legion-gorm/legion/examples/internal/table"
	"github.com/legion-gorm/legion/limiter"
)

// reportStart prints what is going to be replayed, and what is made up about it.
func reportStart(out io.Writer, trace trace, options options) error {
	speed := speedFlag(options.speed)
	text := fmt.Sprintf(`Replaying %s turns of %s
as %d tenants with up to %d users each, chosen by a hash of seed %d and of the turn's position,
with %d workers at speed %s
`, thousands(len(trace.turns)), trace.source, tenants, usersPerTenant, options.seed, options.workers, &speed)

	if options.withoutLocks {
		text += "WITHOUT LOCKS: the check is expected to fail\n"
	}

	if _, err := io.WriteString(out, text); err != nil {
		return fmt.Errorf("print the start: %w", err)
	}

	return nil
}

// reportTally prints how many turns were admitted and denied, by what, and how fast.
func reportTally(out io.Writer, tally *tally, traceTime time.Duration) error {
	percentiles := tally.percentiles(50, 95, 99)

	_, err := fmt.Fprintf(out, `
%s turns in %.1f s, %.0f a second: the trace's %s at %.0f times its speed
%s admitted with %s tokens, %s denied (%s)
Enforce took %s (p50), %s (p95), %s (p99)

`,
		thousands(tally.turns()), tally.elapsed.Seconds(), float64(tally.turns())/tally.elapsed.Seconds(),
		traceTime.Round(time.Second), traceTime.Seconds()/tally.elapsed.Seconds(),
		thousands(tally.admitted), thousands(tally.tokens), thousands(tally.denied), share(tally.denied, tally.turns()),
		milliseconds(percentiles[0]), milliseconds(percentiles[1]), milliseconds(percentiles[2]))
	if err != nil {
		return fmt.Errorf("print the tally: %w", err)
	}

	// A rule is asked only if those before it allow.
	asked := tally.turns()
	shown := table.New("rule", "limit", "asked", "allowed", "denied", "share")

	for _, rule := range []struct {
		name   string
		limits limits
	}{{userRule, userLimits}, {tenantRule, tenantLimits}} {
		for _, limit := range []struct {
			limit limiter.Limit
			text  string
		}{
			{limiter.LimitAgents, fmt.Sprintf("%s conversations start in %s", thousands(rule.limits.agents), window)},
			{limiter.LimitRunningAgents, thousands(rule.limits.running) + " turns at once"},
			{limiter.LimitTokens, fmt.Sprintf("%s tokens in %s", thousands(rule.limits.tokens), window)},
		} {
			denied := tally.violations[violation{rule.name, limit.limit}]
			shown.Add(rule.name, limit.text, thousands(asked), thousands(asked-denied), thousands(denied), share(denied, asked))
		}

		denied := tally.deniedBy[rule.name]
		shown.Add(rule.name, "all of them", thousands(asked), thousands(asked-denied), thousands(denied), share(denied, asked))

		asked -= denied
	}

	return shown.Write(out)
}

var errExceeded = errors.New("a limit was exceeded")

// reportCheck prints the findings, and returns an error if a limit was exceeded.
func reportCheck(out io.Writer, findings []finding) error {
	_, err := fmt.Fprint(out, "\nThe check: each admission again, over its own window, from the log in the database\n\n")
	if err != nil {
		return fmt.Errorf("print the check: %w", err)
	}

	var violations int64

	shown := table.New("rule", "limit on", "admissions", "most found", "limit", "exceeded")

	for _, finding := range findings {
		shown.Add(finding.Rule, finding.Limit, thousands(finding.Admissions),
			thousands(finding.Peak), bound(finding), thousands(finding.Violations))

		violations += finding.Violations
	}

	if err := shown.Write(out); err != nil {
		return err
	}

	if violations > 0 {
		return fmt.Errorf("%w: admissions that should have been denied: %s", errExceeded, thousands(violations))
	}

	_, err = fmt.Fprintln(out, "\nNo limit was exceeded.")
	if err != nil {
		return fmt.Errorf("print the check: %w", err)
	}

	return nil
}

// bound is the most that an admission may find. Agents include itself; tokens do not, and
// there must be some left.
func bound(finding finding) string {
	if finding.Limit == limiter.LimitTokens {
		return "under " + thousands(finding.Max)
	}

	return thousands(finding.Max)
}

func thousands[T int | int64](number T) string {
	digits := strconv.FormatInt(int64(number), 10)
	for at := len(digits) - 3; at > 0; at -= 3 {
		digits = digits[:at] + "," + digits[at:]
	}

	return digits
}

func share(part, whole int) string {
	if whole == 0 {
		return "-"
	}

	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(whole))
}

func milliseconds(duration time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(duration)/float64(time.Millisecond))
}
