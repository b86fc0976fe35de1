// Package server gives an example a database, so that running it needs nothing set up.
package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion/internal/pgtest"
)

// Main is the main function of an example: it calls run with a database and standard
// output, lets an interrupt end it, and exits with 1 if it fails.
func Main(name string, connections int, run func(ctx context.Context, db *gorm.DB, out io.Writer) error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)

	err := With(ctx, connections, func(db *gorm.DB) error { return run(ctx, db, os.Stdout) })

	stop()

	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1) //nolint:revive // it is the main function of several commands
	}
}

// With starts a PostgreSQL server, or takes that of LEGION_TEST_DSN, and calls body with
// a pool of so many connections to a new, empty database. Afterwards, and when ctx ends,
// nothing of it is left.
func With(ctx context.Context, connections int, body func(db *gorm.DB) error) (err error) {
	server, err := pgtest.Start(ctx)

	switch {
	case ctx.Err() != nil && err != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("start a database: %w", err)
	}
	defer func() { err = errors.Join(err, server.Stop()) }()

	dsn, err := server.CreateDatabase(ctx)
	if err != nil {
		return fmt.Errorf("create a database: %w", err)
	}

	// Whatever goes wrong comes back as an error. A log would mix with what is shown.
	db, err := gorm.Open(postgres.Open(dsn), &gorm.Config{Logger: logger.Discard})
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}

	pool, err := db.DB()
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer func() { err = errors.Join(err, pool.Close()) }()

	pool.SetMaxOpenConns(connections)
	pool.SetMaxIdleConns(connections) // the default of 2 would reconnect all the time

	return body(db)
}
