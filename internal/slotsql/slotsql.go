// Package slotsql is the one home of the rule which rows hold a slot in SQL: the limiter
// counts them by its statements and by the server's function.
package slotsql

import (
	"fmt"

	"github.com/legion-gorm/legion/internal/usagesql"
)

// IsHeld is the SQL of whether a row holds a slot at a moment.
//
// A slot with an owner counts until it is given back or revoked, even when its lease
// is over: its owner may be renewing it at this moment, unseen. The unowned slot of
// a bare Enforce is renewed under the identity locks only, so it is free as soon as its
// lease is over.
func IsHeld(row, now string) string {
	return fmt.Sprintf("%[1]s.status = 'running' AND %[1]s.lease_expires_at IS NOT NULL AND (%[1]s.run_id IS NOT NULL OR %[1]s.lease_expires_at > %[2]s)",
		row, now)
}

// Counts are four columns of bigint over rows that hold slots: how many, how many of them
// with a lease that is over, and the tokens that are reserved by either.
func Counts(row, now string) string {
	expired := fmt.Sprintf("FILTER (WHERE %s.lease_expires_at <= %s)", row, now)
	reserved := fmt.Sprintf("sum(greatest(0, %s.reserved_tokens))", row)

	return "count(*), count(*) " + expired + ", " + usagesql.Saturate(reserved) + ", " + usagesql.Saturate(reserved+" "+expired)
}
