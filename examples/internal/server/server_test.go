package server_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/examples/internal/server"
	"github.com/legion-gorm/legion/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestWithGivesADatabaseUntilTheBodyReturns(t *testing.T) {
	t.Parallel()

	const connections = 3

	var kept *gorm.DB

	failure := errors.New("the body failed")

	err := server.With(t.Context(), connections, func(db *gorm.DB) error {
		kept = db
		pool, err := db.DB()
		require.NoError(t, err)
		require.Equal(t, connections, pool.Stats().MaxOpenConnections)
		require.NoError(t, db.Exec("CREATE TABLE note (text text)").Error)

		return failure
	})
	require.ErrorIs(t, err, failure)
	require.Error(t, kept.Exec("SELECT").Error)
}

func TestWithGivesUpWhenTheContextHasEnded(t *testing.T) {
	t.Parallel()

	ctx, cancel := context.WithCancel(t.Context())
	cancel()

	err := server.With(ctx, 1, func(*gorm.DB) error {
		require.Fail(t, "there is no time for a body")

		return nil
	})
	require.ErrorIs(t, err, context.Canceled)
}
