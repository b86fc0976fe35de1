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

// containerTimeout bounds the wait for a started container's server, on a machine under load.
const containerTimeout = 2 * time.Minute

// launchDocker runs a server in a container. The supervisor removes it, so that it goes away where
// testcontainers' own reaper is disabled, too.
func launchDocker(ctx context.Context, request order) (reply, func() error, error) {
	arguments := []string{"postgres"}
	for _, each := range request.Settings {
		arguments = append(arguments, "-c", each.Name+"="+each.Value)
	}
	container, err := postgres.Run(ctx, request.Image,
		postgres.WithUsername("postgres"), postgres.WithDatabase("postgres"), postgres.WithPassword(rand.Text()),
		testcontainers.WithCmd(arguments...),
	)
	// Without a grace period: the data is not kept.
	release := func() error { return testcontainers.TerminateContainer(container, testcontainers.StopTimeout(0)) }
	if err != nil {
		return reply{}, nil, errors.Join(fmt.Errorf("image %s: %w", request.Image, err), release())
	}
	dsn, err := container.ConnectionString(ctx, "sslmode=disable")
	if err == nil {
		err = awaitContainer(ctx, container, dsn)
	}
	if err != nil {
		return reply{}, nil, errors.Join(fmt.Errorf("image %s: %w", request.Image, err), release())
	}
	return reply{DSN: dsn, Container: container.GetContainerID()}, release, nil
}

// awaitContainer waits until the server in the container answers a query. An open port says less:
// Docker's proxy accepts connections before the server does. While it initialises itself, the server
// of the official image listens on a Unix socket only, so an answer is that of the final one.
func awaitContainer(ctx context.Context, container testcontainers.Container, dsn string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, containerTimeout)
	defer cancel()
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	for {
		failure := db.PingContext(ctx)
		if failure == nil {
			return nil
		}
		if state, err := container.State(ctx); err == nil && !state.Running {
			return fmt.Errorf("the container ended with exit code %d\n%s", state.ExitCode, containerLog(ctx, container))
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the server does not answer: %w", failure), ctx.Err())
		}
	}
}

func containerLog(ctx context.Context, container testcontainers.Container) string {
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
