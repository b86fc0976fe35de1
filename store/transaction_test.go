package store_test

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

var errTaken = errors.New("taken back")

// With one connection, a method that left the transaction would wait for ever.
func TestEveryMethodJoinsTheCallersTransaction(t *testing.T) {
	t.Parallel()

	b := setupAgent(t, pgtest.MaxOpenConnections(1))
	b.insertDeleted(t, "deleted")
	b.exec(t, `INSERT INTO legion_agents_identities (identity) VALUES ('{"a": 1}')`)
	before := b.row(t, agentID)
	ctx := t.Context()

	for _, options := range []*gorm.Session{{}, {PrepareStmt: true}, {DisableNestedTransaction: true}} {
		err := b.db.Session(options).Transaction(func(tx *gorm.DB) error {
			agents := store.For[models.LegionAgent](tx)

			require.NoError(t, agents.Save(ctx, store.Patch{AgentID: agentID, AgentType: pointer("chat")}))
			require.NoError(t, agents.Save(ctx, store.Patch{AgentID: "new"}))

			appended, err := agents.AppendUsage(ctx, agentID, models.Usage{At: time.UnixMilli(1)})
			require.NoError(t, err)
			require.True(t, appended)

			agent, err := agents.Get(ctx, agentID)
			require.NoError(t, err)
			require.Equal(t, "chat", *agent.AgentType)

			result, err := agents.Prune(ctx, time.Now().Add(-time.Hour))
			require.NoError(t, err)
			require.Equal(t, store.PruneResult{Agents: 1, UsageEntries: 1, Identities: 1}, result)

			require.NoError(t, agents.Delete(ctx, agentID))
			require.ErrorIs(t, agents.Delete(ctx, agentID), store.ErrNotFound)

			list, err := agents.List(ctx, 10)
			require.NoError(t, err)
			require.Equal(t, []string{"new"}, ids(list))

			return errTaken
		})
		require.ErrorIs(t, err, errTaken)

		require.Equal(t, before, b.row(t, agentID))
		require.EqualValues(t, 2, b.count(t, "legion_agents"))
		require.EqualValues(t, 1, b.count(t, "legion_agents_identities"))
	}
}

func TestOurOwnErrorsLeaveTheCallersTransactionUsable(t *testing.T) {
	t.Parallel()

	b := setupAgent(t, pgtest.MaxOpenConnections(1))
	b.set(t, agentID, map[string]any{"status": "running", "run_id": "run", "lease_expires_at": inHours(1)})

	require.NoError(t, b.db.Transaction(func(tx *gorm.DB) error {
		agents := store.For[models.LegionAgent](tx)

		require.ErrorIs(t, agents.Save(t.Context(), store.Patch{AgentID: agentID, Status: pointer(models.StatusIdle)}), store.ErrAgentRunning)
		require.ErrorIs(t, agents.Delete(t.Context(), "absent"), store.ErrNotFound)

		_, err := agents.AppendUsage(t.Context(), "absent", models.Usage{})
		require.ErrorIs(t, err, store.ErrNotFound)

		_, err = agents.Prune(t.Context(), time.Now().Add(time.Hour))
		require.ErrorIs(t, err, store.ErrInvalidArgument)

		return agents.Save(t.Context(), store.Patch{AgentID: agentID, AgentType: pointer("written")})
	}))
	require.Equal(t, "written", *b.row(t, agentID).AgentType)
}

func TestAConflictInTheCallersTransactionIsTheCallersToRetry(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)

	err := b.db.Transaction(func(tx *gorm.DB) error {
		agents := store.For[models.LegionAgent](tx)
		if _, err := agents.Get(t.Context(), agentID); err != nil {
			return err
		}

		// After the snapshot of the transaction.
		require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: agentID, AgentType: pointer("chat")}))

		_, err := agents.AppendUsage(t.Context(), agentID, models.Usage{TotalTokens: 1})

		return err
	}, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	require.True(t, database.HasCode(err, database.CodeSerializationFailure), err)
	require.True(t, database.Retryable(err))
	require.Empty(t, b.usage(t, agentID))
}

// A db captured outside of a transaction that has the only connection.
func TestWaitingForAConnectionEnds(t *testing.T) {
	t.Parallel()

	b := setupAgent(t, pgtest.MaxOpenConnections(1))
	require.NoError(t, b.db.Use(plugin{database.Settings{ConnectionTimeout: 50 * time.Millisecond}}))

	for _, db := range []*gorm.DB{b.db, b.db.Session(&gorm.Session{PrepareStmt: true})} {
		agents := store.For[models.LegionAgent](db)

		require.NoError(t, b.db.Transaction(func(*gorm.DB) error {
			for name, err := range everyMethod(t, agents) {
				require.ErrorIs(t, err, store.ErrNoConnection, name)
				require.ErrorContains(t, err, "pass the hook's tx", name)
			}

			return nil
		}))

		_, err := agents.Get(t.Context(), agentID)
		require.NoError(t, err, "the pool is as it was")
	}
}

func TestWaitingForAConnectionEndsWithTheContext(t *testing.T) {
	t.Parallel()

	b := setupAgent(t, pgtest.MaxOpenConnections(1))

	require.NoError(t, b.db.Transaction(func(*gorm.DB) error {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()

		_, err := b.agents.Get(ctx, agentID)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, store.ErrNoConnection)

		return nil
	}))
}

// The bound is on the wait for a connection, not on the statement.
func TestAStatementMayTakeLongerThanTheWaitForAConnection(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	require.NoError(t, b.db.Use(plugin{database.Settings{ConnectionTimeout: time.Second}}))

	agents := store.For[models.LegionAgent](b.db)
	result := make(chan error, 1)

	require.NoError(t, b.db.Transaction(func(tx *gorm.DB) error {
		require.NoError(t, tx.Exec(`SELECT FROM legion_agents FOR UPDATE`).Error)

		go func() { result <- agents.Save(t.Context(), store.Patch{AgentID: agentID, AgentType: pointer("chat")}) }()
		b.waitUntilBlocked(t, 1)
		time.Sleep(1200 * time.Millisecond)

		return nil
	}))
	require.NoError(t, <-result)
}

func TestAppendsToABusyAgentLeaveThePoolToOthers(t *testing.T) {
	t.Parallel()

	b := setupAgent(t, pgtest.MaxOpenConnections(4))
	require.NoError(t, b.db.Use(plugin{database.Settings{ConnectionTimeout: 2 * time.Second}}))

	agents := store.For[models.LegionAgent](b.db)
	results := make(chan error, 20)

	require.NoError(t, b.db.Transaction(func(tx *gorm.DB) error {
		require.NoError(t, tx.Exec(`SELECT FROM legion_agents FOR UPDATE`).Error)

		for range cap(results) {
			go func() {
				_, err := agents.AppendUsage(t.Context(), agentID, models.Usage{})
				results <- err
			}()
		}

		b.waitUntilBlocked(t, 1)

		_, err := agents.Get(t.Context(), agentID)
		require.NoError(t, err)

		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()

		_, err = agents.AppendUsage(ctx, agentID, models.Usage{})
		require.ErrorIs(t, err, context.DeadlineExceeded)

		return nil
	}))

	for range cap(results) {
		require.NoError(t, <-results)
	}

	require.Len(t, b.usage(t, agentID), cap(results))
}

func TestALostConnectionIsReplaced(t *testing.T) {
	t.Parallel()

	for _, method := range []string{"Get", "List", "Save", "AppendUsage", "Delete", "Prune"} {
		t.Run(method, func(t *testing.T) {
			t.Parallel()

			b := setupAgent(t, pgtest.MaxOpenConnections(1))

			// The server ends the connection when the method's first statement has begun.
			once := loseOnce(t, b.db, "before", func(db *gorm.DB) {
				_, err := db.Statement.ConnPool.ExecContext(db.Statement.Context, "SELECT pg_terminate_backend(pg_backend_pid())")
				require.Error(t, err)
			})

			require.NoError(t, everyMethod(t, b.agents)[method])
			require.True(t, *once)
		})
	}
}

// The statement was committed and the reply to it was lost.
func TestALostReplyIsNoError(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	loseReply := func() *bool {
		return loseOnce(t, b.db, "after", func(db *gorm.DB) { _ = db.AddError(io.ErrUnexpectedEOF) })
	}

	lost := loseReply()
	_, err := b.agents.AppendUsage(t.Context(), agentID, models.Usage{TotalTokens: 1})
	require.NoError(t, err)
	require.True(t, *lost)
	require.Len(t, b.usage(t, agentID), 1)

	lost = loseReply()
	require.NoError(t, b.agents.Save(t.Context(), store.Patch{AgentID: agentID, Status: pointer(models.StatusIdle)}))
	require.True(t, *lost)

	lost = loseReply()
	require.NoError(t, b.agents.Delete(t.Context(), agentID))
	require.True(t, *lost)
	require.True(t, b.row(t, agentID).DeletedAt.Valid)

	lost = loseReply()
	require.ErrorIs(t, b.agents.Delete(t.Context(), "absent"), store.ErrNotFound)
	require.True(t, *lost)
}

// loseOnce calls lose with the next statement of db, before or after it is run.
func loseOnce(t *testing.T, db *gorm.DB, when string, lose func(*gorm.DB)) *bool {
	t.Helper()

	lost := false
	callback := func(db *gorm.DB) {
		if !lost && db.Error == nil {
			lost = true
			lose(db)
		}
	}

	callbacks := db.Callback()
	if when == "before" {
		require.NoError(t, callbacks.Raw().Before("gorm:raw").Replace("test:lose", callback))
		require.NoError(t, callbacks.Row().Before("gorm:row").Replace("test:lose", callback))
		require.NoError(t, callbacks.Query().Before("gorm:query").Replace("test:lose", callback))
	} else {
		require.NoError(t, callbacks.Raw().After("gorm:raw").Replace("test:lose", callback))
	}

	return &lost
}

// Where the database's default is stricter than READ COMMITTED, writers of one row would
// fail one another.
func TestAStricterDefaultIsolationIsNoObstacle(t *testing.T) {
	t.Parallel()

	dsn := pgtest.Database(t)
	setupDSN(t, dsn)

	b := bundle{db: pgtest.OpenDSN(t, pgtest.WithParameter(dsn, "default_transaction_isolation", "serializable"))}
	processes := b.processes(t, 8, pgtest.MaxOpenConnections(1))

	inParallel(t, len(processes), func(number int) error {
		for range 10 {
			if err := processes[number].agents.Save(t.Context(), store.Patch{AgentID: agentID, AgentType: pointer("chat")}); err != nil {
				return err
			}

			if _, err := processes[number].agents.AppendUsage(t.Context(), agentID, models.Usage{}); err != nil {
				return err
			}
		}

		return nil
	})

	require.Len(t, b.usage(t, agentID), 80)

	_, err := processes[0].agents.Prune(t.Context(), time.Now().Add(-time.Hour))
	require.NoError(t, err)
}

// message is a model whose hooks use the store.
type message struct {
	ID   int
	Text string
}

func (m *message) BeforeCreate(tx *gorm.DB) error {
	return store.For[models.LegionAgent](tx).Save(tx.Statement.Context, store.Patch{AgentID: agentID, AgentType: &m.Text})
}

func (m *message) AfterCreate(tx *gorm.DB) error {
	agents := store.For[models.LegionAgent](tx)
	ctx := tx.Statement.Context

	if _, err := agents.AppendUsage(ctx, agentID, models.Usage{TotalTokens: int64(len(m.Text))}); err != nil {
		return err
	}

	if _, err := agents.Get(ctx, agentID); err != nil {
		return err
	}

	if _, err := agents.List(ctx, 10); err != nil {
		return err
	}

	_, err := agents.Prune(ctx, time.Now().Add(-time.Hour))

	return err
}

// In a hook the db carries the outer statement, its table, its clauses and its SQL.
func TestTheStoreWorksInHooks(t *testing.T) {
	t.Parallel()

	for name, session := range map[string]*gorm.Session{
		"in the default transaction":      {},
		"without the default transaction": {SkipDefaultTransaction: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			require.NoError(t, b.db.AutoMigrate(&message{}))

			db := b.db.Session(session)
			require.NoError(t, db.Create(&message{Text: "hello"}).Error)

			agent := b.row(t, agentID)
			require.Equal(t, "hello", *agent.AgentType)
			require.EqualValues(t, 5, b.usage(t, agentID)[0].TotalTokens)

			require.ErrorIs(t, db.Transaction(func(tx *gorm.DB) error {
				require.NoError(t, tx.Create(&message{Text: "goodbye"}).Error)

				return errTaken
			}), errTaken)
			require.Equal(t, agent, b.row(t, agentID))
		})
	}
}

func TestAChainedDBLeavesNothingInOurStatements(t *testing.T) {
	t.Parallel()

	b := setupAgent(t)
	chained := b.db.Table("elsewhere").Where("nothing = 1").Order("nothing").Limit(0).Unscoped()

	for name, err := range everyMethod(t, store.For[models.LegionAgent](chained)) {
		require.NoError(t, err, name)
	}
}
