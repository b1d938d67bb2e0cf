package peer

import (
	"bufio"
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
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/contract/writekey"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
	"github.com/posthorn/posthorn/test/wait"
)

// testOwner is an owner whose connections are counted.
type testOwner struct {
	*Identity
	server      *http.Server
	connections atomic.Int64
	// read and write are the last time limits of a connection.
	read, write atomic.Pointer[time.Time]
}

// testListener records the time limits of the connections that it accepts.
type testListener struct {
	net.Listener
	owner *testOwner
}

func (l *testListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &testConn{Conn: c, owner: l.owner}, nil
}

type testConn struct {
	net.Conn
	owner *testOwner
}

func (c *testConn) SetReadDeadline(at time.Time) error {
	c.owner.read.Store(&at)
	return c.Conn.SetReadDeadline(at)
}

func (c *testConn) SetWriteDeadline(at time.Time) error {
	c.owner.write.Store(&at)
	return c.Conn.SetWriteDeadline(at)
}

func (c *testConn) SetDeadline(at time.Time) error {
	return errors.Join(c.SetReadDeadline(at), c.SetWriteDeadline(at))
}

// serveOwner starts an owner on a free port until the test ends.
func serveOwner(t testing.TB, next http.HandlerFunc, change ...func(*http.Server)) *testOwner {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	i, err := NewIdentity("dispatcher-0", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	h := i.Handler(Handlers{Calls: next, Admin: http.HandlerFunc(admin), Namespace: namespaceOf}, slog.New(slog.DiscardHandler))
	o := &testOwner{Identity: i}
	o.server = &http.Server{ //nolint:gosec // a test
		Handler: h, TLSConfig: i.Config(), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateNew {
				o.connections.Add(1)
			}
		},
	}
	o.server.RegisterOnShutdown(h.Stop)
	for _, f := range change {
		f(o.server)
	}
	go func() { _ = o.server.ServeTLS(&testListener{l, o}, "", "") }()
	t.Cleanup(func() { _ = o.server.Close() })
	return o
}

// namespaceOf knows the write keys shop-1, shop-2 and bank-1 of two namespaces.
func namespaceOf(key writekey.Hash) (string, bool) {
	for _, known := range []string{"shop-1", "shop-2", "bank-1"} {
		if writekey.HashOf(known) == key {
			namespace, _, _ := strings.Cut(known, "-")
			return namespace, true
		}
	}
	return "", false
}

// admin is an admin API. The answer to a request for "/tail" has no end.
func admin(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintln(w, "admin", r.Method, r.URL, r.Header.Get("Authorization"), r.RemoteAddr, r.Header.Get(adminHeader),
		r.Header.Get(tokenHeader))
	if r.URL.Path == "/tail" {
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
}

// newForwarder returns a Forwarder, and a server of it. It answers 503 with the error.
func newForwarder(t testing.TB) (*Forwarder, *httptest.Server) {
	f := &Forwarder{Connections: &Connections{Memory: &limits.Pool{Max: 64 << 20}}, Logger: slog.New(slog.DiscardHandler),
		Refuse: func(w http.ResponseWriter, err error) {
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

// setOwner gives a Forwarder an owner, without dialTimeout: a connection can take longer on a busy machine.
func setOwner(f *Forwarder, announcement []byte) {
	if _, pool, err := decode(announcement); err == nil {
		c := f.Connections.use(announcement, pool)
		defer f.Connections.release(announcement)
		if c.transport.TLSHandshakeTimeout > 0 {
			c.transport.DialContext, c.transport.TLSHandshakeTimeout = nil, 0
		}
	}
	f.SetOwner(announcement)
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
		fmt.Fprintln(w, ip, r.Host, r.URL.String(), r.Header.Get("X-Forwarded-For"), r.Header.Get("Authorization"),
			r.Header.Get(tokenHeader)+r.Header.Get(clientHeader), string(body))
	})
	f, s := newForwarder(t)
	setOwner(f, i.Announce())
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
	setOwner(f, other.Announce())
	if status, text := post(t, s.URL, "body", nil); status != http.StatusServiceUnavailable || !strings.Contains(text, "certificate") {
		t.Errorf("answer: got %d %q, want 503 because of the certificate", status, text)
	}
}

func TestRequestsWithoutAnOwner(t *testing.T) {
	former := serveOwner(t, Misdirected)
	for name, announcement := range map[string][]byte{"none": nil, "damaged": []byte("{"), "former": former.Announce()} {
		f, s := newForwarder(t)
		setOwner(f, announcement)
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
	setOwner(f, former.Announce())
	go func() {
		<-arrived
		setOwner(f, next.Announce())
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
	setOwner(f, i.Announce())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	places := &f.owner.Load().places
	taken := places.For("")
	taken.Grow(maxForwards/2 - 2*unknownPlaces)
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
	if taken.Release(); places.Used() != 0 {
		t.Errorf("places that are taken afterwards: got %d, want none", places.Used())
	}
}

// Two slots of one owner share the bound of requests in progress, and another owner has its own.
func TestSilentOwnerLeavesRequestsToOthers(t *testing.T) {
	silent := serveOwner(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	other := serveOwner(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "other") })
	shared := &Connections{Memory: &limits.Pool{Max: 64 << 20}}
	var forwarders []*Forwarder
	var servers []*httptest.Server
	for _, i := range []*testOwner{silent, silent, other} {
		f, s := newForwarder(t)
		f.Connections = shared
		setOwner(f, i.Announce())
		forwarders, servers = append(forwarders, f), append(servers, s)
	}
	if len(shared.to) != 2 {
		t.Errorf("connections: got those to %d owners, want 2", len(shared.to))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	taken := forwarders[0].owner.Load().places.For("")
	taken.Grow(maxForwards/2 - unknownPlaces)
	var group sync.WaitGroup
	group.Go(func() {
		forwarders[0].ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodPost, "/", nil))
	})
	if err := wait.Until(func() error {
		if got := forwarders[1].owner.Load().places.Used(); got != maxForwards/2 {
			return fmt.Errorf("got %d", got)
		}
		return nil
	}); err != nil {
		t.Errorf("places at the silent owner: %v, want %d", err, maxForwards/2)
	}
	if status, text := post(t, servers[1].URL, "", nil); status != http.StatusServiceUnavailable || !strings.Contains(text, ErrBusy.Error()) {
		t.Errorf("other slot of the silent owner: got %d %q, want 503 and %q", status, text, ErrBusy)
	}
	if status, text := post(t, servers[2].URL, "", nil); status != http.StatusOK || text != "other" {
		t.Errorf("slot of the other owner: got %d %q, want 200", status, text)
	}
	cancel()
	group.Wait()
	forwarders[0].SetOwner(nil)
	if len(shared.to) != 2 {
		t.Errorf("connections while a slot uses them: got those to %d owners, want 2", len(shared.to))
	}
	forwarders[1].SetOwner(nil)
	forwarders[2].SetOwner(nil)
	if len(shared.to) != 0 {
		t.Errorf("connections of no slot: got those to %d owners, want none", len(shared.to))
	}
}

// endless is a body without an end.
type endless struct{ sent atomic.Int64 }

func (e *endless) Read(p []byte) (int, error) {
	clear(p)
	e.sent.Add(int64(len(p)))
	return len(p), nil
}

// A request to an owner that accepts connections and then does nothing ends at the time limit, and leaves
// no request in progress.
func TestTimeLimitOfAnOwner(t *testing.T) {
	stopped, err := net.Listen("tcp", "127.0.0.1:0") // As a stopped process: the kernel accepts.
	if err != nil {
		t.Fatal(err)
	}
	defer stopped.Close()
	neverServed, err := NewIdentity("stopped", stopped.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	hang := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	for _, c := range []struct {
		name  string
		owner *testOwner
		body  io.Reader
		cut   bool // The answer has begun.
	}{
		{"connection without a TLS handshake", &testOwner{Identity: neverServed}, http.NoBody, false},
		{"request without an answer", serveOwner(t, hang), strings.NewReader("body"), false},
		{"request without a body, without an answer", serveOwner(t, hang), http.NoBody, false},
		{"unread body", serveOwner(t, hang), &endless{}, false},
		{"body that is read in part", serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.CopyN(io.Discard, r.Body, 1<<20)
			hang(w, r)
		}), &endless{}, false},
		{"answer that does not end", serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			hang(w, r)
		}), http.NoBody, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, _ := newForwarder(t)
			setOwner(f, c.owner.Announce())
			k, handler := &kind{refuse: f.refuse}, f.Limited(100*time.Millisecond)
			if c.cut { // The test ends the limit when the answer has begun.
				handler = f.served("", func() *kind { return k }, wait.Limit)
			}
			s := httptest.NewServer(handler)
			defer s.Close()
			q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, c.body)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := http.DefaultClient.Do(q)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if c.cut && !k.limit.timer.Stop() {
				t.Error("the limit ended with the beginning of the answer")
			} else if c.cut {
				k.limit.timer.Reset(0)
			}
			text, err := io.ReadAll(resp.Body)
			switch {
			case c.cut && err == nil:
				t.Errorf("got the whole answer %q, want an error", text)
			case !c.cut && (err != nil || resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(text), ErrTimeout.Error())):
				t.Errorf("got %d %q and error %v, want 503 and %q", resp.StatusCode, text, err, ErrTimeout)
			}
			if err := wait.Until(func() error {
				if n := f.owner.Load().places.Used(); n != 0 {
					return fmt.Errorf("got %d", n)
				}
				return nil
			}); err != nil {
				t.Errorf("requests in progress: %v, want none", err)
			}
		})
	}
}

// The limit counts the owner's time, not the client's, and a long body extends it.
func TestTimeLimit(t *testing.T) {
	const limit = 10 * time.Second
	for _, c := range []struct {
		name string
		run  func(l *timeLimit)
		// left is the time after run; the limit is exceeded then and not before.
		left time.Duration
	}{
		{"nothing is read", func(*timeLimit) {}, limit},
		{"owner takes a part", func(*timeLimit) { time.Sleep(3 * time.Second) }, 7 * time.Second},
		{"client is slow", func(l *timeLimit) {
			time.Sleep(3 * time.Second)
			l.pause()
			time.Sleep(time.Hour)
			l.resume(0)
		}, 7 * time.Second},
		{"two parts of the owner's time", func(l *timeLimit) {
			for range 2 {
				time.Sleep(3 * time.Second)
				l.pause()
				l.resume(1)
			}
		}, 4 * time.Second},
		{"body extends the time", func(l *timeLimit) {
			time.Sleep(3 * time.Second)
			l.pause()
			l.resume(2 * leastRate)
		}, 9 * time.Second},
		{"no longer than the limit", func(l *timeLimit) {
			time.Sleep(3 * time.Second)
			l.pause()
			l.resume(100 * leastRate)
		}, limit},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var exceeded atomic.Bool
				l := newTimeLimit(limit, func() { exceeded.Store(true) })
				c.run(l)
				time.Sleep(c.left - time.Millisecond)
				synctest.Wait()
				if exceeded.Load() {
					t.Errorf("the limit is exceeded before %v, want after it", c.left)
				}
				time.Sleep(2 * time.Millisecond)
				synctest.Wait()
				if !exceeded.Load() {
					t.Errorf("the limit is not exceeded after %v", c.left)
				}
				l.pause()
				l.resume(100 * leastRate)
				exceeded.Store(false)
				time.Sleep(time.Hour)
				synctest.Wait()
				if exceeded.Load() {
					t.Error("the limit is exceeded twice")
				}
			})
		})
	}
}

// A limit that was stopped is never exceeded, also if the body is read afterwards.
func TestStoppedTimeLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newTimeLimit(time.Second, func() { t.Error("the limit is exceeded") })
		l.pause()
		l.stop()
		l.resume(1)
		time.Sleep(time.Hour)
	})
}

// A body that ends early is the client's error.
func TestInterruptedBody(t *testing.T) {
	i := serveOwner(t, func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })
	f, s := newForwarder(t)
	setOwner(f, i.Announce())
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

// Requests to the admin API are handled by the owner's, with the credentials of the client.
func TestAdminRequests(t *testing.T) {
	o := serveOwner(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "a call") })
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	refused := errors.New("none")
	forward := f.Admin(func(w http.ResponseWriter, err error) {
		refused = err
		w.WriteHeader(http.StatusBadGateway)
	})
	request := func(of http.Handler, method, path string) string {
		r := httptest.NewRequestWithContext(t.Context(), method, path, http.NoBody)
		r.RemoteAddr = "192.0.2.1:5"
		r.Header.Set("Authorization", "Bearer secret")
		r.Header.Set(adminHeader, "1")
		w := httptest.NewRecorder()
		of.ServeHTTP(w, r)
		return w.Body.String()
	}
	if got, want := request(forward, http.MethodGet, "/attempts?destination=a"), "admin GET /attempts?destination=a Bearer secret 192.0.2.1:5  \n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, method := range []string{http.MethodGet, http.MethodPost} { // A request of its own, and in a stream.
		if got := request(f, method, "/attempts"); got != "a call" {
			t.Errorf("%s with the header of admin requests: got %q, want the answer to a call", method, got)
		}
	}
	if n := f.Answered(); n != 2 {
		t.Errorf("got %d answered calls, want 2", n)
	}
	f.SetOwner(nil)
	if request(forward, http.MethodGet, "/attempts"); !errors.Is(refused, ErrNoOwner) || f.Failed() != 0 {
		t.Errorf("without an owner: got error %v and %d failed calls, want %v and 0", refused, f.Failed(), ErrNoOwner)
	}
}

// An answer to a request to the admin API may take as long as the client reads it.
func TestAdminAnswersHaveNoEnd(t *testing.T) {
	o := serveOwner(t, echo, func(s *http.Server) { s.WriteTimeout = time.Hour })
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	k := &kind{admin: true}
	s := httptest.NewServer(f.served("/admin", func() *kind { return k }, time.Hour))
	defer s.Close()
	resp, err := s.Client().Get(s.URL + "/tail") //nolint:noctx // a test
	if err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil || !strings.HasPrefix(line, "admin GET /tail") {
		t.Fatalf("got %q and error %v, want the first line of the answer", line, err)
	}
	if k.limit.timer.Stop() {
		t.Error("the limit of the request runs, want its end with the begin of the answer")
	}
	if at := *o.write.Load(); !at.IsZero() {
		t.Errorf("the owner ends the answer in %v, want no limit", time.Until(at))
	}
	// The end of a term ends the answer, and the client notices that it is not complete.
	f.SetOwner(nil)
	if rest, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("without an owner: got %q without an error", rest)
	}
	resp.Body.Close()
}
