package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/legion-gorm/legion/bench/internal/measure"
)

// A budget is what one call takes that does not depend on how fast the machine is, a median
// over some calls of one caller.
type budget struct {
	RoundTrips float64 `json:"round_trips"`
	Statements float64 `json:"statements"`

	// WALBytes are written to the write-ahead log, and WALFlushes are how often the call
	// waits until it is on the disk.
	WALBytes   float64 `json:"wal_bytes"`
	WALFlushes float64 `json:"wal_flushes"`

	// Buffers are the pages of 8 KiB that PostgreSQL looks at, in its cache or not.
	Buffers float64 `json:"buffers"`

	// Allocations are the client's, AllocatedBytes their size.
	Allocations    float64 `json:"allocations"`
	AllocatedBytes float64 `json:"allocated_bytes"`
}

const (
	flushesVersion    = 180_000 // from here on they are counted in pg_stat_io
	forceFlushVersion = 150_000 // before, statistics come when they come

	// statisticsPause is longer than a backend of an older version keeps statistics to itself.
	statisticsPause = 1100 * time.Millisecond
)

// A monitor reads PostgreSQL's counters, from another database than the one that it looks
// at, so as not to see itself.
type monitor struct {
	connection *pgx.Conn
	version    int
	database   string
	query      string
}

func openMonitor(ctx context.Context, scene *scene) (*monitor, error) {
	config, err := pgx.ParseConfig(scene.dsn)
	if err != nil {
		return nil, fmt.Errorf("read the DSN of the server: %w", err)
	}

	connection, err := pgx.Connect(ctx, scene.server.DSN(""))
	if err != nil {
		return nil, fmt.Errorf("connect to the server: %w", err)
	}

	monitor := &monitor{connection: connection, database: config.Database}

	if err := connection.QueryRow(ctx, "SELECT current_setting('server_version_num')::int").Scan(&monitor.version); err != nil {
		return nil, errors.Join(fmt.Errorf("ask the server for its version: %w", err), connection.Close(ctx))
	}

	flushes := "(SELECT wal_sync FROM pg_stat_wal)"
	if monitor.version >= flushesVersion {
		flushes = "(SELECT coalesce(sum(fsyncs), 0)::bigint FROM pg_stat_io WHERE object = 'wal')"
	}

	monitor.query = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint, " + flushes + `, blks_hit + blks_read
FROM pg_stat_database WHERE datname = $1`

	return monitor, nil
}

func (m *monitor) close() { _ = m.connection.Close(context.Background()) }

// A reading is the state of PostgreSQL's counters.
type reading struct{ walBytes, walFlushes, buffers int64 }

func (m *monitor) read(ctx context.Context) (reading reading, err error) {
	err = m.connection.QueryRow(ctx, m.query, m.database).Scan(&reading.walBytes, &reading.walFlushes, &reading.buffers)
	if err != nil {
		return reading, fmt.Errorf("read the statistics of the server: %w", err)
	}

	return reading, nil
}

// publish makes the backend of the session, of which there must be one, hand in its counts.
func (m *monitor) publish(ctx context.Context, session *session) error {
	statement := "SELECT pg_stat_force_next_flush()"

	if m.version < forceFlushVersion {
		time.Sleep(statisticsPause)

		statement = "SELECT 1"
	}

	return session.db.WithContext(ctx).Exec(statement).Error
}

// budget counts what calls of the racer take, one at a time.
func (r *racer) budget(ctx context.Context, monitor *monitor, samples int) (budget, error) {
	lane := r.lanes[0]

	pool, err := lane.session.db.DB()
	if err != nil {
		return budget{}, err
	}

	// What one connection does, and no other, is what the call takes.
	pool.SetMaxOpenConns(1)

	taken := make([]budget, 0, samples)

	// The first one is for what is read once.
	for i := range samples + 1 {
		sample, err := r.sample(ctx, monitor, lane)
		if err != nil {
			return budget{}, err
		}

		if i > 0 {
			taken = append(taken, sample)
		}
	}

	result := medianBudget(taken)
	result.Allocations, result.AllocatedBytes, err = r.allocations(ctx, samples)

	return result, err
}

func (r *racer) sample(ctx context.Context, monitor *monitor, lane *lane) (budget, error) {
	if err := monitor.publish(ctx, lane.session); err != nil {
		return budget{}, err
	}

	before, err := monitor.read(ctx)
	if err != nil {
		return budget{}, err
	}

	counts := lane.session.counter.Counts()

	if _, err := r.batch(ctx, 0, 1, 1); err != nil {
		return budget{}, err
	}

	counts = lane.session.counter.Since(counts)

	if err := monitor.publish(ctx, lane.session); err != nil {
		return budget{}, err
	}

	after, err := monitor.read(ctx)

	return budget{
		RoundTrips: float64(counts.RoundTrips),
		Statements: float64(counts.Statements),
		WALBytes:   float64(after.walBytes - before.walBytes),
		WALFlushes: float64(after.walFlushes - before.walFlushes),
		Buffers:    float64(after.buffers - before.buffers),
	}, err
}

// allocations are those of one call, on average.
func (r *racer) allocations(ctx context.Context, calls int) (count, bytes float64, err error) {
	var before, after runtime.MemStats

	runtime.ReadMemStats(&before)

	if _, err := r.batch(ctx, 0, 1, calls); err != nil {
		return 0, 0, err
	}

	runtime.ReadMemStats(&after)

	return float64(after.Mallocs-before.Mallocs) / float64(calls), float64(after.TotalAlloc-before.TotalAlloc) / float64(calls), nil
}

func medianBudget(samples []budget) budget {
	middle := func(of func(budget) float64) float64 {
		values := make([]float64, len(samples))
		for i, sample := range samples {
			values[i] = of(sample)
		}

		return measure.Median(values)
	}

	return budget{
		RoundTrips: middle(func(b budget) float64 { return b.RoundTrips }),
		Statements: middle(func(b budget) float64 { return b.Statements }),
		WALBytes:   middle(func(b budget) float64 { return b.WALBytes }),
		WALFlushes: middle(func(b budget) float64 { return b.WALFlushes }),
		Buffers:    middle(func(b budget) float64 { return b.Buffers }),
	}
}
