package limiter

import (
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/run"
)

// AdmitTurn is for the root package of this module, which calls it Begin. It is [Admit]
// for an agent whose turn begins, or is resumed, with the admission. leased is a moment of
// this process's clock that lies before the one, by the database's, at which the lease
// began.
//
// No rules: the turn is not limited, and the groups of the agent stay as they are.
func AdmitTurn(db *gorm.DB, admission Admission, turn run.Begin) (decision *Decision, leased time.Time, err error) {
	call, err := newCall(db, []Admission{admission}, &turn)
	if err != nil {
		return nil, time.Time{}, err
	}

	decisions, err := call.run()
	call.observe(decisions, err)

	if err != nil {
		return nil, time.Time{}, err
	}

	call.renewLate()

	return decisions[0], call.leased, nil
}

// renewLate begins the lease anew where so much of it may be over already that the first
// renewal could come too late: the call has asked for it before it waited for locks or for
// the row. Where that fails, the turn loses its lease like any other that is not renewed.
func (c *call) renewLate() {
	if time.Since(c.leased) < c.settings.Lease/3 {
		return
	}

	_ = database.Autocommit(c.db, c.settings.ConnectionTimeout, func(tx *gorm.DB) error {
		asked := time.Now()

		written, err := database.Exec(tx, c.continueStatement(c.requests[0]))
		if err == nil && written > 0 {
			c.leased = asked
		}

		return err
	})
}

var (
	errReserveNegative  = fmt.Errorf("%w: Reserve is negative: give how many tokens the turn may use, or 0 to hold none back", fault.ErrInvalidTurn)
	errReserveUntracked = fmt.Errorf("%w: Reserve needs recorded usage, and the plugin has legion.WithoutUsageTracking", fault.ErrInvalidTurn)
	errStoredElsewhere  = fmt.Errorf("%w: MaxTokens, MaxEvals and MaxRunningAgents are measured in the plugin's own table, and the turn has a Store "+
		"elsewhere: leave Store out, or these limits", fault.ErrInvalidRule)
	errReservedElsewhere = fmt.Errorf("%w: Reserve needs the usage in the plugin's own table, and the turn has a Store elsewhere", fault.ErrInvalidTurn)
	errRunEnded          = fmt.Errorf("%w: the RunID is that of a turn that has ended: give each Begin a new one, and only its retries the same", fault.ErrInvalidTurn)
	errLiveRun           = fmt.Errorf("%w: wait for its end, or give this turn an agent of its own", fault.ErrAgentRunning)
	errClaimed           = fmt.Errorf("%w: its interrupted run was resumed, replaced or ended meanwhile, or the agent was deleted", fault.ErrAgentRunning)
)

// beginTurn makes the request that of a turn.
func (r *request) beginTurn(turn *run.Begin, settings database.Settings) error {
	if err := run.ValidateID(turn.ID); err != nil {
		return err
	}

	switch {
	case turn.Reserve < 0:
		return errReserveNegative
	case turn.Reserve > 0 && settings.WithoutUsage:
		return errReserveUntracked
	case turn.Reserve > 0 && turn.ElsewhereStored:
		return errReservedElsewhere
	case turn.ElsewhereStored && (r.limitsUsage() || r.limitsRunning()):
		return errStoredElsewhere
	}

	r.turn = turn

	if turn.Resumes == "" {
		return nil
	}

	// The work was admitted before, and what it has started and used is counted. It only
	// needs a slot again, and room for what it holds back.
	for i := range r.rules {
		policy := &r.rules[i].Policy
		policy.MaxAgents, policy.MaxEvals = nil, nil

		if turn.Reserve == 0 {
			policy.MaxTokens = nil
		}
	}

	return nil
}

// keepsGroups reports whether the agent stays in the groups that it is in.
func (r *request) keepsGroups() bool { return r.turn != nil && len(r.rules) == 0 }

// readGroups finds out which groups a turn without rules is about to run in. Since they
// count its slot, they are locked like those of any other call. That the agent is still in
// them is confirmed once its lock is held: only verdicts move agents.
func (c *call) readGroups(tx *gorm.DB, request *request) error {
	var metadata sql.NullString

	err := database.Query(tx, expression("SELECT metadata FROM ? WHERE agent_id = ?",
		clause.Table{Name: c.tables.Agents}, request.agentID), func(rows *sql.Rows) error { return rows.Scan(&metadata) })
	if err != nil {
		return err
	}

	request.merged, request.limited = document{}, metadata.Valid

	if metadata.Valid {
		if request.merged, err = parseDocument(metadata.String); err != nil {
			return fmt.Errorf("%w: the metadata of the agent is no identity, so that its groups are not known: begin the turn with rules",
				errors.Join(fault.ErrInvalidRule, err))
		}
	}

	return nil
}

// mayBegin reports whether the turn has begun already, in an attempt whose reply was
// lost. The error says that it cannot begin, whatever the rules.
func (r *request) mayBegin(own ownRow) (begun bool, err error) {
	isOwn := own.runID.Valid && own.runID.String == r.turn.ID
	isResumed := own.runID.Valid && own.runID.String == r.turn.Resumes

	switch {
	case isOwn && own.live:
		return true, nil
	case isOwn && !own.running:
		return false, errRunEnded
	case own.live && r.turn.Resumes == "":
		return false, errLiveRun
	case r.turn.Resumes != "" && (own.live || own.deleted || !own.running || !isOwn && !isResumed):
		return false, errClaimed
	default:
		return false, nil
	}
}

// recordTurn writes the admission together with the run, its lease and its reservation.
func (c *call) recordTurn(tx *gorm.DB, request *request, own ownRow, begun bool) error {
	// The lease begins after this moment, whatever the wait for the row.
	c.leased = time.Now()

	statement := c.beginStatement(request, own.startedAt)

	switch {
	case begun:
		statement = c.continueStatement(request)
	case request.turn.Resumes != "":
		statement = c.resumeStatement(request)
	}

	written, err := database.Exec(tx, statement)
	if err == nil && written == 0 && !begun {
		// The row is live since the measurement, by a renewal that was on its way: maybe
		// that of this very run.
		written, err = database.Exec(tx, c.continueStatement(request))
	}

	switch {
	case err != nil:
		return err
	case written > 0:
		return nil
	case begun, request.turn.Resumes != "":
		return errClaimed
	default:
		return errLiveRun
	}
}

func (c *call) leaseEnd() clause.Expression {
	return expression("clock_timestamp() + ?", interval(c.settings.Lease))
}

// beginStatement looks once more at the row as it is found: a renewal that started in time
// may have been committed after the measurement.
func (c *call) beginStatement(request *request, measuredStart sql.NullTime) clause.Expression {
	turn := request.turn
	startedAt := expression("clock_timestamp()")

	if measuredStart.Valid {
		startedAt = expression("?::timestamptz", measuredStart.Time) // see record
	}

	columns, values := "", []any{}
	updates := "deleted_at = NULL, updated_at = clock_timestamp(), status = 'running', run_id = excluded.run_id, reserved_tokens = excluded.reserved_tokens"

	add := func(column string, value any, update string) {
		columns += ", " + column
		values = append(values, value)
		updates += ", " + column + " = " + update
	}

	if !request.keepsGroups() {
		add("metadata", jsonb(request.merged.text), "excluded.metadata")
		add("started_at", startedAt, "coalesce(agent.started_at, excluded.started_at)")
	}

	if turn.AgentType != "" {
		add("agent_type", turn.AgentType, "excluded.agent_type")
	}

	if turn.ParentID != "" {
		add("parent_agent_id", turn.ParentID, "excluded.parent_agent_id")
	}

	placeholders := strings.Repeat(", ?", len(values))
	vars := append([]any{clause.Table{Name: c.tables.Agents}, request.agentID, turn.ID, turn.Reserve, c.leaseEnd()}, values...)

	return expression(`INSERT INTO ? AS agent (agent_id, created_at, updated_at, status, run_id, reserved_tokens, lease_expires_at`+columns+`)
VALUES (?, clock_timestamp(), clock_timestamp(), 'running', ?, ?, ?`+placeholders+`)
ON CONFLICT (agent_id) DO UPDATE SET `+updates+`, lease_expires_at = ?
WHERE NOT `+run.Live("agent", run.Now), append(vars, c.leaseEnd())...)
}

// continueStatement gives a run that had begun a whole lease again. It was live when it was
// measured. Whether it is so now is not asked again: of a row that is being renewed that
// would be asked of the old lease. As long as nobody has taken the slot it counts.
func (c *call) continueStatement(request *request) clause.Expression {
	return expression("UPDATE ? AS agent SET lease_expires_at = ? WHERE ?",
		clause.Table{Name: c.tables.Agents}, c.leaseEnd(), run.Run{AgentID: request.agentID, ID: request.turn.ID}.Holds())
}

func (c *call) resumeStatement(request *request) clause.Expression {
	turn := request.turn
	groups := expression("")

	if !request.keepsGroups() {
		groups = expression(", metadata = ?, started_at = coalesce(agent.started_at, clock_timestamp())", jsonb(request.merged.text))
	}

	// A retry may find its own claim, whose lease has ended meanwhile.
	interrupted := expression("(?) OR (?)",
		run.Run{AgentID: request.agentID, ID: turn.Resumes}.IsInterrupted(),
		run.Run{AgentID: request.agentID, ID: turn.ID}.IsInterrupted())

	return expression(`UPDATE ? AS agent SET updated_at = clock_timestamp(), run_id = ?, reserved_tokens = ?, lease_expires_at = ??
WHERE ?`,
		clause.Table{Name: c.tables.Agents}, turn.ID, turn.Reserve, c.leaseEnd(), groups, interrupted)
}
