package limiter_test

import (
	"os"
	"testing"

	"github.com/legion-gorm/legion/internal/pgtest"
)

func TestMain(m *testing.M) {
	// The tests start this program again to make calls from other processes.
	if os.Getenv(concurrentWorkerVariable) != "" {
		os.Exit(concurrentWorker(os.Stdin, os.Stdout))
	}

	pgtest.Main(m)
}
