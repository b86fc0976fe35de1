package pgtest

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

const (
	initProgram   = "initdb"
	serverProgram = "postgres"
)

// binaryPatterns are where packages put the server's binaries without putting them in PATH.
var binaryPatterns = []string{
	"/usr/lib/postgresql/*/bin",                          // Debian, Ubuntu
	"/usr/pgsql-*/bin",                                   // Red Hat, from postgresql.org
	"/opt/homebrew/opt/postgresql@*/bin",                 // Homebrew on Apple silicon
	"/usr/local/opt/postgresql@*/bin",                    // Homebrew on Intel
	"/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",    // Homebrew on Linux
	"/Applications/Postgres.app/Contents/Versions/*/bin", // Postgres.app
}

var errNoBinaries = errors.New("no directory with both initdb and postgres in PATH, /usr/lib/postgresql, /usr/pgsql-* or Homebrew's places")

// binaryDirectory finds the directory of the server's binaries: the first one in path, which has the
// form of PATH, or else the newest version among the matches of the first pattern that has any.
func binaryDirectory(path string, patterns []string) (string, error) {
	for _, directory := range filepath.SplitList(path) {
		// The server runs in a directory of its own, where a relative name means something else.
		if filepath.IsAbs(directory) && isBinaryDirectory(directory) {
			return directory, nil
		}
	}
	for _, pattern := range patterns {
		directories, err := filepath.Glob(pattern)
		if err != nil {
			return "", fmt.Errorf("look for server binaries in %s: %w", pattern, err)
		}
		directories = slices.DeleteFunc(directories, func(directory string) bool { return !isBinaryDirectory(directory) })
		if len(directories) > 0 {
			return slices.MaxFunc(directories, func(a, b string) int { return cmp.Compare(version(a), version(b)) }), nil
		}
	}
	return "", errNoBinaries
}

var versionPattern = regexp.MustCompile(`\d+(\.\d+)?`)

// version reads the last number in a path such as /usr/lib/postgresql/15/bin, since as text 9.6 would
// sort after 17. A path without one sorts first.
func version(directory string) float64 {
	latest := 0.0
	for _, digits := range versionPattern.FindAllString(directory, -1) {
		if number, err := strconv.ParseFloat(digits, 64); err == nil {
			latest = number
		}
	}

	return latest
}

func isBinaryDirectory(directory string) bool {
	for _, name := range []string{initProgram, serverProgram} {
		info, err := os.Stat(filepath.Join(directory, name)) //nolint:gosec // PATH is there to be followed
		if err != nil || !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
			return false
		}
	}
	return true
}
