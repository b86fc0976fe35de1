package pgtest

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
)

const (
	// startTimeout leaves room for pulling an image.
	startTimeout = 5 * time.Minute

	// defaultMaxOpenConnections lets a test's goroutines contend without a few parallel tests using up
	// the server's max_connections.
	defaultMaxOpenConnections = 10
)

var (
	running atomic.Pointer[Server]

	startShared = sync.OnceValues(func() (*Server, error) {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		server, err := Start(ctx)
		running.Store(server)
		return server, err
	})
)

// Shared returns the server that all tests of this process share, started by the first call. It ends
// the test where no source works. Nobody but [Main] or [Run] stops it.
func Shared(tb testing.TB) *Server {
	tb.Helper()
	server, err := startShared()
	if err != nil {
		tb.Fatal(err)
	}
	return server
}

// Database returns the DSN of a fresh, empty database on the shared server. It is dropped when the
// test and its subtests are done, cutting connections that are still open.
func Database(tb testing.TB) string {
	tb.Helper()
	server := Shared(tb)
	dsn, err := server.CreateDatabase(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(tb.Context()), dropTimeout)
		defer cancel()
		if err := server.DropDatabase(ctx, dsn); err != nil {
			tb.Error(err)
		}
	})
	return withParameters(dsn, os.Getenv(parametersVariable))
}

// parametersVariable has connection parameters for the databases of tests, such as
// default_query_exec_mode=exec, separated by "&". It is how a run of all tests goes through another
// mode of the driver.
const parametersVariable = "LEGION_TEST_PARAMETERS"

func withParameters(dsn, parameters string) string {
	for parameter := range strings.SplitSeq(parameters, "&") {
		if name, value, ok := strings.Cut(parameter, "="); ok {
			dsn = WithParameter(dsn, name, value)
		}
	}
	return dsn
}

// Open returns a GORM connection to a fresh, empty database on the shared server. It is closed, and
// the database dropped, when the test and its subtests are done. Options are as for [OpenDSN].
func Open(tb testing.TB, options ...gorm.Option) *gorm.DB {
	tb.Helper()
	return OpenDSN(tb, Database(tb), options...)
}

// OpenDSN returns a further GORM connection pool to the database of dsn, closed when the test and its
// subtests are done. Besides GORM's options it takes [MaxOpenConnections], by default 10. It logs
// nothing unless a gorm.Config among the options has a Logger.
func OpenDSN(tb testing.TB, dsn string, options ...gorm.Option) *gorm.DB {
	tb.Helper()
	connections := defaultMaxOpenConnections
	for _, option := range options {
		if limit, ok := option.(MaxOpenConnections); ok {
			connections = int(limit)
		}
	}
	db, err := gorm.Open(postgres.Open(dsn), slices.Concat(options, []gorm.Option{quiet{}})...)
	if err != nil {
		tb.Fatalf("legion: open a connection for a test: %v", err)
	}
	pool, err := db.DB()
	if err != nil {
		tb.Fatalf("legion: open a connection for a test: %v", err)
	}
	tb.Cleanup(func() {
		if err := pool.Close(); err != nil {
			tb.Errorf("legion: close a test's connections: %v", err)
		}
	})
	pool.SetMaxOpenConns(connections)
	pool.SetMaxIdleConns(connections) // the default of 2 would reconnect all the time
	return db
}

// DSN returns the DSN that db was opened with by [Open] or [OpenDSN], to hand to another process or
// to open a further connection to the same database.
func DSN(db *gorm.DB) string {
	switch dialector := db.Dialector.(type) {
	case *postgres.Dialector:
		return dialector.DSN
	case postgres.Dialector:
		return dialector.DSN
	default:
		panic(fmt.Sprintf("legion: pgtest.DSN needs a connection of pgtest.Open or pgtest.OpenDSN, not one of %T", dialector))
	}
}

// MaxOpenConnections is an option that limits the pool which [Open] or [OpenDSN] returns to so many
// connections; 0 is unlimited.
type MaxOpenConnections int

// Apply implements gorm.Option.
func (MaxOpenConnections) Apply(*gorm.Config) error { return nil }

// AfterInitialize implements gorm.Option.
func (MaxOpenConnections) AfterInitialize(*gorm.DB) error { return nil }

// quiet keeps GORM from printing the errors that tests provoke.
type quiet struct{}

func (quiet) Apply(config *gorm.Config) error {
	if config.Logger == nil {
		config.Logger = logger.Discard
	}
	return nil
}

func (quiet) AfterInitialize(*gorm.DB) error { return nil }
