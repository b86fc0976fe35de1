//go:build unix && !linux

package pgtest

import "syscall"

// dieWithParent does nothing: this system does not tell a process when its parent dies.
func dieWithParent(*syscall.SysProcAttr) {}
