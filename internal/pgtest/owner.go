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
// of its own limits, so that it only ends a supervisor that hangs.
const releaseTimeout = time.Minute

// supervisor is the owner's side of a running supervisor process.
type supervisor struct {
	command *exec.Cmd
	control *os.File // when it closes, be it because the owner died, everything is given back
	answers *os.File
	decoder *json.Decoder
	release func() error // once
}

// engage starts a supervisor, hands it the order and waits for its answer.
func engage(ctx context.Context, request order) (*supervisor, reply, error) {
	engaged, err := startSupervisor(request.DiskSize > 0)
	if err != nil {
		return nil, reply{}, fmt.Errorf("start this program again as the supervisor: %w", err)
	}
	ready, err := engaged.hand(ctx, request)
	if err != nil {
		// What went wrong is known; that the supervisor then ended, too, is not news.
		_ = engaged.release()

		return nil, reply{}, err
	}

	return engaged, ready, nil
}

// startSupervisor starts it, with mounts of its own where it is to mount a disk.
func startSupervisor(mounts bool) (*supervisor, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	input, control, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("open a pipe: %w", err)
	}
	answers, output, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open a pipe: %w", err), input.Close(), control.Close())
	}

	// Not bound to a context: it ends after its owner, to clean up. Nor does it get this process's
	// standard error: go test waits for everybody who holds the output of a test.
	command := exec.Command(executable) //nolint:gosec,noctx // this program itself; see above
	command.Env = append(os.Environ(), supervisorVariable+"=1")
	command.Stdin, command.Stdout = input, output
	command.SysProcAttr = supervisorAttributes()
	if mounts {
		if err := mountApart(command.SysProcAttr); err != nil {
			return nil, errors.Join(err, input.Close(), control.Close(), answers.Close(), output.Close())
		}
	}
	if err := command.Start(); err != nil {
		if mounts && errors.Is(err, os.ErrPermission) {
			err = fmt.Errorf("%w: %w", ErrNoDisk, err)
		}

		return nil, errors.Join(err, input.Close(), control.Close(), answers.Close(), output.Close())
	}
	_, _ = input.Close(), output.Close() // the child's ends

	engaged := &supervisor{command: command, control: control, answers: answers, decoder: json.NewDecoder(answers)}
	engaged.release = sync.OnceValue(engaged.giveBack)

	return engaged, nil
}

func (s *supervisor) hand(ctx context.Context, request order) (reply, error) {
	if err := json.NewEncoder(s.control).Encode(request); err != nil {
		return reply{}, fmt.Errorf("hand the order to the supervisor: %w", err)
	}
	// Without its control pipe the supervisor gives up and ends, which ends Decode.
	unwatch := context.AfterFunc(ctx, func() { _ = s.control.Close() })
	defer unwatch()

	var ready reply
	err := s.decoder.Decode(&ready)
	switch {
	case ctx.Err() != nil:
		return reply{}, fmt.Errorf("abandoned: %w", ctx.Err())
	case err != nil:
		return reply{}, fmt.Errorf("the supervisor ended without an answer: %w", err)
	default:
		return ready, ready.err()
	}
}

// giveBack waits until the supervisor has stopped the server, removed its data, and ended.
func (s *supervisor) giveBack() error {
	impatience := time.AfterFunc(releaseTimeout, func() { _ = s.command.Process.Kill() })
	defer impatience.Stop()

	_ = s.control.Close() // an error says that it is closed already
	var last reply
	_ = s.decoder.Decode(&last) // normally there is none
	err := s.command.Wait()
	_ = s.answers.Close()
	if last.Failure != "" {
		return last.err()
	}
	if err != nil {
		return fmt.Errorf("the supervisor ended early: %w", err)
	}

	return nil
}

// failure is what went wrong in the supervisor, in its words.
type failure string

func (f failure) Error() string { return string(f) }

func (r reply) err() error {
	switch {
	case r.Failure == "":
		return nil
	case r.NoDisk:
		return fmt.Errorf("%w (%w)", failure(r.Failure), ErrNoDisk)
	default:
		return failure(r.Failure)
	}
}
