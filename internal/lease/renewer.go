package lease

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/run"
)

// A renewer has the connection and the statement. It belongs to the keeper's goroutine.
type renewer struct {
	length    time.Duration
	statement string
	connect   database.Connect

	connection *pgx.Conn

	// begins says that the database's default isolation is stricter than READ COMMITTED,
	// so that the statement needs a transaction to say otherwise.
	begins bool
}

// An answer is what became of one run's lease.
type answer struct {
	run run.Run

	// renewed says that the lease is whole again; held, of one that is not, that it was
	// not lost either: somebody else has the row locked.
	renewed, held bool
}

// RenewStatement renews every lease that it finds, in one statement however many there
// are. Its parameters are the agents' IDs and, in the same order, the runs'. Its rows are
// these again, whether the lease is whole now, and if not whether it is held all the same.
//
// It waits for nobody's row: that would hold up the other leases. SKIP LOCKED passes over
// what is locked, which the answer tells from what is lost. NO KEY is for rows that
// somebody's open transaction references by a foreign key: these are not in the way.
// The order is that of every other statement that locks several agents.
//
// A row that has changed since the statement's snapshot is looked at again in its newest
// version, with the clock of that moment. A lease that was over or revoked then stays so.
//
// Only the lease changes, which no index has, so that the update is heap-only.
func RenewStatement(quotedTable string, length time.Duration) string {
	return fmt.Sprintf(`WITH asked AS (
  SELECT agent_id, run_id FROM unnest($1::text[], $2::text[]) AS asked (agent_id, run_id)
), locked AS MATERIALIZED (
  SELECT agent.agent_id, agent.run_id FROM %[1]s AS agent
  WHERE agent.agent_id = ANY ($1::text[]) AND agent.status = 'running'
    AND (agent.agent_id, agent.run_id) IN (SELECT agent_id, run_id FROM asked)
    AND agent.lease_expires_at > clock_timestamp()
  ORDER BY agent.agent_id FOR NO KEY UPDATE SKIP LOCKED
), renewed AS (
  UPDATE %[1]s AS agent SET lease_expires_at = clock_timestamp() + %[2]d * interval '1 microsecond'
  FROM locked
  WHERE agent.agent_id = locked.agent_id AND agent.run_id = locked.run_id
    AND agent.status = 'running' AND agent.lease_expires_at > clock_timestamp()
  RETURNING agent.agent_id, agent.run_id
)
SELECT asked.agent_id, asked.run_id, renewed.run_id IS NOT NULL,
  coalesce(agent.run_id = asked.run_id AND agent.status = 'running' AND agent.lease_expires_at > clock_timestamp(), false)
FROM asked
LEFT JOIN renewed ON renewed.agent_id = asked.agent_id AND renewed.run_id = asked.run_id
LEFT JOIN %[1]s AS agent ON agent.agent_id = asked.agent_id`, quotedTable, length.Microseconds())
}

// renew renews the leases, on a new connection if there is none, or if the one that there
// is has been lost since it was last used, as where the server ends sessions that are idle.
// It takes no longer than a third of a lease, so that there is time for another attempt.
func (r *renewer) renew(ctx context.Context, runs []run.Run) (answers []answer, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.length/3)
	defer cancel()

	used := r.connection != nil

	answers, err = r.attempt(ctx, runs)
	if used && database.Retryable(err) {
		return r.attempt(ctx, runs)
	}

	return answers, err
}

func (r *renewer) attempt(ctx context.Context, runs []run.Run) (answers []answer, err error) {
	if r.connection == nil {
		if r.connection, err = r.connect(ctx); err != nil {
			r.connection = nil

			return nil, err
		}
	}

	answers, err = r.ask(ctx, runs)
	if err != nil {
		r.begins = r.begins || database.HasCode(err, database.CodeSerializationFailure)
		r.close()

		return nil, fmt.Errorf("renew leases: %w", err)
	}

	return answers, nil
}

func (r *renewer) ask(ctx context.Context, runs []run.Run) (answers []answer, err error) {
	agentIDs := make([]string, len(runs))
	runIDs := make([]string, len(runs))

	for i, one := range runs {
		agentIDs[i], runIDs[i] = one.AgentID, one.ID
	}

	err = r.execute(ctx, func(query queryer) error {
		rows, err := query.Query(ctx, r.statement, agentIDs, runIDs)
		if err != nil {
			return err
		}

		var one answer

		into := []any{&one.run.AgentID, &one.run.ID, &one.renewed, &one.held}
		_, err = pgx.ForEachRow(rows, into, func() error {
			answers = append(answers, one)

			return nil
		})

		return err //nolint:wrapcheck // renew says what failed
	})
	if err == nil && len(answers) != len(runs) {
		err = errUnanswered
	}

	return answers, err
}

type queryer interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func (r *renewer) execute(ctx context.Context, body func(queryer) error) error {
	if !r.begins {
		return body(r.connection)
	}

	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted}

	return pgx.BeginTxFunc(ctx, r.connection, options, func(tx pgx.Tx) error { return body(tx) }) //nolint:wrapcheck // renew says what failed
}

// close closes the connection. What it was doing is of no interest any more.
func (r *renewer) close() {
	if r.connection == nil {
		return
	}

	ctx, cancel := context.WithTimeout(context.Background(), min(time.Second, r.length/3))
	defer cancel()

	_ = r.connection.Close(ctx)
	r.connection = nil
}

var errUnanswered = errors.New("legion: a renewal left leases without an answer")
