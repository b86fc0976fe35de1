package main

import (
	"fmt"
	"strings"
	"time"
)

// markdown is performance.md.
func (r *report) markdown() string {
	var text strings.Builder

	fmt.Fprintf(&text, `# Performance

Measured on %s with `+"`go run ./bench -rounds %d -out docs`"+`, which writes this file.

- %s
- %s

Every ratio is the time of one call in that of a floor, measured in turns with it in the same run. What is
absolute, the microseconds, is there for orientation only.

`, r.date.Format(time.DateOnly), r.scale.rounds, strings.Join(r.versions, "\n- "), strings.Join(r.settings, ", "))

	if r.scale.rounds < minimumRounds {
		text.WriteString("**A quick run on small tables, to see whether it runs: the times say nothing.**\n\n")
	}

	text.WriteString(r.table())
	text.WriteString(r.sizesTable())

	fmt.Fprintf(&text, `
## How a verdict grows

![Time of a verdict against history, group size and callers](%s)

## How it is measured

%s
`, plotFile, strings.TrimSpace(r.method()))

	for _, how := range r.hows {
		fmt.Fprintf(&text, "- **%s**: %s\n", how.name, how.text)
	}

	return text.String()
}

func (r *report) table() string {
	var text strings.Builder

	row := func(cells []string) { text.WriteString("| " + strings.Join(cells, " | ") + " |\n") }
	row(header)

	rule := make([]string, len(header))
	for i := range rule {
		rule[i] = "---:"
		if i < 2 || header[i] == "target" {
			rule[i] = "---"
		}
	}

	row(rule)

	name := ""

	for _, result := range r.results {
		cells := result.cells()
		if result.Name == name {
			cells[0] = ""
		}

		name = result.Name

		if result.isPath() {
			cells[1], cells[2] = "**"+cells[1]+"**", "**"+cells[2]+"**"
		}

		row(cells)
	}

	return text.String()
}

func (r *report) sizesTable() string {
	if len(r.sizes) == 0 {
		return ""
	}

	var text strings.Builder

	fmt.Fprintf(&text, `
## Sizes

Of a table of %s agents, each with one entry of usage and two fields of metadata, after VACUUM.

| relation | MiB | bytes an agent |
| --- | ---: | ---: |
`, thousands(int(r.sizes[0].agents)))

	for _, size := range r.sizes {
		fmt.Fprintf(&text, "| %s | %.1f | %d |\n", size.relation, float64(size.bytes)/(1<<20), size.bytes/max(1, size.agents))
	}

	return text.String()
}

// method is the text on how the figures come about.
func (r *report) method() string {
	return fmt.Sprintf(`
The floors are what an application pays anyway, on the same server, tables and indexes, through the same driver:

- **floor A**: the bare upsert of the agent's row, in a GORM transaction;
- **floor B**: all callers update one and the same row, each in a GORM transaction of its own;
- **floor C**: the bare `+"`usage || $1`"+`, a statement that commits by itself.

Beside Legion stand two others. The *original's design* is the one that Legion for GORM follows: in one transaction an advisory lock on a
32-bit hash of each rule's identity, the upsert, and one query for each limit. It is not exact (limiter/locks.go says why). The *token bucket*
is one row with a rate and a burst in a plain transaction. It knows one key and no overlapping groups.

- **Turns.** A benchmark has %d rounds. In each, short batches of the floor and of every contender follow each other in a rotating order, all on one
  database, so that whatever else the machine does hits all of them. A ratio is taken within a round; what is shown is the median of the rounds.
- **Time of a call.** With one caller, the median of the round. With several, the time of a batch divided by its calls, the median of the batches:
  a single call would also count the queue in front of it. p50 and p99 are those of single calls, of all rounds, and do contain the queue.
- **Durability.** fsync, full_page_writes and synchronous_commit are on. The column "commit off" is the ratio of the same calls with
  synchronous_commit off, for the floor too: what is left once nobody waits for the disk.
- **Warm.** Every connection has made the call at least %d times before, so that statements are prepared and plans settled.
- **Budget.** Round trips, statements, WAL, flushes, buffers and allocations are what one call of one caller takes, the median of %d (allocations: the
  mean). They do not depend on the speed of the machine. A round trip is a wait for an answer after something was sent, counted
  at the socket. Statements are those that the driver sends, BEGIN and COMMIT among them. WAL bytes are what the write-ahead log grows by;
  a flush is a wait until it is on the disk. Both are counted for the whole server, so a call of many milliseconds may have a flush of the
  background's. Buffers are pages of 8 KiB that the server looks at, cached or not. Allocations are the client's.
- **Rows.** History is inserted by SQL and vacuumed. A benchmark's own agents are new with each call, and where they would add to what is measured
  they are removed between the rounds.
`, r.scale.rounds, r.scale.warmUp, r.scale.samples)
}
