package compat

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// wire is what lies between a client and Posthorn. It passes requests on as
// they are, keeps them, and breaks where a test wants it to.
type wire struct {
	*httptest.Server
	p *posthorn
	// plan decides what happens to a POST, from what was seen before; nil passes
	// all. It is called by one request at a time.
	plan func(seen []exchange) fate

	mu        sync.Mutex
	exchanges []exchange

	serial sync.Mutex  // held while a request is passed on under a plan
	down   atomic.Bool // Posthorn is being started again
}

// fate is what happens to a request on the wire.
type fate int

const (
	pass       fate = iota
	cutRequest      // half of the body reaches Posthorn, which is then killed and started again
	loseAnswer      // Posthorn answers and is killed and started again; the client gets no answer
)

// exchange is a request and its answer; the status is 0 when the client got none.
type exchange struct {
	recorded
	status     int
	retryAfter string
}

// recorded is a request as it is kept in testdata.
type recorded struct {
	Method  string            `json:"method"`
	Path    string            `json:"path"`
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body,omitempty"`
}

func newWire(t *testing.T, p *posthorn, plan func(seen []exchange) fate) *wire {
	w := &wire{p: p, plan: plan}
	w.Server = httptest.NewServer(http.HandlerFunc(w.serve))
	t.Cleanup(func() {
		w.Close()
		w.settle()
	})
	return w
}

// settle waits until no plan is being carried out.
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
	if w.plan != nil && r.Method == http.MethodPost {
		w.serial.Lock()
		defer w.serial.Unlock()
		if r.Context().Err() != nil { // The client has given up on it: it is no longer under way.
			panic(http.ErrAbortHandler)
		}
		action = w.plan(w.seen())
	}
	e := exchange{recorded: recorded{Method: r.Method, Path: r.URL.RequestURI(), Headers: map[string]string{}, Body: string(body)}}
	for name, values := range r.Header {
		e.Headers[name] = strings.Join(values, ", ")
	}
	var resp *http.Response
	if action == cutRequest {
		err = w.half(e.recorded)
	} else {
		resp, err = send(w.p.Addr, e.recorded)
	}
	if err != nil {
		w.p.t.Errorf("pass a request on: %v", err)
		panic(http.ErrAbortHandler)
	}
	if resp != nil {
		defer resp.Body.Close()
		e.status, e.retryAfter = resp.StatusCode, resp.Header.Get("Retry-After")
	}
	if action == loseAnswer && e.status != http.StatusOK {
		w.p.t.Errorf("the answer to lose is %d, not 200", e.status)
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

// send sends a recorded request as it is.
func send(addr string, r recorded) (*http.Response, error) {
	req, err := http.NewRequest(r.Method, "http://"+addr+r.Path, strings.NewReader(r.Body)) //nolint:noctx // the tests end it with the process
	if err != nil {
		return nil, err
	}
	for name, value := range r.Headers {
		if name != "Connection" && name != "Content-Length" { // they are of one hop, and of the body
			req.Header.Set(name, value)
		}
	}
	if r.Body == "" {
		req.Body = nil
	}
	return passOn.RoundTrip(req)
}

// passOn adds nothing to requests and takes nothing from answers.
var passOn = &http.Transport{DisableCompression: true, DisableKeepAlives: true}

// half sends the head and half of the body.
func (w *wire) half(r recorded) error {
	conn, err := net.Dial("tcp", w.p.Addr)
	if err != nil {
		return err
	}
	w.p.t.Cleanup(func() { _ = conn.Close() })
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

// restart kills Posthorn, breaks the client's connection and starts Posthorn
// again on the same data. Meanwhile no request gets an answer.
func (w *wire) restart(rw http.ResponseWriter) {
	w.down.Store(true)
	defer w.down.Store(false)
	w.p.kill(syscall.SIGKILL)
	if conn, _, err := rw.(http.Hijacker).Hijack(); err == nil {
		_ = conn.Close()
	}
	w.p.run()
}

// seen returns the exchanges so far.
func (w *wire) seen() []exchange {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.exchanges)
}
