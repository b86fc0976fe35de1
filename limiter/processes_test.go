package limiter_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion/internal/testhook"
)

// concurrentWorkerVariable makes the test program a worker: a process that makes the
// calls it is told to, with nothing in common with the others but the database.
const concurrentWorkerVariable = "LEGION_LIMITER_WORKER"

// A concurrentOrder is one line to a worker. The first has the database, each of the
// others has calls to make at once.
type concurrentOrder struct {
	DSN        string                `json:"dsn,omitempty"`
	Operations []concurrentOperation `json:"operations,omitempty"`
	Scripts    []raceScript          `json:"scripts,omitempty"`
}

// A concurrentReply is one line from a worker. Each order is answered twice: at once,
// which tells how its clock stands, and with the outcomes.
type concurrentReply struct {
	Outcomes []concurrentOutcome `json:"outcomes,omitempty"`
	Races    [][]raceOutcome     `json:"races,omitempty"`
}

// concurrentWorker obeys orders until there are no more.
func concurrentWorker(orders io.Reader, replies io.Writer) int {
	slog.SetLogLoggerLevel(slog.LevelError) // denials are no news here

	if err := obeyConcurrentOrders(json.NewDecoder(orders), json.NewEncoder(replies)); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, err)

		return 1
	}

	return 0
}

func obeyConcurrentOrders(orders *json.Decoder, replies *json.Encoder) error {
	var first concurrentOrder
	if err := orders.Decode(&first); err != nil {
		return err
	}

	pools := make([]*gorm.DB, concurrentCalls)
	for i := range pools {
		db, err := openConcurrentPool(first.DSN)
		if err != nil {
			return err
		}

		pools[i] = db
	}

	if err := replies.Encode(concurrentReply{}); err != nil {
		return err
	}

	for {
		var order concurrentOrder
		if err := orders.Decode(&order); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}

			return err
		}

		begun := time.Now()

		if err := replies.Encode(concurrentReply{}); err != nil {
			return err
		}

		reply := concurrentReply{
			Outcomes: runConcurrently(context.Background(), pools, order.Operations, testhook.Hooks{}, begun),
			Races:    runRace(context.Background(), pools, order.Scripts, testhook.Hooks{}, begun),
		}
		if err := replies.Encode(reply); err != nil {
			return err
		}
	}
}

// openConcurrentPool is a pool of one connection, like those of concurrentPools.
func openConcurrentPool(dsn string) (*gorm.DB, error) {
	db, err := gorm.Open(postgres.Open(dsn), &gorm.Config{Logger: logger.Discard})
	if err != nil {
		return nil, err
	}

	pool, err := db.DB()
	if err != nil {
		return nil, err
	}

	pool.SetMaxOpenConns(1)

	if err := db.Use(racePlugin()); err != nil {
		return nil, err
	}

	return db, nil
}

// A concurrentProcess is a worker as its test sees it.
type concurrentProcess struct {
	orders  *json.Encoder
	replies *json.Decoder
	errors  *bytes.Buffer
	stop    func() error
}

// startConcurrentProcess starts a worker on the database and waits until it has
// connected. It ends with the test.
func startConcurrentProcess(t *testing.T, dsn string) *concurrentProcess {
	t.Helper()

	executable, err := os.Executable()
	require.NoError(t, err)

	command := exec.CommandContext(context.WithoutCancel(t.Context()), executable)
	command.Env = append(os.Environ(), concurrentWorkerVariable+"=1")

	input, err := command.StdinPipe()
	require.NoError(t, err)

	output, err := command.StdoutPipe()
	require.NoError(t, err)

	process := &concurrentProcess{orders: json.NewEncoder(input), replies: json.NewDecoder(output), errors: &bytes.Buffer{}}
	command.Stderr = process.errors

	require.NoError(t, command.Start())
	process.stop = sync.OnceValue(func() error { return errors.Join(input.Close(), command.Wait()) })
	t.Cleanup(func() { require.NoError(t, process.stop(), "%s", process.errors) })

	require.NoError(t, process.orders.Encode(concurrentOrder{DSN: dsn}))

	var ready concurrentReply

	require.NoError(t, process.replies.Decode(&ready))

	return process
}

// run has the worker make the calls at once, and returns their outcomes by the test's
// clock, which runs from begun on.
func (p *concurrentProcess) run(operations []concurrentOperation, begun time.Time) ([]concurrentOutcome, error) {
	reply, sent, arrived, err := p.obey(concurrentOrder{Operations: operations}, begun)

	for i := range reply.Outcomes {
		outcome := &reply.Outcomes[i]
		outcome.Call += sent
		outcome.Verdict += arrived
		outcome.Return += arrived
	}

	return reply.Outcomes, err
}

// race is run for scripts.
func (p *concurrentProcess) race(scripts []raceScript, begun time.Time) ([][]raceOutcome, error) {
	reply, sent, arrived, err := p.obey(concurrentOrder{Scripts: scripts}, begun)

	for _, outcomes := range reply.Races {
		for i := range outcomes {
			outcomes[i].Call += sent
			outcomes[i].Verdict += arrived
			outcomes[i].Return += arrived
		}
	}

	return reply.Races, err
}

// obey has the worker obey the order.
//
// The worker's clock starts when it has read the order, at a moment that is only known
// to lie between the sending of the order and the arrival of the first answer. So each
// call is taken to have begun as early, and to have ended as late, as that allows: a
// longer interval can hide a fault, but not make one up.
func (p *concurrentProcess) obey(order concurrentOrder, begun time.Time) (reply concurrentReply, sent, arrived int64, err error) {
	sent = time.Since(begun).Nanoseconds()

	if err := p.orders.Encode(order); err != nil {
		return concurrentReply{}, 0, 0, err
	}

	if err := p.replies.Decode(&reply); err != nil {
		return concurrentReply{}, 0, 0, err
	}

	arrived = time.Since(begun).Nanoseconds()

	err = p.replies.Decode(&reply)

	return reply, sent, arrived, err
}

// concurrentProcesses are workers that share the calls of a round.
type concurrentProcesses []*concurrentProcess

func startConcurrentProcesses(t *testing.T, dsn string) concurrentProcesses {
	t.Helper()

	return concurrentProcesses{startConcurrentProcess(t, dsn), startConcurrentProcess(t, dsn)}
}

// stop ends the workers, and with them their connections.
func (p concurrentProcesses) stop(t *testing.T) {
	t.Helper()

	for _, process := range p {
		require.NoError(t, process.stop(), "%s", process.errors)
	}
}

// run deals the calls out to the workers.
func (p concurrentProcesses) run(t *testing.T, operations []concurrentOperation, begun time.Time) []concurrentOutcome {
	t.Helper()

	var (
		running  sync.WaitGroup
		failures = make([]error, len(p))
		outcomes = make([]concurrentOutcome, len(operations))
	)

	for i, process := range p {
		from, to := i*len(operations)/len(p), (i+1)*len(operations)/len(p)

		running.Go(func() {
			answers, err := process.run(operations[from:to], begun)
			failures[i] = err
			copy(outcomes[from:to], answers)
		})
	}

	running.Wait()
	require.NoError(t, errors.Join(failures...))

	return outcomes
}

func TestRandomRoundsOfTwoProcessesHaveASerialHistory(t *testing.T) {
	t.Parallel()

	seed := concurrentSeed(t)
	arena := newConcurrentArena(t)
	processes := startConcurrentProcesses(t, arena.dsn)

	for round := range concurrentCount(t, 60) {
		operations := randomOperations(rand.New(rand.NewPCG(seed, uint64(round))))
		events, end := arena.round(t, operations, func() []concurrentOutcome {
			return processes.run(t, operations, arena.begun)
		})
		requireConcurrentSerial(t, seed, round, events, end)
	}

	processes.stop(t)
	require.Zero(t, concurrentDeadlocks(t, arena.dsn, arena.pools...))
}
