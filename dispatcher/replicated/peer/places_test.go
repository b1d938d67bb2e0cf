package peer

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/test/wait"
)

// slowBody is a body whose first part has arrived. It reports when the rest is waited for.
type slowBody struct {
	io.Reader
	waited chan<- struct{}
	end    <-chan struct{}
}

func (b *slowBody) Read(p []byte) (int, error) {
	if n, _ := b.Reader.Read(p); n > 0 {
		return n, nil
	}
	b.waited <- struct{}{}
	<-b.end
	return 0, io.ErrUnexpectedEOF
}

func (b *slowBody) Close() error { return nil }

// slowReader is a client that does not read its answer.
type slowReader struct {
	*httptest.ResponseRecorder
	waited chan<- struct{}
	end    <-chan struct{}
}

func (r slowReader) Write(p []byte) (int, error) {
	r.waited <- struct{}{}
	<-r.end
	return r.ResponseRecorder.Write(p)
}

// A client that sends its body slowly, or does not read its answer, occupies no place, and memory for what it
// sent alone.
func TestSlowClientsOccupyNoPlace(t *testing.T) {
	o := serveOwner(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, strings.Repeat("a", 14<<10)) })
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	waited, end := make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer close(end)
	defer cancel()
	for _, c := range []struct {
		name        string
		key, method string
		length      int64 // of the body; 0: the client does not read
		sent        int
		memory      int64
	}{
		{"short body", "", http.MethodPost, 1000, 1, 1000},
		{"short body with a key", "shop-1", http.MethodPost, 1000, 1, 1000},
		{"long body", "", http.MethodPost, event.MaxBodyBytes, 1, 4 << 10},
		{"long body with a part", "", http.MethodPost, event.MaxBodyBytes, 10 << 10, 16 << 10},
		{"chunked body", "", http.MethodPost, -1, 1, 4 << 10},
		{"GET with a body", "", http.MethodGet, -1, 1, 4 << 10},
		{"answer to a call", "", http.MethodPost, 0, 0, 14 << 10},
		{"answer to a GET", "", http.MethodGet, 0, 0, 14 << 10},
	} {
		before := f.Connections.Memory.Used()
		r := httptest.NewRequestWithContext(ctx, c.method, "/v1/track", nil)
		if c.key != "" {
			r.SetBasicAuth(c.key, "")
		}
		w := http.ResponseWriter(httptest.NewRecorder())
		if c.length != 0 {
			r.Body, r.ContentLength = &slowBody{strings.NewReader(strings.Repeat("a", c.sent)), waited, end}, c.length
		} else {
			w = slowReader{httptest.NewRecorder(), waited, end}
		}
		group.Go(func() { f.ServeHTTP(w, r) })
		<-waited
		if n := f.owner.Load().places.Used(); n != 0 {
			t.Errorf("%s: got %d places, want none", c.name, n)
		}
		if n := f.Connections.Memory.Used() - before; n != c.memory {
			t.Errorf("%s: got %d bytes of memory, want %d", c.name, n, c.memory)
		}
	}
	if w := send(f, "fast"); w.Code != http.StatusOK {
		t.Errorf("call beside the slow clients: got %d %q, want 200", w.Code, w.Body)
	}
}

// Requests that wait for the owner share the places by namespace, whatever its write keys are; those without
// a known key have a small part; and calls, audience syncs and admin requests are apart.
func TestNamespacesSharePlaces(t *testing.T) {
	var hang atomic.Bool
	arrived := make(chan string, maxForwards)
	o := serveOwner(t, func(w http.ResponseWriter, r *http.Request) {
		if hang.Load() && r.Header.Get("Fast") == "" {
			key, _, _ := r.BasicAuth()
			arrived <- key
			<-r.Context().Done()
		}
		fmt.Fprint(w, "answer")
	})
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	request := func(key, body string, fast bool) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/track", strings.NewReader(body))
		if key != "" {
			r.SetBasicAuth(key, "")
		}
		if fast {
			r.Header.Set("Fast", "1")
		}
		w := httptest.NewRecorder()
		f.ServeHTTP(w, r)
		return w
	}
	inBody := `{"writeKey":"bank-1","userId":"u","event":"e"}`
	for _, key := range []string{"shop-1", "shop-2", "invented", ""} {
		w := request(key, inBody, false)
		if w.Code != http.StatusOK || w.Body.String() != "answer" || len(w.Header().Values(namespaceHeader)) > 0 {
			t.Errorf("key %q: got %d %q with the headers %v, want the answer without the namespace", key, w.Code, w.Body, w.Header())
		}
	}
	keys := &f.Connections.keys
	for key, want := range map[string]string{"shop-1": "shop", "shop-2": "shop", "bank-1": "bank", "invented": "", "": ""} {
		if got := keys.namespace(key); got != want {
			t.Errorf("namespace of the key %q: got %q, want %q", key, got, want)
		}
	}
	hang.Store(true)
	var group sync.WaitGroup
	// fill sends requests until one is refused, and returns how many wait.
	fill := func(handler http.Handler, key string) (waiting int) {
		for {
			r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/track", http.NoBody)
			r.SetBasicAuth(key, "")
			refused := make(chan *httptest.ResponseRecorder, 1)
			group.Go(func() {
				w := httptest.NewRecorder()
				handler.ServeHTTP(w, r)
				refused <- w
			})
			select {
			case <-arrived:
				waiting++
			case w := <-refused:
				if !strings.Contains(w.Body.String(), ErrBusy.Error()) {
					t.Errorf("request %d with the key %s: got %d %q, want %q", waiting, key, w.Code, w.Body, ErrBusy)
				}
				return waiting
			}
		}
	}
	alternating, n := "", 0
	shop := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n++
		alternating = fmt.Sprint("shop-", 1+n%2)
		r.SetBasicAuth(alternating, "")
		f.ServeHTTP(w, r)
	})
	if got := fill(shop, ""); got != maxForwards/2 {
		t.Errorf("requests of one namespace: got %d, want half of %d", got, maxForwards)
	}
	if got, want := fill(f, "invented"), maxForwards/4/unknownPlaces-1; got < want || got > want+1 {
		t.Errorf("requests with unknown keys: got %d, want about %d", got, want)
	}
	for _, key := range []string{"bank-1", ""} {
		if w := request(key, inBody, true); w.Code != http.StatusOK {
			t.Errorf("call of another namespace, key %q in the header: got %d %q, want 200", key, w.Code, w.Body)
		}
	}
	if w := request("shop-1", inBody, true); w.Code != http.StatusServiceUnavailable {
		t.Errorf("call of the namespace that has used up its places: got %d, want 503", w.Code)
	}
	for name, handler := range map[string]http.Handler{
		"sync": f.Limited(CallLimit), "admin": f.Admin(func(w http.ResponseWriter, err error) {
			http.Error(w, err.Error(), http.StatusBadGateway)
		}),
	} {
		r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/track", http.NoBody)
		r.SetBasicAuth("shop-1", "")
		r.Header.Set("Fast", "1")
		w := httptest.NewRecorder()
		if handler.ServeHTTP(w, r); w.Code != http.StatusOK {
			t.Errorf("%s beside them: got %d %q, want 200", name, w.Code, w.Body)
		}
	}
	cancel()
	group.Wait()
	if err := wait.Until(func() error {
		if n := f.owner.Load().places.Used(); n != 0 {
			return fmt.Errorf("got %d places, want none", n)
		}
		return nil
	}); err != nil {
		t.Errorf("after all requests have ended: %v", err)
	}
}

// A client cannot ask for the namespace of a key.
func TestClientsDoNotLearnNamespaces(t *testing.T) {
	o := serveOwner(t, echo)
	f, _ := newForwarder(t)
	setOwner(f, o.Announce())
	asked := http.Header{}
	(&knownKeys{}).ask(asked, "shop-1")
	for _, body := range []string{"small", strings.Repeat("a", 2*streamedBytes)} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/track", strings.NewReader(body))
		r.Header.Set(keyHeader, asked.Get(keyHeader))
		w := httptest.NewRecorder()
		if f.ServeHTTP(w, r); w.Code != http.StatusOK || len(w.Header().Values(namespaceHeader)) > 0 {
			t.Errorf("%d bytes: got %d and the headers %v, want 200 without the namespace", len(body), w.Code, w.Header())
		}
	}
}
