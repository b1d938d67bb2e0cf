// Package analyticstest replaces the server in tests of code that
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
	"github.com/posthorn/posthorn/analytics/event"
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
	Properties   map[string]any `json:"properties"` // also the Traits of a Page

	// WriteKey is the write key of the request.
	WriteKey string `json:"-"`
	// JSON is the call as it was sent, without the fields that the batch adds.
	JSON json.RawMessage `json:"-"`
}

// Request is a request that the sink has received and answered.
type Request struct {
	Header   http.Header
	WriteKey string
	// Body is decompressed.
	Body []byte
	// Batch has the calls as they were sent.
	Batch []json.RawMessage
	// The fields of the batch.
	Context   map[string]any
	MessageID string
	SentAt    string
	// Status is the status of the answer; 0 if the sink closed the connection.
	Status int
	// At is the time of arrival.
	At time.Time
}

// Answer is the response of the sink to a request. The zero value accepts the request.
type Answer struct {
	// Status is the HTTP status; 0 means 200. The calls of a request are
	// accepted if it is 2xx.
	Status int
	// RetryAfter is the header of that name.
	RetryAfter string
	// Body replaces the answer's body.
	Body string
	// Reject rejects single calls of an accepted request: it maps an index to an error code.
	Reject map[int]string
	// Delay is the time before the calls are accepted and answered. A request
	// that its client cancels within this time is not accepted.
	Delay time.Duration
	// Drop closes the connection instead of an answer. The calls are still accepted
	// if Status is 2xx: the answer is lost, not the request.
	Drop bool
}

// Sink records calls. It is an [http.Handler] for POST /v1/batch and an
// [http.RoundTripper] that needs no network. It accepts each messageId once. It
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

// New returns a sink that accepts all valid calls.
func New() *Sink {
	return &Sink{seen: map[string]bool{}, changed: make(chan struct{})}
}

// Client returns a client that sends to the sink, without a network, with the
// write key "test". The options are applied after those that connect it.
func (s *Sink) Client(opts ...analytics.Option) *analytics.Client {
	connect := []analytics.Option{
		analytics.WithEndpoint("http://sink.test"),
		analytics.WithHTTPClient(&http.Client{Transport: s}),
	}
	return analytics.New("test", append(connect, opts...)...)
}

// Respond sets the answers to the next requests, in order. Later requests are
// answered as before.
func (s *Sink) Respond(answers ...Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers = append(s.answers, answers...)
}

// RespondAlways sets the answer to all requests without an answer of Respond.
func (s *Sink) RespondAlways(a Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.always = a
}

// Calls returns the accepted calls, in order of arrival, each
// messageId once.
func (s *Sink) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// Requests returns all answered requests, in the order of their answers.
func (s *Sink) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Duplicates returns the number of duplicate calls.
func (s *Sink) Duplicates() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.duplicates
}

// Wait returns the accepted calls as soon as there are n. If the context ends first, it
// returns the accepted calls so far and the context's error.
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

// ServeHTTP implements [http.Handler].
func (s *Sink) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost || r.URL.Path != "/v1/batch" {
		fail(w, http.StatusNotFound, "not_found", "unknown path; the sink accepts POST /v1/batch")
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
		fail(w, answer.Status, "test", "rejected by the test")
	default:
		write(w, answer.Status, map[string]any{"success": true, "rejected": rejected})
	}
}

// RoundTrip implements [http.RoundTripper].
func (s *Sink) RoundTrip(r *http.Request) (res *http.Response, err error) {
	defer func() {
		if r.Body != nil {
			r.Body.Close()
		}
		if fault := recover(); fault != nil {
			if fault != http.ErrAbortHandler { //nolint:errorlint // The value is not wrapped.
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
	reject := func(i int, code, message string) { rejected = append(rejected, rejection{i, code, message}) }
	for i, text := range request.Batch {
		call := Call{WriteKey: request.WriteKey, JSON: text}
		if code := answer.Reject[i]; code != "" {
			reject(i, code, "rejected by the test")
		} else if at := slices.IndexFunc(invalid, func(r event.Rejection) bool { return r.Index == i }); at >= 0 {
			reject(i, invalid[at].Err.Code, invalid[at].Err.Message)
		} else if err := json.Unmarshal(text, &call); err != nil {
			reject(i, event.CodeInvalidField, err.Error())
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

// Server is a sink on a port of this machine.
type Server struct {
	*Sink
	// URL is the endpoint for clients.
	URL    string
	server *httptest.Server
}

// NewServer starts a server. The caller must close it.
func NewServer() *Server {
	s := &Server{Sink: New()}
	s.server = httptest.NewServer(s.Sink)
	s.URL = s.server.URL
	return s
}

// Client returns a client that sends to the server over the network, with the
// write key "test".
func (s *Server) Client(opts ...analytics.Option) *analytics.Client {
	return analytics.New("test", append([]analytics.Option{analytics.WithEndpoint(s.URL)}, opts...)...)
}

// Close stops the server and ends requests in progress.
func (s *Server) Close() {
	s.server.CloseClientConnections()
	s.server.Close()
}
