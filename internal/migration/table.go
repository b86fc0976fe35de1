// Package migration compares Legion's two tables, as their models declare them,
// with the database's catalogue, and makes up the difference under one lock.
//
// What it knows about the tables it takes from GORM, so that Migrate, AutoMigrate
// and the SQL of DDL cannot come to differ.
package migration

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	"gorm.io/gorm/schema"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/models"
)

// A Table is one of the two tables as its model declares it.
type Table struct {
	db        *gorm.DB
	model     any
	name      string // with its schema if it has one, unquoted
	quoted    string // the same as it stands in SQL
	statement *gorm.Statement
	legion    map[string]*schema.Field // Legion's own columns, by name
}

// TablesOf returns the agents' table and the registry that the plugin of db, or the
// defaults, stand for. db is a session of [database.Session].
func TablesOf(db *gorm.DB, settings database.Settings) ([]*Table, error) {
	names, err := database.TablesOf(db, settings)
	if err != nil {
		return nil, err
	}

	agents, err := newTable(db, settings.Model, names.Agents, &models.LegionAgent{})
	if err != nil {
		return nil, err
	}

	identities, err := newTable(db, &models.LegionIdentity{}, names.Identities, &models.LegionIdentity{})
	if err != nil {
		return nil, err
	}

	return []*Table{agents, identities}, nil
}

func newTable(db *gorm.DB, model any, name string, reference any) (*Table, error) {
	statement := &gorm.Statement{DB: db}
	if err := statement.ParseWithSpecialTableName(model, name); err != nil {
		return nil, fmt.Errorf("%w: the agent model cannot be parsed: %w", fault.ErrInvalidConfig, err)
	}

	own := &gorm.Statement{DB: db}
	if err := own.Parse(reference); err != nil {
		return nil, fmt.Errorf("%w: the model cannot be parsed: %w", fault.ErrInvalidConfig, err)
	}

	table := &Table{
		db:        db,
		model:     model,
		name:      name,
		quoted:    db.Statement.Quote(name),
		statement: statement,
		legion:    own.Schema.FieldsByDBName,
	}

	if err := table.checkLengths(); err != nil {
		return nil, err
	}

	return table, nil
}

// checkLengths refuses the names of indexes and constraints that PostgreSQL would cut: no
// later run would find them. GORM shortens long ones, but counts letters, not bytes, and
// to a length that the NamingStrategy may set.
func (t *Table) checkLengths() error {
	names, _ := t.constraints()
	for _, index := range t.statement.Schema.ParseIndexes() {
		names = append(names, index.Name)
	}

	for _, name := range names {
		if len(name) > database.MaxNameBytes {
			return fmt.Errorf("%w: an index or constraint of the table %q would be called %q, which has %d bytes, and PostgreSQL keeps %d: "+
				"choose a shorter name for the table, or set IdentifierMaxLength of the NamingStrategy to %d",
				fault.ErrInvalidConfig, t.name, name, len(name), database.MaxNameBytes, database.MaxNameBytes)
		}
	}

	return nil
}

// Create returns the SQL that makes the table and its indexes.
func (t *Table) Create() ([]string, error) {
	statements, err := t.record(func(migrator gorm.Migrator) error { return migrator.CreateTable(t.model) })
	if err != nil {
		return nil, err
	}

	// GORM's own CREATE INDEX does nothing where another table has an index of that
	// name. Ours is an error then.
	statements = slices.DeleteFunc(statements, func(statement string) bool {
		return strings.HasPrefix(statement, "CREATE ") && !strings.HasPrefix(statement, "CREATE TABLE ")
	})
	statements[0] = breakLines(statements[0])

	for _, index := range t.statement.Schema.ParseIndexes() {
		statements = append(statements, t.createIndex(index, false))
	}

	if t.hasLeases() {
		statements = append(statements, t.setStorage(nil))
	}

	return statements, nil
}

// breakLines gives each column and constraint of a CREATE TABLE a line of its own,
// for those who keep it in a file.
func breakLines(createTable string) string {
	var (
		sql   strings.Builder
		depth int
		quote rune // that of the literal or name that we are in
	)

	for _, character := range createTable {
		if quote == 0 && depth == 1 && character == ')' {
			sql.WriteByte('\n')
		}

		sql.WriteRune(character)

		switch {
		case quote != 0:
			// A doubled quote inside ends one literal and begins the next.
			if character == quote {
				quote = 0
			}
		case character == '\'' || character == '"':
			quote = character
		case character == '(':
			depth++

			if depth == 1 {
				sql.WriteString("\n  ")
			}
		case character == ')':
			depth--
		case character == ',' && depth == 1:
			sql.WriteString("\n  ")
		}
	}

	return sql.String()
}

func (t *Table) addColumn(name string) ([]string, error) {
	return t.record(func(migrator gorm.Migrator) error { return migrator.AddColumn(t.model, name) })
}

func (t *Table) addConstraint(name string) ([]string, error) {
	return t.record(func(migrator gorm.Migrator) error { return migrator.CreateConstraint(t.model, name) })
}

// defaultOf returns the default of a column as SQL, empty if it has none.
func (t *Table) defaultOf(field *schema.Field) string {
	_, value, _ := strings.Cut(t.db.Migrator().FullDataTypeOf(field).SQL, " DEFAULT ")

	return value
}

// constraints returns the names of the constraints besides the primary key, sorted.
// The value says whether the constraint can be added first and validated later.
func (t *Table) constraints() ([]string, map[string]bool) {
	deferrable := make(map[string]bool)
	for name := range t.statement.Schema.ParseCheckConstraints() {
		deferrable[name] = true
	}

	for name := range t.statement.Schema.ParseUniqueConstraints() {
		deferrable[name] = false
	}

	if !t.db.DisableForeignKeyConstraintWhenMigrating && !t.db.IgnoreRelationshipsWhenMigrating {
		for _, relation := range t.statement.Schema.Relationships.Relations {
			if relation.Field.IgnoreMigration {
				continue
			}

			if constraint := relation.ParseConstraint(); constraint != nil && constraint.Schema == t.statement.Schema {
				deferrable[constraint.Name] = true
			}
		}
	}

	names := make([]string, 0, len(deferrable))
	for name := range deferrable {
		names = append(names, name)
	}

	slices.Sort(names)

	return names, deferrable
}

// createIndex is GORM's CREATE INDEX, but that CONCURRENTLY is for us to choose and
// that a name which is taken is an error.
func (t *Table) createIndex(index *schema.Index, concurrently bool) string {
	var sql strings.Builder

	sql.WriteString("CREATE ")

	if index.Class != "" {
		sql.WriteString(index.Class + " ")
	}

	sql.WriteString("INDEX ")

	if concurrently {
		sql.WriteString("CONCURRENTLY ")
	}

	sql.WriteString(t.statement.Quote(index.Name) + " ON " + t.quoted)

	if index.Type != "" {
		sql.WriteString(" USING " + index.Type)
	}

	columns := make([]string, 0, len(index.Fields))
	for _, option := range index.Fields {
		column := option.Expression
		if column == "" {
			column = t.statement.Quote(option.DBName)
		}

		if option.Collate != "" {
			column += " COLLATE " + option.Collate
		}

		if option.Sort != "" {
			column += " " + option.Sort
		}

		columns = append(columns, column)
	}

	sql.WriteString(" (" + strings.Join(columns, ", ") + ")")

	if index.Option != "" && !strings.EqualFold(strings.TrimSpace(index.Option), "CONCURRENTLY") {
		sql.WriteString(" " + index.Option)
	}

	if index.Where != "" {
		sql.WriteString(" WHERE " + index.Where)
	}

	return sql.String()
}

func (t *Table) dropIndex(index *schema.Index, concurrently bool) string {
	name := t.statement.Quote(index.Name)
	if dot := strings.LastIndexByte(t.name, '.'); dot >= 0 {
		// An index lives in its table's schema, which need not be in the search path.
		name = t.statement.Quote(t.name[:dot]) + "." + name
	}

	if concurrently {
		return "DROP INDEX CONCURRENTLY " + name
	}

	return "DROP INDEX " + name
}

// record returns the SQL that GORM's migrator would run for the table.
func (t *Table) record(build func(migrator gorm.Migrator) error) ([]string, error) {
	recorder := &recorder{Interface: logger.Discard}
	dry := t.db.Session(&gorm.Session{NewDB: true, DryRun: true, Logger: recorder})
	// The migrator throws the application's prepared statements away after a change.
	dry.PrepareStmt = false

	// Table would take a name with a blank for SQL text.
	dry = dry.Table(t.name)
	dry.Statement.Table, dry.Statement.TableExpr = t.name, nil

	if err := build(dry.Migrator()); err != nil {
		return nil, fmt.Errorf("%w: no SQL can be written for table %q: %w", fault.ErrInvalidConfig, t.name, err)
	}

	return recorder.statements, nil
}

// recorder is a logger that keeps the statements of a dry run. A connection pool
// would be the other place to stand in, but plugins that choose the pool for each
// statement would pass it by, and run what was to be recorded.
type recorder struct {
	logger.Interface

	statements []string
}

func (r *recorder) LogMode(logger.LogLevel) logger.Interface { return r }

func (*recorder) Trace(_ context.Context, _ time.Time, text func() (string, int64), _ error) {
	text()
}

// ParamsFilter implements gorm.ParamsFilter. It is the one place that sees the
// statement before its placeholders are filled in for a human reader, which would
// change a "$1" that stands in a default.
func (r *recorder) ParamsFilter(_ context.Context, sql string, parameters ...any) (string, []any) {
	r.statements = append(r.statements, sql)

	return sql, parameters
}

var _ gorm.ParamsFilter = (*recorder)(nil)
