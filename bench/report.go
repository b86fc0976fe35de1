package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	tableFile = "performance.md"
	jsonFile  = "performance.json"
	plotFile  = "growth.svg"

	publicFile   = 0o644
	publicFolder = 0o755
)

// A report is what a run has measured, and with what.
type report struct {
	scale    scale
	date     time.Time
	versions []string
	settings []string

	hows    []how
	results []result
	sizes   []size
}

// A how says what a benchmark measures.
type how struct{ name, text string }

func newReport(ctx context.Context, harness *harness) (_ *report, err error) {
	report := &report{scale: harness.scale, date: time.Now().UTC()}

	connection, err := pgx.Connect(ctx, harness.server.DSN(""))
	if err != nil {
		return nil, fmt.Errorf("connect to the server: %w", err)
	}
	defer func() { err = errors.Join(err, connection.Close(ctx)) }()

	var version string
	if err := connection.QueryRow(ctx, "SHOW server_version").Scan(&version); err != nil {
		return nil, fmt.Errorf("ask the server for its version: %w", err)
	}

	report.versions = append(report.versions, "PostgreSQL "+version,
		fmt.Sprintf("%s on %s/%s, %d processors", runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU()))

	if build, ok := debug.ReadBuildInfo(); ok {
		for _, module := range build.Deps {
			switch module.Path {
			case "gorm.io/gorm", "gorm.io/driver/postgres", "github.com/jackc/pgx/v5":
				report.versions = append(report.versions, module.Path+" "+module.Version)
			}
		}
	}

	for _, name := range []string{"fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size", "wal_sync_method"} {
		var value string
		if err := connection.QueryRow(ctx, "SELECT current_setting($1)", name).Scan(&value); err != nil {
			return nil, fmt.Errorf("read the setting %s: %w", name, err)
		}

		report.settings = append(report.settings, name+" "+value)
	}

	return report, nil
}

// add runs the benchmark and adds what it has found.
func (r *report) add(ctx context.Context, harness *harness, benchmark benchmark) error {
	results, err := harness.run(ctx, benchmark)
	if err != nil {
		return err
	}

	r.hows = append(r.hows, how{benchmark.name, benchmark.how})
	r.results = append(r.results, results...)

	if harness.sizes != nil {
		r.sizes = harness.sizes
	}

	return nil
}

// write prints the table to a terminal.
func (r *report) write(out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)

	var text strings.Builder

	line := func(cells []string) { text.WriteString(strings.Join(cells, "\t") + "\t\n") }
	line(header[1:])

	name := ""
	for _, result := range r.results {
		if result.Name != name {
			name = result.Name
			text.WriteString("\n" + name + "\n")
		}

		line(result.cells()[1:])
	}

	if _, err := io.WriteString(table, text.String()); err != nil {
		return fmt.Errorf("print the table: %w", err)
	}

	if err := table.Flush(); err != nil {
		return fmt.Errorf("print the table: %w", err)
	}

	return nil
}

// save writes all files to the folder.
func (r *report) save(folder string) error {
	document, err := json.MarshalIndent(r.results, "", "  ")
	if err != nil {
		return err
	}

	if err := os.MkdirAll(folder, publicFolder); err != nil {
		return fmt.Errorf("make the folder of -out: %w", err)
	}

	return errors.Join(
		saveFile(folder, tableFile, r.markdown()),
		saveFile(folder, jsonFile, string(document)+"\n"),
		saveFile(folder, plotFile, drawing(r.results).SVG()),
	)
}

func saveFile(folder, name, text string) error {
	if err := os.WriteFile(filepath.Join(folder, name), []byte(text), publicFile); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}

	return nil
}
