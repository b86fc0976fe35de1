// Package golden compares what an example tells with a file of what it should.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden files in testdata anew")

// Require fails the test unless told is the content of testdata/name. With -update it
// becomes that first.
func Require(t *testing.T, name, told string) {
	t.Helper()

	file := filepath.Join("testdata", name)

	if *update {
		require.NoError(t, os.WriteFile(file, []byte(told), 0o600))
	}

	expected, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(expected), told, "if this is meant, run the test with -update")
}
