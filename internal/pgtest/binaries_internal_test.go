package pgtest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// setupBinaries makes a directory tree with programs, named by their paths.
func setupBinaries(t *testing.T, programs ...string) string {
	t.Helper()

	root := t.TempDir()
	for _, program := range programs {
		name := filepath.Join(root, program)
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o700))
		require.NoError(t, os.WriteFile(name, nil, 0o700))
	}

	return root
}

func TestBinariesComeFromThePathOrElseTheNewestPackage(t *testing.T) {
	t.Parallel()

	root := setupBinaries(t,
		"clients/psql",
		"path/initdb", "path/postgres",
		"lib/9.6/bin/initdb", "lib/9.6/bin/postgres",
		"lib/14/bin/initdb", "lib/14/bin/postgres",
		"lib/15/bin/initdb", "lib/15/bin/postgres",
		"lib/18/bin/postgres", // no initdb
		"brew/postgresql@17/bin/initdb", "brew/postgresql@17/bin/postgres",
	)
	for name, test := range map[string]struct {
		path     []string
		patterns []string
		want     string
	}{
		"the path first":               {[]string{"clients", "path"}, []string{"lib/*/bin"}, "path"},
		"versions compared as numbers": {[]string{"clients"}, []string{"lib/*/bin"}, "lib/15/bin"},
		"incomplete versions skipped":  {nil, []string{"lib/1*/bin"}, "lib/15/bin"},
		"the first place that has any": {nil, []string{"none/*/bin", "lib/*/bin", "brew/postgresql@*/bin"}, "lib/15/bin"},
		"names with text in them":      {nil, []string{"brew/postgresql@*/bin"}, "brew/postgresql@17/bin"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			under := func(names []string) []string {
				full := make([]string, 0, len(names))
				for _, name := range names {
					full = append(full, filepath.Join(root, name))
				}

				return full
			}
			path := strings.Join(under(test.path), string(filepath.ListSeparator))
			directory, err := binaryDirectory(path, under(test.patterns))
			require.NoError(t, err)
			require.Equal(t, filepath.Join(root, test.want), directory)
		})
	}
}

func TestBinariesAreExecutableFilesUnderAnAbsolutePath(t *testing.T) {
	t.Parallel()

	root := setupBinaries(t, "lib/initdb", "lib/postgres")
	directory := filepath.Join(root, "lib")
	working, err := os.Getwd()
	require.NoError(t, err)
	relative, err := filepath.Rel(working, directory)
	require.NoError(t, err)
	_, err = binaryDirectory(relative, nil)
	require.ErrorIs(t, err, errNoBinaries)

	require.NoError(t, os.Chmod(filepath.Join(directory, "postgres"), 0o600))
	_, err = binaryDirectory(directory, []string{directory})
	require.ErrorIs(t, err, errNoBinaries)
}
