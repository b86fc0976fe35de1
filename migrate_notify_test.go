package legion_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

var update = flag.Bool("update", false, "rewrite the golden SQL in testdata")

// watcher is a watch whose events a test takes.
type watcher struct {
	mutex  sync.Mutex
	events []store.Event
	ends   int
	db     *gorm.DB
}

// watch returns when the watch listens.
func watch(t *testing.T, db *gorm.DB) *watcher {
	t.Helper()

	w := &watcher{db: db}
	ended := make(chan struct{})

	go func() {
		defer close(ended)

		for event, err := range store.For[models.LegionAgent](db).Watch(t.Context()) {
			if err != nil {
				return
			}

			w.mutex.Lock()
			w.events = append(w.events, event)
			w.mutex.Unlock()
		}
	}()

	t.Cleanup(func() { <-ended })
	require.Equal(t, []string{"missed"}, w.until(t, store.Event{Missed: true}))

	return w
}

// until takes the events up to this one, which it waits for, as IDs.
func (w *watcher) until(t *testing.T, last store.Event) (agentIDs []string) {
	t.Helper()
	require.Eventually(t, func() bool {
		w.mutex.Lock()
		defer w.mutex.Unlock()

		for i, event := range w.events {
			if event == last {
				for _, each := range w.events[:i+1] {
					agentIDs = append(agentIDs, name(each))
				}

				w.events = w.events[i+1:]

				return true
			}
		}

		return false
	}, time.Minute, 5*time.Millisecond, "no such event: %v", last)

	return agentIDs
}

func name(event store.Event) string {
	if event.Missed {
		return "missed"
	}

	return event.AgentID
}

// of returns the agents whose events come of what change does.
func (w *watcher) of(t *testing.T, change func() error) []string {
	t.Helper()
	require.NoError(t, change())

	// Events come in the order of the commits, so that of this one is the last.
	w.ends++
	last := fmt.Sprint("end-", w.ends)
	require.NoError(t, store.For[models.LegionAgent](w.db).Save(t.Context(), store.Patch{AgentID: last}))

	events := w.until(t, store.Event{AgentID: last})

	return events[:len(events)-1]
}

func TestEachWriteOfAnAgentIsToldAndNothingElse(t *testing.T) {
	t.Parallel()

	tenant := limiter.Rule{Identity: limiter.Identity{"tenant": "acme"}, Policy: limiter.Policy{Window: time.Hour}}
	other := limiter.Rule{Identity: limiter.Identity{"tenant": "globex"}, Policy: limiter.Policy{Window: time.Hour}}
	running := limiter.Rule{
		Identity: limiter.Identity{"tenant": "acme"},
		Policy:   limiter.Policy{Window: time.Hour, MaxRunningAgents: limiter.Max(1)},
	}
	idle := models.StatusIdle

	enforce := func(rules ...limiter.Rule) func(*testing.T, *gorm.DB) error {
		return func(_ *testing.T, db *gorm.DB) error { return limiter.Enforce(db, "a", rules...) }
	}
	save := func(patch store.Patch) func(*testing.T, *gorm.DB) error {
		return func(t *testing.T, db *gorm.DB) error {
			t.Helper()

			return store.For[models.LegionAgent](db).Save(t.Context(), patch)
		}
	}
	appendUsage := func(t *testing.T, db *gorm.DB) error {
		t.Helper()

		_, err := store.For[models.LegionAgent](db).AppendUsage(t.Context(), "a", models.Usage{ID: "request", At: time.Now().Add(-48 * time.Hour), TotalTokens: 7})

		return err
	}
	remove := func(t *testing.T, db *gorm.DB) error {
		t.Helper()

		return store.For[models.LegionAgent](db).Delete(t.Context(), "a")
	}
	prune := func(t *testing.T, db *gorm.DB) error {
		t.Helper()

		_, err := store.For[models.LegionAgent](db).Prune(t.Context(), time.Now().Add(-24*time.Hour))

		return err
	}
	run := func(statement string) func(*testing.T, *gorm.DB) error {
		return func(_ *testing.T, db *gorm.DB) error { return db.Exec(statement).Error }
	}
	renewed := "UPDATE legion_agents SET lease_expires_at = clock_timestamp(), "
	nothing := func(*testing.T, *gorm.DB) error { return nil }
	insert := run("INSERT INTO legion_agents (agent_id) VALUES ('a')")

	for name, test := range map[string]struct {
		before, change func(*testing.T, *gorm.DB) error
		told           string
	}{
		"a new agent is saved":                  {nothing, save(store.Patch{AgentID: "a"}), "a"},
		"its state is saved":                    {insert, save(store.Patch{AgentID: "a", ConversationState: []byte("state")}), "a"},
		"it is saved as idle":                   {enforce(running), save(store.Patch{AgentID: "a", Status: &idle}), "a"},
		"an empty patch":                        {insert, save(store.Patch{AgentID: "a"}), ""},
		"usage is appended":                     {insert, appendUsage, "a"},
		"usage that is there is appended":       {inOrder(insert, appendUsage), appendUsage, ""},
		"it is deleted":                         {insert, remove, "a"},
		"it is admitted for the first time":     {nothing, enforce(tenant), "a"},
		"it is admitted again, unchanged":       {enforce(tenant), enforce(tenant), ""},
		"it is moved":                           {enforce(tenant), enforce(other), "a"},
		"a slot is taken":                       {enforce(tenant), enforce(running), "a"},
		"a slot is renewed":                     {enforce(running), enforce(running), ""},
		"a slot is given back":                  {enforce(running), func(_ *testing.T, db *gorm.DB) error { return limiter.Release(db, "a") }, "a"},
		"no slot is given back":                 {insert, func(_ *testing.T, db *gorm.DB) error { return limiter.Release(db, "a") }, ""},
		"a slot whose lease is over is revoked": {enforce(running), run("UPDATE legion_agents SET lease_expires_at = NULL"), "a"},
		"a deleted agent is restored":           {inOrder(enforce(tenant), remove), enforce(tenant), "a"},
		"old usage is pruned":                   {inOrder(insert, appendUsage), prune, "a"},
		"nothing is pruned":                     {insert, prune, ""},
		"a deleted agent is pruned":             {run("INSERT INTO legion_agents (agent_id, deleted_at, updated_at) VALUES ('a', now() - interval '2 days', now() - interval '2 days')"), prune, "a"},
		"leases are renewed":                    {enforce(running), run("UPDATE legion_agents SET lease_expires_at = clock_timestamp() + interval '1 minute'"), ""},
		"it is written as it is":                {enforce(running), run("UPDATE legion_agents SET agent_type = agent_type, usage = usage"), ""},
		"a column of the application's":         {insert, run("UPDATE legion_agents SET application_column = '{}'"), "a"},
		"its ID is changed":                     {insert, run("UPDATE legion_agents SET agent_id = 'b'"), "a b"},
		"its lease and its run":                 {enforce(running), run(renewed + "run_id = 'run'"), "a"},
		"its lease and its reservation":         {enforce(running), run(renewed + "reserved_tokens = 1"), "a"},
		"its lease and its deletion":            {enforce(running), run(renewed + "deleted_at = now()"), "a"},
		"its lease and its time":                {enforce(running), run(renewed + "updated_at = now()"), "a"},
		"its lease and its status":              {enforce(running), run(renewed + "status = 'idle'"), "a"},
		"it is denied": {insert, func(t *testing.T, db *gorm.DB) error {
			t.Helper()
			require.ErrorIs(t, limiter.Enforce(db, "a", limiter.Rule{
				Identity: limiter.Identity{"tenant": "acme"}, Policy: limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(0)},
			}), limiter.ErrExceeded)

			return nil
		}, ""},
		"what is rolled back": {insert, func(t *testing.T, db *gorm.DB) error {
			t.Helper()
			require.ErrorIs(t, db.Transaction(func(tx *gorm.DB) error {
				require.NoError(t, save(store.Patch{AgentID: "a", ConversationState: []byte("state")})(t, tx))
				require.NoError(t, limiter.Enforce(tx, "b", tenant))

				return gorm.ErrInvalidTransaction
			}), gorm.ErrInvalidTransaction)

			return nil
		}, ""},
		"several writes of a transaction": {insert, func(t *testing.T, db *gorm.DB) error {
			t.Helper()

			return db.Transaction(func(tx *gorm.DB) error {
				require.NoError(t, limiter.Enforce(tx, "b", tenant))
				require.NoError(t, appendUsage(t, tx))

				return save(store.Patch{AgentID: "a", ConversationState: []byte("state")})(t, tx)
			})
		}, "b a"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, _ := setup(t)
			require.NoError(t, legion.Migrate(db, legion.WithNotify()))
			// A type that has no equality.
			require.NoError(t, db.Exec("ALTER TABLE legion_agents ADD COLUMN application_column json").Error)
			require.NoError(t, test.before(t, db))

			told := watch(t, db).of(t, func() error { return test.change(t, db) })
			require.Equal(t, strings.Fields(test.told), told)
		})
	}
}

func inOrder(steps ...func(*testing.T, *gorm.DB) error) func(*testing.T, *gorm.DB) error {
	return func(t *testing.T, db *gorm.DB) error {
		t.Helper()

		for _, step := range steps {
			require.NoError(t, step(t, db))
		}

		return nil
	}
}

// notifying describes the triggers and their functions.
func notifying(t *testing.T, db *gorm.DB) []string {
	t.Helper()

	return lines(t, db, `
		SELECT format('trigger %s %s %s %s', tgrelid::regclass, tgname, tgenabled, pg_trigger.xmin)
		FROM tables JOIN pg_trigger ON tgrelid = tables.oid WHERE NOT tgisinternal
		UNION ALL
		SELECT format('function %s %s', pg_proc.oid::regprocedure, pg_proc.xmin)
		FROM pg_proc JOIN pg_namespace ON pg_namespace.oid = pronamespace WHERE nspname IN ('public', 'audit', 'tenant')`)
}

func TestMigrateWithNotifyIsDoneOnce(t *testing.T) {
	t.Parallel()

	for name, more := range map[string][]legion.MigrateOption{
		"in one transaction":      nil,
		"with concurrent indexes": {legion.WithConcurrentIndexes()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			options := append([]legion.MigrateOption{legion.WithNotify()}, more...)
			db, statements := setup(t)
			require.NoError(t, db.Exec(olderTable).Error)
			require.NoError(t, legion.Migrate(db, more...))
			require.Empty(t, notifying(t, db), "without the option")

			require.NoError(t, legion.Migrate(db, options...))
			made := notifying(t, db)
			require.Len(t, made, 3)

			for _, options := range [][]legion.MigrateOption{options, more} {
				statements.take()
				require.NoError(t, legion.Migrate(db, options...))
				require.Len(t, statements.take(), 1)
				require.Equal(t, made, notifying(t, db))
			}

			require.NoError(t, legion.MigrateDown(db))
			require.Empty(t, notifying(t, db))
		})
	}
}

func TestMigrateWithNotifyMakesGoodWhatIsMissing(t *testing.T) {
	t.Parallel()

	for name, damage := range map[string]string{
		"a trigger":                 "DROP TRIGGER legion_notify ON legion_agents",
		"the other trigger":         "DROP TRIGGER legion_notify_update ON legion_agents",
		"a trigger is switched off": "ALTER TABLE legion_agents DISABLE TRIGGER legion_notify",
		"all":                       "DROP FUNCTION legion_agents_notify() CASCADE",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, _ := setup(t)
			require.NoError(t, legion.Migrate(db, legion.WithNotify()))
			require.NoError(t, db.Exec(damage).Error)

			for _, err := range store.For[models.LegionAgent](db).Watch(t.Context()) {
				require.ErrorIs(t, err, legion.ErrNotMigrated)
			}

			require.NoError(t, legion.Migrate(db, legion.WithNotify()))
			require.Equal(t, []string{"a"}, watch(t, db).of(t, func() error {
				return db.Exec("INSERT INTO legion_agents (agent_id) VALUES ('a')").Error
			}))
		})
	}
}

// withVersion makes the triggers' function one of another version, which does nothing.
func withVersion(t *testing.T, db *gorm.DB, version string) {
	t.Helper()
	require.NoError(t, db.Exec(`CREATE OR REPLACE FUNCTION legion_agents_notify() RETURNS trigger LANGUAGE plpgsql AS
		$$ -- Made by legion.WithNotify, version `+version+"\n"+`BEGIN RETURN NULL; END $$`).Error)
}

func TestMigrateWithNotifyReplacesAnOlderVersion(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	require.NoError(t, legion.Migrate(db, legion.WithNotify()))
	withVersion(t, db, "0")
	require.NoError(t, legion.Migrate(db, legion.WithNotify()))
	require.Equal(t, []string{"a"}, watch(t, db).of(t, func() error {
		return db.Exec("INSERT INTO legion_agents (agent_id) VALUES ('a')").Error
	}))
}

func TestMigrateWithNotifyLeavesANewerVersionAlone(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	require.NoError(t, legion.Migrate(db, legion.WithNotify()))
	withVersion(t, db, "99")

	newer := notifying(t, db)
	require.NoError(t, legion.Migrate(db, legion.WithNotify()))
	require.Equal(t, newer, notifying(t, db))
}

func TestMigrateWithNotifyAfterTheTableWasDropped(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	require.NoError(t, legion.Migrate(db, legion.WithNotify()))

	for _, again := range []func() error{
		func() error { return legion.Migrate(db, legion.WithNotify()) },
		func() error { return legion.MigrateDown(db) },
	} {
		require.NoError(t, db.Exec("DROP TABLE legion_agents, legion_agents_identities").Error)
		require.Len(t, notifying(t, db), 1, "the function is left")
		require.NoError(t, again())
	}

	require.Empty(t, notifying(t, db))
}

func TestAnApplicationGoesOnChangingTheColumnsOfATableThatNotifies(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	require.NoError(t, legion.Migrate(db, legion.WithNotify()))
	require.NoError(t, db.Exec("INSERT INTO legion_agents (agent_id) VALUES ('a')").Error)

	watcher := watch(t, db)

	for _, change := range []string{
		"ALTER TABLE legion_agents ADD COLUMN title int, ADD COLUMN other json",
		"ALTER TABLE legion_agents ALTER COLUMN title TYPE text",
		"ALTER TABLE legion_agents DROP COLUMN other",
	} {
		require.Empty(t, watcher.of(t, func() error { return db.Exec(change).Error }), change)
		require.Equal(t, []string{"a"}, watcher.of(t, func() error {
			return db.Exec("UPDATE legion_agents SET title = coalesce(title::text, '0')::int + 1 WHERE agent_id = 'a'").Error
		}), change)
	}
}

func TestMigrateKeepsAFunctionOfTheApplications(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	require.NoError(t, db.Exec("CREATE FUNCTION legion_agents_notify() RETURNS text LANGUAGE sql AS $$ SELECT 'mine' $$").Error)

	var server *pgconn.PgError

	require.ErrorAs(t, legion.Migrate(db, legion.WithNotify()), &server)
	require.Equal(t, "42723", server.Code)
	require.Empty(t, tableNames(t, db))

	require.NoError(t, legion.Migrate(db))
	require.NoError(t, legion.MigrateDown(db))
	require.Len(t, notifying(t, db), 1)
}

func TestMigrateWithNotifyByTenProcessesAtOnce(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	migrateInProcesses(t, pgtest.DSN(db), 10, false, childNotifyVariable+"=1")

	before := notifying(t, db)
	require.Len(t, before, 3)
	require.NoError(t, legion.Migrate(db, legion.WithNotify()))
	require.Equal(t, before, notifying(t, db))
}

func TestMigrateWithNotifyNeedsTheRightToCreateFunctions(t *testing.T) {
	t.Parallel()

	owner, _ := setup(t)

	var superuser bool
	require.NoError(t, owner.Raw("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").Scan(&superuser).Error)

	if !superuser {
		t.Skip("the server's role is no superuser, so it cannot become another role")
	}

	require.NoError(t, legion.Migrate(owner))
	require.NoError(t, owner.Exec("REVOKE CREATE ON SCHEMA public FROM PUBLIC; ALTER TABLE legion_agents OWNER TO pg_monitor").Error)

	application := pgtest.OpenDSN(t, pgtest.DSN(owner), pgtest.MaxOpenConnections(1))
	require.NoError(t, application.Exec("SET ROLE pg_monitor").Error)

	err := legion.Migrate(application, legion.WithNotify())
	require.ErrorIs(t, err, legion.ErrNotMigrated)
	require.ErrorContains(t, err, "legion.DDL, with the same options")
	require.Empty(t, notifying(t, owner))
	require.NoError(t, legion.Migrate(application))
}

func TestDDLWithNotify(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	require.NoError(t, db.Use(legion.New(legion.WithTable(`audit.My "agents"`))))

	without, err := legion.DDL(db)
	require.NoError(t, err)
	ddl, err := legion.DDL(db, legion.WithNotify())
	require.NoError(t, err)
	require.Equal(t, without, ddl[:len(without)])

	triggers := strings.Join(ddl[len(without):], "\n\n") + "\n"
	golden := "testdata/notify.sql"

	if *update {
		require.NoError(t, os.WriteFile(golden, []byte(triggers), 0o600))
	}

	expected, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(expected), triggers, "a change needs a new version in internal/notify")
}

func TestTablesOfOneDatabaseDoNotHearEachOther(t *testing.T) {
	t.Parallel()

	base, _ := setup(t)
	require.NoError(t, base.Exec(`CREATE SCHEMA audit; CREATE SCHEMA "Audit"`).Error)

	tables := []string{
		"legion_agents", "audit.legion_agents", "order", `back\slash`, `we"ird\`, "my agents? $1 @all", "Audit.äö'ü", strings.Repeat("a", 52),
	}
	watchers := make(map[string]*watcher)

	for i, table := range tables {
		// A backslash in a literal means what this setting says.
		conforming := []string{"on", "off"}[i%2]
		if isSimpleProtocol(t, base) {
			conforming = "on" // the driver insists
		}

		dsn := pgtest.WithParameter(pgtest.DSN(base), "standard_conforming_strings", conforming)
		db := pgtest.OpenDSN(t, dsn, pgtest.MaxOpenConnections(2))
		require.NoError(t, db.Use(legion.New(legion.WithTable(table), legion.WithMigrate(legion.WithNotify()))))
		watchers[table] = watch(t, db)
	}

	for i, table := range tables {
		agent := string(rune('a' + i))
		require.Equal(t, []string{agent}, watchers[table].of(t, func() error {
			return store.For[models.LegionAgent](watchers[table].db).Save(t.Context(), store.Patch{AgentID: agent})
		}), table)
	}

	for table, watcher := range watchers {
		require.Empty(t, watcher.of(t, func() error { return nil }), table)
	}
}

func TestMigrateDownLeavesTheTriggersOfAnotherTable(t *testing.T) {
	t.Parallel()

	db, _ := setup(t)
	require.NoError(t, legion.Migrate(db, legion.WithNotify()))
	require.NoError(t, db.Exec("CREATE SCHEMA tenant").Error)

	tenant := pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.DSN(db), "search_path", "tenant,public"))
	require.NoError(t, legion.Migrate(tenant))
	require.NoError(t, legion.MigrateDown(tenant))
	require.Len(t, notifying(t, db), 3)
	require.Equal(t, []string{"a"}, watch(t, db).of(t, func() error {
		return db.Exec("INSERT INTO legion_agents (agent_id) VALUES ('a')").Error
	}))

	require.NoError(t, legion.Migrate(tenant, legion.WithNotify()))
	require.Equal(t, []string{"b"}, watch(t, tenant).of(t, func() error {
		return tenant.Exec("INSERT INTO legion_agents (agent_id) VALUES ('b')").Error
	}))
	require.NoError(t, legion.MigrateDown(tenant))
	require.Len(t, notifying(t, db), 3)
}

// isSimpleProtocol reports whether the tests run in that mode of the driver.
func isSimpleProtocol(t *testing.T, db *gorm.DB) bool {
	t.Helper()

	config, err := pgx.ParseConfig(pgtest.DSN(db))
	require.NoError(t, err)

	return config.DefaultQueryExecMode == pgx.QueryExecModeSimpleProtocol
}
