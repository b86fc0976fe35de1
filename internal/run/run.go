// Package run is the database's side of a turn: what a run writes into its agent's row,
// and by which conditions nobody writes there who has lost it.
//
// # Who may write
//
// A run holds its row while the row says running, under the run's ID, with a lease. A
// verdict that needs an expired slot revokes it: it takes the lease away, and leaves the
// status and the run, by which the work is found again. So
//
//   - renewing needs the run, and a lease that is not over;
//   - ending, checkpointing and lowering the reservation need the run and a lease, over or
//     not: as long as nobody has taken the slot, the turn may still put its row in order;
//   - after a revocation nothing of it works, and the run can only be resumed or replaced
//     by another one.
//
// The ID of a run that has ended stays on the idle row, so that an End which is retried
// after a lost reply knows its own. That of a run which the application gave up, by a Save
// as idle, does not.
package run

import (
	"crypto/rand"
	"database/sql"
	"fmt"
	"strings"
	"unicode/utf8"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
)

// MaxIDBytes is the longest ID of a run.
const MaxIDBytes = 128

// A Begin is what an admission writes for a turn.
type Begin struct {
	// ID is the run's. It is made before the first attempt and the same in every retry.
	ID string

	// Resumes is the interrupted run that this one takes over. Empty: it is a new one.
	Resumes string

	// AgentType and ParentID are written where they are not empty.
	AgentType string
	ParentID  string

	// Reserve is how many tokens are held back for the turn.
	Reserve int64

	// ElsewhereStored says that usage is recorded in another table than the limiter's.
	ElsewhereStored bool
}

// NewID returns an ID that nobody else has.
func NewID() string { return rand.Text() }

// ValidateID reports why the ID cannot be used.
func ValidateID(id string) error {
	switch {
	case id == "" || len(id) > MaxIDBytes:
		return fmt.Errorf("%w: RunID has %d bytes: give 1 to %d, or leave it empty", fault.ErrInvalidTurn, len(id), MaxIDBytes)
	case !utf8.ValidString(id) || strings.ContainsRune(id, 0):
		return fmt.Errorf("%w: RunID is not valid UTF-8 without NUL", fault.ErrInvalidTurn)
	default:
		return nil
	}
}

// A Run is one turn on one agent.
type Run struct {
	AgentID string
	ID      string
}

// Live is the SQL of whether the row is held by a run whose lease is not over, at the
// moment that now says.
func Live(row, now string) string {
	return fmt.Sprintf("coalesce(%[1]s.status = 'running' AND %[1]s.run_id IS NOT NULL AND %[1]s.lease_expires_at > %[2]s, false)", row, now)
}

// Now is the database's clock at the moment that a row is looked at, also after the wait
// for its lock. It must not stand in a WHERE that should use an index on a time.
const Now = "clock_timestamp()"

// Holds is the condition that the row "agent" is held by the run. See "Who may write".
func (r Run) Holds() clause.Expression {
	return clause.Expr{
		SQL:  "agent.agent_id = ? AND agent.run_id = ? AND agent.status = 'running' AND agent.lease_expires_at IS NOT NULL",
		Vars: []any{r.AgentID, r.ID},
	}
}

// Checkpoint writes the conversation's state. The error is fault.ErrLeaseLost when the
// run has lost its row.
func (r Run) Checkpoint(tx *gorm.DB, agents clause.Table, state []byte) error {
	written, err := database.Exec(tx, r.checkpointStatement(agents, state))
	if err == nil && written == 0 {
		return lost()
	}

	return err
}

func (r Run) checkpointStatement(agents clause.Table, state []byte) clause.Expression {
	return clause.Expr{
		SQL:  "UPDATE ? AS agent SET conversation_state = ?, updated_at = clock_timestamp() WHERE ?",
		Vars: []any{agents, state, r.Holds()},
	}
}

// End makes the agent idle, gives its slot and its reservation back, and writes the state
// unless that is nil. It does nothing when the run has ended already. The error is
// fault.ErrLeaseLost when the run has lost its row.
func (r Run) End(tx *gorm.DB, agents clause.Table, state []byte) error {
	written, err := database.Exec(tx, r.endStatement(agents, state))
	if err != nil || written > 0 {
		return err
	}

	ended, err := r.hasEnded(tx, agents)
	if err == nil && !ended {
		return lost()
	}

	return err
}

func (r Run) endStatement(agents clause.Table, state []byte) clause.Expression {
	saved := clause.Expr{}
	if state != nil {
		saved = clause.Expr{SQL: ", conversation_state = ?", Vars: []any{state}}
	}

	return clause.Expr{
		SQL: `UPDATE ? AS agent SET status = 'idle', lease_expires_at = NULL, reserved_tokens = 0, updated_at = clock_timestamp()?
WHERE ?`,
		Vars: []any{agents, saved, r.Holds()},
	}
}

// Interrupt gives the slot back like a revocation, so that the run can be resumed.
func (r Run) Interrupt(tx *gorm.DB, agents clause.Table) error {
	_, err := database.Exec(tx, r.interruptStatement(agents))

	return err
}

func (r Run) interruptStatement(agents clause.Table) clause.Expression {
	return clause.Expr{
		SQL:  "UPDATE ? AS agent SET lease_expires_at = NULL WHERE ?",
		Vars: []any{agents, r.Holds()},
	}
}

func (r Run) hasEnded(tx *gorm.DB, agents clause.Table) (ended bool, err error) {
	statement := clause.Expr{
		SQL:  database.Primary + "SELECT agent.status = 'idle' FROM ? AS agent WHERE agent.agent_id = ? AND agent.run_id = ?",
		Vars: []any{agents, r.AgentID, r.ID},
	}
	err = database.Query(tx, statement, func(rows *sql.Rows) error { return rows.Scan(&ended) })

	return ended, err
}

// Confirm returns fault.ErrLeaseLost when the run has lost its row.
func (r Run) Confirm(tx *gorm.DB, agents clause.Table) error {
	holds := false
	statement := clause.Expr{SQL: database.Primary + "SELECT true FROM ? AS agent WHERE ?", Vars: []any{agents, r.Holds()}}

	err := database.Query(tx, statement, func(rows *sql.Rows) error { return rows.Scan(&holds) })
	if err == nil && !holds {
		return lost()
	}

	return err
}

func lost() error {
	return fmt.Errorf("%w: its slot was taken by a verdict, or its agent by another run: stop the work, plugin.Recover resumes it", fault.ErrLeaseLost)
}
