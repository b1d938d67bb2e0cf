package ingest

import (
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"slices"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/dispatcher/intake/listen"
)

// Heads of 64 KB are served. Heads of up to 256 KB get 431, which an allowed page can read, and their calls are
// counted for their Source; the connection remains open. With both protocols, in clear text and over TLS.
func TestHeads(t *testing.T) {
	f := newFixture(t)
	mux := http.NewServeMux()
	f.Mount(mux)
	server := listen.New(NewServer(Normalize(mux)), 100, slog.New(slog.DiscardHandler))
	certificate := httptest.NewUnstartedServer(nil)
	certificate.StartTLS()
	t.Cleanup(certificate.Close)
	roots := certificate.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	t.Cleanup(func() { _ = server.Close() })
	const body = `{"writeKey":"web-key","batch":[{"type":"track","userId":"u","event":"E"},{"type":"track","userId":"u","event":"E"}]}`
	cookies := func(n, size int) []string {
		return slices.Repeat([]string{"name=" + strings.Repeat("v", size-len("name="))}, n)
	}
	for _, encrypted := range []bool{false, true} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		url := "http://" + l.Addr().String()
		if encrypted {
			url = "https://" + l.Addr().String()
			go func() { _ = server.ServeTLS(l, certificate.TLS) }()
		} else {
			go func() { _ = server.Serve(l) }()
		}
		for _, second := range []bool{false, true} {
			var protocols http.Protocols
			protocols.SetHTTP1(!second)
			protocols.SetHTTP2(second && encrypted)
			protocols.SetUnencryptedHTTP2(second && !encrypted)
			transport := &http.Transport{Protocols: &protocols,
				TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: "example.com"}}
			t.Cleanup(transport.CloseIdleConnections)
			reused := true
			do := func(method, path string, header http.Header) (resp *http.Response, text string) {
				t.Helper()
				trace := httptrace.ClientTrace{GotConn: func(c httptrace.GotConnInfo) { reused = c.Reused }}
				var sent io.Reader
				if method == http.MethodPost {
					sent = strings.NewReader(body)
				}
				r, _ := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), &trace), method, url+path, sent)
				r.Header = header.Clone()
				r.Header.Set("Origin", "https://shop.example")
				resp, err := (&http.Client{Transport: transport}).Do(r)
				if err != nil {
					t.Fatalf("TLS %v, HTTP/2 %v: got error %v, want a response", encrypted, second, err)
				}
				defer resp.Body.Close()
				answer, _ := io.ReadAll(resp.Body)
				return resp, string(answer)
			}
			if resp, text := do(http.MethodPost, "/v1/b", http.Header{}); resp.StatusCode != http.StatusOK {
				t.Fatalf("got %d %s, want 200", resp.StatusCode, text)
			}
			for name, c := range map[string]struct {
				header http.Header
				served bool
			}{
				"a cookie of 9 KB":         {http.Header{"Cookie": cookies(1, 9<<10)}, true},
				"a cookie of 63 KB":        {http.Header{"Cookie": cookies(1, 63<<10)}, true},
				"a cookie of 65 KB":        {http.Header{"Cookie": cookies(1, 65<<10)}, false},
				"a cookie of 250 KB":       {http.Header{"Cookie": cookies(1, 250<<10)}, false},
				"1,000 cookies, 50 KB":     {http.Header{"Cookie": {strings.Join(cookies(1000, 50), "; ")}}, true},
				"5,000 cookies, 245 KB":    {http.Header{"Cookie": {strings.Join(cookies(5000, 48), "; ")}}, false},
				"3,000 Cookie headers":     {http.Header{"Cookie": cookies(3000, 40)}, false},
				"a Referer of 60 KB":       {http.Header{"Referer": {"https://shop.example/?" + strings.Repeat("q", 60<<10)}}, true},
				"a Referer of 100 KB":      {http.Header{"Referer": {"https://shop.example/?" + strings.Repeat("q", 100<<10)}}, false},
				"an Authorization of 100K": {http.Header{"Authorization": {"Basic " + strings.Repeat("q", 100<<10)}}, false},
			} {
				name = fmt.Sprintf("TLS %v, HTTP/2 %v, %s", encrypted, second, name)
				before := f.Gate.Counters("shop/web").Rejected
				want, code, count := http.StatusOK, "success", int64(0)
				if !c.served {
					want, code, count = http.StatusRequestHeaderFieldsTooLarge, `"headers_too_large"`, 2
				}
				resp, text := do(http.MethodPost, "/v1/b", c.header)
				if resp.StatusCode != want || !strings.Contains(text, code) {
					t.Errorf("%s: got %d %s, want %d", name, resp.StatusCode, text, want)
				}
				if got := f.Gate.Counters("shop/web").Rejected - before; got != count {
					t.Errorf("%s: got %d rejected calls, want %d", name, got, count)
				}
				if got := resp.Header.Get(headerAllowedOrigin); got != "https://shop.example" {
					t.Errorf("%s: got Access-Control-Allow-Origin %q, want the page's origin", name, got)
				}
				for path, method := range map[string]string{"/v1/b": http.MethodOptions, "/v1/projects/web-key/settings": http.MethodGet} {
					want := want
					if c.served && method == http.MethodOptions {
						want = http.StatusNoContent
					}
					if resp, text := do(method, path, c.header); resp.StatusCode != want || resp.Header.Get(headerAllowedOrigin) == "" {
						t.Errorf("%s, %s %s: got %d %s with headers %v, want %d with CORS headers", name, method, path, resp.StatusCode, text, resp.Header, want)
					}
				}
			}
			before := f.Gate.Counters("shop/web").Rejected
			_, _ = do(http.MethodPost, "/v1/b?"+strings.Repeat("q", 100<<10), http.Header{})
			if got := f.Gate.Counters("shop/web").Rejected - before; got != 2 {
				t.Errorf("a target of 100 KB: got %d rejected calls, want 2", got)
			}
			reused = false
			if resp, text := do(http.MethodPost, "/v1/b", http.Header{}); resp.StatusCode != http.StatusOK || !reused {
				t.Errorf("TLS %v, HTTP/2 %v, the next call: got %d %s on the same connection %v, want 200 and true", encrypted, second, resp.StatusCode, text, reused)
			}
			for path, want := range map[string]int{"/v1/nothing": 431, "/openapi.yaml": 431} {
				if resp, _ := do(http.MethodGet, path, http.Header{"Cookie": cookies(1, 65<<10)}); resp.StatusCode != want {
					t.Errorf("GET %s: got %d, want %d", path, resp.StatusCode, want)
				}
			}
		}
	}
	if text := f.Gate.Counters("shop/web").LastRejection; !strings.HasPrefix(text, "headers_too_large: ") {
		t.Errorf("last rejection: got %q, want headers_too_large", text)
	}
}
