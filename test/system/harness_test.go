// Package system tests the binary with manifests in a directory, calls over HTTP, verifying
// receivers, kill -9, and the status.
package system

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/signature"
	"github.com/posthorn/posthorn/test/wait"
)

var binary string

func TestMain(m *testing.M) { process.Main(m, &binary) }

const (
	key    = "system-write-key"
	secret = "system-shared-secret"
)

// posthorn is a running `posthorn run`.
type posthorn struct {
	*process.Instance
	// deletes is true if the test removes Sources or destinations.
	deletes bool
	// builtIn is true if the test uses built-in Sources, which are not in the report.
	builtIn bool
}

// start runs Posthorn on some manifests (file name -> text).
func start(t *testing.T, manifests map[string]string, flags ...string) *posthorn {
	t.Helper()
	p := &posthorn{Instance: process.NewInstance(t, binary, t.TempDir(), manifests, flags...)}
	p.Launch()
	t.Cleanup(func() {
		if !t.Failed() {
			p.checkLedgers()
		}
		p.Leave()
	})
	return p
}

func (p *posthorn) remove(name string) {
	p.T.Helper()
	p.deletes = true
	p.Remove(name)
}

func (p *posthorn) mustPost(path, body string) {
	p.T.Helper()
	status, answer, err := p.Post(path, key, body)
	if err != nil || status != http.StatusOK {
		p.T.Fatalf("POST %s: got status %d, body %s and error %v, want 200", path, status, answer, err)
	}
}

// cli runs another command of the binary.
func cli(t *testing.T, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	err := cmd.Run()
	if _, ok := err.(*exec.ExitError); err != nil && !ok { //nolint:errorlint // Run returns it as it is
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// destination reads a destination's status with `posthorn get`.
func (p *posthorn) destination(name string) (d v1beta1.WebhookDestination, err error) {
	p.T.Helper()
	out, errs, code := cli(p.T, "", "get", "destinations", name, "-o", "json", "--admin", p.Admin)
	if code != 0 {
		return d, fmt.Errorf("get destinations: exit %d: %s", code, errs)
	}
	return d, json.Unmarshal([]byte(out), &d)
}

// condition waits until a destination's condition has a status and reason ("" for any).
func (p *posthorn) condition(name, typ, status, reason string) (message string) {
	p.T.Helper()
	wait.For(p.T, fmt.Sprintf("%s %s=%s %s", name, typ, status, reason), func() error {
		d, err := p.destination(name)
		if err != nil {
			return err
		}
		for _, c := range d.Status.Conditions {
			if c.Type == typ {
				if string(c.Status) == status && (reason == "" || c.Reason == reason) {
					message = c.Message
					return nil
				}
				return fmt.Errorf("got %s %s: %s", c.Status, c.Reason, c.Message)
			}
		}
		return fmt.Errorf("the condition does not exist")
	})
	return message
}

// report reads the dispatcher's report, and checks every ledger in it.
func (p *posthorn) report() (r adminapi.Report, err error) {
	p.T.Helper()
	fresh, err := p.AdminAPI().Report(context.Background(), "")
	if err != nil {
		return r, err
	}
	r = *fresh
	for _, t := range r.Namespaces {
		var sources, destinations queue.Ledger
		for _, s := range t.Sources {
			sources = sources.Plus(queue.Ledger(s.Messages))
			if err := queue.Ledger(s.Messages).Balance(); err != nil {
				p.T.Errorf("ledger of Source %s: %v", s.Name, err)
			}
		}
		for _, d := range t.Destinations {
			destinations = destinations.Plus(queue.Ledger(d.Ledger))
			if err := queue.Ledger(d.Ledger).Balance(); err != nil {
				p.T.Errorf("ledger of destination %s: %v", d.Name, err)
			}
		}
		// After a deletion only one side has the messages.
		if t.Namespace != "" && !p.deletes && !p.builtIn && sources.Pending == 0 && destinations.Pending == 0 && sources != destinations {
			p.T.Errorf("sum of the ledgers: got %+v for destinations, want %+v as for Sources", destinations, sources)
		}
	}
	return r, nil
}

// ledger waits until no message of a destination is pending, and returns the counts.
func (p *posthorn) ledger(name string) (delivered, filtered, dead, discarded int64) {
	p.T.Helper()
	wait.For(p.T, "no pending messages of "+name, func() error {
		report, err := p.report()
		if err != nil {
			return err
		}
		for _, t := range report.Namespaces {
			for _, d := range t.Destinations {
				if d.Name != name {
					continue
				}
				if d.Pending > 0 {
					return fmt.Errorf("%d pending", d.Pending)
				}
				delivered, filtered, dead, discarded = d.Delivered, d.Filtered, d.DeadLettered, d.Discarded
				return nil
			}
		}
		return fmt.Errorf("the destination is not in the report")
	})
	return
}

// checkLedgers runs at the end of every test. It checks that the ledgers of all Sources and
// destinations balance in the report, before and after a kill -9, and that they still contain
// every accepted message.
func (p *posthorn) checkLedgers() {
	select {
	case <-p.Exited():
		return // The test has stopped the process, or it did not start.
	default:
	}
	before, err := p.report()
	if err != nil {
		p.T.Errorf("last report: got error %v, want none", err)
		return
	}
	p.End(syscall.SIGKILL)
	p.Launch()
	after, err := p.report()
	if err != nil {
		p.T.Errorf("report after a kill: got error %v, want none", err)
		return
	}
	accepted := func(r adminapi.Report) map[string]int64 {
		n := map[string]int64{}
		for _, t := range r.Namespaces {
			for _, s := range t.Sources {
				n[t.Namespace+"/"+s.Name] = s.Messages.Accepted
			}
		}
		return n
	}
	now := accepted(after)
	for source, want := range accepted(before) {
		if got, ok := now[source]; ok && got < want {
			p.T.Errorf("accepted messages of %s after a kill: got %d, want at least %d", source, got, want)
		}
	}
}

// receiver is a webhook that verifies and records requests.
type receiver struct {
	*httptest.Server
	// open is locked while all requests wait.
	open     sync.RWMutex
	mu       sync.Mutex
	requests []request
	unsigned int
	secret   string
	// respond, when set, selects the status; failed counts rejected requests by messageId.
	respond func(n int) int
	failed  map[string]int
}

type request struct {
	header http.Header
	path   string
	body   string
}

func (r request) id() string {
	var m struct {
		MessageID string `json:"messageId"`
	}
	_ = json.Unmarshal([]byte(r.body), &m)
	return m.MessageID
}

func newReceiver(t *testing.T) *receiver {
	r := &receiver{secret: secret}
	r.Server = httptest.NewServer(http.HandlerFunc(r.serve))
	t.Cleanup(r.Close)
	return r
}

func (r *receiver) serve(w http.ResponseWriter, req *http.Request) {
	r.open.RLock()
	defer r.open.RUnlock()
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.respond != nil {
		if status := r.respond(len(r.requests)); status != http.StatusOK {
			if r.failed == nil {
				r.failed = map[string]int{}
			}
			r.failed[req.Header.Get("Idempotency-Key")]++
			w.WriteHeader(status)
			return
		}
	}
	if got := req.Header.Get("X-Signature"); got != signature.SHA1(r.secret, body) {
		r.unsigned++
	}
	r.requests = append(r.requests, request{header: req.Header.Clone(), path: req.URL.Path, body: string(body)})
}

func (r *receiver) set(respond func(n int) int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.respond = respond
}

// failures returns the counts of rejected requests by messageId.
func (r *receiver) failures() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.failed)
}

func (r *receiver) got() []request {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]request(nil), r.requests...)
}

// count returns the number of requests for each messageId.
func (r *receiver) count() map[string]int {
	n := map[string]int{}
	for _, q := range r.got() {
		n[q.id()]++
	}
	return n
}

func (p *posthorn) arrive(r *receiver, n int) []request {
	p.T.Helper()
	wait.For(p.T, fmt.Sprintf("%d received messages", n), func() error {
		if got := len(r.got()); got < n {
			return fmt.Errorf("got %d", got)
		}
		return nil
	})
	return r.got()
}

// source and destination are the manifests of most tests.
func source() string {
	return `
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {writeKey: ` + key + `, sharedSecret: ` + secret + `}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: web}
spec:
  writeKeys: [{name: main, secretKeyRef: {name: keys, key: writeKey}}]
`
}

func destination(name, url, more string) string {
	return `
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: ` + name + `}
spec:
  sourceRefs: [{name: web}]
  endpoints:
  - name: primary
    url: ` + url + `
  signing:
    schemes:
    - name: sha1
      type: HMACSHA1
      secretKeyRef: {name: keys, key: sharedSecret}
` + more
}
