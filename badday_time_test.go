package legion_test

import (
	"bytes"
	"fmt"
	"net/url"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

func TestAnApplicationsClockDecidesNothing(t *testing.T) {
	t.Parallel()

	const apart = 90 * time.Second

	for name, options := range paths() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db, plugin := useTurns(t, options...)
			window := limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: time.Minute, MaxTokens: limiter.Max(1000)}}

			turn, err := plugin.Begin(t.Context(), "one", under(window))
			require.NoError(t, err)

			// What is stamped by a clock that is ahead counts from now; by one that is behind,
			// it is as old as it says.
			require.NoError(t, turn.Record(t.Context(), models.Usage{At: time.Now().Add(apart), TotalTokens: 1}))
			require.NoError(t, turn.Record(t.Context(), models.Usage{At: time.Now().Add(-apart), TotalTokens: 10}))
			require.NoError(t, turn.Record(t.Context(), models.Usage{TotalTokens: 100}))

			// GORM stamps updated_at with the application's clock, here one that is behind.
			require.NoError(t, db.Model(&models.LegionAgent{}).Where("agent_id = 'one'").
				UpdateColumn("updated_at", time.Now().Add(-apart-time.Minute)).Error)

			report, err := limiter.Check(db, "", window)
			require.NoError(t, err)
			require.EqualValues(t, 101, report.Rules[0].Usage.Tokens)
			require.InDelta(t, 60, report.Rules[0].Quotas[0].ResetAfter.Seconds(), 5)
			require.NoError(t, turn.End(t.Context()))
		})
	}
}

func TestAVerdictIsTheSameInEveryTimeZone(t *testing.T) {
	t.Parallel()

	owner := pgtest.Open(t)
	require.NoError(t, migrateFor(owner, []legion.Option{legion.WithServerFunction()}))

	// Started a day and a minute before, and a day less a minute: a day of local time has 23
	// or 25 hours twice a year somewhere, and the window has 24.
	require.NoError(t, owner.Exec(`INSERT INTO legion_agents (agent_id, metadata, started_at, usage) VALUES
		('before', '{"tenant": "acme"}', now() - interval '86460 seconds', jsonb_build_array(jsonb_build_object('total_tokens', 1, 'at', ((extract(epoch FROM now()) - 86460) * 1000)::bigint))),
		('within', '{"tenant": "acme"}', now() - interval '86340 seconds', jsonb_build_array(jsonb_build_object('total_tokens', 10, 'at', ((extract(epoch FROM now()) - 86340) * 1000)::bigint)))`).Error)

	for _, zone := range []string{"UTC", "America/New_York", "Europe/Berlin", "Australia/Lord_Howe", "Asia/Kathmandu", "Pacific/Apia"} {
		for name, options := range paths() {
			db := pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.DSN(owner), "options", "-c TimeZone="+zone))
			require.NoError(t, db.Use(legion.New(append(options, legion.WithObserver(nil))...)))

			day := limiter.Rule{Identity: acme, Policy: limiter.Policy{Window: 24 * time.Hour, MaxAgents: limiter.Max(1), MaxTokens: limiter.Max(10)}}
			exceeded := &limiter.ExceededError{}
			require.ErrorAs(t, limiter.Enforce(db, "new", day), &exceeded, zone+name)
			require.Equal(t, limiter.Usage{Agents: 2, Tokens: 10}, exceeded.Usage, zone+name)
			require.InDelta(t, 60, exceeded.RetryAfter.Seconds(), 30, zone+name)
		}
	}
}

// An interval of days or months would change its length with the session's zone; ours are
// microseconds. The clocks of the time zones' changes cannot be waited for, so this asks
// PostgreSQL about one.
func TestAWindowHasNoDaylightSaving(t *testing.T) {
	t.Parallel()

	db := pgtest.OpenDSN(t, pgtest.WithParameter(pgtest.Database(t), "options", "-c TimeZone=America/New_York"))

	var hours, days float64
	require.NoError(t, db.Raw(`SELECT extract(epoch FROM at - (at - 86400000000 * interval '1 microsecond')), extract(epoch FROM at - (at - interval '1 day'))
		FROM (SELECT timestamptz '2026-03-08 12:00:00-04' AS at) AS change`).Row().Scan(&hours, &days))
	require.InDelta(t, 86400, hours, 0)
	require.InDelta(t, 82800, days, 0, "what a day would be on the day that the clocks go forward")
}

func TestADumpThatIsRestoredGoesOn(t *testing.T) {
	t.Parallel()

	dump, restore := programOf(t, "pg_dump"), programOf(t, "psql")

	db, plugin := useTurns(t, legion.WithServerFunction(), legion.WithMigrate(legion.WithNotify()))
	requireNotOlder(t, dump, db)

	turn, err := plugin.Begin(t.Context(), "one", reserving(300, tokensRule(1000), runningRule(1)))
	require.NoError(t, err)
	require.NoError(t, turn.Record(t.Context(), models.Usage{TotalTokens: 100}))

	var text, failures bytes.Buffer

	dumping := exec.CommandContext(t.Context(), dump, "--dbname", clientDSN(t, pgtest.DSN(db)))
	dumping.Stdout, dumping.Stderr = &text, &failures
	require.NoError(t, dumping.Run(), "%s", &failures)

	fresh := pgtest.Database(t)
	restoring := exec.CommandContext(t.Context(), restore, "--dbname", clientDSN(t, fresh), "--quiet", "--set", "ON_ERROR_STOP=1", "--file", "-")
	restoring.Stdin, restoring.Stderr = &text, &failures
	require.NoError(t, restoring.Run(), "%s", &failures)

	statements := newRecorder()
	restored := pgtest.OpenDSN(t, fresh, &gorm.Config{Logger: statements})
	usePlugin(t, restored, legion.WithServerFunction(), legion.WithMigrate(legion.WithNotify()))
	require.Empty(t, statements.takeDDL(), "there is nothing to migrate")

	// The turn's slot, reservation and tokens are in it, until its lease is over.
	exceeded := &limiter.ExceededError{}
	require.ErrorAs(t, limiter.Enforce(restored, "two", tokensRule(300), runningRule(1)), &exceeded)
	require.Equal(t, limiter.Usage{Tokens: 100, ReservedTokens: 200}, exceeded.Usage)
	require.Equal(t, catalogue(t, db), catalogue(t, restored))

	agent, err := store.For[models.LegionAgent](restored).Get(t.Context(), "one")
	require.NoError(t, err)
	require.Equal(t, turn.RunID(), *agent.RunID)
	require.NoError(t, turn.End(t.Context()))
}

// requireNotOlder skips the test where pg_dump is older than the server, which it refuses.
func requireNotOlder(t *testing.T, dump string, db *gorm.DB) {
	t.Helper()

	text, err := exec.CommandContext(t.Context(), dump, "--version").Output()
	require.NoError(t, err)

	var (
		client int
		server int
	)

	_, err = fmt.Sscanf(string(text), "pg_dump (PostgreSQL) %d", &client)
	require.NoError(t, err)
	require.NoError(t, db.Raw("SELECT current_setting('server_version_num')::int / 10000").Row().Scan(&server))

	if client < server {
		t.Skipf("pg_dump is of version %d, the server of %d", client, server)
	}
}

// clientDSN is a DSN as PostgreSQL's own clients read it: without the driver's parameters.
func clientDSN(t *testing.T, dsn string) string {
	t.Helper()

	location, err := url.Parse(dsn)
	require.NoError(t, err)

	query := location.Query()
	query.Del("default_query_exec_mode")
	location.RawQuery = query.Encode()

	return location.String()
}

// programOf finds a program of PostgreSQL's clients.
func programOf(t *testing.T, name string) string {
	t.Helper()

	if path, err := exec.LookPath(name); err == nil {
		return path
	}

	installed, err := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	require.NoError(t, err)

	if len(installed) == 0 {
		t.Skip(name + " is not on this machine")
	}

	return installed[len(installed)-1]
}
