package models_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/legion-gorm/legion/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// dryRun returns a connection that builds statements and runs none.
func dryRun(tb testing.TB) *gorm.DB {
	tb.Helper()

	db, err := gorm.Open(postgres.Open("host=localhost"), &gorm.Config{
		DryRun: true, DisableAutomaticPing: true, SkipDefaultTransaction: true, Logger: logger.Discard,
	})
	require.NoError(tb, err)

	pool, err := db.DB()
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, pool.Close()) })

	return db
}

// ddlRecorder is a GORM logger that keeps the statements that change a schema.
type ddlRecorder struct {
	logger.Interface

	mutex      sync.Mutex
	statements []string
}

func (r *ddlRecorder) LogMode(logger.LogLevel) logger.Interface { return r }

func (r *ddlRecorder) Trace(_ context.Context, _ time.Time, text func() (string, int64), _ error) {
	statement, _ := text()
	if strings.HasPrefix(strings.TrimSpace(statement), "SELECT ") {
		return
	}

	r.mutex.Lock()
	defer r.mutex.Unlock()

	r.statements = append(r.statements, statement)
}

func (r *ddlRecorder) take() []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()

	statements := r.statements
	r.statements = nil

	return statements
}
