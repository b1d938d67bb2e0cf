package compat

import (
	"bytes"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// wire is a proxy between a client and Posthorn. It forwards and records requests, and
// simulates faults.
type wire struct {
	*httptest.Server
	p *posthorn
	// plan selects the fate of a POST, given the previous exchanges; nil forwards all. Only
	// one request calls it at a time.
	plan func(seen []exchange) fate

	mu        sync.Mutex
	exchanges []exchange

	serial sync.Mutex  // locked while a request is forwarded under a plan
	down   atomic.Bool // true while Posthorn restarts
}

// fate is the treatment of a request.
type fate int

const (
	pass       fate = iota
	cutRequest      // Posthorn is restarted after half of the body.
	loseAnswer      // Posthorn is restarted after its answer, which the client does not get.
)

// exchange is a request and its answer; the status is 0 without an answer.
type exchange struct {
	recorded
	status     int
	retryAfter string
}

// recorded is a request in testdata.
type recorded struct {
	Method  string            `json:"method"`
	Path    string            `json:"path"`
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body,omitempty"`
}

func newWire(t *testing.T, p *posthorn, tls bool, plan func(seen []exchange) fate) *wire {
	w := &wire{p: p, plan: plan}
	if w.Server = httptest.NewUnstartedServer(http.HandlerFunc(w.serve)); tls {
		w.StartTLS()
	} else {
		w.Start()
	}
	t.Cleanup(func() {
		w.Close()
		w.settle()
	})
	return w
}

// certificate returns a file with the server's certificate; "" without TLS.
func (w *wire) certificate(t *testing.T) string {
	t.Helper()
	if w.Certificate() == nil {
		return ""
	}
	file := filepath.Join(t.TempDir(), "ca.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: w.Certificate().Raw})
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// settle waits until no request is forwarded under a plan.
func (w *wire) settle() {
	w.serial.Lock()
	defer w.serial.Unlock()
}

func (w *wire) serve(rw http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil || w.down.Load() {
		panic(http.ErrAbortHandler)
	}
	action := pass
	if w.plan != nil { // Also a browser's OPTIONS, which a restart would cut otherwise.
		w.serial.Lock()
		defer w.serial.Unlock()
		if r.Context().Err() != nil { // The client has cancelled the request.
			panic(http.ErrAbortHandler)
		}
		if r.Method == http.MethodPost {
			action = w.plan(w.seen())
		}
	}
	e := exchange{recorded: recorded{Method: r.Method, Path: r.URL.RequestURI(), Headers: map[string]string{}, Body: string(body)}}
	for name, values := range r.Header {
		e.Headers[name] = strings.Join(values, ", ")
	}
	var resp *http.Response
	if action == cutRequest {
		err = w.half(e.recorded)
	} else {
		resp, err = sendTo(w.p.Addr, r.Host, e.recorded)
	}
	if err != nil {
		w.p.T.Errorf("forward a request: got error %v, want none", err)
		panic(http.ErrAbortHandler)
	}
	if resp != nil {
		defer resp.Body.Close()
		e.status, e.retryAfter = resp.StatusCode, resp.Header.Get("Retry-After")
	}
	if action == loseAnswer && e.status != http.StatusOK {
		w.p.T.Errorf("status of the lost answer: got %d, want 200", e.status)
	}
	if action != pass {
		w.restart(rw)
		e.status = 0
	}
	w.mu.Lock()
	w.exchanges = append(w.exchanges, e)
	w.mu.Unlock()
	if action != pass {
		return
	}
	maps.Copy(rw.Header(), resp.Header)
	rw.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(rw, resp.Body)
}

// send sends a recorded request unchanged.
func send(addr string, r recorded) (*http.Response, error) { return sendTo(addr, addr, r) }

// sendTo sends a recorded request to an address, with a Host header.
func sendTo(addr, host string, r recorded) (*http.Response, error) {
	req, err := http.NewRequest(r.Method, "http://"+addr+r.Path, strings.NewReader(r.Body)) //nolint:noctx // It ends with the process.
	if err != nil {
		return nil, err
	}
	req.Host = host
	for name, value := range r.Headers {
		if name != "Connection" && name != "Content-Length" { // The transport sets them.
			req.Header.Set(name, value)
		}
	}
	if r.Body == "" {
		req.Body = nil
	}
	return forward.RoundTrip(req)
}

// forward changes neither requests nor answers.
var forward = &http.Transport{DisableCompression: true, DisableKeepAlives: true}

// half sends the head and half of the body.
func (w *wire) half(r recorded) error {
	conn, err := net.Dial("tcp", w.p.Addr)
	if err != nil {
		return err
	}
	w.p.T.Cleanup(func() { _ = conn.Close() })
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n", r.Method, r.Path, w.p.Addr, len(r.Body))
	for _, name := range slices.Sorted(maps.Keys(r.Headers)) {
		if name != "Connection" && name != "Content-Length" {
			fmt.Fprintf(&b, "%s: %s\r\n", name, r.Headers[name])
		}
	}
	fmt.Fprintf(&b, "\r\n%s", r.Body[:len(r.Body)/2])
	_, err = conn.Write(b.Bytes())
	return err
}

// restart kills Posthorn, closes the client's connection and starts Posthorn
// again on the same data. Until then no request gets an answer.
func (w *wire) restart(rw http.ResponseWriter) {
	w.down.Store(true)
	defer w.down.Store(false)
	w.p.End(syscall.SIGKILL)
	if conn, _, err := rw.(http.Hijacker).Hijack(); err == nil {
		_ = conn.Close()
	}
	if err := w.p.Start(); err != nil {
		w.p.T.Error(err) // This goroutine cannot end the test.
	}
}

// seen returns the exchanges so far.
func (w *wire) seen() []exchange {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.exchanges)
}
