//go:build !unix

package pgtest

import (
	"context"
	"errors"
	"runtime"
	"syscall"
)

var errUnsupported = errors.New("server binaries can't be run on " + runtime.GOOS + ", use another source")

func launchLocal(context.Context, *order) (launched, error) {
	return launched{}, errUnsupported
}

func launchEmbedded(context.Context, *order) (launched, error) {
	return launched{}, errUnsupported
}

func supervisorAttributes() *syscall.SysProcAttr { return nil }
