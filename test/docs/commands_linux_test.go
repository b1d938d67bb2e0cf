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
	"github.com/posthorn/posthorn/test/wait"
)

// what is to be found in what the commands of some pages print, besides what
// their blocks show.
var printed = map[string][]string{
	"README.md":          {`{"success":true}`, `"Order Completed"`, "signature ok", "crm True Ready True"},
	"docs/standalone.md": {"200 OK", "signature ok", "crm True Ready True"},
	"docs/audience.md":   {"members 3, added 3, removed 0, changed 0"},
}

// Every block of commands is run: here, as it stands there, against `posthorn
// run`; or on a cluster, by test/e2e. The few that are not say why.
func TestCommands(t *testing.T) {
	var skipped []string
	out, here := map[string]string{}, map[string]bool{}
	for _, b := range blocks(t, "sh", "console") {
		name := fmt.Sprintf("%s:%d", b.Page, b.Line)
		switch where, err := b.Where(); where {
		case "local":
			here[b.Page] = true
			t.Run(name, func(t *testing.T) { out[b.Page] += runBlock(t, b) })
		case "skip":
			skipped = append(skipped, name)
		case "":
			t.Errorf("%s: a block of commands without one (%v)", name, err)
		}
	}
	if len(skipped) > 4 {
		t.Errorf("%d blocks are run nowhere: %v", len(skipped), skipped)
	}
	for page, wants := range printed {
		have := strings.Join(strings.Fields(out[page]), " ")
		for _, want := range wants {
			if have != "" && !strings.Contains(have, want) {
				t.Errorf("no %q in what the commands of %s print:\n%s", want, page, out[page])
			}
		}
	}
	for page := range printed {
		if !here[page] {
			t.Errorf("%s has no block of commands that is run here", page)
		}
	}
}

// What the commands of the pages find: the tools, and files that they name.
const surroundings = `
cd "$DIR"
export OLD_HOME=$HOME HOME=$DIR PATH=$DIR/bin:$PATH
make() { # built already; the demo is run; the suites have tests of their own
	case $1 in build|test|e2e) ;; run) HOME=$OLD_HOME command make --no-print-directory -C "$ROOT" run ;; *) return 1 ;; esac
}
kubectl() { "$KUBECTL" --server http://127.0.0.1:8081 "$@"; }
seq 3 | sed 's/.*/{"userId": "u&"}/' > members.ndjson
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
`

// Posthorn as the pages take it for granted: the demo's manifests, and those of the page.
const running = `
posthorn sink --secret demo-shared-secret > sink.log &
posthorn run --manifests webhooks --data data --egress-allow 127.0.0.0/8 --log-level error &
for i in $(seq 3000); do curl -sf http://127.0.0.1:8080/readyz >/dev/null && break; sleep 0.1; done
`

// The program, patient with a server that another line of the block has just started.
const patient = `#!/usr/bin/env bash
case $1 in run|sink|compile|verify) exec "$POSTHORN" "$@" ;; esac
for i in $(seq 3000); do
	code=0
	"$POSTHORN" "$@" >"$DIR/out.$$" 2>"$DIR/error.$$" || code=$?
	grep -q 'Is Posthorn running there\|"not_ready"' "$DIR/out.$$" "$DIR/error.$$" || { cat "$DIR/out.$$"; cat "$DIR/error.$$" >&2; exit $code; }
	sleep 0.1
done
exit 1
`

// runBlock runs the commands of a block in an empty folder and in a network
// of their own, where all ports are free, and returns what they print.
func runBlock(t *testing.T, b Block) string {
	dir := t.TempDir()
	top, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	kubectl, err := env.Binary("kubectl")
	if err != nil {
		t.Fatal(err)
	}
	starts := strings.Contains(b.Text, "posthorn run") // by itself, what else is running beforehand
	if err := errors.Join(
		os.Mkdir(filepath.Join(dir, "bin"), 0o755),
		os.WriteFile(filepath.Join(dir, "bin", "posthorn"), []byte(patient), 0o755),
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
		// It began in the background. A message is on its way.
		script += "\nfor i in $(seq 3000); do posthorn get destinations | tee get.log | grep -q 'crm *True *Ready *True' && break; sleep 0.1; done; cat get.log\n"
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	// Pdeathsig is about the thread that started the process.
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
		t.Logf("no network of its own for the commands (%v): they use this machine's, where ports 8080, 8081 and 9000 must be free", err)
		_, err = run(syscall.SysProcAttr{})
	}
	if missing := b.Missing(out.String()); err != nil || len(missing) > 0 {
		t.Errorf("%v; lines that the page shows and the commands do not print: %q\n%s\nprinted:\n%s", err, missing, b.Commands(), out.String())
	}
	return out.String()
}

// writeManifests writes a page's manifests, and those of the demo that the page
// has not others for, into a folder.
func writeManifests(top, page, folder string) error {
	all, err := Blocks(top, page)
	if err := errors.Join(err, os.Mkdir(folder, 0o755)); err != nil {
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
			if o.APIVersion != "posthorn.dev/v1alpha1" && (o.APIVersion != "v1" || o.Kind != "Secret") || o.Kind == "Redelivery" || seen[name] {
				continue // of a cluster alone
			}
			seen[name] = true
			if err := os.WriteFile(filepath.Join(folder, fmt.Sprintf("%s-%d.yaml", name, i)), []byte(document), 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}

// alone names the environment's variable with the script for runAlone.
const alone = "POSTHORN_DOCS_SCRIPT"

// runAlone becomes a shell with a script, after it has brought up the loopback
// interface of this process' own network.
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
	// The machine's own is up already, and not ours to change.
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request); err != nil && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("bring up the loopback interface: %w", err)
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		return err
	}
	return unix.Exec(bash, []string{"bash", "-c", script}, os.Environ())
}
