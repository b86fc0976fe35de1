package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/datatypes"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// A logged is an admission of a hand-made log. Moments are in milliseconds after noon.
type logged struct {
	turn    int64
	rule    string // tenant by default
	group   string
	agentID string

	window                      int64 // 1,000 by default
	agents, running, tokenLimit int64 // unlimited by default

	started  int64 // as admitted by default
	admitted int64
	lease    int64 // 30,000 after admitted by default

	ended   int64 // 0: not ended
	endedBy string
	sees    string // the snapshot; by default it sees every transaction of these tests
	tokens  int64
}

// Snapshots of a database whose transactions before 1,000 have ended.
const (
	seesAll       = "5000:5000:"
	before2000    = "2000:2000:"
	withRunning   = "3000:4000:3000" // 3000 was running when it was taken
	unlimited     = int64(1) << 40
	defaultWindow = 1000
	defaultLease  = 30_000
)

func moment(milliseconds int64) time.Time {
	return noon.Add(time.Duration(milliseconds) * time.Millisecond)
}

func (l logged) admission() admission {
	orElse := func(value, otherwise int64) int64 {
		if value == 0 {
			return otherwise
		}

		return value
	}

	row := admission{
		Turn:               l.turn,
		Rule:               l.rule,
		GroupName:          l.group,
		AgentID:            l.agentID,
		WindowMicroseconds: 1000 * orElse(l.window, defaultWindow),
		MaxAgents:          orElse(l.agents, unlimited),
		MaxRunningAgents:   orElse(l.running, unlimited),
		MaxTokens:          orElse(l.tokenLimit, unlimited),
		Snapshot:           l.sees,
		BegunAt:            moment(l.admitted),
		AdmittedAt:         moment(l.admitted),
		StartedAt:          moment(orElse(l.started, l.admitted)),
		LeaseExpiresAt:     moment(orElse(l.lease, l.admitted+defaultLease)),
		Tokens:             l.tokens,
	}
	if l.rule == "" {
		row.Rule = tenantRule
	}

	if l.sees == "" {
		row.Snapshot = seesAll
	}

	if l.ended != 0 {
		ended := moment(l.ended)
		row.EndedAt = &ended
		row.EndedBy = &l.endedBy

		if l.endedBy == "" {
			*row.EndedBy = "1000"
		}
	}

	return row
}

func writeLog(t *testing.T, log []logged) *gorm.DB {
	t.Helper()

	db, _ := setup(t, options{workers: 1})
	require.NoError(t, db.AutoMigrate(&admission{}, &models.LegionAgent{}))

	rows := make([]admission, len(log))
	for i, entry := range log {
		rows[i] = entry.admission()
	}

	require.NoError(t, db.Create(&rows).Error)

	return db
}

func TestTheCheckFindsWhatExceedsALimitAndNothingElse(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name       string
		log        []logged
		limit      limiter.Limit
		peak       int64
		violations int64
	}{
		{
			name: "as many starts as the limit",
			log: []logged{
				{turn: 1, agentID: "a", agents: 2, admitted: 100},
				{turn: 2, agentID: "b", agents: 2, admitted: 200},
			},
			limit: limiter.LimitAgents, peak: 2, violations: 0,
		},
		{
			name: "a start too many",
			log: []logged{
				{turn: 1, agentID: "a", agents: 2, admitted: 100},
				{turn: 2, agentID: "b", agents: 2, admitted: 200},
				{turn: 3, agentID: "c", agents: 2, admitted: 300},
			},
			limit: limiter.LimitAgents, peak: 3, violations: 1,
		},
		{
			name: "two starts at the same moment",
			log: []logged{
				{turn: 1, agentID: "a", agents: 1, admitted: 100},
				{turn: 2, agentID: "b", agents: 1, admitted: 100},
			},
			limit: limiter.LimitAgents, peak: 2, violations: 2,
		},
		{
			name: "a start that has just left the window",
			log: []logged{
				{turn: 1, agentID: "a", agents: 1, admitted: 100},
				{turn: 2, agentID: "b", agents: 1, admitted: 1100},
			},
			limit: limiter.LimitAgents, peak: 1, violations: 0,
		},
		{
			name: "a start that is still in the window of this admission",
			log: []logged{
				{turn: 1, agentID: "a", agents: 1, admitted: 100},
				{turn: 2, agentID: "b", agents: 1, admitted: 1100, window: 1001},
			},
			limit: limiter.LimitAgents, peak: 2, violations: 1,
		},
		{
			name: "an agent that is admitted again counts once, by its start",
			log: []logged{
				{turn: 1, agentID: "a", agents: 2, admitted: 100},
				{turn: 2, agentID: "a", agents: 2, admitted: 300, started: 100},
				{turn: 3, agentID: "b", agents: 2, admitted: 1100},
				{turn: 4, agentID: "a", agents: 2, admitted: 1200, started: 100},
			},
			limit: limiter.LimitAgents, peak: 1, violations: 0,
		},
		{
			name: "starts in other groups and under other rules",
			log: []logged{
				{turn: 1, agentID: "a", agents: 1, admitted: 100, group: "one"},
				{turn: 2, agentID: "b", agents: 1, admitted: 110, group: "two"},
				{turn: 3, agentID: "c", agents: 1, admitted: 120, group: "one", rule: "another"},
			},
			limit: limiter.LimitAgents, peak: 1, violations: 0,
		},
		{
			name: "as many slots as the limit",
			log: []logged{
				{turn: 1, agentID: "a", running: 2, admitted: 100, ended: 250},
				{turn: 2, agentID: "b", running: 2, admitted: 200},
				{turn: 3, agentID: "c", running: 2, admitted: 250},
			},
			limit: limiter.LimitRunningAgents, peak: 2, violations: 0,
		},
		{
			name: "a slot too many",
			log: []logged{
				{turn: 1, agentID: "a", running: 2, admitted: 100, ended: 251},
				{turn: 2, agentID: "b", running: 2, admitted: 200},
				{turn: 3, agentID: "c", running: 2, admitted: 250},
			},
			limit: limiter.LimitRunningAgents, peak: 3, violations: 1,
		},
		{
			name: "two slots at the same moment",
			log: []logged{
				{turn: 1, agentID: "a", running: 1, admitted: 100},
				{turn: 2, agentID: "b", running: 1, admitted: 100},
			},
			limit: limiter.LimitRunningAgents, peak: 2, violations: 2,
		},
		{
			name: "a slot far older than the window",
			log: []logged{
				{turn: 1, agentID: "a", running: 1, admitted: 100, ended: 9000},
				{turn: 2, agentID: "b", running: 1, admitted: 8000},
			},
			limit: limiter.LimitRunningAgents, peak: 2, violations: 1,
		},
		{
			name: "a slot whose lease is over",
			log: []logged{
				{turn: 1, agentID: "a", running: 1, admitted: 100, lease: 7000, ended: 9000},
				{turn: 2, agentID: "b", running: 1, admitted: 7000},
			},
			limit: limiter.LimitRunningAgents, peak: 1, violations: 0,
		},
		{
			name: "slots in other groups and under other rules",
			log: []logged{
				{turn: 1, agentID: "a", running: 1, admitted: 100, group: "one"},
				{turn: 2, agentID: "b", running: 1, admitted: 110, group: "two"},
				{turn: 3, agentID: "c", running: 1, admitted: 120, group: "one", rule: "another"},
			},
			limit: limiter.LimitRunningAgents, peak: 1, violations: 0,
		},
		{
			name: "tokens just under the limit",
			log: []logged{
				{turn: 1, agentID: "a", tokenLimit: 100, admitted: 100, ended: 200, tokens: 99},
				{turn: 2, agentID: "b", tokenLimit: 100, admitted: 300, ended: 400, tokens: 1_000_000},
			},
			limit: limiter.LimitTokens, peak: 99, violations: 0,
		},
		{
			name: "tokens that have reached the limit",
			log: []logged{
				{turn: 1, agentID: "a", tokenLimit: 100, admitted: 100, ended: 200, tokens: 60},
				{turn: 2, agentID: "b", tokenLimit: 100, admitted: 110, ended: 300, tokens: 40},
				{turn: 3, agentID: "c", tokenLimit: 100, admitted: 300},
			},
			limit: limiter.LimitTokens, peak: 100, violations: 1,
		},
		{
			name: "tokens in other groups and under other rules",
			log: []logged{
				{turn: 1, agentID: "a", tokenLimit: 100, admitted: 100, ended: 200, tokens: 100, group: "one"},
				{turn: 2, agentID: "b", tokenLimit: 100, admitted: 300, group: "two"},
				{turn: 3, agentID: "c", tokenLimit: 100, admitted: 300, group: "one", rule: "another"},
			},
			limit: limiter.LimitTokens, peak: 0, violations: 0,
		},
		{
			name: "tokens that have left the window",
			log: []logged{
				{turn: 1, agentID: "a", tokenLimit: 100, admitted: 100, ended: 200, tokens: 100},
				{turn: 2, agentID: "b", tokenLimit: 100, admitted: 1200},
			},
			limit: limiter.LimitTokens, peak: 0, violations: 0,
		},
		{
			name: "tokens of turns that were running, which may go beyond the limit",
			log: []logged{
				{turn: 1, agentID: "a", tokenLimit: 100, admitted: 100, ended: 310, tokens: 100},
				{turn: 2, agentID: "b", tokenLimit: 100, admitted: 200, ended: 310, tokens: 100},
				{turn: 3, agentID: "c", tokenLimit: 100, admitted: 300},
			},
			limit: limiter.LimitTokens, peak: 0, violations: 0,
		},
		{
			name: "tokens that were committed after the admission had begun",
			log: []logged{
				{turn: 1, agentID: "a", tokenLimit: 100, admitted: 100, ended: 200, endedBy: "2000", tokens: 100},
				{turn: 2, agentID: "b", tokenLimit: 100, admitted: 100, ended: 200, endedBy: "3000", tokens: 100},
				{turn: 3, agentID: "c", tokenLimit: 100, admitted: 300, sees: before2000},
			},
			limit: limiter.LimitTokens, peak: 0, violations: 0,
		},
		{
			name: "tokens of which only a part was committed",
			log: []logged{
				{turn: 1, agentID: "a", tokenLimit: 100, admitted: 100, ended: 200, endedBy: "2999", tokens: 100},
				{turn: 2, agentID: "b", tokenLimit: 100, admitted: 100, ended: 200, endedBy: "3000", tokens: 7},
				{turn: 3, agentID: "c", tokenLimit: 100, admitted: 300, sees: withRunning},
			},
			limit: limiter.LimitTokens, peak: 100, violations: 1,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			findings, err := check(t.Context(), writeLog(t, test.log))
			require.NoError(t, err)

			var (
				admissions, peak int64
				violations       = make(map[limiter.Limit]int64)
			)

			for _, finding := range findings {
				violations[finding.Limit] += finding.Violations

				if finding.Limit == test.limit {
					admissions += finding.Admissions
					peak = max(peak, finding.Peak)
				}
			}

			require.Equal(t, int64(len(test.log)), admissions)
			require.Equal(t, test.peak, peak)
			require.Equal(t, test.violations, violations[test.limit])

			delete(violations, test.limit)

			for limit, count := range violations {
				require.Zero(t, count, "%s is not limited in this log", limit)
			}
		})
	}
}

func TestTheBooksAgree(t *testing.T) {
	t.Parallel()

	agent := func(change func(agent *models.LegionAgent)) *models.LegionAgent {
		started := moment(100)
		agent := &models.LegionAgent{
			AgentID:   "a",
			StartedAt: &started,
			Status:    models.StatusIdle,
			Usage:     datatypes.JSON(`[{"total_tokens": 60}, {"total_tokens": 40}]`),
		}
		change(agent)

		return agent
	}

	for _, test := range []struct {
		name   string
		change func(agent *models.LegionAgent)
		agrees bool
	}{
		{"the same in both", func(*models.LegionAgent) {}, true},
		{"an agent that is not in the log", func(agent *models.LegionAgent) { agent.AgentID = "b" }, false},
		{"tokens that are missing", func(agent *models.LegionAgent) { agent.Usage = datatypes.JSON(`[{"total_tokens": 60}]`) }, false},
		{"another start", func(agent *models.LegionAgent) { *agent.StartedAt = moment(101) }, false},
		{"no start", func(agent *models.LegionAgent) { agent.StartedAt = nil }, false},
		{"a slot that was not given back", func(agent *models.LegionAgent) { agent.Status = models.StatusRunning }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db := writeLog(t, []logged{
				{turn: 1, agentID: "a", admitted: 100, ended: 200, tokens: 60},
				{turn: 2, agentID: "a", admitted: 300, started: 100, ended: 400, tokens: 40},
				{turn: 2, agentID: "a", admitted: 300, started: 100, ended: 400, tokens: 40, rule: userRule},
			})
			require.NoError(t, db.Create(agent(test.change)).Error)

			err := compareBooks(t.Context(), db)
			if test.agrees {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, errLogDisagrees)
			}
		})
	}
}

func TestAStartOutsideItsTransactionIsFound(t *testing.T) {
	t.Parallel()

	db := writeLog(t, []logged{{turn: 1, agentID: "a", admitted: 300, started: 100, ended: 400}})
	started := moment(100)
	require.NoError(t, db.Create(&models.LegionAgent{AgentID: "a", StartedAt: &started, Status: models.StatusIdle}).Error)

	require.ErrorIs(t, compareBooks(t.Context(), db), errLogDisagrees)
}

func TestAStartThatMovesIsFound(t *testing.T) {
	t.Parallel()

	db := writeLog(t, []logged{
		{turn: 1, agentID: "a", admitted: 100, ended: 200},
		{turn: 2, agentID: "a", admitted: 300, started: 101, ended: 400},
	})
	started := moment(100)
	require.NoError(t, db.Create(&models.LegionAgent{AgentID: "a", StartedAt: &started, Status: models.StatusIdle}).Error)

	require.ErrorIs(t, compareBooks(t.Context(), db), errLogDisagrees)
}
