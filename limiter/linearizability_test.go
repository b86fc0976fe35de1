package limiter_test

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/internal/testhook"
	"github.com/legion-gorm/legion/models"
)

// concurrentCalls is how many calls a random round makes at once.
const concurrentCalls = 8

// concurrentSeed is LEGION_TEST_SEED, to make the rounds of a failed run again, or
// another one every time.
func concurrentSeed(t *testing.T) uint64 {
	t.Helper()

	text := os.Getenv("LEGION_TEST_SEED")
	if text == "" {
		return rand.Uint64()
	}

	seed, err := strconv.ParseUint(text, 10, 64)
	require.NoError(t, err, "LEGION_TEST_SEED is a whole number")

	return seed
}

// randomOperations are calls whose rules overlap, on few agents, so that some move.
func randomOperations(random *rand.Rand) []concurrentOperation {
	operations := make([]concurrentOperation, concurrentCalls)
	for i := range operations {
		operations[i] = randomOperation(random)
	}

	return operations
}

func randomOperation(random *rand.Rand) concurrentOperation {
	operation := concurrentOperation{
		Decimal: random.IntN(2) == 0,
		Start:   randomPause(random),
		Nested:  random.IntN(2) == 0,
		Pauses:  map[testhook.Point]time.Duration{},
	}

	if operation.Nested {
		operation.Hold = randomPause(random)
		operation.Undo = random.IntN(8) == 0
	}

	for _, point := range []testhook.Point{testhook.FieldLocks, testhook.IdentityLocks, testhook.Measured, testhook.Recorded} {
		operation.Pauses[point] = randomPause(random)
	}

	switch agents := random.Perm(concurrentCalls - 2); random.IntN(12) {
	case 0:
		operation.Release = randomAgentName(agents[0])
	case 1:
		// Each of several agents is measured by itself. With Everyone, whose group others
		// join in between, they would not be admitted at one moment.
		operation.Admissions = []concurrentAdmission{
			randomAdmission(random, agents[0], randomFields), randomAdmission(random, agents[1], randomFields),
		}
	default:
		operation.Admissions = []concurrentAdmission{randomAdmission(random, agents[0], randomFieldsOrEveryone)}
	}

	return operation
}

func randomAgentName(number int) string { return string(rune('p' + number)) }

func randomAdmission(random *rand.Rand, agent int, fields func(*rand.Rand) string) concurrentAdmission {
	admission := concurrentAdmission{Agent: randomAgentName(agent)}

	for range 1 + random.IntN(3) {
		admission.Rules = append(admission.Rules, randomRule(random, fields(random)))
	}

	return admission
}

func randomFieldsOrEveryone(random *rand.Rand) string {
	if random.IntN(8) == 0 {
		return ""
	}

	return randomFields(random)
}

func randomFields(random *rand.Rand) (fields string) {
	chosen := 1 + random.IntN(7)

	for i, letter := range "abc" {
		if chosen&(1<<i) != 0 {
			fields += string(letter)
		}
	}

	return fields
}

func randomRule(random *rand.Rand, fields string) concurrentRule {
	rule := atMost(fields, 1+random.Int64N(3))

	switch random.IntN(8) {
	case 0:
		rule = runningAtMost(fields, 1+random.Int64N(2))
	case 1:
		rule.Running = 1 + random.Int64N(2)
	}

	return rule
}

func randomPause(random *rand.Rand) time.Duration {
	if random.IntN(2) == 0 {
		return 0
	}

	return time.Duration(random.Int64N(int64(3 * time.Millisecond)))
}

// A concurrentArena is a database for random rounds.
type concurrentArena struct {
	dsn   string
	pools []*gorm.DB // one for each call, and one for the pruner and the referee
	begun time.Time
}

func newConcurrentArena(t *testing.T) *concurrentArena {
	t.Helper()
	waitToBeWide(t)

	arena := &concurrentArena{dsn: pgtest.Database(t), begun: time.Now()}
	arena.pools = concurrentPools(t, arena.dsn, concurrentCalls+1)
	require.NoError(t, arena.referee().AutoMigrate(&models.LegionAgent{}, &models.LegionIdentity{}))

	return arena
}

func (a *concurrentArena) referee() *gorm.DB { return a.pools[concurrentCalls] }

// round starts from empty tables, makes the calls while identities that no agent uses
// are pruned, and returns what they came to and what they left.
func (a *concurrentArena) round(
	t *testing.T, operations []concurrentOperation, run func() []concurrentOutcome,
) ([]*concurrentEvent, concurrentState) {
	t.Helper()

	a.clear(t)

	stopPruning := startConcurrentPruner(t, a.referee())
	outcomes := run()

	stopPruning()

	events := make([]*concurrentEvent, len(operations))
	for i, operation := range operations {
		events[i] = &concurrentEvent{operation, outcomes[i]}
	}

	return events, readConcurrentState(t, a.referee())
}

// roundHere is a round whose calls this process makes.
func (a *concurrentArena) roundHere(
	t *testing.T, operations []concurrentOperation, hooks testhook.Hooks,
) ([]*concurrentEvent, concurrentState) {
	t.Helper()

	return a.round(t, operations, func() []concurrentOutcome {
		return runConcurrently(t.Context(), a.pools[:concurrentCalls], operations, hooks, a.begun)
	})
}

// requireConcurrentSerial is for rounds with the whole protocol.
func requireConcurrentSerial(t *testing.T, seed uint64, round int, events []*concurrentEvent, end concurrentState) {
	t.Helper()

	for _, event := range events {
		require.Empty(t, event.outcome.Failure, "%s in round %d with LEGION_TEST_SEED=%d", event.operation, round, seed)
	}

	require.True(t, concurrentSerial(events, end), "round %d with LEGION_TEST_SEED=%d has no serial history:\n%s\nand left %v",
		round, seed, concurrentList(events), end)
}

func (a *concurrentArena) clear(t *testing.T) {
	t.Helper()

	require.NoError(t, a.referee().Exec("DELETE FROM legion_agents").Error)
	require.NoError(t, a.referee().Exec("DELETE FROM legion_agents_identities").Error)
}

// readConcurrentState reads the agents as the model sees them.
func readConcurrentState(t *testing.T, db *gorm.DB) concurrentState {
	t.Helper()

	end := concurrentState{}

	statement := clause.Expr{SQL: `SELECT agent_id,
  (SELECT string_agg(name, '' ORDER BY name) FROM jsonb_object_keys(metadata) AS name), status = 'running' AND lease_expires_at > clock_timestamp()
FROM legion_agents`}

	require.NoError(t, database.Query(db, statement, func(rows *sql.Rows) error {
		var (
			name   string
			fields sql.NullString
			slot   sql.NullBool
		)

		err := rows.Scan(&name, &fields, &slot)
		end[name] = concurrentAgent{fields: fields.String, slot: slot.Bool}

		return err
	}))

	return end
}

// startConcurrentPruner deletes unused identities now and then, the way that
// store.Prune does, until it is stopped.
func startConcurrentPruner(t *testing.T, db *gorm.DB) (stop func()) {
	t.Helper()

	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan error, 1)

	go func() {
		var err error

		// Fewer times than it takes to make a first use give up.
		for prunes := 0; prunes < 8 && ctx.Err() == nil && err == nil; prunes++ {
			err = pruneConcurrently(db)
			time.Sleep(rand.N(10 * time.Millisecond))
		}

		stopped <- err
	}()

	return func() {
		cancel()
		require.NoError(t, <-stopped)
	}
}

// pruneConcurrently locks an identity that nobody has locked, and only then looks
// whether an agent uses it.
func pruneConcurrently(db *gorm.DB) error {
	return db.Transaction(func(tx *gorm.DB) error {
		var identity string

		err := tx.Raw(`SELECT identity::text FROM legion_agents_identities
ORDER BY random() LIMIT 1 FOR UPDATE SKIP LOCKED`).Scan(&identity).Error
		if err != nil || identity == "" {
			return err
		}

		return tx.Exec(`DELETE FROM legion_agents_identities AS registered WHERE identity = ?::jsonb
AND NOT EXISTS (SELECT FROM legion_agents AS agent WHERE agent.metadata @> registered.identity)`, identity).Error
	})
}

func TestRandomRoundsHaveASerialHistory(t *testing.T) {
	t.Parallel()

	seed := concurrentSeed(t)
	arena := newConcurrentArena(t)
	admitted, denied := 0, 0

	for round := range concurrentCount(t, 150) {
		operations := randomOperations(rand.New(rand.NewPCG(seed, uint64(round))))
		events, end := arena.roundHere(t, operations, testhook.Hooks{})
		requireConcurrentSerial(t, seed, round, events, end)

		for _, event := range events {
			if event.outcome.Denied == concurrentAdmitted {
				admitted++
			} else {
				denied++
			}
		}
	}

	t.Logf("%d admitted, %d denied", admitted, denied)
	require.Zero(t, concurrentDeadlocks(t, arena.dsn, arena.pools...))
}

// Calls by statements and calls by the server's function keep each other exact.
func TestRandomRoundsWithTheServerFunctionHaveASerialHistory(t *testing.T) {
	t.Parallel()

	seed := concurrentSeed(t)
	arena := newConcurrentArena(t)

	for _, pool := range arena.pools {
		useFunction(t, pool, plugin{})
	}

	for round := range concurrentCount(t, 150) {
		random := rand.New(rand.NewPCG(seed, uint64(round)))
		operations := randomOperations(random)

		for i := range operations {
			operations[i].ByFunction = random.IntN(3) > 0
		}

		events, end := arena.roundHere(t, operations, testhook.Hooks{})
		requireConcurrentSerial(t, seed, round, events, end)
	}
}

// Without a part of the protocol the same rounds must show a fault, or they would not
// show that there is none with it.
func TestRandomRoundsWithoutAPartOfTheProtocolShowItsFault(t *testing.T) {
	t.Parallel()

	for name, hooks := range map[string]testhook.Hooks{
		"no locks":            {WithoutLocks: true},
		"no field locks":      {WithoutFieldLocks: true},
		"own identities only": {OwnIdentitiesOnly: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			const enough = 3000

			seed := concurrentSeed(t)
			arena := newConcurrentArena(t)

			for round := range enough {
				operations := randomOperations(rand.New(rand.NewPCG(seed, uint64(round))))
				events, end := arena.roundHere(t, operations, hooks)

				// What a deadlock has ended has no outcome that the model could judge.
				failed := slices.ContainsFunc(events, func(event *concurrentEvent) bool { return event.outcome.Failure != "" })

				if !failed && !concurrentSerial(events, end) {
					t.Logf("found in round %d", round)

					return
				}
			}

			require.Fail(t, "the rounds do not show the fault")
		})
	}
}
