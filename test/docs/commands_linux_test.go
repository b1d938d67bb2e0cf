package docs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/need"
	"github.com/posthorn/posthorn/test/wait"
)

// printed has texts that the output of a page's commands must contain, in addition to the
// output on the page.
var printed = map[string][]string{
	"README.md":          {`{"success":true}`, `"Order Completed"`, "signature ok", "crm True Ready True"},
	"docs/standalone.md": {"200 OK", "signature ok", "crm True Ready True"},
	"docs/audience.md":   {"members 3, added 3, removed 0, changed 0"},
}

// Runs the local command blocks unchanged against `posthorn run`. test/e2e runs others on a
// cluster. A skipped block has a reason.
func TestCommands(t *testing.T) {
	var skipped []string
	out, local, incomplete := map[string]string{}, map[string]bool{}, map[string]bool{}
	for _, b := range blocks(t, "sh", "console") {
		name := fmt.Sprintf("%s:%d", b.Page, b.Line)
		switch where, err := b.Where(); where {
		case "local":
			local[b.Page] = true
			t.Run(name, func(t *testing.T) {
				defer func() { incomplete[b.Page] = incomplete[b.Page] || t.Skipped() }()
				out[b.Page] += runBlock(t, b)
			})
		case "skip":
			skipped = append(skipped, name)
		case "":
			t.Errorf("%s: got no commands and error %v, want commands", name, err)
		}
	}
	if len(skipped) > 6 {
		t.Errorf("skipped blocks: got %d, want at most 6: %v", len(skipped), skipped)
	}
	for page, wants := range printed {
		have := strings.Join(strings.Fields(out[page]), " ")
		for _, want := range wants {
			if have != "" && !incomplete[page] && !strings.Contains(have, want) {
				t.Errorf("output of the commands of %s: got\n%s\nwant one with %q", page, out[page], want)
			}
		}
	}
	for page := range printed {
		if !local[page] {
			t.Errorf("%s has no local command block", page)
		}
	}
}

// surroundings prepares the tools and files that the commands of the pages use.
const surroundings = `
cd "$DIR"
export OLD_HOME=$HOME HOME=$DIR PATH=$DIR/bin:$PATH
make() { # The program is built; the demo is run; other tests run the suites.
	case $1 in build|test|e2e) ;; run) HOME=$OLD_HOME command make --no-print-directory -C "$ROOT" run ;; *) return 1 ;; esac
}
kubectl() { "$KUBECTL" --server http://127.0.0.1:8081 "$@"; }
seq 3 | sed 's/.*/{"userId": "u&"}/' > members.ndjson
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
`

// running starts Posthorn with the manifests of the demo and of the page.
const running = `
posthorn sink --secret-value demo-shared-secret > sink.log &
posthorn sink --listen 127.0.0.1:9001 --secret-value demo-shared-secret > warehouse.log &
posthorn run -f webhooks --data data --egress-allow 127.0.0.0/8 --log-level error &
for i in $(seq 3000); do curl -sf http://127.0.0.1:8080/readyz >/dev/null && break; sleep 0.1; done
`

// retrying is a wrapper of posthorn that retries until a server that the block has started
// is ready.
const retrying = `#!/usr/bin/env bash
case $1 in run|sink|compile|render|verify) exec "$POSTHORN" "$@" ;; esac
for i in $(seq 3000); do
	code=0
	"$POSTHORN" "$@" >"$DIR/out.$$" 2>"$DIR/error.$$" || code=$?
	grep -q 'Is Posthorn running there\|"not_ready"' "$DIR/out.$$" "$DIR/error.$$" || { cat "$DIR/out.$$"; cat "$DIR/error.$$" >&2; exit $code; }
	sleep 0.1
done
exit 1
`

// runBlock runs the commands of a block in an empty directory and in a separate network
// namespace, where all ports are free, and returns their output.
func runBlock(t *testing.T, b Block) string {
	need.Program(t, "curl")
	dir := t.TempDir()
	top, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	kubectl, err := env.Binary("kubectl")
	if err != nil && strings.Contains(b.Commands(), "kubectl") {
		need.Skip(t, err)
	}
	starts := strings.Contains(b.Text, "posthorn run") // Otherwise a server is started first.
	if err := errors.Join(
		os.Mkdir(filepath.Join(dir, "bin"), 0o755),
		os.WriteFile(filepath.Join(dir, "bin", "posthorn"), []byte(retrying), 0o755),
		os.Symlink(filepath.Join(top, "hack"), filepath.Join(dir, "hack")),
		os.Symlink(filepath.Join(top, "config"), filepath.Join(dir, "config")),
	); err != nil {
		t.Fatal(err)
	}
	script := "set -euo pipefail\n" + surroundings
	if !starts {
		if err := writeManifests(top, b.Page, filepath.Join(dir, "webhooks")); err != nil {
			t.Fatal(err)
		}
		script += running
	}
	script += b.Commands()
	if starts {
		// Posthorn runs in the background. Wait for the delivery of a message.
		script += "\nfor i in $(seq 3000); do posthorn get destinations | tee get.log | grep -q 'crm *True *Ready *True' && break; sleep 0.1; done; cat get.log\n"
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	// Pdeathsig applies to the thread that started the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var out bytes.Buffer
	run := func(attributes syscall.SysProcAttr) (started bool, err error) {
		cmd := exec.CommandContext(ctx, self)
		cmd.Env = append(os.Environ(), alone+"="+script, "DIR="+dir, "ROOT="+top, "POSTHORN="+binary, "KUBECTL="+kubectl, "KUBECONFIG=/dev/null")
		cmd.SysProcAttr = &attributes
		cmd.SysProcAttr.Setpgid, cmd.SysProcAttr.Pdeathsig = true, syscall.SIGKILL
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		cmd.WaitDelay = 10 * time.Second
		cmd.Stdout, cmd.Stderr = &out, &out
		err = cmd.Run()
		if cmd.Process != nil {
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		}
		return cmd.Process != nil, err
	}
	network := syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if os.Geteuid() != 0 {
		network.Cloneflags |= syscall.CLONE_NEWUSER
		network.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
	}
	started, err := run(network)
	if !started && errors.Is(err, syscall.EPERM) {
		t.Logf("cannot create a network namespace (%v): the commands use this machine's network, where ports 8080, 8081 and 9000 must be free", err)
		_, err = run(syscall.SysProcAttr{})
	}
	if missing := b.Missing(out.String()); err != nil || len(missing) > 0 {
		t.Errorf("commands: got error %v and missing lines %q, want none\n%s\noutput:\n%s", err, missing, b.Commands(), out.String())
	}
	return out.String()
}

// writeManifests writes the manifests of a page to a directory, and the demo's manifests for
// other objects.
func writeManifests(top, page, dir string) error {
	all, err := Blocks(top, page)
	if err := errors.Join(err, os.Mkdir(dir, 0o755)); err != nil {
		return err
	}
	var texts []string
	for _, b := range all {
		if b.Language == "yaml" {
			texts = append(texts, b.Text)
		}
	}
	demo, err := filepath.Glob(filepath.Join(top, "hack", "demo", "manifests", "*.yaml"))
	if err != nil {
		return err
	}
	for _, path := range demo {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		texts = append(texts, string(text))
	}
	seen := map[string]bool{}
	for _, text := range texts {
		for i, document := range strings.Split("\n"+text, "\n---\n") {
			var o struct {
				APIVersion, Kind string
				Metadata         struct{ Name string }
			}
			if err := yaml.Unmarshal([]byte(document), &o); err != nil {
				return fmt.Errorf("%s: %w", page, err)
			}
			name := strings.ToLower(o.Kind + "-" + o.Metadata.Name)
			if o.APIVersion != "posthorn.dev/v1beta1" && (o.APIVersion != "v1" || o.Kind != "Secret") || seen[name] {
				continue
			}
			seen[name] = true
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%s-%d.yaml", name, i)), []byte(document), 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}

// alone is the environment variable with the script for runAlone.
const alone = "POSTHORN_DOCS_SCRIPT"

// runAlone brings up the loopback interface of this process' network namespace, and
// replaces the process by a shell with a script.
func runAlone(script string) error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP)
	// The interface of the machine is already up and cannot be changed.
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request); err != nil && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("bring up the loopback interface: %w", err)
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		return err
	}
	return unix.Exec(bash, []string{"bash", "-c", script}, os.Environ())
}
