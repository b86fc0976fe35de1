package store

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/agentid"
	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/models"
)

// A Patch is what [Store.Save] writes of an agent. A nil field leaves its column as it
// is, or in a new row at its default. An empty value is a value, and is written.
type Patch struct {
	// AgentID says which agent: 1 to 512 bytes of valid UTF-8 without NUL.
	AgentID string

	// AgentType says what kind of agent it is, in the application's words.
	AgentType *string

	// ParentAgentID is the agent that started this one. It need not exist; it cannot be
	// the agent itself. Empty: none, which makes it a root agent.
	ParentAgentID *string

	// ConversationState is opaque to Legion.
	ConversationState []byte

	// Status can only be idle: it takes an admission to run. Idle frees the slot of a
	// bare Enforce, and gives up a run whose lease is over, with its reservation: should
	// its process be alive after all, its End is ErrLeaseLost. Under a live run it is
	// [ErrAgentRunning].
	Status *models.Status
}

// Save writes the fields of the patch that are given, and the agent's updated_at, in one
// statement. A new agent is inserted, with the defaults for all else; no limit counts it
// until it is admitted. A patch of nothing but the ID inserts a new agent, and leaves one
// that is there as it is.
//
// A deleted agent is written, and stays deleted: a turn that ends after the deletion
// must not undo it. An admission restores it.
//
// Nothing is written when the error is [ErrInvalidAgentID], [ErrInvalidArgument] or
// [ErrAgentRunning].
func (s *Store[T]) Save(ctx context.Context, patch Patch) error {
	if err := patch.validate(); err != nil {
		return err
	}

	return s.run(ctx, func(tx *gorm.DB) error {
		written, err := database.Exec(tx, saveStatement(s.agents(), patch))
		if err != nil {
			return err
		}

		if written == 0 && patch.Status != nil {
			return fmt.Errorf("%w: its status cannot be saved as idle: end the turn", ErrAgentRunning)
		}

		return nil
	})
}

func (p Patch) validate() error {
	if err := agentid.Validate(p.AgentID); err != nil {
		return err
	}

	if p.AgentType != nil && (!utf8.ValidString(*p.AgentType) || strings.ContainsRune(*p.AgentType, 0)) {
		return fmt.Errorf("%w: AgentType is not valid UTF-8 without NUL, which is all that text can hold", ErrInvalidArgument)
	}

	if p.ParentAgentID != nil && *p.ParentAgentID != "" {
		if *p.ParentAgentID == p.AgentID {
			return fmt.Errorf("%w: ParentAgentID is the agent itself: name the agent that started it, or leave it nil", ErrInvalidArgument)
		}

		if err := agentid.Validate(*p.ParentAgentID); err != nil {
			return fmt.Errorf("legion: ParentAgentID: %w", err)
		}
	}

	if p.Status != nil && *p.Status != models.StatusIdle {
		return fmt.Errorf("%w: Status can only be saved as %q: an agent runs when it is admitted", ErrInvalidArgument, models.StatusIdle)
	}

	return nil
}

// notUnderLiveRun is the condition that no live turn holds the row "agent". The clock is
// read when the row is locked.
var notUnderLiveRun = "NOT " + run.Live("agent", run.Now)

func saveStatement(agents clause.Table, patch Patch) clause.Expression {
	columns := agentIDColumn
	values := []any{patch.AgentID}

	var updates []string

	set := func(column string, value any) {
		columns += ", " + column
		values = append(values, value)
		updates = append(updates, column+" = excluded."+column)
	}

	if patch.AgentType != nil {
		set("agent_type", *patch.AgentType)
	}

	if patch.ParentAgentID != nil {
		set("parent_agent_id", *patch.ParentAgentID)
	}

	if patch.ConversationState != nil {
		set("conversation_state", patch.ConversationState)
	}

	condition := ""
	if patch.Status != nil {
		// What an idle row holds no longer. The run_id of a run that has ended stays, so that
		// an End which is retried knows its own; that of one that is given up goes, so that
		// its End finds the lease lost. A new row has all this by default.
		updates = append(updates, "status = 'idle'", "lease_expires_at = NULL", "reserved_tokens = 0",
			"run_id = CASE agent.status WHEN 'running' THEN NULL ELSE agent.run_id END")
		condition = "\nWHERE " + notUnderLiveRun
	}

	conflict := "NOTHING"
	if len(updates) > 0 {
		conflict = "UPDATE SET " + strings.Join(updates, ", ") + ", updated_at = clock_timestamp()" + condition
	}

	return expression(`INSERT INTO ? AS agent (`+columns+`, created_at, updated_at)
VALUES (?`+strings.Repeat(", ?", len(values)-1)+`, clock_timestamp(), clock_timestamp())
ON CONFLICT (agent_id) DO `+conflict, append([]any{agents}, values...)...)
}
