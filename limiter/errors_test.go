package limiter_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/limiter"
)

func TestTheTextOfADenialNamesRuleLimitAndFigures(t *testing.T) {
	t.Parallel()

	policy := limiter.Policy{Window: 90 * time.Minute}

	for _, test := range []struct {
		denial limiter.ExceededError
		text   string
	}{
		{
			limiter.ExceededError{
				AgentID: secret, Rule: limiter.Rule{Name: "per address", Identity: limiter.Identity{"ip": secret}, Policy: policy},
				Violations: []limiter.Quota{{Limit: limiter.LimitAgents, Max: 10, Used: 11}}, RetryAfter: 12500 * time.Millisecond,
			},
			`legion: rule "per address" (ip) denies: at most 10 agents start in 1h30m0s; retry after 12.5s`,
		},
		{
			limiter.ExceededError{
				AgentID: secret, Rule: limiter.Rule{Identity: limiter.Identity{"tenant": secret, "email": secret}, Policy: policy}, RuleIndex: 2,
				Violations: []limiter.Quota{
					{Limit: limiter.LimitAgents, Max: 0, Used: 1},
					{Limit: limiter.LimitRunningAgents, Max: 2, Used: 3},
					{Limit: limiter.LimitTokens, Max: 1000, Used: 1234},
					{Limit: limiter.LimitEvals, Max: 5, Used: 5},
				},
			},
			`legion: rule 3 (email, tenant) denies: 0 agents allowed, at most 2 agents run at once, ` +
				`1234 of 1000 tokens used in 1h30m0s, 5 of 5 evals used in 1h30m0s`,
		},
		{
			limiter.ExceededError{
				Rule: limiter.Rule{Identity: limiter.Everyone(), Policy: policy}, Violations: []limiter.Quota{{Limit: limiter.LimitRunningAgents, Max: 0, Used: 1}},
			},
			`legion: rule 1 (everyone) denies: at most 0 agents run at once`,
		},
	} {
		require.Equal(t, test.text, test.denial.Error())
		require.NotContains(t, test.denial.Error(), secret)
	}
}

func TestErrorsAreFoundThroughWraps(t *testing.T) {
	t.Parallel()

	db := setup(t)
	wrapped := fmt.Errorf("start the chat: %w", errors.Join(errors.New("beside"), limiter.Enforce(db, "agent", maxAgents(tenant, 0))))
	require.ErrorIs(t, wrapped, limiter.ErrExceeded)

	var exceeded *limiter.ExceededError

	require.ErrorAs(t, wrapped, &exceeded)
	require.Equal(t, "agent", exceeded.AgentID)
	require.Equal(t, tenant, exceeded.Rule.Identity)

	// Through GORM's hooks and its own wraps, too.
	require.NoError(t, db.AutoMigrate(&chat{}))
	require.NoError(t, db.Create(&chat{AgentID: "first", Tenant: "acme"}).Error)

	err := db.Transaction(func(tx *gorm.DB) error {
		if err := tx.Create(&chat{AgentID: "second", Tenant: "acme"}).Error; err != nil {
			return fmt.Errorf("store the chat: %w", err)
		}

		return nil
	})
	requireDenied(t, err, limiter.LimitAgents)

	missing := fmt.Errorf("stop: %w", limiter.Release(db, "nobody"))
	require.ErrorIs(t, missing, limiter.ErrNotFound)
	require.ErrorIs(t, missing, gorm.ErrRecordNotFound)
}

func TestEverySentinelIsOnlyItself(t *testing.T) {
	t.Parallel()

	sentinels := []error{
		limiter.ErrExceeded, limiter.ErrInvalidRule, limiter.ErrInvalidAgentID, limiter.ErrInvalidConfig, limiter.ErrIsolation,
		limiter.ErrNotMigrated, limiter.ErrNoConnection, limiter.ErrAgentRunning, limiter.ErrNotFound, limiter.ErrContention,
	}
	for i, err := range sentinels {
		require.Regexp(t, "^legion: ", err.Error())

		for j, other := range sentinels {
			require.Equal(t, i == j, errors.Is(err, other), "%v is %v", err, other)
		}
	}
}

func TestRetryableErrorsAreThoseThatASecondRunMayNotMeet(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		err       error
		retryable bool
	}{
		{nil, false},
		{errors.New("any other"), false},
		{&limiter.ExceededError{}, false},
		{limiter.ErrInvalidRule, false},
		{limiter.ErrIsolation, false},
		{limiter.ErrNotMigrated, false},
		{limiter.ErrNoConnection, false},
		{limiter.ErrNotFound, false},
		{context.Canceled, false},
		{context.DeadlineExceeded, false},
		{errors.Join(net.ErrClosed, context.Canceled), false}, // a connection that was closed because its context ended
		{net.ErrClosed, true},
		{limiter.ErrContention, true},
		{&pgconn.PgError{Code: "40P01"}, true},
		{&pgconn.PgError{Code: "40001"}, true},
		{&pgconn.PgError{Code: "08006"}, true},
		{&pgconn.PgError{Code: "57P01"}, true},
		{&pgconn.PgError{Code: "57P05"}, true},  // a session that was idle for too long
		{&pgconn.PgError{Code: "25P03"}, true},  // a transaction that was
		{&pgconn.PgError{Code: "25P04"}, false}, // one that took too long
		{&pgconn.PgError{Code: "53100"}, false}, // a disk that is full
		{&pgconn.PgError{Code: "57014"}, false}, // a statement that was cancelled, for example by its timeout
		{&pgconn.PgError{Code: "23505"}, false},
		{&pgconn.PgError{Code: "42P01"}, false},
	} {
		require.Equal(t, test.retryable, limiter.Retryable(test.err), "%v", test.err)

		if test.err != nil {
			require.Equal(t, test.retryable, limiter.Retryable(fmt.Errorf("wrapped: %w", test.err)), "%v", test.err)
		}
	}
}
