package migration

import (
	"fmt"
	"strings"
)

// storage are the storage parameters of the agents' table, in the order in which they are
// set. One that the table has already, of whatever value, is left alone.
//
// fillfactor leaves room on each page for the next versions of its rows, so that a renewal,
// which changes no index, can stay on the page. 80 is enough for a table of which all rows
// are running: see TestOneStatementRenewsAllTurnsOfAProcess.
//
// The rows that change are few among those that rest, but autovacuum goes by the share of
// all. At PostgreSQL's 20 % of a million agents the versions that are over would lie about
// until they are 200,000, and the estimates of how many agents started within a window
// would be as old. See docs/profile.md for what was measured.
var storage = []struct{ name, value string }{
	{"fillfactor", "80"},
	{"autovacuum_vacuum_scale_factor", "0.02"},
	{"autovacuum_analyze_scale_factor", "0.02"},
}

// setStorage sets the storage parameters that are not set, or is empty.
func (t *Table) setStorage(set map[string]bool) string {
	var missing []string

	for _, parameter := range storage {
		if !set[parameter.name] {
			missing = append(missing, parameter.name+" = "+parameter.value)
		}
	}

	if len(missing) == 0 {
		return ""
	}

	return fmt.Sprintf("ALTER TABLE %s SET (%s)", t.quoted, strings.Join(missing, ", "))
}

// hasLeases reports whether the table is the agents'.
func (t *Table) hasLeases() bool { return t.legion["lease_expires_at"] != nil }

func (p *plan) upgradeStorage(table *Table, state *found) {
	if !table.hasLeases() {
		return
	}

	if statement := table.setStorage(state.options); statement != "" {
		p.together = append(p.together, statement)
	}
}

// compression is the method for the usage of conversations, which an append decompresses
// and compresses again, and a verdict on tokens decompresses. Of 300 entries with random IDs it
// makes as little as PostgreSQL's own method, and an append takes half of the time. Not
// every server is built with it, so DDL leaves it out.
const compression = "lz4"

// upgradeCompression sets it where no method is set. What is stored already stays as it is.
func (p *plan) upgradeCompression(table *Table, state *found) {
	usage := table.legion["usage"]
	if usage == nil || !state.compresses || state.compressed[usage.DBName] {
		return
	}

	p.together = append(p.together,
		"ALTER TABLE "+table.quoted+" ALTER COLUMN "+table.statement.Quote(usage.DBName)+" SET COMPRESSION "+compression)
}
