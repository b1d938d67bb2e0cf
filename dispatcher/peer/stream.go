package peer

import (
	"bufio"
	"bytes"
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
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/dispatcher/answer"
)

// A stream is one HTTP request to the owner that does not end. Its body is a sequence of small HTTP/1.1
// requests, and its answer the sequence of their answers, in the order in which they are complete. An
// HTTP request for each call takes as much CPU again as the call itself.

const (
	// streamPath is the path of a stream; no call has it.
	streamPath = "/peer/stream"
	// numberHeader is the number of a request in its stream, and of its answer.
	numberHeader = "Posthorn-Peer-Number"
	// streamedBytes bounds the body of a request in a stream, which is in memory. A larger one is a request
	// of its own.
	streamedBytes = 16 << 10
	// streamBuffer is the size of the buffers for reading a stream.
	streamBuffer = 16 << 10
)

// errStreamEnded reports that the connection to the owner ended before the answer. The owner may have
// handled the request.
var errStreamEnded = errors.New("the owner of the slot ended the connection")

// outbox collects messages, and writes those together that are added while it writes.
type outbox struct {
	mu      sync.Mutex
	pending bytes.Buffer
	wake    chan struct{}
}

func newOutbox() *outbox { return &outbox{wake: make(chan struct{}, 1)} }

// add adds what encode appends to the buffer.
func (o *outbox) add(encode func(*bytes.Buffer) error) error {
	o.mu.Lock()
	before := o.pending.Len()
	err := encode(&o.pending)
	if err != nil {
		o.pending.Truncate(before)
	}
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
	return err
}

// run writes until a write fails, or done is closed. It then writes what was added before.
func (o *outbox) run(done <-chan struct{}, write func([]byte) error) error {
	var spare bytes.Buffer
	for ended := false; ; {
		select {
		case <-o.wake:
		case <-done:
			ended = true
		}
		runtime.Gosched() // Goroutines that are ready add their messages first.
		o.mu.Lock()
		spare, o.pending = o.pending, spare
		o.mu.Unlock()
		if spare.Len() > 0 {
			if err := write(spare.Bytes()); err != nil {
				return err
			}
		}
		if ended {
			return nil
		}
		if spare.Reset(); spare.Cap() > answer.MaxBytes {
			spare = bytes.Buffer{}
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
	waiting map[uint64]chan<- *streamedAnswer
	err     error // not nil after the end
}

// streamedAnswer is an answer, or why there is none.
type streamedAnswer struct {
	status int
	header http.Header
	body   []byte
	err    error
}

// openStream starts a stream to the owner. It does not wait for the connection.
func openStream(transport http.RoundTripper, a Announcement) *stream {
	ctx, end := context.WithCancel(context.Background())
	s := &stream{out: newOutbox(), done: make(chan struct{}), end: end, waiting: map[uint64]chan<- *streamedAnswer{}}
	r, w := io.Pipe()
	q := (&http.Request{
		Method: http.MethodPost, URL: &url.URL{Scheme: "https", Host: a.Address, Path: streamPath},
		Header: http.Header{tokenHeader: {a.Token}}, Body: r, ContentLength: -1,
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
	request := &http.Request{Method: http.MethodPost}
	for {
		one, err := http.ReadResponse(in, request) //nolint:bodyclose // It is read to its end.
		if err != nil {
			return errors.Join(errStreamEnded, err)
		}
		number, err := strconv.ParseUint(one.Header.Get(numberHeader), 10, 64)
		if err != nil || one.ContentLength < 0 || one.ContentLength > answer.MaxBytes {
			return errors.Join(errStreamEnded, errors.New("the stream has an answer without a number or with a wrong length"))
		}
		a := &streamedAnswer{status: one.StatusCode, header: one.Header, body: make([]byte, one.ContentLength)}
		if _, err := io.ReadFull(one.Body, a.body); err != nil {
			return errors.Join(errStreamEnded, err)
		}
		delete(a.header, numberHeader)
		s.received.Add(1)
		if to := s.forget(number); to != nil {
			to <- a
		}
	}
}

// forget ends the wait for an answer; it returns nil if nothing waits.
func (s *stream) forget(number uint64) chan<- *streamedAnswer {
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
		to <- &streamedAnswer{err: err}
	}
	clear(s.waiting)
}

// ended reports whether the stream takes no more requests.
func (s *stream) ended() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err != nil
}

// send sends a request with its body and returns the answer.
func (s *stream) send(ctx context.Context, q *http.Request) *streamedAnswer {
	answers := make(chan *streamedAnswer, 1)
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return &streamedAnswer{err: s.err}
	}
	s.last++
	number := s.last
	s.waiting[number] = answers
	s.mu.Unlock()
	received := s.received.Load()
	q.Header[numberHeader] = []string{strconv.FormatUint(number, 10)}
	if err := s.out.add(func(b *bytes.Buffer) error { return q.Write(b) }); err != nil {
		s.forget(number)
		return &streamedAnswer{err: err}
	}
	select {
	case a := <-answers:
		return a
	case <-ctx.Done():
		s.forget(number)
		err := context.Cause(ctx)
		if err == ErrTimeout && s.received.Load() == received { //nolint:errorlint // It is the cause itself.
			s.close(err) // Nothing arrives: another connection may be better.
		}
		return &streamedAnswer{err: err}
	}
}

// stream returns a stream to the owner; it opens one if there is none.
func (c *connections) stream(a Announcement) *stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current == nil || c.current.ended() {
		c.current = openStream(c.transport, a)
	}
	return c.current
}

// endStream ends the stream, if there is one.
func (c *connections) endStream() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil {
		c.current.close(ErrNoOwner)
	}
}

// streamed reports whether a request is sent in a stream.
func streamed(r *http.Request) bool {
	return r.Method == http.MethodPost && r.ContentLength >= 0 && r.ContentLength <= streamedBytes
}

// sendStreamed sends a request in the stream to the owner, and its answer to the client.
func (f *Forwarder) sendStreamed(w http.ResponseWriter, r *http.Request, o *owner) {
	body := make([]byte, r.ContentLength)
	if _, err := io.ReadFull(r.Body, body); err != nil {
		if _, ok := errors.AsType[*BodyError](err); !ok {
			err = &BodyError{err} // The body is shorter than its length.
		}
		f.refuse(w, err)
		return
	}
	q := &http.Request{Method: r.Method, URL: r.URL, Host: r.Host, Header: maps.Clone(r.Header), ContentLength: r.ContentLength, Body: http.NoBody}
	if len(body) > 0 {
		q.Body = io.NopCloser(bytes.NewReader(body))
	}
	delete(q.Header, "Connection")
	if _, ok := q.Header["User-Agent"]; !ok {
		q.Header["User-Agent"] = []string{""} // Otherwise net/http adds one.
	}
	f.mark(q, r, false)
	a := o.connections.stream(o.Announcement).send(r.Context(), q)
	if a.err == nil && a.status == http.StatusMisdirectedRequest {
		a.err = ErrNoOwner
	}
	if a.err != nil {
		f.Logger.Debug("forwarding a request to the owner failed", "owner", o, "error", a.err)
		f.refuse(w, a.err)
		return
	}
	f.answered.Add(1)
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
	if r.URL.Path == streamPath {
		h.serveStream(w, r)
		return
	}
	h.serve(w, r)
}

// serve handles a request as if the client had sent it here.
func (h *Handler) serve(w http.ResponseWriter, r *http.Request) {
	r.RemoteAddr = r.Header.Get(clientHeader)
	admin := r.Header.Get(adminHeader) != ""
	r.Header.Del(tokenHeader)
	r.Header.Del(clientHeader)
	r.Header.Del(adminHeader)
	if !admin {
		h.to.Calls.ServeHTTP(w, r)
		return
	}
	// The server's time limits are for calls.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Time{})
	h.to.Admin.ServeHTTP(w, r)
}

// serveStream handles the requests of a stream, each in a goroutine of its own.
func (h *Handler) serveStream(w http.ResponseWriter, r *http.Request) {
	control := http.NewResponseController(w)
	if err := errors.Join(control.EnableFullDuplex(), control.SetReadDeadline(time.Time{}), control.SetWriteDeadline(time.Time{})); err != nil {
		http.Error(w, "the connection cannot have a stream: "+err.Error(), http.StatusHTTPVersionNotSupported)
		return
	}
	w.WriteHeader(http.StatusOK)
	if control.Flush() != nil {
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
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
	room := make(chan struct{}, maxForwards)
	go func() {
		if h.drain(ctx, room) {
			_ = control.SetReadDeadline(time.Now()) // It also ends the context of r, and with it of all requests.
		}
	}()
	respond := func(q *http.Request, serve func(*answer.Writer, *http.Request)) {
		var a answer.Writer
		number := q.Header.Get(numberHeader)
		delete(q.Header, numberHeader)
		serve(&a, q.WithContext(ctx))
		_ = out.add(func(b *bytes.Buffer) error { return encode(b, &a, number) })
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
			requests.Go(func() {
				defer func() { <-room }()
				respond(q, h.serveRecovered)
			})
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

// readStreamed reads a request of a stream with its body.
func readStreamed(in *bufio.Reader) (*http.Request, error) {
	q, err := http.ReadRequest(in)
	if err != nil {
		return nil, err
	}
	if q.ContentLength < 0 || q.ContentLength > streamedBytes {
		return nil, fmt.Errorf("a request in a stream has a body of %d bytes; at most %d are allowed", q.ContentLength, streamedBytes)
	}
	if q.ContentLength > 0 {
		body := make([]byte, q.ContentLength)
		if _, err := io.ReadFull(q.Body, body); err != nil {
			return nil, err
		}
		q.Body = io.NopCloser(bytes.NewReader(body))
	}
	return q, nil
}

// encode appends the answer to the request with a number.
func encode(b *bytes.Buffer, a *answer.Writer, number string) error {
	a.Header()[numberHeader] = []string{number}
	return (&http.Response{
		ProtoMajor: 1, ProtoMinor: 1, StatusCode: a.Status(), Header: a.Header(),
		ContentLength: int64(len(a.Body())), Body: io.NopCloser(bytes.NewReader(a.Body())),
	}).Write(b)
}
