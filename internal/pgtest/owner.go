package pgtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"time"
)

// releaseTimeout is how long a supervisor may take to give everything back. It is longer than any
// of its own limits, so that it ends only a supervisor that hangs.
const releaseTimeout = time.Minute

// supervisor is the owner's side of a running supervisor process.
type supervisor struct {
	command *exec.Cmd
	control *os.File // closing it, or dying, tells the supervisor to give everything back
	output  *os.File
	replies *json.Decoder
	release func() error
}

// engage starts a supervisor, hands it the order and waits for its answer.
func engage(ctx context.Context, request order) (*supervisor, reply, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, reply{}, fmt.Errorf("find this program to run it as the supervisor: %w", err)
	}
	input, control, err := os.Pipe()
	if err != nil {
		return nil, reply{}, err
	}
	output, answers, err := os.Pipe()
	if err != nil {
		return nil, reply{}, errors.Join(err, input.Close(), control.Close())
	}

	// Standard error stays closed: go test waits until everybody who holds its output has ended.
	command := exec.Command(executable) //nolint:noctx // it must outlive ctx, to clean up
	command.Env = append(append(os.Environ(), request.Environment...), supervisorVariable+"=1")
	command.Stdin, command.Stdout = input, answers
	command.SysProcAttr = supervisorAttributes()
	err = errors.Join(command.Start(), input.Close(), answers.Close())
	if command.Process == nil {
		return nil, reply{}, errors.Join(err, control.Close(), output.Close())
	}

	started := &supervisor{command: command, control: control, output: output, replies: json.NewDecoder(output)}
	started.release = sync.OnceValue(started.giveBack)
	ready, err := started.request(ctx, request)
	if err != nil {
		// The reason that the supervisor gave is the one to report; that it then ended is not news.
		_ = started.release()
		return nil, reply{}, err
	}
	return started, ready, nil
}

func (s *supervisor) request(ctx context.Context, request order) (reply, error) {
	if err := json.NewEncoder(s.control).Encode(request); err != nil {
		return reply{}, fmt.Errorf("hand the order to the supervisor: %w", err)
	}
	// A supervisor whose control pipe closes answers at once, which ends Decode.
	stop := context.AfterFunc(ctx, func() { _ = s.control.Close() })
	defer stop()

	var ready reply
	if err := s.replies.Decode(&ready); err != nil {
		return reply{}, fmt.Errorf("the supervisor ended without an answer: %w", errors.Join(err, ctx.Err()))
	}
	if ctx.Err() != nil {
		return reply{}, errors.Join(ctx.Err(), errorOf(ready))
	}
	return ready, errorOf(ready)
}

// giveBack waits until the supervisor has stopped the server and removed everything.
func (s *supervisor) giveBack() error {
	impatience := time.AfterFunc(releaseTimeout, func() { _ = s.command.Process.Kill() })
	defer impatience.Stop()

	_ = s.control.Close()
	var last reply
	_ = s.replies.Decode(&last) // normally the end of the file
	err := errorOf(last)
	if waitError := s.command.Wait(); err == nil && waitError != nil {
		err = fmt.Errorf("supervisor: %w", waitError)
	}
	return errors.Join(err, s.output.Close())
}

func errorOf(answer reply) error {
	if answer.Error == "" {
		return nil
	}
	return errors.New(answer.Error)
}
