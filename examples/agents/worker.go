package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/limiter"
)

// The variables that make this program a worker: the database, and its name.
const (
	dsnVariable  = "LEGION_AGENTS_DSN"
	nameVariable = "LEGION_AGENTS_WORKER"
)

// recoverPause is shorter than patience: what was interrupted goes before what is new.
const recoverPause = 20 * time.Millisecond

// shutdownTime is how long a worker that is asked to stop waits for its turns.
const shutdownTime = 5 * time.Second

// A line is what a worker writes to its standard output.
type line struct {
	Agent string `json:"agent"`

	// Usage and Tokens are an LLM call whose tokens are recorded.
	Usage  string `json:"usage,omitempty"`
	Tokens int64  `json:"tokens,omitempty"`

	// Outcome says what became of the agent.
	Outcome outcomeKind `json:"outcome,omitempty"`
}

type outcomeKind string

const (
	finished  outcomeKind = "finished"
	recovered outcomeKind = "recovered"
	denied    outcomeKind = "denied"
)

func isWorker() bool { return os.Getenv(nameVariable) != "" }

// workerMain is the main function of a worker.
func workerMain() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if err := work(ctx, os.Getenv(dsnVariable), os.Getenv(nameVariable), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)

		return 1
	}

	return 0
}

func work(ctx context.Context, dsn, name string, out io.Writer) (err error) {
	db, err := gorm.Open(postgres.Open(dsn), &gorm.Config{Logger: logger.Discard})
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}

	pool, err := db.DB()
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}

	pool.SetMaxOpenConns(connections)
	pool.SetMaxIdleConns(connections)

	plugin := legion.New(legion.WithLease(lease), legion.WithObserver(nil))
	if err := db.Use(plugin); err != nil {
		return fmt.Errorf("use the plugin: %w", err)
	}

	defer func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
		defer cancel()

		err = errors.Join(err, plugin.Shutdown(ending), pool.Close())
	}()

	lines := &lineWriter{encoder: json.NewEncoder(out)}
	researcher := newResearcher(db, plugin, func(agentID, usageID string, tokens int64) {
		lines.write(line{Agent: agentID, Usage: usageID, Tokens: tokens})
	})

	var agents sync.WaitGroup

	for i := range agentsEach {
		agents.Go(func() {
			agentID := fmt.Sprintf("%s %02d", name, i)

			switch err := researcher.research(ctx, agentID); {
			case err == nil:
				lines.write(line{Agent: agentID, Outcome: finished})
			case isBudgetSpent(err):
				lines.write(line{Agent: agentID, Outcome: denied})
			default:
				lines.fail(err)
			}
		})
	}

	done := make(chan struct{})

	go func() {
		defer close(done)

		agents.Wait()
	}()

	lines.fail(recoverUntil(ctx, done, researcher, lines))
	<-done

	return lines.err()
}

// recoverUntil resumes what other processes have left behind, again and again, until the
// own agents are done and there is nothing left that has room.
func recoverUntil(ctx context.Context, done <-chan struct{}, researcher *researcher, lines *lineWriter) error {
	// Those who died may hold a slot or a reservation for one more lease.
	busy := time.Now()

	for {
		report, err := researcher.recover(ctx)
		if err != nil {
			return err
		}

		for _, agentID := range report.Resumed {
			lines.write(line{Agent: agentID, Outcome: recovered})
		}

		if len(report.Failed) > 0 {
			return fmt.Errorf("resume an agent: %w", report.Failed[0].Err)
		}

		select {
		case <-done:
			if time.Since(busy) > 2*lease {
				return nil
			}
		default:
			busy = time.Now()
		}

		if len(report.Resumed) > 0 || slices.ContainsFunc(report.Left, hasRoomLater) {
			busy = time.Now()
		}

		if err := sleep(ctx, recoverPause); err != nil {
			return err
		}
	}
}

func hasRoomLater(left legion.RecoverFailure) bool {
	return errors.Is(left.Err, limiter.ErrExceeded) && !isBudgetSpent(left.Err)
}

// A lineWriter writes lines from several goroutines, and keeps the first error of all.
type lineWriter struct {
	mutex   sync.Mutex
	encoder *json.Encoder
	failure error
}

func (w *lineWriter) write(written line) {
	w.mutex.Lock()
	defer w.mutex.Unlock()

	w.failure = errors.Join(w.failure, w.encoder.Encode(written))
}

func (w *lineWriter) fail(err error) {
	w.mutex.Lock()
	defer w.mutex.Unlock()

	w.failure = errors.Join(w.failure, err)
}

func (w *lineWriter) err() error {
	w.mutex.Lock()
	defer w.mutex.Unlock()

	return w.failure
}

// A worker is such a process as its parent sees it.
type worker struct {
	command *exec.Cmd
	read    chan struct{} // closed when its output has ended

	mutex   sync.Mutex
	written []line
	changed chan struct{} // closed and replaced with every line
}

func startWorker(ctx context.Context, dsn, name string) (*worker, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start a process: %w", err)
	}

	command := exec.CommandContext(ctx, executable) //nolint:gosec // this program itself
	command.Env = append(os.Environ(), dsnVariable+"="+dsn, nameVariable+"="+name)
	command.Stderr = os.Stderr

	output, err := command.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start a process: %w", err)
	}

	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("start a process: %w", err)
	}

	started := &worker{command: command, read: make(chan struct{}), changed: make(chan struct{})}
	go started.readLines(output)

	return started, nil
}

func (w *worker) readLines(output io.Reader) {
	defer close(w.read)

	for scanner := bufio.NewScanner(output); scanner.Scan(); {
		var read line
		if json.Unmarshal(scanner.Bytes(), &read) != nil {
			continue // cut off in the middle, by the kill
		}

		w.mutex.Lock()
		w.written = append(w.written, read)
		close(w.changed)
		w.changed = make(chan struct{})
		w.mutex.Unlock()
	}
}

// awaitMiddle waits until the worker has recorded so many calls and has so many agents
// under way, or has ended.
func (w *worker) awaitMiddle(calls, underWay int) {
	for {
		w.mutex.Lock()
		changed := w.changed
		recorded := 0
		working := map[string]bool{}

		for _, written := range w.written {
			switch {
			case written.Outcome != "":
				delete(working, written.Agent)
			case !strings.HasSuffix(written.Agent, readerSuffix):
				working[written.Agent] = true

				fallthrough
			default:
				recorded++
			}
		}

		w.mutex.Unlock()

		if recorded >= calls && len(working) >= underWay {
			return
		}

		select {
		case <-changed:
		case <-w.read:
			return
		}
	}
}

// kill ends the worker as a power cut would: it has no time for anything.
func (w *worker) kill() error {
	if err := w.command.Process.Kill(); err != nil {
		return fmt.Errorf("kill a process: %w", err)
	}

	<-w.read

	_ = w.command.Wait() // it was killed, and says so

	return nil
}

func (w *worker) wait() error {
	<-w.read

	if err := w.command.Wait(); err != nil {
		return fmt.Errorf("the surviving process: %w", err)
	}

	return nil
}

func (w *worker) lines() []line {
	w.mutex.Lock()
	defer w.mutex.Unlock()

	return w.written
}
