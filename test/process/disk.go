package process

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// SmallDisk mounts a file system with a number of MiB until the end of the test: ext4 if the machine has loop devices,
// otherwise a tmpfs. It returns an error if it cannot mount any, for example because the test does not run as root.
func SmallDisk(t testing.TB, mib int) (dir string, err error) {
	t.Helper()
	image, dir := filepath.Join(t.TempDir(), "image"), t.TempDir()
	err = os.WriteFile(image, nil, 0o600)
	if err == nil {
		err = os.Truncate(image, int64(mib)<<20)
	}
	if err == nil {
		err = command("mkfs.ext4", "-q", "-m", "0", image)
	}
	if err == nil {
		err = command("mount", "-o", "loop", image, dir)
	}
	if err != nil {
		if tmpfs := command("mount", "-t", "tmpfs", "-o", fmt.Sprintf("size=%dm", mib), "posthorn-test", dir); tmpfs != nil {
			return "", fmt.Errorf("cannot mount a small file system; run the test as root: %w; %w", err, tmpfs)
		}
		t.Logf("using tmpfs instead of ext4: %v", err)
	}
	t.Cleanup(func() {
		if err := command("umount", dir); err != nil {
			t.Error(err)
			_ = command("umount", "--lazy", dir)
		}
	})
	return dir, nil
}

// command runs a program.
func command(args ...string) error {
	_, err := run(exec.Command(args[0], args[1:]...))
	return err
}

// Fill writes a file until a small disk has no free byte.
func Fill(t testing.TB, disk string) (remove func()) {
	t.Helper()
	path := filepath.Join(disk, "other")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	for block := make([]byte, 1<<20); ; {
		if _, err := f.Write(block); errors.Is(err, syscall.ENOSPC) {
			if len(block) == 1 {
				break
			}
			block = block[:max(1, len(block)/16)]
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}
}
