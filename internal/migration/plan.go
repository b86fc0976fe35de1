package migration

import (
	"fmt"
	"strings"

	"gorm.io/gorm"
	"gorm.io/gorm/schema"

	"github.com/legion-gorm/legion/internal/fault"
)

// A plan is the SQL that makes up the difference between the models and the
// database.
type plan struct {
	// together is run in one transaction.
	together []string

	// alone is run statement by statement, outside any transaction: what scans a
	// table that may be large, without keeping writers out.
	alone []string
}

func (p *plan) empty() bool { return len(p.together) == 0 && len(p.alone) == 0 }

// first returns one statement of a plan that is not empty.
func (p *plan) first() string {
	if len(p.together) > 0 {
		return p.together[0]
	}

	return p.alone[0]
}

// compare plans what is missing. With options.Concurrently, the indexes of a table that
// exists are built, and its constraints validated, alone.
func compare(tx *gorm.DB, tables []*Table, options Options) (*plan, error) {
	state, err := read(tx, tables)
	if err != nil {
		return nil, err
	}

	result := &plan{}

	for i, table := range tables {
		if !state[i].exists {
			statements, err := table.Create()
			if err != nil {
				return nil, err
			}

			result.together = append(result.together, statements...)
		} else if err := result.upgrade(table, &state[i], options.Concurrently); err != nil {
			return nil, err
		}

		result.upgradeCompression(table, &state[i])
	}

	if options.Notify {
		result.upgradeNotify(tables[0], &state[0])
	}

	if options.ServerFunction {
		result.upgradeServerFunction(state)
	}

	return result, nil
}

func (p *plan) upgrade(table *Table, state *found, concurrently bool) error {
	if err := p.upgradeColumns(table, state); err != nil {
		return err
	}

	if err := p.upgradeConstraints(table, state, concurrently); err != nil {
		return err
	}

	p.upgradeIndexes(table, state, concurrently)
	p.upgradeStorage(table, state)

	return nil
}

func (p *plan) upgradeColumns(table *Table, state *found) error {
	for _, name := range table.statement.Schema.DBNames {
		field := table.statement.Schema.FieldsByDBName[name]
		if field.IgnoreMigration {
			continue
		}

		existing, ok := state.columns[name]
		if !ok {
			statements, err := table.addColumn(name)
			if err != nil {
				return err
			}

			p.together = append(p.together, statements...)

			continue
		}

		// How the application declares its own columns is between it and AutoMigrate.
		if own := table.legion[name]; own != nil {
			if err := p.upgradeColumn(table, own, existing); err != nil {
				return err
			}
		}
	}

	return nil
}

func (p *plan) upgradeColumn(table *Table, field *schema.Field, existing column) error {
	if wanted := catalogueType(field); existing.dataType != wanted {
		// Converting is not ours to do: a timestamp without a time zone, for one, means
		// what only the application knows.
		return fmt.Errorf("%w: column %q of table %q has the type %s: convert it to %s with ALTER TABLE",
			fault.ErrNotMigrated, field.DBName, table.name, existing.dataType, wanted)
	}

	alter := "ALTER TABLE " + table.quoted + " ALTER COLUMN " + table.statement.Quote(field.DBName)
	value := table.defaultOf(field)

	if value != "" && !existing.hasDefault {
		p.together = append(p.together, alter+" SET DEFAULT "+value)
	}

	if field.NotNull && !existing.notNull {
		if value != "" {
			quoted := table.statement.Quote(field.DBName)
			p.together = append(p.together,
				"UPDATE "+table.quoted+" SET "+quoted+" = DEFAULT WHERE "+quoted+" IS NULL")
		}

		p.together = append(p.together, alter+" SET NOT NULL")
	}

	return nil
}

// catalogueType is the type of one of Legion's own columns, which all have a type
// tag, in the catalogue's words.
func catalogueType(field *schema.Field) string {
	dataType := strings.ToLower(field.TagSettings["TYPE"])
	if dataType == "timestamptz" {
		return "timestamp with time zone"
	}

	return dataType
}

func (p *plan) upgradeConstraints(table *Table, state *found, concurrently bool) error {
	names, deferrable := table.constraints()
	for _, name := range names {
		validated, exists := state.constraints[name]
		if !exists {
			statements, err := table.addConstraint(name)
			if err != nil {
				return err
			}

			if concurrently && deferrable[name] {
				// Adding it locks everybody out for as long as it takes to look at every row.
				// Validating it later does not.
				statements[len(statements)-1] += " NOT VALID"
			} else {
				validated = true
			}

			p.together = append(p.together, statements...)
		}

		if validated {
			continue
		}

		validate := "ALTER TABLE " + table.quoted + " VALIDATE CONSTRAINT " + table.statement.Quote(name)
		if concurrently {
			p.alone = append(p.alone, validate)
		} else {
			p.together = append(p.together, validate)
		}
	}

	return nil
}

func (p *plan) upgradeIndexes(table *Table, state *found, concurrently bool) {
	for _, index := range table.statement.Schema.ParseIndexes() {
		valid, exists := state.indexes[index.Name]
		if valid {
			continue
		}

		var statements []string
		if exists {
			// What a concurrent build left behind that was cut short: it costs every write
			// and serves no read.
			statements = append(statements, table.dropIndex(index, concurrently))
		}

		statements = append(statements, table.createIndex(index, concurrently))

		if concurrently {
			p.alone = append(p.alone, statements...)
		} else {
			p.together = append(p.together, statements...)
		}
	}
}
