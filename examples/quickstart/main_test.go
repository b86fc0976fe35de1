package main

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/internal/pgtest"
)

var update = flag.Bool("update", false, "write testdata/quickstart.golden anew")

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestTheStoryIsTheGoldenFile(t *testing.T) {
	t.Parallel()

	golden := filepath.Join("testdata", "quickstart.golden")

	var told bytes.Buffer

	require.NoError(t, run(t.Context(), pgtest.Open(t), &told))

	if *update {
		require.NoError(t, os.WriteFile(golden, told.Bytes(), 0o600))
	}

	expected, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(expected), told.String(), "if this is meant: go test ./examples/quickstart -update")
}

func TestAStepThatCannotAskTheDatabaseSaysSo(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	pool, err := db.DB()
	require.NoError(t, err)
	require.NoError(t, pool.Close())

	var told bytes.Buffer

	require.ErrorContains(t, run(t.Context(), db, &told), "use the plugin")
	require.Empty(t, told.String())
}
