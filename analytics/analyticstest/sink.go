// Package analyticstest takes the place of the server in tests of code that
// uses package analytics.
//
//	sink := analyticstest.New()
//	client := sink.Client()
//	codeUnderTest(client)
//	client.Close()
//	for _, call := range sink.Calls() { ... }
//
// A [Sink] accepts and rejects calls as Posthorn does, without a network, so that tests may use
// testing/synctest; [NewServer] serves one on a real port. [Sink.Respond] makes it slow, makes it
// fail, or makes it break the connection.
package analyticstest

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"time"

	"github.com/posthorn/posthorn/analytics"
	"github.com/posthorn/posthorn/event"
)

// Call is a call that the sink has accepted.
type Call struct {
	Type         string         `json:"type"`
	MessageID    string         `json:"messageId"`
	Timestamp    string         `json:"timestamp"`
	UserID       string         `json:"userId"`
	AnonymousID  string         `json:"anonymousId"`
	PreviousID   string         `json:"previousId"`
	GroupID      string         `json:"groupId"`
	Event        string         `json:"event"`
	Category     string         `json:"category"`
	Name         string         `json:"name"`
	Context      map[string]any `json:"context"`
	Integrations map[string]any `json:"integrations"`
	Traits       map[string]any `json:"traits"`
	Properties   map[string]any `json:"properties"` // a Page's Traits, too

	// WriteKey is the key that the call was sent with.
	WriteKey string `json:"-"`
	// JSON is the call as it was sent, without what the batch adds to it.
	JSON json.RawMessage `json:"-"`
}

// Request is a request that the sink has received, whatever it answered.
type Request struct {
	Header   http.Header
	WriteKey string
	// Body is decompressed.
	Body []byte
	// Batch holds the calls as they were sent.
	Batch []json.RawMessage
	// Context, MessageID and SentAt are those of the batch.
	Context   map[string]any
	MessageID string
	SentAt    string
	// Status is what the sink answered, 0 when it broke the connection.
	Status int
	// At is when it arrived.
	At time.Time
}

// Answer is the response of the sink to a request. The zero value accepts the request.
type Answer struct {
	// Status is the HTTP status; 0 means 200. The calls of a request are
	// accepted when it is 2xx.
	Status int
	// RetryAfter is the header of that name.
	RetryAfter string
	// Body replaces the answer's body.
	Body string
	// Reject refuses single calls of an accepted request: index to code.
	Reject map[int]string
	// Delay passes before the answer, and before calls are accepted; a request
	// that its client ends in the meantime is not accepted.
	Delay time.Duration
	// Drop breaks the connection in place of an answer. The calls are accepted
	// nevertheless when Status is 2xx: the answer was lost, not the request.
	Drop bool
}

// Sink records calls. It is an [http.Handler] for POST /v1/batch and an
// [http.RoundTripper] that needs no network. It takes each messageId once. It
// is safe for concurrent use.
type Sink struct {
	mu         sync.Mutex
	answers    []Answer
	always     Answer
	calls      []Call
	seen       map[string]bool
	duplicates int
	requests   []Request
	changed    chan struct{} // closed and replaced with each request
}

// New makes a sink that accepts everything.
func New() *Sink {
	return &Sink{seen: map[string]bool{}, changed: make(chan struct{})}
}

// Client makes a client that sends to the sink, without a network, with the
// write key "test". Options are applied after those that connect it.
func (s *Sink) Client(opts ...analytics.Option) *analytics.Client {
	connect := []analytics.Option{
		analytics.WithEndpoint("http://sink.test"),
		analytics.WithHTTPClient(&http.Client{Transport: s}),
	}
	return analytics.New("test", append(connect, opts...)...)
}

// Respond sets the answers to the next requests, in order; those after are
// answered as before.
func (s *Sink) Respond(answers ...Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers = append(s.answers, answers...)
}

// RespondAlways sets the answer to all requests that Respond set none for.
func (s *Sink) RespondAlways(a Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.always = a
}

// Calls returns the calls that were accepted, in order of arrival, each
// messageId once.
func (s *Sink) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// Requests returns all requests that were answered, in that order.
func (s *Sink) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Duplicates counts the calls that had arrived before.
func (s *Sink) Duplicates() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.duplicates
}

// Wait returns the accepted calls as soon as there are n, or those that there
// are and the context's error when it ends before.
func (s *Sink) Wait(ctx context.Context, n int) ([]Call, error) {
	for {
		s.mu.Lock()
		calls, changed := slices.Clone(s.calls), s.changed
		s.mu.Unlock()
		if len(calls) >= n {
			return calls, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return calls, ctx.Err()
		}
	}
}

// ServeHTTP takes a request.
func (s *Sink) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost || r.URL.Path != "/v1/batch" {
		fail(w, http.StatusNotFound, "not_found", "the sink takes POST /v1/batch")
		return
	}
	request := Request{Header: r.Header.Clone(), At: time.Now()}
	request.WriteKey, _, _ = r.BasicAuth()
	body, err := readBody(r)
	if err != nil {
		fail(w, http.StatusBadRequest, "invalid_body", err.Error())
		return
	}
	request.Body = body
	var batch struct {
		Batch     []json.RawMessage `json:"batch"`
		Context   map[string]any    `json:"context"`
		MessageID string            `json:"messageId"`
		SentAt    string            `json:"sentAt"`
	}
	parsed, err := event.Request{}.Parse(body)
	if fault := new(event.Error); errors.As(err, &fault) {
		status := http.StatusBadRequest
		switch fault.Code {
		case event.CodeBodyTooLarge, event.CodeBatchTooLarge:
			status = http.StatusRequestEntityTooLarge
		}
		fail(w, status, fault.Code, fault.Message)
		return
	}
	if err := json.Unmarshal(body, &batch); err != nil {
		fail(w, http.StatusBadRequest, event.CodeInvalidField, err.Error())
		return
	}
	request.Batch, request.Context, request.MessageID, request.SentAt = batch.Batch, batch.Context, batch.MessageID, batch.SentAt

	answer := s.answer()
	if answer.Delay > 0 {
		delay := time.NewTimer(answer.Delay)
		defer delay.Stop()
		select {
		case <-delay.C:
		case <-r.Context().Done():
			return
		}
	}
	if answer.Status == 0 {
		answer.Status = http.StatusOK
	}
	request.Status = answer.Status
	if answer.Drop {
		request.Status = 0
	}
	if answer.Status == http.StatusOK && request.WriteKey == "" {
		fail(w, http.StatusUnauthorized, "no_write_key", "the request has no write key")
		return
	}
	rejected := s.record(request, parsed.Rejected, answer)
	if answer.Drop {
		panic(http.ErrAbortHandler)
	}
	if answer.RetryAfter != "" {
		w.Header().Set("Retry-After", answer.RetryAfter)
	}
	switch {
	case answer.Body != "":
		w.WriteHeader(answer.Status)
		io.WriteString(w, answer.Body) //nolint:errcheck // the client has disconnected
	case answer.Status > 299:
		fail(w, answer.Status, "test", "the test wants it so")
	default:
		write(w, answer.Status, map[string]any{"success": true, "rejected": rejected})
	}
}

// RoundTrip is a request without a network.
func (s *Sink) RoundTrip(r *http.Request) (res *http.Response, err error) {
	defer func() {
		if r.Body != nil {
			r.Body.Close()
		}
		if fault := recover(); fault != nil {
			if fault != http.ErrAbortHandler { //nolint:errorlint // it is panicked with as it is
				panic(fault)
			}
			res, err = nil, io.ErrUnexpectedEOF
		}
	}()
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	res = w.Result()
	res.Request = r
	return res, nil
}

func (s *Sink) answer() Answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.answers) == 0 {
		return s.always
	}
	a := s.answers[0]
	s.answers = s.answers[1:]
	return a
}

type rejection struct {
	Index   int    `json:"index"`
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (s *Sink) record(request Request, invalid []event.Rejection, answer Answer) []rejection {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, request)
	close(s.changed)
	s.changed = make(chan struct{})
	if answer.Status > 299 {
		return nil
	}
	var rejected []rejection
	refuse := func(i int, code, message string) { rejected = append(rejected, rejection{i, code, message}) }
	for i, text := range request.Batch {
		call := Call{WriteKey: request.WriteKey, JSON: text}
		if code := answer.Reject[i]; code != "" {
			refuse(i, code, "the test wants it so")
		} else if at := slices.IndexFunc(invalid, func(r event.Rejection) bool { return r.Index == i }); at >= 0 {
			refuse(i, invalid[at].Err.Code, invalid[at].Err.Message)
		} else if err := json.Unmarshal(text, &call); err != nil {
			refuse(i, event.CodeInvalidField, err.Error())
		} else if call.MessageID != "" && s.seen[call.MessageID] {
			s.duplicates++
		} else {
			s.seen[call.MessageID] = true
			s.calls = append(s.calls, call)
		}
	}
	return rejected
}

func readBody(r *http.Request) ([]byte, error) {
	if r.Header.Get("Content-Encoding") != "gzip" {
		return io.ReadAll(r.Body)
	}
	z, err := gzip.NewReader(r.Body)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(z)
}

func fail(w http.ResponseWriter, status int, code, message string) {
	write(w, status, map[string]any{"success": false, "error": map[string]string{"code": code, "message": message}})
}

func write(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(body) //nolint:errcheck // the client has disconnected
}

// Server is a sink behind a port of this machine.
type Server struct {
	*Sink
	// URL is the endpoint for clients.
	URL    string
	server *httptest.Server
}

// NewServer starts a server. Close it.
func NewServer() *Server {
	s := &Server{Sink: New()}
	s.server = httptest.NewServer(s.Sink)
	s.URL = s.server.URL
	return s
}

// Client makes a client that sends to the server over the network, with the
// write key "test".
func (s *Server) Client(opts ...analytics.Option) *analytics.Client {
	return analytics.New("test", append([]analytics.Option{analytics.WithEndpoint(s.URL)}, opts...)...)
}

// Close stops the server and ends requests that are under way.
func (s *Server) Close() {
	s.server.CloseClientConnections()
	s.server.Close()
}
