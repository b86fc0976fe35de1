package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/bench/internal/measure"
	"github.com/legion-gorm/legion/internal/pgtest"
)

// shutdownTime is how long a plugin may take to end its turns.
const shutdownTime = 10 * time.Second

// A scene is the database of one benchmark, which its contenders share: they find the same
// tables, as large and as worn.
type scene struct {
	server *pgtest.Server
	dsn    string
	scale  scale

	// step is the one that is measured.
	step step

	// db prepares the tables. Nothing of it is measured.
	db    *gorm.DB
	close func() error
}

// tables are those of the floors and of the others that are compared.
const tables = `
CREATE TABLE bench_counters (id bigint PRIMARY KEY, value bigint NOT NULL);
CREATE TABLE bench_buckets (
  key text PRIMARY KEY, burst bigint NOT NULL, rate double precision NOT NULL, tokens double precision NOT NULL, at timestamptz NOT NULL
);
CREATE TABLE bench_usage (agent_id text PRIMARY KEY, usage jsonb NOT NULL)`

func openScene(ctx context.Context, server *pgtest.Server, scale scale) (_ *scene, err error) {
	dsn, err := server.CreateDatabase(ctx)
	if err != nil {
		return nil, err
	}

	scene := &scene{server: server, dsn: dsn, scale: scale}

	db, closeDB, err := scene.connect(ctx, 2, true, new(measure.Counter))
	if err != nil {
		return nil, errors.Join(err, server.DropDatabase(ctx, dsn))
	}

	scene.db = db
	scene.close = func() error {
		return errors.Join(closeDB(), server.DropDatabase(context.WithoutCancel(ctx), dsn))
	}

	if err := scene.migrate(ctx); err != nil {
		return nil, errors.Join(err, scene.close())
	}

	return scene, nil
}

func (s *scene) migrate(ctx context.Context) error {
	if err := legion.Migrate(s.db.WithContext(ctx)); err != nil {
		return err
	}

	return s.execute(ctx, tables)
}

// connect opens a pool of so many connections. durable: synchronous_commit is on.
func (s *scene) connect(ctx context.Context, connections int, durable bool, counter *measure.Counter) (*gorm.DB, func() error, error) {
	config, err := pgx.ParseConfig(s.dsn)
	if err != nil {
		return nil, nil, fmt.Errorf("read the DSN of the server: %w", err)
	}

	counter.Watch(config)

	config.RuntimeParams["synchronous_commit"] = "off"
	if durable {
		config.RuntimeParams["synchronous_commit"] = "on"
	}

	pool := stdlib.OpenDB(*config)
	pool.SetMaxOpenConns(connections)
	pool.SetMaxIdleConns(connections)

	// Whatever goes wrong comes back as an error.
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: pool}), &gorm.Config{Logger: logger.Discard})
	if err != nil {
		return nil, nil, errors.Join(err, pool.Close())
	}

	return db.WithContext(ctx), pool.Close, nil
}

// begin opens a session of the contender.
func (s *scene) begin(ctx context.Context, contender contender, connections int, durable bool) (_ *session, closeSession func() error, err error) {
	session := &session{name: contender.name, scene: s, counter: new(measure.Counter)}

	db, closeDB, err := s.connect(ctx, connections, durable, session.counter)
	if err != nil {
		return nil, nil, err
	}

	session.db = db
	if contender.path == nil {
		return session, closeDB, nil
	}

	// Where a log goes and what that takes is the application's choice.
	session.plugin = legion.New(append([]legion.Option{legion.WithObserver(nil)}, contender.path.options...)...)

	closeSession = func() error {
		// Shutdown ends what has not ended by then.
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
		defer cancel()

		return errors.Join(session.plugin.Shutdown(ending), closeDB())
	}

	if err := errors.Join(db.Use(session.plugin), legion.Migrate(db)); err != nil {
		return nil, nil, errors.Join(err, closeSession())
	}

	return session, closeSession, nil
}

func (s *scene) execute(ctx context.Context, statement string, vars ...any) error {
	if err := s.db.WithContext(ctx).Exec(statement, vars...).Error; err != nil {
		return fmt.Errorf("prepare the tables: %w", err)
	}

	return nil
}

// vacuum leaves the tables as autovacuum would, had it the time.
func (s *scene) vacuum(ctx context.Context) error {
	return s.execute(ctx, "VACUUM (ANALYZE) legion_agents, legion_agents_identities")
}

// addHistory adds agents of the last day, spread over the groups, and registers these.
func (s *scene) addHistory(ctx context.Context) error {
	if err := s.execute(ctx, `
INSERT INTO legion_agents (agent_id, metadata, usage, started_at, created_at, updated_at)
SELECT 'history ' || n,
  jsonb_build_object('ip', 'ip ' || n % ?::int, 'tenant', 'tenant ' || n % ?::int, 'email', 'email ' || n % ?::int),
  jsonb_build_array(jsonb_build_object('id', 'request', 'at', (extract(epoch FROM moment) * 1000)::bigint, 'total_tokens', 1234, 'evals', 1)),
  moment, moment, moment
FROM generate_series(1, ?::int) AS n
CROSS JOIN LATERAL (SELECT now() - (n::bigint * 7919 % 10007) / 10007.0 * interval '1 day' AS moment) AS clock`,
		s.scale.identities, s.scale.identities, s.scale.identities, s.scale.history); err != nil {
		return err
	}

	return s.execute(ctx, `
INSERT INTO legion_agents_identities (identity)
SELECT jsonb_build_object(kind, kind || ' ' || n)
FROM generate_series(0, ?::int - 1) AS n CROSS JOIN unnest(ARRAY['ip', 'tenant', 'email']) AS kind`, s.scale.identities)
}
