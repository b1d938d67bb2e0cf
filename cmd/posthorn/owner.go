package main

import (
	"os"
	"os/user"
	"strconv"
	"syscall"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

// checkOwner returns an error unless this process runs as the owner of a store: the owner could not
// open the files that another user, such as root, writes there.
func checkOwner(store string) error {
	info, err := os.Stat(store)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || int64(stat.Uid) == int64(os.Geteuid()) {
		return nil
	}
	owner := strconv.FormatUint(uint64(stat.Uid), 10)
	if u, err := user.LookupId(owner); err == nil {
		owner = u.Username
	}
	return command.Usagef("%s belongs to user %s, who could not open the files that this command writes there; run it as that user, for example with sudo --user=%s", store, owner, sudoName(owner))
}

// sudoName is a user as sudo expects it: a number begins with #.
func sudoName(owner string) string {
	if _, err := strconv.Atoi(owner); err == nil {
		return "'#" + owner + "'"
	}
	return owner
}
