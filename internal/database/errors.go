package database

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/legion-gorm/legion/internal/fault"
)

// SQLSTATE codes that are read here and by the callers.
// Source: PostgreSQL's documentation, appendix A.
const (
	CodeSerializationFailure  = "40001"
	CodeDeadlockDetected      = "40P01"
	CodeUniqueViolation       = "23505"
	CodeUndefinedTable        = "42P01"
	CodeDuplicateTable        = "42P07"
	CodeUndefinedColumn       = "42703"
	CodeUndefinedFunction     = "42883"
	CodeInsufficientPrivilege = "42501"
	CodeTooManyConnections    = "53300"
)

// HasCode reports whether err carries one of the SQLSTATE codes.
func HasCode(err error, codes ...string) bool {
	var server *pgconn.PgError
	if !errors.As(err, &server) {
		return false
	}

	return slices.Contains(codes, server.Code)
}

// HasVerdict reports whether err is what one of our functions raises to end a transaction
// without a commit. Their codes are of a class that PostgreSQL does not have.
func HasVerdict(err error) bool {
	server, ok := errors.AsType[*pgconn.PgError](err)

	return ok && strings.HasPrefix(server.Code, "LG")
}

// Explain adds the remedy to an error that the driver reports where there is one.
func Explain(err error) error {
	if HasCode(err, CodeUndefinedTable, CodeUndefinedColumn, CodeUndefinedFunction) && !errors.Is(err, fault.ErrNotMigrated) {
		return fmt.Errorf("%w: call legion.Migrate(db) at start-up: %w", fault.ErrNotMigrated, err)
	}

	return err
}

// Retryable reports whether running the same transaction again can succeed: it
// lost a deadlock or a race, or the connection or the server went away.
func Retryable(err error) bool {
	return errors.Is(err, fault.ErrContention) ||
		HasCode(err, CodeSerializationFailure, CodeDeadlockDetected) ||
		connectionLost(err)
}

func connectionLost(err error) bool {
	// A context that ended closes the connection: that is the caller's own wish.
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}

	if server, ok := errors.AsType[*pgconn.PgError](err); ok {
		// Class 08: connection exceptions. 57P01 to 57P03: the server is going down,
		// has crashed, or is not up yet. 25006 is what a server says that became a
		// standby under us. 25P03 and 57P05: the session was idle for too long, in a
		// transaction or outside, and is told so with the next statement.
		return strings.HasPrefix(server.Code, "08") ||
			slices.Contains([]string{"57P01", "57P02", "57P03", "25006", "25P03", "57P05"}, server.Code)
	}

	var network net.Error

	return pgconn.SafeToRetry(err) ||
		errors.As(err, &network) ||
		errors.Is(err, driver.ErrBadConn) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) ||
		// pgx reports a statement on a connection that it had to close in these words
		// and with no type of its own.
		strings.Contains(err.Error(), "conn closed") ||
		(errors.Is(err, sql.ErrConnDone) && !errors.Is(err, sql.ErrTxDone))
}
