package pgtest

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestDSNOfEitherFormTakesADatabaseAndParameters(t *testing.T) {
	t.Parallel()

	for name, dsn := range map[string]string{
		"URL":               "postgres://tester:a%2Fb%20c@db:5433/maintenance?sslmode=disable",
		"other scheme":      "postgresql://tester:a%2Fb%20c@db:5433?sslmode=disable",
		"URL with dbname":   "postgres://tester:a%2Fb%20c@db:5433/?sslmode=disable&dbname=maintenance",
		"URL with database": "postgres://tester:a%2Fb%20c@db:5433/?sslmode=disable&database=maintenance",
		"key=value":         "host=db port=5433 user=tester password='a/b c' dbname=maintenance sslmode=disable",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			changed := withDatabase(dsn, "fresh")
			changed = WithParameter(changed, "application_name", "it's")
			changed = WithParameter(changed, "application_name", `it's a \\test\`)
			parsed, err := pgx.ParseConfig(changed)
			require.NoError(t, err)
			require.Equal(t, "fresh", parsed.Database)
			require.Equal(t, "db", parsed.Host)
			require.Equal(t, uint16(5433), parsed.Port)
			require.Equal(t, "tester", parsed.User)
			require.Equal(t, "a/b c", parsed.Password)
			require.Equal(t, `it's a \\test\`, parsed.RuntimeParams["application_name"])

			database, err := databaseOf(changed)
			require.NoError(t, err)
			require.Equal(t, "fresh", database)
		})
	}
}
