// Package need skips tests that need what a machine lacks: an API server's programs, Node, root.
// With POSTHORN_TEST_ALL set, as in make test, they fail instead, so that a suite that passes has
// run every test.
package need

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
)

// all reports whether a skip is a failure.
func all() bool { return os.Getenv("POSTHORN_TEST_ALL") != "" }

// Skip ends a test that lacks a requirement; missing names it.
func Skip(t testing.TB, missing error) {
	t.Helper()
	if all() {
		t.Fatalf("POSTHORN_TEST_ALL is set, and this test cannot run: %v", missing)
	}
	t.Skip(missing)
}

// Program returns the path of a program; it ends a test whose program is not on PATH.
func Program(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Skip(t, err)
	}
	return path
}

// SkipAll returns the exit code of a package whose tests all lack a requirement, for TestMain.
func SkipAll(missing error) int {
	if all() {
		fmt.Fprintln(os.Stderr, "POSTHORN_TEST_ALL is set, and these tests cannot run:", missing)
		return 1
	}
	fmt.Fprintln(os.Stderr, "tests skipped:", missing)
	return 0
}
