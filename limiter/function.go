package limiter

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/serverfunction"
)

// With legion.WithServerFunction a call is one statement: a function in the database goes
// through the protocol of locks.go. It takes the same locks by the same keys, so calls of
// both kinds are exact together.
//
// What it cannot do goes on by the limiter's own statements: several agents in one call,
// turns that are resumed or have no rules, and the registration of an identity whose
// fields are busy, which has to let go of its locks and wait.

// errBusy is a call that the function has left undone.
var errBusy = errors.New("legion: the function is busy")

// usesFunction reports whether the call can be made by the function.
func (c *call) usesFunction() bool {
	return c.settings.ServerFunction && len(c.requests) == 1 && !c.hooks.Given() &&
		!c.requests[0].keepsGroups() && !c.requests[0].resumes() && c.functionIsThere()
}

func (r *request) resumes() bool { return r.turn != nil && r.turn.Resumes != "" }

// byFunction decides in one statement, in a caller's transaction or on its own. errBusy
// asks for the other way.
func (c *call) byFunction() (decisions []*Decision, err error) {
	request := c.requests[0]

	err = c.withRegistry(func() error {
		if database.InTransaction(c.db) {
			decisions, err = c.callFunction(c.db, request)

			return err
		}

		return database.Autocommit(c.db, c.settings.ConnectionTimeout, func(tx *gorm.DB) (err error) {
			decisions, err = c.callFunction(tx, request)

			return err
		})
	})

	return decisions, err
}

// functionRequest is the parameter of the function.
type functionRequest struct {
	Agent      string            `json:"agent"`
	Joined     bool              `json:"joined"`
	Merged     json.RawMessage   `json:"merged"`
	Locks      [][2]any          `json:"locks"` // key, exclusive; in their order
	Candidates []json.RawMessage `json:"candidates"`
	Own        []functionOwn     `json:"own"`
	Rules      []functionRule    `json:"rules"`
	TakesSlot  bool              `json:"takes_slot"`
	Lease      int64             `json:"lease_us"`
	Turn       *functionTurn     `json:"turn,omitempty"`
}

// functionOwn is an identity that must be registered, and the keys of its fields.
type functionOwn struct {
	Identity json.RawMessage `json:"identity"`
	Fields   []int64         `json:"fields"`
}

type functionRule struct {
	Identity   json.RawMessage `json:"identity"`
	Window     int64           `json:"window_us"`
	MaxAgents  *int64          `json:"max_agents"`
	MaxRunning *int64          `json:"max_running"`
	MaxTokens  *int64          `json:"max_tokens"`
	MaxEvals   *int64          `json:"max_evals"`
}

type functionTurn struct {
	RunID     string  `json:"run_id"`
	Reserve   int64   `json:"reserve"`
	AgentType *string `json:"agent_type,omitempty"`
	Parent    *string `json:"parent,omitempty"`
}

func (c *call) functionRequest(request *request) ([]byte, error) {
	asked := functionRequest{
		Agent:     request.agentID,
		Joined:    database.InTransaction(c.db),
		Merged:    json.RawMessage(request.merged.text),
		TakesSlot: request.limitsRunning(),
		Lease:     c.settings.Lease.Microseconds(),
	}

	for _, lock := range c.lockKeys(nil) {
		asked.Locks = append(asked.Locks, [2]any{lock.key, lock.exclusive})
	}

	for _, candidate := range c.candidates() {
		asked.Candidates = append(asked.Candidates, json.RawMessage(candidate.text))
	}

	for _, own := range sorted(c.own()) {
		fields := make([]int64, len(own.fields))
		for i, field := range own.fields {
			fields[i] = fieldKey(field)
		}

		asked.Own = append(asked.Own, functionOwn{Identity: json.RawMessage(own.text), Fields: fields})
	}

	for _, rule := range request.rules {
		asked.Rules = append(asked.Rules, functionRule{
			Identity: json.RawMessage(rule.text), Window: rule.Policy.Window.Microseconds(), MaxAgents: rule.Policy.MaxAgents,
			MaxRunning: rule.Policy.MaxRunningAgents, MaxTokens: rule.Policy.MaxTokens, MaxEvals: rule.Policy.MaxEvals,
		})
	}

	if turn := request.turn; turn != nil {
		asked.Turn = &functionTurn{RunID: turn.ID, Reserve: turn.Reserve, AgentType: given(turn.AgentType), Parent: given(turn.ParentID)}
	}

	return json.Marshal(asked)
}

func given(text string) *string {
	if text == "" {
		return nil
	}

	return &text
}

// functionAnswer is what the function returns, or raises as the detail of an error.
type functionAnswer struct {
	Now       int64           `json:"now"` // microseconds, as StartedAt
	StartedAt *int64          `json:"started_at"`
	Unchanged bool            `json:"unchanged"`
	Live      bool            `json:"live"`
	RunID     *string         `json:"run_id"`
	Running   bool            `json:"running"`
	Groups    []functionGroup `json:"groups"`
	Denied    bool            `json:"denied"`
	Waited    int64           `json:"waited"`
	Error     *functionError  `json:"error"`
}

// functionError is an error that was caught, so that the caller's transaction goes on.
type functionError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Detail  string `json:"detail"`
}

type functionGroup struct {
	Agents          int64 `json:"agents"`
	Running         int64 `json:"running"`
	ExpiredRunning  int64 `json:"expired_running"`
	Reserved        int64 `json:"reserved"`
	ExpiredReserved int64 `json:"expired_reserved"`
	Tokens          int64 `json:"tokens"`
	Evals           int64 `json:"evals"`
}

func (a *functionAnswer) measurement(request *request) measurement {
	measured := measurement{now: time.UnixMicro(a.Now).UTC(), own: ownRow{unchanged: a.Unchanged, live: a.Live, running: a.Running}}

	if a.StartedAt != nil {
		measured.own.startedAt = sql.NullTime{Time: time.UnixMicro(*a.StartedAt).UTC(), Valid: true}
	}

	if a.RunID != nil {
		measured.own.runID = sql.NullString{String: *a.RunID, Valid: true}
	}

	for i, rule := range request.rules {
		found := a.Groups[i]
		measured.groups = append(measured.groups, group{
			rule: rule, agents: found.Agents, running: found.Running, expiredRunning: found.ExpiredRunning,
			reserved: found.Reserved, expiredReserved: found.ExpiredReserved, tokens: found.Tokens, evals: found.Evals,
		})
	}

	return measured
}

// callFunction makes the call.
func (c *call) callFunction(tx *gorm.DB, request *request) ([]*Decision, error) {
	asked, err := c.functionRequest(request)
	if err != nil {
		return nil, err
	}

	// The lease begins after this moment, whatever the wait for the locks: see renewLate.
	c.leased = time.Now()

	var text string

	statement := expression(database.Primary+"SELECT ?(?)", clause.Table{Name: serverfunction.EnforceName(c.tables.Agents)}, jsonb(string(asked)))
	err = database.Query(tx, statement, func(rows *sql.Rows) error { return rows.Scan(&text) })

	return c.judge(tx, request, text, err)
}

// judge makes a decision or an error of what the function has returned or raised.
func (c *call) judge(tx *gorm.DB, request *request, text string, err error) ([]*Decision, error) {
	answer := &functionAnswer{}

	if err == nil {
		if err := answer.read(text); err != nil {
			return nil, err
		}

		if caught := answer.Error; caught != nil {
			err = &pgconn.PgError{Severity: "ERROR", Code: caught.Code, Message: caught.Message, Detail: caught.Detail}
		}
	}

	code := ""

	if raised, ok := errors.AsType[*pgconn.PgError](err); ok {
		code = raised.Code

		switch {
		case code == database.CodeUndefinedFunction:
			c.forgetFunction()

			if database.InTransaction(c.db) && answer.Error == nil {
				return nil, fmt.Errorf("%w: the server's function was dropped meanwhile: run the transaction again: %w", fault.ErrContention, err)
			}

			return nil, errBusy
		case code == serverfunction.CodeBusy:
			return nil, errBusy
		case code == serverfunction.CodeLiveRun:
			return nil, errLiveRun
		case code == serverfunction.CodeIsolation && !database.InTransaction(c.db):
			// The default of this database is stricter. A transaction of our own is not.
			return nil, errBusy
		case code == serverfunction.CodeIsolation:
			return nil, errIsolation(raised.Message)
		case serverfunction.HasMeasurement(code):
			err = answer.read(raised.Detail)
		}
	}

	switch {
	case err != nil:
		return nil, database.Explain(err)
	case len(answer.Groups) != len(request.rules):
		return nil, fmt.Errorf("legion: the server's function has measured %d rules of %d", len(answer.Groups), len(request.rules))
	}

	c.locked = c.leased.Add(time.Duration(answer.Waited) * time.Microsecond)

	return c.concluded(tx, request, answer, code)
}

func (a *functionAnswer) read(text string) error {
	if err := json.Unmarshal([]byte(text), a); err != nil {
		return fmt.Errorf("legion: the server's function answers in another language than this version's: %w", err)
	}

	return nil
}

func (c *call) concluded(tx *gorm.DB, request *request, answer *functionAnswer, code string) ([]*Decision, error) {
	measured := answer.measurement(request)

	if code == serverfunction.CodeCannotTurn {
		if _, err := request.mayBegin(measured.own); err != nil {
			return nil, err
		}

		return nil, errLiveRun
	}

	if !answer.Denied {
		return []*Decision{measured.decision(request)}, nil
	}

	denial := measured.denial(request)
	if denial == nil {
		return nil, errors.New("legion: the server's function has denied by a rule that does not")
	}

	c.denied = request

	forecast := func() { denial.RetryAfter = c.retryAfter(tx, request, denial) }

	if !database.InTransaction(c.db) {
		forecast()

		return nil, denial
	}

	// A denial leaves no lock behind in the caller's transaction, nor a failed statement.
	if err := database.InSavepoint(c.db, func(*database.Savepoint) error {
		forecast()

		return database.ErrRollback
	}); !errors.Is(err, database.ErrRollback) {
		return nil, err
	}

	return nil, denial
}

// functionPause is how long the absence of the function is believed.
const functionPause = time.Minute

// seenFunctions remembers where the function is.
var seenFunctions sync.Map // registryKey -> functionState

type functionState struct {
	there bool
	asked time.Time
}

// functionIsThere reports whether Migrate has made the function. A role may be without the
// right to, or an older version of the application may have migrated last.
func (c *call) functionIsThere() bool {
	key := c.registryKey()

	if known, ok := seenFunctions.Load(key); ok {
		state, _ := known.(functionState)
		if state.there || time.Since(state.asked) < functionPause {
			return state.there
		}
	}

	found := functionState{asked: time.Now()}

	look := func(tx *gorm.DB) (err error) {
		found.there, err = serverfunction.IsThere(tx, c.tables.Agents)

		return err
	}

	// What is in the way of asking is in the way of the call, which will say so.
	if database.InTransaction(c.db) {
		if look(c.db) != nil {
			return false
		}
	} else if database.Autocommit(c.db, c.settings.ConnectionTimeout, look) != nil {
		return false
	}

	if _, known := seenFunctions.Swap(key, found); !known && !database.InTransaction(c.db) {
		database.OnPoolGone(c.db, func(database.Pool) { seenFunctions.Delete(key) })
	}

	return found.there
}

func (c *call) forgetFunction() { seenFunctions.Delete(c.registryKey()) }
