// Package pgtest gives tests and examples a ready Postgres with nothing set up by hand.
//
// A test asks for a connection to a fresh, empty database; the package's TestMain stops the server
// and looks for leaked goroutines once the tests are done:
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestSomething(t *testing.T) {
//		t.Parallel()
//		db := pgtest.Open(t)
//		...
//	}
//
// One server serves all tests of a process; it starts with the first call. A program, or a test
// that needs settings of its own, uses [Start], which runs a server for that caller alone.
//
// # Where the server comes from
//
// The first of these that works:
//
//   - dsn: the server that LEGION_TEST_DSN names, as a URL or as key=value pairs. The role needs
//     LOGIN and CREATEDB, nothing else; every database is created, and later dropped, under a name
//     that carries the process id and a random part. Once the variable is set no other source is
//     tried: a suite that was told to run on one server must not pass on another.
//   - local: server binaries on this machine, looked for in PATH and where Debian, Red Hat and
//     Homebrew put them, newest version first. As root the server runs as the user postgres, or
//     else nobody, since Postgres refuses to run as root.
//   - docker: a container of the image LEGION_TEST_IMAGE (default [DefaultImage]), run through
//     testcontainers, whose own environment variables apply.
//   - embedded: binaries that are downloaded from Maven Central, where the project
//     zonkyio/embedded-postgres-binaries publishes them, and run as the local ones are. The download
//     is kept in the user's cache directory, under legion-pgtest. HTTPS_PROXY applies. Not on Windows.
//
// LEGION_TEST_POSTGRES=dsn|local|docker|embedded forces one of them. Where none works, the error
// names all of them and says of each why it did not.
//
// The servers that this package starts trade durability for speed: fsync, synchronous_commit and
// full_page_writes are off. [WithSetting] changes any setting of a server of one's own, and
// [WithDurability] switches those three on.
//
// For bad days a server of one's own is started again when it ends ([WithRestarts]), has a disk that
// fills up ([WithDisk]) and an environment, such as another clock's ([WithEnvironment]); [StartProxy]
// is a network that loses things.
//
// # Nothing stays behind
//
// A server that this package starts listens on a free loopback port, asks for a random password,
// and keeps its data in a temporary folder. It belongs to a supervisor: this program, started a
// second time, which holds one end of a pipe to its owner. The pipe closes when the owner stops the
// server and also when the owner dies, be it from a panic, a timeout of go test or SIGKILL; then
// the supervisor stops the server and removes its data, its container or, on the server of
// LEGION_TEST_DSN, the databases that were created.
package pgtest
