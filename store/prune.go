package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
)

// PruneResult counts what one [Store.Prune] has removed.
type PruneResult struct {
	// Agents are deleted agents, removed for good.
	Agents int64

	// UsageEntries are entries of the usage of other agents. A folded one counts as one.
	UsageEntries int64

	// Identities are registered identities that no agent has any more.
	Identities int64
}

// Prune removes what no limit can count any more. The caller promises that no window of
// any rule reaches behind before. Removed are
//
//   - agents that were deleted before then, unless they have started or changed since or
//     hold a slot whose lease is not over. An agent that is not deleted stays;
//   - usage entries from before then, of all agents. Elements of a usage that have no time
//     stay, and updated_at is not touched;
//   - registered identities that no agent has.
//
// It walks through all of it in small batches, each a short transaction of its own. Rows
// that somebody else has locked are skipped, and left to the next call. It may run at any
// time, and on several machines at once. In a caller's transaction it keeps its locks to
// the end of that, and admissions wait for them: better call it outside.
//
// The result says what was removed, also when an error ended the walk. Errors:
// [ErrInvalidArgument] when before is not in the past by the database's clock;
// [ErrIsolation] in a caller's transaction that is not READ COMMITTED. A foreign key of
// the application's on agents needs an ON DELETE action, or its violation ends the walk.
func (s *Store[T]) Prune(ctx context.Context, before time.Time) (PruneResult, error) {
	pruner := pruner{
		agents:     s.agents(),
		identities: clause.Table{Name: s.tables.Identities},
		before:     before,
		transaction: func(body func(tx *gorm.DB) error) error {
			return s.transaction(ctx, body)
		},
	}

	err := pruner.run()

	return pruner.removed, err
}

// transaction calls body with the caller's transaction, or with one of its own.
func (s *Store[T]) transaction(ctx context.Context, body func(tx *gorm.DB) error) error {
	if s.err != nil {
		return s.err
	}

	session := s.db.Session(&gorm.Session{NewDB: true, Context: ctx})
	if !database.InTransaction(session) {
		return database.Transaction(session, s.settings.ConnectionTimeout, body)
	}

	if err := body(session); !errors.Is(err, database.ErrRollback) {
		return err
	}

	return nil
}

// pruner is one call of Prune.
type pruner struct {
	agents, identities clause.Table
	before             time.Time
	transaction        func(body func(tx *gorm.DB) error) error
	removed            PruneResult
}

func (p *pruner) run() error {
	registered, err := p.check()
	if err != nil {
		return err
	}

	if err := p.walk(keyset{table: p.agents, column: agentIDColumn, kind: "text"}, p.pruneAgents); err != nil {
		return err
	}

	// The first admission makes the registry.
	if !registered {
		return nil
	}

	return p.walk(keyset{table: p.identities, column: "identity", kind: "jsonb"}, p.pruneIdentities)
}

// check asks whether the call can be answered, and whether there is a registry.
func (p *pruner) check() (registered bool, err error) {
	var past, readCommitted bool

	err = p.transaction(func(tx *gorm.DB) error {
		err := database.Query(tx, expression(
			`SELECT ?::timestamptz < clock_timestamp(), current_setting('transaction_isolation') = 'read committed', to_regclass(?::text) IS NOT NULL`,
			p.before, tx.Statement.Quote(p.identities)),
			func(rows *sql.Rows) error { return rows.Scan(&past, &readCommitted, &registered) })
		if err != nil {
			return err
		}

		return database.ErrRollback
	})

	switch {
	case err != nil:
		return false, err
	case !past:
		return false, fmt.Errorf("%w: before is not in the past by the database's clock: subtract the longest window of your rules from now", ErrInvalidArgument)
	case !readCommitted:
		return false, fmt.Errorf("%w: Prune would judge from its old snapshot: call it outside the transaction", ErrIsolation)
	default:
		return registered, nil
	}
}

// walk calls prune for one batch of keys after the other, each in a transaction, and adds
// up what was removed.
func (p *pruner) walk(keys keyset, prune func(tx *gorm.DB, batch clause.Expression) (PruneResult, error)) error {
	var after *string

	for {
		var (
			last    *string
			removed PruneResult
		)

		err := p.transaction(func(tx *gorm.DB) (err error) {
			last, err = keys.lastOfBatch(tx, after)
			if err != nil {
				return err
			}

			removed = PruneResult{}
			if last != nil {
				removed, err = prune(tx, keys.between(after, *last))
			}

			if err == nil && removed == (PruneResult{}) {
				return database.ErrRollback
			}

			return err
		})
		if err != nil {
			return err
		}

		p.removed.Agents += removed.Agents
		p.removed.UsageEntries += removed.UsageEntries
		p.removed.Identities += removed.Identities

		if last == nil {
			return nil
		}

		after = last
	}
}

// pruneAgents removes the deleted agents of a batch, and the spent usage of the others.
func (p *pruner) pruneAgents(tx *gorm.DB, batch clause.Expression) (removed PruneResult, err error) {
	deleted, err := lock(tx, lockDeletedStatement(p.agents, batch, p.before))
	if err != nil {
		return PruneResult{}, err
	}

	removed.Agents, err = deleted.change(tx, func(keys string) clause.Expression {
		return deleteAgentsStatement(p.agents, keys)
	})
	if err != nil {
		return PruneResult{}, err
	}

	spent, err := lock(tx, lockSpentStatement(p.agents, batch, p.before))
	if err != nil {
		return PruneResult{}, err
	}

	removed.UsageEntries = spent.entries
	_, err = spent.change(tx, func(keys string) clause.Expression {
		return dropUsageStatement(p.agents, keys, p.before)
	})

	return removed, err
}

// pruneIdentities removes the identities of a batch that no agent has.
func (p *pruner) pruneIdentities(tx *gorm.DB, batch clause.Expression) (removed PruneResult, err error) {
	registered, err := lock(tx, lockIdentitiesStatement(p.identities, batch))
	if err != nil {
		return PruneResult{}, err
	}

	removed.Identities, err = registered.change(tx, func(keys string) clause.Expression {
		return deleteIdentitiesStatement(p.identities, p.agents, keys)
	})

	return removed, err
}

// lockedRows are rows that this transaction has locked.
type lockedRows struct {
	keys []string

	// entries is how many usage entries are to go from them.
	entries int64
}

// lock runs a statement that locks rows and returns for each its key and its number of
// entries. The rows are changed by a statement of its own: its snapshot has all that was
// committed before the lock was free.
func lock(tx *gorm.DB, statement clause.Expression) (locked lockedRows, err error) {
	err = database.Query(tx, statement, func(rows *sql.Rows) error {
		var (
			key     string
			entries int64
		)

		err := rows.Scan(&key, &entries)
		locked.keys = append(locked.keys, key)
		locked.entries += entries

		return err
	})

	return locked, err
}

// change runs the statement for the keys, given as a JSON array: one parameter, so that
// the statement's text is always the same. It returns how many rows were changed.
func (r lockedRows) change(tx *gorm.DB, statement func(keys string) clause.Expression) (int64, error) {
	if len(r.keys) == 0 {
		return 0, nil
	}

	keys, err := json.Marshal(r.keys)
	if err != nil {
		return 0, fmt.Errorf("legion: the keys to prune: %w", err)
	}

	return database.Exec(tx, statement(string(keys)))
}
