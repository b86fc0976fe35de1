//go:build unix

package pgtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	superuser = "postgres"

	// portAttempts bounds how often a port that was free a moment ago may be taken by another process.
	portAttempts = 20

	// readyTimeout is generous: machines that run many test binaries at once are slow.
	readyTimeout = time.Minute

	// shutdownTimeout covers the five seconds after which a server that shuts down kills its backends.
	shutdownTimeout = 15 * time.Second
)

var errPortTaken = errors.New("the port was taken by another process")

// localServer is a server run from binaries on this machine. Only the supervisor has one.
type localServer struct {
	binaries string
	folder   string
	account  *account
	password string
	settings []setting
	port     int
	process  *exec.Cmd
	exited   chan struct{}
}

func launchLocal(ctx context.Context, request order) (reply, func() error, error) {
	account, err := serverAccount()
	if err != nil {
		return reply{}, nil, err
	}
	folder, err := makeFolder(account)
	if err != nil {
		return reply{}, nil, err
	}
	server := &localServer{
		binaries: request.Directory,
		folder:   folder,
		account:  account,
		password: rand.Text(),
		settings: request.Settings,
	}
	if err := server.start(ctx); err != nil {
		return reply{}, nil, errors.Join(err, server.release())
	}
	location := url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(superuser, server.password),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(server.port)),
		Path:     "/postgres",
		RawQuery: "sslmode=disable",
	}
	return reply{DSN: location.String(), Folder: folder, Process: server.process.Process.Pid}, server.release, nil
}

func (s *localServer) start(ctx context.Context) error {
	if err := s.initialise(ctx); err != nil {
		return err
	}
	var err error
	for range portAttempts {
		if err = s.run(ctx); !errors.Is(err, errPortTaken) {
			return err
		}
	}
	return err
}

// initialise creates the data directory.
func (s *localServer) initialise(ctx context.Context) error {
	password := filepath.Join(s.folder, "password")
	if err := os.WriteFile(password, []byte(s.password), 0o600); err != nil {
		return err
	}
	if err := s.account.own(password); err != nil {
		return err
	}
	command := s.command(ctx, "initdb",
		"--pgdata", s.data(), "--username", superuser, "--pwfile", password, "--auth", "scram-sha-256",
		"--encoding", "UTF8", "--locale", "C", "--no-sync", "--no-instructions")
	var output bytes.Buffer
	command.Stdout, command.Stderr = &output, &output
	// The whole group, since a bootstrap backend that outlives initdb would go on writing.
	command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) }
	if err := command.Run(); err != nil {
		return fmt.Errorf("initdb in %s: %w\n%s", s.binaries, errors.Join(err, ctx.Err()), tail(output.String()))
	}
	return nil
}

// run starts the server on a free port and waits until it accepts connections.
func (s *localServer) run(ctx context.Context) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	logName := filepath.Join(s.folder, "log")
	log, err := os.Create(logName)
	if err != nil {
		return err
	}
	arguments := []string{"-D", s.data(), "-p", strconv.Itoa(port)}
	for _, each := range append([]setting{
		{"listen_addresses", "127.0.0.1"},
		{"unix_socket_directories", ""},
		// In the data directory instead of /dev/shm, where a killed server's would stay.
		{"dynamic_shared_memory_type", "mmap"},
	}, s.settings...) {
		arguments = append(arguments, "-c", each.Name+"="+each.Value)
	}
	command := s.command(context.Background(), "postgres", arguments...)
	command.Stdout, command.Stderr = log, log
	if err := errors.Join(command.Start(), log.Close()); err != nil {
		return fmt.Errorf("start postgres in %s: %w", s.binaries, err)
	}
	s.port, s.process, s.exited = port, command, make(chan struct{})
	go func() {
		_ = command.Wait()
		close(s.exited)
	}()

	deadline := time.After(readyTimeout)
	for {
		if s.ready() {
			return nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-s.exited:
			output, _ := os.ReadFile(logName)
			if bytes.Contains(output, []byte("could not bind")) {
				return errPortTaken
			}
			return fmt.Errorf("postgres in %s ended: %s\n%s", s.binaries, command.ProcessState, tail(string(output)))
		case <-deadline:
			return fmt.Errorf("postgres in %s was not ready after %s", s.binaries, readyTimeout)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// ready reads the server's status where pg_ctl reads it: in the last line of its pid file.
func (s *localServer) ready() bool {
	content, err := os.ReadFile(filepath.Join(s.data(), "postmaster.pid"))
	if err != nil {
		return false
	}
	lines := strings.Split(string(content), "\n")
	return len(lines) >= 8 && lines[0] == strconv.Itoa(s.process.Process.Pid) && strings.TrimSpace(lines[7]) == "ready"
}

// release stops the server and removes its folder.
func (s *localServer) release() error {
	if s.process != nil {
		// SIGQUIT is an immediate shutdown: no checkpoint of data that is about to be removed.
		_ = s.process.Process.Signal(syscall.SIGQUIT)
		select {
		case <-s.exited:
		case <-time.After(shutdownTimeout):
			_ = s.process.Process.Kill()
			<-s.exited
		}
	}
	// A backend that is slow to notice the end of its server may still create a file.
	var err error
	for range 50 {
		if err = os.RemoveAll(s.folder); err == nil {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return err
}

func (s *localServer) data() string { return filepath.Join(s.folder, "data") }

// command prepares one of the server's programs, to run as the server's user, in its folder (this
// process's directory may be closed to that user), and in a process group of its own.
func (s *localServer) command(ctx context.Context, name string, arguments ...string) *exec.Cmd {
	command := exec.CommandContext(ctx, filepath.Join(s.binaries, name), arguments...)
	command.Dir = s.folder
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: s.account.credential()}
	dieWithParent(command.SysProcAttr)
	for _, variable := range os.Environ() {
		// PGDATA, PGOPTIONS and the like are meant for the user's own servers.
		if !strings.HasPrefix(variable, "PG") {
			command.Env = append(command.Env, variable)
		}
	}
	// The time zone saves initdb from comparing all of them with the system's; English messages are
	// what run looks for.
	command.Env = append(command.Env, "LC_ALL=C", "TZ=UTC")
	return command
}

func freePort() (int, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0") //nolint:noctx // returns at once
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	port := listener.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // of a TCP listener
	return port, listener.Close()
}

func supervisorAttributes() *syscall.SysProcAttr {
	// A session of its own, so that Ctrl-C in a terminal reaches the owner only and the supervisor
	// cleans up after it.
	return &syscall.SysProcAttr{Setsid: true}
}
