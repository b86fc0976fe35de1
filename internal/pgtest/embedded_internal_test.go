//go:build unix

package pgtest

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// repository stands for Maven Central. Its archive has the form of the real ones, but its programs
// only call those of this machine.
type repository struct {
	address  string
	requests atomic.Int64
}

func setupRepository(t *testing.T, change ...func(archive []byte) []byte) *repository {
	t.Helper()

	directory, err := binaryDirectory(os.Getenv("PATH"), binaryPatterns)
	if err != nil {
		t.Skip(err)
	}
	archive := zipped(t, "postgres.txz", xzipped(t, tarred(t, directory)))
	checksum := sha256.Sum256(archive)
	for _, change := range change {
		archive = change(archive)
	}
	created := &repository{}
	created.address = httpServer(t, func(answer http.ResponseWriter, request *http.Request) {
		created.requests.Add(1)
		switch {
		case !strings.Contains(request.URL.Path, "/io/zonky/test/postgres/embedded-postgres-binaries-") || !strings.Contains(request.URL.Path, "-17.5.0.jar"):
			http.NotFound(answer, request)
		case strings.HasSuffix(request.URL.Path, ".sha256"):
			_, _ = io.WriteString(answer, hex.EncodeToString(checksum[:]))
		default:
			_, _ = answer.Write(archive)
		}
	})

	return created
}

func tarred(t *testing.T, directory string) []byte {
	t.Helper()

	var archive bytes.Buffer
	writer := tar.NewWriter(&archive)
	for _, program := range []string{initProgram, serverProgram} {
		script := fmt.Sprintf("#!/bin/sh\nexec '%s' \"$@\"\n", filepath.Join(directory, program))
		require.NoError(t, writer.WriteHeader(&tar.Header{Name: "bin/" + program, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(script))}))
		_, err := io.WriteString(writer, script)
		require.NoError(t, err)
	}
	require.NoError(t, writer.Close())

	return archive.Bytes()
}

// xzipped is the smallest of all encoders: one block of one LZMA2 chunk, not compressed.
// https://tukaani.org/xz/xz-file-format.txt
func xzipped(t *testing.T, content []byte) []byte {
	t.Helper()
	require.LessOrEqual(t, len(content), 1<<16)

	little := binary.LittleEndian
	checked := func(part []byte) []byte { return little.AppendUint32(part, crc32.ChecksumIEEE(part)) }
	padded := func(part []byte) []byte { return append(part, make([]byte, -len(part)&3)...) }
	flags := []byte{0, 1} // the checksums are CRC32

	block := checked([]byte{2, 0, 0x21, 1, 12, 0, 0, 0}) // 12 bytes, the filter LZMA2, a dictionary of 256 KiB
	block = append(block, 1)
	block = binary.BigEndian.AppendUint16(block, uint16(len(content)-1))
	block = append(append(block, content...), 0)
	size := uint64(len(block)) + crc32.Size
	block = little.AppendUint32(padded(block), crc32.ChecksumIEEE(content))

	index := binary.AppendUvarint(binary.AppendUvarint([]byte{0, 1}, size), uint64(len(content)))
	index = checked(padded(index))
	footer := append(little.AppendUint32(nil, uint32(len(index)/4-1)), flags...)
	footer = append(append(little.AppendUint32(nil, crc32.ChecksumIEEE(footer)), footer...), "YZ"...)
	header := append([]byte("\xFD7zXZ\x00"), checked(flags[:2:2])...)

	return bytes.Join([][]byte{header, block, index, footer}, nil)
}

func zipped(t *testing.T, name string, content []byte) []byte {
	t.Helper()

	var archive bytes.Buffer
	writer := zip.NewWriter(&archive)
	file, err := writer.Create(name)
	require.NoError(t, err)
	_, err = file.Write(content)
	require.NoError(t, err)
	require.NoError(t, writer.Close())

	return archive.Bytes()
}

func TestAnEmbeddedServerIsDownloadedOnceAndThenRunsAsALocalOne(t *testing.T) {
	t.Parallel()

	repository, cache, temporary := setupRepository(t), t.TempDir(), setupTemporary(t)
	environment := []string{
		sourceVariable + "=embedded", repositoryVariable + "=" + repository.address, cacheVariable + "=" + cache, "TMPDIR=" + temporary,
	}

	first := startOwners(t, role(t, ownerRole, environment...))[0]
	requireConnection(t, first.Database)
	require.Equal(t, temporary, filepath.Dir(first.Reply.Folder))
	requireOwnedByTheServersUser(t, first.Reply.Folder)
	requireOwnedByTheServersUser(t, filepath.Join(first.Reply.Folder, "data", "PG_VERSION"))
	require.EqualValues(t, 2, repository.requests.Load(), "the archive and its checksum")
	require.NoError(t, first.input.Close())
	require.NoError(t, first.wait(), first.message)
	requireGone(t, first.Reply)

	second := startOwners(t, role(t, ownerRole, environment...))[0]
	requireConnection(t, second.Database)
	require.EqualValues(t, 2, repository.requests.Load(), "the second time it comes from the cache")
	require.NoError(t, second.process.Kill())
	_ = second.wait()
	requireGone(t, second.Reply)

	require.Zero(t, entries(t, temporary))
	require.Equal(t, 1, entries(t, cache))
}

func TestAnEmbeddedServerIsQuickAndHasTheSettingsAskedFor(t *testing.T) {
	t.Parallel()

	server, err := Start(t.Context(), WithSetting("work_mem", "7MB"),
		withRepository(setupRepository(t).address, t.TempDir()), withEnvironment(map[string]string{sourceVariable: "embedded"}))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	require.Equal(t, SourceEmbedded, server.Source())
	for name, value := range map[string]string{
		"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "work_mem": "7MB", "max_connections": "300",
		"listen_addresses": "127.0.0.1", "unix_socket_directories": "",
	} {
		require.Equal(t, value, show(t, server, name), name)
	}
}

func TestAServerIsStartedAgainHoweverItsBinariesCameHere(t *testing.T) {
	t.Parallel()

	embedded := func(t *testing.T) *Server {
		t.Helper()

		server, err := Start(t.Context(), WithRestarts(),
			withRepository(setupRepository(t).address, t.TempDir()), withEnvironment(map[string]string{sourceVariable: "embedded"}))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, server.Stop()) })

		return server
	}
	for source, start := range map[Source]func(t *testing.T) *Server{
		SourceLocal:    func(t *testing.T) *Server { t.Helper(); return setupServer(t, WithRestarts()) },
		SourceEmbedded: embedded,
	} {
		t.Run(string(source), func(t *testing.T) {
			t.Parallel()

			server := start(t)
			require.Equal(t, source, server.Source())
			started := func() (at time.Time, err error) {
				err = server.admin.QueryRowContext(t.Context(), "SELECT pg_postmaster_start_time()").Scan(&at)

				return at, err
			}
			first, err := started()
			require.NoError(t, err)
			require.NoError(t, server.Signal(syscall.SIGINT))
			require.Eventually(t, func() bool {
				again, err := started()

				return err == nil && again.After(first)
			}, time.Minute, 10*time.Millisecond)
		})
	}
}

func TestADownloadThatFailsSaysWhyAndLeavesNothing(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		address string
		says    string
	}{
		"nobody answers":    {"http://127.0.0.1:1", "connection refused"},
		"no such name":      {"http://repository.invalid", "repository.invalid"},
		"no such version":   {httpServer(t, http.NotFound), "no version found matching 17.5.0"},
		"a damaged archive": {setupRepository(t, func([]byte) []byte { return []byte("no archive") }).address, "checksums do not match"},
		"an archive without binaries": {httpServer(t, func(answer http.ResponseWriter, request *http.Request) {
			if strings.HasSuffix(request.URL.Path, ".jar") {
				_, _ = answer.Write(zipped(t, "readme", nil))
			} else {
				http.NotFound(answer, request)
			}
		}), "cannot find binary in archive"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			temporary, cache := setupTemporary(t), t.TempDir()
			output, err := role(t, ownerRole, sourceVariable+"=embedded", repositoryVariable+"="+test.address, cacheVariable+"="+cache,
				"TMPDIR="+temporary).CombinedOutput()
			require.Error(t, err)
			require.Contains(t, string(output), "embedded: PostgreSQL 17.5.0 from "+test.address+", or from the cache in "+cache+": ")
			require.Contains(t, string(output), test.says)
			require.Contains(t, string(output), "LEGION_TEST_POSTGRES=embedded rules out every other source.")
			require.Zero(t, entries(t, temporary))
			require.Zero(t, entries(t, cache))
		})
	}
}

func httpServer(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()

	server := httptest.NewServer(handler)
	t.Cleanup(func() {
		server.CloseClientConnections() // or Close would wait for them
		server.Close()
	})

	return server.URL
}

func TestACacheThatIsDamagedIsNamed(t *testing.T) {
	t.Parallel()

	repository, cache := setupRepository(t), t.TempDir()
	start := func() error {
		server, err := Start(t.Context(), withRepository(repository.address, cache), withEnvironment(map[string]string{sourceVariable: "embedded"}))
		if err == nil {
			err = server.Stop()
		}

		return err
	}
	require.NoError(t, start())
	archives, err := filepath.Glob(filepath.Join(cache, "*.txz"))
	require.NoError(t, err)
	require.Len(t, archives, 1)
	require.NoError(t, os.Truncate(archives[0], 100))
	require.ErrorContains(t, start(), "or from the cache in "+cache)
}

func TestNothingIsLeftWhenTheOwnerDiesDuringTheDownload(t *testing.T) {
	t.Parallel()

	arrived, left := make(chan struct{}), make(chan struct{})
	address := httpServer(t, func(answer http.ResponseWriter, request *http.Request) {
		_, _ = io.WriteString(answer, "the beginning of an archive")
		_ = http.NewResponseController(answer).Flush()
		close(arrived)
		<-request.Context().Done()
		close(left)
	})
	temporary, cache := setupTemporary(t), t.TempDir()
	command := role(t, ownerRole, sourceVariable+"=embedded", repositoryVariable+"="+address, cacheVariable+"="+cache, "TMPDIR="+temporary)
	require.NoError(t, command.Start())
	requireSoon(t, arrived)
	require.NotZero(t, entries(t, temporary))
	require.NoError(t, command.Process.Kill())
	_ = command.Wait()
	requireSoon(t, left)
	require.Eventually(t, func() bool { return entries(t, temporary) == 0 }, time.Minute, 20*time.Millisecond)
	require.Zero(t, entries(t, cache))
}

func requireSoon(t *testing.T, event <-chan struct{}) {
	t.Helper()

	select {
	case <-event:
	case <-time.After(time.Minute):
		require.Fail(t, "it does not happen")
	}
}

func TestUnpackedBinariesCanBeReadByTheServersUser(t *testing.T) {
	t.Parallel()

	repository, temporary := setupRepository(t), setupTemporary(t)
	command := role(t, ownerRole, sourceVariable+"=embedded", repositoryVariable+"="+repository.address, cacheVariable+"="+t.TempDir(), "TMPDIR="+temporary)
	command.Path, command.Args = "/bin/sh", []string{"sh", "-c", `umask 077; exec "$0"`, command.Path}
	owner := startOwners(t, command)[0]
	info, err := os.Stat(filepath.Join(owner.Reply.Folder, "binaries", "bin"))
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o755), info.Mode().Perm())
	require.NoError(t, owner.input.Close())
	require.NoError(t, owner.wait(), owner.message)
}
