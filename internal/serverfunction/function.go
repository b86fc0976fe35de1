// Package serverfunction holds the server's side of an admission in one round trip: the
// SQL of its functions, their names, and the codes that they raise.
//
// They are the same protocol as the limiter's own statements, and take the same locks, so
// that both kinds of callers may work on one database at once. Whoever changes one of the
// two changes the other: a test feeds both the same calls.
package serverfunction

import (
	"database/sql"
	_ "embed"
	"fmt"
	"strings"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/run"
	"github.com/legion-gorm/legion/internal/slotsql"
	"github.com/legion-gorm/legion/internal/usagesql"
)

// version is part of the functions' names. It is raised with any change of what they take,
// return or do, so that two versions of this library can work on one database while an
// application is deployed.
const version = "v1"

// The codes of what the functions raise. Those of PostgreSQL begin with other letters.
const (
	CodeDenied     = "LG001"
	CodeBusy       = "LG002" // an identity must be registered, and somebody is in the way
	CodeIsolation  = "LG003"
	CodeCannotTurn = "LG004" // the turn cannot begin, as the measurement says
	CodeLiveRun    = "LG005" // the turn cannot begin, as was found when it was written
)

// HasMeasurement reports whether what is raised with the code has what the function would
// have returned as its detail.
func HasMeasurement(code string) bool {
	return code == CodeDenied || code == CodeCannotTurn
}

//go:embed measure.sql
var measureSQL string

//go:embed revoke.sql
var revokeSQL string

//go:embed decide.sql
var decideSQL string

//go:embed enforce.sql
var enforceSQL string

// mark is in the body of each function, so that Migrate knows its own.
const mark = "Made by legion.WithServerFunction"

// IsOurs reports whether the body of a function is one of this package's.
func IsOurs(source string) bool { return strings.Contains(source, mark) }

// suffixes follow the name of the agents' table in those of the functions, in the order
// in which they are made.
func suffixes() []string {
	return []string{"_measure_" + version, "_revoke_" + version, "_decide_" + version, "_enforce_" + version}
}

// Names returns the functions' names for an agents' table.
func Names(agents string) []string {
	names := suffixes()
	for i := range names {
		names[i] = agents + names[i]
	}

	return names
}

// EnforceName is the name of the one that is called.
func EnforceName(agents string) string { return Names(agents)[3] }

// parameters are those of the functions, in the order of suffixes.
func parameters() []string {
	return []string{"(text, jsonb, jsonb, numeric)", "(text, jsonb, jsonb)", "(jsonb)", "(jsonb)"}
}

// IsThere reports whether the database has the functions for this agents' table, and this
// role may call them, in a way that is no error where that is not so. A database whose
// default privileges are strict keeps them from everybody but who has migrated.
func IsThere(tx *gorm.DB, agents string) (there bool, err error) {
	const callable = "coalesce(has_function_privilege(to_regprocedure(?)::oid, 'EXECUTE'), false)"

	names := Names(agents)
	signatures := make([]any, len(names))

	for i, parameters := range parameters() {
		signatures[i] = tx.Statement.Quote(names[i]) + parameters
	}

	statement := clause.Expr{
		SQL:                database.Primary + "SELECT " + strings.Repeat(callable+" AND ", len(names)-1) + callable,
		Vars:               signatures,
		WithoutParentheses: true,
	}
	err = database.Query(tx, statement, func(rows *sql.Rows) error { return rows.Scan(&there) })

	return there, err
}

// A Place says where the tables are. The names are quoted, and qualified with their
// schema, since the functions' search_path has nothing but PostgreSQL's own.
type Place struct {
	Agents, Identities string

	// Functions are those of Names.
	Functions [4]string
}

// Create returns the SQL that makes the functions, or replaces them.
func Create(place Place) []string {
	measuredStart := "to_timestamp(0) + (v_measured ->> 'started_at')::bigint * interval '1 microsecond'"
	replacer := strings.NewReplacer(
		"{{measure}}", place.Functions[0],
		"{{revoke}}", place.Functions[1],
		"{{decide}}", place.Functions[2],
		"{{enforce}}", place.Functions[3],
		"{{agents}}", place.Agents,
		"{{identities}}", place.Identities,
		"{{marker}}", mark,
		"{{live own}}", run.Live("own", "v_now"),
		"{{live agent}}", run.Live("agent", run.Now),
		"{{measured start}}", measuredStart,
		"{{slots}}", slotsql.Counts("agent", "v_now"),
		"{{holds slot}}", "agent.agent_id <> p_agent AND "+slotsql.IsHeld("agent", "v_now"),
		"{{sums}}", usagesql.SumIf("v_rule.max_tokens IS NOT NULL", "entry.total_tokens")+`,
        `+usagesql.SumIf("v_rule.max_evals IS NOT NULL", "entry.evals"),
		"{{entries}}", usagesql.Entries("agent.usage"),
		"{{within}}", fmt.Sprintf("agent.updated_at > v_now - v_rule.span - %d * interval '1 microsecond' AND ", usagesql.UpdatedSlack.Microseconds())+
			usagesql.IsAfter("entry.at", "v_from"),
	)

	created := []string{measureSQL, revokeSQL, decideSQL, enforceSQL}
	for i := range created {
		created[i] = strings.TrimSpace(replacer.Replace(created[i]))
	}

	return created
}
