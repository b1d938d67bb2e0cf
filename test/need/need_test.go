package need

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/check"
)

// recorder keeps how a test ended first; unlike a real one, the test continues.
type recorder struct {
	testing.TB
	end string
}

func (r *recorder) Helper() {}
func (r *recorder) Skip(args ...any) {
	if r.end == "" {
		r.end = "skip: " + fmt.Sprintln(args...)
	}
}
func (r *recorder) Fatalf(format string, args ...any) {
	r.end = "fail: " + fmt.Sprintf(format, args...)
}

// Each program of the list is skipped with its package, and fails with POSTHORN_TEST_ALL=1.
func TestProgram(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for line := range strings.Lines(programs) {
		name, debian, _ := strings.Cut(strings.TrimSpace(line), " ")
		for all, want := range map[string]string{"": "skip: " + cannot + " the Debian package " + debian + " is required: ",
			"1": "fail: POSTHORN_TEST_ALL is set"} {
			t.Setenv("POSTHORN_TEST_ALL", all)
			r := &recorder{}
			Program(r, name)
			if !strings.HasPrefix(r.end, want) {
				t.Errorf("%s with POSTHORN_TEST_ALL=%s: got %q, want %q", name, all, r.end, want)
			}
		}
	}
}

// place writes an executable script.
func place(t *testing.T, dir, name, script string) {
	t.Helper()
	check.NoError(t, "write "+name, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/bash\n"+script+"\n"), 0o755))
}

// An old Node is as none.
func TestOldNode(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	t.Setenv("POSTHORN_TEST_ALL", "")
	for version, skipped := range map[string]bool{"v18.20.4": true, "v20.0.0": false, "v24.1.0": false} {
		place(t, dir, "node", "echo "+version)
		r := &recorder{}
		Program(r, "node")
		check.Equal(t, version+" is skipped", strings.Contains(r.end, "this is "+version), skipped)
	}
}

// The script of make test names what it cannot install, and installs what it can.
func TestSetUp(t *testing.T) {
	script, err := filepath.Abs("../../hack/test-programs")
	check.NoError(t, "find the script", err)
	const have = "chromium curl npm openssl python3 squid"
	root := ""
	if os.Geteuid() != 0 {
		root = " root"
	}
	for _, c := range []struct{ name, all, install, missing string }{
		{"nothing can be installed", "", "exit 100", "nodejs tinyproxy-bin" + root},
		{"one can be installed", "", `[[ $* != *install* || $* == *"recommends tinyproxy-bin" ]] && touch "${0%/*}/tinyproxy" && chmod +x "${0%/*}/tinyproxy"`, "nodejs" + root},
		{"all must run", "1", "exit 100", "nodejs tinyproxy-bin" + root},
	} {
		t.Run(c.name, func(t *testing.T) {
			if root != "" && c.name == "one can be installed" {
				c.missing = "nodejs tinyproxy-bin" + root
			}
			dir := t.TempDir()
			for name := range strings.FieldsSeq(have) {
				place(t, dir, name, "exit 0")
			}
			place(t, dir, "node", "echo v18.20.4")
			place(t, dir, "apt-get", c.install)
			for _, name := range []string{"bash", "dirname", "flock", "touch", "chmod"} {
				path, err := exec.LookPath(name)
				check.NoError(t, "find "+name, err)
				check.NoError(t, "link "+name, os.Symlink(path, filepath.Join(dir, name)))
			}
			cmd := exec.Command(script)
			cmd.Env = []string{"PATH=" + dir, "POSTHORN_TEST_ALL=" + c.all}
			var stderr strings.Builder
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			check.Equal(t, "the script failed", err != nil, c.all == "1")
			if want := "this machine lacks what tests need (Debian's names): " + c.missing + "\n"; !strings.Contains(stderr.String(), want) {
				t.Errorf("stderr: got %q, want %q in it", stderr.String(), want)
			}
			check.Equal(t, "value of POSTHORN_TEST_ALL", string(out), "")
		})
	}
}
