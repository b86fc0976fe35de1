package pgtest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	// Registers the database/sql driver pgx.
	_ "github.com/jackc/pgx/v5/stdlib"
)

const (
	// superuser is the role that servers of our own are given, and the name of their first database.
	superuser = "postgres"

	// adminConnections is small because a server copies four databases hardly faster than two.
	adminConnections = 4

	// strategyVersion is the first server version that lets CREATE DATABASE choose how to copy.
	strategyVersion = 150000
)

var errSettingDiffers = errors.New("the server of " + dsnVariable + " is not ours to change")

// Server is a Postgres server that this process started, or the one of LEGION_TEST_DSN. It is safe
// for concurrent use.
type Server struct {
	source     Source
	details    reply
	diskSize   int64
	supervisor *supervisor
	admin      *sql.DB
	prefix     string
	copyFiles  bool
	databases  atomic.Int64
	stop       func() error
}

// Start gives a running server from the first source that works, see the package comment. Call
// [Server.Stop] when done; a process that dies without it leaves nothing behind either. Where no
// source works the error is an [*UnavailableError]. When ctx ends before the server is ready, the
// start is abandoned; afterwards ctx has no effect.
func Start(ctx context.Context, options ...Option) (*Server, error) {
	settled := config{getenv: os.Getenv, patterns: binaryPatterns}
	for _, option := range options {
		option(&settled)
	}

	choice, err := choose(settled.getenv)
	if err != nil {
		return nil, err
	}

	unavailable := &UnavailableError{remedy: choice.remedy}
	for _, source := range choice.sources {
		if ctx.Err() != nil {
			unavailable.attempts = append(unavailable.attempts, attempt{source, fmt.Errorf("not tried: %w", ctx.Err())})

			break
		}
		server, err := startSource(ctx, source, &settled)
		if err == nil {
			return server, nil
		}
		unavailable.attempts = append(unavailable.attempts, attempt{source, err})
	}

	return nil, unavailable
}

func startSource(ctx context.Context, source Source, settled *config) (*Server, error) {
	server := &Server{source: source, prefix: databasePrefix(), diskSize: settled.diskSize}
	request := order{
		Source: source, Settings: defaultSettings(), Restarts: settled.restarts,
		Environment: settled.environment, DiskSize: settled.diskSize,
	}
	for _, each := range settled.settings {
		request.Settings = withSetting(request.Settings, each)
	}

	if (source == SourceDSN || source == SourceDocker) && (len(request.Environment) > 0 || request.DiskSize > 0) {
		return nil, ErrElsewhere
	}

	switch source {
	case SourceDSN:
		request.DSN, request.Prefix = settled.getenv(dsnVariable), server.prefix
		if request.DSN == "" {
			return nil, errNotSet
		}
	case SourceLocal:
		directory, err := binaryDirectory(settled.getenv("PATH"), settled.patterns)
		if err != nil {
			return nil, err
		}
		request.Directory = directory
	case SourceDocker:
		request.Image = settled.getenv(imageVariable)
		if request.Image == "" {
			request.Image = DefaultImage
		}
	case SourceEmbedded:
		request.Repository, request.Cache = settled.repository, settled.cache
		if request.Cache == "" {
			request.Cache = downloadCache()
		}
	}

	var err error
	if server.supervisor, server.details, err = engage(ctx, request); err != nil {
		return nil, err
	}
	server.stop = sync.OnceValue(server.close)
	if err := server.connect(ctx, settled.settings); err != nil {
		return nil, errors.Join(err, server.Stop())
	}

	return server, nil
}

// Signal sends a signal to the server's first process: SIGINT is a fast shutdown, SIGQUIT an immediate
// one, SIGKILL a crash. The error is [ErrElsewhere] for a server that is not this machine's.
func (s *Server) Signal(signal os.Signal) error {
	if s.details.Folder == "" {
		return ErrElsewhere
	}
	content, err := os.ReadFile(filepath.Join(s.Disk(), "data", "postmaster.pid"))
	if err != nil {
		return fmt.Errorf("find the server's process: %w", err)
	}
	line, _, _ := strings.Cut(string(content), "\n")
	processID, err := strconv.Atoi(line)
	if err != nil {
		return fmt.Errorf("find the server's process: %w", err)
	}
	process, err := os.FindProcess(processID)
	if err != nil {
		return fmt.Errorf("find the server's process: %w", err)
	}

	if err := process.Signal(signal); err != nil {
		return fmt.Errorf("signal the server's process: %w", err)
	}

	return nil
}

// Disk is the folder with everything of the server's, for this process: what else is put there takes
// room on the disk of [WithDisk]. It is empty for a server that is not this machine's.
func (s *Server) Disk() string {
	if s.diskSize == 0 {
		return s.details.Folder
	}

	return seenBy(s.supervisor.command.Process, s.details.Folder)
}

var (
	// ErrElsewhere is a server that does not run from binaries on this machine, so that its process
	// cannot be signalled, nor be given an environment or a disk.
	ErrElsewhere = errors.New("the server runs elsewhere")

	// ErrNoDisk is a machine, or a user, that can mount no disk for the server.
	ErrNoDisk = errors.New("no disk can be mounted here")
)

// Source says where the server came from.
func (s *Server) Source() Source { return s.source }

// DSN is how to connect to database on this server, password included: a URL, or key=value pairs if
// LEGION_TEST_DSN is that. The empty name stands for the database that is there from the start.
func (s *Server) DSN(database string) string {
	if database == "" {
		return s.details.DSN
	}

	return withDatabase(s.details.DSN, database)
}

// Stop ends the server, cutting open connections, and removes its data. The server of
// LEGION_TEST_DSN goes on, without the databases that were created through s. A second call returns
// what the first one returned.
func (s *Server) Stop() error { return s.stop() }

// connect opens the connections that create and drop databases, and looks at the server.
func (s *Server) connect(ctx context.Context, wanted []setting) error {
	admin, err := sql.Open("pgx", s.details.DSN)
	if err != nil {
		return fmt.Errorf("open a connection: %w", err)
	}
	admin.SetMaxOpenConns(adminConnections)
	admin.SetMaxIdleConns(adminConnections)
	s.admin = admin

	var version int
	if err := admin.QueryRowContext(ctx, "SELECT current_setting('server_version_num')::int").Scan(&version); err != nil {
		return fmt.Errorf("ask the server for its version: %w", err)
	}
	// Copying files makes a database in a third of the time, for the price of a checkpoint: nothing
	// without fsync, but not to be asked of a server that others use.
	s.copyFiles = s.source != SourceDSN && version >= strategyVersion

	if s.source == SourceDSN {
		return s.compareSettings(ctx, wanted)
	}

	return nil
}

func (s *Server) compareSettings(ctx context.Context, wanted []setting) error {
	for _, each := range wanted {
		var actual string
		if err := s.admin.QueryRowContext(ctx, "SELECT current_setting($1)", each.Name).Scan(&actual); err != nil {
			return fmt.Errorf("read the setting %s: %w", each.Name, err)
		}
		if actual != each.Value {
			return fmt.Errorf("%w: it has %s = %s, not %s", errSettingDiffers, each.Name, actual, each.Value)
		}
	}

	return nil
}

func (s *Server) close() error {
	var failures []error
	if s.admin != nil {
		failures = append(failures, s.admin.Close())
	}
	failures = append(failures, s.supervisor.release())
	if err := errors.Join(failures...); err != nil {
		return fmt.Errorf("legion: stop the Postgres for tests: %w", err)
	}

	return nil
}

// databasePrefix begins the names of one Server's databases. The process id tells people whose they
// are; the random part keeps processes on different machines apart.
func databasePrefix() string {
	const randomLength = 12

	return fmt.Sprintf("legion_test_%d_%s_", os.Getpid(), strings.ToLower(rand.Text()[:randomLength]))
}
