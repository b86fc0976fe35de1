package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/examples/internal/golden"
	"github.com/legion-gorm/legion/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestTheApplicationDoesWhatTheGoldenFileSays(t *testing.T) {
	t.Parallel()

	var told bytes.Buffer

	require.NoError(t, run(t.Context(), pgtest.Open(t, pgtest.MaxOpenConnections(connections)), &told))

	golden.Require(t, "hooks.golden", told.String())
}
