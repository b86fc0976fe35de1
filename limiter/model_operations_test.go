package limiter_test

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"time"

	"pgregory.net/rapid"

	"github.com/legion-gorm/legion/internal/reference"
	"github.com/legion-gorm/legion/limiter"
)

// modelGrain divides all times and durations. It is long against the time that a
// sequence takes, so that no verdict depends on how fast the machine is.
const modelGrain = 30 * time.Minute

// modelHuge makes sums saturate.
const modelHuge = math.MaxInt64

// modelOperation is an operation as it was drawn. Times are relative to the moment at
// which it is performed.
type modelOperation interface {
	// GoString is how rapid prints it.
	fmt.GoStringer

	// expected is the operation in the model's terms, in the state that it meets.
	expected(state reference.State) reference.Operation

	// perform performs it in the database, and requires the result that the model had.
	perform(t *rapid.T, m *modelMachine, expected reference.Result)
}

// modelWhere says whose transaction a call is in.
type modelWhere string

const (
	modelOwnTransaction modelWhere = "own transaction"
	modelJoined         modelWhere = "in a transaction"
	modelRolledBack     modelWhere = "rolled back"
)

type (
	modelEnforce struct {
		Agent string
		Rules []limiter.Rule
		In    modelWhere

		// Retried calls are made twice.
		Retried bool
	}

	// modelCheck asks what the call would come to.
	modelCheck struct{ modelEnforce }

	modelAppend struct {
		Agent, ID     string
		Ago           time.Duration // negative: the future
		Tokens, Evals int64
	}

	modelRelease struct{ Agent string }
	modelIdle    struct{ Agent string }
	modelDelete  struct{ Agent string }

	// modelPrune has whole grains; half of one is added to keep off entries that
	// are exactly as old.
	modelPrune struct{ Ago time.Duration }

	modelAdvance struct{ By time.Duration }

	modelTurn struct {
		Agent    string
		Running  bool
		Run      string
		HasLease bool
		Lease    time.Duration // from now on
		Reserved int64
	}
)

func (o modelEnforce) expected(reference.State) reference.Operation { return o.call() }

func (o modelEnforce) call() reference.Enforce {
	return reference.Enforce{Agent: o.Agent, Rules: modelRules(o.Rules)}
}

func modelRules(rules []limiter.Rule) []reference.Rule {
	converted := make([]reference.Rule, len(rules))
	for i, rule := range rules {
		converted[i] = reference.Rule{Identity: modelIdentity(rule.Identity), Policy: modelPolicy(rule.Policy)}
	}

	return converted
}

func (o modelEnforce) limitsRunning() bool {
	for _, rule := range o.Rules {
		if rule.Policy.MaxRunningAgents != nil {
			return true
		}
	}

	return false
}

// modelIdentity panics on an identity that cannot be generated.
func modelIdentity(identity limiter.Identity) reference.Identity {
	if identity == nil {
		return nil
	}

	converted, err := reference.NewIdentity(identity)
	if err != nil {
		panic(err)
	}

	return converted
}

func (o modelAppend) expected(state reference.State) reference.Operation {
	return reference.Append{Agent: o.Agent, Entry: reference.Entry{ID: o.ID, At: state.Now() - o.Ago, Tokens: o.Tokens, Evals: o.Evals}}
}

// expected is that nothing changes.
func (modelCheck) expected(reference.State) reference.Operation { return reference.Advance{} }

func (o modelRelease) expected(reference.State) reference.Operation { return reference.Release(o) }
func (o modelIdle) expected(reference.State) reference.Operation    { return reference.Idle(o) }
func (o modelDelete) expected(reference.State) reference.Operation  { return reference.Delete(o) }
func (o modelAdvance) expected(reference.State) reference.Operation { return reference.Advance(o) }

func (o modelPrune) ago() time.Duration { return o.Ago + modelGrain/2 }

func (o modelPrune) expected(state reference.State) reference.Operation {
	return reference.Prune{Before: state.Now() - o.ago()}
}

func (o modelTurn) expected(state reference.State) reference.Operation {
	turn := reference.Turn{Agent: o.Agent, Running: o.Running, Run: o.Run, Reserved: o.Reserved}
	if o.HasLease {
		turn.Lease = reference.At(state.Now() + o.Lease)
	}

	return turn
}

// GoString shows how the values were written, which the model's identity does not.
func (o modelEnforce) GoString() string {
	again := ""
	if o.Retried {
		again = ", twice"
	}

	return fmt.Sprintf("enforce %s, %s%s, under%s", o.Agent, o.In, again, modelDescribe(o.Rules))
}

func modelDescribe(rules []limiter.Rule) string {
	var text strings.Builder

	for _, rule := range rules {
		_, _ = fmt.Fprintf(&text, "\n\t%#v %s", map[string]any(rule.Identity), modelPolicy(rule.Policy))
	}

	return text.String()
}

// GoString shows the call that is not made.
func (o modelCheck) GoString() string {
	return fmt.Sprintf("check %s under%s", o.Agent, modelDescribe(o.Rules))
}

// The times that are printed are relative to now.

func (o modelAppend) GoString() string  { return o.expected(reference.State{}).String() }
func (o modelRelease) GoString() string { return o.expected(reference.State{}).String() }
func (o modelIdle) GoString() string    { return o.expected(reference.State{}).String() }
func (o modelDelete) GoString() string  { return o.expected(reference.State{}).String() }
func (o modelPrune) GoString() string   { return o.expected(reference.State{}).String() }
func (o modelAdvance) GoString() string { return o.expected(reference.State{}).String() }
func (o modelTurn) GoString() string    { return o.expected(reference.State{}).String() }

// modelGenerate draws an operation. What is drawn first is what failures shrink to.
func modelGenerate() *rapid.Generator[modelOperation] {
	kinds := []func(*rapid.T) modelOperation{
		modelDrawEnforce, modelDrawAppend, modelDrawAdvance, modelDrawTurn,
		modelDrawEnforce, modelDrawAppend, modelDrawAdvance, modelDrawTurn,
		modelDrawEnforce, modelDrawAppend, modelDrawAdvance, modelDrawCheck,
		modelDrawEnforce, modelDrawEnforce, modelDrawEnforce, modelDrawEnforce, modelDrawEnforce, modelDrawCheck,
		modelDrawBegin, modelDrawBegin, modelDrawBegin, modelDrawBegin, modelDrawBegin, modelDrawBegin,
		modelDrawResume, modelDrawResume, modelDrawEnd, modelDrawEnd, modelDrawRecord, modelDrawRecord,
		modelDrawRenew, modelDrawRenew, modelDrawCheckpoint,
		func(t *rapid.T) modelOperation { return modelRelease{modelDrawAgent(t)} },
		func(t *rapid.T) modelOperation { return modelIdle{modelDrawAgent(t)} },
		func(t *rapid.T) modelOperation { return modelDelete{modelDrawAgent(t)} },
		func(t *rapid.T) modelOperation { return modelBurst{modelDrawAgent(t)} },
		func(t *rapid.T) modelOperation { return modelPrune{modelDrawGrains(t, "ago", 0, 16)} },
	}

	return rapid.Custom(func(t *rapid.T) modelOperation {
		return rapid.SampledFrom(kinds).Draw(t, "kind")(t)
	})
}

// modelRarely is true now and then. rapid favours both ends of a range, so it is a number
// in the middle that says so.
func modelRarely(t *rapid.T, what string) bool {
	return rapid.IntRange(0, 63).Draw(t, what) == 42
}

func modelDrawAgent(t *rapid.T) string {
	return rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f"}).Draw(t, "agent")
}

func modelDrawGrains(t *rapid.T, label string, least, most int) time.Duration {
	return time.Duration(rapid.IntRange(least, most).Draw(t, label)) * modelGrain
}

func modelDrawAppend(t *rapid.T) modelOperation { return modelDrawEntry(t) }

func modelDrawEntry(t *rapid.T) modelAppend {
	return modelAppend{
		Agent:  modelDrawAgent(t),
		ID:     fmt.Sprintf("entry %d", rapid.IntRange(1, 50).Draw(t, "id")),
		Ago:    rapid.SampledFrom([]time.Duration{0, 0, 0, modelGrain, 3 * modelGrain, 12 * modelGrain, -modelGrain}).Draw(t, "ago"),
		Tokens: rapid.SampledFrom([]int64{1, 0, 2, 3, 1, 2, 3, 1, 2, 3, modelHuge}).Draw(t, "tokens"),
		Evals:  rapid.SampledFrom([]int64{0, 1, 2, 0, 1, 2, 0, 1, 2, modelHuge}).Draw(t, "evals"),
	}
}

func modelDrawAdvance(t *rapid.T) modelOperation {
	return modelAdvance{rapid.SampledFrom([]time.Duration{modelGrain, 2 * modelGrain, 4 * modelGrain, 12 * modelGrain}).Draw(t, "by")}
}

// modelDrawTurn draws the traces that turns leave: of one that is live, that has
// expired, that was revoked or has ended; and of an application that writes the status
// by itself, which holds no slot.
func modelDrawTurn(t *rapid.T) modelOperation {
	turn := modelTurn{
		Agent:    modelDrawAgent(t),
		Running:  true,
		Run:      rapid.SampledFrom([]string{"one", "two"}).Draw(t, "run"),
		Reserved: rapid.SampledFrom([]int64{0, 1, 3, modelHuge}).Draw(t, "reserved"),
	}

	switch rapid.SampledFrom([]string{"live", "expired", "live", "expired", "revoked", "ended", "stray"}).Draw(t, "turn") {
	case "live":
		turn.HasLease, turn.Lease = true, modelDrawGrains(t, "lease", 1, 4)
	case "expired":
		turn.HasLease, turn.Lease = true, -modelDrawGrains(t, "lease", 0, 4)
	case "revoked":
	case "ended":
		turn.Running, turn.Reserved = false, 0
	case "stray":
		turn.Run, turn.Reserved = "", 0
	}

	return turn
}

func modelDrawEnforce(t *rapid.T) modelOperation { return modelDrawCall(t) }

func modelDrawCheck(t *rapid.T) modelOperation { return modelCheck{modelDrawCall(t)} }

func modelDrawCall(t *rapid.T) modelEnforce {
	call := modelEnforce{
		Agent: modelDrawAgent(t),
		In:    rapid.SampledFrom([]modelWhere{modelOwnTransaction, modelOwnTransaction, modelJoined, modelRolledBack}).Draw(t, "in"),

		Retried: rapid.SampledFrom([]bool{false, false, false, true}).Draw(t, "retried"),
	}

	rules := rapid.SampledFrom([]int{1, 1, 1, 2, 2, 3}).Draw(t, "rules")
	if modelRarely(t, "no rules") {
		rules = 0
	}

	call.Rules = modelDrawRules(t, rules)

	return call
}

func modelDrawRules(t *rapid.T, count int) (rules []limiter.Rule) {
	agent := modelDrawFields(t)

	for range count {
		fields := agent
		if modelRarely(t, "may disagree") {
			fields = modelDrawFields(t)
		}

		rules = append(rules, limiter.Rule{Identity: modelDrawIdentity(t, fields), Policy: modelDrawPolicy(t)})
	}

	return rules
}

// modelValues are the fields of identities, each with its values, each in several
// notations of the same.
var modelValues = []struct {
	name   string
	values [][]any
}{
	{"ip", [][]any{{"x"}, {"y"}}},
	{"tenant", [][]any{
		{1, 1.0, uint64(1), json.Number("1.0"), json.Number("10e-1"), json.Number("0.01E+2")},
		{"1"},
		{int64(9007199254740993), json.Number("9007199254740993.0")}, // no float64
		{json.Number("9007199254740992"), 9007199254740992.0},
	}},
	{"vip", [][]any{{true}, {false}, {"true"}}},
}

// modelDrawFields draws which value an agent has for each field.
func modelDrawFields(t *rapid.T) []int {
	fields := make([]int, len(modelValues))
	for i, field := range modelValues {
		fields[i] = rapid.IntRange(0, len(field.values)-1).Draw(t, field.name)
	}

	return fields
}

// modelDrawIdentity draws some of the fields. With none it is everyone's.
func modelDrawIdentity(t *rapid.T, fields []int) limiter.Identity {
	if modelRarely(t, "forgotten") {
		return nil
	}

	identity := limiter.Identity{}

	for i, field := range modelValues {
		if rapid.Bool().Draw(t, "has "+field.name) {
			identity[field.name] = rapid.SampledFrom(field.values[fields[i]]).Draw(t, field.name)
		}
	}

	return identity
}

func modelDrawPolicy(t *rapid.T) limiter.Policy {
	if modelRarely(t, "odd policy") {
		return rapid.SampledFrom([]limiter.Policy{
			{}, // the default
			{MaxAgents: limiter.Max(5)},
			{Window: modelGrain, MaxEvals: limiter.Max(-1)},
		}).Draw(t, "policy")
	}

	const none = -1

	limit := func(label string, limits ...int64) *int64 {
		if drawn := rapid.SampledFrom(append([]int64{none, none, none}, limits...)).Draw(t, label); drawn != none {
			return &drawn
		}

		return nil
	}

	return limiter.Policy{
		Window:           rapid.SampledFrom([]time.Duration{2 * modelGrain, 4 * modelGrain, 12 * modelGrain}).Draw(t, "window"),
		MaxAgents:        limit("agents", 3, 4, 5, 2, 1, 0),
		MaxRunningAgents: limit("running agents", 2, 3, 4, 1, 1, 0),
		MaxTokens:        limit("tokens", 6, 10, 4, 2, modelHuge, 0),
		MaxEvals:         limit("evals", 4, 8, 2, 1, modelHuge, 0),
	}
}
