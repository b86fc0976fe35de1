package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/examples/internal/golden"
	"github.com/legion-gorm/legion/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestTheStoryIsTheGoldenFile(t *testing.T) {
	t.Parallel()

	var told bytes.Buffer

	require.NoError(t, run(t.Context(), pgtest.Open(t), &told))

	golden.Require(t, "quickstart.golden", told.String())
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
