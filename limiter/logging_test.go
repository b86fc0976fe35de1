package limiter_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// buffer is a log that many goroutines may write.
type buffer struct {
	mutex sync.Mutex
	text  bytes.Buffer
}

func (b *buffer) Write(text []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()

	return b.text.Write(text)
}

// Printf implements the writer of GORM's own logger.
func (b *buffer) Printf(text string, values ...any) { _, _ = fmt.Fprintf(b, text+"\n", values...) }

func (b *buffer) String() string {
	b.mutex.Lock()
	defer b.mutex.Unlock()

	return b.text.String()
}

// requireEveryKindOfStatement makes calls that come to every end that there is, with
// the secret in everything that the application chooses.
func requireEveryKindOfStatement(t *testing.T, db *gorm.DB) {
	t.Helper()

	identity := limiter.Identity{"email": secret + "@example.com", "name": secret}
	agentID := "agent " + secret
	rule := everyLimit(identity)

	require.ErrorIs(t, limiter.Enforce(db, agentID, rule), limiter.ErrNotMigrated)
	require.NoError(t, db.Session(&gorm.Session{Logger: logger.Discard}).AutoMigrate(&models.LegionAgent{}))

	require.NoError(t, limiter.Enforce(db, agentID, rule))
	require.NoError(t, limiter.Enforce(db, agentID, rule, maxAgents(limiter.Everyone(), 9)))
	requireDenied(t, limiter.Enforce(db, agentID+" 2", maxRunning(identity, 1)), limiter.LimitRunningAgents)
	require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
		requireDenied(t, limiter.Enforce(tx, agentID+" 2", maxRunning(identity, 1)), limiter.LimitRunningAgents)

		return limiter.Enforce(tx, agentID+" 2", recordOnly(limiter.Identity{"name": secret}))
	}))

	// What is in rows stays out of the log as well, and a turn is revoked.
	quiet := db.Session(&gorm.Session{Logger: logger.Discard})
	require.NoError(t, quiet.Exec(`UPDATE legion_agents SET run_id = 'run ' || agent_id, lease_expires_at = now() - interval '1s',
  usage = '[{"at": 9e15, "total_tokens": 987654321}]' WHERE agent_id = ?`, agentID).Error)
	require.NoError(t, limiter.Enforce(db, agentID+" 2", maxRunning(identity, 1)))
	requireDenied(t, limiter.Enforce(db, agentID+" 2", maxTokens(identity, 1)), limiter.LimitTokens)
	require.NoError(t, limiter.Release(db, agentID+" 2"))
	require.ErrorIs(t, limiter.Release(db, "nobody "+secret), limiter.ErrNotFound)

	// A statement that fails with the agent's ID in it.
	require.NoError(t, quiet.Exec(`ALTER TABLE legion_agents ADD CONSTRAINT refused CHECK (metadata <> '{}') NOT VALID`).Error)
	require.ErrorContains(t, limiter.Enforce(db, agentID+" 3", recordOnly(limiter.Everyone())), "refused")

	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, limiter.Enforce(db.WithContext(cancelled), agentID, rule), context.Canceled)
	require.ErrorIs(t, limiter.Enforce(begin(t, db).WithContext(cancelled), agentID, rule), context.Canceled)
}

func TestNoLogHoldsWhatTheApplicationChose(t *testing.T) {
	t.Parallel()

	for name, open := range map[string]func(*buffer) logger.Interface{
		"every statement": func(text *buffer) logger.Interface {
			return logger.New(text, logger.Config{LogLevel: logger.Info})
		},
		"every statement as a slow one": func(text *buffer) logger.Interface {
			return logger.New(text, logger.Config{LogLevel: logger.Warn, SlowThreshold: time.Nanosecond})
		},
		"errors": func(text *buffer) logger.Interface {
			return logger.New(text, logger.Config{LogLevel: logger.Error})
		},
		"slog": func(text *buffer) logger.Interface {
			return logger.NewSlogLogger(slog.New(slog.NewTextHandler(text, &slog.HandlerOptions{Level: slog.LevelDebug})),
				logger.Config{LogLevel: logger.Info, SlowThreshold: time.Nanosecond})
		},
	} {
		for _, debug := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, Debug: %t", name, debug), func(t *testing.T) {
				t.Parallel()

				text := new(buffer)

				db := pgtest.Open(t, &gorm.Config{Logger: open(text)})
				if debug {
					db = db.Debug()
				}

				requireEveryKindOfStatement(t, db)
				require.NotEmpty(t, text.String())
				require.NotContains(t, text.String(), secret)
				require.NotContains(t, text.String(), "987654321")
			})
		}
	}
}

func TestStatementsAreLoggedByTheApplicationsLogger(t *testing.T) {
	t.Parallel()

	text := new(buffer)
	db := setup(t, &gorm.Config{Logger: logger.New(text, logger.Config{LogLevel: logger.Info})})
	require.NoError(t, limiter.Enforce(db, "agent", maxAgents(tenant, 1)))
	require.Contains(t, text.String(), `INSERT INTO "legion_agents" AS agent`)

	// A release of an agent that is not there is an answer, not an error to log.
	errorsOnly := new(buffer)
	quiet := db.Session(&gorm.Session{Logger: logger.New(errorsOnly, logger.Config{LogLevel: logger.Error})})
	require.ErrorIs(t, limiter.Release(quiet, "nobody"), limiter.ErrNotFound)
	requireDenied(t, limiter.Enforce(quiet, "another", maxAgents(tenant, 1)), limiter.LimitAgents)
	require.Empty(t, errorsOnly.String())
}
