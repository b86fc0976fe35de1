package models

// Status says whether an agent is at work. It is a hint for people and for the
// running limit's index: what holds a slot is a running row whose lease is not
// over, see [LegionAgent.LeaseExpiresAt].
type Status string

const (
	// StatusIdle is an agent that is not working. It is the default of a new row.
	StatusIdle Status = "idle"

	// StatusRunning is an agent in the middle of a turn.
	StatusRunning Status = "running"
)
