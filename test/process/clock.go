package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// now is the reading of the wall clock in Go's time.Now.
var now = regexp.MustCompile(`(?m)^func Now\(\) Time \{\n\t.*:= runtimeNow\(\)$`)

// BuildWithClock builds posthorn with a settable clock into a directory, and returns the binary's path. The
// clock of a process is ahead by the seconds in the file of its environment variable ClockFile, as in
// hack/e2e.
func BuildWithClock(dir string) (string, error) {
	root, err := moduleDir(module)
	if err != nil {
		return "", err
	}
	overlay, err := clockOverlay(dir, root, filepath.Join(root, "cmd", "posthorn"), map[string]string{})
	if err != nil {
		return "", err
	}
	binary := filepath.Join(dir, "posthorn-clock")
	return binary, Compile(root, "./cmd/posthorn", binary, "-overlay", overlay)
}

// BuildNATSWithClock builds the NATS server with a settable clock, as BuildWithClock.
func BuildNATSWithClock(dir string) (string, error) {
	root, err := moduleDir(module)
	if err != nil {
		return "", err
	}
	server, err := moduleDir(nats)
	if err != nil {
		return "", err
	}
	// An overlay cannot add files to other modules, so the package exists only in the overlay.
	program := filepath.Join(root, "test", "process", "nats-server")
	overlay, err := clockOverlay(dir, root, program, map[string]string{filepath.Join(program, "main.go"): filepath.Join(server, "main.go")})
	if err != nil {
		return "", err
	}
	binary := filepath.Join(dir, "nats-server-clock")
	return binary, Compile(root, "./test/process/nats-server", binary, "-overlay", overlay)
}

// moduleDir returns the directory of a module.
func moduleDir(path string) (string, error) {
	out, err := run(exec.Command("go", "list", "-m", "-f", "{{.Dir}}", path))
	return strings.TrimSpace(out), err
}

// clockOverlay writes an overlay for go build that makes the clock of a program settable: a changed time.Now,
// and a file in the directory of its package main. It adds these two to replace.
func clockOverlay(dir, root, program string, replace map[string]string) (path string, err error) {
	goroot, err := run(exec.Command("go", "env", "GOROOT"))
	if err != nil {
		return "", err
	}
	original := filepath.Join(strings.TrimSpace(goroot), "src", "time", "time.go")
	text, err := os.ReadFile(original)
	if err != nil {
		return "", err
	}
	if !now.Match(text) {
		return "", errors.New("unknown time.Now in this version of Go; adapt clockOverlay")
	}
	text = append(now.ReplaceAll(text, []byte("$0; sec += clockAhead")), "\n//go:linkname clockAhead\nvar clockAhead int64\n"...)
	changed, path := filepath.Join(dir, "time.go"), filepath.Join(dir, "overlay.json")
	replace[original] = changed
	replace[filepath.Join(program, "clock.go")] = filepath.Join(root, "test", "e2e", "clock", "clock.go.txt")
	overlay, _ := json.Marshal(map[string]any{"Replace": replace}) // Strings always marshal.
	if err := errors.Join(os.WriteFile(changed, text, 0o600), os.WriteFile(path, overlay, 0o600)); err != nil {
		return "", fmt.Errorf("write the overlay: %w", err)
	}
	return path, nil
}

// ClockFile is the environment variable with the path of a file, for BuildWithClock.
const ClockFile = "POSTHORN_CLOCK_FILE"
