//go:build !linux

package pgtest

import (
	"os"
	"syscall"
)

func mountApart(*syscall.SysProcAttr) error { return ErrNoDisk }

func mountDisk(string, int64) error { return ErrNoDisk }

func unmountDisk(string) error { return nil }

func seenBy(_ *os.Process, folder string) string { return folder }
