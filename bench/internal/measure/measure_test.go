package measure_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/bench/internal/measure"
	"github.com/legion-gorm/legion/internal/pgtest"
)

// connect returns a connection that the counter watches, without the round trips that
// prepare a statement.
func connect(t *testing.T, counter *measure.Counter) *pgx.Conn {
	t.Helper()

	config, err := pgx.ParseConfig(pgtest.Database(t))
	require.NoError(t, err)

	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	counter.Watch(config)

	connection, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, connection.Close(context.WithoutCancel(t.Context()))) })

	return connection
}

func TestACounterTellsStatementsFromRoundTrips(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name     string
		work     func(ctx context.Context, connection *pgx.Conn) error
		expected measure.Counts
	}{
		{"nothing", func(context.Context, *pgx.Conn) error { return nil }, measure.Counts{}},
		{"a statement", func(ctx context.Context, connection *pgx.Conn) error {
			_, err := connection.Exec(ctx, "SELECT 1")

			return err
		}, measure.Counts{Statements: 1, RoundTrips: 1}},
		{"a transaction", func(ctx context.Context, connection *pgx.Conn) error {
			return pgx.BeginFunc(ctx, connection, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "SELECT 1")

				return err
			})
		}, measure.Counts{Statements: 3, RoundTrips: 3}},
		{"an answer in many pieces", func(ctx context.Context, connection *pgx.Conn) error {
			_, err := connection.Exec(ctx, "SELECT repeat('a', 1000) FROM generate_series(1, 1000)")

			return err
		}, measure.Counts{Statements: 1, RoundTrips: 1}},
		{"a batch", func(ctx context.Context, connection *pgx.Conn) error {
			batch := new(pgx.Batch)
			for range 3 {
				batch.Queue("SELECT 1")
			}

			return connection.SendBatch(ctx, batch).Close()
		}, measure.Counts{Statements: 3, RoundTrips: 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			var counter measure.Counter

			connection := connect(t, &counter)
			before := counter.Counts()

			require.NoError(t, test.work(t.Context(), connection))
			require.Equal(t, test.expected, counter.Since(before))
		})
	}
}

func TestAConnectionThatCannotBeOpenedIsAnError(t *testing.T) {
	t.Parallel()

	var counter measure.Counter

	config, err := pgx.ParseConfig("host=127.0.0.1 port=1 sslmode=disable")
	require.NoError(t, err)
	counter.Watch(config)

	_, err = pgx.ConnectConfig(t.Context(), config)
	require.Error(t, err)
	require.Equal(t, measure.Counts{}, counter.Counts())
}

func TestMediansAndQuantiles(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		values           []int
		median, p50, p99 int
	}{
		{nil, 0, 0, 0},
		{[]int{7}, 7, 7, 7},
		{[]int{9, 1}, 5, 1, 9},
		{[]int{3, 1, 2}, 2, 2, 3},
		{[]int{4, 3, 2, 1}, 2, 2, 4},
	} {
		require.Equal(t, test.median, measure.Median(test.values), test.values)
		require.Equal(t, test.p50, measure.Quantile(test.values, 0.5), test.values)
		require.Equal(t, test.p99, measure.Quantile(test.values, 0.99), test.values)
	}

	hundred := make([]int, 100)
	for i := range hundred {
		hundred[i] = 100 - i
	}

	require.Equal(t, 99, measure.Quantile(hundred, 0.99))
	require.Equal(t, 1, measure.Quantile(hundred, 0))
	require.Equal(t, 100, hundred[0], "the values stay as they are")
}

func TestEveryCallerMakesItsCallsUnderNumbersOfTheirOwn(t *testing.T) {
	t.Parallel()

	var (
		mutex   sync.Mutex
		numbers = map[int]int{}
		meeting sync.WaitGroup
	)

	meeting.Add(4)

	batch, err := measure.Run(t.Context(), func(_ context.Context, batch, number int) error {
		if number%5 == 0 {
			// Were the callers not there at the same time, this would wait for ever.
			meeting.Done()
			meeting.Wait()
		}

		mutex.Lock()
		defer mutex.Unlock()

		numbers[number] += batch

		return nil
	}, 4, 5, 7, 100)
	require.NoError(t, err)
	require.Len(t, batch.Latencies, 20)
	require.NotContains(t, batch.Latencies, time.Duration(0))
	require.Positive(t, batch.PerCall)
	require.Len(t, numbers, 20)

	for number, batch := range numbers {
		require.Equal(t, 7, batch)
		require.GreaterOrEqual(t, number, 100)
		require.Less(t, number, 120)
	}
}

func TestTheFirstErrorEndsABatch(t *testing.T) {
	t.Parallel()

	failure := errors.New("failure")
	calls := 0

	_, err := measure.Run(t.Context(), func(context.Context, int, int) error {
		if calls++; calls == 2 {
			return failure
		}

		return nil
	}, 1, 5, 0, 0)
	require.ErrorIs(t, err, failure)
	require.Equal(t, 2, calls)
}

func TestTheTimeOfACallLeavesTheQueueOut(t *testing.T) {
	t.Parallel()

	round := measure.Round{
		{Latencies: []time.Duration{1, 2, 30}, PerCall: 4},
		{Latencies: []time.Duration{5, 6, 70}, PerCall: 8},
		{Latencies: []time.Duration{5, 6, 70}, PerCall: 90},
	}
	require.Equal(t, time.Duration(6), round.Time(1))
	require.Equal(t, time.Duration(8), round.Time(16))
}
