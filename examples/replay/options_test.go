package main

import (
	"bytes"
	"flag"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseOptions(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		arguments string
		expected  options
	}{
		{"", options{workers: 8, seed: 1}},
		{"-speed max", options{workers: 8, seed: 1}},
		{"-speed 0", options{workers: 8, seed: 1}},
		{"-speed 1", options{workers: 8, seed: 1, speed: 1}},
		{"-speed 1200", options{workers: 8, seed: 1, speed: 1200}},
		{
			"-trace a.csv -speed 2.5 -workers 64 -limit 7 -seed 0 -without-locks",
			options{trace: "a.csv", speed: 2.5, workers: 64, limit: 7, withoutLocks: true},
		},
	} {
		t.Run(test.arguments, func(t *testing.T) {
			t.Parallel()

			var output bytes.Buffer

			parsed, err := parseOptions(strings.Fields(test.arguments), &output)
			require.NoError(t, err)
			require.Equal(t, test.expected, parsed)
			require.Empty(t, output.String())
		})
	}
}

func TestParseOptionsRefusesWhatItCannotDo(t *testing.T) {
	t.Parallel()

	for _, test := range []struct{ arguments, expected string }{
		{"-speed fast", errSpeed.Error()},
		{"-speed -1", errSpeed.Error()},
		{"-speed 0.5", errSpeed.Error()},
		{"-speed 1201", errSpeed.Error()},
		{"-speed NaN", errSpeed.Error()},
		{"-workers 0", errWorkers.Error()},
		{"-workers 65", errWorkers.Error()},
		{"-limit -1", errLimit.Error()},
		{"-seed -1", "-seed"},
		{"-rules strict", "-rules"},
		{"trace.csv", errArguments.Error()},
	} {
		t.Run(test.arguments, func(t *testing.T) {
			t.Parallel()

			var output bytes.Buffer

			_, err := parseOptions(strings.Fields(test.arguments), &output)
			require.ErrorContains(t, err, test.expected)
			require.Contains(t, output.String(), test.expected)
		})
	}
}

func TestHelpNamesTheSourceOfRealTraces(t *testing.T) {
	t.Parallel()

	var output bytes.Buffer

	_, err := parseOptions([]string{"-help"}, &output)
	require.ErrorIs(t, err, flag.ErrHelp)
	require.Contains(t, output.String(), "AzureLLMInferenceDataset2023")
	require.Contains(t, output.String(), "CC-BY 4.0")
	require.Contains(t, output.String(), "(default max)")
}
