package pgtest

import (
	"errors"
	"fmt"
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
	errNotSet         = errors.New(dsnVariable + " is not set")
	errNotImplemented = errors.New("downloaded binaries are not available yet, use another source")
)

// candidates lists the sources to try, in order.
func candidates(getenv func(string) string) ([]Source, error) {
	all := []Source{SourceDSN, SourceLocal, SourceDocker, SourceEmbedded}

	forced := Source(getenv(sourceVariable))
	if forced == "" {
		if getenv(dsnVariable) != "" {
			return []Source{SourceDSN}, nil
		}
		return all, nil
	}
	for _, source := range all {
		if source == forced {
			return []Source{forced}, nil
		}
	}
	return nil, fmt.Errorf("legion: %s must be dsn, local, docker or embedded, or not set, but is %q", sourceVariable, forced)
}

// attempt is a source that could not give a server, and why.
type attempt struct {
	source Source
	err    error
}

// UnavailableError says that no source could give a server. Its text has a line for each source
// that was tried; errors.Is and errors.As see the reasons.
type UnavailableError struct {
	attempts []attempt
}

func (e *UnavailableError) Error() string {
	var text strings.Builder
	text.WriteString("legion: no Postgres for tests and examples:")
	for _, attempt := range e.attempts {
		fmt.Fprintf(&text, "\n  %s: %v", attempt.source, attempt.err)
	}
	text.WriteString("\nSet " + dsnVariable + ", install PostgreSQL's server package, or start Docker.")
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
