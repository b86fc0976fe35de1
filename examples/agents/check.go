package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/examples/internal/table"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
)

// snapshotPause is how often the slots are counted.
const snapshotPause = 5 * time.Millisecond

// watchSlots counts the slots that are held, by the database's clock, until the function
// that it returns is called.
func watchSlots(ctx context.Context, db *gorm.DB) (stop func() (snapshots int, most int64)) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	snapshots, most := 0, int64(0)

	go func() {
		defer close(done)

		for {
			var held int64

			err := db.WithContext(ctx).Raw(`WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
				SELECT count(*) FROM legion_agents, clock WHERE status = 'running' AND lease_expires_at > clock.now`).Scan(&held).Error
			if err == nil {
				snapshots++
				most = max(most, held)
			}

			if sleep(ctx, snapshotPause) != nil {
				return
			}
		}
	}()

	return func() (int, int64) {
		cancel()
		<-done

		return snapshots, most
	}
}

// An outcome is what the database and the processes say at the end.
type outcome struct {
	counts map[outcomeKind]int

	// interrupted agents were admitted by the process that was killed, and not resumed.
	interrupted int

	// told are the tokens that the processes know to be recorded, each call once; found
	// are those in the database.
	told, found int64

	// lost are calls that a process knows to be recorded and the database does not have.
	lost []string

	// doubled are usage entries that are in the database more than once.
	doubled int

	snapshots         int
	mostSlots         int64
	killedAfter, took time.Duration
}

func judge(db *gorm.DB, processes ...[]line) (*outcome, error) {
	judged := &outcome{counts: map[outcomeKind]int{}}
	told := map[[2]string]int64{}

	for _, lines := range processes {
		for _, line := range lines {
			if line.Outcome != "" {
				judged.counts[line.Outcome]++
			} else {
				told[[2]string{line.Agent, line.Usage}] = line.Tokens
			}
		}
	}

	var agents []models.LegionAgent
	if err := db.Order("agent_id").Find(&agents).Error; err != nil {
		return nil, fmt.Errorf("read the agents: %w", err)
	}

	found := map[[2]string]bool{}

	for _, agent := range agents {
		if agent.Status == models.StatusRunning && agent.ParentAgentID == nil {
			judged.interrupted++
		}

		entries, err := agent.UsageEntries()
		if err != nil {
			return nil, fmt.Errorf("read the usage: %w", err)
		}

		for _, entry := range entries {
			key := [2]string{agent.AgentID, entry.ID}
			if found[key] {
				judged.doubled++
			}

			found[key] = true
		}
	}

	for key, tokens := range told {
		judged.told += tokens

		if !found[key] {
			judged.lost = append(judged.lost, key[0]+", "+key[1])
		}
	}

	slices.Sort(judged.lost)

	report, err := limiter.Check(db, "", rule)
	if err != nil {
		return nil, fmt.Errorf("check the rule: %w", err)
	}

	judged.found = report.Rules[0].Usage.Tokens

	return judged, nil
}

func (o *outcome) print(out io.Writer) error {
	agents := table.New("agents", "")
	agents.Add("finished", o.counts[finished])
	agents.Add("recovered from the process that was killed", o.counts[recovered])
	agents.Add("interrupted, with no budget left to resume them", o.interrupted)
	agents.Add("denied, since the budget was spent", o.counts[denied])
	agents.Add("not begun when their process was killed", 2*agentsEach-o.counts[finished]-o.counts[recovered]-o.counts[denied]-o.interrupted)

	limits := table.New("limits", "", "at most")
	limits.Add(fmt.Sprintf("slots held at once, in %d snapshots", o.snapshots), o.mostSlots, slots)
	limits.Add("tokens recorded, as limiter.Check sums them", o.found, budget)
	limits.Add("tokens that the processes know to be recorded", o.told, o.found)

	for _, printed := range []*table.Table{agents, limits} {
		if err := printed.Write(out); err != nil {
			return err
		}

		if _, err := fmt.Fprintln(out); err != nil {
			return fmt.Errorf("print: %w", err)
		}
	}

	if err := o.verdict(); err != nil {
		return err
	}

	_, err := fmt.Fprintf(out, "The process was killed after %s. %s later all was done: no limit was exceeded, and no token lost.\n",
		o.killedAfter.Round(time.Millisecond), (o.took - o.killedAfter).Round(time.Millisecond))
	if err != nil {
		return fmt.Errorf("print: %w", err)
	}

	return nil
}

// verdict is an error that names all that should not have happened.
func (o *outcome) verdict() error {
	var errs []error

	if o.mostSlots > slots {
		errs = append(errs, fmt.Errorf("%d slots were held at once", o.mostSlots))
	}

	if o.found > budget {
		errs = append(errs, fmt.Errorf("%d tokens were recorded", o.found))
	}

	if len(o.lost) > 0 {
		errs = append(errs, fmt.Errorf("recorded calls are missing: %q", o.lost))
	}

	if o.doubled > 0 {
		errs = append(errs, fmt.Errorf("%d calls are recorded twice", o.doubled))
	}

	if o.counts[finished] == 0 || o.counts[recovered] == 0 {
		errs = append(errs, errors.New("no agent finished, or none was recovered: the story was not told"))
	}

	return errors.Join(errs...)
}
