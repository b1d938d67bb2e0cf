package host

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/posthorn/posthorn/dispatcher"
)

// A closing gate waits for a call, and ends a request of the admin API that would have no end.
func TestDoorCloses(t *testing.T) {
	var d requestGate
	if d.enter() != nil {
		t.Fatal("a new gate is open, want closed")
	}
	finish, begun := make(chan struct{}), make(chan struct{})
	d.Open(nil, dispatcher.Handlers{
		Calls: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			begun <- struct{}{}
			<-finish
		}),
		Admin: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			begun <- struct{}{}
			<-r.Context().Done()
		}),
	})
	ended := make(chan string, 3)
	go func() {
		inside := d.enter()
		defer inside.requests.Done()
		inside.calls.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil))
		ended <- "call"
	}()
	go func() {
		inside := d.enter()
		defer inside.requests.Done()
		defer func() {
			if fault := recover(); fault != http.ErrAbortHandler { //nolint:errorlint // the value of a panic
				t.Errorf("end of the admin request: got panic %v, want %v", fault, http.ErrAbortHandler)
			}
			ended <- "admin"
		}()
		inside.serveAdmin(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	}()
	<-begun
	<-begun
	closed := make(chan error, 1)
	go func() { closed <- d.Close(t.Context()) }()
	if got := <-ended; got != "admin" {
		t.Errorf("the first request that ends: got %s, want admin", got)
	}
	select {
	case err := <-closed:
		t.Errorf("the gate closed beside a call in progress, with error %v", err)
	default:
	}
	if d.enter() != nil {
		t.Error("a closing gate admits a request")
	}
	close(finish)
	if err := <-closed; err != nil || <-ended != "call" {
		t.Errorf("close: got error %v, want none after the call", err)
	}
}

// An answer that a closing gate ends is not complete for its client: a list would lack entries, and a
// command that follows attempts would end without an error.
func TestAnswerOfClosedDoorIsNotComplete(t *testing.T) {
	var d requestGate
	d.Open(nil, dispatcher.Handlers{Admin: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "first\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		inside := d.enter()
		defer inside.requests.Done()
		inside.serveAdmin(w, r)
	}))
	defer server.Close()
	resp, err := http.Get(server.URL) //nolint:noctx // it ends with the requestGate
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	line := make([]byte, len("first\n"))
	if _, err := io.ReadFull(resp.Body, line); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("rest of the answer: got %q and error %v, want %v", rest, err, io.ErrUnexpectedEOF)
	}
}
