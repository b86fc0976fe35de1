//go:build unix

package pgtest

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

const (
	ownerEnters os.FileMode = 0o100
	groupEnters os.FileMode = 0o010
	othersEnter os.FileMode = 0o001
)

var errNoFolder = errors.New("no temporary directory that the server's user may enter, set TMPDIR to one")

// account is the user that a server runs as where that is not the current one. All methods work on
// nil, the current user.
type account struct {
	name     string
	uid, gid uint32
}

// serverAccount is nil unless this process runs as root, which Postgres refuses to.
func serverAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil //nolint:nilnil // the current user
	}
	var failures []error
	for _, name := range []string{superuser, "nobody"} {
		found, err := user.Lookup(name)
		if err != nil {
			failures = append(failures, err)
			continue
		}
		uid, uidError := strconv.ParseUint(found.Uid, 10, 32)
		gid, gidError := strconv.ParseUint(found.Gid, 10, 32)
		if err := errors.Join(uidError, gidError); err != nil {
			failures = append(failures, err)
			continue
		}
		return &account{name, uint32(uid), uint32(gid)}, nil
	}
	return nil, fmt.Errorf("find a user other than root for the server to run as: %w", errors.Join(failures...))
}

func (a *account) credential() *syscall.Credential {
	if a == nil {
		return nil
	}
	return &syscall.Credential{Uid: a.uid, Gid: a.gid}
}

func (a *account) own(path string) error {
	if a == nil {
		return nil
	}
	if err := os.Chown(path, int(a.uid), int(a.gid)); err != nil {
		return fmt.Errorf("give the server's user its files: %w", err)
	}

	return nil
}

// makeFolder makes a temporary folder that belongs to account and to nobody else.
func makeFolder(account *account) (string, error) {
	parents := []string{os.TempDir(), "/tmp", "/var/tmp"}
	for _, parent := range parents {
		if !account.canEnter(parent) {
			continue
		}
		folder, err := os.MkdirTemp(parent, "legion-pgtest-")
		if err != nil {
			return "", fmt.Errorf("make a folder for the server: %w", err)
		}
		if err := account.own(folder); err != nil {
			return "", errors.Join(err, os.Remove(folder))
		}
		return folder, nil
	}
	return "", fmt.Errorf("%w: %s, tried %q", errNoFolder, account.name, parents)
}

// canEnter reports whether the account may enter directory and all directories above it. The current
// user finds out by trying.
func (a *account) canEnter(directory string) bool {
	if a == nil {
		return true
	}
	directory, err := filepath.Abs(directory)
	if err != nil {
		return false
	}
	if directory, err = filepath.EvalSymlinks(directory); err != nil {
		return false
	}
	for {
		info, err := os.Stat(directory)
		if err != nil {
			return false
		}
		needed := othersEnter
		if status, ok := info.Sys().(*syscall.Stat_t); ok {
			switch {
			case status.Uid == a.uid:
				needed = ownerEnters
			case status.Gid == a.gid:
				needed = groupEnters
			}
		}
		if info.Mode().Perm()&needed == 0 {
			return false
		}
		above := filepath.Dir(directory)
		if above == directory {
			return true
		}
		directory = above
	}
}
