package peer

import (
	"bufio"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/dispatcher/replicated/answer"
)

// A stream is one HTTP request to the owner that does not end. Its body is a sequence of small requests in
// frames, and its answer the sequence of their answers, in the order in which they are complete. An
// HTTP request for each call takes as much CPU again as the call itself.

const (
	// streamedBytes bounds the body of a request in a stream, which is in memory. A larger one is a request
	// of its own.
	streamedBytes = 16 << 10
	// streamBuffer is the size of the buffers for reading a stream.
	streamBuffer = 16 << 10
)

// errStreamEnded reports that the connection to the owner ended before the answer. The owner may have
// handled the request.
var errStreamEnded = errors.New("the owner of the slot ended the connection")

// outbox collects frames, and writes those together that are added while it writes.
type outbox struct {
	mu      sync.Mutex
	pending []byte
	wake    chan struct{}
}

func newOutbox() *outbox { return &outbox{wake: make(chan struct{}, 1)} }

func (o *outbox) add(f *frame) {
	o.mu.Lock()
	o.pending = f.append(o.pending)
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// run writes until a write fails, or done is closed. It then writes what was added before.
func (o *outbox) run(done <-chan struct{}, write func([]byte) error) error {
	var spare []byte
	for ended := false; ; {
		select {
		case <-o.wake:
		case <-done:
			ended = true
		}
		runtime.Gosched() // Goroutines that are ready add their frames first.
		o.mu.Lock()
		spare, o.pending = o.pending, spare[:0]
		o.mu.Unlock()
		if len(spare) > 0 {
			if err := write(spare); err != nil {
				return err
			}
		}
		if ended {
			return nil
		}
		if cap(spare) > answer.MaxBytes {
			spare = nil
		}
	}
}

// stream is the end of a stream in the process that forwards.
type stream struct {
	out  *outbox
	done chan struct{}
	end  context.CancelFunc
	// received counts the answers.
	received atomic.Int64

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan<- streamedAnswer
	err     error // not nil after the end
}

// streamedAnswer is an answer, or why there is none.
type streamedAnswer struct {
	frame
	err error
}

// openStream starts a stream to the owner. It does not wait for the connection.
func openStream(transport http.RoundTripper, a Announcement) *stream {
	ctx, end := context.WithCancel(context.Background())
	s := &stream{out: newOutbox(), done: make(chan struct{}), end: end, waiting: map[uint64]chan<- streamedAnswer{}}
	r, w := io.Pipe()
	q := (&http.Request{
		Method: http.MethodPost, URL: &url.URL{Scheme: "https", Host: a.Address, Path: "/"},
		Header: http.Header{tokenHeader: {a.Token}, streamHeader: {"1"}}, Body: r, ContentLength: -1,
	}).WithContext(ctx)
	go func() {
		_ = w.CloseWithError(s.out.run(s.done, func(p []byte) error {
			_, err := w.Write(p)
			return err
		}))
	}()
	go func() {
		defer end()
		s.close(s.receive(transport, q))
		_ = r.Close() // The writer may wait for a reader.
	}()
	return s
}

// receive passes the answers to those who wait for them. It returns the error that ended the stream.
func (s *stream) receive(transport http.RoundTripper, q *http.Request) error {
	resp, err := transport.RoundTrip(q)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusMisdirectedRequest:
		return ErrNoOwner
	default:
		return fmt.Errorf("the owner of the slot answered status %d to a stream", resp.StatusCode)
	}
	in := bufio.NewReaderSize(resp.Body, streamBuffer)
	for {
		one, err := readFrame(in, answer.MaxBytes)
		if err != nil {
			return errors.Join(errStreamEnded, err)
		}
		s.received.Add(1)
		if to := s.forget(one.number); to != nil {
			to <- streamedAnswer{frame: one}
		}
	}
}

// forget ends the wait for an answer; it returns nil if nothing waits.
func (s *stream) forget(number uint64) chan<- streamedAnswer {
	s.mu.Lock()
	defer s.mu.Unlock()
	to := s.waiting[number]
	delete(s.waiting, number)
	return to
}

// close ends the stream, and all requests that wait.
func (s *stream) close(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	s.err = err
	close(s.done)
	s.end()
	for _, to := range s.waiting {
		to <- streamedAnswer{err: err}
	}
	clear(s.waiting)
}

// ended returns why the stream takes no more requests; nil if it does.
func (s *stream) ended() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// send sends a request and returns the answer. It waits until ctx or replaced ends, or for CallLimit.
func (s *stream) send(ctx, replaced context.Context, q *frame) streamedAnswer {
	answers := make(chan streamedAnswer, 1)
	s.mu.Lock()
	if s.err != nil {
		defer s.mu.Unlock()
		return streamedAnswer{err: s.err}
	}
	s.last++
	q.number = s.last
	s.waiting[q.number] = answers
	s.mu.Unlock()
	received := s.received.Load()
	s.out.add(q)
	limit := time.NewTimer(CallLimit)
	defer limit.Stop()
	var err error
	select {
	case a := <-answers:
		return a
	case <-replaced.Done():
		err = ErrNoOwner
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-limit.C:
		err = ErrTimeout
	}
	s.forget(q.number)
	if err == ErrTimeout && s.received.Load() == received { //nolint:errorlint // It is the cause itself.
		s.close(err) // Nothing arrives: another connection may be better.
	}
	return streamedAnswer{err: err}
}

// stream returns a stream to the owner; it opens one if there is none. Without users, it
// returns one that has ended.
func (c *connections) stream(a Announcement) *stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unused {
		return &stream{err: ErrNoOwner}
	}
	if c.current == nil || c.current.ended() != nil {
		c.current = openStream(c.transport, a)
	}
	return c.current
}

// endStream ends the stream for good.
func (c *connections) endStream() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unused = true
	if c.current != nil {
		c.current.close(ErrNoOwner)
	}
}

// inStream reports whether a request with a body is sent in a stream.
func inStream(r *http.Request, body []byte) bool {
	return r.Method == http.MethodPost && len(body) <= streamedBytes && strings.HasPrefix(r.URL.Path, "/")
}

// sendStreamed sends a call in the stream to the owner, and takes its answer.
func (f *Forwarder) sendStreamed(w *answer.Writer, r *http.Request, o *owner, body []byte, key string) {
	q := frame{target: r.URL.RequestURI(), host: r.Host, header: maps.Clone(r.Header), body: body}
	delete(q.header, "Connection")
	f.mark(q.header, r, false)
	f.Connections.keys.ask(q.header, key)
	a := o.connections.stream(o.Announcement).send(r.Context(), o.replaced, &q)
	if a.err == nil && a.status == http.StatusMisdirectedRequest {
		a.err = ErrNoOwner
	}
	if a.err != nil {
		f.Logger.Debug("forwarding a request to the owner failed", "owner", o, "error", a.err)
		f.refuse(w, a.err)
		return
	}
	f.answered.Add(1)
	f.Connections.keys.learn(a.header, key)
	maps.Copy(w.Header(), a.header)
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body)
}

// Handler admits the requests of other processes, as if the client had sent them here.
type Handler struct {
	identity *Identity
	to       Handlers
	log      *slog.Logger
	stopping chan struct{}
	stop     sync.Once
}

// Stop ends the streams: requests in progress are answered, and later ones are refused.
func (h *Handler) Stop() { h.stop.Do(func() { close(h.stopping) }) }

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if subtle.ConstantTimeCompare([]byte(r.Header.Get(tokenHeader)), []byte(h.identity.announcement.Token)) != 1 {
		http.Error(w, "this address is for the other processes of the same log", http.StatusForbidden)
		return
	}
	if r.Header.Get(streamHeader) == "" {
		h.serve(w, r)
	} else {
		h.serveStream(w, r)
	}
}

// serve handles a request as if the client had sent it here.
func (h *Handler) serve(w http.ResponseWriter, r *http.Request) {
	r.RemoteAddr = r.Header.Get(clientHeader)
	admin := r.Header.Get(adminHeader) != ""
	r.Header.Del(tokenHeader)
	r.Header.Del(clientHeader)
	r.Header.Del(adminHeader)
	h.to.reply(w.Header(), r.Header)
	if !admin {
		h.to.Calls.ServeHTTP(w, r)
		return
	}
	// The server's time limits are for calls.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Time{})
	h.to.Admin.ServeHTTP(w, r)
}

// serveStream handles the requests of a stream at the same time.
func (h *Handler) serveStream(w http.ResponseWriter, r *http.Request) {
	control := http.NewResponseController(w)
	if err := errors.Join(control.EnableFullDuplex(), control.SetReadDeadline(time.Time{}),
		control.SetWriteDeadline(time.Time{})); err != nil {
		http.Error(w, "the connection cannot have a stream: "+err.Error(), http.StatusHTTPVersionNotSupported)
		return
	}
	w.WriteHeader(http.StatusOK)
	if control.Flush() != nil {
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	out, answered := newOutbox(), make(chan struct{})
	var requests, writer sync.WaitGroup
	writer.Go(func() {
		if out.run(answered, func(p []byte) error {
			_ = control.SetWriteDeadline(time.Now().Add(CallLimit))
			_, err := w.Write(p)
			return errors.Join(err, control.Flush())
		}) != nil {
			cancel() // Nothing can be answered.
		}
	})
	defer writer.Wait()
	defer close(answered)
	defer requests.Wait()
	room, work, idle := make(chan struct{}, maxForwards), make(chan streamedRequest), make(chan struct{}, maxIdle)
	defer close(work)
	defer cancel()
	go func() {
		if h.drain(ctx, room) {
			_ = control.SetReadDeadline(time.Now()) // It also ends the context of r, and with it of all requests.
		}
	}()
	respond := func(q streamedRequest, serve func(*answer.Writer, *http.Request)) {
		var a answer.Writer
		serve(&a, q.WithContext(ctx))
		out.add(&frame{number: q.number, status: a.Status(), header: a.Header(), body: a.Body()})
	}
	// The goroutine of an earlier request has a large stack already; to grow one takes a tenth of the CPU of a call.
	handle := func(q streamedRequest) {
		for open := true; open; {
			respond(q, h.serveRecovered)
			<-room
			select {
			case idle <- struct{}{}:
				q, open = <-work
				<-idle
			default:
				return
			}
		}
	}
	in := bufio.NewReaderSize(r.Body, streamBuffer)
	for {
		q, err := readStreamed(in)
		if err != nil {
			if r.Context().Err() == nil && !errors.Is(err, io.EOF) {
				h.log.Debug("a stream of another process ended", "error", err)
			}
			return
		}
		select {
		case room <- struct{}{}:
			select {
			case work <- q:
			default:
				requests.Go(func() { handle(q) })
			}
		default: // The process ends, or too many requests are in progress.
			respond(q, func(a *answer.Writer, q *http.Request) { Misdirected(a, q) })
		}
	}
}

// drain waits until the streams end and no request is in progress; it then has all the room. It returns false
// if ctx ends before.
func (h *Handler) drain(ctx context.Context, room chan<- struct{}) bool {
	select {
	case <-h.stopping:
	case <-ctx.Done():
		return false
	}
	for range cap(room) {
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// serveRecovered limits a panic to its request, as net/http does.
func (h *Handler) serveRecovered(a *answer.Writer, q *http.Request) {
	defer func() {
		if fault := recover(); fault != nil {
			h.log.Error("a panic ended a request of another process", "panic", fault, "stack", string(debug.Stack()))
			*a = answer.Writer{}
			a.WriteHeader(http.StatusInternalServerError)
		}
	}()
	h.serve(a, q)
}
