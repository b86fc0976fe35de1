package limiter_test

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/legion-gorm/legion/internal/testhook"
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

// raceForOneSlotOf is raceLateRenewalOf where all want the one slot that there is.
func raceForOneSlotOf(random *rand.Rand) (rows []raceRow, scripts []raceScript) {
	rows, scripts = raceLateRenewalOf(random)

	for _, script := range scripts {
		for i := range script[0].Rules {
			script[0].Rules[i].Running = 1
		}
	}

	return rows, scripts
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
