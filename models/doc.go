// Package models holds the tables of Legion for GORM as GORM models, and the
// JSONB containment expression that its queries use.
//
// [LegionAgent] is the row of one agent. Applications may use it as it is, or
// embed it in a model of their own:
//
//	type ChatAgent struct {
//		models.LegionAgent
//		Title *string // columns that an application adds are nullable or have a default
//	}
//
// [LegionIdentity] is the registry that the limiter locks; applications have
// no need to read it.
package models
