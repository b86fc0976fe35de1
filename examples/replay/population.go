package main

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"
)

const (
	tenants        = 20
	usersPerTenant = 25

	// newConversation is the share of turns that begin a conversation although there is
	// one that could go on.
	newConversation = 0.25
)

// A turn is a request of the trace with someone who made it. The agent is a conversation,
// and a request is one turn of it.
type turn struct {
	request

	number  int64 // its position in the trace, from 1
	tenant  string
	user    string
	agentID string
}

// populate gives every request a tenant, a user and a conversation, since a trace names
// none. A seeded hash of its position chooses: some tenants are far busier than others,
// and so are some of their users. A user's conversations take turns one after the other;
// who asks again before the answer is there does so in another conversation.
func populate(requests []request, seed uint64) []turn {
	turns := make([]turn, len(requests))

	// The conversations of each user: when the latest turn of each is over.
	conversations := make(map[[2]int][]time.Duration, tenants*usersPerTenant)

	for i, request := range requests {
		tenantDraw, userDraw, conversationDraw := draws(seed, uint64(i))
		user := [2]int{skewed(tenantDraw, tenants), skewed(userDraw, usersPerTenant)}

		chosen := -1
		if conversationDraw >= newConversation {
			chosen = latestIdle(conversations[user], request.offset)
		}

		if chosen < 0 {
			chosen = len(conversations[user])
			conversations[user] = append(conversations[user], 0)
		}

		conversations[user][chosen] = request.offset + request.duration()

		turn := turn{
			request: request,
			number:  int64(i) + 1,
			tenant:  fmt.Sprintf("tenant-%02d", user[0]+1),
			user:    fmt.Sprintf("user-%02d", user[1]+1),
		}
		turn.agentID = fmt.Sprintf("%s/%s/conversation-%04d", turn.tenant, turn.user, chosen+1)
		turns[i] = turn
	}

	return turns
}

// latestIdle is the newest conversation whose latest turn is over, or -1.
func latestIdle(ends []time.Duration, now time.Duration) int {
	for i, end := range slices.Backward(ends) {
		if end <= now {
			return i
		}
	}

	return -1
}

// draws returns three numbers in [0,1) that depend on the seed and the position alone.
func draws(seed, position uint64) (first, second, third float64) {
	hash := sha256.Sum256(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, seed), position))
	number := func(at int) float64 { return math.Ldexp(float64(binary.BigEndian.Uint64(hash[at:])>>11), -53) }

	return number(0), number(8), number(16)
}

// skewed chooses one of n so that the first is far more likely than the last.
func skewed(draw float64, n int) int { return int(draw * draw * float64(n)) }
