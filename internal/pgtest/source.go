package pgtest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

const (
	sourceVariable = "LEGION_TEST_POSTGRES"
	dsnVariable    = "LEGION_TEST_DSN"
	imageVariable  = "LEGION_TEST_IMAGE"
)

// DefaultImage is the image of the docker source when LEGION_TEST_IMAGE is not set.
const DefaultImage = "postgres:17.7-alpine"

// Source is a way to come by a Postgres server. The package comment describes each.
type Source string

// The sources, in the order in which they are tried.
const (
	SourceDSN      Source = "dsn"
	SourceLocal    Source = "local"
	SourceDocker   Source = "docker"
	SourceEmbedded Source = "embedded"
)

var (
	errUnknownSource = errors.New("must be dsn, local, docker or embedded, or not set")
	errNotSet        = errors.New(dsnVariable + " is not set")
)

// choice is which sources to try, in order, and what would help if none of them works.
type choice struct {
	sources []Source
	remedy  string
}

func choose(getenv func(string) string) (choice, error) {
	all := []Source{SourceDSN, SourceLocal, SourceDocker, SourceEmbedded}
	forced := Source(getenv(sourceVariable))

	switch {
	case slices.Contains(all, forced):
		return choice{[]Source{forced}, fmt.Sprintf("%s=%s rules out every other source.", sourceVariable, forced)}, nil
	case forced != "":
		return choice{}, fmt.Errorf("legion: %s %w, but is %q", sourceVariable, errUnknownSource, forced)
	case getenv(dsnVariable) != "":
		return choice{[]Source{SourceDSN}, "While " + dsnVariable + " is set, no other source is tried."}, nil
	default:
		remedy := "Set " + dsnVariable + ", install PostgreSQL's server package, start Docker, or let this machine download from " + mavenCentral + "."

		return choice{all, remedy}, nil
	}
}

// attempt is a source that could not give a server, and why.
type attempt struct {
	source Source
	err    error
}

// UnavailableError says that no source could give a server. Its text has a line for each source that
// was tried; errors.Is and errors.As see the reasons.
type UnavailableError struct {
	attempts []attempt
	remedy   string
}

// Error names each source that was tried with its reason, and says what would help.
func (e *UnavailableError) Error() string {
	var text strings.Builder
	text.WriteString("legion: no Postgres for tests and examples:")
	for _, attempt := range e.attempts {
		fmt.Fprintf(&text, "\n  %s: %v", attempt.source, attempt.err)
	}
	text.WriteString("\n" + e.remedy)

	return text.String()
}

// Unwrap returns the reasons, in the order in which the sources were tried.
func (e *UnavailableError) Unwrap() []error {
	reasons := make([]error, 0, len(e.attempts))
	for _, attempt := range e.attempts {
		reasons = append(reasons, attempt.err)
	}

	return reasons
}
