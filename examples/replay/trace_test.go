package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParseTrace(t *testing.T) {
	t.Parallel()

	// With the line ends of the published files.
	const source = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n" +
		"2023-11-16 23:59:59.5000000,374,44\r\n" +
		"2023-11-16 23:59:59.5000001,0,0\r\n" +
		"2023-11-17 00:00:00,2147483647,109"

	all := []request{
		{offset: 0, contextTokens: 374, generatedTokens: 44},
		{offset: 100 * time.Nanosecond},
		{offset: 500 * time.Millisecond, contextTokens: 2147483647, generatedTokens: 109},
	}

	for _, test := range []struct {
		name     string
		limit    int
		expected []request
	}{
		{"all", 0, all},
		{"the first two", 2, all[:2]},
		{"more than there are", 4, all},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			requests, err := parseTrace(strings.NewReader(source), test.limit)
			require.NoError(t, err)
			require.Equal(t, test.expected, requests)
		})
	}

	require.Equal(t, 880*time.Millisecond, all[0].duration())
}

func TestParseTraceRefusesWhatIsNoTrace(t *testing.T) {
	t.Parallel()

	const (
		header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
		row    = "2023-11-16 18:15:46.6805900,374,44\n"
	)

	for _, test := range []struct {
		name, source, expected string
	}{
		{"nothing", "", errTraceEmpty.Error()},
		{"only a header", header, errTraceEmpty.Error()},
		{"no header", row, errTraceHeader.Error()},
		{"another header", "time,in,out\n" + row, errTraceHeader.Error()},
		{"a header with more columns", "TIMESTAMP,ContextTokens,GeneratedTokens,Model\n" + row, errTraceHeader.Error()},
		{"a column too few", header + row + "2023-11-16 18:15:47,374\n", "line 3"},
		{"a column too many", header + "2023-11-16 18:15:47,374,44,1\n", "line 2"},
		{"no time", header + row + "yesterday,374,44\n", "line 3 of the trace: TIMESTAMP"},
		{"tokens that are no number", header + "2023-11-16 18:15:47,many,44\n", "line 2 of the trace: ContextTokens"},
		{"a fraction of a token", header + "2023-11-16 18:15:47,374,4.5\n", "line 2 of the trace: GeneratedTokens"},
		{"negative tokens", header + "2023-11-16 18:15:47,374,-1\n", "GeneratedTokens: must not be negative"},
		{"too many tokens", header + "2023-11-16 18:15:47,2147483648,44\n", "ContextTokens"},
		{"times that go back", header + row + "2023-11-16 18:15:46.6805899,374,44\n", "line 3 of the trace: " + errTraceOrder.Error()},
		{"a stray quote", header + "2023-11-16 18:15:47,\"374,44\n", "read the trace"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			requests, err := parseTrace(strings.NewReader(test.source), 0)
			require.ErrorContains(t, err, test.expected)
			require.Nil(t, requests)
		})
	}
}
