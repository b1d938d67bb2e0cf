// Package need skips tests that need what a machine lacks: an API server's programs, Node, root.
// With POSTHORN_TEST_ALL set, as in CI and in make test on a machine that lacks nothing, they fail
// instead, so that a suite that passes has run every test.
package need

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// programs has the programs that tests start, a line each, with the Debian package of each.
// hack/test-programs installs them.
//
//go:embed programs
var programs string

// cannot is what hack/test looks for to list the skipped tests.
const cannot = "cannot run here:"

// newNode matches the versions of Node that the vendors' clients can run on.
var newNode = regexp.MustCompile(`^v[2-9][0-9]`)

// all reports whether a skip is a failure.
func all() bool { return os.Getenv("POSTHORN_TEST_ALL") != "" }

// Skip ends a test that lacks a requirement; missing names it.
func Skip(t testing.TB, missing error) {
	t.Helper()
	if all() {
		t.Fatalf("POSTHORN_TEST_ALL is set, and this test cannot run: %v", missing)
	}
	t.Skip(cannot, missing)
}

// Program returns the path of a program; it ends a test whose program is not on PATH.
func Program(t testing.TB, name string) string {
	t.Helper()
	_, after, listed := strings.Cut("\n"+programs, "\n"+name+" ")
	if !listed {
		t.Fatalf("%s is not in test/need/programs, so nothing installs it", name)
	}
	path, err := exec.LookPath(name)
	if err == nil && name == "node" {
		var version []byte
		if version, err = exec.Command(path, "--version").Output(); err == nil && !newNode.Match(version) {
			err = errors.New("Node 20 or later is required; this is " + strings.TrimSpace(string(version)))
		}
	}
	if err != nil {
		debian, _, _ := strings.Cut(after, "\n")
		Skip(t, fmt.Errorf("the Debian package %s is required: %w", debian, err))
	}
	return path
}

// SkipAll returns the exit code of a package whose tests all lack a requirement, for TestMain.
func SkipAll(missing error) int {
	if all() {
		fmt.Fprintln(os.Stderr, "POSTHORN_TEST_ALL is set, and these tests cannot run:", missing)
		return 1
	}
	fmt.Fprintln(os.Stderr, cannot, missing)
	return 0
}
