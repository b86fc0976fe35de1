package pgtest

import "syscall"

// dieWithParent covers a supervisor that is killed together with its owner and so can't clean up:
// the kernel then shuts the server down. The supervisor starts it from its main thread.
func dieWithParent(attributes *syscall.SysProcAttr) { attributes.Pdeathsig = syscall.SIGQUIT }
