package ingest

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/intake/admission"
)

func getSettings(path string, headers ...string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, path, nil)
	r.Host = "track.example"
	for i := 0; i+1 < len(headers); i += 2 {
		if headers[i] == "Host" {
			r.Host = headers[i+1]
			continue
		}
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

// The document has the key and the host, and keeps the libraries' own metrics from their vendor.
func TestSettingsDocument(t *testing.T) {
	const settings = "/v1/projects/web-key/settings"
	for _, tc := range []struct{ name, path, publicHost, host, want string }{
		{"Host header", settings, "", "track.example", `{"apiKey":"web-key","apiHost":"track.example/v1"}`},
		{"Host header with a port", settings, "", "track.example:8443", `{"apiKey":"web-key","apiHost":"track.example:8443/v1"}`},
		{"without /v1", "/projects/web-key/settings", "", "track.example", `{"apiKey":"web-key","apiHost":"track.example/v1"}`},
		{"slash at the end", settings + "/", "", "track.example", `{"apiKey":"web-key","apiHost":"track.example/v1"}`},
		{"query", settings + "?t=1", "", "track.example", `{"apiKey":"web-key","apiHost":"track.example/v1"}`},
		{"public host", settings, "calls.example", "evil.example", `{"apiKey":"web-key","apiHost":"calls.example/v1"}`},
		{"public host, bad Host header", settings, "calls.example", "a/b", `{"apiKey":"web-key","apiHost":"calls.example/v1"}`},
		{"localhost", settings, "", "localhost:8080", `{"apiKey":"web-key","apiHost":"localhost:8080/v1","protocol":"http"}`},
		{"loopback", settings, "", "127.0.0.1:8080", `{"apiKey":"web-key","apiHost":"127.0.0.1:8080/v1","protocol":"http"}`},
		{"loopback IPv6", settings, "", "[::1]:8080", `{"apiKey":"web-key","apiHost":"[::1]:8080/v1","protocol":"http"}`},
		{"IPv6", settings, "", "[2001:db8::1]", `{"apiKey":"web-key","apiHost":"[2001:db8::1]/v1"}`},
		{"suspended Source", "/v1/projects/off-key/settings", "", "track.example", `{"apiKey":"off-key","apiHost":"track.example/v1"}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFixture(t)
			f.PublicHost = tc.publicHost
			w := f.do(getSettings(tc.path, "Host", tc.host))
			want := `{"integrations":{"Segment.io":` + tc.want + `},"plan":{},"metrics":{"sampleRate":0}}` + "\n"
			if w.Code != http.StatusOK {
				t.Errorf("status: got %d %s, want 200", w.Code, w.Body)
			}
			if diff := cmp.Diff(want, w.Body.String()); diff != "" {
				t.Errorf("document (-want +got):\n%s", diff)
			}
			if got := w.Header().Get("Content-Type"); got != "application/json" {
				t.Errorf("Content-Type: got %q, want application/json", got)
			}
			cache := "no-store"
			if tc.publicHost != "" {
				cache = "max-age=300"
			}
			if got := w.Header().Get("Cache-Control"); got != cache {
				t.Errorf("Cache-Control: got %q, want %q", got, cache)
			}
		})
	}
}

// A client that gets no settings sends its calls to its vendor, so only a certainly unknown key is
// refused.
func TestSettingsWithoutAConfig(t *testing.T) {
	for name, prepare := range map[string]func(*fixture){
		"no config yet": func(f *fixture) { f.set(nil) },
		"removed key":   func(f *fixture) { f.remove("old-key", "web") },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			prepare(f)
			if w := f.do(getSettings("/v1/projects/old-key/settings")); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), `"apiHost":"track.example/v1"`) {
				t.Errorf("answer: got %d %s, want 200 with the host", w.Code, w.Body)
			}
		})
	}
}

func TestSettingsRefused(t *testing.T) {
	const settings = "/v1/projects/web-key/settings"
	for _, tc := range []struct {
		name    string
		request *http.Request
		status  int
		code    string
	}{
		{"unknown key", getSettings("/v1/projects/unknown-key/settings"), 401, admission.CodeUnknownKey},
		{"markup as a key", getSettings("/v1/projects/%3Cscript%3E/settings"), 401, admission.CodeUnknownKey},
		{"no key", getSettings("/v1/projects//settings"), 404, admission.CodeNotFound},
		{"two keys", getSettings("/v1/projects/a/b/settings"), 404, admission.CodeNotFound},
		{"escaped slash", getSettings("/v1/projects/a%2Fb/settings"), 404, admission.CodeNotFound},
		{"another document", getSettings("/v1/projects/web-key/other"), 404, admission.CodeNotFound},
		{"the library itself", getSettings("/analytics.js/v1/web-key/analytics.min.js"), 404, admission.CodeNotFound},
		{"path in the Host", getSettings(settings, "Host", "a.example/b"), 400, codeInvalidHost},
		{"markup in the Host", getSettings(settings, "Host", `"><script>`), 400, codeInvalidHost},
		{"user in the Host", getSettings(settings, "Host", "user@evil.example"), 400, codeInvalidHost},
		{"no Host", getSettings(settings, "Host", ""), 400, codeInvalidHost},
		{"long Host", getSettings(settings, "Host", strings.Repeat("a", 300)), 400, codeInvalidHost},
		{"POST", post(settings, "web-key", track), 405, admission.CodeMethod},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFixture(t)
			w := f.serve(tc.request)
			var answer struct{ Error struct{ Code string } }
			if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil {
				t.Fatalf("body %s: %v", w.Body, err)
			}
			if w.Code != tc.status || answer.Error.Code != tc.code {
				t.Errorf("answer: got %d %s, want %d %s", w.Code, answer.Error.Code, tc.status, tc.code)
			}
			if got := w.Header().Get("Cache-Control"); tc.status != 404 && got != "no-store" {
				t.Errorf("Cache-Control: got %q, want no-store", got)
			}
			if got := w.Header().Get("Www-Authenticate"); got != "" {
				t.Errorf("Www-Authenticate: got %q, want none: a browser would ask for a password", got)
			}
			if tc.status == 405 && w.Header().Get("Allow") != settingsMethods {
				t.Errorf("Allow: got %q, want %q", w.Header().Get("Allow"), settingsMethods)
			}
		})
	}
}

// A typing error in a key is visible to the administrator, as for calls, and rejects no calls.
func TestSettingsCountUnknownKeys(t *testing.T) {
	f := newFixture(t)
	for range 3 {
		f.do(getSettings("/v1/projects/unknown-key/settings"))
	}
	list := f.Gate.UnknownKeys.List(f.now)
	if len(list) != 1 || list[0].Requests != 3 || list[0].Prefix != "un" {
		t.Errorf("unknown keys: got %+v, want one with 3 requests", list)
	}
	if c := f.Gate.Counters(""); c.Rejected != 0 {
		t.Errorf("rejected calls: got %d, want 0", c.Rejected)
	}
}

func TestSettingsOrigins(t *testing.T) {
	const settings = "/v1/projects/web-key/settings"
	for _, tc := range []struct {
		name, path, origin string
		status             int
		readable           bool
	}{
		{"allowed", settings, "https://shop.example", 200, true},
		{"not allowed", settings, "https://evil.example", 403, false},
		{"of another Source", "/v1/projects/off-key/settings", "https://shop.example", 403, false},
		{"same host", settings, "https://track.example", 200, true},
		{"unknown key", "/v1/projects/unknown-key/settings", "https://shop.example", 401, true},
		{"app", settings, "", 200, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFixture(t)
			r := getSettings(tc.path)
			if tc.origin != "" {
				r.Header.Set("Origin", tc.origin)
			}
			w := f.do(r)
			if w.Code != tc.status {
				t.Errorf("status: got %d %s, want %d", w.Code, w.Body, tc.status)
			}
			if got := w.Header().Get(headerAllowedOrigin); (got != "") != tc.readable || got != "" && got != tc.origin {
				t.Errorf("%s: got %q, readable should be %t", headerAllowedOrigin, got, tc.readable)
			}
			if got := w.Header().Get("Vary"); got != "Origin" {
				t.Errorf("Vary: got %q, want Origin: a cache may keep the answer", got)
			}
		})
	}
	t.Run("preflight", func(t *testing.T) {
		f := newFixture(t)
		r := getSettings(settings, "Origin", "https://shop.example", "Access-Control-Request-Method", "GET", "Access-Control-Request-Headers",
			"cache-control")
		r.Method = http.MethodOptions
		w := f.do(r)
		if w.Code != http.StatusNoContent || w.Header().Get("Access-Control-Allow-Methods") != settingsMethods ||
			w.Header().Get("Access-Control-Allow-Headers") != "cache-control" {
			t.Errorf("preflight: got %d %v, want 204 that allows GET with Cache-Control", w.Code, w.Header())
		}
	})
}

// A body is not read: it costs its sender the connection.
func TestSettingsReadNoBody(t *testing.T) {
	f := newFixture(t)
	r := getSettings("/v1/projects/web-key/settings")
	read := false
	r.Body = io.NopCloser(readerFunc(func([]byte) (int, error) { read = true; return 0, io.EOF }))
	r.ContentLength = 1 << 30
	w := f.serve(r)
	if read {
		t.Error("the body was read")
	}
	if got := w.Header().Get("Connection"); got != "close" {
		t.Errorf("Connection: got %q, want close", got)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

// The settings are cheaper than a call.
func TestSettingsAllocations(t *testing.T) {
	f := newFixture(t)
	r := getSettings("/v1/projects/web-key/settings", "Origin", "https://shop.example")
	if n := testing.AllocsPerRun(100, func() { f.ServeHTTP(httptest.NewRecorder(), r) }); n > 45 {
		t.Errorf("allocations of an answer: got %.0f, want at most 45", n)
	}
}

func TestCheckPublicHost(t *testing.T) {
	for host, ok := range map[string]bool{
		"track.example": true, "track.example:8443": true, "10.0.0.1": true, "[2001:db8::1]:443": true, "a_b.example": true,
		"": false, "https://track.example": false, "track.example/v1": false, "a b": false, ":8080": false, "a:": false, "a:123456": false,
		"a@b": false, "-a": false,
	} {
		if err := CheckPublicHost(host); (err == nil) != ok {
			t.Errorf("host %q: got error %v, want accepted: %t", host, err, ok)
		}
	}
}
