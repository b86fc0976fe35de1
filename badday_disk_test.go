package legion_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

const (
	// diskSize is room for a new server, its log and some thousand agents.
	diskSize = 160 << 20

	diskFull = "53100"
)

// startWithDisk starts a server that has a disk of its own, and is started again when it ends.
func startWithDisk(t *testing.T) (server *pgtest.Server, dsn string) {
	t.Helper()

	server, err := pgtest.Start(t.Context(), pgtest.WithDisk(diskSize), pgtest.WithRestarts(), pgtest.WithDurability())
	if errors.Is(err, pgtest.ErrNoDisk) || errors.Is(err, pgtest.ErrElsewhere) {
		t.Skip("a disk that fills up needs server binaries on Linux, and the right to mount: ", err)
	}

	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })

	dsn, err = server.CreateDatabase(t.Context())
	require.NoError(t, err)

	return server, dsn
}

// fillDisk takes all the room that there is on the server's disk, and whatever the server gives
// up, until the returned function is called.
func fillDisk(t *testing.T, server *pgtest.Server) (makeRoom func()) {
	t.Helper()

	ballast, err := os.Create(filepath.Join(server.Disk(), "ballast"))
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	chunk := make([]byte, 64<<10)
	full := make(chan struct{})

	var filling sync.WaitGroup

	filling.Go(func() {
		for told := false; ctx.Err() == nil; {
			if _, err := ballast.Write(chunk); err == nil {
				continue
			}

			if !told {
				close(full)

				told = true
			}

			time.Sleep(time.Millisecond)
		}
	})
	<-full

	makeRoom = sync.OnceFunc(func() {
		cancel()
		filling.Wait()
		require.NoError(t, errors.Join(ballast.Close(), os.Remove(ballast.Name())))
	})
	t.Cleanup(makeRoom)

	return makeRoom
}

// few is the group of those newcomers that a limit is on.
var few = limiter.Identity{"kind": "few"}

const fewNewcomers = 60

// newcomers are agents that come once each, so that the tables grow, and what was acknowledged
// to them.
type newcomers struct {
	db *gorm.DB

	// all are those that came; full counts the errors of a disk that is full.
	all, full, denied atomic.Int64

	mutex    sync.Mutex
	admitted map[string]int64 // with their tokens
}

func (n *newcomers) come(ctx context.Context) {
	number := n.all.Add(1)
	agentID := fmt.Sprint("newcomer ", number)
	tx := n.db.WithContext(ctx)

	// A group of each one's own makes the registry grow too. Half of them are few.
	rules := []limiter.Rule{{Identity: limiter.Identity{"email": agentID}, Policy: limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(1)}}}
	if number%2 == 0 {
		rules = append(rules, limiter.Rule{Identity: few, Policy: limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(fewNewcomers)}})
	}

	err := limiter.Enforce(tx, agentID, rules...)
	if err == nil {
		n.note(agentID, 0)

		_, err = store.For[models.LegionAgent](tx).AppendUsage(ctx, agentID, models.Usage{TotalTokens: number})
		if err == nil {
			n.note(agentID, number)
		}
	}

	switch {
	case errors.Is(err, limiter.ErrExceeded):
		n.denied.Add(1)
	case database.HasCode(err, diskFull):
		n.full.Add(1)
	}

	if err != nil {
		time.Sleep(time.Millisecond)
	}
}

func (n *newcomers) note(agentID string, tokens int64) {
	n.mutex.Lock()
	defer n.mutex.Unlock()

	n.admitted[agentID] = tokens
}

// requireKept compares what was acknowledged with the rows.
func (n *newcomers) requireKept(t *testing.T, db *gorm.DB) {
	t.Helper()

	var rows []models.LegionAgent
	require.NoError(t, db.Find(&rows, "agent_id LIKE 'newcomer %'").Error)

	var limited int64
	require.NoError(t, db.Model(&models.LegionAgent{}).Where(models.JSONContains("metadata", few)).Count(&limited).Error)
	require.LessOrEqual(t, limited, int64(fewNewcomers), "more were admitted than may be")

	recorded := make(map[string]int64, len(rows))

	for _, row := range rows {
		entries, err := row.UsageEntries()
		require.NoError(t, err)
		require.LessOrEqual(t, len(entries), 1, "a token counts twice")
		require.NotNil(t, row.StartedAt)

		recorded[row.AgentID] = 0
		for _, entry := range entries {
			recorded[row.AgentID] += entry.Tokens()
		}
	}

	for agentID, tokens := range n.admitted {
		require.Contains(t, recorded, agentID, "it was allowed, and is not recorded")
		require.GreaterOrEqual(t, recorded[agentID], tokens, "an acknowledged token is lost")
	}
}

func TestADiskThatRunsFullLosesNothing(t *testing.T) {
	t.Parallel()

	const lease = 2 * time.Second

	for name, options := range paths() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			server, dsn := startWithDisk(t)
			db := pgtest.OpenDSN(t, dsn)
			plugin := usePlugin(t, db, append(options, legion.WithLease(lease))...)
			load, stop := startLoad(t, plugin, 4)
			watched := watchLoad(t.Context(), pgtest.OpenDSN(t, dsn))

			coming := &newcomers{db: pgtest.OpenDSN(t, dsn), admitted: make(map[string]int64)}
			require.NoError(t, coming.db.Use(legion.New(append(options, legion.WithObserver(nil))...)))

			ctx, leave := context.WithCancel(context.WithoutCancel(t.Context()))

			var working sync.WaitGroup

			for range 2 {
				working.Go(func() {
					for ctx.Err() == nil && coming.all.Load() < 50_000 {
						coming.come(ctx)
					}
				})
			}

			goOn := func(counter *atomic.Int64, more int64, message string) {
				before := counter.Load()
				require.Eventually(t, func() bool { return counter.Load() >= before+more }, longest, time.Millisecond, message)
			}

			// The tables cannot grow.
			goOn(&load.turns, 20, "work goes on")
			makeRoom := fillDisk(t, server)
			goOn(&coming.full, 20, "the disk is full")
			makeRoom()
			goOn(&load.turns, 20, "work goes on")

			// Nor can the log of what is committed: the server ends, and does not come back
			// before there is room.
			makeRoom = fillDisk(t, server)
			require.Eventually(t, func() bool {
				return database.Retryable(db.Exec("SELECT pg_switch_wal() FROM (SELECT pg_logical_emit_message(false, 'legion', 'full')) AS said").Error)
			}, longest, time.Millisecond, "the server is down")
			goOn(&load.failed, 20, "nothing is allowed")
			require.True(t, database.Retryable(db.Exec("SELECT 1").Error), "it is still down")
			makeRoom()
			goOn(&load.turns, 20, "work goes on")

			goOn(&coming.denied, 1, "more of the few came than may be")

			stop()
			leave()
			working.Wait()

			snapshots, over := watched()
			t.Logf("%d turns, %d failed, %d snapshots; %d newcomers, %d admitted, %d denied, %d met a full disk",
				load.turns.Load(), load.failed.Load(), snapshots, coming.all.Load(), len(coming.admitted), coming.denied.Load(), coming.full.Load())
			require.Zero(t, over, "more slots were held than there are")
			load.requireKept(t, db, lease)
			coming.requireKept(t, db)

			for _, used := range []*gorm.DB{db, coming.db} {
				pool, err := used.DB()
				require.NoError(t, err)
				require.Eventually(t, func() bool { return pool.Stats().InUse == 0 }, longest, time.Millisecond, "a connection is not given back")
			}
		})
	}
}
