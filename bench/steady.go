package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// The steady load: heldTurns turns that only renew their leases, and as many workers as the
// scale has callers, which take turns of conversations that come back, and of new ones.
//
// The history around them is what an autovacuum by a share of the table waits for.
const (
	steadyHistory = 300_000
	heldTurns     = 200
	conversations = 5000
	newOneIn      = 5
	steadyLease   = 3 * time.Second

	// samplesOfSteady is how many rows the table has, of which the first quarter is
	// without workers.
	samplesOfSteady = 12
	samplesOfHeld   = samplesOfSteady / 4
)

// A sample is the state of the agents' table.
type sample struct {
	Updates, HotUpdates, DeadRows, Vacuums int64
	TableBytes, IndexBytes                 int64

	// GroupPages are the pages that finding a group's agents looks at, the mean of some.
	GroupPages float64
}

const sampledGroups = 20

// steady runs the load for so long and shows what it does to the table: how many updates
// stay heap-only, and whether vacuum keeps up.
func steady(ctx context.Context, server *pgtest.Server, duration time.Duration, scale scale, out io.Writer) (err error) {
	if scale.history >= fullScale.history {
		scale.history = steadyHistory
	}

	scene, err := openScene(ctx, server, scale)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, scene.close()) }()

	if err := prepareGroups(ctx, scene); err != nil {
		return err
	}

	loaded := paths[0]
	loaded.options = append(slices.Clip(loaded.options), legion.WithLease(steadyLease))

	session, closeSession, err := scene.begin(ctx, contender{name: loaded.name, path: &loaded}, scale.callers+2, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeSession()) }()

	held := make([]*legion.Turn, heldTurns)

	for number := range held {
		held[number], err = session.plugin.Begin(ctx, agentName("held", number), legion.TurnOptions{Rules: threeRules(session, 0, number)})
		if err != nil {
			return err
		}
	}

	err = watch(ctx, session, duration, out)

	for _, turn := range held {
		err = errors.Join(err, turn.End(ctx))
	}

	return err
}

// watch prints a row for each part of the duration.
func watch(ctx context.Context, session *session, duration time.Duration, out io.Writer) error {
	if _, err := fmt.Fprintf(out, "%s\n\n"+
		"| seconds | turns | updates | of them HOT | dead rows | autovacuums | table MiB | indexes MiB | pages of a group |\n"+
		"| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n", steadyText(session.scene.scale)); err != nil {
		return fmt.Errorf("print the table: %w", err)
	}

	loading, stop := context.WithCancel(ctx)

	var (
		workers sync.WaitGroup
		turns   atomic.Int64
		errs    = make([]error, session.scene.scale.callers)
	)

	defer workers.Wait()
	defer stop()

	before, err := readSample(ctx, session)
	if err != nil {
		return err
	}

	began, turnsBefore := time.Now(), int64(0)

	for i := range samplesOfSteady {
		if i == samplesOfHeld {
			for worker := range errs {
				workers.Go(func() { errs[worker] = work(loading, session, &turns) })
			}
		}

		select {
		case <-time.After(duration / samplesOfSteady):
		case <-ctx.Done():
			return context.Cause(ctx)
		}

		now, err := readSample(ctx, session)
		if err != nil {
			return err
		}

		turnsNow := turns.Load()
		updates, hot := now.Updates-before.Updates, now.HotUpdates-before.HotUpdates

		if _, err := fmt.Fprintf(out, "| %.0f | %s | %s | %.1f %% | %s | %d | %.1f | %.1f | %.0f |\n",
			time.Since(began).Seconds(), thousands(int(turnsNow-turnsBefore)), thousands(int(updates)),
			100*float64(hot)/float64(max(1, updates)), thousands(int(now.DeadRows)), now.Vacuums,
			float64(now.TableBytes)/(1<<20), float64(now.IndexBytes)/(1<<20), now.GroupPages); err != nil {
			return fmt.Errorf("print the table: %w", err)
		}

		before, turnsBefore = now, turnsNow
	}

	stop()
	workers.Wait()

	return errors.Join(errs...)
}

func steadyText(scale scale) string {
	return fmt.Sprintf(`# The table under steady load

%d turns only hold their slots, by leases of %s that are renewed every third of that. After a quarter of the time %d workers
begin turns of three LLM calls, of %s conversations that come back and, one in %d, of new ones, under three rules with all four limits each.
Beside them are %s agents that rest. Updates and HOT updates are those since the row above.`,
		heldTurns, steadyLease, scale.callers, thousands(conversations), newOneIn, thousands(scale.history))
}

// work takes turns until ctx ends.
func work(ctx context.Context, session *session, turns *atomic.Int64) error {
	turn := scenario{agent: newOrReturning, rules: threeRules}.takeTurn(session)

	for ctx.Err() == nil {
		// Two workers may come by the same conversation. A turn that has begun is ended.
		err := turn(context.WithoutCancel(ctx), 0, rand.IntN(plenty))
		if err != nil && !errors.Is(err, limiter.ErrAgentRunning) {
			return err
		}

		turns.Add(1)
	}

	return nil
}

func newOrReturning(session *session, number int) string {
	if number%newOneIn == 0 {
		return newAgent(session, number)
	}

	return agentName("conversation", number%conversations)
}

func readSample(ctx context.Context, session *session) (sample sample, err error) {
	err = session.db.WithContext(ctx).Raw(`
SELECT n_tup_upd AS updates, n_tup_hot_upd AS hot_updates, n_dead_tup AS dead_rows, autovacuum_count AS vacuums,
  pg_table_size(relid) AS table_bytes, pg_indexes_size(relid) AS index_bytes
FROM pg_stat_user_tables WHERE relid = 'legion_agents'::regclass`).Scan(&sample).Error
	if err != nil {
		return sample, err
	}

	for number := range sampledGroups {
		pages, err := groupPages(ctx, session, number)
		if err != nil {
			return sample, err
		}

		sample.GroupPages += pages / sampledGroups
	}

	return sample, nil
}

// groupPages counts the pages that finding the agents of a group looks at.
func groupPages(ctx context.Context, session *session, number int) (float64, error) {
	var text string

	err := session.db.WithContext(ctx).Raw("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) SELECT FROM legion_agents WHERE ?",
		models.JSONContains("metadata", tenant(number))).Row().Scan(&text)
	if err != nil {
		return 0, fmt.Errorf("explain a query: %w", err)
	}

	var explained []struct {
		Plan struct {
			Hit  float64 `json:"Shared Hit Blocks"`  //nolint:tagliatelle // PostgreSQL's name
			Read float64 `json:"Shared Read Blocks"` //nolint:tagliatelle // PostgreSQL's name
		} `json:"Plan"` //nolint:tagliatelle // PostgreSQL's name
	}

	if err := json.Unmarshal([]byte(text), &explained); err != nil {
		return 0, fmt.Errorf("read a plan: %w", err)
	}

	return explained[0].Plan.Hit + explained[0].Plan.Read, nil
}
