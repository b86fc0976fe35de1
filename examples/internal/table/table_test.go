package table_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/examples/internal/table"
)

func TestWriteAlignsTextLeftAndNumbersRight(t *testing.T) {
	t.Parallel()

	shown := table.New("tenant", "tokens", "note")
	shown.Add("zürich", 12, "")
	shown.Add("a", "1,204.5", "full")

	var out strings.Builder

	require.NoError(t, shown.Write(&out))
	require.Equal(t, ""+
		"  tenant   tokens  note\n"+
		"  zürich       12\n"+
		"  a       1,204.5  full\n", out.String())
}

func TestWriteOfAHeaderAlone(t *testing.T) {
	t.Parallel()

	var out strings.Builder

	require.NoError(t, table.New("rule", "denied").Write(&out))
	require.Equal(t, "  rule  denied\n", out.String())
}

type brokenWriter struct{ err error }

func (w brokenWriter) Write([]byte) (int, error) { return 0, w.err }

func TestWriteReportsTheWritersError(t *testing.T) {
	t.Parallel()

	broken := errors.New("the pipe is closed")

	require.ErrorIs(t, table.New("rule").Write(brokenWriter{broken}), broken)
}
