package limiter_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/internal/testhook"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// note is a table of the application's own.
type note struct {
	ID   int64
	Text string
}

// setupNotes is setup with the application's own table.
func setupNotes(t *testing.T, options ...gorm.Option) *gorm.DB {
	t.Helper()

	db := setup(t, options...)
	require.NoError(t, db.AutoMigrate(&note{}))

	return db
}

// locksOf are the locks that the transaction holds because of us: advisory ones, and
// those on our tables and rows.
func locksOf(t *testing.T, tx *gorm.DB) []string {
	t.Helper()

	var locks []string

	require.NoError(t, tx.Raw(`
SELECT concat_ws(' ', lock.locktype, relation.relname, lock.mode)
FROM pg_locks AS lock LEFT JOIN pg_class AS relation ON relation.oid = lock.relation
WHERE lock.pid = pg_backend_pid() AND (lock.locktype IN ('advisory', 'tuple') OR relation.relname LIKE 'legion%')`).Scan(&locks).Error)

	return locks
}

func TestACallJoinsTheCallersTransaction(t *testing.T) {
	t.Parallel()

	// With one connection, a call that went past the transaction would wait for ever.
	db := setupNotes(t, pgtest.MaxOpenConnections(1))
	outside := pgtest.OpenDSN(t, pgtest.DSN(db))

	require.NoError(t, db.WithContext(impatient(t)).Transaction(func(tx *gorm.DB) error {
		require.NoError(t, limiter.Enforce(tx, "agent", maxAgents(tenant, 1)))
		require.NoError(t, tx.Create(&note{Text: "beside"}).Error)

		require.Equal(t, []string{"agent"}, agentIDs(t, tx))
		require.Empty(t, agentIDs(t, outside))
		require.NotEmpty(t, locksOf(t, tx), "held until the end of the transaction")

		// It counts what the transaction itself has admitted.
		requireDenied(t, limiter.Enforce(tx, "another", maxAgents(tenant, 1)), limiter.LimitAgents)

		return limiter.Enforce(tx, "agent", maxAgents(tenant, 1))
	}))

	require.Equal(t, []string{"agent"}, agentIDs(t, outside))
	require.Empty(t, locksOf(t, db))
}

func TestACallOnADedicatedConnectionUsesIt(t *testing.T) {
	t.Parallel()

	db := setup(t, pgtest.MaxOpenConnections(1))
	require.NoError(t, db.WithContext(impatient(t)).Connection(func(dedicated *gorm.DB) error {
		require.NoError(t, limiter.Enforce(dedicated, "first", maxRunning(tenant, 1)))
		requireDenied(t, limiter.Enforce(dedicated, "second", maxRunning(tenant, 1)), limiter.LimitRunningAgents)

		return limiter.Release(dedicated, "first")
	}))
	require.Equal(t, []string{"first"}, agentIDs(t, db))
}

func TestAnAdmissionInACallersTransactionIsOrderedWithOthers(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

	tx := begin(t, db)
	require.NoError(t, limiter.Enforce(tx, "second", maxAgents(tenant, 2)))

	verdict := inBackground(func() error { return limiter.Enforce(db, "third", maxAgents(tenant, 2)) })

	waitForLockWaiters(t, db, 1)
	require.NoError(t, tx.Commit().Error)
	requireDenied(t, <-verdict, limiter.LimitAgents)
}

func TestARollbackTakesTheAdmissionBack(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "moving", recordOnly(otherTenant)))
	before := snapshot(t, db)

	tx := begin(t, db)
	require.NoError(t, limiter.Enforce(tx, "moving", maxRunning(tenant, 2)))
	require.NoError(t, limiter.Enforce(tx, "new", maxRunning(tenant, 2)))
	require.NoError(t, tx.Rollback().Error)
	require.Equal(t, before, snapshot(t, db))

	// Also back to a savepoint of the caller's, nested by GORM or made by hand.
	tx = begin(t, db)
	require.ErrorIs(t, tx.Transaction(func(nested *gorm.DB) error {
		require.NoError(t, limiter.Enforce(nested, "new", maxAgents(tenant, 1)))

		return errTakeBack
	}), errTakeBack)
	require.NoError(t, tx.SavePoint("by_hand").Error)
	require.NoError(t, limiter.Enforce(tx, "newer", maxAgents(tenant, 1)))
	require.NoError(t, tx.RollbackTo("by_hand").Error)
	require.NoError(t, limiter.Enforce(tx, "newest", maxAgents(tenant, 1)))
	require.NoError(t, tx.Commit().Error)
	require.Equal(t, []string{"moving", "newest"}, agentIDs(t, db))
}

func TestAnErrorLeavesTheTransactionUsableAndWithoutLocks(t *testing.T) {
	t.Parallel()

	configs := map[string]*gorm.Config{
		"by default":               {},
		"DisableNestedTransaction": {DisableNestedTransaction: true},
		"SkipDefaultTransaction":   {SkipDefaultTransaction: true},
		"PrepareStmt":              withPrepareStmt(),
		"TranslateError":           {TranslateError: true},
	}

	failures := map[string]struct {
		rules  []limiter.Rule
		target error
	}{
		"a denial":                       {[]limiter.Rule{recordOnly(member), maxRunning(tenant, 9), maxAgents(tenant, 1)}, limiter.ErrExceeded},
		"a denial of a first use":        {[]limiter.Rule{maxTokens(otherTenant, 0)}, limiter.ErrExceeded},
		"an invalid rule":                {nil, limiter.ErrInvalidRule},
		"an error of the database":       {[]limiter.Rule{recordOnly(tenant)}, nil},
		"one of the database, first use": {[]limiter.Rule{recordOnly(otherTenant)}, nil},
	}

	for name, config := range configs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setupNotes(t, config)
			require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))
			// What fails last in the protocol: the row is refused.
			require.NoError(t, db.Exec("ALTER TABLE legion_agents ADD CONSTRAINT refused CHECK (agent_id <> 'refused')").Error)

			before := snapshot(t, db)

			for name, failure := range failures {
				agentID := "agent"
				if failure.target == nil {
					agentID = "refused"
				}

				require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
					require.NoError(t, tx.Create(&note{Text: name}).Error)

					err := limiter.Enforce(tx, agentID, failure.rules...)
					require.Error(t, err)

					if failure.target != nil {
						require.ErrorIs(t, err, failure.target, name)
					}

					require.Empty(t, locksOf(t, tx), name)

					// Others go on with the same agent and the same groups, first uses included,
					// while this transaction is open.
					elsewhere := begin(t, db.WithContext(impatient(t)))
					require.NoError(t, limiter.Enforce(elsewhere, "agent", recordOnly(tenant), recordOnly(limiter.Identity{"ip": name})))
					require.NoError(t, elsewhere.Rollback().Error)

					return tx.Create(&note{Text: name + ", after"}).Error
				}), name)
			}

			require.Equal(t, before, snapshot(t, db))

			var notes int64

			require.NoError(t, db.Model(&note{}).Count(&notes).Error)
			require.EqualValues(t, 2*len(failures), notes)
		})
	}
}

func TestAnEndedContextLeavesTheTransactionUsable(t *testing.T) {
	t.Parallel()

	for _, point := range []testhook.Point{testhook.FieldLocks, testhook.IdentityLocks, testhook.Measured} {
		t.Run(string(point), func(t *testing.T) {
			t.Parallel()

			db := setupNotes(t)
			require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

			tx := begin(t, db)
			require.NoError(t, tx.Create(&note{Text: "before"}).Error)

			ctx, cancel := context.WithCancel(t.Context())
			ctx = testhook.With(ctx, testhook.Hooks{At: func(at testhook.Point) {
				if at == point {
					cancel()
				}
			}})

			require.ErrorIs(t, limiter.Enforce(tx.WithContext(ctx), "agent", maxAgents(tenant, 5)), context.Canceled)
			require.Empty(t, locksOf(t, tx))
			require.NoError(t, limiter.Enforce(tx, "agent", maxAgents(tenant, 5)))
			require.NoError(t, tx.Commit().Error)
			require.Equal(t, []string{"agent", "first"}, agentIDs(t, db))
		})
	}
}

func TestTransactionsThatCountFromAnOldSnapshotAreRefused(t *testing.T) {
	t.Parallel()

	db := setupNotes(t)
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

	for level, allowed := range map[sql.IsolationLevel]bool{
		sql.LevelDefault:         true,
		sql.LevelReadUncommitted: true,
		sql.LevelReadCommitted:   true,
		sql.LevelRepeatableRead:  false,
		sql.LevelSerializable:    false,
	} {
		tx := begin(t, db, &sql.TxOptions{Isolation: level})

		err := limiter.Enforce(tx, "agent", maxAgents(tenant, 5))
		if allowed {
			require.NoError(t, err, level)
		} else {
			require.ErrorIs(t, err, limiter.ErrIsolation, level)
			require.NotErrorIs(t, err, limiter.ErrExceeded)
			require.False(t, limiter.Retryable(err))
			require.ErrorContains(t, err, "sql.LevelReadCommitted", "the remedy")
			require.Empty(t, locksOf(t, tx))
			require.NoError(t, tx.Create(&note{Text: "after"}).Error)
		}

		require.NoError(t, tx.Rollback().Error)
	}
}

func TestAReadOnlyTransactionIsAnError(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

	before := snapshot(t, db)

	for _, identity := range []limiter.Identity{tenant, otherTenant} {
		tx := begin(t, db, &sql.TxOptions{ReadOnly: true})
		err := limiter.Enforce(tx, "agent", maxRunning(identity, 1))
		require.ErrorContains(t, err, "read-only transaction")
		require.NotErrorIs(t, err, limiter.ErrExceeded)
		require.Empty(t, locksOf(t, tx))
		require.NoError(t, tx.Commit().Error)
	}

	require.Equal(t, before, snapshot(t, db))
}

func TestOwnTransactionsAreReadCommittedWhateverTheDefault(t *testing.T) {
	t.Parallel()

	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()

			dsn := pgtest.WithParameter(pgtest.Database(t), "default_transaction_isolation", level)
			db := pgtest.OpenDSN(t, dsn)
			require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))

			rule := maxRunning(tenant, 1)
			require.NoError(t, limiter.Enforce(db, "agent", rule))
			requireDenied(t, limiter.Enforce(db, "another", rule), limiter.LimitRunningAgents)
			require.NoError(t, limiter.Release(db, "agent"))

			require.ErrorIs(t, limiter.Enforce(begin(t, db), "another", rule), limiter.ErrIsolation)
			require.NoError(t, limiter.Enforce(begin(t, db, &sql.TxOptions{Isolation: sql.LevelReadCommitted}), "another", rule))
		})
	}
}

func TestSavepointsDoNotAccumulate(t *testing.T) {
	t.Parallel()

	db := setup(t)
	recorded, statements := openRecorded(t, db)

	tx := begin(t, recorded)
	require.NoError(t, tx.SavePoint("legion").Error)

	for _, identity := range []limiter.Identity{tenant, member, otherTenant} {
		require.NoError(t, limiter.Enforce(tx, "agent", maxAgents(identity, 1)), "a first use, which starts again")
		require.NoError(t, limiter.Enforce(tx, "agent", maxAgents(identity, 1)))
		requireDenied(t, limiter.Enforce(tx, "another", maxAgents(identity, 1)), limiter.LimitAgents)
	}

	commands := statements.commands()
	require.Equal(t, 1+3*3, count(commands, "savepoint"))
	require.Equal(t, 3*3, count(commands, "release"))

	// What is left is the caller's own, though it has the name of ours.
	require.NoError(t, tx.RollbackTo("legion").Error)
	require.Empty(t, agentIDs(t, tx))
	require.NoError(t, tx.Exec("RELEASE SAVEPOINT legion").Error)
	require.ErrorContains(t, tx.Exec("RELEASE SAVEPOINT legion").Error, "3B001")
}

func count(values []string, wanted string) (found int) {
	for _, value := range values {
		if value == wanted {
			found++
		}
	}

	return found
}

func TestAPanicOfTheCallerTakesTheAdmissionBack(t *testing.T) {
	t.Parallel()

	db := setup(t, pgtest.MaxOpenConnections(1))

	require.PanicsWithValue(t, "the caller's", func() {
		_ = db.Transaction(func(tx *gorm.DB) error {
			require.NoError(t, limiter.Enforce(tx, "agent", maxAgents(tenant, 1)))
			panic("the caller's")
		})
	})

	require.Empty(t, agentIDs(t, db))
	require.NoError(t, limiter.Enforce(db.WithContext(impatient(t)), "another", maxAgents(tenant, 1)))
}

func TestAPanicInsideACallUndoesItAndNoMore(t *testing.T) {
	t.Parallel()

	db := setupNotes(t, pgtest.MaxOpenConnections(1))
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

	panicking := testhook.With(t.Context(), testhook.Hooks{At: func(point testhook.Point) {
		if point == testhook.Recorded {
			panic("inside")
		}
	}})

	tx := begin(t, db)
	require.NoError(t, tx.Create(&note{Text: "before"}).Error)
	require.PanicsWithValue(t, "inside", func() { _ = limiter.Enforce(tx.WithContext(panicking), "agent", recordOnly(tenant)) })
	require.Empty(t, locksOf(t, tx))
	require.NoError(t, tx.Commit().Error)
	require.Equal(t, []string{"first"}, agentIDs(t, db))

	// In a transaction of its own the one connection comes back, without locks.
	require.PanicsWithValue(t, "inside", func() { _ = limiter.Enforce(db.WithContext(panicking), "agent", recordOnly(tenant)) })
	require.NoError(t, limiter.Enforce(db.WithContext(impatient(t)), "agent", recordOnly(tenant)))
}

func TestATransactionThatIsOverOrAbortedIsAnError(t *testing.T) {
	t.Parallel()

	db := setup(t)
	require.NoError(t, limiter.Enforce(db, "first", recordOnly(tenant)))

	aborted := begin(t, db)
	require.Error(t, aborted.Exec("SELECT 1/0").Error)

	committed := db.Begin()
	require.NoError(t, committed.Commit().Error)

	before := snapshot(t, db)

	for _, tx := range []*gorm.DB{aborted, committed} {
		for _, identity := range []limiter.Identity{tenant, otherTenant} {
			err := limiter.Enforce(tx, "agent", recordOnly(identity))
			require.Error(t, err)
			require.NotErrorIs(t, err, limiter.ErrExceeded)
			require.Error(t, limiter.Release(tx, "first"))
		}
	}

	require.NoError(t, aborted.Rollback().Error)
	require.Equal(t, before, snapshot(t, db))
}

// chat is a model of the application's own, whose hook asks for admission.
type chat struct {
	ID      int64
	AgentID string
	Tenant  string
}

func (c *chat) BeforeCreate(tx *gorm.DB) error {
	// With a context of its own tx carries what the outer statement has been given.
	return limiter.Enforce(tx.WithContext(tx.Statement.Context), c.AgentID, maxAgents(limiter.Identity{"tenant": c.Tenant}, 1))
}

func TestAHookOfTheApplicationsModel(t *testing.T) {
	t.Parallel()

	for name, config := range map[string]*gorm.Config{
		"by default":     {},
		"PrepareStmt":    withPrepareStmt(),
		"TranslateError": {TranslateError: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setup(t, config, pgtest.MaxOpenConnections(1))
			require.NoError(t, db.AutoMigrate(&chat{}))

			db = db.WithContext(impatient(t))
			require.NoError(t, db.Create(&chat{AgentID: "first", Tenant: "acme"}).Error)
			requireDenied(t, db.Create(&chat{AgentID: "second", Tenant: "acme"}).Error, limiter.LimitAgents)
			require.NoError(t, db.Create(&chat{AgentID: "first", Tenant: "acme"}).Error)

			// One of a batch that is denied takes the others back.
			requireDenied(t, db.Create([]*chat{{AgentID: "third", Tenant: "globex"}, {AgentID: "fourth", Tenant: "acme"}}).Error, limiter.LimitAgents)
			require.Equal(t, []string{"first"}, agentIDs(t, db))

			var chats int64

			require.NoError(t, db.Model(&chat{}).Count(&chats).Error)
			require.EqualValues(t, 2, chats)
		})
	}
}

func TestAHookOutsideATransaction(t *testing.T) {
	t.Parallel()

	db := setup(t, &gorm.Config{SkipDefaultTransaction: true})
	require.NoError(t, db.AutoMigrate(&chat{}))

	// The statement that the hook runs in has conditions and a limit.
	create := func(agentID string) error {
		return db.Where("agent_id = ?", agentID).Attrs(&chat{AgentID: agentID, Tenant: "acme"}).FirstOrCreate(&chat{}).Error
	}
	require.NoError(t, create("first"))
	require.NoError(t, create("first"))
	requireDenied(t, create("second"), limiter.LimitAgents)
	require.Equal(t, []string{"first"}, agentIDs(t, db))
}

func TestWhatTheSessionCarriesDoesNotReachOurStatements(t *testing.T) {
	t.Parallel()

	db := setupNotes(t)
	carrying := db.Model(&note{}).Table("notes").Select("text").Where("1 = 0").Order("id").Limit(1).
		Clauses(clause.OnConflict{DoNothing: true}, clause.Returning{}).Set("gorm:insert_option", "nonsense")

	require.NoError(t, limiter.Enforce(carrying, "first", maxRunning(tenant, 1)))
	requireDenied(t, limiter.Enforce(carrying, "second", maxRunning(tenant, 1)), limiter.LimitRunningAgents)
	require.NoError(t, limiter.Release(carrying, "first"))
	require.NoError(t, limiter.Enforce(carrying, "second", maxRunning(tenant, 1)))

	// Nor does anything of ours reach its own.
	var texts []string

	require.NoError(t, carrying.Find(&texts).Error)
	require.Empty(t, texts)
}

func TestADryRunValidatesAndDoesNotTouchTheDatabase(t *testing.T) {
	t.Parallel()

	dry := setupUnreachable(t).Session(&gorm.Session{DryRun: true})

	decision, err := limiter.Admit(dry, "agent", maxAgents(tenant, 0))
	require.NoError(t, err)
	require.Equal(t, []limiter.Quota{{Limit: limiter.LimitAgents}}, decision.Rules[0].Quotas)
	require.ErrorIs(t, limiter.Enforce(dry, "agent", maxAgents(nil, 1)), limiter.ErrInvalidRule)
	require.ErrorIs(t, limiter.Enforce(dry, "", maxAgents(tenant, 1)), limiter.ErrInvalidAgentID)
}
