// Package table prints what the examples have to show.
package table

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

const gap = "  "

// A Table is rows under a header, each column as wide as its widest cell. The zero value
// is an empty table.
type Table struct {
	rows [][]string
}

// New returns a table with the given header.
func New(header ...string) *Table {
	return &Table{rows: [][]string{header}}
}

// Add appends a row. It must have as many cells as the header.
func (t *Table) Add(cells ...any) {
	row := make([]string, len(cells))
	for i, cell := range cells {
		row[i] = fmt.Sprint(cell)
	}

	t.rows = append(t.rows, row)
}

// Write prints the table, indented by two spaces. Columns of numbers stand to the right.
func (t *Table) Write(w io.Writer) error {
	var text strings.Builder

	for _, row := range t.rows {
		var line strings.Builder

		for column, cell := range row {
			padding := strings.Repeat(" ", t.width(column)-utf8.RuneCountInString(cell))
			if t.isNumeric(column) {
				line.WriteString(gap + padding + cell)
			} else {
				line.WriteString(gap + cell + padding)
			}
		}

		text.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}

	_, err := io.WriteString(w, text.String())
	if err != nil {
		return fmt.Errorf("print a table: %w", err)
	}

	return nil
}

func (t *Table) width(column int) int {
	width := 0
	for _, row := range t.rows {
		width = max(width, utf8.RuneCountInString(row[column]))
	}

	return width
}

func (t *Table) isNumeric(column int) bool {
	if len(t.rows) == 1 {
		return false
	}

	for _, row := range t.rows[1:] {
		if strings.Trim(row[column], "0123456789,.-") != "" {
			return false
		}
	}

	return true
}
