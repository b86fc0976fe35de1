package legion_test

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// startPgBouncer runs a PgBouncer in transaction mode before the server, and returns the
// DSN of the database through it. It ends with the test.
func startPgBouncer(t *testing.T, dsn string) string {
	t.Helper()

	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		t.Skip("pgbouncer is not on this machine")
	}

	server, err := url.Parse(dsn)
	require.NoError(t, err)

	password, _ := server.User.Password()
	database := strings.TrimPrefix(server.Path, "/")

	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	require.NoError(t, err)

	_, port, err := net.SplitHostPort(listener.Addr().String())
	require.NoError(t, err)
	require.NoError(t, listener.Close())

	folder := t.TempDir()
	settings := filepath.Join(folder, "pgbouncer.ini")
	require.NoError(t, os.WriteFile(settings, fmt.Appendf(nil, `[databases]
%s = host=%s port=%s user=%s password=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %s
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 6
max_client_conn = 200
server_reset_query_always = 0
ignore_startup_parameters = extra_float_digits
`, database, server.Hostname(), server.Port(), server.User.Username(), password, port), 0o600))

	arguments := []string{settings}

	if os.Geteuid() == 0 {
		// It refuses to run as root, and nobody can read what is in root's folders.
		arguments = []string{"-u", "nobody", settings}

		for _, path := range []string{folder, filepath.Dir(folder), settings} {
			require.NoError(t, os.Chmod(path, 0o755))
		}
	}

	command := exec.CommandContext(context.WithoutCancel(t.Context()), program, arguments...)

	var output strings.Builder

	command.Stdout, command.Stderr = &output, &output
	require.NoError(t, command.Start())
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()

		if t.Failed() {
			t.Log(output.String())
		}
	})

	server.Host = net.JoinHostPort("127.0.0.1", port)
	through := server.String()

	require.Eventually(t, func() bool {
		connection, err := pgx.Connect(t.Context(), pgtest.WithParameter(through, "default_query_exec_mode", "exec"))
		if err != nil {
			return false
		}

		return connection.Close(t.Context()) == nil
	}, longest, 20*time.Millisecond)

	return through
}

// PgBouncer before 1.21 has no prepared statements in transaction mode, so it takes the
// driver's modes without.
func TestEverythingWorksThroughPgBouncerInTransactionMode(t *testing.T) {
	t.Parallel()

	for _, mode := range []string{"exec", "simple_protocol"} {
		for name, options := range paths() {
			t.Run(mode+", "+name, func(t *testing.T) {
				t.Parallel()

				direct := pgtest.Database(t)
				through := pgtest.WithParameter(startPgBouncer(t, direct), "default_query_exec_mode", mode)
				db := pgtest.OpenDSN(t, through, pgtest.MaxOpenConnections(20))
				plugin := usePlugin(t, db, append(options, legion.WithLease(shortLease), legion.WithMigrate(legion.WithNotify()),
					legion.WithConnect(func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, direct) }))...)

				requireFunctionInUse(t, plugin, len(options) > 0)
				throughPgBouncer(t, db, plugin)
			})
		}
	}

	t.Run("leases are renewed through it too", func(t *testing.T) {
		t.Parallel()

		through := pgtest.WithParameter(startPgBouncer(t, pgtest.Database(t)), "default_query_exec_mode", "exec")
		plugin := usePlugin(t, pgtest.OpenDSN(t, through), legion.WithLease(shortLease))

		turn, err := plugin.Begin(t.Context(), "one", under(runningRule(1)))
		require.NoError(t, err)
		requireHolds(t, turn, 3)
		require.NoError(t, turn.End(t.Context()))
	})
}

func throughPgBouncer(t *testing.T, db *gorm.DB, plugin *legion.Plugin) {
	t.Helper()

	// Exact under concurrency, in own transactions and in callers'.
	const limit, callers = 7, 60

	rule := limiter.Rule{Identity: limiter.Identity{"ip": "203.0.113.42"}, Policy: limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(limit)}}

	var (
		calling  sync.WaitGroup
		admitted atomic.Int64
	)

	for i := range callers {
		calling.Go(func() {
			call := func(tx *gorm.DB) error { return limiter.Enforce(tx, fmt.Sprint("agent ", i), rule) }

			var err error
			if i%2 == 0 {
				err = db.Transaction(call)
			} else {
				err = call(db)
			}

			if err == nil {
				admitted.Add(1)
			}
		})
	}

	calling.Wait()
	require.EqualValues(t, limit, admitted.Load())

	// A denial leaves a caller's transaction usable.
	require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
		require.ErrorIs(t, limiter.Enforce(tx, "one more", rule), limiter.ErrExceeded)

		return limiter.Enforce(tx, "another", runningRule(5))
	}))
	require.NoError(t, limiter.Release(db, "another"))

	// A turn, its usage and its state, told to whoever watches on a direct connection.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	for event, err := range store.For[models.LegionAgent](db).Watch(ctx) {
		require.NoError(t, err)

		if event.Missed {
			require.NoError(t, plugin.Run(ctx, "turn", reserving(100, runningRule(1), tokensRule(1000)), func(ctx context.Context, turn *legion.Turn) error {
				require.NoError(t, turn.Record(ctx, models.Usage{TotalTokens: 30}))
				requireHolds(t, turn, 2)

				return turn.Checkpoint(ctx, []byte("state"))
			}))

			continue
		}

		require.Equal(t, "turn", event.AgentID)

		break
	}

	require.EqualValues(t, 30, tokensOf(t, db, "turn"))
	requireIdle(t, db, "turn")
}
