package pgtest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
)

const (
	// containerTimeout bounds the wait for the server in a container that runs.
	containerTimeout = 4 * time.Minute

	// pollInterval is the time between two looks at whether a server is ready.
	pollInterval = 10 * time.Millisecond
)

var (
	errDocker         = errors.New("no answer from Docker")
	errContainerEnded = errors.New("the container ended")
)

// launchDocker runs a server in a container. The supervisor removes it, so it also goes away where
// testcontainers' own reaper is disabled.
func launchDocker(ctx context.Context, request *order) (launched, error) {
	container, err := runContainer(ctx, request)
	release := func() error {
		// Without a grace period: nobody will ask for the data.
		return testcontainers.TerminateContainer(container, testcontainers.StopTimeout(0))
	}
	if err != nil {
		return launched{}, errors.Join(fmt.Errorf("image %s: %w", request.Image, err), release())
	}
	dsn, err := awaitContainer(ctx, container)
	if err != nil {
		return launched{}, errors.Join(fmt.Errorf("image %s: %w", request.Image, err), release())
	}

	return launched{reply{DSN: dsn, Container: container.GetContainerID()}, release}, nil
}

// runContainer may return a container together with an error: one that was created but did not start.
func runContainer(ctx context.Context, request *order) (_ *postgres.PostgresContainer, err error) {
	defer func() {
		// Some of the ways in which testcontainers says that there is no Docker are panics.
		if cause := recover(); cause != nil {
			err = fmt.Errorf("%w: %v", errDocker, cause)
		}
	}()
	container, err := postgres.Run(ctx, request.Image,
		postgres.WithUsername(superuser),
		postgres.WithPassword(rand.Text()),
		postgres.WithDatabase(superuser),
		testcontainers.WithCmd(append([]string{serverProgram}, arguments(request.Settings)...)...),
	)
	if err != nil {
		return container, fmt.Errorf("run a container: %w", err)
	}

	return container, nil
}

// awaitContainer waits until the server answers a query, and returns its DSN. An open port would say
// less: Docker's proxy accepts connections before the server does. While the official image
// initialises its data, its server listens on a Unix socket only, so the answer is the final one's.
func awaitContainer(ctx context.Context, container *postgres.PostgresContainer) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, containerTimeout)
	defer cancel()
	dsn, err := container.ConnectionString(ctx, "sslmode=disable")
	if err != nil {
		return "", fmt.Errorf("find the container's address: %w", err)
	}
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		return "", fmt.Errorf("open a connection: %w", err)
	}
	defer func() { _ = db.Close() }()

	for {
		unanswered := db.PingContext(ctx)
		if unanswered == nil {
			return dsn, nil
		}
		if state, err := container.State(ctx); err == nil && !state.Running {
			return "", fmt.Errorf("%w with exit code %d\n%s", errContainerEnded, state.ExitCode, containerLog(ctx, container))
		}
		select {
		case <-time.After(pollInterval):
		case <-ctx.Done():
			return "", fmt.Errorf("wait for the server: %w", errors.Join(ctx.Err(), unanswered))
		}
	}
}

func containerLog(ctx context.Context, container *postgres.PostgresContainer) string {
	stream, err := container.Logs(ctx)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = stream.Close() }()
	content, err := io.ReadAll(stream)
	if err != nil {
		return err.Error()
	}

	return tail(string(content))
}
