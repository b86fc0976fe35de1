package pgtest

import (
	"fmt"
	"os"
	"strconv"
	"syscall"
)

// mountApart gives a process, and those that it starts, mounts of their own: nobody else sees what they
// mount, and it goes away with the last of them.
func mountApart(attributes *syscall.SysProcAttr) error {
	attributes.Unshareflags |= syscall.CLONE_NEWNS

	return nil
}

// mountDisk mounts memory of so many bytes at the folder. It is for a process that mounts apart.
func mountDisk(folder string, size int64) error {
	if err := syscall.Mount("tmpfs", folder, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, fmt.Sprintf("size=%d,mode=0700", size)); err != nil {
		return fmt.Errorf("%w: %w", ErrNoDisk, err)
	}

	return nil
}

func unmountDisk(folder string) error {
	if err := syscall.Unmount(folder, syscall.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the disk: %w", err)
	}

	return nil
}

// seenBy is how this process reaches a folder that is mounted apart, by a process there.
func seenBy(process *os.Process, folder string) string {
	return "/proc/" + strconv.Itoa(process.Pid) + "/root" + folder
}
