package egress

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

const canary = "c4n4ry-s3cr3t-0123456789"

func newClient(t testing.TB, allow ...string) *Client {
	t.Helper()
	p, err := ParsePolicy(allow)
	if err != nil {
		t.Fatal(err)
	}
	c := New(Options{Policy: p})
	t.Cleanup(c.Close)
	return c
}

func prepareURL(t testing.TB, c *Client, url string) *Endpoint {
	t.Helper()
	e, err := c.Prepare(liveconfig.Endpoint{Name: "primary", URL: liveconfig.NewSecret(url)})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func withTimeout(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestPostSendsExactRequest(t *testing.T) {
	type seen struct {
		method, target, host, body, remote string
		header                             http.Header
	}
	requests := make(chan seen, 8)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		requests <- seen{r.Method, r.RequestURI, r.Host, string(body), r.RemoteAddr, r.Header}
		_, _ = io.WriteString(w, "ok")
	}))
	defer server.Close()
	c := newClient(t, "127.0.0.0/8")
	e, err := c.Prepare(liveconfig.Endpoint{
		Name: "primary", URL: liveconfig.NewSecret(server.URL + "/in/ü x?a=1&b=é f"),
		Headers: []liveconfig.Header{{Name: "X-Env", Value: liveconfig.NewSecret("prod")}, {Name: "X-Team", Value: liveconfig.NewSecret("crm")}},
	})
	if err != nil {
		t.Fatal(err)
	}
	body := `{"a":"<&>\u2028"}`
	var remotes []string
	for range 3 {
		r := c.Post(withTimeout(t, 30*time.Second), e, []Header{{"X-Signature", "abc"}, {"Idempotency-Key", "id\r\nX-Evil: 1"}}, []byte(body))
		if r.Reason != "" || r.StatusCode != 200 || r.Message != "" || !r.Sent || r.RemoteAddr != server.Listener.Addr().String() {
			t.Fatalf("unexpected result %+v", r)
		}
		got := <-requests
		remotes = append(remotes, got.remote)
		if got.method != "POST" || got.target != "/in/%C3%BC%20x?a=1&b=%C3%A9%20f" || got.host != server.Listener.Addr().String() ||
			got.body != body {
			t.Errorf("unexpected request %+v", got)
		}
		want := map[string]string{
			"Content-Type": "application/json", "User-Agent": "Posthorn/1.0", "X-Env": "prod", "X-Team": "crm", "X-Signature": "abc",
			"Idempotency-Key": "id%0D%0AX-Evil: 1", "X-Evil": "", "Content-Length": "17", "Accept-Encoding": "", "Expect": "",
		}
		for name, value := range want {
			if got.header.Get(name) != value {
				t.Errorf("header %s = %q, want %q", name, got.header.Get(name), value)
			}
		}
	}
	if remotes[0] != remotes[1] || remotes[1] != remotes[2] {
		t.Errorf("connections were not used again: %v", remotes)
	}
}
