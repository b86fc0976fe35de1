package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// measured is a report of made-up figures.
func measured() *report {
	target := 2.0
	off := 3.25

	return &report{
		scale:    fullScale,
		date:     time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		versions: []string{"PostgreSQL 17.0"},
		settings: []string{"fsync on"},
		hows:     []how{{"a verdict", "How it is done."}},
		results: []result{
			{Name: "a verdict", Path: nameA, Floor: nameA, Ratio: 1, P50: 1000, P99: 2345.6, Budget: budget{Statements: 3}},
			{
				Name: "a verdict", Path: gormPath, Floor: nameA, Ratio: 1.999, Target: &target, RatioWithoutFlush: &off, P50: 1999,
				Budget: budget{RoundTrips: 6, Statements: 7, WALBytes: 1234, WALFlushes: 1, Buffers: 41, Allocations: 455.4},
			},
			{Name: "a verdict", Path: serverPath, Floor: nameA, Ratio: 2.001, Target: &target},
			{Name: "growth, 10", Path: nameA, Floor: nameA, Ratio: 1, PerCall: 500, Axis: axisCallers, At: 10},
			{Name: "growth, 10", Path: gormPath, Floor: nameA, Ratio: 4, PerCall: 2000, Axis: axisCallers, At: 10},
		},
		sizes: []size{{relation: "table legion_agents", bytes: 3 << 20, agents: 1024}},
	}
}

func TestTheTableShowsRatiosBesideTheirTargetsAndBudgets(t *testing.T) {
	t.Parallel()

	text := measured().markdown()

	for _, line := range []string{
		"| what | who | ratio | target | commit off | p50 µs | p99 µs | round trips | statements | WAL bytes | WAL flushes | buffers | allocations |",
		"| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
		"| a verdict | floor A | 1.00 |  | – | 1,000 | 2,346 | 0 | 3 | 0 | 0 | 0 | 0 |",
		"|  | **GORM path** | **2.00** | 2, met | 3.25 | 1,999 | 0 | 6 | 7 | 1,234 | 1 | 41 | 455 |",
		"|  | **server path** | **2.00** | 2, missed | – | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |",
		"|  | **GORM path** | **4.00** | published | – | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |",
		"| table legion_agents | 3.0 | 3072 |",
		"- PostgreSQL 17.0",
		"- fsync on",
		"- **a verdict**: How it is done.",
	} {
		require.Contains(t, strings.Split(text, "\n"), line)
	}

	require.Contains(t, text, "2026-01-02")
}

func TestTheTerminalShowsTheSameTable(t *testing.T) {
	t.Parallel()

	var out strings.Builder

	require.NoError(t, measured().write(&out))
	require.Contains(t, out.String(), "\na verdict\n")
	require.Regexp(t, `GORM path +2\.00 +2, met +3\.25 +1,999 +0 +6 +7 +1,234 +1 +41 +455`, out.String())
}

func TestFilesHoldWhatWasMeasured(t *testing.T) {
	t.Parallel()

	folder := filepath.Join(t.TempDir(), "docs")
	require.NoError(t, measured().save(folder))

	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(folder, name))
		require.NoError(t, err)

		return string(text)
	}

	var entries []map[string]any

	require.NoError(t, json.Unmarshal([]byte(read(jsonFile)), &entries))
	require.Len(t, entries, 5)
	require.Equal(t, "a verdict", entries[1]["name"])
	require.Equal(t, gormPath, entries[1]["path"])
	require.InDelta(t, 1.999, entries[1]["ratio"], 0)
	require.InDelta(t, 2, entries[1]["target"], 0)
	require.Contains(t, entries[0], "target")
	require.Nil(t, entries[0]["target"])

	require.Equal(t, measured().markdown(), read(tableFile))

	drawn := read(plotFile)
	require.Contains(t, drawn, axisCallers)
	require.Contains(t, drawn, "GORM path: 10, 2 ms")
	require.NotContains(t, drawn, axisHistory, "nothing was measured along it")

	require.NoError(t, os.Remove(filepath.Join(folder, plotFile)))
	require.NoError(t, plotAgain(folder))
	require.Equal(t, drawn, read(plotFile), "the plot is drawn from the JSON alone")
}
