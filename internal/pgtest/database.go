package pgtest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// createAttempts bounds the wait for a template that somebody is connected to.
	createAttempts = 20

	// dropTimeout bounds clean-up, which has no context of a caller's to go by.
	dropTimeout = 30 * time.Second
)

// CreateDatabase creates an empty UTF-8 database under a name of its own and returns its DSN. It is
// dropped by [Server.DropDatabase] or by [Server.Stop].
func (s *Server) CreateDatabase(ctx context.Context) (string, error) {
	name := fmt.Sprintf("%s%d", s.prefix, s.databases.Add(1))
	statement := fmt.Sprintf(`CREATE DATABASE %q TEMPLATE template0 ENCODING 'UTF8'`, name)
	if s.copyFiles {
		statement += " STRATEGY file_copy"
	}
	for attempt := 1; ; attempt++ {
		_, err := s.admin.ExecContext(ctx, statement)
		if err == nil {
			return s.DSN(name), nil
		}
		if attempt == createAttempts || !isObjectInUse(err) {
			return "", fmt.Errorf("legion: create a database for a test: %w", err)
		}
		select {
		case <-time.After(20*time.Millisecond + rand.N(80*time.Millisecond)):
		case <-ctx.Done():
			return "", fmt.Errorf("legion: create a database for a test: %w", errors.Join(ctx.Err(), err))
		}
	}
}

// DropDatabase drops the database of a DSN that CreateDatabase returned, cutting the connections to
// it. A database that is gone already is no error; one that s did not create is.
func (s *Server) DropDatabase(ctx context.Context, dsn string) error {
	name, err := databaseOf(dsn)
	if err != nil {
		return err
	}
	if !strings.HasPrefix(name, s.prefix) {
		return fmt.Errorf("legion: the database of the DSN was not created by this server's CreateDatabase, so it is not dropped")
	}
	return dropDatabase(ctx, s.admin, name)
}

func dropDatabase(ctx context.Context, admin *sql.DB, name string) error {
	if _, err := admin.ExecContext(ctx, fmt.Sprintf(`DROP DATABASE IF EXISTS %q WITH (FORCE)`, name)); err != nil {
		return fmt.Errorf("legion: drop a test's database: %w", err)
	}
	return nil
}

// dropPrefixed drops the databases that an owner left on the server of LEGION_TEST_DSN. The prefix
// holds a random part of that owner's, so no other process's database can match.
func dropPrefixed(dsn, prefix string) error {
	ctx, cancel := context.WithTimeout(context.Background(), dropTimeout)
	defer cancel()
	admin, err := sql.Open("pgx", dsn)
	if err != nil {
		return err
	}
	return errors.Join(dropAll(ctx, admin, prefix), admin.Close())
}

func dropAll(ctx context.Context, admin *sql.DB, prefix string) error {
	names, err := databasesWith(ctx, admin, prefix)
	if err != nil {
		return err
	}
	var failures []error
	for _, name := range names {
		failures = append(failures, dropDatabase(ctx, admin, name))
	}
	return errors.Join(failures...)
}

func databasesWith(ctx context.Context, admin *sql.DB, prefix string) ([]string, error) {
	rows, err := admin.QueryContext(ctx, "SELECT datname FROM pg_database WHERE starts_with(datname::text, $1)", prefix)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var names []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, rows.Err()
}

func isObjectInUse(err error) bool {
	var postgres *pgconn.PgError
	return errors.As(err, &postgres) && postgres.Code == "55006"
}
