package store

import (
	"database/sql"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
)

// agentIDColumn is the primary key of the agents.
const agentIDColumn = "agent_id"

// expression is SQL text with a ? for each var: a value becomes a parameter, a table a
// quoted name, an expression its own SQL.
//
// Our writes are such expressions, not GORM's Create and Updates: those would run the
// hooks of the application's model and touch its columns.
func expression(query string, vars ...any) clause.Expression {
	return clause.Expr{SQL: query, Vars: vars}
}

// queryFlag runs a query of at most one row, a boolean. NULL is false.
func queryFlag(tx *gorm.DB, query clause.Expression) (found, value bool, err error) {
	err = database.Query(tx, query, func(rows *sql.Rows) error {
		var nullable sql.NullBool

		err := rows.Scan(&nullable)
		found, value = true, nullable.Bool

		return err
	})

	return found, value, err
}
