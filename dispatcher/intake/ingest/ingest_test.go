package ingest

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/admission/admissiontest"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/wait"
)

// fixture is a handler with three Sources and a store that records messages.
type fixture struct {
	*Handler
	t      testing.TB
	mu     sync.Mutex
	stored []queue.Message
	err    error
	block  chan struct{}
	now    time.Time
	// Skip and Append are the filters of the destinations and the store.
	Skip     func(source string, c *event.Call) []string
	Append   func(context.Context, []queue.Message) ([]bool, error)
	registry *prometheus.Registry
}

func source_(name, key string, change func(*liveconfig.Source)) liveconfig.Source {
	sum := sha256.Sum256([]byte(key))
	s := liveconfig.Source{Name: name, WriteKeySHA256: liveconfig.KeyHashes{hex.EncodeToString(sum[:])}}
	if change != nil {
		change(&s)
	}
	return s
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	f := &fixture{t: t, now: time.UnixMilli(1_700_000_000_000), registry: prometheus.NewRegistry()}
	f.Skip = func(_ string, c *event.Call) []string {
		if c.Type == event.Page {
			return []string{"shop/crm"}
		}
		return nil
	}
	f.Append = func(_ context.Context, msgs []queue.Message) ([]bool, error) {
		if f.block != nil {
			<-f.block
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.err != nil {
			return nil, f.err
		}
		for _, m := range msgs {
			m.Body = bytes.Clone(m.Body)
			f.stored = append(f.stored, m)
		}
		return nil, nil
	}
	gate := admission.New(admission.Options{
		Store: &admissiontest.Store{OnAppend: func(ctx context.Context, msgs []queue.Message) ([]bool, error) { return f.Append(ctx, msgs) }},
		Now:   func() time.Time { return f.now }, Registerer: f.registry, Logger: slog.New(slog.DiscardHandler),
	})
	f.Handler = New(Options{Gate: gate, Registerer: f.registry, Logger: slog.New(slog.DiscardHandler)})
	f.set(liveconfig.NewView([]liveconfig.Revisioned{{Config: liveconfig.Config{Namespace: "shop", Sources: []liveconfig.Source{
		source_("web", "web-key", func(s *liveconfig.Source) { s.AllowedOrigins = []string{"https://shop.example"} }),
		source_("off", "off-key", func(s *liveconfig.Source) { s.Suspended, s.AllowedOrigins = true, []string{"https://off.example"} }),
		source_("slow", "slow-key", func(s *liveconfig.Source) { s.CallsPerSecond, s.Burst = 10, 20 }),
	}}}}))
	return f
}

// set puts a view into effect; nil for no config yet.
func (f *fixture) set(view *liveconfig.View) {
	admissiontest.Set(f.Gate, view, admissiontest.Router{OnSkip: func(source string, c *event.Call) []string { return f.Skip(source, c) }})
}

// do serves a request, and checks request and response against the served document.
func (f *fixture) do(r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	if _, ok := f.t.(*testing.T); !ok {
		f.ServeHTTP(w, r)
		return w
	}
	f.t.Helper()
	var sent bytes.Buffer
	r.Body = struct {
		io.Reader
		io.Closer
	}{io.TeeReader(r.Body, &sent), r.Body}
	f.ServeHTTP(w, r)
	if err := conforms(r, sent.Bytes(), w); err != nil {
		f.t.Errorf("openapi.yaml does not allow %s %s: %v", r.Method, r.URL.Path, err)
	}
	return w
}

// serve serves a request without the check against the document; for large bodies.
func (f *fixture) serve(r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	f.ServeHTTP(w, r)
	return w
}

func post(path, key, body string, headers ...string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	if key != "" {
		r.SetBasicAuth(key, "")
	}
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		if headers[i+1] == "" {
			r.Header.Del(headers[i])
			continue
		}
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

func zip(s string) string {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = z.Write([]byte(s))
	_ = z.Close()
	return b.String()
}

const track = `{"userId":"u","event":"E"}`

// A refused batch counts its calls, exactly if its body was read.
func TestRefusedBatchesCountTheirCalls(t *testing.T) {
	call := `{"type":"track","userId":"u","event":"E","properties":{"p":["]",{"q":"\\\"}"}]}}`
	const head = `{"sentAt":null,"batch":[`
	batch := func(n int, rest string) string {
		return head + strings.Repeat(call+", ", n-1) + call + "]" + rest
	}
	for name, tc := range map[string]struct {
		request *http.Request
		want    int64
		text    string // of the last rejection
	}{
		"a single call":     {post("/v1/track", "web-key", `{"event":"E"}`), 1, ""},
		"context is a text": {post("/v1/batch", "web-key", batch(100, `,"context":"x"}`)), 100, ""},
		"merged context is too large": {post("/v1/batch", "web-key",
			batch(200, `,"context":{"x":"`+strings.Repeat("y", 30_000)+`"}}`)), 200, ""},
		"invalid JSON after the calls": {post("/v1/batch", "web-key", batch(30, `,`)), 30, ""},
		"invalid JSON between calls":   {post("/v1/batch", "web-key", strings.Replace(batch(30, `}`), "}, {", "}, , {", 1)), 30, ""},
		"read before its calls":        {post("/v1/batch", "web-key", `{"context":"x",`+batch(7, `}`)[1:]), 7, ""},
		"too large":                    {post("/v1/batch", "web-key", batch(9_000, `}`)), 9_000, "(about 9000 calls, estimated by size)"},
		"inflates to too much":         {post("/v1/batch", "web-key", zip(batch(9_000, `}`))), int64((event.MaxBodyBytes - len(head) + 2) / (len(call) + 2)), "estimated by size"},
		"origin not allowed": {post("/v1/batch", "web-key", batch(20, `}`), "Origin", "https://evil.example"),
			int64(len(batch(20, `}`)) / bytesPerRefusedCall), "estimated by size"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			if w := f.do(tc.request); w.Code < 400 {
				t.Fatalf("got %d %s, want a refusal", w.Code, w.Body)
			}
			c := f.Gate.Counters("shop/web")
			if c.Rejected != tc.want {
				t.Errorf("rejected: got %d, want %d (%s)", c.Rejected, tc.want, c.LastRejection)
			}
			if estimated := strings.Contains(c.LastRejection, "estimated by size"); estimated != (tc.text != "") ||
				!strings.Contains(c.LastRejection, tc.text) {
				t.Errorf("last rejection: got %q, want it to contain %q", c.LastRejection, tc.text)
			}
		})
	}
}

func TestAnswers(t *testing.T) {
	big := `{"userId":"u","event":"E","properties":{"x":"` + strings.Repeat("x", 40<<10) + `"}}`
	huge := `{"batch":[` + strings.Repeat(track+",", 30_000) + track + `]}`
	basic := func(raw string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(raw)) }
	for name, tc := range map[string]struct {
		request *http.Request
		status  int
		want    string // in the body
		stored  int
	}{
		"single":                {post("/v1/track", "web-key", track), 200, `{"success":true}`, 1},
		"each path: page":       {post("/v1/page", "web-key", `{"anonymousId":"a"}`), 200, "true", 1},
		"import is batch":       {post("/v1/import", "web-key", `{"batch":[{"type":"track","userId":"u","event":"E"}]}`), 200, "true", 1},
		"trailing slash":        {post("/v1/track/", "web-key", track), 200, "true", 1},
		"batch with a bad call": {post("/v1/batch", "web-key", `{"batch":[{"type":"track","userId":"u"},{"type":"track","userId":"u","event":"E"}]}`), 200, `"rejected":[{"index":0,"code":"no_event"`, 1},
		"batch, all bad":        {post("/v1/batch", "web-key", `{"batch":[{"type":"track","userId":"u"}]}`), 200, `"rejected":[{"index":0`, 0},
		"key without colon":     {post("/v1/track", "", track, "Authorization", basic("web-key")), 200, "true", 1},
		"key without padding":   {post("/v1/track", "", track, "Authorization", strings.TrimRight(basic("web-key:"), "=")), 200, "true", 1},
		"key in the body":       {post("/v1/track", "", `{"writeKey":"web-key","userId":"u","event":"E"}`), 200, "true", 1},
		"key in a batch":        {post("/v1/batch", "", `{"writeKey":"web-key","batch":[{"type":"track","userId":"u","event":"E"}]}`), 200, "true", 1},
		"bearer and body key": {post("/v1/track", "", `{"writeKey":"web-key","userId":"u","event":"E"}`, "Authorization", "Bearer token"), 200,
			"true", 1},
		"text/plain (beacon)": {post("/v1/track", "web-key", track, "Content-Type", "text/plain;charset=UTF-8"), 200, "true", 1},
		"no content type":     {post("/v1/track", "web-key", track, "Content-Type", ""), 200, "true", 1},
		"gzip":                {post("/v1/track", "web-key", zip(track), "Content-Encoding", "gzip"), 200, "true", 1},
		"no key":              {post("/v1/track", "", track), 401, `"no_write_key"`, 0},
		"unknown key":         {post("/v1/track", "no-such-key", track), 401, `"unknown_write_key"`, 0},
		"unknown key in body": {post("/v1/track", "", `{"writeKey":"no-such-key","userId":"u","event":"E"}`), 401, `"unknown_write_key"`, 0},
		"suspended":           {post("/v1/track", "off-key", track), 503, `"source_suspended"`, 0},
		"not JSON":            {post("/v1/track", "web-key", `{"userId":`), 400, `"invalid_json"`, 0},
		"not an object":       {post("/v1/track", "web-key", `[]`), 400, `"not_an_object"`, 0},
		"no id":               {post("/v1/track", "web-key", `{"event":"E"}`), 400, `userId`, 0},
		"empty batch":         {post("/v1/batch", "web-key", `{"batch":[]}`), 400, `"empty_batch"`, 0},
		"call too large":      {post("/v1/track", "web-key", big), 413, `"call_too_large"`, 0},
		"body too large":      {post("/v1/batch", "web-key", huge), 413, `"body_too_large"`, 0},
		"bomb": {post("/v1/batch", "web-key", zip(strings.Repeat(" ", 50<<20)), "Content-Encoding", "gzip"), 413,
			`"body_too_large"`, 0},
		"inflated by a gateway": {post("/v1/track", "web-key", track, "Content-Encoding", "gzip"), 200, "true", 1},
		"gzip without header":   {post("/v1/track", "web-key", zip(track), "Content-Type", ""), 200, "true", 1},
		"identity of a client":  {post("/v1/track", "web-key", track, "Content-Encoding", "utf-8"), 200, "true", 1},
		"gzip in two members":   {post("/v1/track", "web-key", zip(track[:9])+zip(track[9:]), "Content-Encoding", "gzip"), 200, "true", 1},
		"bytes after gzip": {post("/v1/track", "web-key", zip(track)+track, "Content-Encoding", "gzip"), 400,
			"other bytes after its end", 0},
		"damaged gzip": {post("/v1/track", "web-key", zip(track)[:12]+"\xff\xff"+zip(track)[14:], "Content-Encoding", "gzip"), 400,
			"is damaged", 0},
		"gzip of gzip": {post("/v1/track", "web-key", zip(zip(track)), "Content-Encoding", "gzip, gzip"), 415,
			`"unsupported_encoding"`, 0},
		"gzip cut off":   {post("/v1/track", "web-key", zip(track)[:20], "Content-Encoding", "gzip"), 400, `"unreadable_body"`, 0},
		"other encoding": {post("/v1/track", "web-key", track, "Content-Encoding", "br"), 415, `"unsupported_encoding"`, 0},
		"other type":     {post("/v1/track", "web-key", track, "Content-Type", "image/png"), 415, `"unsupported_media_type"`, 0},
		"browser library": {post("/v1/t", "", `{"writeKey":"web-key","userId":"u","event":"E"}`, "Content-Type", "text/plain"), 200,
			"true", 1},
		"browser library, /v1/b": {post("/v1/b", "", `{"writeKey":"web-key","batch":[{"type":"page","userId":"u","writeKey":"web-key"}]}`, "Content-Type", "text/plain"), 200, "true", 1},
		"unknown path":           {post("/v1/frob", "web-key", track), 404, `"not_found"`, 0},
		"without version":        {post("/track", "web-key", track), 404, `"not_found"`, 0},
		"GET":                    {httptest.NewRequest(http.MethodGet, "/v1/track", nil), 405, `"method_not_allowed"`, 0},
		"origin not allowed":     {post("/v1/track", "web-key", track, "Origin", "https://evil.example"), 403, `"origin_not_allowed"`, 0},
		"origin allowed":         {post("/v1/track", "web-key", track, "Origin", "https://shop.example"), 200, "true", 1},
		"no browser at all":      {post("/v1/track", "slow-key", track, "Origin", "https://shop.example"), 403, `"origin_not_allowed"`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			w := f.do(tc.request)
			if w.Code != tc.status || !strings.Contains(w.Body.String(), tc.want) || len(f.stored) != tc.stored {
				t.Errorf("%d %s, %d stored; want %d %s, %d stored", w.Code, w.Body, len(f.stored), tc.status, tc.want, tc.stored)
			}
			var answer struct{ Success *bool }
			if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil || answer.Success == nil || *answer.Success != (w.Code == 200) {
				t.Errorf("not an answer: %s %v", w.Body, err)
			}
			if w.Code == 405 && w.Header().Get("Allow") == "" {
				t.Error("405 without Allow")
			}
			if n := f.memory.Used(); n != 0 {
				t.Errorf("%d bytes are still held", n)
			}
		})
	}
}

func TestWhatPassesByItselfSaysWhenToComeBack(t *testing.T) {
	retry := func(t *testing.T, w *httptest.ResponseRecorder, status int, code string) {
		t.Helper()
		if w.Code != status || !strings.Contains(w.Body.String(), code) || w.Header().Get("Retry-After") == "" {
			t.Errorf("%d %s, Retry-After %q; want %d %s", w.Code, w.Body, w.Header().Get("Retry-After"), status, code)
		}
	}
	t.Run("no config yet", func(t *testing.T) {
		f := newFixture(t)
		f.set(nil)
		retry(t, f.do(post("/v1/track", "web-key", track)), 503, admission.CodeNotReady)
	})
	t.Run("a namespace's config is not loaded", func(t *testing.T) {
		f := newFixture(t)
		f.set(liveconfig.NewView(nil, "shop"))
		retry(t, f.do(post("/v1/track", "web-key", track)), 503, admission.CodeNotReady)
	})
	t.Run("storage full, and then not", func(t *testing.T) {
		f := newFixture(t)
		f.err = fmt.Errorf("append: %w", queue.ErrFull)
		retry(t, f.do(post("/v1/track", "web-key", track)), 503, admission.CodeStorageFull)
		if c := f.Gate.Counters("shop/web"); !c.StoragePressure || c.Rejected != 1 ||
			!strings.Contains(c.LastRejection, admission.CodeStorageFull) {
			t.Errorf("%+v", c)
		}
		f.err = nil
		if w := f.do(post("/v1/track", "web-key", track)); w.Code != 200 {
			t.Error(w.Code)
		}
		if c := f.Gate.Counters("shop/web"); c.StoragePressure || c.LastAccepted.IsZero() {
			t.Errorf("%+v", c)
		}
	})
	t.Run("closing", func(t *testing.T) {
		f := newFixture(t)
		f.err = queue.ErrClosed
		retry(t, f.do(post("/v1/track", "web-key", track)), 503, admission.CodeNotReady)
	})
	t.Run("unknown fault", func(t *testing.T) {
		f := newFixture(t)
		f.err = errors.New("disk on fire at /secret/path")
		w := f.do(post("/v1/track", "web-key", track))
		retry(t, w, 503, admission.CodeStorageFailed)
		if strings.Contains(w.Body.String(), "fire") {
			t.Error("the answer shows internals")
		}
	})
	t.Run("rate limit", func(t *testing.T) {
		f := newFixture(t)
		batch := `{"batch":[` + strings.TrimSuffix(strings.Repeat(`{"type":"track","userId":"u","event":"E"},`, 20), ",") + `]}`
		if w := f.do(post("/v1/batch", "slow-key", batch)); w.Code != 200 {
			t.Fatalf("the burst was refused: %d %s", w.Code, w.Body)
		}
		w := f.do(post("/v1/batch", "slow-key", batch))
		retry(t, w, 429, codeRateLimited)
		if w.Header().Get("Retry-After") != "2" {
			t.Errorf("20 calls at 10/s take 2 s, not %s", w.Header().Get("Retry-After"))
		}
		if w := f.do(post("/v1/track", "web-key", track)); w.Code != 200 {
			t.Error("another Source was limited too")
		}
		f.now = f.now.Add(2 * time.Second)
		if w := f.do(post("/v1/batch", "slow-key", batch)); w.Code != 200 {
			t.Errorf("after the pause: %d", w.Code)
		}
		larger := `{"batch":[` + strings.TrimSuffix(strings.Repeat(`{"type":"track","userId":"u","event":"E"},`, 50), ",") + `]}`
		f.now = f.now.Add(time.Minute)
		if w := f.do(post("/v1/batch", "slow-key", larger)); w.Code != 200 {
			t.Errorf("a batch larger than the burst can never pass: %d", w.Code)
		}
		if w := f.do(post("/v1/track", "slow-key", "not even JSON")); w.Code != http.StatusTooManyRequests ||
			w.Header().Get("X-RateLimit-Reset") != "4" {
			t.Errorf("far over the rate the body is not looked at: %d %v", w.Code, w.Header())
		}
		f.now = f.now.Add(3 * time.Second)
		if w := f.do(post("/v1/track", "slow-key", track)); w.Code != http.StatusTooManyRequests {
			t.Errorf("the batch's 50 calls take 5 s at 10/s with a burst of 20: %d after 3 s", w.Code)
		}
		if c := f.Gate.Counters("shop/slow"); c.Rejected != 20+1+1 {
			t.Errorf("%d calls counted as rejected", c.Rejected)
		}
	})
}

func TestMessagesAreWhatTheQueueNeeds(t *testing.T) {
	f := newFixture(t)
	f.do(post("/v1/batch", "web-key", `{"batch":[{"type":"track","userId":"u","event":"E","messageId":"m1"},{"type":"page","userId":"u","event":"no","messageId":"m2"}]}`))
	if len(f.stored) != 2 {
		t.Fatalf("%d stored", len(f.stored))
	}
	a, b := f.stored[0], f.stored[1]
	if a.Source != "shop/web" || a.ID != "m1" || a.Type != "track" || a.Event != "E" || !a.AcceptedAt.Equal(f.now) || a.Skip != nil || !strings.Contains(string(a.Body), `"version":1`) {
		t.Errorf("%+v %s", a, a.Body)
	}
	if b.Event != "" || len(b.Skip) != 1 {
		t.Errorf("%+v", b)
	}
	if strings.Contains(string(a.Body)+string(b.Body), "web-key") {
		t.Error("the write key is in a message")
	}
}

// Results of Parse must not point into the body's buffer, because the buffer is reused.
func TestMessagesDoNotShareTheRequestBuffer(t *testing.T) {
	f := newFixture(t)
	var kept []queue.Message
	f.Append = func(_ context.Context, msgs []queue.Message) ([]bool, error) {
		kept = append(kept, msgs...)
		return nil, nil
	}
	for i := range 50 {
		f.do(post("/v1/track", "web-key", fmt.Sprintf(`{"userId":"u%02d","event":"E%02d","messageId":"m%02d"}`, i, i, i)))
	}
	for i, m := range kept {
		if want := fmt.Sprintf("%02d", i); m.ID != "m"+want || m.Event != "E"+want || !strings.Contains(string(m.Body), `"u`+want+`"`) {
			t.Fatalf("message %d was overwritten: %+v %s", i, m, m.Body)
		}
	}
}

func TestCORS(t *testing.T) {
	f := newFixture(t)
	preflight := func(origin string) http.Header {
		r := httptest.NewRequest(http.MethodOptions, "/v1/track", nil)
		r.Header.Set("Origin", origin)
		r.Header.Set("Access-Control-Request-Method", "POST")
		r.Header.Set("Access-Control-Request-Headers", "authorization,content-type")
		w := f.do(r)
		if w.Code != http.StatusNoContent {
			t.Errorf("preflight: %d", w.Code)
		}
		return w.Header()
	}
	if h := preflight("https://shop.example"); h.Get(headerAllowedOrigin) != "https://shop.example" ||
		!strings.Contains(h.Get("Access-Control-Allow-Headers"), "authorization") || !strings.Contains(fmt.Sprint(h.Values("Vary")), "Origin") {
		t.Errorf("allowed origin: %v", h)
	}
	if h := preflight("https://off.example"); h.Get(headerAllowedOrigin) != "https://off.example" {
		t.Errorf("allowed origin of a suspended Source: %v", h)
	}
	if h := preflight("https://evil.example"); h.Get(headerAllowedOrigin) != "" {
		t.Errorf("other origin: %v", h)
	}
	w := f.do(post("/v1/track", "off-key", track, "Origin", "https://off.example"))
	if w.Code != 503 || w.Header().Get("Retry-After") != "60" || w.Header().Get(headerAllowedOrigin) != "https://off.example" {
		t.Errorf("call from a page of a suspended Source: got %d %v, want 503 that the page can read, with Retry-After 60", w.Code, w.Header())
	}
	w = f.do(post("/v1/track", "", `{"writeKey":"web-key","userId":"u","event":"E"}`, "Origin", "https://shop.example", "Content-Type",
		"text/plain"))
	if w.Code != 200 || w.Header().Get(headerAllowedOrigin) != "https://shop.example" || w.Header().Get("Vary") != "Origin" {
		t.Errorf("%d %v", w.Code, w.Header())
	}
	if w := f.do(post("/v1/track", "web-key", track)); w.Header().Get(headerAllowedOrigin) != "" {
		t.Error("CORS headers for a server")
	}

	// A page may read why its call failed, if any Source allows it; a Source that does not keeps its answer.
	for name, tc := range map[string]struct {
		key, body, host string
		status          int
		readable        bool
	}{
		"unknown key":          {"no-such-key", track, "", 401, true},
		"not JSON":             {"", `{`, "", 400, true},
		"taken":                {"web-key", track, "", 200, true},
		"another Source's":     {"slow-key", track, "", 403, false},
		"key in the body":      {"", `{"writeKey":"slow-key","userId":"u","event":"E"}`, "", 403, false},
		"behind a common host": {"slow-key", track, "shop.example", 200, true},
		"with its port":        {"slow-key", track, "Shop.example:443", 200, true},
		"with another port":    {"slow-key", track, "shop.example:8443", 403, false},
		"with the port 80":     {"slow-key", track, "shop.example:80", 403, false},
	} {
		r := post("/v1/track", tc.key, tc.body, "Origin", "https://shop.example")
		if tc.host != "" {
			r.Host = tc.host
		}
		w := f.do(r)
		if readable := w.Header().Get(headerAllowedOrigin) != ""; w.Code != tc.status || readable != tc.readable {
			t.Errorf("%s: %d, readable %v", name, w.Code, readable)
		}
		if challenge := w.Header().Get("Www-Authenticate"); challenge != "" {
			t.Errorf("%s: a browser would ask its user for a password: %s", name, challenge)
		}
	}
	if w := f.do(post("/v1/track", "no-such-key", track)); w.Header().Get("Www-Authenticate") == "" {
		t.Error("401 without a challenge")
	}
}

func TestOrigins(t *testing.T) {
	f := newFixture(t)
	f.set(liveconfig.NewView([]liveconfig.Revisioned{{Config: liveconfig.Config{Namespace: "shop", Sources: []liveconfig.Source{
		source_("web", "web-key", func(s *liveconfig.Source) {
			s.AllowedOrigins = []string{"https://shop.example", "https://*.shop.example", "https://*.port.example:8443", "capacitor://localhost",
				"null", "http://[::1]:3000"}
		}),
	}}}}))
	for origin, allowed := range map[string]bool{
		"https://shop.example": true, "https://SHOP.example:443": true, "http://shop.example": false, "https://shop.example:8443": false,
		"https://a.shop.example": true, "https://a.b.shop.example:443": true, "https://a.shop.example:8443": false,
		"http://a.shop.example":    false,
		"https://evilshop.example": false, "https://evil-shop.example": false, "https://.shop.example": false,
		"https://shop.example.evil.example":  false,
		"https://evil.example/.shop.example": false, "https://a.port.example:8443": true, "https://port.example:8443": false,
		"https://a.port.example": false,
		"capacitor://localhost":  true, "ionic://localhost": false, "http://localhost": false, "null": true, "http://[0::1]:3000": true,
		"http://[::2]:3000": false,
	} {
		r := httptest.NewRequest(http.MethodOptions, "/v1/t", nil)
		r.Header.Set("Origin", origin)
		want := ""
		if allowed {
			want = origin
		}
		if got := f.do(r).Header().Get(headerAllowedOrigin); got != want {
			t.Errorf("preflight of %s: got Access-Control-Allow-Origin %q, want %q", origin, got, want)
		}
		w := f.do(post("/v1/t", "web-key", track, "Origin", origin))
		if got := w.Header().Get(headerAllowedOrigin); got != want || (w.Code == http.StatusOK) != allowed {
			t.Errorf("call of %s: got %d and Access-Control-Allow-Origin %q, want %q", origin, w.Code, got, want)
		}
	}
	// The same-host rule is one of browsers: an app's page has no host.
	for origin, want := range map[string]int{"tauri://localhost": http.StatusForbidden, "http://localhost": http.StatusOK,
		"https://localhost": http.StatusOK} {
		r := post("/v1/t", "web-key", track, "Origin", origin)
		r.Host = "localhost"
		if w := f.do(r); w.Code != want {
			t.Errorf("call of %s to localhost: got %d, want %d", origin, w.Code, want)
		}
	}
}

// Empty segments of a path do not count, and no path is redirected: browsers reject a redirected preflight.
func TestPathsAreNotRedirected(t *testing.T) {
	f := newFixture(t)
	mux := http.NewServeMux()
	f.Mount(mux)
	h := Normalize(mux)
	for target, want := range map[string]int{
		"/v1/track": 200, "/v1/track/": 200, "//v1/track": 200, "/v1//track": 200, "//v1//track//": 200, "///v1/t//": 200, "//v1/track?x=//": 200,
		"/%2Fv1/track": 200, "/v1%2F%2Ftrack": 200, "/v1%2Ftrack": 200, "http://track.example//v1/track": 200,
		"//v1/batch": 400, "//v1/nothing": 404, "//": 404, "http://track.example": 404, "/v1": 404, "//v1/.well-known": 404,
		"/v1/./track": 404, "/v1/x/../track": 404, "/v1/x/%2e%2e/track": 404, "/v1/track/..": 404, "/..//v1/track": 404,
	} {
		for _, method := range []string{http.MethodPost, http.MethodOptions} {
			r := httptest.NewRequest(method, "/", strings.NewReader(track))
			u, err := url.ParseRequestURI(target) // As the server does: NewRequest reads //v1 as a host.
			if err != nil {
				t.Fatal(err)
			}
			r.URL, r.RequestURI = u, target
			r.SetBasicAuth("web-key", "")
			r.Header.Set("Origin", "https://shop.example")
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			want := want
			if method == http.MethodOptions && want != 404 {
				want = http.StatusNoContent
			}
			if w.Code != want || want != 404 && w.Header().Get(headerAllowedOrigin) != "https://shop.example" {
				t.Errorf("%s %s: got %d with headers %v, want %d and CORS headers", method, target, w.Code, w.Header(), want)
			}
		}
	}
	for _, target := range []string{"//v1/projects/web-key/settings", "/v1//projects/web-key//settings/", "//projects/web-key/settings"} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://track.example"+target, nil))
		if w.Code != http.StatusOK {
			t.Errorf("GET %s: got %d, want 200", target, w.Code)
		}
	}
}

func TestClientIPOnlyOfBrowsersAndOnlyFromTrustedProxies(t *testing.T) {
	f := newFixture(t)
	proxies, err := ParseProxies([]string{"10.0.0.0/8", " 192.0.2.1"})
	if err != nil {
		t.Fatal(err)
	}
	f.TrustedProxies = proxies
	ip := func(peer, forwarded, origin string) string {
		f.stored = nil
		r := post("/v1/track", "web-key", track, "X-Forwarded-For", forwarded, "Origin", origin)
		r.RemoteAddr = peer
		f.do(r)
		var m struct{ Context struct{ IP string } }
		if err := json.Unmarshal(f.stored[0].Body, &m); err != nil {
			t.Fatal(err)
		}
		return m.Context.IP
	}
	const browser = "https://shop.example"
	for _, tc := range []struct{ peer, forwarded, origin, want string }{
		{"203.0.113.9:1", "", browser, "203.0.113.9"},
		{"203.0.113.9:1", "", "", ""},
		{"203.0.113.9:1", "198.51.100.7", browser, "203.0.113.9"},
		{"10.1.2.3:1", "198.51.100.7", browser, "198.51.100.7"},
		{"10.1.2.3:1", "6.6.6.6, 198.51.100.7, 10.9.9.9", browser, "198.51.100.7"},
		{"[::ffff:203.0.113.9]:1", "", browser, "203.0.113.9"},
		{"192.0.2.1:1", "198.51.100.7:4711", browser, "198.51.100.7"},
		{"192.0.2.2:1", "198.51.100.7", browser, "192.0.2.2"},
		{"10.1.2.3:1", "6.6.6.6, nonsense", browser, "10.1.2.3"},
		{"[2001:db8::7]:1", "", browser, "2001:db8::7"},
	} {
		if got := ip(tc.peer, tc.forwarded, tc.origin); got != tc.want {
			t.Errorf("peer %s, forwarded %q, origin %q: %q, want %q", tc.peer, tc.forwarded, tc.origin, got, tc.want)
		}
	}
}

func TestCountersAndMetrics(t *testing.T) {
	f := newFixture(t)
	f.do(post("/v1/batch", "web-key", `{"batch":[{"type":"track","userId":"u"},{"type":"track","userId":"u","event":"E"},{"type":"frob","userId":"u"}]}`))
	f.do(post("/v1/track", "no-such-key", track))
	if c := f.Gate.Counters("shop/web"); c.Rejected != 2 || c.LastRejected.IsZero() || c.LastRejection == "" {
		t.Errorf("%+v", c)
	}
	f.do(post("/v1/track", "off-key", track))
	if c := f.Gate.Counters("shop/off"); c.Rejected != 1 || !c.LastRejected.IsZero() || c.LastRejection != "" {
		t.Errorf("the status of a resumed Source reports the refusals from its suspension: %+v", c)
	}
	families, err := f.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprint(families)
	for _, want := range []string{"posthorn_ingest_calls_total", "no_event", "unknown_type", "unknown_write_key"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in the metrics", want)
		}
	}
	if strings.Contains(text, "no-such-key") || strings.Contains(text, "web-key") {
		t.Error("a write key is in the metrics")
	}
	// The series of a removed Source are removed, too. Its counters remain, as the store's counters do:
	// a Source with the same name continues them.
	f.set(liveconfig.NewView([]liveconfig.Revisioned{{Config: liveconfig.Config{Namespace: "shop",
		Sources: []liveconfig.Source{source_("new", "new-key", nil)}}}}))
	f.do(post("/v1/track", "new-key", track))
	families, _ = f.registry.Gather()
	if strings.Contains(fmt.Sprint(families), `"web"`) {
		t.Error("the series of a deleted Source still exist")
	}
	if c := f.Gate.Counters("shop/web"); c.Rejected != 2 {
		t.Errorf("counters of a deleted Source: got %d rejected calls, want 2", c.Rejected)
	}
}

// flood sends requests that wait in Append and returns how many were admitted and how many were
// refused as too many.
func (f *fixture) flood(key, body string, n int) (waiting func() int, refused *atomic.Int64) {
	refused = new(atomic.Int64)
	var group sync.WaitGroup
	var taken atomic.Int64
	for range n {
		group.Go(func() {
			if f.serve(post("/v1/batch", key, body)).Code == http.StatusOK {
				taken.Add(1)
			} else {
				refused.Add(1)
			}
		})
	}
	return func() int { group.Wait(); return int(taken.Load()) }, refused
}

// A flood cannot use more memory than the limit, and never all of it: a Source of another namespace still finds
// memory, also if its messages are larger than its bodies. A Source of the same namespace shares its part.
func TestMemoryIsBoundedAndShared(t *testing.T) {
	wide := `{"context":{"x":"` + strings.Repeat("x",
		20<<10) + `"},"batch":[` + strings.TrimSuffix(strings.Repeat(`{"type":"track","userId":"u","event":"E"},`, 20), ",") + `]}`
	for name, body := range map[string]string{
		"messages larger than the body": wide,
		"body":                          `{"batch":[{"type":"track","userId":"u","event":"E","properties":{"x":"` + strings.Repeat("x", 20<<10) + `"}}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.set(liveconfig.NewView([]liveconfig.Revisioned{
				{Config: liveconfig.Config{Namespace: "shop", Sources: []liveconfig.Source{source_("web", "web-key", nil),
					source_("ios", "ios-key", nil)}}},
				{Config: liveconfig.Config{Namespace: "bank", Sources: []liveconfig.Source{source_("app", "bank-key", nil)}}},
			}))
			f.memory.Max = 8 << 20
			f.block = make(chan struct{})
			const n = 1000
			waiting, refused := f.flood("web-key", body, n)
			other := make(chan int, 1)
			deadline := time.Now().Add(wait.Limit)
			// Every request that does not fit is refused while the others wait for storage.
			for held := int64(0); refused.Load() == 0 || held != f.memory.Used(); {
				held = f.memory.Used()
				if held > f.memory.Max/2 {
					t.Fatalf("one namespace holds %d of %d bytes", held, f.memory.Max)
				}
				if time.Now().After(deadline) {
					t.Fatal("nothing was refused")
				}
				time.Sleep(10 * time.Millisecond)
			}
			if w := f.serve(post("/v1/batch", "ios-key", batchOf(260, 28_000, 1_750))); w.Code != http.StatusServiceUnavailable {
				t.Errorf("another Source of the namespace was answered %d during the flood, want 503", w.Code)
			}
			go func() { other <- f.serve(post("/v1/batch", "bank-key", wide)).Code }()
			select {
			case s := <-other: // it must wait for storage, too
				t.Errorf("a Source of another namespace was answered %d during the flood", s)
			case <-time.After(100 * time.Millisecond):
			}
			close(f.block)
			if s := <-other; s != http.StatusOK {
				t.Errorf("a Source of another namespace was answered %d after the flood", s)
			}
			if taken := waiting(); taken == 0 || taken+int(refused.Load()) != n {
				t.Errorf("%d taken, %d refused", taken, refused.Load())
			}
			if held := f.memory.Used(); held != 0 {
				t.Errorf("%d bytes are still held", held)
			}
		})
	}
}

// batchOf is a batch of n calls with a context, each call padded by size bytes.
func batchOf(n, context, size int) string {
	call := `{"type":"track","userId":"u","event":"E","p":"` + strings.Repeat("p", size) + `"}`
	return `{"context":{"x":"` + strings.Repeat("x", context) + `"},"batch":[` + strings.TrimSuffix(strings.Repeat(call+",", n), ",") + `]}`
}

// A batch that would make more than 16 times its body, and more than 1 MiB, is
// refused before anything is stored, whatever the encoding of its body.
func TestAmplificationIsRefusedBeforeStoring(t *testing.T) {
	for name, tc := range map[string]struct {
		body     string
		accepted int
	}{
		"the review's 166 bytes":       {batchOf(269, 31_000, 0), 0},
		"the review's 128 KB":          {batchOf(2500, 31_000, 0), 0},
		"just below 1 MiB":             {batchOf(33, 31_000, 0), 33},
		"just below 16 times the body": {batchOf(260, 28_000, 1_750), 260},
		"no context":                   {batchOf(2500, 0, 100), 2500},
	} {
		t.Run(name, func(t *testing.T) {
			for _, zipped := range []bool{false, true} {
				f := newFixture(t)
				r := post("/v1/batch", "web-key", tc.body)
				if zipped {
					r = post("/v1/batch", "web-key", zip(tc.body), "Content-Encoding", "gzip")
				}
				appends := 0
				store := f.Append
				f.Append = func(ctx context.Context, m []queue.Message) ([]bool, error) { appends++; return store(ctx, m) }
				w := f.serve(r)
				if tc.accepted == 0 {
					if w.Code != http.StatusRequestEntityTooLarge || !strings.Contains(w.Body.String(), `"code":"batch_too_large"`) {
						t.Errorf("gzip %v: answer %d %.200s, want 413 batch_too_large", zipped, w.Code, w.Body)
					}
					if appends != 0 {
						t.Errorf("gzip %v: the store was called %d times, want never", zipped, appends)
					}
				} else if w.Code != http.StatusOK || strings.Contains(w.Body.String(), "rejected") {
					t.Errorf("gzip %v: answer %d %.200s, want 200 without rejections", zipped, w.Code, w.Body)
				}
				if len(f.stored) != tc.accepted {
					t.Errorf("gzip %v: %d messages stored, want %d", zipped, len(f.stored), tc.accepted)
				}
				if held := f.memory.Used(); held != 0 {
					t.Errorf("gzip %v: %d bytes are still reserved", zipped, held)
				}
			}
		})
	}
}

// While a request is stored, its reserved memory covers its messages and each copy that the store
// makes of them.
func TestMemoryIsReservedForWhatARequestMakes(t *testing.T) {
	for name, body := range map[string]string{
		"a small body with a large context": batchOf(33, 31_000, 0),
		"the largest batch":                 batchOf(260, 28_000, 1_750),
		"many small calls":                  batchOf(2500, 0, 100),
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			made, least := 0, int64(1<<62)
			f.Append = func(_ context.Context, messages []queue.Message) ([]bool, error) {
				for _, m := range messages {
					made += len(m.Body)
				}
				least = min(least, f.memory.Used())
				return nil, nil
			}
			if w := f.serve(post("/v1/batch", "web-key", body)); w.Code != http.StatusOK {
				t.Fatalf("answer %d %s", w.Code, w.Body)
			}
			if want := int64((1 + storeCopies) * made); least < want || least > 2*want {
				t.Errorf("%d bytes were reserved for messages of %d bytes; want %d, at most twice that", least, made, want)
			}
		})
	}
}

// A request that needs more memory than one Source may have is accepted alone.
func TestALargeRequestFitsIntoASmallBudget(t *testing.T) {
	f := newFixture(t)
	f.memory.Max = 4 << 20
	if w := f.serve(post("/v1/batch", "web-key", batchOf(260, 28_000, 1_750))); w.Code != http.StatusOK || len(f.stored) != 260 {
		t.Errorf("answer %d %s, %d messages stored", w.Code, w.Body, len(f.stored))
	}
}

// The rate counts 4 KiB of messages as one call at least.
func TestTheRateCountsBytes(t *testing.T) {
	f := newFixture(t) // 10 calls a second, 20 at once
	if w := f.serve(post("/v1/batch", "slow-key", batchOf(5, 10_000, 0))); w.Code != http.StatusOK {
		t.Fatalf("5 calls of 10 KB: %d %s", w.Code, w.Body)
	}
	// They cost 13 of 20 calls, so 8 more do not fit and 7 do.
	if w := f.serve(post("/v1/batch", "slow-key", batchOf(8, 0, 0))); w.Code != http.StatusTooManyRequests {
		t.Errorf("8 calls behind 5 of 10 KB each: %d, want 429", w.Code)
	}
	if w := f.serve(post("/v1/batch", "slow-key", batchOf(7, 0, 0))); w.Code != http.StatusOK {
		t.Errorf("7 calls behind 5 of 10 KB each: %d, want 200", w.Code)
	}
	if len(f.stored) != 12 {
		t.Errorf("%d messages stored, want 12", len(f.stored))
	}
}

// A flood delays only itself: however many of its requests wait, another Source's only call is
// stored next, and each Source has a bounded number of bytes in the store.
func TestAFloodWaitsForItself(t *testing.T) {
	for name, body := range map[string]string{
		"small messages":           batchOf(event.MaxBatchCalls, 0, 0),
		"the largest batches":      batchOf(260, 28_000, 1_750),
		"small bodies that become": batchOf(33, 31_000, 0),
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			type storing struct {
				source string
				bytes  int
			}
			in, out := make(chan storing), make(chan struct{})
			f.Append = func(_ context.Context, messages []queue.Message) ([]bool, error) {
				s := storing{source: messages[0].Source}
				for _, m := range messages {
					s.bytes += len(m.Body)
				}
				in <- s
				<-out
				return nil, nil
			}
			const n = 12
			flood, refused := f.flood("web-key", body, n)
			other := make(chan int)
			stored := (<-in).bytes
			go func() { other <- f.serve(post("/v1/track", "slow-key", track)).Code }()
			for s := range in { // Nothing of the flood is on the disk before the other call is stored.
				if s.source == "shop/slow" {
					break
				}
				if stored += s.bytes; stored > limits.MaxStoring {
					t.Errorf("the flood has %d bytes in the store, want at most %d", stored, limits.MaxStoring)
				}
			}
			close(out)
			go func() {
				for range in {
				}
			}()
			if s := <-other; s != http.StatusOK {
				t.Errorf("the other Source was answered %d", s)
			}
			if taken := flood(); taken != n || refused.Load() != 0 {
				t.Errorf("%d of %d requests of the flood were accepted, %d refused", taken, n, refused.Load())
			}
			close(in)
			if held := f.memory.Used(); held != 0 {
				t.Errorf("%d bytes are still reserved", held)
			}
		})
	}
}

// A large request is written in parts, so that a commit of another Source fits in
// between. When storage becomes full in the middle, the response gives the reason, so the
// request may be stored in part.
func TestLargeRequestsAreStoredInParts(t *testing.T) {
	f := newFixture(t)
	var parts []int
	store := f.Append
	f.Append = func(ctx context.Context, messages []queue.Message) ([]bool, error) {
		size := 0
		for _, m := range messages {
			size += len(m.Body)
		}
		parts = append(parts, size)
		return store(ctx, messages)
	}
	if w := f.serve(post("/v1/batch", "web-key", batchOf(260, 28_000, 1_750))); w.Code != http.StatusOK {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	total := 0
	for _, size := range parts {
		total += size
		if size > maxCommitPart {
			t.Errorf("a part of %d bytes, want at most %d", size, maxCommitPart)
		}
	}
	if len(f.stored) != 260 || len(parts) > 2*total/maxCommitPart {
		t.Errorf("%d messages of %d bytes in %d parts, want 260 in at most %d", len(f.stored), total, len(parts), 2*total/maxCommitPart)
	}
	appends := 0
	f.Append = func(context.Context, []queue.Message) ([]bool, error) {
		if appends++; appends == len(parts) {
			return nil, queue.ErrFull
		}
		return nil, nil
	}
	if w := f.serve(post("/v1/batch", "web-key", batchOf(260, 28_000, 1_750))); w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), admission.CodeStorageFailed) || w.Header().Get("Retry-After") == "" {
		t.Errorf("storage became full in the middle: %d %s, Retry-After %q; want 503 storage_failed", w.Code, w.Body, w.Header().Get("Retry-After"))
	}
	if !f.Gate.Counters("shop/web").StoragePressure {
		t.Error("the Source shows no storage pressure")
	}
}

func TestWhoSendsNothingHoldsLittle(t *testing.T) {
	f := newFixture(t)
	r, w := io.Pipe()
	request := post("/v1/batch", "web-key", "")
	request.Body, request.ContentLength = r, event.MaxBodyBytes
	done := make(chan int)
	go func() { done <- f.do(request).Code }()
	if _, err := w.Write([]byte(`{"batch":[`)); err != nil { // it is being read
		t.Fatal(err)
	}
	if held := f.memory.Used(); held > 65<<10 { // the headers among them
		t.Errorf("%d bytes held for 10 that were sent", held)
	}
	_ = w.CloseWithError(io.ErrUnexpectedEOF)
	if s := <-done; s != http.StatusBadRequest {
		t.Error(s)
	}
}

func TestSlowBodiesEnd(t *testing.T) {
	f := newFixture(t)
	// The server reads the headers at any time, so the timeout ends the wait for the body only.
	addr, _ := serve(t, f, func(s *http.Server) { s.ReadHeaderTimeout, s.ReadTimeout = wait.Limit, 100*time.Millisecond })
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := fmt.Fprintf(c, "POST /v1/track HTTP/1.1\r\nHost: x\r\nAuthorization: Basic %s\r\nContent-Length: 1000\r\n\r\n{", base64.StdEncoding.EncodeToString([]byte("web-key:"))); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(wait.Limit))
	answer, _ := io.ReadAll(c)
	if !strings.HasPrefix(string(answer), "HTTP/1.1 408 ") || !strings.Contains(string(answer), admission.CodeTooSlow) || !strings.Contains(string(answer), "Connection: close") {
		t.Errorf("%s", answer)
	}
}

// While several Sources store, one that stores more than bulkRate pauses after
// each further commit, three times as long as that took; alone it does not pause.
func TestBulkLeavesTheDiskToOthers(t *testing.T) {
	const syncTime = 10 * time.Millisecond
	for name, tc := range map[string]struct {
		beside      bool
		size        int // of each call of the bulk, 100 a batch
		least, most time.Duration
	}{
		"alone":                  {false, 2_000, 200 * syncTime, 201 * syncTime},
		"beside another":         {true, 2_000, 450 * syncTime, 4 * 201 * syncTime},
		"beside another, little": {true, 10, 200 * syncTime, 201 * syncTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t)
				f.Append = func(context.Context, []queue.Message) ([]bool, error) {
					time.Sleep(syncTime)
					return nil, nil
				}
				stop := func() time.Duration { return 0 }
				if tc.beside {
					stop = f.sendBeside(t)
				}
				begin := time.Now()
				for range 200 {
					if w := f.serve(post("/v1/batch", "web-key", batchOf(100, 0, tc.size))); w.Code != http.StatusOK {
						t.Fatalf("%d %s", w.Code, w.Body)
					}
				}
				if took := time.Since(begin); took < tc.least || took > tc.most {
					t.Errorf("200 batches took %v, want %v to %v", took, tc.least, tc.most)
				}
				if slowest := stop(); slowest > syncTime {
					t.Errorf("a call of the other Source took %v, want %v", slowest, syncTime)
				}
			})
		})
	}
}

// While several Sources send, one whose requests are refused in bulk pauses after each of them,
// three times as long as the request computed, until its rate is low; alone it does not pause.
func TestRefusedBulkLeavesTheCPUToOthers(t *testing.T) {
	const requests, calls, work = 200, 10, 10 * time.Millisecond
	for name, tc := range map[string]struct {
		beside      bool
		least, most time.Duration
	}{
		"alone":          {false, requests * work, requests * work},
		"beside another": {true, 2 * requests * work, 4 * requests * work},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t)
				f.Skip = func(source string, _ *event.Call) []string {
					if source == "web" {
						time.Sleep(work / calls)
					}
					return nil
				}
				f.Append = func(_ context.Context, messages []queue.Message) ([]bool, error) {
					if strings.HasSuffix(messages[0].Source, "/web") {
						return nil, queue.ErrFull
					}
					return nil, nil
				}
				stop := func() time.Duration { return 0 }
				if tc.beside {
					stop = f.sendBeside(t)
				}
				begin := time.Now()
				for range requests {
					if w := f.serve(post("/v1/batch", "web-key", batchOf(calls, 0, 20_000))); w.Code != http.StatusServiceUnavailable {
						t.Fatalf("%d %s", w.Code, w.Body)
					}
				}
				if took := time.Since(begin); took < tc.least || took > tc.most {
					t.Errorf("%d refused requests took %v, want %v to %v", requests, took, tc.least, tc.most)
				}
				stop()
			})
		})
	}
}

// sendBeside sends a call of another Source every 500 ms, in a bubble of synctest. The result stops
// that, and returns the longest time of a call.
func (f *fixture) sendBeside(t *testing.T) (stop func() time.Duration) {
	var slowest time.Duration
	ended := make(chan struct{})
	var sender sync.WaitGroup
	sender.Go(func() {
		for tick := time.NewTicker(500 * time.Millisecond); ; {
			select {
			case <-ended:
				return
			case <-tick.C:
			}
			begin := time.Now()
			if w := f.serve(post("/v1/track", "slow-key", track)); w.Code != http.StatusOK {
				t.Errorf("the other Source was answered %d", w.Code)
			}
			slowest = max(slowest, time.Since(begin))
		}
	})
	time.Sleep(time.Second)
	return func() time.Duration {
		close(ended)
		sender.Wait()
		return slowest
	}
}

func TestAPanicEndsOneRequest(t *testing.T) {
	f := newFixture(t)
	skip := f.Skip
	f.Skip = func(string, *event.Call) []string { panic("secret") }
	for range 100 { // more than there are turns
		w := f.do(post("/v1/track", "web-key", track))
		if w.Code != http.StatusInternalServerError || !strings.Contains(w.Body.String(), codeInternal) ||
			strings.Contains(w.Body.String(), "secret") {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
	}
	f.Skip = skip
	if w := f.do(post("/v1/track", "web-key", track)); w.Code != 200 || f.memory.Used() != 0 {
		t.Errorf("%d %s, %d held", w.Code, w.Body, f.memory.Used())
	}
}

func TestAClientThatLeavesDoesNotStopTheStore(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f.Append = func(ctx context.Context, _ []queue.Message) ([]bool, error) {
		if _, bounded := ctx.Deadline(); !bounded {
			t.Error("the wait for storage has no bound")
		}
		return nil, ctx.Err()
	}
	if w := f.do(post("/v1/track", "web-key", track).WithContext(ctx)); w.Code != 200 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

func TestAnAnswerIsNotMuchLargerThanItsRequest(t *testing.T) {
	w := newFixture(t).do(post("/v1/batch", "web-key", `{"batch":[`+strings.Repeat("0,", 200_000)+`0]}`))
	if w.Code != 200 || w.Body.Len() > 1<<20 {
		t.Errorf("%d, %d bytes", w.Code, w.Body.Len())
	}
}

func TestPressureEnds(t *testing.T) {
	f := newFixture(t)
	f.err = queue.ErrFull
	f.do(post("/v1/track", "web-key", track))
	if !f.Gate.Counters("shop/web").StoragePressure {
		t.Error("no pressure")
	}
	f.now = f.now.Add(5 * time.Minute)
	if f.Gate.Counters("shop/web").StoragePressure {
		t.Error("pressure, long after the last call")
	}
}

// serve runs the handler behind the real server.
func serve(t *testing.T, f *fixture, changes ...func(*http.Server)) (addr string, server *http.Server) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server = NewServer(f)
	for _, change := range changes {
		change(server)
	}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	return l.Addr().String(), server
}

func TestProtocols(t *testing.T) {
	f := newFixture(t)
	addr, _ := serve(t, f)
	do := func(name string, transport *http.Transport, change func(*http.Request)) {
		t.Helper()
		t.Cleanup(transport.CloseIdleConnections)
		for range 2 { // the second one on the same connection
			r, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr+"/v1/track", strings.NewReader(track))
			r.SetBasicAuth("web-key", "")
			if change != nil {
				change(r)
			}
			resp, err := (&http.Client{Transport: transport}).Do(r)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Errorf("%s: %d %s", name, resp.StatusCode, body)
			}
		}
	}
	do("HTTP/1.1", &http.Transport{}, nil)
	do("chunked", &http.Transport{}, func(r *http.Request) { r.ContentLength = -1 })
	do("expect", &http.Transport{ExpectContinueTimeout: 30 * time.Second}, func(r *http.Request) { r.Header.Set("Expect", "100-continue") })
	var h2c http.Protocols
	h2c.SetUnencryptedHTTP2(true)
	do("HTTP/2 in clear text", &http.Transport{Protocols: &h2c}, nil)
	if len(f.stored) != 8 {
		t.Errorf("%d stored", len(f.stored))
	}
}

// A call that is being stored when the server is asked to stop is answered after it is durable.
func TestGracefulStop(t *testing.T) {
	f := newFixture(t)
	f.block = make(chan struct{})
	addr, server := serve(t, f)
	status := make(chan int, 1)
	go func() {
		r, _ := http.NewRequest(http.MethodPost, "http://"+addr+"/v1/track", strings.NewReader(track)) //nolint:noctx // a test
		r.SetBasicAuth("web-key", "")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			status <- 0
			return
		}
		resp.Body.Close()
		status <- resp.StatusCode
	}()
	for f.memory.Used() == 0 {
		time.Sleep(time.Millisecond)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- server.Shutdown(context.Background()) }()
	select {
	case s := <-status:
		t.Fatalf("answered %d before it was durable", s)
	case <-time.After(50 * time.Millisecond):
	}
	close(f.block)
	if s := <-status; s != 200 {
		t.Errorf("answered %d", s)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

func BenchmarkBatchOf20(b *testing.B) {
	f := newFixture(b)
	f.Append = func(context.Context, []queue.Message) ([]bool, error) { return nil, nil }
	call := `{"type":"track","event":"Order Completed","userId":"u","messageId":"m","timestamp":"2020-01-01T00:00:00.000Z","properties":{"total":27.5,"currency":"USD","products":[{"sku":"a","price":19},{"sku":"b","price":3}]},"context":{"library":{"name":"x","version":"1"}}}`
	body := `{"batch":[` + strings.TrimSuffix(strings.Repeat(call+",", 20), ",") + `]}`
	b.ReportAllocs()
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if w := f.do(post("/v1/batch", "web-key", body)); w.Code != 200 {
			b.Fatal(w.Body)
		}
	}
}

// Times of past calls are not corrected, and calls with an unreadable time are counted.
func TestPastCallsAndDefects(t *testing.T) {
	f := newFixture(t)
	const calls = `{"batch":[{"type":"page","userId":"u","timestamp":"2023-11-14T20:00:00Z","sentAt":"2023-11-14T21:00:00Z"},{"type":"page","userId":"u","timestamp":"x"}]}`
	for path, want := range map[string]string{"/v1/batch": `"timestamp":"2023-11-14T21:13:20.000Z"`,
		"/v1/import": `"timestamp":"2023-11-14T20:00:00.000Z"`} {
		before := len(f.stored)
		if w := f.do(post(path, "web-key", calls)); w.Code != http.StatusOK || len(f.stored) != before+2 ||
			!strings.Contains(string(f.stored[before].Body), want) {
			t.Errorf("%s: got status %d and messages %v, want one with %s", path, w.Code, f.stored[before:], want)
		}
	}
	if got := f.Gate.Counters("shop/web").Defects; got.Timestamp != 2 || got.Clock != 0 || got.SentAt != 0 {
		t.Errorf("defects: got %+v, want 2 timestamps", got)
	}
}
