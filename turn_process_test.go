package legion_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// turnChildVariable makes this test binary a process that has a turn, and does with it what
// it is told to on its standard input.
const turnChildVariable = "LEGION_TEST_TURN_CHILD"

// A turnOrder is one line to the process. Exactly one field is set.
type turnOrder struct {
	Begin      *turnBegin `json:"begin,omitempty"`
	Record     int64      `json:"record,omitempty"`
	Checkpoint string     `json:"checkpoint,omitempty"`
	End        bool       `json:"end,omitempty"`
	AwaitEnd   bool       `json:"await_end,omitempty"`
}

type turnBegin struct {
	DSN     string        `json:"dsn"`
	AgentID string        `json:"agent_id"`
	Lease   time.Duration `json:"lease"`
	Reserve int64         `json:"reserve"`
	Limit   int64         `json:"limit"`
}

// A turnReply is the line that answers.
type turnReply struct {
	Error     string `json:"error,omitempty"`
	LeaseLost bool   `json:"lease_lost,omitempty"`
}

func turnInChild(orders io.Reader, replies io.Writer) error {
	var turn *legion.Turn

	decoder, encoder := json.NewDecoder(orders), json.NewEncoder(replies)

	for {
		var order turnOrder
		if err := decoder.Decode(&order); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}

			return err
		}

		err := obeyTurnOrder(context.Background(), order, &turn)
		reply := turnReply{LeaseLost: errors.Is(err, legion.ErrLeaseLost)}

		if err != nil {
			reply.Error = err.Error()
		}

		if err := encoder.Encode(reply); err != nil {
			return err
		}
	}
}

func obeyTurnOrder(ctx context.Context, order turnOrder, turn **legion.Turn) (err error) {
	switch {
	case order.Begin != nil:
		*turn, err = beginInChild(ctx, *order.Begin)

		return err
	case order.Record != 0:
		return (*turn).Record(ctx, models.Usage{TotalTokens: order.Record})
	case order.Checkpoint != "":
		return (*turn).Checkpoint(ctx, []byte(order.Checkpoint))
	case order.AwaitEnd:
		<-(*turn).Context().Done()

		return context.Cause((*turn).Context())
	default:
		return (*turn).End(ctx)
	}
}

func beginInChild(ctx context.Context, begin turnBegin) (*legion.Turn, error) {
	db, err := gorm.Open(postgres.Open(begin.DSN), &gorm.Config{Logger: logger.Discard})
	if err != nil {
		return nil, err
	}

	plugin := legion.New(legion.WithLease(begin.Lease), legion.WithObserver(nil))
	if err := db.Use(plugin); err != nil {
		return nil, err
	}

	return plugin.Begin(ctx, begin.AgentID, legion.TurnOptions{
		Rules: []limiter.Rule{runningRule(begin.Limit), tokensRule(1000)}, Reserve: begin.Reserve, PerStep: true,
	})
}

// A turnProcess is such a process as its test sees it.
type turnProcess struct {
	orders  *json.Encoder
	replies *json.Decoder
	process *os.Process
	stderr  *bytes.Buffer
}

func startTurnProcess(t *testing.T) *turnProcess {
	t.Helper()

	executable, err := os.Executable()
	require.NoError(t, err)

	command := exec.CommandContext(context.WithoutCancel(t.Context()), executable)
	command.Env = append(os.Environ(), turnChildVariable+"=1")

	input, err := command.StdinPipe()
	require.NoError(t, err)

	output, err := command.StdoutPipe()
	require.NoError(t, err)

	process := &turnProcess{orders: json.NewEncoder(input), replies: json.NewDecoder(output), stderr: &bytes.Buffer{}}
	command.Stderr = process.stderr
	require.NoError(t, command.Start())
	process.process = command.Process

	t.Cleanup(func() {
		// It may be stopped, or waiting for the end of its turn.
		_ = process.process.Kill()
		_ = input.Close()
		_ = command.Wait()

		if t.Failed() {
			t.Log(process.stderr.String())
		}
	})

	return process
}

func (p *turnProcess) do(t *testing.T, order turnOrder) turnReply {
	t.Helper()

	require.NoError(t, p.orders.Encode(order))

	var reply turnReply
	require.NoError(t, p.replies.Decode(&reply))

	return reply
}

// holdTheOnlySlot starts a process that has a turn on the agent "held", under MaxRunningAgents 1.
func holdTheOnlySlot(t *testing.T, db *gorm.DB, lease time.Duration, reserve int64) *turnProcess {
	t.Helper()

	process := startTurnProcess(t)
	require.Empty(t, process.do(t, turnOrder{Begin: &turnBegin{DSN: pgtest.DSN(db), AgentID: "held", Lease: lease, Reserve: reserve, Limit: 1}}))

	return process
}

// leaseLeft is how long the agent's lease still lasts, by the database's clock.
func leaseLeft(t *testing.T, db *gorm.DB, agentID string) time.Duration {
	t.Helper()

	var seconds float64
	require.NoError(t, db.Raw("SELECT extract(epoch FROM lease_expires_at - clock_timestamp()) FROM legion_agents WHERE agent_id = ?", agentID).Row().Scan(&seconds))

	return time.Duration(seconds * float64(time.Second))
}

func TestTheSlotOfAKilledProcessIsFreeOneLeaseLaterAndNotBefore(t *testing.T) {
	t.Parallel()

	for _, policyWindow := range []time.Duration{time.Second, 24 * time.Hour} {
		t.Run(fmt.Sprint("window ", policyWindow), func(t *testing.T) {
			t.Parallel()

			db, _ := useTurns(t)
			process := holdTheOnlySlot(t, db, shortLease, 300)

			// In the middle of a later lease, not of the first.
			time.Sleep(shortLease)
			require.NoError(t, process.process.Kill())

			rule := limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: policyWindow, MaxRunningAgents: limiter.Max(1)}}

			var (
				waited   time.Duration
				exceeded *limiter.ExceededError
			)

			for {
				expires := *rowOf(t, db, "held").LeaseExpiresAt
				before := leaseLeft(t, db, "held")
				err := limiter.Enforce(db, "next", rule)

				if err == nil {
					var now time.Time
					require.NoError(t, db.Raw("SELECT clock_timestamp()").Row().Scan(&now))
					require.False(t, now.Before(expires), "not before the lease was over")

					break
				}

				require.ErrorAs(t, err, &exceeded)
				require.Positive(t, before, "not after the lease was over")
				require.LessOrEqual(t, exceeded.RetryAfter, shortLease)
				require.Less(t, waited, 2*shortLease)

				pause := max(before/3, time.Millisecond)
				time.Sleep(pause)
				waited += pause
			}

			require.Nil(t, rowOf(t, db, "held").LeaseExpiresAt, "it was revoked")
			require.Equal(t, models.StatusRunning, rowOf(t, db, "held").Status, "for Recover to find")
		})
	}
}

func TestAPausedProcessLosesItsTurnAndNoTokens(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t, legion.WithLease(longest))
	process := holdTheOnlySlot(t, db, shortLease, 0)
	require.Empty(t, process.do(t, turnOrder{Record: 100}))
	require.Empty(t, process.do(t, turnOrder{Checkpoint: "before"}))

	require.NoError(t, process.process.Signal(syscall.SIGSTOP))

	var next *legion.Turn

	require.Eventually(t, func() bool {
		var err error
		next, err = plugin.Begin(t.Context(), "next", under(runningRule(1)))

		return err == nil
	}, longest, 20*time.Millisecond)

	require.NoError(t, process.process.Signal(syscall.SIGCONT))

	require.True(t, process.do(t, turnOrder{AwaitEnd: true}).LeaseLost)
	require.True(t, process.do(t, turnOrder{Checkpoint: "after"}).LeaseLost)
	require.Empty(t, process.do(t, turnOrder{Record: 50}))
	require.True(t, process.do(t, turnOrder{End: true}).LeaseLost)

	row := rowOf(t, db, "held")
	require.Nil(t, row.LeaseExpiresAt)
	require.Equal(t, models.StatusRunning, row.Status)
	require.Equal(t, []byte("before"), row.ConversationState)
	require.EqualValues(t, 150, tokensOf(t, db, "held"))

	require.NoError(t, next.Context().Err())
	require.NoError(t, next.End(t.Context()))
	require.ErrorIs(t, limiter.Enforce(db, "another", tokensRule(150)), limiter.ErrExceeded, "what it spent counts")
}

func TestOneOfTwoProcessesGetsTheAgent(t *testing.T) {
	t.Parallel()

	db, _ := useTurns(t)
	begin := turnOrder{Begin: &turnBegin{DSN: pgtest.DSN(db), AgentID: "held", Lease: longest, Limit: 5}}
	processes := []*turnProcess{startTurnProcess(t), startTurnProcess(t)}

	for _, process := range processes {
		require.NoError(t, process.orders.Encode(begin)) // both before either has answered
	}

	var begun []*turnProcess

	for _, process := range processes {
		var reply turnReply
		require.NoError(t, process.replies.Decode(&reply))

		if reply.Error == "" {
			begun = append(begun, process)
		} else {
			require.Contains(t, reply.Error, legion.ErrAgentRunning.Error())
		}
	}

	require.Len(t, begun, 1)
	require.Empty(t, begun[0].do(t, turnOrder{End: true}))
	requireIdle(t, db, "held")
}

func TestACrashReturnsTheReservationWithTheLease(t *testing.T) {
	t.Parallel()

	db, _ := useTurns(t)
	process := holdTheOnlySlot(t, db, shortLease, 900)
	require.Empty(t, process.do(t, turnOrder{Record: 100}))
	require.EqualValues(t, 800, rowOf(t, db, "held").ReservedTokens)
	require.NoError(t, process.process.Kill())

	exceeded := &limiter.ExceededError{}
	require.ErrorAs(t, limiter.Enforce(db, "next", tokensRule(900)), &exceeded)
	require.Equal(t, limiter.Usage{Tokens: 100, ReservedTokens: 800}, exceeded.Usage)

	time.Sleep(exceeded.RetryAfter)
	require.Eventually(t, func() bool { return limiter.Enforce(db, "next", tokensRule(900)) == nil }, longest, 10*time.Millisecond)
	require.LessOrEqual(t, leaseLeftOrNothing(t, db, "held"), time.Duration(0))
}

func leaseLeftOrNothing(t *testing.T, db *gorm.DB, agentID string) time.Duration {
	t.Helper()

	if rowOf(t, db, agentID).LeaseExpiresAt == nil {
		return 0
	}

	return leaseLeft(t, db, agentID)
}

func TestATurnKeepsItsSlotWithOneProcessorThatIsBusy(t *testing.T) {
	t.Parallel()

	if testing.Short() {
		t.Skip("it keeps a processor busy for some leases")
	}

	db, _ := useTurns(t)

	executable, err := os.Executable()
	require.NoError(t, err)

	// The process burns its only processor from goroutines, while it renews.
	command := exec.CommandContext(t.Context(), executable)
	command.Env = append(os.Environ(), turnChildVariable+"=1", "GOMAXPROCS=1", turnBurnVariable+"=1")
	command.Stderr = os.Stderr

	input, err := command.StdinPipe()
	require.NoError(t, err)

	output, err := command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, command.Start())

	var once sync.Once

	stop := func() {
		once.Do(func() {
			_ = input.Close()
			_ = command.Wait()
		})
	}
	t.Cleanup(stop)

	process := &turnProcess{orders: json.NewEncoder(input), replies: json.NewDecoder(output)}
	lease := 2 * shortLease
	require.Empty(t, process.do(t, turnOrder{Begin: &turnBegin{DSN: pgtest.DSN(db), AgentID: "held", Lease: lease, Limit: 1}}))

	for deadline := time.Now().Add(5 * lease / 2); time.Now().Before(deadline); time.Sleep(lease / 10) {
		require.ErrorIs(t, limiter.Enforce(db, "next", runningRule(1)), limiter.ErrExceeded)
	}

	require.Empty(t, process.do(t, turnOrder{End: true}))
	require.NoError(t, limiter.Enforce(db, "next", runningRule(1)))
	stop()
}

// turnBurnVariable makes the process keep its processors busy.
const turnBurnVariable = "LEGION_TEST_TURN_BURN"

func burn() {
	for range 4 {
		go func() {
			for i := 0; ; i++ {
				_ = i * i
			}
		}()
	}
}
