package models

import (
	"time"

	"gorm.io/datatypes"
	"gorm.io/gorm/schema"
)

// LegionIdentity is an identity that some rule has used: the registry of the
// limiter, and the rows that it locks so that a verdict is exact. Its table is
// named after the agents' table: legion_agents_identities.
//
// Rows come by themselves with the first admission under an identity and go with
// store.Prune. There is nothing in them for an application to read or write.
type LegionIdentity struct {
	// Identity is the flat JSON object of the rule. It is a jsonb key because
	// jsonb's own equality makes 1 and 1.0 one row, and its order is the order in
	// which rows are locked.
	Identity datatypes.JSON `gorm:"column:identity;type:jsonb;primaryKey"`

	// CreatedAt is when the identity was registered.
	CreatedAt time.Time `gorm:"column:created_at;type:timestamptz;not null;default:now()"`
}

// TableName names the registry after the table of [LegionAgent], whatever the
// NamingStrategy. It is for db.AutoMigrate(legion.Models()...). Where the agents
// have a model or a table of their own, Legion names the registry after that.
func (LegionIdentity) TableName(namer schema.Namer) string {
	return namer.TableName("LegionAgent") + "_identities"
}
