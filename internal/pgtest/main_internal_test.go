package pgtest

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/signal"
	"testing"
	"time"
)

// roleVariable gives a test binary that a test starts again something else to do than to run tests.
const roleVariable = "LEGION_PGTEST_ROLE"

// For an owner, what [withRepository] is for a test.
const (
	repositoryVariable = "LEGION_PGTEST_REPOSITORY"
	cacheVariable      = "LEGION_PGTEST_CACHE"
)

// The roles.
const (
	ownerRole     = "owner"     // own a server until told how to end
	impatientRole = "impatient" // give up on a server that is starting
	testsRole     = "tests"     // be a package whose tests use the shared server
	leakRole      = "leak"      // be one whose tests leak a goroutine
	failRole      = "fail"      // be one whose tests fail
)

// owned is what an owner prints once its server is ready.
type owned struct {
	Reply    reply  `json:"reply"`
	Database string `json:"database"`
}

// tests stands in for a *testing.M.
type tests func() int

func (run tests) Run() int { return run() }

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "":
		Main(m)
	case ownerRole:
		must(own(os.Stdin, os.Stdout))
	case impatientRole:
		must(giveUp())
	case testsRole:
		Main(tests(func() int {
			server, err := startShared()
			must(err)
			must(json.NewEncoder(os.Stdout).Encode(owned{Reply: server.details}))

			return 0
		}))
	case leakRole:
		Main(tests(func() int {
			go func() { select {} }()

			return 0
		}))
	case failRole:
		Main(tests(func() int { return 3 }))
	default:
		panic("unknown role " + role)
	}
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// own starts a server with a database, says so on output, and ends as input says. As programs that
// end in an orderly way do, it does not die from an interrupt.
func own(input io.Reader, output io.Writer) error {
	signal.Notify(make(chan os.Signal, 1), os.Interrupt)
	server, err := Start(context.Background(), withRepository(os.Getenv(repositoryVariable), os.Getenv(cacheVariable)))
	if err != nil {
		return err
	}
	dsn, err := server.CreateDatabase(context.Background())
	if err != nil {
		return err
	}
	if err := json.NewEncoder(output).Encode(owned{server.details, dsn}); err != nil {
		return err
	}

	ending, err := io.ReadAll(input)
	switch string(ending) {
	case "exit":
		os.Exit(0)
	case "panic":
		go panic("as the test wishes")
		select {}
	}

	return errors.Join(err, server.Stop())
}

// giveUp abandons a start as soon as there is something to leave behind.
func giveUp() error {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		for {
			if folders, _ := os.ReadDir(os.TempDir()); len(folders) > 0 {
				cancel()

				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	if _, err := Start(ctx); !errors.Is(err, context.Canceled) {
		return errors.Join(errors.New("the server was not given up on"), err)
	}

	return nil
}
