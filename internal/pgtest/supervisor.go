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

// supervisorVariable makes a supervisor of the process that finds it set.
const supervisorVariable = "LEGION_PGTEST_SUPERVISOR"

// order is what an owner asks of its supervisor: the first line on its standard input.
type order struct {
	Source    Source    `json:"source"`
	DSN       string    `json:"dsn,omitempty"`       // dsn: the server
	Prefix    string    `json:"prefix,omitempty"`    // dsn: what the names of the owner's databases begin with
	Directory string    `json:"directory,omitempty"` // local: where the binaries are
	Image     string    `json:"image,omitempty"`     // docker
	Settings  []setting `json:"settings,omitempty"`  // local, docker, embedded
	Restarts  bool      `json:"restarts,omitempty"`  // local, embedded: start the server again when it ends

	Environment []setting `json:"environment,omitempty"` // local, embedded: of the server
	DiskSize    int64     `json:"disk_size,omitempty"`   // local, embedded: of a disk of the server's own; 0: it has none

	Repository string `json:"repository,omitempty"` // embedded: where to download from; empty: Maven Central
	Cache      string `json:"cache,omitempty"`      // embedded: where to keep the download; empty: nowhere
}

// reply is what a supervisor answers on its standard output: once when the server is ready or has
// failed to start, and once more if giving everything back has failed.
type reply struct {
	DSN       string `json:"dsn,omitempty"`
	Folder    string `json:"folder,omitempty"`    // local, embedded: removed at the end
	ProcessID int    `json:"pid,omitempty"`       // local, embedded: the server's
	Container string `json:"container,omitempty"` // docker: removed at the end
	Failure   string `json:"failure,omitempty"`
	NoDisk    bool   `json:"no_disk,omitempty"` // the failure is ErrNoDisk
}

// launched is a running server in the hands of its supervisor.
type launched struct {
	reply   reply
	release func() error // stops the server and removes all traces of it
}

// A supervisor is this very program started again, so that it needs neither a shell nor a binary of
// its own. That has to happen before main or the tests begin.
func init() { //nolint:gochecknoinits // see above
	if os.Getenv(supervisorVariable) == "" {
		return
	}
	// The kernel takes the end of the thread that started a process for the end of its parent. The
	// main thread, which init runs on, ends last.
	runtime.LockOSThread()
	err := os.Unsetenv(supervisorVariable)
	if err == nil {
		err = supervise(os.Stdin, os.Stdout)
	}
	if err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// supervise starts what the order on control asks for, answers on answers, waits until control
// closes, and gives everything back.
func supervise(control io.Reader, answers io.Writer) error {
	// Whoever ends all processes politely must not leave data behind.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	// To answer an owner that has died would otherwise end the supervisor before it has cleaned up.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)

	answer := json.NewEncoder(answers)
	var request order
	if err := json.NewDecoder(control).Decode(&request); err != nil {
		return errors.Join(err, answer.Encode(reply{Failure: "read the order: " + err.Error()}))
	}
	go func() {
		_, _ = io.Copy(io.Discard, control) // however it ends, the owner has gone
		stop()
	}()

	server, err := launch(ctx, &request)
	if err != nil {
		return errors.Join(err, answer.Encode(reply{Failure: err.Error(), NoDisk: errors.Is(err, ErrNoDisk)}))
	}
	// Without a reader the owner has gone already.
	if err = answer.Encode(server.reply); err == nil {
		<-ctx.Done()
	}
	if err = server.release(); err != nil {
		return errors.Join(err, answer.Encode(reply{Failure: err.Error()}))
	}

	return nil
}

// launch starts a server. After an error there is nothing to release.
func launch(ctx context.Context, request *order) (launched, error) {
	switch request.Source {
	case SourceDSN:
		return launchGiven(ctx, request)
	case SourceLocal:
		return launchLocal(ctx, request)
	case SourceDocker:
		return launchDocker(ctx, request)
	case SourceEmbedded:
		return launchEmbedded(ctx, request)
	default:
		return launched{}, fmt.Errorf("source %q %w", request.Source, errUnknownSource)
	}
}

// tail keeps what a program that failed said last.
func tail(output string) string {
	const limit = 2000
	output = strings.TrimSpace(output)
	if len(output) > limit {
		output = "..." + output[len(output)-limit:]
	}

	return output
}
