package migration

import (
	"slices"
	"strings"

	"github.com/legion-gorm/legion/internal/notify"
	"github.com/legion-gorm/legion/internal/serverfunction"
)

// functions are the names of the functions that belong to the agents' table, with its
// schema if it is named.
func (t *Table) functions() []string {
	return append(serverfunction.Names(t.name), t.name+notify.FunctionSuffix)
}

// own are those of the functions that are there and were made here, quoted. What calls
// comes before what is called.
func (f *found) own() []string {
	var own []string

	for name, source := range f.functions {
		if notify.IsOurs(source) || serverfunction.IsOurs(source) {
			own = append(own, f.quote(name))
		}
	}

	slices.Sort(own)

	return own
}

// quote qualifies a name with the schema of the table.
func (f *found) quote(name string) string { return quote(f.schema) + "." + quote(name) }

// upgradeServerFunction plans the functions that decide in one round trip. Their bodies
// name the tables with the schema that they are in, since their search_path has nothing
// but PostgreSQL's own.
func (p *plan) upgradeServerFunction(state []found) {
	agents, identities := &state[0], &state[1]
	place := serverfunction.Place{Agents: agents.quote(agents.name), Identities: identities.quote(identities.name)}

	names := serverfunction.Names(agents.name)
	for i, name := range names {
		place.Functions[i] = agents.quote(name)
	}

	for i, statement := range serverfunction.Create(place) {
		source := agents.functions[names[i]]

		if strings.Contains(statement, "$legion$"+source+"$legion$") {
			continue
		}

		// A function of that name that is somebody else's stays: then this is an error.
		if source != "" && !serverfunction.IsOurs(source) {
			statement = strings.Replace(statement, "CREATE OR REPLACE", "CREATE", 1)
		}

		p.together = append(p.together, statement)
	}
}

// quote quotes a name that has dots of its own, which GORM's quoting takes apart.
func quote(name string) string {
	return `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
}
