package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
)

const (
	barInterval  = 100 * time.Millisecond
	lineInterval = 5 * time.Second
)

// A progress shows how far the replay is: on a terminal as a bar, elsewhere as a line now
// and then.
type progress struct {
	bar *progressbar.ProgressBar // nil: lines

	out     io.Writer
	turns   int
	decided int
	printed time.Time
}

func newProgress(out *os.File, turns int) *progress {
	if info, err := out.Stat(); err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return newProgressLines(out, turns, time.Now())
	}

	return &progress{bar: progressbar.NewOptions(turns,
		progressbar.OptionSetWriter(out),
		progressbar.OptionSetDescription("replaying"),
		progressbar.OptionShowCount(),
		progressbar.OptionShowIts(),
		progressbar.OptionSetItsString("turns"),
		progressbar.OptionThrottle(barInterval),
		progressbar.OptionClearOnFinish(),
	)}
}

func newProgressLines(out io.Writer, turns int, started time.Time) *progress {
	return &progress{out: out, turns: turns, printed: started}
}

// add says that one more turn was decided. What cannot be shown is no reason to stop.
func (p *progress) add(now time.Time) {
	if p.bar != nil {
		_ = p.bar.Add(1)

		return
	}

	p.decided++

	if now.Sub(p.printed) >= lineInterval {
		p.printed = now
		_, _ = fmt.Fprintf(p.out, "%s of %s turns\n", thousands(p.decided), thousands(p.turns))
	}
}

// finish makes room for what is printed next.
func (p *progress) finish() {
	if p.bar != nil {
		_ = p.bar.Exit()
		_ = p.bar.Clear()
	}
}
