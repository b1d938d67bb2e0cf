package peer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/posthorn/posthorn/test/wait"
)

// serveOwner starts an owner on a free port until the test ends.
func serveOwner(t *testing.T, next http.HandlerFunc) *Identity {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	i, err := NewIdentity("dispatcher-0", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: i.Handler(next), TLSConfig: i.Config(), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)} //nolint:gosec // a test
	go func() { _ = s.ServeTLS(l, "", "") }()
	t.Cleanup(func() { _ = s.Close() })
	return i
}

// newForwarder returns a Forwarder, and a server of it. It answers 503 with the error.
func newForwarder(t *testing.T) (*Forwarder, *httptest.Server) {
	f := &Forwarder{Logger: slog.New(slog.DiscardHandler), Refuse: func(w http.ResponseWriter, err error) {
		status := http.StatusServiceUnavailable
		if _, ok := errors.AsType[*BodyError](err); ok {
			status = http.StatusBadRequest
		}
		http.Error(w, err.Error(), status)
	}}
	s := httptest.NewServer(f)
	t.Cleanup(s.Close)
	return f, s
}

func post(t *testing.T, url, body string, header http.Header) (status int, text string) {
	t.Helper()
	q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for name, values := range header {
		q.Header[name] = values
	}
	if host := header.Get("Host"); host != "" {
		q.Host = host
	}
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(out)
}

// The owner sees the request of the client, and nothing of the standby between them.
func TestOwnerSeesTheRequestOfTheClient(t *testing.T) {
	i := serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		ip, _, _ := net.SplitHostPort(r.RemoteAddr)
		w.Header().Set("X-Answer", "1")
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprintln(w, ip, r.Host, r.URL.String(), r.Header.Get("X-Forwarded-For"), r.Header.Get("Authorization"), r.Header.Get(tokenHeader)+r.Header.Get(clientHeader), string(body))
	})
	f, s := newForwarder(t)
	f.SetOwner(i.Announce())
	status, text := post(t, s.URL+"/v1/batch?a=b", "body", http.Header{
		"Host": {"calls.example.com"}, "X-Forwarded-For": {"192.0.2.7"}, "Authorization": {"Basic a2V5Og=="},
		// Of the client, so without effect.
		tokenHeader: {"forged"}, clientHeader: {"198.51.100.1:1"},
	})
	if want := "127.0.0.1 calls.example.com /v1/batch?a=b 192.0.2.7 Basic a2V5Og==  body\n"; status != http.StatusTeapot || text != want {
		t.Errorf("answer: got %d %q, want %d %q", status, text, http.StatusTeapot, want)
	}
	if f.Answered() != 1 || f.Failed() != 0 {
		t.Errorf("counts: got %d answered and %d failed, want 1 and 0", f.Answered(), f.Failed())
	}
}

// A request without the token of the log cannot choose the address of a client.
func TestRequestWithoutTheTokenIsRefused(t *testing.T) {
	i := serveOwner(t, func(http.ResponseWriter, *http.Request) { t.Error("the request was handled") })
	for _, token := range []string{"", "wrong"} {
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} //nolint:gosec // a test
		q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+i.announcement.Address, nil)
		if err != nil {
			t.Fatal(err)
		}
		q.Header.Set(tokenHeader, token)
		resp, err := client.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusForbidden {
			t.Errorf("token %q: got status %d, want 403", token, resp.StatusCode)
		}
	}
}

// Another process at the address of the owner gets no request, and no token.
func TestOtherCertificateGetsNoRequest(t *testing.T) {
	i := serveOwner(t, func(http.ResponseWriter, *http.Request) { t.Error("the request was handled") })
	other, err := NewIdentity("dispatcher-1", i.announcement.Address)
	if err != nil {
		t.Fatal(err)
	}
	f, s := newForwarder(t)
	f.SetOwner(other.Announce())
	if status, text := post(t, s.URL, "body", nil); status != http.StatusServiceUnavailable || !strings.Contains(text, "certificate") {
		t.Errorf("answer: got %d %q, want 503 because of the certificate", status, text)
	}
}

func TestRequestsWithoutAnOwner(t *testing.T) {
	former := serveOwner(t, Misdirected)
	for name, announcement := range map[string][]byte{"none": nil, "damaged": []byte("{"), "former": former.Announce()} {
		f, s := newForwarder(t)
		f.SetOwner(announcement)
		if status, text := post(t, s.URL, "body", nil); status != http.StatusServiceUnavailable || !strings.Contains(text, ErrNoOwner.Error()) {
			t.Errorf("%s: got %d %q, want 503 and %q", name, status, text, ErrNoOwner)
		}
		if f.Failed() != 1 || f.Answered() != 0 {
			t.Errorf("%s: got %d failed and %d answered, want 1 and 0", name, f.Failed(), f.Answered())
		}
	}
}

// A stopped owner does not keep requests for longer than it takes to replace it.
func TestNewOwnerEndsTheRequestsToTheFormerOne(t *testing.T) {
	arrived := make(chan struct{})
	former := serveOwner(t, func(_ http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-r.Context().Done()
	})
	next := serveOwner(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "next") })
	f, s := newForwarder(t)
	f.SetOwner(former.Announce())
	go func() {
		<-arrived
		f.SetOwner(next.Announce())
	}()
	if status, _ := post(t, s.URL, "", nil); status != http.StatusServiceUnavailable {
		t.Errorf("request to the former owner: got status %d, want 503", status)
	}
	if status, text := post(t, s.URL, "", nil); status != http.StatusOK || text != "next" {
		t.Errorf("request after the change: got %d %q, want 200 of the next owner", status, text)
	}
}

// A slow owner does not make a standby keep requests without bound: the streams of HTTP/2 are more
// than the connections.
func TestRequestsInProgressAreBounded(t *testing.T) {
	var arrived atomic.Int64
	i := serveOwner(t, func(_ http.ResponseWriter, r *http.Request) {
		arrived.Add(1)
		<-r.Context().Done()
	})
	f, _ := newForwarder(t)
	f.SetOwner(i.Announce())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	f.forwards.Store(maxForwards - 2)
	var refused atomic.Int64
	var group sync.WaitGroup
	for range 10 {
		group.Go(func() {
			w := httptest.NewRecorder()
			f.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodPost, "/", nil))
			if ctx.Err() == nil && strings.Contains(w.Body.String(), ErrBusy.Error()) {
				refused.Add(1)
			}
		})
	}
	if err := wait.Until(func() error {
		if arrived.Load() != 2 || refused.Load() != 8 {
			return fmt.Errorf("got %d requests at the owner and %d refused, want 2 and 8", arrived.Load(), refused.Load())
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	cancel()
	group.Wait()
	if got := f.forwards.Load(); got != maxForwards-2 {
		t.Errorf("requests in progress afterwards: got %d, want %d", got, maxForwards-2)
	}
}

// A body that ends early is the client's error.
func TestInterruptedBody(t *testing.T) {
	i := serveOwner(t, func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })
	f, s := newForwarder(t)
	f.SetOwner(i.Announce())
	c, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprint(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nbody")
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if err := wait.Until(func() error {
		if f.Failed() != 1 {
			return fmt.Errorf("got %d failed requests, want 1", f.Failed())
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

func TestTokenIsNotPrinted(t *testing.T) {
	i, err := NewIdentity("dispatcher-0", "192.0.2.1:8444")
	if err != nil {
		t.Fatal(err)
	}
	a := i.announcement
	for _, text := range []string{fmt.Sprint(a), fmt.Sprintf("%+v %#v", a, a), slog.AnyValue(a).Resolve().String()} {
		if strings.Contains(text, a.Token) {
			t.Errorf("the text %q has the token", text)
		}
	}
}
