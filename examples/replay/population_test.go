package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPopulateDependsOnTheSeedAndThePositionAlone(t *testing.T) {
	t.Parallel()

	requests := generateTrace(1, 500)
	turns := populate(requests, 1)

	require.Equal(t, turns, populate(requests, 1))
	require.NotEqual(t, turns, populate(requests, 2))

	for i, other := range populate(generateTrace(2, 500), 1) {
		require.Equal(t, turns[i].tenant, other.tenant)
		require.Equal(t, turns[i].user, other.user)
	}
}

func TestPopulateKeepsTheRequestsAndSpreadsThem(t *testing.T) {
	t.Parallel()

	requests := generateTrace(1, 5000)
	turns := populate(requests, 1)
	byTenant := make(map[string]int)
	byUser := make(map[string]int)
	byAgent := make(map[string]int)

	for i, turn := range turns {
		require.Equal(t, requests[i], turn.request)
		require.Equal(t, int64(i)+1, turn.number)

		byTenant[turn.tenant]++
		byUser[turn.tenant+"/"+turn.user]++
		byAgent[turn.agentID]++
	}

	require.Len(t, byTenant, tenants)
	require.InDelta(t, tenants*usersPerTenant, len(byUser), 50)
	require.Greater(t, byTenant["tenant-01"], 5*byTenant["tenant-20"], "some tenants are far busier than others")
	require.Greater(t, byUser["tenant-01/user-01"], 100)
	require.InDelta(t, len(turns)/3, len(byAgent), 500, "a conversation has some turns")
}

func TestAConversationTakesOneTurnAtATime(t *testing.T) {
	t.Parallel()

	ends := make(map[string]time.Duration)

	for _, turn := range populate(generateTrace(1, 5000), 1) {
		require.LessOrEqual(t, ends[turn.agentID], turn.offset)
		ends[turn.agentID] = turn.offset + turn.duration()
	}
}
