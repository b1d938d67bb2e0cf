package egress

import (
	"compress/gzip"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/check"
)

// compressing returns an endpoint of a receiver that answers 415 to compressed bodies if it refuses them, and the encoding
// of each request with the decoded body.
func compressing(t *testing.T, refuses bool) (*Client, *Endpoint, chan [2]string) {
	t.Helper()
	got := make(chan [2]string, 8)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body io.Reader = r.Body
		encoding := r.Header.Get("Content-Encoding")
		if encoding == "gzip" {
			var err error
			if body, err = gzip.NewReader(r.Body); err != nil {
				t.Errorf("read a compressed body: %v", err)
				return
			}
		}
		text, err := io.ReadAll(body)
		check.NoError(t, "read a body", err)
		got <- [2]string{encoding, string(text)}
		if refuses && encoding != "" {
			w.WriteHeader(http.StatusUnsupportedMediaType)
		}
	}))
	t.Cleanup(server.Close)
	c := newClient(t, "127.0.0.0/8")
	e, err := c.Prepare(liveconfig.Endpoint{Name: "primary", URL: liveconfig.NewSecret(server.URL), GZip: true})
	check.NoError(t, "prepare the endpoint", err)
	return c, e, got
}

func TestBodiesOf1KiBAreCompressed(t *testing.T) {
	c, e, got := compressing(t, false)
	random := make([]byte, minCompressed)
	for i := range random {
		random[i] = byte(rand.IntN(256))
	}
	for _, sent := range []struct{ name, body, encoding string }{
		{"a small body", strings.Repeat("a", minCompressed-1), ""},
		{"a body of 1 KiB", strings.Repeat("a", minCompressed), "gzip"},
		{"a large body", strings.Repeat(`{"a":1}`, 40_000), "gzip"},
		{"a body that does not become smaller", string(random), ""},
		{"a body after others", strings.Repeat("b", minCompressed), "gzip"},
	} {
		r := c.Post(withTimeout(t, 30*time.Second), e, []Header{{"X-Signature", "abc"}}, []byte(sent.body))
		check.Equal(t, sent.name+": status", r.StatusCode, 200)
		check.Equal(t, sent.name, <-got, [2]string{sent.encoding, sent.body})
	}
	check.Equal(t, "refused", e.CompressionRefused(), false)
}

// The attempt in which a receiver refuses the encoding ends with its answer to the same body without it.
func TestEndpointRefusesCompression(t *testing.T) {
	c, e, got := compressing(t, true)
	body := strings.Repeat("a", 2*minCompressed)
	for i, encodings := range [][]string{{"gzip", ""}, {""}} {
		r := c.Post(withTimeout(t, 30*time.Second), e, nil, []byte(body))
		check.Equal(t, "status", r.StatusCode, 200)
		for _, encoding := range encodings {
			check.Equal(t, "a request", <-got, [2]string{encoding, body})
		}
		check.Equal(t, "further requests", len(got), 0)
		if i == 0 {
			check.Equal(t, "refused", e.CompressionRefused(), true)
		}
	}
}
