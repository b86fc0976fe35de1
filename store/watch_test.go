package store_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/migration"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// notify does what legion.Migrate(db, legion.WithNotify()) does.
func notify(db *gorm.DB) error {
	session, err := database.Session(db)
	if err != nil {
		return err
	}

	return migration.Up(session, database.SettingsOf(session), migration.Options{Notify: true})
}

func setupWatch(t *testing.T, options ...gorm.Option) bundle {
	t.Helper()

	b := setupAgent(t, options...)
	require.NoError(t, notify(b.db))

	return b
}

// listeners are the sessions that listen, besides those of the pool.
func (b bundle) listeners(t *testing.T) (count int64) {
	t.Helper()
	require.NoError(t, b.db.Raw(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'`).Scan(&count).Error)

	return count
}

var errDone = errors.New("done")

func TestAWatchEndsAndLeavesNothingRunning(t *testing.T) {
	t.Parallel()

	// watch reads until the event of the agent, and then ends.
	watch := func(ctx context.Context, b bundle, end func()) (err error) {
		for event, watchError := range b.agents.Watch(ctx) {
			if watchError != nil {
				err = errors.Join(err, watchError)

				continue
			}

			if event.Missed {
				err = b.agents.Save(context.WithoutCancel(ctx), store.Patch{AgentID: agentID, ConversationState: []byte("state")})
				if err != nil {
					return err
				}

				continue
			}

			end()
		}

		return err
	}

	for name, run := range map[string]func(t *testing.T, b bundle){
		"when its context is cancelled": func(t *testing.T, b bundle) {
			t.Helper()

			ctx, cancel := context.WithCancelCause(t.Context())
			require.ErrorIs(t, watch(ctx, b, func() { cancel(errDone) }), errDone)
		},
		"when its time is over": func(t *testing.T, b bundle) {
			t.Helper()

			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			require.ErrorIs(t, watch(ctx, b, func() {}), context.DeadlineExceeded)
		},
		"before it has begun": func(t *testing.T, b bundle) {
			t.Helper()

			ctx, cancel := context.WithCancelCause(t.Context())
			cancel(errDone)
			require.ErrorIs(t, watch(ctx, b, func() { t.Error("an event") }), errDone)
		},
		"when its reader leaves the loop": func(t *testing.T, b bundle) {
			t.Helper()

			for event, err := range b.agents.Watch(t.Context()) {
				require.NoError(t, err)
				require.True(t, event.Missed)

				break
			}
		},
		"when its reader panics": func(t *testing.T, b bundle) {
			t.Helper()
			require.PanicsWithValue(t, "reader", func() {
				_ = watch(t.Context(), b, func() { panic("reader") })
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			b := setupWatch(t)

			var opened []*pgx.Conn

			require.NoError(t, b.db.Use(plugin{settings: database.Settings{Connect: func(ctx context.Context) (*pgx.Conn, error) {
				connection, err := pgx.Connect(ctx, pgtest.DSN(b.db))
				if err == nil {
					opened = append(opened, connection)
				}

				return connection, err
			}}}))

			b.agents = store.For[models.LegionAgent](b.db)
			run(t, b)

			for _, connection := range opened {
				require.True(t, connection.IsClosed(), "open after the loop")
			}

			require.Eventually(t, func() bool { return b.listeners(t) == 0 }, time.Minute, 5*time.Millisecond)
		})
	}
}

func TestWatchSaysMissedWhenItListens(t *testing.T) {
	t.Parallel()

	b := setupWatch(t)

	for event, err := range b.agents.Watch(t.Context()) {
		require.NoError(t, err)
		require.Equal(t, store.Event{Missed: true}, event)
		require.EqualValues(t, 1, b.listeners(t))

		break
	}
}

func TestEveryRangeIsAWatchOfItsOwn(t *testing.T) {
	t.Parallel()

	b := setupWatch(t)
	watch := b.agents.Watch(t.Context())

	for outer, err := range watch {
		require.NoError(t, err)

		if outer.Missed {
			for inner, err := range watch {
				require.NoError(t, err)

				if inner.Missed {
					require.EqualValues(t, 2, b.listeners(t))
					require.NoError(t, b.agents.Delete(t.Context(), agentID))

					continue
				}

				require.Equal(t, agentID, inner.AgentID)

				break
			}

			continue
		}

		require.Equal(t, agentID, outer.AgentID)

		break
	}
}

func TestWatchRefusesWhatItCannotWatch(t *testing.T) {
	t.Parallel()

	refusal := func(agents *store.Store[models.LegionAgent]) (result error) {
		for event, err := range agents.Watch(t.Context()) {
			require.Empty(t, event)
			require.NoError(t, result, "a second round")

			result = err
		}

		return result
	}

	t.Run("a nil db", func(t *testing.T) {
		t.Parallel()
		require.ErrorIs(t, refusal(store.For[models.LegionAgent](nil)), store.ErrInvalidConfig)
	})

	t.Run("a transaction", func(t *testing.T) {
		t.Parallel()

		b := setupWatch(t, pgtest.MaxOpenConnections(1))
		require.NoError(t, b.db.Transaction(func(tx *gorm.DB) error {
			err := refusal(store.For[models.LegionAgent](tx))
			require.ErrorIs(t, err, store.ErrInvalidArgument)
			require.ErrorContains(t, err, "from the pool's db")

			return nil
		}))
	})

	t.Run("a table without triggers", func(t *testing.T) {
		t.Parallel()

		err := refusal(setup(t).agents)
		require.ErrorIs(t, err, store.ErrNotMigrated)
		require.ErrorContains(t, err, "legion.Migrate(db, legion.WithNotify())")
	})

	t.Run("a table with triggers that are switched off", func(t *testing.T) {
		t.Parallel()

		b := setupWatch(t)
		b.exec(t, `ALTER TABLE legion_agents DISABLE TRIGGER legion_notify_update`)
		require.ErrorIs(t, refusal(b.agents), store.ErrNotMigrated)
	})

	t.Run("no table", func(t *testing.T) {
		t.Parallel()

		err := refusal(store.For[models.LegionAgent](pgtest.Open(t)))
		require.ErrorIs(t, err, store.ErrNotMigrated)
		require.ErrorContains(t, err, "legion.Migrate(db, legion.WithNotify())")
	})

	t.Run("a pool that is used up", func(t *testing.T) {
		t.Parallel()

		b := setupWatch(t, pgtest.MaxOpenConnections(1))
		require.NoError(t, b.db.Use(plugin{settings: database.Settings{ConnectionTimeout: 10 * time.Millisecond}}))

		holder := b.db.Begin()
		t.Cleanup(func() { holder.Rollback() })
		require.ErrorIs(t, refusal(store.For[models.LegionAgent](b.db)), store.ErrNoConnection)
	})
}

func TestWatchConnectsAsTheSettingsSay(t *testing.T) {
	t.Parallel()

	b := setupWatch(t)
	connected := 0

	// Notifications go to the watch even where the application has a handler for them.
	config, err := pgx.ParseConfig(pgtest.DSN(b.db))
	require.NoError(t, err)

	config.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) { panic("not for the application") }
	require.NoError(t, b.db.Use(plugin{settings: database.Settings{Connect: func(ctx context.Context) (*pgx.Conn, error) {
		connected++

		return pgx.ConnectConfig(ctx, config)
	}}}))

	for event, err := range store.For[models.LegionAgent](b.db).Watch(t.Context()) {
		require.NoError(t, err)

		if event.Missed {
			require.NoError(t, b.agents.Delete(t.Context(), agentID))

			continue
		}

		require.Equal(t, agentID, event.AgentID)

		break
	}

	require.Equal(t, 1, connected)
}
