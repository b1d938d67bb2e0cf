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
	root, err := run(exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module))
	if err != nil {
		return "", err
	}
	goroot, err := run(exec.Command("go", "env", "GOROOT"))
	if err != nil {
		return "", err
	}
	root = strings.TrimSpace(root)
	original := filepath.Join(strings.TrimSpace(goroot), "src", "time", "time.go")
	text, err := os.ReadFile(original)
	if err != nil {
		return "", err
	}
	if !now.Match(text) {
		return "", errors.New("unknown time.Now in this version of Go; adapt BuildWithClock")
	}
	text = append(now.ReplaceAll(text, []byte("$0; sec += clockAhead")), "\n//go:linkname clockAhead\nvar clockAhead int64\n"...)
	changed, overlay := filepath.Join(dir, "time.go"), filepath.Join(dir, "overlay.json")
	replace, _ := json.Marshal(map[string]map[string]string{"Replace": { // Strings always marshal.
		original: changed,
		filepath.Join(root, "cmd", "posthorn", "clock.go"): filepath.Join(root, "test", "e2e", "clock", "clock.go.txt"),
	}})
	if err := errors.Join(os.WriteFile(changed, text, 0o600), os.WriteFile(overlay, replace, 0o600)); err != nil {
		return "", fmt.Errorf("write the overlay: %w", err)
	}
	binary := filepath.Join(dir, "posthorn-clock")
	return binary, Compile(root, "./cmd/posthorn", binary, "-overlay", overlay)
}

// ClockFile is the environment variable with the path of a file, for BuildWithClock.
const ClockFile = "POSTHORN_CLOCK_FILE"
