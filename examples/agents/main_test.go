package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/internal/pgtest"
)

func TestMain(m *testing.M) {
	if isWorker() {
		os.Exit(workerMain())
	}

	pgtest.Main(m)
}

func TestAKilledProcessCostsNoTokenAndExceedsNoLimit(t *testing.T) {
	t.Parallel()

	var told bytes.Buffer

	require.NoError(t, run(t.Context(), pgtest.Open(t), &told))
	require.Contains(t, told.String(), "no limit was exceeded, and no token lost")
	require.NotContains(t, told.String(), "recovered from the process that was killed   0")
}

func TestTheCheckNamesWhatShouldNotHaveHappened(t *testing.T) {
	t.Parallel()

	told := map[outcomeKind]int{finished: 1, recovered: 1}

	for want, outcome := range map[string]outcome{
		"9 slots were held at once":    {counts: told, mostSlots: slots + 1},
		"12001 tokens were recorded":   {counts: told, found: budget + 1},
		`missing: ["a, step 1"]`:       {counts: told, lost: []string{"a, step 1"}},
		"2 calls are recorded twice":   {counts: told, doubled: 2},
		"the story was not told":       {},
		"or none was recovered: the s": {counts: map[outcomeKind]int{finished: 1}},
	} {
		require.ErrorContains(t, outcome.print(&bytes.Buffer{}), want)
	}

	require.NoError(t, (&outcome{counts: told, mostSlots: slots, found: budget}).print(&bytes.Buffer{}))
}
