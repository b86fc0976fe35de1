package pgtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
)

// supervisorVariable makes the process that finds it set a supervisor.
const supervisorVariable = "LEGION_PGTEST_SUPERVISOR"

// order is what an owner asks of its supervisor: the first line on its standard input.
type order struct {
	Source      Source
	DSN         string    `json:",omitempty"` // dsn: the server
	Prefix      string    `json:",omitempty"` // dsn: what the names of the owner's databases begin with
	Directory   string    `json:",omitempty"` // local: where the binaries are
	Image       string    `json:",omitempty"` // docker
	Settings    []setting `json:",omitempty"`
	Environment []string  `json:",omitempty"`
}

// reply is what a supervisor answers on its standard output: once when the server is ready or has
// failed to start, and once more if giving everything back has failed.
type reply struct {
	DSN       string `json:",omitempty"`
	Folder    string `json:",omitempty"` // local: removed at the end
	Process   int    `json:",omitempty"` // local: the server's process id
	Container string `json:",omitempty"` // docker: removed at the end
	Error     string `json:",omitempty"`
}

// A supervisor is this very program started again, so that it needs neither a shell nor a binary of
// its own. That has to happen before main or the tests begin, hence in init.
func init() { //nolint:gochecknoinits // see above
	if os.Getenv(supervisorVariable) == "" {
		return
	}
	// The kernel sends the parent-death signal of the server when the thread that started it ends;
	// the main thread ends with the process.
	runtime.LockOSThread()
	if err := os.Unsetenv(supervisorVariable); err != nil {
		os.Exit(1)
	}
	if err := supervise(os.Stdin, os.Stdout); err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// supervise starts what the order on control asks for, answers on replies, waits until control
// closes, and gives everything back.
func supervise(control io.Reader, replies io.Writer) error {
	answer := json.NewEncoder(replies)

	// Whoever ends all processes politely must not leave data behind. SIGPIPE is caught since
	// answering an owner that has died would otherwise end the supervisor before it has cleaned up.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)

	var request order
	if err := json.NewDecoder(control).Decode(&request); err != nil {
		return errors.Join(err, answer.Encode(reply{Error: fmt.Sprintf("read the order: %v", err)}))
	}
	go func() {
		_, _ = io.Copy(io.Discard, control) // any end of the pipe means that the owner has gone
		stop()
	}()

	ready, release, err := launch(ctx, request)
	if err != nil {
		return errors.Join(err, answer.Encode(reply{Error: err.Error()}))
	}
	_ = answer.Encode(ready) // an owner that can't read it has gone, and control says so
	<-ctx.Done()
	if err := release(); err != nil {
		return errors.Join(err, answer.Encode(reply{Error: err.Error()}))
	}
	return nil
}

// launch starts a server. The function that it returns stops the server and removes all traces of
// it; after an error there is nothing to remove.
func launch(ctx context.Context, request order) (ready reply, release func() error, err error) {
	defer func() {
		// Libraries that panic (testcontainers does where it finds no Docker) are a reason like any other.
		if cause := recover(); cause != nil {
			err = fmt.Errorf("panic: %v", cause)
		}
	}()
	switch request.Source {
	case SourceDSN:
		return reply{DSN: request.DSN}, func() error { return dropPrefixed(request.DSN, request.Prefix) }, nil
	case SourceLocal:
		return launchLocal(ctx, request)
	case SourceDocker:
		return launchDocker(ctx, request)
	case SourceEmbedded:
		return reply{}, nil, errNotImplemented
	default:
		return reply{}, nil, fmt.Errorf("unknown source %q", request.Source)
	}
}

// tail keeps what a failed program said last.
func tail(output string) string {
	const limit = 2000
	output = strings.TrimSpace(output)
	if len(output) > limit {
		output = "..." + output[len(output)-limit:]
	}
	return output
}
