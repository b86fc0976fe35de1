package pgtest

import (
	"fmt"
	"net/url"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// WithParameter returns dsn with a connection parameter added or replaced, such as
// default_query_exec_mode=simple_protocol or application_name. It takes URLs and key=value pairs.
func WithParameter(dsn, name, value string) string {
	if location, ok := parseURL(dsn); ok {
		query := location.Query()
		query.Set(name, value)
		location.RawQuery = query.Encode()
		return location.String()
	}
	// The last of several equal keys counts.
	quoted := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(value)
	return fmt.Sprintf("%s %s='%s'", dsn, name, quoted)
}

func withDatabase(dsn, database string) string {
	location, ok := parseURL(dsn)
	if !ok {
		return WithParameter(dsn, "dbname", database)
	}
	// As parameters these would override the path.
	query := location.Query()
	query.Del("dbname")
	query.Del("database")
	location.RawQuery = query.Encode()
	location.Path, location.RawPath = "/"+database, ""
	return location.String()
}

func databaseOf(dsn string) (string, error) {
	parsed, err := pgconn.ParseConfig(dsn)
	if err != nil {
		return "", fmt.Errorf("legion: read the DSN: %w", err)
	}
	return parsed.Database, nil
}

func parseURL(dsn string) (*url.URL, bool) {
	if !strings.HasPrefix(dsn, "postgres://") && !strings.HasPrefix(dsn, "postgresql://") {
		return nil, false
	}
	location, err := url.Parse(dsn)
	return location, err == nil
}
