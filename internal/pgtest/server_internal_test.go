package pgtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// setupServer starts a server of the test's own from this machine's binaries.
func setupServer(t *testing.T, options ...Option) *Server {
	t.Helper()

	path := os.Getenv("PATH")
	if _, err := binaryDirectory(path, binaryPatterns); err != nil {
		t.Skip(err)
	}
	local := withEnvironment(map[string]string{sourceVariable: "local", "PATH": path})
	server, err := Start(t.Context(), append(options, local)...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })

	return server
}

func show(t *testing.T, server *Server, name string) string {
	t.Helper()

	var value string
	require.NoError(t, server.admin.QueryRowContext(t.Context(), "SELECT current_setting($1)", name).Scan(&value))

	return value
}

func TestSettingsAddUpAndTheLastValueCounts(t *testing.T) {
	t.Parallel()

	settled := config{settings: defaultSettings()}
	for _, option := range []Option{
		WithSetting("work_mem", "1MB"), WithDurability(), WithSetting("work_mem", "7MB"), WithSetting("full_page_writes", "off"),
	} {
		option(&settled)
	}
	require.Equal(t, []string{
		"-c", "max_connections=300", "-c", "fsync=on", "-c", "synchronous_commit=on", "-c", "work_mem=7MB", "-c", "full_page_writes=off",
	}, arguments(settled.settings))
}

func TestServerOfOnesOwnIsQuickAndHasTheSettingsAskedFor(t *testing.T) {
	t.Parallel()

	server := setupServer(t, WithSetting("work_mem", "7MB"), WithSetting("full_page_writes", "on"))
	require.Equal(t, SourceLocal, server.Source())
	for name, value := range map[string]string{
		"fsync": "off", "synchronous_commit": "off", "full_page_writes": "on", "work_mem": "7MB", "max_connections": "300",
		"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "server_encoding": "UTF8", "lc_collate": "C",
	} {
		require.Equal(t, value, show(t, server, name), name)
	}

	_, err := pgx.Connect(t.Context(), WithParameter(server.DSN(""), "password", "guessed"))
	require.ErrorContains(t, err, "password authentication failed")
}

func TestRefusedSettingIsReportedInTheServersWords(t *testing.T) {
	t.Parallel()

	path := os.Getenv("PATH")
	if _, err := binaryDirectory(path, binaryPatterns); err != nil {
		t.Skip(err)
	}
	_, err := Start(t.Context(), WithSetting("no_such_setting", "on"),
		withEnvironment(map[string]string{sourceVariable: "local", "PATH": path}))
	require.ErrorContains(t, err, `unrecognized configuration parameter "no_such_setting"`)
}

func TestCreateDatabaseWaitsForATemplateInUse(t *testing.T) {
	t.Parallel()

	server := setupServer(t)
	_, err := server.admin.ExecContext(t.Context(), "UPDATE pg_database SET datallowconn = true WHERE datname = 'template0'")
	require.NoError(t, err)
	visitor, err := pgx.Connect(t.Context(), server.DSN("template0"))
	require.NoError(t, err)

	// Longer than the five seconds for which the server waits by itself.
	leave := time.AfterFunc(5500*time.Millisecond, func() { _ = visitor.Close(context.WithoutCancel(t.Context())) })
	defer leave.Stop()
	_, err = server.CreateDatabase(t.Context())
	require.NoError(t, err)
}

// setupRole creates a role on the shared server that may log in and create databases, and returns the
// DSN to use it with.
func setupRole(t *testing.T) string {
	t.Helper()

	server := Shared(t)
	var allowed bool
	row := server.admin.QueryRowContext(t.Context(), "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user")
	require.NoError(t, row.Scan(&allowed))
	if !allowed {
		t.Skip("the role of LEGION_TEST_DSN may not create roles")
	}

	role, password := databasePrefix()+"role", rand.Text()
	_, err := server.admin.ExecContext(t.Context(), fmt.Sprintf("CREATE ROLE %q LOGIN CREATEDB PASSWORD '%s'", role, password))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := server.admin.ExecContext(context.WithoutCancel(t.Context()), fmt.Sprintf("DROP ROLE %q", role))
		require.NoError(t, err)
	})

	return WithParameter(WithParameter(server.DSN(""), "user", role), "password", password)
}

func TestGivenServerNeedsOnlyTheRightToCreateDatabases(t *testing.T) {
	t.Parallel()

	given := withEnvironment(map[string]string{dsnVariable: setupRole(t)})
	server, err := Start(t.Context(), given)
	require.NoError(t, err)
	require.Equal(t, SourceDSN, server.Source())
	other, err := Start(t.Context(), given)
	require.NoError(t, err)

	dropped, err := server.CreateDatabase(t.Context())
	require.NoError(t, err)
	kept, err := server.CreateDatabase(t.Context())
	require.NoError(t, err)
	foreign, err := other.CreateDatabase(t.Context())
	require.NoError(t, err)
	connection, err := pgx.Connect(t.Context(), kept)
	require.NoError(t, err)
	require.NoError(t, connection.Ping(t.Context()))

	require.ErrorIs(t, server.DropDatabase(t.Context(), foreign), errForeignDatabase)
	require.NoError(t, server.DropDatabase(t.Context(), dropped))
	requireDatabase(t, false, dropped)
	require.NoError(t, server.DropDatabase(t.Context(), dropped))
	requireDatabase(t, true, kept)

	require.NoError(t, server.Stop())
	requireDatabase(t, false, kept)
	requireDatabase(t, true, foreign)
	require.NoError(t, other.Stop())
	requireDatabase(t, false, foreign)
}

func TestGivenServerMustHaveTheSettingsAskedFor(t *testing.T) {
	t.Parallel()

	shared := Shared(t)
	given := withEnvironment(map[string]string{dsnVariable: shared.DSN("")})
	server, err := Start(t.Context(), given, WithSetting("max_connections", show(t, shared, "max_connections")))
	require.NoError(t, err)
	require.NoError(t, server.Stop())

	_, err = Start(t.Context(), given, WithSetting("max_connections", "1234"))
	require.ErrorIs(t, err, errSettingDiffers)
	require.ErrorContains(t, err, "max_connections = "+show(t, shared, "max_connections")+", not 1234")
}
