//go:build unix

package pgtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func requireBinaries(t *testing.T) {
	t.Helper()

	if _, err := binaryDirectory(os.Getenv("PATH"), binaryPatterns); err != nil {
		t.Skip(err)
	}
}

// requireGone asserts that soon nothing of a local server runs or lies about.
func requireGone(t *testing.T, server reply) {
	t.Helper()

	parsed, err := pgx.ParseConfig(server.DSN)
	require.NoError(t, err)
	address := net.JoinHostPort(parsed.Host, strconv.Itoa(int(parsed.Port)))
	require.Eventually(t, func() bool {
		_, err := os.Stat(server.Folder)
		folderGone := errors.Is(err, fs.ErrNotExist)
		processGone := errors.Is(syscall.Kill(server.ProcessID, 0), syscall.ESRCH)

		return folderGone && processGone && !answers(address)
	}, time.Minute, 20*time.Millisecond)
}

func answers(address string) bool {
	connection, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", address)
	if err != nil {
		return false
	}
	_ = connection.Close()

	return true
}

func TestNothingIsLeftAfterStop(t *testing.T) {
	t.Parallel()

	server := setupServer(t)
	connection, err := pgx.Connect(t.Context(), server.DSN(""))
	require.NoError(t, err)
	require.NoError(t, connection.Ping(t.Context()))
	requireOwnedByTheServersUser(t, server.details.Folder)
	requireOwnedByTheServersUser(t, filepath.Join(server.details.Folder, "data", "PG_VERSION"))

	require.NoError(t, server.Stop())
	require.NoDirExists(t, server.details.Folder)
	require.ErrorIs(t, syscall.Kill(server.details.ProcessID, 0), syscall.ESRCH)
	require.Error(t, connection.Ping(t.Context()))
	requireGone(t, server.details)

	require.NoError(t, server.Stop())
	_, err = server.CreateDatabase(t.Context())
	require.Error(t, err)
}

// requireOwnedByTheServersUser asserts that a file belongs to the user that runs the server, who is
// not root, and that nobody else can use it.
func requireOwnedByTheServersUser(t *testing.T, name string) {
	t.Helper()

	info, err := os.Stat(name)
	require.NoError(t, err)
	status, ok := info.Sys().(*syscall.Stat_t)
	require.True(t, ok)
	require.NotZero(t, status.Uid)
	require.Zero(t, info.Mode().Perm()&0o077)
}

func TestNothingIsLeftAfterTheOwnerDied(t *testing.T) {
	t.Parallel()
	requireBinaries(t)

	type death func(*owner) error
	say := func(ending string) death {
		return func(o *owner) error {
			_, err := io.WriteString(o.input, ending)

			return errors.Join(err, o.input.Close())
		}
	}
	for name, die := range map[string]death{
		"killed":                 func(o *owner) error { return o.process.Kill() },
		"left with its terminal": func(o *owner) error { return syscall.Kill(-o.process.Pid, syscall.SIGHUP) },
		"panicked":               say("panic"),
		"exited without Stop":    say("exit"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			if name == "left with its terminal" && signal.Ignored(syscall.SIGHUP) {
				t.Skip("the owner outlives its terminal too: it inherits that from nohup")
			}

			command := role(t, ownerRole)
			command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			owner := startOwners(t, command)[0]
			// Ctrl-C reaches the whole process group; the owner decides what it means.
			require.NoError(t, syscall.Kill(-owner.process.Pid, syscall.SIGINT))
			time.Sleep(300 * time.Millisecond)
			requireConnection(t, owner.Database)
			require.DirExists(t, owner.Reply.Folder)

			require.NoError(t, die(owner))
			_ = owner.wait()
			requireGone(t, owner.Reply)
		})
	}
}

// setupTemporary makes a directory for temporary files that every user may use.
func setupTemporary(t *testing.T) string {
	t.Helper()

	directory, err := os.MkdirTemp("/tmp", "legion-pgtest-test-") //nolint:usetesting // others may not enter t.TempDir()
	require.NoError(t, err)
	require.NoError(t, os.Chmod(directory, 0o777|os.ModeSticky))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(directory)) })

	return directory
}

func entries(t *testing.T, directory string) int {
	t.Helper()

	found, err := os.ReadDir(directory)
	require.NoError(t, err)

	return len(found)
}

func TestNothingIsLeftWhenTheOwnerDiesWhileTheServerStarts(t *testing.T) {
	t.Parallel()
	requireBinaries(t)

	temporary := setupTemporary(t)
	command := role(t, ownerRole, "TMPDIR="+temporary)
	require.NoError(t, command.Start())
	require.Eventually(t, func() bool {
		started, err := filepath.Glob(filepath.Join(temporary, "*", "data", "base"))

		return err == nil && len(started) > 0
	}, time.Minute, time.Millisecond)
	require.NoError(t, command.Process.Kill())
	_ = command.Wait()
	require.Eventually(t, func() bool { return entries(t, temporary) == 0 }, time.Minute, 20*time.Millisecond)
}

func TestNothingIsLeftOfAnAbandonedStart(t *testing.T) {
	t.Parallel()
	requireBinaries(t)

	temporary := setupTemporary(t)
	output, err := role(t, impatientRole, "TMPDIR="+temporary).CombinedOutput()
	require.NoError(t, err, string(output))
	require.Zero(t, entries(t, temporary))
}

func TestServerEndsWhenItsSupervisorIsKilled(t *testing.T) {
	t.Parallel()

	if runtime.GOOS != "linux" {
		t.Skip("only Linux tells a process when its parent dies")
	}
	requireBinaries(t)
	owner := startOwners(t, role(t, ownerRole))[0]
	status, err := os.ReadFile("/proc/" + strconv.Itoa(owner.Reply.ProcessID) + "/stat")
	require.NoError(t, err)
	fields := bytes.Fields(status[bytes.LastIndexByte(status, ')')+1:])
	supervisor, err := strconv.Atoi(string(fields[1]))
	require.NoError(t, err)
	require.NotEqual(t, owner.process.Pid, supervisor)

	require.NoError(t, syscall.Kill(supervisor, syscall.SIGKILL))
	require.NoError(t, owner.process.Kill())
	_ = owner.wait()
	// There is nobody left to remove the folder.
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(owner.Reply.Folder)) })
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(owner.Reply.Folder, "data", "postmaster.pid"))

		return errors.Is(err, fs.ErrNotExist)
	}, time.Minute, 20*time.Millisecond)
}

func TestProcessesHaveServersOfTheirOwn(t *testing.T) {
	t.Parallel()
	requireBinaries(t)

	owners := startOwners(t, role(t, ownerRole), role(t, ownerRole))
	first, second := owners[0], owners[1]
	require.NotEqual(t, first.Reply.Folder, second.Reply.Folder)
	require.NotEqual(t, first.Reply.DSN, second.Reply.DSN)

	require.NoError(t, first.process.Kill())
	_ = first.wait()
	requireGone(t, first.Reply)
	requireConnection(t, second.Database)
	require.NoError(t, second.input.Close())
	require.NoError(t, second.wait(), second.message)
	requireGone(t, second.Reply)
}

func TestProcessesShareAGivenServer(t *testing.T) {
	t.Parallel()

	given := []string{sourceVariable + "=", dsnVariable + "=" + setupRole(t)}
	owners := startOwners(t, role(t, ownerRole, given...), role(t, ownerRole, given...))
	first, second := owners[0], owners[1]
	requireConnection(t, first.Database)

	// The databases of the one that is killed go, those of the other stay until it stops.
	require.NoError(t, first.process.Kill())
	_ = first.wait()
	require.Eventually(t, func() bool {
		found, err := databaseExists(t.Context(), Shared(t), first.Database)

		return err == nil && !found
	}, time.Minute, 50*time.Millisecond)
	requireConnection(t, second.Database)
	require.NoError(t, second.input.Close())
	require.NoError(t, second.wait(), second.message)
	requireDatabase(t, false, second.Database)
}

func TestOtherUsersRunTheServerThemselves(t *testing.T) {
	t.Parallel()
	requireBinaries(t)

	if os.Geteuid() != 0 {
		t.Skip("for root, which can become another user; the other tests show the rest")
	}
	nobody, err := user.Lookup("nobody")
	require.NoError(t, err)
	uid, err := strconv.ParseUint(nobody.Uid, 10, 32)
	require.NoError(t, err)
	gid, err := strconv.ParseUint(nobody.Gid, 10, 32)
	require.NoError(t, err)

	// go test keeps the test binary where only root may enter.
	command := role(t, ownerRole)
	binary, err := os.ReadFile(command.Path)
	require.NoError(t, err)
	command.Dir = setupTemporary(t)
	command.Path = filepath.Join(command.Dir, "pgtest.test")
	require.NoError(t, os.WriteFile(command.Path, binary, 0o700))
	require.NoError(t, os.Chmod(command.Path, 0o755))
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}

	owner := startOwners(t, command)[0]
	requireConnection(t, owner.Database)
	info, err := os.Stat(owner.Reply.Folder)
	require.NoError(t, err)
	status, ok := info.Sys().(*syscall.Stat_t)
	require.True(t, ok)
	require.Equal(t, uint32(uid), status.Uid)
	require.NoError(t, owner.process.Kill())
	_ = owner.wait()
	requireGone(t, owner.Reply)
}

func TestFolderIsMadeWhereTheServersUserCanReachIt(t *testing.T) {
	t.Parallel()

	stranger := &account{name: "stranger", uid: 54321, gid: 54321}
	open := setupTemporary(t)
	require.True(t, stranger.canEnter(open))
	closed := filepath.Join(open, "closed")
	require.NoError(t, os.MkdirAll(filepath.Join(closed, "below"), 0o755))
	require.NoError(t, os.Chmod(closed, 0o700))
	require.False(t, stranger.canEnter(closed))
	require.False(t, stranger.canEnter(filepath.Join(closed, "below")))
	require.False(t, stranger.canEnter(filepath.Join(open, "missing")))
	require.True(t, (&account{uid: uint32(os.Geteuid())}).canEnter(closed))

	link := filepath.Join(open, "link")
	require.NoError(t, os.Symlink(filepath.Join(closed, "below"), link))
	require.False(t, stranger.canEnter(link))
}

func TestServerTakesAnotherPortWhenItLosesTheRaceForOne(t *testing.T) {
	t.Parallel()

	directory, err := binaryDirectory(os.Getenv("PATH"), binaryPatterns)
	if err != nil {
		t.Skip(err)
	}
	rival, err := new(net.ListenConfig).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, rival.Close()) }()
	_, taken, err := net.SplitHostPort(rival.Addr().String())
	require.NoError(t, err)

	// Without a supervisor the server's parent is this thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	server, err := newLocalServer(&order{Directory: directory})
	require.NoError(t, err)
	defer func() { require.NoError(t, server.release()) }()
	chosen := 0
	server.choosePort = func(ctx context.Context) (string, error) {
		chosen++
		if chosen == 1 {
			return taken, nil
		}

		return freePort(ctx)
	}
	require.NoError(t, server.start(t.Context()))
	require.Equal(t, 2, chosen)
	require.NotEqual(t, taken, server.port)
	requireConnection(t, server.dsn())
}

func TestMainStopsTheSharedServerAndLooksForLeaks(t *testing.T) {
	t.Parallel()
	requireBinaries(t)

	output, err := role(t, testsRole).Output()
	require.NoError(t, err)
	var used owned
	require.NoError(t, json.Unmarshal(output, &used))
	require.NoDirExists(t, used.Reply.Folder)
	requireGone(t, used.Reply)

	for name, test := range map[string]struct {
		role    string
		code    int
		message string
	}{
		"a leak":        {leakRole, 1, "goroutines outlived the tests"},
		"failing tests": {failRole, 3, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			output, err := role(t, test.role).CombinedOutput()
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit)
			require.Equal(t, test.code, exit.ExitCode())
			require.Contains(t, string(output), test.message)
		})
	}
}
