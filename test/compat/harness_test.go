// Package compat tests the binary with third-party clients: the vendor's Go, Node and
// browser clients, and a web page. Each message must be delivered exactly once to a receiver
// that verifies it in JavaScript. testdata has recordings of the clients' requests, which are
// also replayed without the clients.
package compat

import (
	"bufio"
	"bytes"
	"context"
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
	"testing"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/need"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

const (
	key    = "compat-write-key"
	secret = "compat-shared-secret"
	origin = "http://shop.example"
)

// built has the programs of the tests. Each is built once, on first use.
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

// install installs the packages of node/package-lock.json in node/node_modules, unless they
// are already installed.
func install() error {
	lock, err := os.ReadFile("node/package-lock.json")
	if err != nil {
		return err
	}
	const installed = "node/node_modules/.installed"
	if have, err := os.ReadFile(installed); err == nil && bytes.Equal(have, lock) {
		return nil
	}
	if err := command("npm", "ci", "--prefix", "node", "--ignore-scripts", "--legacy-peer-deps", "--omit=optional", "--no-audit",
		"--no-fund"); err != nil {
		return err
	}
	return os.WriteFile(installed, lock, 0o600)
}

// needNode skips a test without Node, and otherwise installs the packages.
func needNode(t *testing.T) {
	t.Helper()
	need.Program(t, "node")
	need.Program(t, "npm")
	if err := built.npm(); err != nil {
		need.Skip(t, err) // npm needs the network once.
	}
}

// posthorn is a running `posthorn run`.
type posthorn struct{ *process.Instance }

// start runs Posthorn with a Source (more is added to its spec) and a
// destination with a URL.
func start(t *testing.T, url string, suspended bool, more string) *posthorn {
	t.Helper()
	binary, err := built.posthorn()
	if err != nil {
		t.Fatal(err)
	}
	p := &posthorn{process.NewInstance(t, binary, t.TempDir(), nil)}
	p.Write("source.yaml", `
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {writeKey: `+key+`, sharedSecret: `+secret+`}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: web}
spec:
  writeKeys: [{name: main, secretKeyRef: {name: keys, key: writeKey}}]
  allowedOrigins: ["http://*.example:80", "null"]
`+more)
	p.deliver(url, suspended)
	p.Launch()
	t.Cleanup(p.Leave)
	return p
}

// deliver writes the manifest of the destination. While it is suspended, messages are kept.
func (p *posthorn) deliver(url string, suspended bool) {
	p.T.Helper()
	p.Write("crm.yaml", fmt.Sprintf(`
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  suspend: %t
  sourceRefs: [{name: web}]
  endpoints: [{name: primary, url: %s}]
  signing:
    schemes:
    - name: sha1
      type: HMACSHA1
      secretKeyRef: {name: keys, key: sharedSecret}
`, suspended, url))
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

// settled waits until n messages are accepted and none is pending, and returns the counts.
func (p *posthorn) settled(n int) (l adminapi.Ledger) {
	p.T.Helper()
	if err := wait.Until(func() error {
		report, err := p.AdminAPI().Report(context.Background(), "")
		if err != nil {
			return err
		}
		for _, namespace := range report.Namespaces {
			for _, d := range namespace.Destinations {
				if l = d.Ledger; d.Name == "crm" && l.Accepted >= int64(n) && l.Pending == 0 {
					return nil
				}
			}
		}
		return fmt.Errorf("ledger of crm: got %+v, want at least %d accepted and none pending", l, n)
	}); err != nil {
		p.T.Fatalf("no end of %d messages within %s: %v", n, wait.Limit, err)
	}
	return l
}

// metric returns the sum of a metric's series that contain a text.
func (p *posthorn) metric(series string) (sum float64) {
	p.T.Helper()
	text, err := p.AdminAPI().Metrics(context.Background())
	if err != nil {
		p.T.Fatal(err)
	}
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, series) {
			var v float64
			_, value, _ := strings.Cut(line, "} ")
			if _, err := fmt.Sscan(value, &v); err != nil {
				p.T.Fatal(err)
			}
			sum += v
		}
	}
	return sum
}

// arrival is a request at the receiver.
type arrival struct {
	ID, Key, Body    string
	Authentic, Fixed bool
}

// javascriptReceiver starts the receiver that verifies in JavaScript.
func javascriptReceiver(t *testing.T) (url string) {
	t.Helper()
	return nodeReceiver(t, "node/receiver.js", "SECRET="+secret)
}

// nodeReceiver starts a program that serves HTTP and prints its URL.
func nodeReceiver(t *testing.T, program string, environment ...string) (url string) {
	t.Helper()
	cmd := exec.Command("node", program)
	cmd.Env = append(os.Environ(), environment...)
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
		t.Fatalf("start of the receiver: got error %v, want none", err)
	}
	return strings.TrimSpace(url)
}

// exactlyOnce waits until all messages are delivered and checks that only those with
// the given ids were delivered, once, and verified. Calls whose ids end in "elsewhere"
// exclude the destination.
func (p *posthorn) exactlyOnce(url string, sent []string) []arrival {
	p.T.Helper()
	ids := slices.DeleteFunc(slices.Clone(sent), func(id string) bool { return strings.HasSuffix(id, "elsewhere") })
	l := p.settled(len(sent))
	if l.Accepted != int64(len(sent)) || l.Delivered != int64(len(ids)) || l.Filtered != int64(len(sent)-len(ids)) {
		p.T.Errorf("ledger: got %+v, want %d accepted, %d delivered and %d filtered", l, len(sent), len(ids), len(sent)-len(ids))
	}
	var arrived []arrival
	if err := get(url, &arrived); err != nil {
		p.T.Fatal(err)
	}
	count := map[string]int{}
	for _, a := range arrived {
		count[a.ID]++
		if !a.Authentic || !a.Fixed {
			p.T.Errorf("verification in JavaScript: got authentic %t and fixed point %t, want true and true: %s", a.Authentic, a.Fixed, a.Body)
		}
		if a.Key != a.ID {
			p.T.Errorf("Idempotency-Key: got %q, want the messageId %q", a.Key, a.ID)
		}
	}
	for _, id := range ids {
		if count[id] != 1 {
			p.T.Errorf("deliveries of message %s: got %d, want 1", id, count[id])
		}
		delete(count, id)
	}
	if len(count) > 0 {
		p.T.Errorf("deliveries that were not sent: got %v, want none", count)
	}
	return arrived
}
