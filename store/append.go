package store

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/agentid"
	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/models"
)

// appendAttempts bounds how often an append starts over because the row changed under
// it in a way that says neither that the entry is there nor that the agent is not.
const appendAttempts = 3

// AppendUsage records one entry at the end of the agent's usage, in one statement:
// concurrent appends lose nothing. A deleted agent takes usage like any other, since the
// tokens were spent. Where entry.At is zero, or lies in the future, the database's clock
// says when.
//
// An entry whose ID is among the newest 128 of the agent is not recorded again, and
// appended is false: so an append whose reply was lost can be retried with the same ID.
// It is false too when it was this very call that recorded the entry, in an attempt
// whose reply was lost. An entry without an ID gets a random one before the first attempt.
//
// The usage is bounded, see [MaxUsageEntries]: an append that finds it full folds all
// but the newest 128 entries into sums, one entry
//
//   - for each minute, up to an hour ago;
//   - for each hour, up to 7 days ago;
//   - for each day, up to 31 days ago;
//   - for each week, up to 53 weeks ago;
//   - for two years each of what is older.
//
// A folded entry has the newest At of what it sums up and the number of requests
// (models.Usage.Folded); their IDs, models and extra keys are gone. So what a limit sums
// is never too low, and too high by at most what one such step holds: a window of 7 days
// is exact to the hour, one of 31 days to the day. An application that needs every entry
// for ever keeps a log of its own.
//
// Errors: [ErrNotFound] when there is no such agent; [ErrInvalidUsage] and
// [ErrInvalidAgentID], with the database not touched.
func (s *Store[T]) AppendUsage(ctx context.Context, agentID string, entry models.Usage) (appended bool, err error) {
	return s.appendUsage(ctx, agentID, entry, "")
}

// AppendTurnUsage is for the root package of this module. It is [Store.AppendUsage] that
// also lowers what the run holds reserved by the tokens of the entry, down to zero.
func (s *Store[T]) AppendTurnUsage(ctx context.Context, turn run.Run, entry models.Usage) (appended bool, err error) {
	return s.appendUsage(ctx, turn.AgentID, entry, turn.ID)
}

func (s *Store[T]) appendUsage(ctx context.Context, agentID string, entry models.Usage, runID string) (appended bool, err error) {
	if err := agentid.Validate(agentID); err != nil {
		return false, err
	}

	if entry.ID == "" {
		entry.ID = rand.Text()
	}

	if err := entry.Validate(); err != nil {
		return false, err
	}

	document, err := json.Marshal(entry)
	if err != nil {
		return false, fmt.Errorf("%w: %w", ErrInvalidUsage, err)
	}

	statement := usageAppend{
		agents: s.agents(), agentID: agentID, entryID: entry.ID, entry: string(document), at: entry.At,
		runID: runID, tokens: entry.Tokens(),
	}

	return s.append(ctx, statement)
}

func (s *Store[T]) append(ctx context.Context, statement usageAppend) (appended bool, err error) {
	if s.err == nil && !database.InTransaction(s.db) {
		leave, err := appendQueue.Enter(ctx, agentKey{database.PoolOf(s.db), s.tables.Agents, statement.agentID})
		if err != nil {
			return false, err
		}
		defer leave()
	}

	err = s.run(ctx, func(tx *gorm.DB) (err error) {
		appended, err = statement.run(tx)

		return err
	})

	return appended, err
}

// usageAppend is the append of one entry to one agent.
type usageAppend struct {
	agents  clause.Table
	agentID string

	// entry is the JSON text of the entry, entryID its ID.
	entry   string
	entryID string

	// at is when the entry's tokens were consumed. Zero: now.
	at time.Time

	// runID is the run that consumed the tokens, out of what it holds reserved. Empty:
	// none.
	runID  string
	tokens int64
}

// run appends the entry, and reports whether it was not there yet.
func (a usageAppend) run(tx *gorm.DB) (appended bool, err error) {
	for range appendAttempts {
		written, err := database.Exec(tx, a.update())
		if err != nil || written > 0 {
			return err == nil, err
		}

		found, recorded, err := a.look(tx)

		switch {
		case err != nil:
			return false, err
		case !found:
			return false, ErrNotFound
		case recorded:
			return false, nil
		}
		// The agent was inserted between the two statements.
	}

	return false, fmt.Errorf("%w: the agent appears and disappears while usage is appended", fault.ErrContention)
}

// update is the one statement of an append.
//
// It has neither a CTE nor a FROM. After a wait for the row PostgreSQL evaluates SET and
// WHERE again on the row's new version, but would keep what it had read through
// those: entries would be lost.
func (a usageAppend) update() clause.Expression {
	at := expression(databaseMilliseconds)
	if !a.at.IsZero() {
		at = expression("least(?::bigint, "+databaseMilliseconds+")", a.at.UnixMilli())
	}

	settle := expression("")
	if a.runID != "" {
		settle = expression(`,
  reserved_tokens = CASE WHEN agent.run_id = ? THEN greatest(0, agent.reserved_tokens - ?::bigint) ELSE agent.reserved_tokens END`,
			a.runID, a.tokens)
	}

	return expression(`UPDATE ? AS agent
SET usage = `+boundedUsage+` || jsonb_build_array(?::jsonb || jsonb_build_object('at', ?)),
  updated_at = clock_timestamp()?
WHERE agent.agent_id = ? AND NOT ?`,
		a.agents, a.entry, at, settle, a.agentID, a.isRecorded())
}

// look tells an agent that is not there from an entry that is.
func (a usageAppend) look(tx *gorm.DB) (found, recorded bool, err error) {
	return queryFlag(tx, a.lookStatement())
}

func (a usageAppend) lookStatement() clause.Expression {
	return expression(database.Primary+"SELECT ? FROM ? AS agent WHERE agent.agent_id = ?", a.isRecorded(), a.agents, a.agentID)
}

func (a usageAppend) isRecorded() clause.Expression {
	return expression("agent.usage @> jsonb_build_array(jsonb_build_object('id', ?::text))", a.entryID)
}

// databaseMilliseconds is the database's clock as a usage entry has it. It is rounded up,
// so that no window ends before the entry's time.
const databaseMilliseconds = "ceil(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
