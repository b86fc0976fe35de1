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
	// createAttempts bounds the wait for a template that somebody is connected to. The server itself
	// waits for five seconds each time.
	createAttempts = 5

	// createPause keeps those who wait for the template from trying again all at once.
	createPause = 200 * time.Millisecond

	// dropTimeout bounds clean-up, which has no deadline of its caller's.
	dropTimeout = 30 * time.Second

	objectInUse = "55006"
)

var errForeignDatabase = errors.New("legion: not a database that CreateDatabase of this Server created, so it is not dropped")

// CreateDatabase creates an empty UTF-8 database under a name of its own and returns its DSN. It is
// dropped by [Server.DropDatabase], and at the latest by [Server.Stop].
func (s *Server) CreateDatabase(ctx context.Context) (string, error) {
	name := fmt.Sprintf("%s%d", s.prefix, s.databases.Add(1))
	statement := fmt.Sprintf(`CREATE DATABASE %q TEMPLATE template0 ENCODING 'UTF8'`, name)
	if s.copyFiles {
		statement += " STRATEGY file_copy"
	}

	for attempts := 1; ; attempts++ {
		_, err := s.admin.ExecContext(ctx, statement)
		if err == nil {
			return s.DSN(name), nil
		}
		if attempts == createAttempts || !isObjectInUse(err) {
			return "", fmt.Errorf("legion: create a database for a test: %w", err)
		}
		select {
		case <-time.After(rand.N(createPause)):
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
		return errForeignDatabase
	}

	return dropDatabase(ctx, s.admin, name)
}

func dropDatabase(ctx context.Context, admin *sql.DB, name string) error {
	if _, err := admin.ExecContext(ctx, fmt.Sprintf(`DROP DATABASE IF EXISTS %q WITH (FORCE)`, name)); err != nil {
		return fmt.Errorf("legion: drop the database %s: %w", name, err)
	}

	return nil
}

func isObjectInUse(err error) bool {
	var postgres *pgconn.PgError

	return errors.As(err, &postgres) && postgres.Code == objectInUse
}
