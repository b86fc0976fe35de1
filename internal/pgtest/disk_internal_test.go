//go:build unix

package pgtest

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

const diskSize = 160 << 20

// startWithDisk starts a server of the test's own with a disk of its own.
func startWithDisk(t *testing.T) *Server {
	t.Helper()

	requireBinaries(t)
	server, err := Start(t.Context(), WithDisk(diskSize), withEnvironment(map[string]string{sourceVariable: "local", "PATH": os.Getenv("PATH")}))
	if errors.Is(err, ErrNoDisk) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })

	return server
}

// fill takes all the room that there is, and returns the file with which to give it back.
func fill(t *testing.T, folder string) string {
	t.Helper()

	name := filepath.Join(folder, "ballast")
	file, err := os.Create(name)
	require.NoError(t, err)
	written, err := io.Copy(file, io.LimitReader(zeros{}, 2*diskSize))
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.Less(t, written, int64(diskSize))
	require.NoError(t, file.Close())

	return name
}

type zeros struct{}

func (zeros) Read(into []byte) (int, error) { return len(into), nil }

func TestADiskOfItsOwnFillsUpAndIsSeenByNobody(t *testing.T) {
	t.Parallel()

	server := startWithDisk(t)
	beside, err := os.ReadDir(server.details.Folder)
	require.NoError(t, err)
	require.Empty(t, beside, "it is not where others look")
	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	require.NotContains(t, string(mounts), server.details.Folder)
	require.NoError(t, server.Signal(syscall.Signal(0)))

	ballast := fill(t, server.Disk())
	grow := func() error {
		_, err := server.admin.ExecContext(t.Context(), "CREATE TABLE large AS SELECT repeat('x', 1000) FROM generate_series(1, 2000)")

		return err
	}
	var full *pgconn.PgError
	require.ErrorAs(t, grow(), &full)
	require.Equal(t, "53100", full.Code)

	require.NoError(t, os.Remove(ballast))
	require.NoError(t, grow())
	require.NoError(t, server.Stop())
	require.NoDirExists(t, server.details.Folder)
}

func TestTheServerAloneHasItsEnvironment(t *testing.T) {
	t.Parallel()

	server := setupServer(t, WithEnvironment("LEGION_PGTEST_NOTE", "first"), WithEnvironment("LEGION_PGTEST_NOTE", "of the server"))
	connection, err := server.admin.Conn(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, connection.Close()) }()

	var note string
	_, err = connection.ExecContext(t.Context(), `CREATE TEMPORARY TABLE notes (text text)`)
	require.NoError(t, err)
	_, err = connection.ExecContext(t.Context(), `COPY notes FROM PROGRAM 'echo "$LEGION_PGTEST_NOTE"'`)
	require.NoError(t, err)
	require.NoError(t, connection.QueryRowContext(t.Context(), "SELECT text FROM notes").Scan(&note))
	require.Equal(t, "of the server", note)
	require.Empty(t, os.Getenv("LEGION_PGTEST_NOTE"))
}

func TestAServerElsewhereHasNoEnvironmentAndNoDisk(t *testing.T) {
	t.Parallel()

	for _, source := range []Source{SourceDSN, SourceDocker} {
		for _, option := range []Option{WithEnvironment("TZ", "UTC"), WithDisk(diskSize)} {
			_, err := Start(t.Context(), option, withEnvironment(map[string]string{sourceVariable: string(source), dsnVariable: "host=127.0.0.1"}))
			require.ErrorIs(t, err, ErrElsewhere)
		}
	}
}

func TestADiskThatCannotBeMountedIsToldApart(t *testing.T) {
	t.Parallel()

	// What a supervisor answers that may not mount one.
	require.ErrorIs(t, reply{Failure: "operation not permitted", NoDisk: true}.err(), ErrNoDisk)
	require.NotErrorIs(t, reply{Failure: "the disk is full"}.err(), ErrNoDisk)
	require.NoError(t, reply{}.err())
}
