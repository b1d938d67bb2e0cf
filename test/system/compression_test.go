package system

import (
	"compress/gzip"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// The signature of a compressed body is that of the body itself, and a receiver that refuses the encoding gets it uncompressed.
func TestCompression(t *testing.T) {
	r, accepts := newReceiver(t), true
	encodings := make(chan string, 8)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		encoding := req.Header.Get("Content-Encoding")
		encodings <- encoding
		if encoding != "" && !accepts {
			w.WriteHeader(http.StatusUnsupportedMediaType)
			return
		}
		if encoding != "" {
			body, err := gzip.NewReader(req.Body)
			if err != nil {
				t.Errorf("read a compressed body: %v", err)
				return
			}
			req.Body = body
		}
		r.serve(w, req)
	}))
	t.Cleanup(server.Close)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", server.URL, "  delivery: {compression: GZip}\n")})
	call := `{"userId":"u","event":"E","properties":{"text":"` + strings.Repeat("a", 1024) + `"}}`
	for _, want := range [][]string{{"gzip"}, {"gzip", ""}, {""}} {
		accepts = len(want) == 1 && want[0] == "gzip"
		p.mustPost("/v1/track", call)
		for _, encoding := range want {
			if got := <-encodings; got != encoding {
				t.Errorf("encoding: got %q, want %q", got, encoding)
			}
		}
	}
	p.arrive(r, 3)
	if delivered, _, dead, _ := p.ledger("crm"); delivered != 3 || dead != 0 || r.unsigned != 0 {
		t.Errorf("got %d delivered, %d dead letters and %d unsigned, want 3, 0 and 0", delivered, dead, r.unsigned)
	}
	if d, err := p.destination("crm"); err != nil || len(d.Status.Endpoints) != 1 || !d.Status.Endpoints[0].CompressionRefused {
		t.Errorf("status: got %+v and error %v, want compressionRefused", d.Status.Endpoints, err)
	}
	if out, _, _ := cli(t, "", "why", "crm", "--admin", p.Admin); !strings.Contains(out, "answered 415 to a compressed request") {
		t.Errorf("why: got\n%s\nwant that the endpoint refuses compression", out)
	}
}
