package pgtest

import (
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

func TestEmbeddedSaysThatItIsNotAvailableYet(t *testing.T) {
	t.Parallel()

	_, err := Start(t.Context(), withEnvironment(map[string]string{sourceVariable: "embedded"}))
	require.ErrorIs(t, err, errNotImplemented)
	require.ErrorContains(t, err, "embedded: downloaded server binaries are not available yet")
	require.ErrorContains(t, err, "LEGION_TEST_POSTGRES=embedded rules out every other source.")
}

func TestFailureNamesEverySourceAndItsReason(t *testing.T) {
	t.Parallel()

	// The image's registry is a port that nobody listens on, in case there is Docker here.
	_, err := Start(t.Context(), withoutPackages(), withEnvironment(map[string]string{
		imageVariable: "127.0.0.1:1/legion/no-such-image:1",
	}))

	var unavailable *UnavailableError
	require.ErrorAs(t, err, &unavailable)
	require.ErrorIs(t, err, errNotSet)
	require.ErrorIs(t, err, errNoBinaries)
	require.ErrorIs(t, err, errNotImplemented)
	require.Regexp(t, `(?s)^legion: no Postgres for tests and examples:
  dsn: LEGION_TEST_DSN is not set
  local: no directory with both initdb and postgres in PATH, .*
  docker: image 127\.0\.0\.1:1/legion/no-such-image:1: .+
  embedded: .+ not available yet.*
Set LEGION_TEST_DSN, install PostgreSQL's server package, or start Docker\.$`, err.Error())
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
