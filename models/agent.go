package models

import (
	"time"

	"gorm.io/datatypes"
	"gorm.io/gorm"
)

// LegionAgent is one agent: a conversation, a job or a run that is limited as a
// whole. Its default table is legion_agents.
//
// The rows are written by the limiter, by turns and by the store. An application
// reads them as it likes, and should write them through those packages only:
// a verdict is as exact as the rows that it counts.
//
// There is no TableName method on purpose, because a model that embeds
// LegionAgent would inherit it. The table is named by GORM's NamingStrategy, by
// the embedding model's own TableName, or by legion.WithTable. The column names
// are fixed by tags, since the indexes and the check constraint name them.
type LegionAgent struct {
	// AgentID is the application's own name for the agent: 1 to 512 bytes of valid
	// UTF-8 without NUL.
	AgentID string `gorm:"column:agent_id;type:text;primaryKey"`

	// AgentType says what kind of agent it is, in the application's words. Nil: not
	// said.
	AgentType *string `gorm:"column:agent_type;type:text"`

	// ParentAgentID is the agent that started this one. Nil or empty: none, it is a root
	// agent. Empty is what a save of the empty value writes over an earlier parent.
	ParentAgentID *string `gorm:"column:parent_agent_id;type:text"`

	// Status is idle or running. The default is idle.
	Status Status `gorm:"column:status;type:text;not null;default:idle;check:status IN ('idle', 'running')"`

	// Metadata is the merged identity of the rules that the agent was last admitted
	// under, a flat JSON object. NULL: the agent was never limited, and no rule
	// counts it. Its indexes have no list of pending entries (fastupdate), which every
	// verdict would read from end to end.
	Metadata datatypes.JSON `gorm:"column:metadata;type:jsonb;index:,type:gin,expression:metadata jsonb_path_ops,option:WITH (fastupdate = off);index:,composite:running,type:gin,expression:metadata jsonb_path_ops,option:WITH (fastupdate = off),where:status = 'running'"`

	// Usage is a JSON array with one object for each LLM request, oldest first, see
	// [Usage]. It is bounded: older entries are folded into sums. Read it with
	// [LegionAgent.UsageEntries].
	Usage datatypes.JSON `gorm:"column:usage;type:jsonb;not null;default:jsonb_build_array()"`

	// ConversationState is the application's own state of the conversation. It is
	// opaque to Legion. NULL: never saved.
	ConversationState []byte `gorm:"column:conversation_state;type:bytea"`

	// ReservedTokens are the tokens that a turn holds back until they are recorded.
	// They count as used while the row holds a slot.
	ReservedTokens int64 `gorm:"column:reserved_tokens;type:bigint;not null;default:0"`

	// RunID names the turn that is, or was last, at work on the agent. NULL: no turn
	// began it; a running row without one is the unowned slot of a bare Enforce.
	RunID *string `gorm:"column:run_id;type:text"`

	// LeaseExpiresAt is the moment, by the database's clock, at which the slot of a
	// running row is free again unless it is renewed. NULL: the row holds no slot.
	LeaseExpiresAt *time.Time `gorm:"column:lease_expires_at;type:timestamptz"`

	// StartedAt is the moment of the first admission, by the database's clock. It is
	// set once and then kept. NULL: never admitted.
	StartedAt *time.Time `gorm:"column:started_at;type:timestamptz;index:,type:btree"`

	// CreatedAt is when the row was inserted.
	CreatedAt time.Time `gorm:"column:created_at;type:timestamptz;not null;default:now()"`

	// UpdatedAt is when the row last changed. A verdict skips the usage of rows that
	// have not changed within the window, so a write that adds usage must set it.
	UpdatedAt time.Time `gorm:"column:updated_at;type:timestamptz;not null;default:now();index:,type:btree"`

	// DeletedAt hides the agent from the store's Get and List, and from GORM's
	// queries. Limits still count deleted rows. NULL: not deleted.
	DeletedAt gorm.DeletedAt `gorm:"column:deleted_at;type:timestamptz"`
}

// UsageEntries decodes the Usage column, oldest first. It is as tolerant as the
// limiter: a known field that is not what it should be reads as zero, an element
// that is no object is skipped, and a column that is no array is an empty list.
// The error is for text that is no JSON at all, which a jsonb column cannot hold.
func (a *LegionAgent) UsageEntries() ([]Usage, error) {
	return parseUsageEntries(a.Usage)
}
