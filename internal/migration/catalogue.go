package migration

import (
	"database/sql"
	"encoding/json"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/database"
)

// found is what the catalogue says about one table.
type found struct {
	exists      bool
	columns     map[string]column
	constraints map[string]bool // by name: validated
	indexes     map[string]bool // by name: valid

	// triggers are those that are not switched off.
	triggers map[string]bool

	// options are the storage parameters that are set.
	options map[string]bool

	// compressed are the columns whose method of compression is set; compresses says that
	// the server was built with the one that is wanted.
	compressed map[string]bool
	compresses bool

	// schema and name are where the table is or would be made.
	schema, name string

	// functions are the bodies of the functions beside the agents' table, by their names.
	functions map[string]string
}

type column struct {
	dataType   string
	notNull    bool
	hasDefault bool
}

// readCatalogue describes both tables, and the functions beside them, in one statement,
// which locks nothing but the catalogue: a transaction that reads or writes the tables does not hold it up.
//
// A name without a schema is looked for in the current schema only, where CREATE
// TABLE would put it, and not along the search path: with one schema for each
// tenant in front of a shared one, each gets tables of its own. AutoMigrate does the
// same. parse_ident reads the name as GORM wrote it.
const readCatalogue = `WITH wanted (number, name) AS (
	SELECT number - 1, parse_ident(quoted) FROM jsonb_array_elements_text(?::jsonb) WITH ORDINALITY AS wanted (quoted, number)
), places AS (
	SELECT wanted.number, namespace.oid AS namespace, wanted.name[cardinality(wanted.name)] AS name
	FROM wanted
	JOIN pg_catalog.pg_namespace AS namespace ON namespace.nspname =
		CASE WHEN cardinality(wanted.name) > 1 THEN wanted.name[cardinality(wanted.name) - 1] ELSE current_schema() END
), tables AS (
	SELECT places.number, class.oid
	FROM places JOIN pg_catalog.pg_class AS class ON class.relnamespace = places.namespace
		AND class.relname = places.name AND class.relkind IN ('r', 'p')
	WHERE places.number < 2
)
SELECT number, 'table' AS kind, '' AS name, '' AS data_type, false AS first, false AS second
FROM tables
UNION ALL
SELECT number, 'column', attribute.attname::text, format_type(attribute.atttypid, attribute.atttypmod),
	attribute.attnotnull, attribute.atthasdef
FROM tables JOIN pg_catalog.pg_attribute AS attribute ON attribute.attrelid = tables.oid
WHERE attribute.attnum > 0 AND NOT attribute.attisdropped
UNION ALL
SELECT number, 'constraint', conname::text, '', convalidated, false
FROM tables JOIN pg_catalog.pg_constraint ON conrelid = tables.oid
UNION ALL
SELECT number, 'index', class.relname::text, '', indisvalid, false
FROM tables JOIN pg_catalog.pg_index ON indrelid = tables.oid JOIN pg_catalog.pg_class AS class ON class.oid = indexrelid
UNION ALL
SELECT number, 'trigger', tgname::text, '', tgenabled <> 'D', false
FROM tables JOIN pg_catalog.pg_trigger ON tgrelid = tables.oid
WHERE NOT tgisinternal
UNION ALL
SELECT number, 'option', split_part(option, '=', 1), '', false, false
FROM tables JOIN pg_catalog.pg_class AS class USING (oid) CROSS JOIN LATERAL unnest(class.reloptions) AS option
UNION ALL
SELECT number, 'compressed', attribute.attname::text, '', false, false
FROM tables JOIN pg_catalog.pg_attribute AS attribute ON attribute.attrelid = tables.oid
WHERE attribute.attnum > 0 AND NOT attribute.attisdropped AND attribute.attcompression <> ''
UNION ALL
SELECT 0, 'compresses', '', '', '` + compression + `' = ANY (enumvals), false
FROM pg_catalog.pg_settings WHERE name = 'default_toast_compression'
UNION ALL
SELECT number, 'place', nspname::text, places.name, false, false
FROM places JOIN pg_catalog.pg_namespace ON pg_namespace.oid = places.namespace
WHERE number < 2
UNION ALL
SELECT 0, 'function', proname::text, prosrc, false, false
FROM places JOIN pg_catalog.pg_proc ON pronamespace = places.namespace AND proname = places.name
WHERE places.number >= 2`

func read(tx *gorm.DB, tables []*Table) ([]found, error) {
	state := make([]found, len(tables))
	for i := range state {
		state[i] = found{
			columns: map[string]column{}, constraints: map[string]bool{}, indexes: map[string]bool{},
			triggers: map[string]bool{}, options: map[string]bool{}, compressed: map[string]bool{}, functions: map[string]string{},
		}
	}

	wanted := []string{tables[0].quoted, tables[1].quoted}
	for _, name := range tables[0].functions() {
		wanted = append(wanted, tables[0].db.Statement.Quote(name))
	}

	names, err := json.Marshal(wanted)
	if err != nil {
		return nil, err
	}

	query := clause.Expr{SQL: readCatalogue, Vars: []any{string(names)}, WithoutParentheses: true}
	err = database.Query(tx, query, func(rows *sql.Rows) error {
		var (
			number               int
			kind, name, dataType string
			first, second        bool
		)
		if err := rows.Scan(&number, &kind, &name, &dataType, &first, &second); err != nil {
			return err
		}

		switch kind {
		case "table":
			state[number].exists = true
		case "column":
			state[number].columns[name] = column{dataType: dataType, notNull: first, hasDefault: second}
		case "constraint":
			state[number].constraints[name] = first
		case "index":
			state[number].indexes[name] = first
		case "trigger":
			state[number].triggers[name] = first
		case "function":
			state[number].functions[name] = dataType
		case "place":
			state[number].schema, state[number].name = name, dataType
		case "option":
			state[number].options[name] = true
		case "compressed":
			state[number].compressed[name] = true
		case "compresses":
			state[number].compresses = first
		}

		return nil
	})

	return state, err
}
