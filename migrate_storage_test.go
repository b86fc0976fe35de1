package legion_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/legion-gorm/legion"
)

func TestMigrateSetsTheStorageParametersThatATableHasNot(t *testing.T) {
	t.Parallel()

	const vacuum, analyze = "autovacuum_vacuum_scale_factor=0.02", "autovacuum_analyze_scale_factor=0.02"

	for _, test := range []struct {
		name string

		// before is what the table has, nothing: there is none.
		before string
		after  []string
	}{
		{"no table", "", []string{"fillfactor=80", vacuum, analyze}},
		{"a table without any", "RESET (fillfactor)", []string{"fillfactor=80", vacuum, analyze}},
		{"a table of an older version", "SET (fillfactor = 80)", []string{"fillfactor=80", vacuum, analyze}},
		{"what an administrator has set", "SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0)", []string{"fillfactor=70", "autovacuum_vacuum_scale_factor=0", analyze}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db, statements := setup(t)

			if test.before != "" {
				require.NoError(t, legion.Migrate(db))
				require.NoError(t, db.Exec("ALTER TABLE legion_agents RESET (fillfactor, autovacuum_vacuum_scale_factor, autovacuum_analyze_scale_factor)").Error)
				require.NoError(t, db.Exec("ALTER TABLE legion_agents "+test.before).Error)
			}

			require.NoError(t, legion.Migrate(db))

			var options []string

			require.NoError(t, db.Raw("SELECT unnest(reloptions) FROM pg_class WHERE oid = 'legion_agents'::regclass").Scan(&options).Error)
			require.ElementsMatch(t, test.after, options)

			statements.take()
			require.NoError(t, legion.Migrate(db))
			require.Len(t, statements.take(), 1, "nothing is left to do")
		})
	}
}

func TestMigrateCompressesUsageByTheFasterMethod(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name string

		// before alters the table that is there already. Nothing: there is none.
		before string
		after  string
	}{
		{"no table", "", "l"},
		{"a table of an older version", "SET COMPRESSION default", "l"},
		{"what an administrator has set", "SET COMPRESSION pglz", "p"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			db, statements := setup(t)

			var available bool

			require.NoError(t, db.Raw("SELECT 'lz4' = ANY (enumvals) FROM pg_settings WHERE name = 'default_toast_compression'").Scan(&available).Error)

			if test.before != "" {
				require.NoError(t, legion.Migrate(db))
				require.NoError(t, db.Exec("ALTER TABLE legion_agents ALTER COLUMN usage "+test.before).Error)
			}

			require.NoError(t, legion.Migrate(db))

			var method string

			require.NoError(t, db.Raw("SELECT attcompression FROM pg_attribute WHERE attrelid = 'legion_agents'::regclass AND attname = 'usage'").Scan(&method).Error)

			if !available && test.after == "l" {
				test.after = "" // the server was built without it
			}

			require.Equal(t, test.after, method)

			statements.take()
			require.NoError(t, legion.Migrate(db))
			require.Len(t, statements.take(), 1, "nothing is left to do")
		})
	}
}
