package pgtest

import (
	"fmt"
	"os"

	"go.uber.org/goleak"
)

// statementCache is what GORM runs for every connection with PrepareStmt and, by its own comment,
// never ends.
const statementCache = "gorm.io/gorm/internal/lru.NewLRU[...].func1"

// Main is the body of a package's TestMain. It runs the tests, stops the shared server, fails a
// passed run that leaked goroutines, and exits. The leak options say which goroutines to ignore; a
// package that does not want the check calls os.Exit(pgtest.Run(m)).
func Main(m interface{ Run() int }, leakOptions ...goleak.Option) {
	code := Run(m)
	if code == 0 {
		if err := goleak.Find(append(leakOptions, goleak.IgnoreTopFunction(statementCache))...); err != nil {
			fmt.Fprintf(os.Stderr, "legion: goroutines outlived the tests: %v\n", err)
			code = 1
		}
	}
	os.Exit(code) //nolint:revive // as TestMain's last act
}

// Run runs the tests, stops the shared server if a test started it, and returns the exit code.
func Run(m interface{ Run() int }) int {
	code := m.Run()
	if server := running.Load(); server != nil {
		if err := server.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	return code
}
