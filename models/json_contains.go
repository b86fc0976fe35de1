package models

import (
	"encoding/json"
	"errors"
	"fmt"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"
)

// JSONContainsExpression is the condition "column @> document" of PostgreSQL. It
// is made by [JSONContains].
type JSONContainsExpression struct {
	column   string
	document any
}

// JSONContains matches rows whose jsonb column contains the document at its top
// level. It stands beside datatypes.JSONQuery, which has no containment:
//
//	db.Where(models.JSONContains("metadata", map[string]any{"tenant": "acme"})).Find(&agents)
//
// The column may be qualified with its table ("legion_agents.metadata"). The
// document is anything that encoding/json can marshal; a json.RawMessage, a
// datatypes.JSON or a []byte is taken as the JSON text that it is. It reaches the database as
// a parameter, never as SQL text. A GIN index on the column serves the condition.
//
// [gorm.DB.Not] negates it. As everywhere in SQL, neither form matches a row
// whose column is NULL.
//
// A document that cannot be marshalled and a dialect other than PostgreSQL are
// reported as the statement's error.
func JSONContains(column string, document any) *JSONContainsExpression {
	return &JSONContainsExpression{column: column, document: document}
}

// Build implements clause.Expression.
func (c *JSONContainsExpression) Build(builder clause.Builder) {
	text, err := c.documentText(builder)
	if err != nil {
		_ = builder.AddError(err)
		// A statement that failed is not run, but GORM loses the error of a subquery. No
		// table has this column, so the server refuses whatever the condition is part of.
		builder.WriteQuoted(failedColumn)

		return
	}

	builder.WriteQuoted(c.column)
	_, _ = builder.WriteString(" @> ")
	// Bound as a string with a cast: in pgx's exec and simple-protocol modes a
	// []byte would arrive as bytea.
	builder.AddVar(builder, text)
	_, _ = builder.WriteString("::jsonb")
}

// NegationBuild implements clause.NegationExpressionBuilder.
func (c *JSONContainsExpression) NegationBuild(builder clause.Builder) {
	_, _ = builder.WriteString("NOT (")
	c.Build(builder)
	_ = builder.WriteByte(')')
}

const failedColumn = "legion: JSONContains has no document"

var errJSONContainsDialect = errors.New("legion: JSONContains needs PostgreSQL: open the connection with gorm.io/driver/postgres")

func (c *JSONContainsExpression) documentText(builder clause.Builder) (string, error) {
	if statement, ok := builder.(*gorm.Statement); ok && statement.Name() != "postgres" {
		return "", errJSONContainsDialect
	}

	document := c.document

	// encoding/json would write it in base 64, which no column contains.
	if text, ok := document.([]byte); ok {
		document = json.RawMessage(text)
	}

	if raw, ok := document.(json.RawMessage); ok && json.Valid(raw) {
		return string(raw), nil
	}

	text, err := json.Marshal(document)
	if err != nil {
		// The cause names the Go type; the caller's value is not in it.
		return "", fmt.Errorf("legion: JSONContains on column %q: the document cannot be written as JSON: %w", c.column, err)
	}

	return string(text), nil
}

var (
	_ clause.Expression                = (*JSONContainsExpression)(nil)
	_ clause.NegationExpressionBuilder = (*JSONContainsExpression)(nil)
)
