package pgtest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
)

// launchGiven launches nothing: the server of LEGION_TEST_DSN runs. What the supervisor is there for
// is to drop the owner's databases if the owner can't.
func launchGiven(ctx context.Context, request *order) (launched, error) {
	admin, err := sql.Open("pgx", request.DSN)
	if err != nil {
		return launched{}, fmt.Errorf("open a connection: %w", err)
	}
	if err := errors.Join(admin.PingContext(ctx), admin.Close()); err != nil {
		return launched{}, fmt.Errorf("the server of %s: %w", dsnVariable, err)
	}
	release := func() error { return dropPrefixed(context.WithoutCancel(ctx), request.DSN, request.Prefix) }

	return launched{reply{DSN: request.DSN}, release}, nil
}

// dropPrefixed drops what an owner left on the server of LEGION_TEST_DSN. The prefix has a random
// part of that owner's, so no other process's database matches.
func dropPrefixed(ctx context.Context, dsn, prefix string) error {
	ctx, cancel := context.WithTimeout(ctx, dropTimeout)
	defer cancel()
	admin, err := sql.Open("pgx", dsn)
	if err != nil {
		return fmt.Errorf("open a connection: %w", err)
	}
	defer func() { _ = admin.Close() }()

	var names string
	err = admin.QueryRowContext(ctx,
		"SELECT coalesce(string_agg(datname::text, ' '), '') FROM pg_database WHERE starts_with(datname::text, $1)", prefix).Scan(&names)
	if err != nil {
		return fmt.Errorf("list the databases to drop: %w", err)
	}
	var failures []error
	for name := range strings.FieldsSeq(names) {
		failures = append(failures, dropDatabase(ctx, admin, name))
	}

	return errors.Join(failures...)
}
