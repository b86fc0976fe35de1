package legion_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
)

// childVariable makes this test binary a process that migrates the database of the
// DSN that it holds, once it is told to on its standard input.
const (
	childVariable             = "LEGION_TEST_MIGRATE_CHILD"
	childConcurrentlyVariable = "LEGION_TEST_MIGRATE_CHILD_CONCURRENTLY"
	childNotifyVariable       = "LEGION_TEST_MIGRATE_CHILD_NOTIFY"
)

func TestMain(m *testing.M) {
	if dsn := os.Getenv(childVariable); dsn != "" {
		if err := migrateInChild(dsn); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}

		os.Exit(0)
	}

	if os.Getenv(turnChildVariable) != "" {
		if os.Getenv(turnBurnVariable) != "" {
			burn()
		}

		if err := turnInChild(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}

		os.Exit(0)
	}

	pgtest.Main(m)
}

func migrateInChild(dsn string) error {
	db, err := gorm.Open(postgres.Open(dsn), &gorm.Config{Logger: logger.Discard})
	if err != nil {
		return err
	}

	fmt.Println("ready")

	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return err
	}

	var options []legion.MigrateOption
	if os.Getenv(childConcurrentlyVariable) != "" {
		options = append(options, legion.WithConcurrentIndexes())
	}

	if os.Getenv(childNotifyVariable) != "" {
		options = append(options, legion.WithNotify())
	}

	return legion.Migrate(db, options...)
}

// recorder is a GORM logger that keeps every statement.
type recorder struct {
	logger.Interface

	mutex      sync.Mutex
	statements []string
}

func newRecorder() *recorder { return &recorder{Interface: logger.Discard} }

func (r *recorder) LogMode(logger.LogLevel) logger.Interface { return r }

func (r *recorder) Trace(_ context.Context, _ time.Time, text func() (string, int64), _ error) {
	statement, _ := text()

	r.mutex.Lock()
	defer r.mutex.Unlock()

	r.statements = append(r.statements, statement)
}

// take returns the statements since the last call.
func (r *recorder) take() []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()

	statements := r.statements
	r.statements = nil

	return statements
}

// takeDDL returns those of them that change something.
func (r *recorder) takeDDL() []string {
	var ddl []string

	for _, statement := range r.take() {
		switch word, _, _ := strings.Cut(strings.TrimSpace(statement), " "); word {
		case "SELECT", "WITH", "SAVEPOINT", "RELEASE", "ROLLBACK":
		default:
			ddl = append(ddl, statement)
		}
	}

	return ddl
}

// catalogue describes every table of the application's schemas: columns in their
// order, constraints and indexes.
func catalogue(t *testing.T, db *gorm.DB) []string {
	t.Helper()

	return lines(t, db, `
		SELECT format('%s column %s %s %s not null %s default %s', attrelid::regclass, attnum, attname,
			format_type(atttypid, atttypmod), attnotnull, pg_get_expr(adbin, adrelid))
		FROM tables JOIN pg_attribute ON attrelid = tables.oid LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
		WHERE attnum > 0 AND NOT attisdropped
		UNION ALL
		SELECT format('%s constraint %s %s %s', conrelid::regclass, conname, convalidated, pg_get_constraintdef(pg_constraint.oid))
		FROM tables JOIN pg_constraint ON conrelid = tables.oid
		UNION ALL
		SELECT format('%s index %s valid %s', indrelid::regclass, pg_get_indexdef(indexrelid), indisvalid)
		FROM tables JOIN pg_index ON indrelid = tables.oid`)
}

// versions identifies every row of the catalogue that describes those tables: any
// DDL, also one that changes nothing, makes new ones.
func versions(t *testing.T, db *gorm.DB) []string {
	t.Helper()

	return lines(t, db, `
		SELECT format('class %s %s', pg_class.oid, pg_class.xmin) FROM tables JOIN pg_class USING (oid)
		UNION ALL
		SELECT format('attribute %s %s %s', attrelid, attnum, pg_attribute.xmin) FROM tables JOIN pg_attribute ON attrelid = tables.oid
		UNION ALL
		SELECT format('default %s %s %s', adrelid, adnum, pg_attrdef.xmin) FROM tables JOIN pg_attrdef ON adrelid = tables.oid
		UNION ALL
		SELECT format('constraint %s %s', pg_constraint.oid, pg_constraint.xmin) FROM tables JOIN pg_constraint ON conrelid = tables.oid
		UNION ALL
		SELECT format('index %s %s', indexrelid, pg_index.xmin) FROM tables JOIN pg_index ON indrelid = tables.oid`)
}

func lines(t *testing.T, db *gorm.DB, query string) []string {
	t.Helper()

	var result []string

	require.NoError(t, db.Raw(`WITH tables AS (
		SELECT pg_class.oid FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
		WHERE relkind = 'r' AND nspname NOT LIKE 'pg\_%' AND nspname <> 'information_schema'
	)`+query+` ORDER BY 1`).Scan(&result).Error)

	return result
}

// tableNames returns the names of those tables.
func tableNames(t *testing.T, db *gorm.DB) []string {
	t.Helper()

	return lines(t, db, "SELECT oid::regclass::text FROM tables")
}
