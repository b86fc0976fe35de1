package pgtest

import (
	"cmp"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
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

// binaryDirectory finds the directory of the server's binaries: in PATH, or else the newest version
// that a pattern finds.
func binaryDirectory(patterns []string) (string, error) {
	if postgres, err := exec.LookPath("postgres"); err == nil {
		if resolved, err := filepath.EvalSymlinks(postgres); err == nil && isBinaryDirectory(filepath.Dir(resolved)) {
			return filepath.Dir(resolved), nil
		}
	}
	for _, pattern := range patterns {
		directories, err := filepath.Glob(pattern)
		if err != nil {
			return "", err
		}
		slices.SortFunc(directories, func(a, b string) int { return cmp.Compare(majorVersion(b), majorVersion(a)) })
		for _, directory := range directories {
			if isBinaryDirectory(directory) {
				return directory, nil
			}
		}
	}
	return "", errNoBinaries
}

var versionPattern = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)

// majorVersion reads the version out of a path such as /usr/lib/postgresql/15/bin, since as text 9.6
// would sort after 17. A path without one sorts last.
func majorVersion(directory string) float64 {
	version, err := strconv.ParseFloat(versionPattern.FindString(directory), 64)
	if err != nil {
		return 0
	}
	return version
}

func isBinaryDirectory(directory string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		info, err := os.Stat(filepath.Join(directory, name))
		if err != nil || !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
			return false
		}
	}
	return true
}
