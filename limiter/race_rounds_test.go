package limiter_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/internal/reference"
	"github.com/legion-gorm/legion/internal/testhook"
	"github.com/legion-gorm/legion/models"
)

// raceAgents is how many agents there are in a round, few, so that their turns meet.
const raceAgents = 6

// raceTurnsOf returns rows of turns that are at work, and scripts of turns and verdicts
// beside them. No lease ends.
func raceTurnsOf(random *rand.Rand) (rows []raceRow, scripts []raceScript) {
	agents := random.Perm(raceAgents)

	for i := range random.IntN(3) {
		rows = append(rows, randomRaceRow(random, agents[i], raceLease))
	}

	renewed := make(map[string]bool)

	for client := range concurrentCalls {
		agent := randomAgentName(random.IntN(raceAgents))
		runID := fmt.Sprintf("run %d", client)

		var script raceScript

		switch random.IntN(8) {
		case 0, 1, 2:
			script = raceScript{randomRaceVerdict(random, rows, raceStep{Kind: raceEnforce, Agent: agent})}
		case 3:
			script = randomRaceWork(random, rows, renewed, client)
		default:
			begin := randomRaceVerdict(random, rows, raceStep{Kind: raceBegin, Agent: agent, Run: runID, Reserve: random.Int64N(5)})
			script = append(raceScript{begin}, randomRaceSteps(random, agent, runID, true, client)...)
		}

		scripts = append(scripts, script)
	}

	return rows, scripts
}

// raceRevocationsOf returns rows of turns whose process is gone or late, and scripts of
// verdicts that need their slots, and of what is left of the turns.
func raceRevocationsOf(random *rand.Rand) (rows []raceRow, scripts []raceScript) {
	switch random.IntN(4) {
	case 0:
		return raceCrossingOf(random)
	case 1:
		return raceLateRenewalOf(random)
	}

	agents := random.Perm(raceAgents)

	for i := range 2 + random.IntN(2) {
		left := time.Duration(0)
		if random.IntN(2) == 0 {
			left = randomLeft(random)
		}

		rows = append(rows, randomRaceRow(random, agents[i], left))
	}

	renewed := make(map[string]bool)

	for client := range concurrentCalls - 1 {
		var script raceScript

		row := rows[random.IntN(len(rows))]
		agent, resumes := row.Agent, row.Run

		if random.IntN(2) == 0 {
			agent, resumes = randomAgentName(random.IntN(raceAgents)), ""
		}

		switch random.IntN(8) {
		case 0, 1:
			script = raceScript{randomRaceVerdict(random, rows, raceStep{Kind: raceEnforce, Agent: agent})}
		case 2, 3:
			script = raceScript{randomRaceVerdict(random, rows, raceStep{Kind: raceBegin, Agent: agent, Run: fmt.Sprintf("run %d", client), Reserve: random.Int64N(3)})}
		case 4:
			script = raceScript{randomRaceVerdict(random, rows, raceStep{
				Kind: raceBegin, Agent: agent, Run: fmt.Sprintf("run %d", client), Resumes: resumes, Reserve: random.Int64N(3),
			})}
		default:
			script = randomRaceWork(random, rows, renewed, client)
		}

		scripts = append(scripts, script)
	}

	return rows, scripts
}

// raceCrossingOf returns crashed turns whose agents come back, each into the group of the
// next one, which it needs the slot of: their verdicts share no lock, and each takes the
// row that another one is about to write.
func raceCrossingOf(random *rand.Rand) (rows []raceRow, scripts []raceScript) {
	agents := random.Perm(raceAgents)
	letters := []string{"a", "b", "c"}[:2+random.IntN(2)]
	renewed := make(map[string]bool)

	for i, letter := range letters {
		row := randomRaceRow(random, agents[i], 0)
		row.Fields = letter
		rows = append(rows, row)
	}

	for i, row := range rows {
		step := raceStep{Kind: raceEnforce, Agent: row.Agent}
		if random.IntN(2) == 0 {
			step.Kind, step.Run = raceBegin, fmt.Sprintf("run %d", i)
		}

		step = randomRaceVerdict(random, rows, step)
		step.Rules = []raceRule{{runningAtMost(letters[(i+1)%len(letters)], 1), concurrentUnlimited}}
		scripts = append(scripts, raceScript{step}, randomRaceWork(random, rows, renewed, len(rows)+i))
	}

	return rows, scripts
}

// raceLateRenewalOf returns a turn whose lease ends while it is being renewed, and
// scripts of those who take its agent for crashed, or want its slot.
func raceLateRenewalOf(random *rand.Rand) (rows []raceRow, scripts []raceScript) {
	agents := random.Perm(raceAgents)
	row := randomRaceRow(random, agents[0], randomLeft(random))

	scripts = append(scripts, raceScript{{
		Kind: raceRenew, Agent: row.Agent, Run: row.Run, Nested: true,
		Start: time.Duration(random.Int64N(int64(row.Left))), Hold: 2 * randomLeft(random),
	}})

	for client := 1; client < 5; client++ {
		step := raceStep{Kind: raceBegin, Agent: row.Agent, Run: fmt.Sprintf("run %d", client)}

		switch random.IntN(5) {
		case 0:
			step.Kind, step.Run = raceEnforce, ""
		case 1:
			step.Resumes = row.Run
		case 2:
			step.Run = row.Run
		case 3:
			step.Agent = randomAgentName(agents[1])
		}

		step = randomRaceVerdict(random, nil, step)
		step.Rules = []raceRule{{runningAtMost(row.Fields, 1+random.Int64N(2)), concurrentUnlimited}}
		step.Start = randomLeft(random)
		scripts = append(scripts, raceScript{step})
	}

	return []raceRow{row}, scripts
}

// randomLeft is a time in which about half of a round happens.
func randomLeft(random *rand.Rand) time.Duration {
	return time.Millisecond + time.Duration(random.Int64N(int64(9*time.Millisecond)))
}

func randomRaceRow(random *rand.Rand, agent int, left time.Duration) raceRow {
	name := randomAgentName(agent)

	return raceRow{Agent: name, Fields: randomFields(random), Run: "old run of " + name, Reserved: random.Int64N(4), Left: left}
}

// randomRaceWork is what is done for a turn that has begun before the round.
//
// Only one client renews a run, as in a process that has one goroutine for it. While one
// renewal has not committed, another one that comes after the old end would say that the
// lease is lost: that errs on the safe side, but is no serial history.
func randomRaceWork(random *rand.Rand, rows []raceRow, renewed map[string]bool, client int) raceScript {
	if len(rows) == 0 {
		return nil
	}

	row := rows[random.IntN(len(rows))]

	renews := !renewed[row.Agent]
	renewed[row.Agent] = true

	return randomRaceSteps(random, row.Agent, row.Run, renews, client)
}

func randomRaceSteps(random *rand.Rand, agent, runID string, renews bool, client int) (script raceScript) {
	for range 1 + random.IntN(2) {
		step := raceStep{Agent: agent, Run: runID, Start: randomPause(random)}

		if random.IntN(4) == 0 {
			step.Start = 3 * randomLeft(random) // after most verdicts
		}

		if step.Nested = random.IntN(2) == 0; step.Nested {
			step.Hold = 2 * randomPause(random)
			step.Undo = random.IntN(8) == 0
		}

		switch kind := random.IntN(4); {
		case renews && kind > 1:
			step.Kind = raceRenew
		case kind%2 == 0:
			step.Kind = raceEnd
		default:
			step.Kind = raceRecord
			step.Entry, step.Tokens = fmt.Sprintf("entry %d of %d", len(script), client), random.Int64N(5)
		}

		script = append(script, step)
	}

	return script
}

// randomRaceVerdict fills in pauses, and rules on groups that as often as not have one of
// the rows in them.
func randomRaceVerdict(random *rand.Rand, rows []raceRow, step raceStep) raceStep {
	step.Start = randomPause(random)
	step.Pauses = map[testhook.Point]time.Duration{}

	for _, point := range []testhook.Point{
		testhook.FieldLocks, testhook.IdentityLocks, testhook.Expired, testhook.Revoked, testhook.Measured, testhook.Recorded,
	} {
		step.Pauses[point] = randomPause(random)
	}

	if step.Nested = step.Kind == raceEnforce && random.IntN(2) == 0; step.Nested {
		step.Hold = randomPause(random)
		step.Undo = random.IntN(8) == 0
	}

	rules := 1 + random.IntN(2)
	if step.Kind == raceBegin && random.IntN(8) == 0 {
		rules = 0
	}

	for range rules {
		rule := raceRule{atMost(randomFields(random), concurrentUnlimited), concurrentUnlimited}
		if len(rows) > 0 && random.IntN(2) == 0 {
			fields := rows[random.IntN(len(rows))].Fields
			rule.Fields = string(fields[random.IntN(len(fields))])
		}

		switch random.IntN(6) {
		case 0:
			rule.Agents = 2 + random.Int64N(3)
		case 1, 2:
			rule.Tokens = 1 + random.Int64N(10)
		default:
			rule.Running = 1 + random.Int64N(2)
		}

		step.Rules = append(step.Rules, rule)
	}

	return step
}

// newRaceArena is a database for races.
func newRaceArena(t *testing.T) *concurrentArena {
	t.Helper()

	arena := newConcurrentArena(t)
	for _, pool := range arena.pools {
		require.NoError(t, pool.Use(racePlugin()))
	}

	return arena
}

// race starts from these rows, plays the scripts while identities that no agent uses are
// pruned, and returns what the steps came to and what is found.
func (a *concurrentArena) race(
	t *testing.T, rows []raceRow, scripts []raceScript, run func() [][]raceOutcome,
) (events []*raceEvent, found raceFound) {
	t.Helper()

	a.clear(t)
	a.prepareRace(t, rows)

	stopPruning := startConcurrentPruner(t, a.referee())

	for _, row := range rows {
		if row.waning() {
			require.NoError(t, a.referee().Exec(`UPDATE legion_agents SET lease_expires_at = clock_timestamp() + ? * interval '1 microsecond'
				WHERE agent_id = ?`, row.Left.Microseconds(), row.Agent).Error)
		}
	}

	outcomes := run()

	stopPruning()

	for i, script := range scripts {
		for j, step := range script {
			events = append(events, &raceEvent{step: step, outcome: outcomes[i][j]})
		}
	}

	return events, a.readRace(t)
}

func (a *concurrentArena) raceHere(t *testing.T, rows []raceRow, scripts []raceScript, hooks testhook.Hooks) ([]*raceEvent, raceFound) {
	t.Helper()

	return a.race(t, rows, scripts, func() [][]raceOutcome {
		return runRace(t.Context(), a.pools[:concurrentCalls], scripts, hooks, a.begun)
	})
}

func (a *concurrentArena) prepareRace(t *testing.T, rows []raceRow) {
	t.Helper()

	for _, row := range rows {
		until := time.Now().Add(-time.Hour)
		if row.Left > 0 {
			until = time.Now().Add(raceLease)
		}

		require.NoError(t, a.referee().Create(&models.LegionAgent{
			AgentID: row.Agent, Metadata: document(t, concurrentIdentity(row.Fields, false)), StartedAt: new(time.Now()),
			Status: models.StatusRunning, RunID: new(row.Run), LeaseExpiresAt: &until, ReservedTokens: row.Reserved,
		}).Error)
	}
}

// readRace reads the rows as the model sees them, once the leases are over that were about
// to be.
func (a *concurrentArena) readRace(t *testing.T) raceFound {
	t.Helper()

	var agents []models.LegionAgent

	concurrentEventually(t, func() bool {
		agents = nil
		require.NoError(t, a.referee().Unscoped().Order("agent_id").Find(&agents).Error)

		return !slices.ContainsFunc(agents, func(agent models.LegionAgent) bool {
			return agent.LeaseExpiresAt != nil && time.Until(*agent.LeaseExpiresAt) > -time.Millisecond && time.Until(*agent.LeaseExpiresAt) < raceLease/2
		})
	})

	rows := make([]reference.Agent, len(agents))
	for i, agent := range agents {
		rows[i] = raceAgent(t, agent)
	}

	return raceFound(modelLines(rows))
}

func raceAgent(t *testing.T, row models.LegionAgent) reference.Agent {
	t.Helper()

	agent := reference.Agent{ID: row.AgentID, Running: row.Status == models.StatusRunning, Reserved: row.ReservedTokens}

	if row.Metadata != nil {
		identity, err := reference.ParseIdentity(string(row.Metadata))
		require.NoError(t, err)

		agent.Identity = identity
	}

	if row.StartedAt != nil {
		agent.Started = reference.At(0)
	}

	if row.RunID != nil {
		agent.Run = *row.RunID
	}

	if row.LeaseExpiresAt != nil {
		agent.Lease = raceOver
		if time.Until(*row.LeaseExpiresAt) > 0 {
			agent.Lease = raceWhole
		}
	}

	var entries []models.Usage

	require.NoError(t, json.Unmarshal(row.Usage, &entries))

	for _, entry := range entries {
		agent.Usage = append(agent.Usage, reference.Entry{ID: entry.ID, Tokens: entry.TotalTokens})
	}

	return agent
}

// requireRaceSerial is for rounds with the whole protocol.
func requireRaceSerial(t *testing.T, seed uint64, round int, rows []raceRow, events []*raceEvent, found raceFound) {
	t.Helper()

	for _, event := range events {
		require.Empty(t, event.outcome.Failure, "%s in round %d with LEGION_TEST_SEED=%d", event.step, round, seed)
	}

	require.True(t, raceSerial(raceStart(rows), events, found), "round %d with LEGION_TEST_SEED=%d has no serial history:\n%s\nand left\n%s",
		round, seed, raceDescribe(rows, events), found)
}

// raceRounds plays random rounds and requires that each has a serial history.
func raceRounds(
	t *testing.T, arena *concurrentArena, rounds int, generate func(*rand.Rand) ([]raceRow, []raceScript), run func([]raceScript) [][]raceOutcome,
) {
	t.Helper()

	seed := concurrentSeed(t)
	seen := make(map[string]int)

	for round := range concurrentCount(t, rounds) {
		rows, scripts := generate(rand.New(rand.NewPCG(seed, uint64(round))))
		events, found := arena.race(t, rows, scripts, func() [][]raceOutcome { return run(scripts) })
		requireRaceSerial(t, seed, round, rows, events, found)

		for _, event := range events {
			seen[fmt.Sprintf("%s %s", event.step.Kind, event.outcome.Outcome)]++
		}

		seen["revoked"] += strings.Count(string(found), "lease never") - strings.Count(string(found), "idle")
	}

	t.Log(seen)
}

func TestRandomTurnsHaveASerialHistory(t *testing.T) {
	t.Parallel()

	arena := newRaceArena(t)
	raceRounds(t, arena, 100, raceTurnsOf, func(scripts []raceScript) [][]raceOutcome {
		return runRace(t.Context(), arena.pools[:concurrentCalls], scripts, testhook.Hooks{}, arena.begun)
	})
	require.Zero(t, concurrentDeadlocks(t, arena.dsn, arena.pools...))
}

func TestRandomRevocationsHaveASerialHistory(t *testing.T) {
	t.Parallel()

	arena := newRaceArena(t)
	raceRounds(t, arena, 150, raceRevocationsOf, func(scripts []raceScript) [][]raceOutcome {
		return runRace(t.Context(), arena.pools[:concurrentCalls], scripts, testhook.Hooks{}, arena.begun)
	})
	require.Zero(t, concurrentDeadlocks(t, arena.dsn, arena.pools...))
}

func TestRandomTurnsOfTwoProcessesHaveASerialHistory(t *testing.T) {
	t.Parallel()

	for name, generate := range map[string]func(*rand.Rand) ([]raceRow, []raceScript){
		"turns": raceTurnsOf, "revocations": raceRevocationsOf,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			arena := newRaceArena(t)
			processes := startConcurrentProcesses(t, arena.dsn)

			raceRounds(t, arena, 30, generate, func(scripts []raceScript) [][]raceOutcome {
				return processes.race(t, scripts, arena.begun)
			})

			processes.stop(t)
			require.Zero(t, concurrentDeadlocks(t, arena.dsn, arena.pools...))
		})
	}
}

// race deals the scripts out to the workers.
func (p concurrentProcesses) race(t *testing.T, scripts []raceScript, begun time.Time) [][]raceOutcome {
	t.Helper()

	var (
		running  sync.WaitGroup
		failures = make([]error, len(p))
		outcomes = make([][]raceOutcome, len(scripts))
	)

	for i, process := range p {
		from, to := i*len(scripts)/len(p), (i+1)*len(scripts)/len(p)

		running.Go(func() {
			answers, err := process.race(scripts[from:to], begun)
			failures[i] = err
			copy(outcomes[from:to], answers)
		})
	}

	running.Wait()
	require.NoError(t, errors.Join(failures...))

	return outcomes
}

// Without a part of the revocation the same rounds must show a fault.
func TestRandomRevocationsWithoutAPartOfThemShowItsFault(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		hooks    testhook.Hooks
		deadlock bool
	}{
		"expired slots are free": {hooks: testhook.Hooks{ExpiredAreFree: true}},
		"taken unchecked":        {hooks: testhook.Hooks{RevokeUnchecked: true}},
		"taken with waiting":     {hooks: testhook.Hooks{RevokeWaiting: true}, deadlock: true},
		"without the own row":    {hooks: testhook.Hooks{WithoutOwnRow: true}, deadlock: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			const enough = 3000

			seed := concurrentSeed(t)
			arena := newRaceArena(t)

			for round := range enough {
				rows, scripts := raceRevocationsOf(rand.New(rand.NewPCG(seed, uint64(round))))
				events, found := arena.raceHere(t, rows, scripts, test.hooks)

				failed := slices.ContainsFunc(events, func(event *raceEvent) bool { return event.outcome.Failure != "" })
				deadlocked := slices.ContainsFunc(events, func(event *raceEvent) bool { return event.outcome.Deadlock })

				if test.deadlock && deadlocked || !test.deadlock && !failed && !raceSerial(raceStart(rows), events, found) {
					t.Logf("found in round %d", round)

					return
				}
			}

			require.Fail(t, "the rounds do not show the fault")
		})
	}
}
