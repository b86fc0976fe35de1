package legion_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
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

func readmeStart(db *gorm.DB) error {
	plugin := legion.New(legion.WithDefaultPolicy(limiter.Policy{
		Window:    time.Minute,
		MaxAgents: limiter.Max(10),
	}))
	if err := db.Use(plugin); err != nil {
		return err
	}

	if err := legion.Migrate(db); err != nil {
		return err
	}

	return nil
}

func readmeEnforce(ctx context.Context, db *gorm.DB, agentID string) int {
	err := limiter.Enforce(db.WithContext(ctx), agentID,
		limiter.Rule{Identity: limiter.Identity{"ip": "203.0.113.42"}}, // the default policy
		limiter.Rule{
			Name:     "daily budget",
			Identity: limiter.Identity{"tenant": "acme", "email": "someone@example.com"},
			Policy: limiter.Policy{
				Window:           24 * time.Hour,
				MaxTokens:        limiter.Max(1_000_000),
				MaxRunningAgents: limiter.Max(3),
			},
		},
	)

	if exceeded, ok := errors.AsType[*limiter.ExceededError](err); ok {
		slog.InfoContext(ctx, "denied", "rule", exceeded.Rule.Name, "retry_after", exceeded.RetryAfter)

		return http.StatusTooManyRequests
	}

	if err != nil {
		return http.StatusServiceUnavailable // a database that fails is never an admission
	}

	return http.StatusOK
}

type modelAnswer struct {
	ID    string
	State []byte
}

func readmeTurn(
	ctx context.Context, plugin *legion.Plugin, agentID string, rules []limiter.Rule,
	callModel func(ctx context.Context) (modelAnswer, int64, error),
) error {
	err := plugin.Run(ctx, agentID, legion.TurnOptions{Rules: rules, Reserve: 4000},
		func(ctx context.Context, turn *legion.Turn) error {
			answer, tokens, err := callModel(ctx) // ctx ends if the turn loses its slot
			if err != nil {
				return err
			}

			// Counted at once, and once: a retry with the same ID is recognised.
			if err := turn.Record(ctx, models.Usage{ID: answer.ID, TotalTokens: tokens}); err != nil {
				return err
			}

			return turn.Checkpoint(ctx, answer.State)
		})

	return err
}

func readmeRecord(ctx context.Context, db *gorm.DB, agentID, requestID string) error {
	agents := store.For[models.LegionAgent](db)

	_, err := agents.AppendUsage(ctx, agentID, models.Usage{
		ID:           requestID, // a retry with the same ID counts once
		InputTokens:  1200,
		OutputTokens: 340,
	})
	if err != nil {
		return err
	}

	return limiter.Release(db.WithContext(ctx), agentID)
}

func readmeWatch(ctx context.Context, db *gorm.DB, reload func(), refresh func(agentID string)) error {
	for event, err := range store.For[models.LegionAgent](db).Watch(ctx) {
		switch {
		case err != nil:
			return err // ctx has ended, or there is nothing to watch
		case event.Missed:
			reload() // first of all, and after a lost connection: read again what you keep
		default:
			refresh(event.AgentID) // what it is now, store.Get says
		}
	}

	return nil
}

type Chat struct {
	ID     string `gorm:"primaryKey"`
	Tenant string
}

func (c *Chat) BeforeCreate(tx *gorm.DB) error {
	return limiter.Enforce(tx, c.ID, limiter.Rule{Identity: limiter.Identity{"tenant": c.Tenant}})
}

type Job struct {
	ID     string `gorm:"primaryKey"`
	Tenant string
}

func (j *Job) LegionRules(context.Context) (string, []limiter.Rule, error) {
	return j.ID, []limiter.Rule{{Identity: limiter.Identity{"tenant": j.Tenant}}}, nil
}

type SupportAgent struct {
	models.LegionAgent

	Title *string // columns that you add are nullable or have a default
}

func TestTheReadmeDoesWhatItSays(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, readmeStart(db))
	require.NoError(t, db.AutoMigrate(&Chat{}, &Job{}))

	for _, agent := range []string{"a", "b", "c"} {
		require.Equal(t, http.StatusOK, readmeEnforce(t.Context(), db, agent))
	}

	require.Equal(t, http.StatusTooManyRequests, readmeEnforce(t.Context(), db, "d"), "three run")
	require.NoError(t, readmeRecord(t.Context(), db, "a", "request"))
	require.Equal(t, http.StatusOK, readmeEnforce(t.Context(), db, "d"), "a slot came back")

	for i := range 10 {
		row := "chat " + string(rune('a'+i))
		require.NoError(t, db.Create(&Chat{ID: row, Tenant: "globex"}).Error)
		require.NoError(t, db.Create(&Job{ID: "job" + row, Tenant: "umbrella"}).Error)
	}

	require.ErrorIs(t, db.Create(&Chat{ID: "one more", Tenant: "globex"}).Error, limiter.ErrExceeded)
	require.ErrorIs(t, db.Create(&Job{ID: "another", Tenant: "umbrella"}).Error, limiter.ErrExceeded)

	var chats, jobs int64

	require.NoError(t, db.Model(&Chat{}).Count(&chats).Error)
	require.NoError(t, db.Model(&Job{}).Count(&jobs).Error)
	require.EqualValues(t, 10, chats)
	require.EqualValues(t, 10, jobs)
}

func TestTheReadmesTurnWorks(t *testing.T) {
	t.Parallel()

	db, plugin := useTurns(t)
	answer := func(context.Context) (modelAnswer, int64, error) {
		return modelAnswer{ID: "answer", State: []byte("state")}, 12, nil
	}

	require.NoError(t, readmeTurn(t.Context(), plugin, "one", []limiter.Rule{tokensRule(10_000)}, answer))
	require.EqualValues(t, 12, tokensOf(t, db, "one"))
	require.Equal(t, []byte("state"), rowOf(t, db, "one").ConversationState)
}

func TestTheReadmesWatchWorks(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, legion.Migrate(db, legion.WithNotify()))

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	var refreshed []string

	err := readmeWatch(ctx, db,
		func() {
			require.NoError(t, store.For[models.LegionAgent](db).Save(ctx, store.Patch{AgentID: "a"}))
		},
		func(agentID string) {
			refreshed = append(refreshed, agentID)

			cancel()
		})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, []string{"a"}, refreshed)
}

func TestTheReadmesOwnModelWorks(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.Use(legion.New(legion.WithModel(&SupportAgent{}), legion.WithMigrate())))
	require.NoError(t, limiter.Enforce(db, "a", limiter.Rule{
		Identity: limiter.Identity{"tenant": "acme"},
		Policy:   limiter.Policy{Window: time.Minute},
	}))

	agent, err := store.For[SupportAgent](db).Get(t.Context(), "a")
	require.NoError(t, err)
	require.Equal(t, "a", agent.AgentID)
	require.Nil(t, agent.Title)
}
