package dispatcher

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// A closing door waits for a call, and ends a request of the admin API that would have no end.
func TestDoorCloses(t *testing.T) {
	var d door
	if d.enter() != nil {
		t.Fatal("a new door is open, want closed")
	}
	finish, begun := make(chan struct{}), make(chan struct{})
	d.open(nil, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		begun <- struct{}{}
		<-finish
	}), http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		begun <- struct{}{}
		<-r.Context().Done()
	}))
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
		inside.serveAdmin(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
		ended <- "admin"
	}()
	<-begun
	<-begun
	closed := make(chan error, 1)
	go func() { closed <- d.close(t.Context()) }()
	if got := <-ended; got != "admin" {
		t.Errorf("the first request that ends: got %s, want admin", got)
	}
	select {
	case err := <-closed:
		t.Errorf("the door closed beside a call in progress, with error %v", err)
	default:
	}
	if d.enter() != nil {
		t.Error("a closing door admits a request")
	}
	close(finish)
	if err := <-closed; err != nil || <-ended != "call" {
		t.Errorf("close: got error %v, want none after the call", err)
	}
}
