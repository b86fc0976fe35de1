//go:build !unix

package pgtest

import (
	"context"
	"errors"
	"runtime"
	"syscall"
)

func launchLocal(context.Context, order) (reply, func() error, error) {
	return reply{}, nil, errors.New("server binaries can't be run on " + runtime.GOOS + ", use another source")
}

func supervisorAttributes() *syscall.SysProcAttr { return nil }
