package migration

import (
	"github.com/legion-gorm/legion/internal/notify"
)

// Notify returns the SQL that makes the triggers of the agents' table, and their
// function.
func (t *Table) Notify() []string {
	return t.notify(false)
}

func (t *Table) notify(replace bool) []string {
	function := t.notifyFunction()

	return append([]string{notify.CreateFunction(function, replace)}, notify.CreateTriggers(t.quoted, function)...)
}

// notifyFunction is the function's name, quoted. It lives in the schema of its table.
func (t *Table) notifyFunction() string {
	return t.db.Statement.Quote(t.name + notify.FunctionSuffix)
}

// upgradeNotify plans what is missing of the triggers. A function of that name that is
// somebody else's stays: then CREATE FUNCTION is an error.
func (p *plan) upgradeNotify(table *Table, state *found) {
	source := state.functions[state.name+notify.FunctionSuffix]
	missing := !notify.IsCurrent(source)

	for _, trigger := range notify.Triggers() {
		missing = missing || !state.triggers[trigger]
	}

	if missing {
		p.together = append(p.together, table.notify(notify.IsOurs(source))...)
	}
}
