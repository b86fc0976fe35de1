package limiter_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion/internal/pgtest"
)

// A recorder keeps every statement that a pool sends to the server, those of
// database/sql's transactions included.
type recorder struct {
	mutex      sync.Mutex
	statements []recordedStatement
}

type recordedStatement struct {
	text      string
	arguments []any
}

// openRecorded opens a pool to the database that db is connected to, whose statements
// are recorded from now on.
func openRecorded(t *testing.T, db *gorm.DB, options ...gorm.Option) (*gorm.DB, *recorder) {
	t.Helper()

	config, err := pgx.ParseConfig(pgtest.DSN(db))
	require.NoError(t, err)

	recorder := new(recorder)
	config.Tracer = recorder

	pool := stdlib.OpenDB(*config)
	t.Cleanup(func() { require.NoError(t, pool.Close()) })

	recorded, err := gorm.Open(postgres.New(postgres.Config{Conn: pool}), append([]gorm.Option{&gorm.Config{Logger: logger.Discard}}, options...)...)
	require.NoError(t, err)
	recorder.reset()

	return recorded, recorder
}

// TraceQueryStart implements pgx.QueryTracer.
func (r *recorder) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	r.mutex.Lock()
	defer r.mutex.Unlock()

	// In front of the parameters the driver passes options to itself.
	arguments := slices.DeleteFunc(slices.Clone(data.Args), func(argument any) bool {
		_, option := argument.(pgx.QueryResultFormatsByOID)

		return option
	})

	r.statements = append(r.statements, recordedStatement{data.SQL, arguments})

	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (*recorder) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// reset forgets what was recorded so far.
func (r *recorder) reset() { r.take() }

// take returns what was recorded so far, and forgets it.
func (r *recorder) take() []recordedStatement {
	r.mutex.Lock()
	defer r.mutex.Unlock()

	taken := r.statements
	r.statements = nil

	return taken
}

// commands returns the first word of each statement so far, and forgets them.
func (r *recorder) commands() []string {
	var commands []string

	for _, statement := range r.take() {
		command, _, _ := strings.Cut(strings.ToLower(statement.text), " ")
		commands = append(commands, command)
	}

	return commands
}
