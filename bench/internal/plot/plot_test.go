package plot_test

import (
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion/bench/internal/plot"
)

func drawn() string {
	return plot.Plot{Title: "a & b", Panels: []plot.Panel{
		{XLabel: "rows", YLabel: "ms", Lines: []plot.Line{
			{Name: "floor", IsReference: true, Points: []plot.Point{{X: 1, Y: 0.5}, {X: 1000, Y: 0.5}}},
			{Name: "one <path>", Points: []plot.Point{{X: 1, Y: 1}, {X: 10, Y: 20}, {X: 1000, Y: 100}}},
		}},
		{XLabel: "callers", YLabel: "ms", Lines: []plot.Line{
			{Name: "one <path>", Points: []plot.Point{{X: 1, Y: 1}}},
			{Name: "other", Points: []plot.Point{{X: 1, Y: 0}, {X: 16, Y: 3}}},
		}},
		{XLabel: "nothing"},
	}}.SVG()
}

var update = flag.Bool("update", false, "rewrite the golden drawing in testdata")

func TestADrawingLooksLikeTheOneThatWasLookedAt(t *testing.T) {
	t.Parallel()

	golden := filepath.Join("testdata", "plot.svg")
	if *update {
		require.NoError(t, os.WriteFile(golden, []byte(drawn()), 0o600))
	}

	expected, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(expected), drawn())
}

func TestADrawingIsXMLAndNamesEverything(t *testing.T) {
	t.Parallel()

	decoder := xml.NewDecoder(strings.NewReader(drawn()))

	var text strings.Builder

	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}

		require.NoError(t, err)

		if characters, ok := token.(xml.CharData); ok {
			text.Write(characters)
		}
	}

	for _, name := range []string{"a & b", "rows", "callers", "ms", "floor", "one <path>", "other", "1k", "0.1", "100"} {
		require.Contains(t, text.String(), name)
	}
}

func TestADrawingHasABackgroundForReadersOfEither(t *testing.T) {
	t.Parallel()

	light, dark, found := strings.Cut(drawn(), "@media (prefers-color-scheme: dark)")
	require.True(t, found)

	for _, class := range []string{"text", ".page", ".grid", ".axis", ".c0", ".c1", ".c2", ".c3", ".m0", ".m3", ".reference", ".mreference"} {
		require.Contains(t, light, class+" {")
		require.Contains(t, dark, class+" {")
	}
}

func TestAnAxisIsLogarithmic(t *testing.T) {
	t.Parallel()

	// 1, 10 and 1,000 on an axis from 1 to 1k, 58 to 404 pixels; 1, 20 and 100 on one from
	// 0.1 to 100, 224 to 18 pixels.
	require.Contains(t, drawn(), `d="M58.0 155.3L173.3 66.0L404.0 18.0"`)
}
