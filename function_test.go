package legion_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/limiter"
)

func TestTheServerFunctionDecides(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t, legion.WithServerFunction())
	inUse, err := plugin.ServerFunction(t.Context())
	require.NoError(t, err)
	require.True(t, inUse)

	require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))
	require.ErrorIs(t, limiter.Enforce(db, "two", runningRule(1)), limiter.ErrExceeded)
	require.NoError(t, limiter.Enforce(db, "one", runningRule(1)))

	turn, err := plugin.Begin(t.Context(), "one", reserving(100, tokensRule(1000)))
	require.NoError(t, err)
	require.NoError(t, turn.End(t.Context()))
}
