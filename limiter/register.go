package limiter

import (
	"cmp"
	"database/sql"
	"fmt"
	"slices"
	"strings"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
)

// maxRounds bounds how often a call starts again because an identity of its own was
// not registered. One round is the rule; a second one needs a Prune in between.
const maxRounds = 10

var errRounds = fmt.Errorf("%w: identities of the call were pruned as often as they were registered: call again", fault.ErrContention)

// register adds an identity to the registry in a short transaction that holds no
// other lock, so that while it waits for a busy field nobody waits for it elsewhere. An
// admission would hold the exclusive lock until its end.
func (c *call) register(identity document) error {
	return database.Transaction(c.db, c.settings.ConnectionTimeout, func(tx *gorm.DB) error {
		if !c.hooks.WithoutFieldLocks && !identity.isEveryone() {
			if locked, err := tryLockAnyField(tx, identity); err != nil {
				return err
			} else if !locked {
				if err := lockField(tx, waitingField(identity)); err != nil {
					return err
				}
			}
		}

		return c.insertIdentities(tx, []document{identity})
	})
}

// registerInside adds identities to the registry inside the caller's transaction,
// where a second connection would be a deadlock waiting to happen. The field locks are
// held already, so it only tries for the exclusive ones: waiting for them would be an
// upgrade. It reports whether it got them.
func (c *call) registerInside(tx *gorm.DB, identities []document) (bool, error) {
	if !c.hooks.WithoutFieldLocks {
		for _, identity := range identities {
			if identity.isEveryone() {
				continue
			}

			if locked, err := tryLockAnyField(tx, identity); err != nil || !locked {
				return false, err
			}
		}
	}

	return true, c.insertIdentities(tx, identities)
}

// waitingFields are the fields to lock exclusively from the start, where trying has
// failed.
func waitingFields(identities []document) []field {
	fields := make([]field, 0, len(identities))

	for _, identity := range identities {
		if !identity.isEveryone() {
			fields = append(fields, waitingField(identity))
		}
	}

	return fields
}

// waitingField chooses the field of an identity whose exclusive lock is waited for.
// Any of them is right. The longest is a guess at the one that the fewest others
// share: an address rather than the name of a plan.
func waitingField(identity document) field {
	return slices.MaxFunc(identity.fields, func(a, b field) int {
		return cmp.Or(cmp.Compare(len(a.name)+len(a.value), len(b.name)+len(b.value)), strings.Compare(a.name, b.name))
	})
}

// tryLockAnyField takes the exclusive lock of the first field that is free. CASE
// stops at it, so that not more than one is locked.
func tryLockAnyField(tx *gorm.DB, identity document) (locked bool, err error) {
	var query strings.Builder

	_, _ = query.WriteString("SELECT CASE")
	vars := make([]any, len(identity.fields))

	for i, field := range identity.fields {
		_, _ = query.WriteString(" WHEN pg_try_advisory_xact_lock(?::bigint) THEN true")
		vars[i] = fieldKey(field)
	}

	_, _ = query.WriteString(" ELSE false END")
	statement := clause.Expr{SQL: query.String(), Vars: vars, WithoutParentheses: true}

	err = database.Query(tx, statement, func(rows *sql.Rows) error { return rows.Scan(&locked) })

	return locked, err
}

func lockField(tx *gorm.DB, field field) error {
	statement := clause.Expr{SQL: "SELECT pg_advisory_xact_lock(?::bigint)", Vars: []any{fieldKey(field)}, WithoutParentheses: true}
	_, err := database.Exec(tx, statement)

	return err
}

// sorted returns the identities in canonical order.
func sorted(identities []document) []document {
	return slices.SortedFunc(slices.Values(identities), func(a, b document) int { return strings.Compare(a.text, b.text) })
}

// insertIdentities adds identities in canonical order, the order in which everybody
// waits for an insertion that has not committed.
func (c *call) insertIdentities(tx *gorm.DB, identities []document) error {
	for _, identity := range sorted(identities) {
		_, err := database.Exec(tx, clause.Expr{
			SQL:  "INSERT INTO ? (identity) VALUES (?) ON CONFLICT (identity) DO NOTHING",
			Vars: []any{clause.Table{Name: c.tables.Identities}, jsonb(identity.text)},
		})
		if err != nil {
			return err
		}
	}

	return nil
}
