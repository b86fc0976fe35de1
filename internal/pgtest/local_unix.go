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
	"sync"
	"syscall"
	"time"
)

const (
	loopback = "127.0.0.1"

	// portAttempts bounds how often a port that was free a moment ago may be gone.
	portAttempts = 20

	// readyTimeout is long because machines that run many test binaries at once are slow.
	readyTimeout = 2 * time.Minute

	// shutdownTimeout is more than the five seconds after which a server in immediate shutdown kills
	// backends that don't end by themselves.
	shutdownTimeout = 15 * time.Second

	// removeAttempts, removeInterval apart, outlast backends that are slow to notice their server's end.
	removeAttempts = 50
	removeInterval = 100 * time.Millisecond

	// restartPause is how long an init system would wait.
	restartPause = 200 * time.Millisecond

	privateFile = 0o600
)

var (
	errPortTaken  = errors.New("another process took every port before the server could")
	errServerDied = errors.New("the server ended while it was starting")
	errNotReady   = errors.New("the server was not ready in time")
	errReleased   = errors.New("the server was given back")
)

// localServer is a server run from binaries on this machine, in the hands of the supervisor.
type localServer struct {
	binaries   string
	folder     string
	account    *account
	password   string
	settings   []setting
	variables  []setting // of the server's environment
	mounted    bool
	choosePort func(context.Context) (string, error)

	port string

	// mutex guards what a restart changes.
	mutex    sync.Mutex
	process  *exec.Cmd
	exited   chan struct{}
	released bool
}

func launchLocal(ctx context.Context, request *order) (launched, error) {
	server, err := newLocalServer(request)
	if err != nil {
		return launched{}, err
	}
	if err := server.start(ctx); err != nil {
		return launched{}, errors.Join(fmt.Errorf("binaries in %s: %w", request.Directory, err), server.release())
	}

	return server.launched(request.Restarts), nil
}

// launched is the server once it runs. With restarts it is started again whenever it ends.
func (s *localServer) launched(restarts bool) launched {
	started := launched{reply{DSN: s.dsn(), Folder: s.folder, ProcessID: s.process.Process.Pid}, s.release}
	if restarts {
		go s.revive()
	}

	return started
}

func newLocalServer(request *order) (*localServer, error) {
	account, err := serverAccount()
	if err != nil {
		return nil, err
	}
	folder, err := makeFolder(account)
	if err != nil {
		return nil, err
	}

	server := &localServer{
		binaries:   request.Directory,
		folder:     folder,
		account:    account,
		password:   rand.Text(),
		settings:   request.Settings,
		variables:  request.Environment,
		choosePort: freePort,
	}
	if request.DiskSize > 0 {
		if err := server.mount(request.DiskSize); err != nil {
			return nil, errors.Join(err, server.release())
		}
	}

	return server, nil
}

// mount puts a disk of the server's own where its folder is.
func (s *localServer) mount(size int64) error {
	if err := mountDisk(s.folder, size); err != nil {
		return err
	}
	s.mounted = true

	return s.account.own(s.folder)
}

func (s *localServer) start(ctx context.Context) error {
	if err := s.initialise(ctx); err != nil {
		return err
	}
	for range portAttempts {
		port, err := s.choosePort(ctx)
		if err != nil {
			return err
		}
		if err := s.run(ctx, port); !errors.Is(err, errPortTaken) {
			return err
		}
	}

	return errPortTaken
}

// initialise creates the data directory.
func (s *localServer) initialise(ctx context.Context) error {
	password := filepath.Join(s.folder, "password")
	if err := os.WriteFile(password, []byte(s.password), privateFile); err != nil {
		return fmt.Errorf("write the password: %w", err)
	}
	if err := s.account.own(password); err != nil {
		return err
	}
	command := s.command(ctx, initProgram,
		"--pgdata", s.data(), "--username", superuser, "--pwfile", password, "--auth", "scram-sha-256",
		"--encoding", "UTF8", "--locale", "C", "--no-sync", "--no-instructions")
	// The whole group: the backend that initdb runs would go on writing.
	command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) }
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, tail(string(output)))
	}

	return nil
}

// run starts the server on port and waits until it accepts connections.
func (s *localServer) run(ctx context.Context, port string) error {
	logName := filepath.Join(s.folder, "log")
	log, err := os.OpenFile(logName, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, privateFile) //nolint:gosec // in our own folder
	if err != nil {
		return fmt.Errorf("open the server's log: %w", err)
	}
	defer func() { _ = log.Close() }() // the server has it open, too

	settings := append([]setting{
		{"port", port},
		{"listen_addresses", loopback},
		{"unix_socket_directories", ""},
		// In the data directory rather than /dev/shm, where a killed server's would stay.
		{"dynamic_shared_memory_type", "mmap"},
	}, s.settings...)
	// Not bound to ctx: release ends it.
	command := s.command(context.WithoutCancel(ctx), serverProgram, append([]string{"-D", s.data()}, arguments(settings)...)...)
	command.Stdout, command.Stderr = log, log
	for _, each := range s.variables {
		command.Env = append(command.Env, each.Name+"="+each.Value)
	}
	exited, err := s.launch(command)
	if err != nil {
		return err
	}
	s.port = port

	return s.await(ctx, logName, exited)
}

// launch starts the server's process, unless the server was released meanwhile.
func (s *localServer) launch(command *exec.Cmd) (exited chan struct{}, err error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.released {
		return nil, errReleased
	}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("start the server: %w", err)
	}
	exited = make(chan struct{})
	s.process, s.exited = command, exited
	go func() {
		_ = command.Wait()
		close(exited)
	}()

	return exited, nil
}

// revive starts the server again whenever it has ended, until it is released. A server that was killed
// leaves processes behind that keep the next one from starting until they notice.
func (s *localServer) revive() {
	for {
		s.mutex.Lock()
		exited := s.exited
		s.mutex.Unlock()

		<-exited
		time.Sleep(restartPause)
		if errors.Is(s.run(context.Background(), s.port), errReleased) {
			return
		}
	}
}

func (s *localServer) await(ctx context.Context, logName string, exited <-chan struct{}) error {
	deadline := time.After(readyTimeout)
	for !s.ready() {
		select {
		case <-time.After(pollInterval):
		case <-exited:
			output, err := os.ReadFile(logName) //nolint:gosec // in our own folder
			if bytes.Contains(output, []byte("could not bind")) {
				return errPortTaken
			}

			return fmt.Errorf("%w\n%s", errors.Join(errServerDied, err), tail(string(output)))
		case <-deadline:
			return errNotReady
		case <-ctx.Done():
			return fmt.Errorf("wait for the server: %w", ctx.Err())
		}
	}

	return nil
}

// ready reads the server's status where pg_ctl does: in the eighth line of its pid file.
func (s *localServer) ready() bool {
	const statusLine = 7
	content, err := os.ReadFile(filepath.Join(s.data(), "postmaster.pid"))
	if err != nil {
		return false
	}
	lines := strings.Split(string(content), "\n")

	s.mutex.Lock()
	defer s.mutex.Unlock()

	return len(lines) > statusLine &&
		lines[0] == strconv.Itoa(s.process.Process.Pid) && strings.TrimSpace(lines[statusLine]) == "ready"
}

// release stops the server and removes its folder.
func (s *localServer) release() error {
	s.mutex.Lock()
	s.released = true
	process, exited := s.process, s.exited
	s.mutex.Unlock()

	if process != nil {
		// SIGQUIT is an immediate shutdown: no checkpoint of what is about to be removed.
		_ = process.Process.Signal(syscall.SIGQUIT)
		select {
		case <-exited:
		case <-time.After(shutdownTimeout):
			_ = process.Process.Kill()
			<-exited
		}
	}
	if s.mounted {
		if err := unmountDisk(s.folder); err != nil {
			return err
		}
	}
	var err error
	for range removeAttempts {
		if err = os.RemoveAll(s.folder); err == nil {
			return nil
		}
		time.Sleep(removeInterval)
	}

	return fmt.Errorf("remove the server's folder: %w", err)
}

func (s *localServer) data() string { return filepath.Join(s.folder, "data") }

func (s *localServer) dsn() string {
	location := url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(superuser, s.password),
		Host:     net.JoinHostPort(loopback, s.port),
		Path:     "/postgres",
		RawQuery: "sslmode=disable",
	}

	return location.String()
}

// command prepares one of the server's programs to run as the server's user, in a process group of
// its own, and in the server's folder: this process's directory may be closed to that user.
func (s *localServer) command(ctx context.Context, name string, arguments ...string) *exec.Cmd {
	command := exec.CommandContext(ctx, filepath.Join(s.binaries, name), arguments...) //nolint:gosec // found by binaryDirectory
	command.Dir = s.folder
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: s.account.credential()}
	dieWithParent(command.SysProcAttr)
	for _, variable := range os.Environ() {
		// PGDATA, PGOPTIONS and the like are about the developer's own servers.
		if !strings.HasPrefix(variable, "PG") {
			command.Env = append(command.Env, variable)
		}
	}
	// English, for await; and a time zone, since initdb would compare every one with the system's.
	command.Env = append(command.Env, "LC_ALL=C", "TZ=UTC")

	return command
}

// supervisorAttributes put a supervisor into a session of its own, so that Ctrl-C in a terminal
// reaches the owner only and the supervisor cleans up after it.
func supervisorAttributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }

func freePort(ctx context.Context) (string, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp4", net.JoinHostPort(loopback, "0"))
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	_, port, err := net.SplitHostPort(listener.Addr().String())
	err = errors.Join(err, listener.Close())
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}

	return port, nil
}
