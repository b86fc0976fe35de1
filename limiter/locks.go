package limiter

import (
	"cmp"
	"crypto/sha256"
	"database/sql"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/testhook"
)

// # Why a verdict is exact
//
// A call has rules, each on an identity, and M, the merge of these identities, under
// which its agent is recorded. It checks the groups of its own identities, and it
// joins the group of every identity that M contains, also of those that only other
// calls check. Locking the own identities is therefore not enough: A with {ip} and
// {tenant}, and B with {ip,tenant}, would share no lock and join each other's
// groups unseen.
//
// # The protocol
//
// In one READ COMMITTED transaction, each step a statement with a snapshot of its
// own:
//
//  1. Agent and field locks: transaction-level advisory locks, exclusive on the
//     agent's ID and shared on every field (name and value) of M, in the order of
//     their keys.
//  2. Identity locks: FOR UPDATE on the registry's row of every registered identity
//     that M contains, in jsonb's order. Everyone's row, which M always contains, is
//     locked only by those who check it.
//  3. Revocation of expired slots, where they decide the verdict: revoke.go.
//  4. Measuring all rules, in one statement.
//  5. Recording the agent, if all rules allow.
//
// A turn that begins or is resumed (turn.go) is such a call. One without rules locks the
// groups that its agent is in already, since its slot counts there.
//
// A call for several agents (EnforceAll) takes the locks of steps 1 and 2 for all of
// them together, and then does the rest for one after the other.
//
// An own identity that step 2 does not find is registered (register.go) under an
// exclusive lock on one of its fields, and the call starts again.
//
// # The argument
//
// Claim: the calls that commit have a serial order in which each verdict is right.
//
// Let I be a non-empty identity that X checks, and let Y be a call that joins I, so
// that I is contained in Y's M. Y holds shared locks on all fields of I from before
// its lookup in step 2 until its end. Some registration of I comes before X's
// successful lookup, and it committed while holding an exclusive lock on a field of
// I. So it falls entirely
//
//   - before Y took its field locks: then Y's lookup, a later statement, sees I and
//     locks its row, and as X locks it too, their intervals from lookup to end are
//     disjoint. The one that comes second measures, in a snapshot taken after its
//     locks, what the first has committed; or
//   - after Y's end: then X's lookup, which comes after the registration, and X's
//     snapshot, which comes after the lookup, see what Y committed.
//
// In the second case X is simply later than Y. So any two calls of which one checks
// what the other joins are ordered, and the order is that of real time between their
// lookups and ends. Ordering the admissions by their commits agrees with every such
// pair; a denial changes nothing and stands at its measurement, which is one snapshot
// for all rules.
//
// Calls on Everyone hold its row to the end, so they are ordered among themselves.
// Others join Everyone's group at their commit without that row, be it between a
// checker's count and its end. So a checker of Everyone stands at its count. For
// admissions that order agrees with the rest, since whoever checks what it joins, or
// joins what else it checks, is kept apart from it. But a denial or a release in
// between goes by what is committed, and finds the checker's agent where it was: it
// may deny for an agent that is about to leave the group, or name a later rule than
// the first that the order would violate. It never admits too many.
//
// Of several agents in one call each is measured at a moment of its own. Their
// verdicts are right one by one; under Everyone there need be no moment at which all
// of them are.
//
// Store.Prune may delete the row of an identity. It locks the row first, so no call
// holds it then. A checker that comes later does not find the row and registers the
// identity again, after every call in flight that joins it has ended: the argument
// holds for the new registration.
//
// The agent's lock makes two calls for one agent follow each other as a whole. Without
// it a call that stands at its count could still overwrite what a later call has made
// of the agent, and calls for several agents could wait for each other's rows.
//
// A call that leaves a group (its agent moves to another identity), a release, a
// deletion: each can only make room, and takes effect at its commit. They need no
// lock on the group that they leave.
//
// # No deadlock
//
// Every wait follows one global order: advisory locks by key, then insertions into
// the registry in canonical order, then identity rows in jsonb's order, then agents'
// rows. The advisory locks of a call are taken in one sorted pass, never after a row
// lock and never upgraded by waiting. This holds for one call a transaction; two
// Enforces in one caller's transaction can deadlock with others, and come back as a
// retryable error.
//
// # What it costs
//
// Calls on one identity follow each other from lookup to end: that is what an exact
// limit means. Shared locks do not block one another, so that a field with one value
// everywhere ("app") serialises nothing, except while an identity that has it as its
// only field is registered. Such a first use waits for the calls in flight on the field,
// and new ones queue behind it: as long as the longest of the callers' transactions.

// A lockKey is an advisory lock in PostgreSQL's 64-bit space.
type lockKey struct {
	key       int64
	exclusive bool
}

// The first byte keeps the kinds apart; hashing with a name of our own, and 64 bits
// of it, keeps them apart from the application's. A collision would only make two
// calls wait for each other that need not. SHA-256 keeps those who choose the values
// from choosing collisions.
const (
	agentKind    = 'a'
	fieldKind    = 'f'
	registryKind = 'r'
)

func hashKey(kind byte, parts ...string) int64 {
	hash := sha256.New()
	_, _ = hash.Write([]byte("legion\x00"))
	_, _ = hash.Write([]byte{kind})

	for _, part := range parts {
		_, _ = hash.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		_, _ = hash.Write([]byte(part))
	}

	return int64(binary.BigEndian.Uint64(hash.Sum(nil))) //nolint:gosec // all 64 bits are meant
}

func fieldKey(field field) int64 { return hashKey(fieldKind, field.name, field.value) }

// lockKeys returns the advisory locks of a call in the order in which they are
// taken. The fields of exclusiveFields are locked in the stronger mode at once, since
// upgrading a shared lock could deadlock.
func (c *call) lockKeys(exclusiveFields []field) []lockKey {
	modes := make(map[int64]bool, MaxFields+1)

	if !c.hooks.WithoutFieldLocks {
		for _, request := range c.requests {
			for _, field := range request.merged.fields {
				modes[fieldKey(field)] = false
			}
		}

		for _, field := range exclusiveFields {
			modes[fieldKey(field)] = true
		}
	}

	if !c.hooks.WithoutAgentLock {
		for _, request := range c.requests {
			modes[hashKey(agentKind, request.agentID)] = true
		}
	}

	keys := make([]lockKey, 0, len(modes))
	for key, exclusive := range modes {
		keys = append(keys, lockKey{key, exclusive})
	}

	slices.SortFunc(keys, func(a, b lockKey) int { return cmp.Compare(a.key, b.key) })

	return keys
}

// lockStatement takes the locks in the order of the keys: PostgreSQL evaluates a
// target list from left to right. The isolation level comes with it for free.
func lockStatement(keys []lockKey) clause.Expr {
	var query strings.Builder

	_, _ = query.WriteString("SELECT current_setting('transaction_isolation')")
	vars := make([]any, len(keys))

	for i, key := range keys {
		if key.exclusive {
			_, _ = query.WriteString(", pg_advisory_xact_lock(?::bigint)")
		} else {
			_, _ = query.WriteString(", pg_advisory_xact_lock_shared(?::bigint)")
		}

		vars[i] = key.key
	}

	return clause.Expr{SQL: query.String(), Vars: vars, WithoutParentheses: true}
}

// lockFields takes the agent and field locks: step 1.
func (c *call) lockFields(tx *gorm.DB, exclusiveFields []field) error {
	var keys []lockKey
	if !c.hooks.WithoutLocks {
		keys = c.lockKeys(exclusiveFields)
	}

	var isolation string

	err := database.Query(tx, lockStatement(keys), func(rows *sql.Rows) error {
		into := make([]any, 1+len(keys))
		into[0] = &isolation

		for i := range keys {
			into[i+1] = new(any) // void
		}

		return rows.Scan(into...)
	})
	if err != nil {
		return err
	}

	// READ UNCOMMITTED is READ COMMITTED in PostgreSQL.
	if isolation != "read committed" && isolation != "read uncommitted" {
		return errIsolation(isolation)
	}

	c.hooks.Reach(testhook.FieldLocks)

	return nil
}

func errIsolation(isolation string) error {
	return fmt.Errorf("%w: it is %s, which counts from an old snapshot: begin it with sql.LevelReadCommitted or without options", fault.ErrIsolation, isolation)
}

// own are the identities that the call checks.
func (c *call) own() []document {
	var own []document
	for _, request := range c.requests {
		own = append(own, request.identities()...)
	}

	return distinct(own)
}

// candidates are the identities whose rows step 2 locks where they exist.
func (c *call) candidates() []document {
	if c.hooks.OwnIdentitiesOnly {
		return c.own()
	}

	var candidates []document
	for _, request := range c.requests {
		candidates = append(candidates, request.contained()...)
	}

	return distinct(candidates)
}

// lockIdentities takes the identity locks, step 2, and returns those of the call's
// own identities that are not registered.
func (c *call) lockIdentities(tx *gorm.DB) (missing []document, err error) {
	candidates := c.candidates()
	if len(candidates) == 0 {
		c.hooks.Reach(testhook.IdentityLocks)

		return nil, nil
	}

	texts := make([]any, len(candidates))
	for i, candidate := range candidates {
		texts[i] = jsonb(candidate.text)
	}

	query := tx.Table("?", clause.Table{Name: c.tables.Identities}).
		Select("identity").
		Where(clause.IN{Column: clause.Column{Name: "identity"}, Values: texts})

	switch {
	case c.hooks.WithoutLocks:
	case c.hooks.Unsorted:
		query = query.Clauses(clause.Locking{Strength: clause.LockingStrengthUpdate}).Order(clause.OrderBy{Expression: clause.Expr{SQL: "random()"}})
	default:
		query = query.Clauses(clause.Locking{Strength: clause.LockingStrengthUpdate}).Order("identity")
	}

	registered := make(map[string]bool, len(candidates))

	err = database.Find(query, func(rows *sql.Rows) error {
		var text string
		if err := rows.Scan(&text); err != nil {
			return err
		}

		document, err := parseDocument(text)
		registered[document.text] = true

		return err
	})
	if err != nil {
		return nil, err
	}

	for _, own := range c.own() {
		if !registered[own.text] {
			missing = append(missing, own)
		}
	}

	c.hooks.Reach(testhook.IdentityLocks)

	return missing, nil
}

// jsonb binds JSON text. It is a string with a cast, since in pgx's exec and
// simple-protocol modes a []byte would arrive as bytea.
func jsonb(text string) clause.Expr {
	return clause.Expr{SQL: "?::jsonb", Vars: []any{text}}
}

// parseDocument reads an identity as jsonb prints it: with spaces, in an order of
// its own, and with numbers as they were written.
func parseDocument(text string) (document, error) {
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()

	identity := Identity{}
	if err := decoder.Decode(&identity); err != nil {
		return document{}, fmt.Errorf("legion: the registry of identities holds what is no identity: %w", err)
	}

	return identity.canonical()
}
