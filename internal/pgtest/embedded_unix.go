//go:build unix

package pgtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

const (
	// embeddedVersion is pinned, so that a run today and one next year have the same server.
	embeddedVersion = embeddedpostgres.V17

	// beyondUnpacking is a data directory that no system can have. The library has no call that only
	// downloads and unpacks, but a Start that gets as far as this name has done both, and nothing else.
	beyondUnpacking = "unpacked\x00"

	// usualMask lets the server's user read what root unpacks.
	usualMask = 0o022
)

var errUnfinished = errors.New("the library did not say that it had unpacked the binaries")

// launchEmbedded downloads server binaries, unpacks them into the server's own folder and runs them
// as a local server. The library's own way to run one would leave it running when the owner dies, and
// cannot run it as root.
//
// The archive of some ten megabytes is kept in the user's cache directory. What is unpacked is not:
// the server's user might not reach it there.
func launchEmbedded(ctx context.Context, request *order) (launched, error) {
	server, err := newLocalServer(request)
	if err != nil {
		return launched{}, err
	}
	if server.binaries, err = unpackBinaries(ctx, request, server.folder); err != nil {
		return launched{}, errors.Join(err, server.release())
	}
	if err := server.start(ctx); err != nil {
		return launched{}, errors.Join(fmt.Errorf("downloaded binaries: %w", err), server.release())
	}

	return server.launched(request.Restarts), nil
}

// unpackBinaries returns the directory of the binaries, which is in folder. It changes this process's
// mask, temporary directory and HTTP client: it is for a supervisor, which does nothing else.
func unpackBinaries(ctx context.Context, request *order, folder string) (string, error) {
	syscall.Umask(usualMask)
	// The library leaves a log behind.
	if err := os.Setenv("TMPDIR", folder); err != nil {
		return "", fmt.Errorf("set the temporary directory: %w", err)
	}
	downloads := &downloads{ctx: ctx}
	http.DefaultClient.Transport = downloads

	cache := request.Cache
	if cache == "" {
		cache = folder
	}
	if request.Repository == "" {
		request.Repository = mavenCentral
	}
	err := embeddedpostgres.NewDatabase(embeddedConfig(request.Repository, cache, folder)).Start()

	switch {
	case ctx.Err() != nil:
		return "", fmt.Errorf("abandoned: %w", ctx.Err())
	case err == nil:
		return "", errUnfinished
	case !strings.Contains(err.Error(), beyondUnpacking):
		if downloads.failure != nil {
			err = fmt.Errorf("%w: %w", err, downloads.failure)
		}

		return "", fmt.Errorf("PostgreSQL %s from %s, or from the cache in %s: %w", embeddedVersion, request.Repository, cache, err)
	default:
		return filepath.Join(folder, "binaries", "bin"), nil
	}
}

func embeddedConfig(repository, cache, folder string) embeddedpostgres.Config {
	return embeddedpostgres.DefaultConfig().
		Version(embeddedVersion).
		BinaryRepositoryURL(repository).
		CachePath(cache).
		BinariesPath(filepath.Join(folder, "binaries")).
		RuntimePath(filepath.Join(folder, "runtime")).
		DataPath(beyondUnpacking).
		Port(0). // any: the library only looks whether it is free
		Logger(io.Discard)
}

// downloads ends the library's requests with ctx, which it does not take, and keeps the reason of a
// failure, which it does not tell.
type downloads struct {
	ctx     context.Context //nolint:containedctx // see above
	failure error
}

// RoundTrip implements http.RoundTripper.
func (d *downloads) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := http.DefaultTransport.RoundTrip(request.WithContext(d.ctx))
	if err != nil {
		d.failure = err

		return nil, fmt.Errorf("download: %w", err)
	}

	return response, nil
}
