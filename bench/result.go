package main

import (
	"fmt"
	"math"
	"strconv"
)

// A result is one contender in one benchmark, as it stands in performance.json.
type result struct {
	Name string `json:"name"`

	// Path is who it is: a path of Legion, the floor, or another one.
	Path string `json:"path"`

	// Ratio is the time of a call in that of the floor, with synchronous_commit on.
	Ratio float64 `json:"ratio"`

	// Target is the ratio not to exceed. Nil: there is none.
	Target *float64 `json:"target"`

	// RatioWithoutFlush is the ratio with synchronous_commit off, for both. Nil: not
	// measured.
	RatioWithoutFlush *float64 `json:"ratio_synchronous_commit_off"`

	// Callers called at the same time.
	Callers int `json:"callers"`

	// PerCall is the time that the ratio is made of, see measure.Round. It and the
	// quantiles of single calls are microseconds.
	PerCall float64 `json:"per_call_us"`
	P50     float64 `json:"p50_us"`
	P99     float64 `json:"p99_us"`

	// Floor is what the ratio is to, with its own quantiles.
	Floor    string  `json:"floor"`
	FloorP50 float64 `json:"floor_p50_us"`
	FloorP99 float64 `json:"floor_p99_us"`

	Budget budget `json:"budget"`

	// Axis and At are where the benchmark stands in the plot. Empty: it is not in it.
	Axis string `json:"axis,omitempty"`
	At   int    `json:"at,omitempty"`
}

// header names the columns of cells.
var header = []string{
	"what", "who", "ratio", "target", "commit off", "p50 µs", "p99 µs",
	"round trips", "statements", "WAL bytes", "WAL flushes", "buffers", "allocations",
}

// cells are the row of the result in the table.
func (r result) cells() []string {
	off := "–"
	if r.RatioWithoutFlush != nil {
		off = ratio(*r.RatioWithoutFlush)
	}

	return []string{
		r.Name, r.Path, ratio(r.Ratio), r.target(), off, whole(r.P50), whole(r.P99),
		count(r.Budget.RoundTrips), count(r.Budget.Statements), whole(r.Budget.WALBytes), count(r.Budget.WALFlushes),
		whole(r.Budget.Buffers), whole(r.Budget.Allocations),
	}
}

func (r result) target() string {
	switch {
	case r.Target == nil && r.isPath():
		return "published"
	case r.Target == nil:
		return ""
	case r.Ratio <= *r.Target:
		return fmt.Sprintf("%g, met", *r.Target)
	default:
		return fmt.Sprintf("%g, missed", *r.Target)
	}
}

func (r result) isPath() bool { return r.Path == gormPath || r.Path == serverPath }

func ratio(value float64) string { return strconv.FormatFloat(value, 'f', 2, 64) }

func whole(value float64) string { return thousands(int(math.Round(value))) }

// count is a whole number, but for a median between two.
func count(value float64) string { return strconv.FormatFloat(value, 'f', -1, 64) }
