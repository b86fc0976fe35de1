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

var update = flag.Bool("update", false, "write testdata/hooks.golden anew")

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestTheApplicationDoesWhatTheGoldenFileSays(t *testing.T) {
	t.Parallel()

	golden := filepath.Join("testdata", "hooks.golden")

	var told bytes.Buffer

	require.NoError(t, run(t.Context(), pgtest.Open(t, pgtest.MaxOpenConnections(connections)), &told))

	if *update {
		require.NoError(t, os.WriteFile(golden, told.Bytes(), 0o600))
	}

	expected, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(expected), told.String(), "if this is meant: go test ./examples/hooks -update")
}
