package peer

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/dispatcher/replicated/answer"
	"github.com/posthorn/posthorn/test/wait"
)

// echo answers with the body of the request.
func echo(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Client", r.RemoteAddr)
	_, _ = io.Copy(w, r.Body)
}

// Requests that are sent at the same time share one connection, and each gets its own answer.
func TestRequestsShareAStream(t *testing.T) {
	const limit = time.Hour // It does not apply to a stream.
	o := serveOwner(t, echo, func(s *http.Server) { s.ReadTimeout, s.WriteTimeout = limit, limit })
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	var group sync.WaitGroup
	for n := range 200 {
		group.Go(func() {
			w := httptest.NewRecorder()
			body := strings.Repeat(fmt.Sprint(n, " "), n)
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader(body))
			r.RemoteAddr = fmt.Sprint("192.0.2.1:", n)
			f.ServeHTTP(w, r)
			if w.Code != http.StatusOK || w.Body.String() != body || w.Header().Get("X-Client") != r.RemoteAddr {
				t.Errorf("request %d: got %d, %d bytes and %v", n, w.Code, w.Body.Len(), w.Header())
			}
		})
	}
	group.Wait()
	if got := o.connections.Load(); got != 1 {
		t.Errorf("got %d connections, want 1", got)
	}
	if read := *o.read.Load(); !read.IsZero() {
		t.Errorf("the stream ends in %v without a request", time.Until(read))
	}
	if write := time.Until(*o.write.Load()); write > CallLimit {
		t.Errorf("the limit for a write is %v, want at most %v", write, CallLimit)
	}
	last := f.owner.Load()
	f.SetOwner(nil)
	if w := send(f, "none"); w.Code != http.StatusServiceUnavailable {
		t.Errorf("without an owner: got %d", w.Code)
	}
	// A request can have found the owner before.
	if err := last.stream(last.Announcement).ended(); !errors.Is(err, ErrNoOwner) {
		t.Errorf("stream to the former owner: got error %v, want %v", err, ErrNoOwner)
	}
}

// send sends a call with a body.
func send(f *Forwarder, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	f.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/track", strings.NewReader(body))) //nolint:noctx // without an end
	return w
}

// Large requests are HTTP requests of their own.
func TestLargeRequestsAreNotInTheStream(t *testing.T) {
	o := serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		_, streamed := w.(*answer.Writer)
		fmt.Fprint(w, n, " ", streamed)
	})
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	for size, want := range map[int]string{0: "0 true", streamedBytes: "16384 true", streamedBytes + 1: "16385 false"} {
		if w := send(f, strings.Repeat("a", size)); w.Body.String() != want {
			t.Errorf("%d bytes: got %q, want %q", size, w.Body, want)
		}
	}
	w := httptest.NewRecorder()
	f.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", struct{ io.Reader }{strings.NewReader("abc")}))
	if want := "3 true"; w.Body.String() != want {
		t.Errorf("without a length: got %q, want %q", w.Body, want)
	}
}

// A request that the owner does not answer delays no other one. At its limit only it ends, because the
// owner answers others.
func TestSlowRequestDelaysNoOther(t *testing.T) {
	begun := make(chan struct{})
	o := serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			close(begun)
			<-r.Context().Done()
		}
		echo(w, r)
	})
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	slow, limit := make(chan string), newManualLimit(t)
	go func() {
		w := httptest.NewRecorder()
		f.ServeHTTP(w, httptest.NewRequestWithContext(limit, http.MethodPost, "/slow", http.NoBody))
		slow <- w.Body.String()
	}()
	<-begun
	for range 10 {
		if w := send(f, "fast"); w.Body.String() != "fast" {
			t.Errorf("beside the slow one: got %d %q", w.Code, w.Body)
		}
	}
	limit.exceed()
	if got := <-slow; !strings.Contains(got, ErrTimeout.Error()) {
		t.Errorf("slow request: got %q, want %q", got, ErrTimeout)
	}
	if w := send(f, "afterwards"); w.Body.String() != "afterwards" || o.connections.Load() != 1 {
		t.Errorf("afterwards: got %q on %d connections, want 1", w.Body, o.connections.Load())
	}
}

// manualLimit is the context of a request whose time limit is exceeded by a test.
type manualLimit struct {
	context.Context
	exceed func()
}

func newManualLimit(t *testing.T) *manualLimit {
	ctx, cancel := context.WithCancelCause(t.Context())
	return &manualLimit{ctx, func() { cancel(ErrTimeout) }}
}

// A stream on which nothing arrives is replaced after the limit of one request.
func TestSilentStreamIsReplaced(t *testing.T) {
	var silent atomic.Bool
	silent.Store(true)
	limit := newManualLimit(t)
	o := serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
		if silent.Load() {
			limit.exceed()
			<-r.Context().Done()
		}
		echo(w, r)
	})
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	w := httptest.NewRecorder()
	f.ServeHTTP(w, httptest.NewRequestWithContext(limit, http.MethodPost, "/", http.NoBody))
	if !strings.Contains(w.Body.String(), ErrTimeout.Error()) {
		t.Errorf("silent stream: got %q, want %q", w.Body, ErrTimeout)
	}
	silent.Store(false)
	if w := send(f, "again"); w.Body.String() != "again" || o.connections.Load() != 2 {
		t.Errorf("afterwards: got %q on %d connections, want 2", w.Body, o.connections.Load())
	}
}

// An owner that stops answers the requests that it has read.
func TestStreamEndsInOrder(t *testing.T) {
	begun, finish := make(chan struct{}), make(chan struct{})
	o := serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
		close(begun)
		select {
		case <-finish:
			echo(w, r)
		case <-r.Context().Done():
		}
	})
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	last := make(chan string)
	go func() { last <- send(f, "last").Body.String() }()
	<-begun
	stopped := make(chan error)
	go func() { stopped <- o.server.Shutdown(t.Context()) }()
	if err := wait.Until(func() error {
		c, err := net.Dial("tcp", o.announcement.Address) //nolint:noctx // a test
		if err == nil {
			_ = c.Close()
			return errors.New("the owner accepts connections")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	close(finish)
	if got := <-last; got != "last" {
		t.Errorf("request in progress: got %q, want its answer", got)
	}
	if err := <-stopped; err != nil {
		t.Errorf("end of the server: %v", err)
	}
	if w := send(f, "late"); w.Code != http.StatusServiceUnavailable {
		t.Errorf("request after the end: got %d %q, want 503", w.Code, w.Body)
	}
}

// A connection that is lost ends the requests that wait, and the next one gets another connection.
func TestLostConnection(t *testing.T) {
	var lose atomic.Bool
	lose.Store(true)
	o := serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
		if lose.Load() {
			<-r.Context().Done()
			w.WriteHeader(http.StatusServiceUnavailable) // It can arrive before the end of the connection.
			return
		}
		echo(w, r)
	})
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	lost := make(chan *httptest.ResponseRecorder)
	go func() { lost <- send(f, "body") }()
	if err := wait.Until(func() error {
		if o.connections.Load() == 0 {
			return errors.New("no connection")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	to := f.owner.Load().connections
	to.mu.Lock()
	to.current.end() // As a lost connection.
	to.mu.Unlock()
	if w := <-lost; w.Code != http.StatusServiceUnavailable {
		t.Errorf("request on the lost connection: got %d %q, want 503", w.Code, w.Body)
	}
	lose.Store(false)
	if err := wait.Until(func() error {
		if w := send(f, "again"); w.Body.String() != "again" {
			return fmt.Errorf("got %d %q", w.Code, w.Body)
		}
		return nil
	}); err != nil {
		t.Errorf("request after it: %v", err)
	}
}

// A panic ends the request that caused it, and no other one.
func TestPanicEndsItsRequest(t *testing.T) {
	o := serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength == 0 {
			panic("a defect")
		}
		echo(w, r)
	})
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	if w := send(f, ""); w.Code != http.StatusInternalServerError {
		t.Errorf("request with the panic: got %d, want 500", w.Code)
	}
	if w := send(f, "next"); w.Body.String() != "next" || o.connections.Load() != 1 {
		t.Errorf("next request: got %q on %d connections, want 1", w.Body, o.connections.Load())
	}
}

// Frames that are added while the outbox writes are written together, in their order.
func TestOutbox(t *testing.T) {
	o, done := newOutbox(), make(chan struct{})
	writes, proceed := make(chan string), make(chan struct{})
	ended := make(chan error)
	go func() {
		ended <- o.run(done, func(p []byte) error {
			writes <- bodies(p)
			<-proceed
			return nil
		})
	}()
	add := func(text string) { o.add(&frame{body: []byte(text)}) }
	add("a")
	if got := <-writes; got != "a" {
		t.Errorf("first write: got %q", got)
	}
	add("b")
	add("c")
	proceed <- struct{}{}
	if got := <-writes; got != "bc" {
		t.Errorf("second write: got %q, want both frames", got)
	}
	add("d")
	close(done)
	proceed <- struct{}{}
	if got := <-writes; got != "d" {
		t.Errorf("last write: got %q", got)
	}
	proceed <- struct{}{}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// bodies returns the bodies of frames.
func bodies(frames []byte) (all string) {
	in := bufio.NewReader(bytes.NewReader(frames))
	for {
		f, err := readFrame(in, streamedBytes)
		if err != nil {
			return all
		}
		all += string(f.body)
	}
}

// The requests of a lost connection end, as on a connection of their own.
func TestLostConnectionEndsItsRequests(t *testing.T) {
	for _, stopped := range []bool{false, true} {
		begun, ended := make(chan struct{}), make(chan struct{})
		o := serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
			close(begun)
			<-r.Context().Done()
			w.WriteHeader(http.StatusServiceUnavailable)
			close(ended)
		})
		f, _ := newForwarder(t)
		setOwner(f, o.Announce())
		answered := make(chan *httptest.ResponseRecorder)
		go func() { answered <- send(f, "body") }()
		<-begun
		if stopped { // As an owner that exceeds the time to end in order.
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			if err := o.server.Shutdown(ctx); err == nil {
				t.Error("end in order: got no error with a request in progress")
			}
			cancel()
		}
		if err := o.server.Close(); err != nil {
			t.Error(err)
		}
		if w := <-answered; w.Code != http.StatusServiceUnavailable {
			t.Errorf("stopped %v: got %d %q, want 503", stopped, w.Code, w.Body)
		}
		if err := wait.Until(func() error {
			select {
			case <-ended:
				return nil
			default:
				return errors.New("it is in progress")
			}
		}); err != nil {
			t.Errorf("stopped %v: request at the owner: %v", stopped, err)
		}
	}
}

// A request without an answer ends at its limit, and ends the stream if nothing else was answered.
func TestStreamedRequestsHaveALimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stream{out: newOutbox(), done: make(chan struct{}), end: func() {}, waiting: map[uint64]chan<- streamedAnswer{}}
		begin := time.Now()
		//nolint:errorlint // It is the error itself.
		if a := s.send(t.Context(), t.Context(), &frame{}); a.err != ErrTimeout || time.Since(begin) != CallLimit {
			t.Errorf("got error %v after %v, want %v after %v", a.err, time.Since(begin), ErrTimeout, CallLimit)
		}
		if err := s.ended(); err != ErrTimeout || len(s.waiting) > 0 { //nolint:errorlint // It is the error itself.
			t.Errorf("end of the stream: got %v and %d waiting requests, want %v and none", err, len(s.waiting), ErrTimeout)
		}
	})
}

// A client cannot open a stream, in which it could choose its address.
func TestClientsOpenNoStream(t *testing.T) {
	o := serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, r.RemoteAddr, " ", r.Header.Get(streamHeader), r.Header.Get(clientHeader))
	})
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	forged := frame{target: "/v1/track", header: http.Header{clientHeader: {"192.0.2.66:1"}}}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", struct{ io.Reader }{bytes.NewReader(forged.append(nil))})
	r.RemoteAddr = "192.0.2.1:1"
	r.Header.Set(streamHeader, "1")
	w := httptest.NewRecorder()
	f.ServeHTTP(w, r)
	if want := "192.0.2.1:1 "; w.Code != http.StatusOK || w.Body.String() != want {
		t.Errorf("got %d %q, want 200 %q", w.Code, w.Body, want)
	}
}
