package pgtest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
)

// Server is a Postgres server that this process started, or the one of LEGION_TEST_DSN. It is safe
// for concurrent use.
type Server struct {
	source     Source
	details    reply
	supervisor *supervisor
	admin      *sql.DB
	prefix     string
	copyFiles  bool
	databases  atomic.Int64
	stop       func() error
}

// setting is a configuration parameter of the server.
type setting struct{ Name, Value string }

// config is what the options of Start add up to.
type config struct {
	getenv      func(string) string
	patterns    []string
	environment []string // of the supervisor
	settings    []setting
}

// Option changes how [Start] runs a server.
type Option func(*config)

// WithSetting sets a configuration parameter of the server, such as "fsync" to "on". The last value
// given to a name counts. The server of LEGION_TEST_DSN can't be changed, so with that source Start
// fails unless the server has that value already, written as SHOW writes it.
func WithSetting(name, value string) Option {
	return func(c *config) {
		c.settings = slices.DeleteFunc(c.settings, func(s setting) bool { return s.Name == name })
		c.settings = append(c.settings, setting{name, value})
	}
}

// WithDurability switches on fsync, synchronous_commit and full_page_writes, as in production. Use
// it where commit times matter.
func WithDurability() Option {
	return func(c *config) {
		for _, name := range []string{"fsync", "synchronous_commit", "full_page_writes"} {
			WithSetting(name, "on")(c)
		}
	}
}

// defaultSettings make a server that lives for one test run quick, and wide enough for parallel tests.
func defaultSettings() []setting {
	return []setting{
		{"fsync", "off"},
		{"synchronous_commit", "off"},
		{"full_page_writes", "off"},
		{"max_connections", "300"},
	}
}

// Start gives a running server from the first source that works, see the package comment. Callers
// must call [Server.Stop]; a process that dies without it leaves nothing behind either. Once no
// source works, the error is an [*UnavailableError]. When ctx ends before the server is ready, the
// start is abandoned; afterwards ctx has no effect.
func Start(ctx context.Context, options ...Option) (*Server, error) {
	settled := config{getenv: os.Getenv, patterns: binaryPatterns}
	for _, option := range options {
		option(&settled)
	}
	sources, err := candidates(settled.getenv)
	if err != nil {
		return nil, err
	}
	unavailable := &UnavailableError{}
	for _, source := range sources {
		server, err := startSource(ctx, source, settled)
		if err == nil {
			return server, nil
		}
		unavailable.attempts = append(unavailable.attempts, attempt{source, err})
		if ctx.Err() != nil {
			break
		}
	}
	return nil, unavailable
}

func startSource(ctx context.Context, source Source, settled config) (*Server, error) {
	request := order{Source: source, Environment: settled.environment}
	for _, each := range append(defaultSettings(), settled.settings...) {
		request.Settings = slices.DeleteFunc(request.Settings, func(s setting) bool { return s.Name == each.Name })
		request.Settings = append(request.Settings, each)
	}
	server := &Server{source: source, prefix: databasePrefix()}

	switch source {
	case SourceDSN:
		request.DSN, request.Prefix = settled.getenv(dsnVariable), server.prefix
		if request.DSN == "" {
			return nil, errNotSet
		}
	case SourceLocal:
		directory, err := binaryDirectory(settled.patterns)
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
		return nil, errNotImplemented
	}

	supervisor, ready, err := engage(ctx, request)
	if err != nil {
		return nil, err
	}
	server.supervisor, server.details = supervisor, ready
	server.stop = sync.OnceValue(server.close)
	if err := server.connect(ctx, settled.settings); err != nil {
		return nil, errors.Join(err, server.Stop())
	}
	return server, nil
}

// connect opens the connections that create and drop databases, and looks at the server.
func (s *Server) connect(ctx context.Context, wanted []setting) error {
	admin, err := sql.Open("pgx", s.details.DSN)
	if err != nil {
		return fmt.Errorf("%s: %w", s.source, err)
	}
	// Few, since the server copies one database no faster than several; enough not to queue for long.
	admin.SetMaxOpenConns(4)
	admin.SetMaxIdleConns(4)
	s.admin = admin

	var version int
	if err := admin.QueryRowContext(ctx, "SELECT current_setting('server_version_num')::int").Scan(&version); err != nil {
		return fmt.Errorf("connect to the server: %w", err)
	}
	// Copying files costs the server a checkpoint, which is cheap without fsync (24 ms instead of 65
	// for a database) but not fair to a server that others use.
	s.copyFiles = s.source != SourceDSN && version >= 150000

	if s.source != SourceDSN {
		return nil
	}
	for _, each := range wanted {
		var actual string
		if err := admin.QueryRowContext(ctx, "SELECT current_setting($1)", each.Name).Scan(&actual); err != nil {
			return fmt.Errorf("read the setting %s: %w", each.Name, err)
		}
		if actual != each.Value {
			return fmt.Errorf("the server of %s has %s = %s, not %s, and is not ours to change", dsnVariable, each.Name, actual, each.Value)
		}
	}
	return nil
}

// Source says where the server came from.
func (s *Server) Source() Source { return s.source }

// DSN is the URL or, for the server of LEGION_TEST_DSN, the text of the same form under which
// database is reached; the empty name stands for the database that is there from the start. It
// carries the password.
func (s *Server) DSN(database string) string {
	if database == "" {
		return s.details.DSN
	}
	return withDatabase(s.details.DSN, database)
}

// Stop ends the server and removes its data; the server of LEGION_TEST_DSN it leaves running, without
// the databases that were created through s. Connections that are still open are cut. A second call
// returns what the first returned.
func (s *Server) Stop() error { return s.stop() }

func (s *Server) close() error {
	var err error
	if s.admin != nil {
		err = s.admin.Close()
	}
	if err := errors.Join(err, s.supervisor.release()); err != nil {
		return fmt.Errorf("legion: stop the Postgres for tests: %w", err)
	}
	return nil
}

// databasePrefix begins the names of one Server's databases. The process id tells people whose they
// are; the random part keeps processes on different machines apart.
func databasePrefix() string {
	random := make([]byte, 6)
	_, _ = rand.Read(random) // never fails, by its contract
	return fmt.Sprintf("legion_test_%d_%s_", os.Getpid(), hex.EncodeToString(random))
}
