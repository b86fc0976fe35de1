package legion_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The Go of the README stands, to the letter, in readme_snippets_test.go, where the
// compiler checks it and the tests run it.
func TestEveryGoSnippetOfTheReadmeIsCompiled(t *testing.T) {
	t.Parallel()

	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)

	compiled, err := os.ReadFile("readme_snippets_test.go")
	require.NoError(t, err)

	source := withoutIndent(string(compiled))
	snippets := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	require.NotEmpty(t, snippets)

	for _, snippet := range snippets {
		require.Contains(t, source, withoutIndent(snippet[1]))
	}
}

func withoutIndent(text string) string {
	return regexp.MustCompile(`(?m)^[ \t]+`).ReplaceAllString(strings.TrimSpace(text), "")
}
