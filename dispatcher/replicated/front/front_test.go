package front

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
)

func hashOf(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// live is the live config of a namespace with a Source.
func live(namespace, key, reserved string) liveconfig.Revisioned {
	r := liveconfig.Revisioned{Config: liveconfig.Config{Namespace: namespace, Sources: []liveconfig.Source{
		{Name: "web", WriteKeySHA256: liveconfig.KeyHashes{hashOf(key)}, AllowedOrigins: []string{"https://" + namespace + ".example"}},
	}}}
	if reserved != "" {
		r.Head.Reserved = []liveconfig.ReservedKey{{SHA256: hashOf(reserved)}}
	}
	return r
}

func TestIndex(t *testing.T) {
	var x Index
	x.Set("a", live("a", "key-a", "old"))
	x.Set("b", live("b", "old", ""))
	want := func(key, namespace string) {
		t.Helper()
		if got, ok := x.Namespace(key); got != namespace || ok != (namespace != "") {
			t.Errorf("namespace of %s: got %q and %v, want %q", key, got, ok, namespace)
		}
	}
	want("key-a", "a")
	want("old", "b") // A key of a Source takes precedence over a reserved one.
	want("other", "")
	if !x.Knows("old") {
		t.Error("the key of a Source: got unknown, want known")
	}
	x.Delete("b")
	want("old", "a")
	if x.Knows("old") { // A removed key becomes unknown after its grace period.
		t.Error("a reserved key: got known, want unknown")
	}
	// A key moves to another namespace, whose config arrives first.
	for _, c := range []struct{ namespace, key string }{{"d", "moved"}, {"c", "moved"}, {"e", "moved"}, {"d", "key-d"}} {
		x.Set(c.namespace, live(c.namespace, c.key, ""))
	}
	want("moved", "c") // The first by name, as in a process with one store.
	x.Delete("c")
	want("moved", "e")
	x.Delete("e")
	want("moved", "")
	if got, ok := x.Allowing("https://A.example"); got != "a" || !ok {
		t.Errorf("origin: got %q and %v, want a", got, ok)
	}
	if got, ok := x.Allowing("https://b.example"); ok {
		t.Errorf("origin of a deleted namespace: got %q, want none", got)
	}
}

// slot answers with its number and the body that it got, or with a status.
type slot struct {
	number, status int
	asked          *[]int
}

func (s slot) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	*s.asked = append(*s.asked, s.number)
	body, _ := io.ReadAll(r.Body)
	w.Header().Set("Slot", fmt.Sprint(s.number))
	w.WriteHeader(s.status)
	_, _ = w.Write(body)
}

func TestFront(t *testing.T) {
	var asked []int
	statuses := map[int]int{0: 401, 1: 200, 2: 200, 3: 503, 4: 401}
	var x Index
	for _, namespace := range []string{"a", "b", "new"} {
		x.Set(namespace, live(namespace, "key-"+namespace, "old-"+namespace))
	}
	var doubtful []int
	ready := error(nil)
	f := &Front{
		Ready: func() error { return ready }, Index: &x, Doubtful: func() []int { return doubtful },
		SlotOf: func(namespace string) (int, bool) {
			n, ok := map[string]int{"a": 1, "b": 2}[namespace]
			return n, ok
		},
		Slot: func(n int) http.Handler { return slot{n, statuses[n], &asked} },
		Any:  func() http.Handler { return slot{0, statuses[0], &asked} }, Memory: &limits.Pool{Max: 8 << 20},
		Unreadable: func(w http.ResponseWriter, err error) { http.Error(w, err.Error(), http.StatusBadRequest) },
	}
	zipped := func(text string) string {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, _ = io.WriteString(z, text)
		_ = z.Close()
		return b.String()
	}
	const call = `{"userId":"u","event":"e"}`
	inBody := func(key string) string { return `{"userId":"u","event":"e","writeKey":"` + key + `"}` }
	large := strings.Repeat("x", event.MaxBodyBytes+10)
	for _, c := range []struct {
		name, path, key, body, origin, encoding string
		doubtful                                []int
		ready                                   error
		status                                  int
		asked                                   []int
	}{
		{name: "key in the header", key: "key-b", body: call, status: 200, asked: []int{2}},
		{name: "removed key", key: "old-a", body: call, status: 200, asked: []int{1}},
		{name: "key in the body", body: inBody("key-b"), status: 200, asked: []int{2}},
		{name: "key in a compressed body", body: zipped(inBody("key-b")), encoding: "gzip", status: 200, asked: []int{2}},
		{name: "settings", path: "/v1/projects/key-a/settings", status: 200, asked: []int{1}},
		{name: "namespace without a slot", key: "key-new", body: call, status: 503},
		{name: "unknown key", key: "x", body: call, status: 401, asked: []int{0}},
		{name: "unknown key in the body", body: inBody("x"), status: 401, asked: []int{0}},
		{name: "unknown key, and a slot that knows it", key: "x", body: call, doubtful: []int{0, 1, 3}, status: 200, asked: []int{0, 1}},
		{name: "unknown key that no slot knows", key: "x", body: call, doubtful: []int{0, 4}, status: 401, asked: []int{0, 4}},
		{name: "unknown key, and a slot without owner", key: "x", body: call, doubtful: []int{0, 3}, status: 503, asked: []int{0, 3}},
		{name: "no key", path: "/v1/unknown", status: 401, asked: []int{0}},
		{name: "body that is too large", body: large, status: 401, asked: []int{0}},
		{name: "preflight", path: "OPTIONS", origin: "https://b.example", status: 200, asked: []int{2}},
		{name: "before the first config", key: "key-b", body: call, ready: errors.New("starting"), status: 503},
	} {
		t.Run(c.name, func(t *testing.T) {
			asked, doubtful, ready = nil, c.doubtful, c.ready
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/track", strings.NewReader(c.body))
			switch {
			case c.path == "OPTIONS":
				r.Method = http.MethodOptions
			case c.path != "":
				r = httptest.NewRequestWithContext(t.Context(), http.MethodGet, c.path, http.NoBody)
			}
			if c.key != "" {
				r.SetBasicAuth(c.key, "")
			}
			for name, value := range map[string]string{"Origin": c.origin, "Content-Encoding": c.encoding} {
				if value != "" {
					r.Header.Set(name, value)
				}
			}
			w := httptest.NewRecorder()
			f.ServeHTTP(w, r)
			if w.Code != c.status || !slices.Equal(asked, c.asked) {
				t.Errorf("got status %d of slots %v, want %d of %v", w.Code, asked, c.status, c.asked)
			}
			if w.Code == http.StatusOK && w.Body.String() != c.body {
				t.Errorf("the slot got the body %.50q, want %.50q", w.Body, c.body)
			}
			if used := f.Memory.Used(); used != 0 {
				t.Errorf("%d bytes are reserved after the request, want 0", used)
			}
		})
	}
}

// rest counts the bytes that are read.
type rest struct {
	io.Reader
	n int
}

func (r *rest) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.n += n
	return n, err
}

// An unknown key in the header costs no memory while no slot can know it: the owner refuses it before the
// body is read.
func TestBodyOfUnknownKeyIsNotRead(t *testing.T) {
	var asked []int
	f := &Front{
		Ready: func() error { return nil }, Index: &Index{}, Doubtful: func() []int { return nil }, Memory: &limits.Pool{},
		Any: func() http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				asked = append(asked, 0)
				w.WriteHeader(http.StatusUnauthorized)
			})
		},
	}
	body := &rest{Reader: strings.NewReader(`{"userId":"u","event":"e"}`)}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/track", body)
	r.SetBasicAuth("x", "")
	w := httptest.NewRecorder()
	f.ServeHTTP(w, r)
	if w.Code != http.StatusUnauthorized || body.n != 0 || len(asked) != 1 {
		t.Errorf("got status %d after %d bytes from %d slots, want 401 after 0 from one", w.Code, body.n, len(asked))
	}
}

// The memory of an inflated body is reserved while its key is read.
func TestInflatedBodiesHaveBoundedMemory(t *testing.T) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, `{"userId":"u","event":"`+strings.Repeat("e", event.MaxBodyBytes/2)+`"}`)
	_ = z.Close()
	var asked []int
	f := &Front{
		Ready: func() error { return nil }, Index: &Index{}, Doubtful: func() []int { return nil }, Memory: &limits.Pool{Max: event.MaxBodyBytes},
		Any: func() http.Handler { return slot{0, 200, &asked} },
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/track", &b)
	r.Header.Set("Content-Encoding", "gzip")
	w := httptest.NewRecorder()
	f.ServeHTTP(w, r)
	if w.Code != http.StatusServiceUnavailable || len(asked) != 0 {
		t.Errorf("got status %d from slots %v, want 503 from none", w.Code, asked)
	}
}

// Bodies that are read to find their key have bounded memory.
func TestBodiesHaveBoundedMemory(t *testing.T) {
	var asked []int
	f := &Front{
		Ready: func() error { return nil }, Index: &Index{}, Doubtful: func() []int { return nil }, Memory: &limits.Pool{Max: 1 << 20},
		Any: func() http.Handler { return slot{0, 200, &asked} },
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/batch", strings.NewReader(strings.Repeat("x", event.MaxBodyBytes)))
	w := httptest.NewRecorder()
	f.ServeHTTP(w, r)
	if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" || len(asked) != 0 {
		t.Errorf("got status %d and Retry-After %q, want 503 with a time", w.Code, w.Header().Get("Retry-After"))
	}
}

// The bodies of a namespace whose owner does not answer leave memory for another namespace's.
func TestSilentOwnerLeavesMemory(t *testing.T) {
	var x Index
	for _, namespace := range []string{"silent", "other"} {
		x.Set(namespace, live(namespace, "key-"+namespace, ""))
	}
	arrived, end := make(chan struct{}), make(chan struct{})
	var asked []int
	f := &Front{
		Ready: func() error { return nil }, Index: &x, Doubtful: func() []int { return nil }, Memory: &limits.Pool{Max: 4 << 20},
		SlotOf: func(namespace string) (int, bool) {
			n, ok := map[string]int{"silent": 0, "other": 1}[namespace]
			return n, ok
		},
		Slot: func(n int) http.Handler {
			if n == 1 {
				return slot{1, 200, &asked}
			}
			return http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				arrived <- struct{}{}
				<-end
			})
		},
	}
	send := func(namespace string, size int) int {
		w := httptest.NewRecorder()
		body := fmt.Sprintf(`{"writeKey":"key-%s","batch":[%s1]}`, namespace, strings.Repeat("1,", size/2))
		f.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/batch", strings.NewReader(body)))
		return w.Code
	}
	const size = 400 << 10
	var group sync.WaitGroup
	refused, waiting := 0, 0
	for range 12 {
		answer := make(chan int, 1)
		group.Go(func() { answer <- send("silent", size) })
		select {
		case <-arrived:
			waiting++
		case status := <-answer:
			if refused++; status != http.StatusServiceUnavailable {
				t.Errorf("call to the silent owner without memory: got status %d, want 503", status)
			}
		}
	}
	if waiting != 5 || refused != 7 { // Half of the memory has five bodies.
		t.Errorf("calls to the silent owner: got %d waiting and %d refused, want 5 and 7", waiting, refused)
	}
	if status := send("other", size); status != http.StatusOK {
		t.Errorf("call to the other slot: got status %d, want 200", status)
	}
	close(end)
	group.Wait()
	if used := f.Memory.Used(); used != 0 {
		t.Errorf("%d bytes are reserved after the requests, want 0", used)
	}
}
