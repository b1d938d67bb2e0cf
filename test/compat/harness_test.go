// Package compat drives clients that nobody here wrote against the real binary:
// the vendor's Go and Node clients and a page in a browser. Each message must
// arrive exactly once at a receiver that verifies in JavaScript. What the
// clients sent is recorded in testdata and replayed without them.
package compat

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

const (
	key    = "compat-write-key"
	secret = "compat-shared-secret"
	origin = "http://shop.example"
)

// built are the programs that tests run; each is built once, when first needed.
var built struct {
	dir           string
	posthorn      func() (binary string, err error)
	goClient, npm func() error
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "posthorn-compat-")
	if err != nil {
		panic(err)
	}
	built.dir = dir
	built.posthorn = sync.OnceValues(func() (string, error) { return process.Build(dir) })
	built.goClient = sync.OnceValue(func() error { return process.Compile("goclient", ".", filepath.Join(dir, "goclient")) })
	built.npm = sync.OnceValue(install)
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

func command(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// install puts the packages of node/package-lock.json into node/node_modules,
// unless they are there.
func install() error {
	lock, err := os.ReadFile("node/package-lock.json")
	if err != nil {
		return err
	}
	const installed = "node/node_modules/.installed"
	if have, err := os.ReadFile(installed); err == nil && bytes.Equal(have, lock) {
		return nil
	}
	if err := command("npm", "ci", "--prefix", "node", "--ignore-scripts", "--no-audit", "--no-fund"); err != nil {
		return err
	}
	return os.WriteFile(installed, lock, 0o600)
}

// needNode skips a test where there is no Node, and otherwise installs what it needs.
func needNode(t *testing.T) {
	t.Helper()
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("needs %s", program)
		}
	}
	if err := built.npm(); err != nil {
		t.Fatal(err)
	}
}

// posthorn is a running `posthorn run`.
type posthorn struct {
	*process.Posthorn
	t         *testing.T
	manifests string
	log       process.Log
}

// start runs Posthorn with a Source (more is added to its spec) and a
// destination that sends to a URL, if enabled.
func start(t *testing.T, url string, enabled bool, more string) *posthorn {
	t.Helper()
	binary, err := built.posthorn()
	if err != nil {
		t.Fatal(err)
	}
	p := &posthorn{t: t, manifests: t.TempDir()}
	p.Posthorn = process.Run(binary, p.manifests, t.TempDir())
	p.Log = &p.log
	p.write("source.yaml", `
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {writeKey: `+key+`, sharedSecret: `+secret+`}
---
apiVersion: posthorn.dev/v1alpha1
kind: Source
metadata: {name: web}
spec:
  writeKeys: [{secretKeyRef: {name: keys, key: writeKey}}]
  allowedOrigins: ["`+origin+`"]
`+more)
	p.deliver(url, enabled)
	p.run()
	t.Cleanup(func() {
		p.kill(syscall.SIGTERM)
		if t.Failed() {
			t.Logf("posthorn said:\n%s", p.log.Tail())
		}
	})
	return p
}

// deliver declares the destination, and whether it is enabled: while it is not, messages wait.
func (p *posthorn) deliver(url string, enabled bool) {
	p.t.Helper()
	p.write("crm.yaml", fmt.Sprintf(`
apiVersion: posthorn.dev/v1alpha1
kind: WebhookDestination
metadata: {name: crm}
spec:
  enabled: %t
  sourceRefs: [{name: web}]
  endpoints: [{name: primary, url: %s}]
  signing:
    schemes:
    - type: HMACSHA1
      secretKeyRef: {name: keys, key: sharedSecret}
`, enabled, url))
}

func (p *posthorn) write(name, text string) {
	p.t.Helper()
	if err := process.Replace(filepath.Join(p.manifests, name), text); err != nil {
		p.t.Fatal(err)
	}
}

// run starts the process. It runs in the handlers of the wire too, so it ends no test.
func (p *posthorn) run() {
	if err := p.Start(); err != nil {
		p.t.Error(err)
	}
}

// kill ends the process and waits for its end.
func (p *posthorn) kill(signal syscall.Signal) {
	if err := p.Stop(signal); err != nil {
		p.t.Error(err)
	}
}

// get reads JSON.
func get(url string, into any) error {
	client := http.Client{Timeout: wait.Limit}
	resp, err := client.Get(url) //nolint:noctx // a local poll
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s %w", resp.Status, body, err)
	}
	return json.Unmarshal(body, into)
}

// ledger is what the dispatcher counts of the destination.
type ledger struct {
	Name                                                            string
	Accepted, Delivered, Filtered, DeadLettered, Discarded, Pending int64
}

// settled waits until n messages were accepted and none waits, and returns the counts.
func (p *posthorn) settled(n int) (l ledger) {
	p.t.Helper()
	if err := wait.Until(func() error {
		var report struct {
			Namespaces []struct{ Destinations []ledger }
		}
		if err := get("http://"+p.Admin+"/report", &report); err != nil {
			return err
		}
		for _, namespace := range report.Namespaces {
			for _, l = range namespace.Destinations {
				if l.Name == "crm" && l.Accepted >= int64(n) && l.Pending == 0 {
					return nil
				}
			}
		}
		return fmt.Errorf("%+v", l)
	}); err != nil {
		p.t.Fatalf("waited for %d messages to settle: %v", n, err)
	}
	return l
}

// metric returns the sum of a metric's series that contain a text.
func (p *posthorn) metric(series string) (sum float64) {
	p.t.Helper()
	resp, err := http.Get("http://" + p.Admin + "/metrics") //nolint:noctx // local
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), series) {
			var v float64
			_, value, _ := strings.Cut(lines.Text(), "} ")
			if _, err := fmt.Sscan(value, &v); err != nil {
				p.t.Fatal(err)
			}
			sum += v
		}
	}
	return sum
}

// arrival is one request that the receiver got.
type arrival struct {
	ID, Key, Body    string
	Authentic, Fixed bool
}

// javascriptReceiver starts the receiver that verifies in JavaScript.
func javascriptReceiver(t *testing.T) (url string) {
	t.Helper()
	cmd := exec.Command("node", "node/receiver.js")
	cmd.Env = append(os.Environ(), "SECRET="+secret)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stdin.Close(); _ = cmd.Wait() })
	url, err = bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("the receiver did not start: %v", err)
	}
	return strings.TrimSpace(url)
}

// exactlyOnce waits until all messages are delivered and checks that those with
// the given ids, and no others, arrived once and verified. Ids that end in
// "elsewhere" are of calls that exclude our destination.
func (p *posthorn) exactlyOnce(url string, sent []string) []arrival {
	p.t.Helper()
	ids := slices.DeleteFunc(slices.Clone(sent), func(id string) bool { return strings.HasSuffix(id, "elsewhere") })
	l := p.settled(len(sent))
	if l.Accepted != int64(len(sent)) || l.Delivered != int64(len(ids)) || l.Filtered != int64(len(sent)-len(ids)) {
		p.t.Errorf("%d messages were sent, %d of them for us; the ledger says %+v", len(sent), len(ids), l)
	}
	var arrived []arrival
	if err := get(url, &arrived); err != nil {
		p.t.Fatal(err)
	}
	count := map[string]int{}
	for _, a := range arrived {
		count[a.ID]++
		if !a.Authentic || !a.Fixed {
			p.t.Errorf("does not verify in JavaScript (authentic %t, fixed point %t): %s", a.Authentic, a.Fixed, a.Body)
		}
		if a.Key != a.ID {
			p.t.Errorf("Idempotency-Key %q of message %q", a.Key, a.ID)
		}
	}
	for _, id := range ids {
		if count[id] != 1 {
			p.t.Errorf("message %s arrived %d times", id, count[id])
		}
		delete(count, id)
	}
	if len(count) > 0 {
		p.t.Errorf("nobody sent these: %v", count)
	}
	return arrived
}
