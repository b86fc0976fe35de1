package main

import (
	"context"
	"fmt"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// An admission is one rule of one admitted turn: the log that the check reads. It is
// written in the transaction of the admission, so there is one exactly if the admission
// has committed.
//
// Which of its moments is compared with which decides whether the check is honest. See
// check.go.
type admission struct {
	Turn int64  `gorm:"primaryKey;autoIncrement:false"`
	Rule string `gorm:"primaryKey;index:,composite:starts,priority:1;index:,composite:ends,priority:1"`

	// GroupName is the group of the rule: a tenant, or a user of it.
	GroupName string `gorm:"not null;index:,composite:starts,priority:2;index:,composite:ends,priority:2"`
	AgentID   string `gorm:"not null"`

	// The policy that the turn was admitted under.
	WindowMicroseconds int64 `gorm:"not null"`
	MaxAgents          int64 `gorm:"not null"`
	MaxRunningAgents   int64 `gorm:"not null"`
	MaxTokens          int64 `gorm:"not null"`

	// Snapshot says which transactions had committed before Enforce was called.
	Snapshot string `gorm:"type:pg_snapshot;not null"`

	// BegunAt is when the transaction began, AdmittedAt is when Enforce had returned,
	// while its locks were held.
	BegunAt    time.Time `gorm:"not null;default:transaction_timestamp()"`
	AdmittedAt time.Time `gorm:"not null;default:clock_timestamp()"`

	// What Legion has recorded of the agent: its start, and how long its slot lasts
	// unless it is given back before.
	StartedAt      time.Time `gorm:"not null;index:,composite:starts,priority:3"`
	LeaseExpiresAt time.Time `gorm:"not null"`

	// Tokens are those of the turn, EndedAt is a moment just before they were recorded and
	// the slot was given back, and EndedBy is the transaction that did so. A turn that has
	// not ended has none.
	Tokens  int64      `gorm:"not null;default:0"`
	EndedAt *time.Time `gorm:"index:,composite:ends,priority:3"`
	EndedBy *string    `gorm:"type:xid8"`
}

// TableName implements schema.Tabler.
func (admission) TableName() string { return "replay_admissions" }

func currentSnapshot(tx *gorm.DB) (string, error) {
	var snapshot string
	if err := tx.Raw("SELECT pg_current_snapshot()::text").Scan(&snapshot).Error; err != nil {
		return "", fmt.Errorf("read the snapshot: %w", err)
	}

	return snapshot, nil
}

func logAdmission(ctx context.Context, tx *gorm.DB, turn turn, rules []limiter.Rule, snapshot string) error {
	agent, err := store.For[models.LegionAgent](tx).Get(ctx, turn.agentID)
	if err != nil {
		return fmt.Errorf("read the admitted agent: %w", err)
	}

	admissions := make([]admission, len(rules))
	for i, rule := range rules {
		admissions[i] = admission{
			Turn:               turn.number,
			Rule:               rule.Name,
			GroupName:          turn.group(rule),
			AgentID:            turn.agentID,
			WindowMicroseconds: rule.Policy.Window.Microseconds(),
			MaxAgents:          *rule.Policy.MaxAgents,
			MaxRunningAgents:   *rule.Policy.MaxRunningAgents,
			MaxTokens:          *rule.Policy.MaxTokens,
			Snapshot:           snapshot,
			StartedAt:          *agent.StartedAt,
			LeaseExpiresAt:     *agent.LeaseExpiresAt,
		}
	}

	// A transaction whose COMMIT was answered by a broken connection is run again.
	if err := tx.Clauses(clause.OnConflict{DoNothing: true}).Create(&admissions).Error; err != nil {
		return fmt.Errorf("log an admission: %w", err)
	}

	return nil
}

func logEnd(tx *gorm.DB, turn turn) error {
	err := tx.Model(&admission{}).Where("turn = ?", turn.number).Updates(map[string]any{
		"tokens":   turn.tokens(),
		"ended_at": gorm.Expr("clock_timestamp()"),
		"ended_by": gorm.Expr("pg_current_xact_id()"),
	}).Error
	if err != nil {
		return fmt.Errorf("log the end of a turn: %w", err)
	}

	return nil
}
