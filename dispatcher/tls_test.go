package dispatcher

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
)

// net/http logs messages about connections to Posthorn's log.
func TestConnectionsThatFailAreLogged(t *testing.T) {
	certificate := httptest.NewUnstartedServer(nil)
	certificate.StartTLS()
	defer certificate.Close()
	config := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: certificate.TLS.Certificates}
	lines := make(chan string, 100)
	d, _ := started(t, t.TempDir(), func(o *Options) {
		o.TLSListen, o.TLS, o.AdminTLS = "127.0.0.1:0", config, config
		o.Logger = slog.New(slog.NewJSONHandler(lineWriter(lines), nil))
	})
	for _, addr := range []net.Addr{d.TLSAddr(), d.AdminAddr()} {
		c, err := net.Dial("tcp", addr.String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, "no TLS at all\n")
		peer := c.LocalAddr().String()
		for line := range lines {
			if strings.Contains(line, `"msg":"connection failed"`) && strings.Contains(line, peer) {
				break
			}
		}
		_ = c.Close()
	}
}

type lineWriter chan string

func (w lineWriter) Write(line []byte) (int, error) {
	select {
	case w <- string(line):
	default:
	}
	return len(line), nil
}

// Calls are accepted over TLS, too: by HTTP/1.1 and HTTP/2.
func TestCallsOverTLS(t *testing.T) {
	if _,
		err := New(Options{DataDir: t.TempDir(), ServerOptions: ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0",
		TLSListen: "127.0.0.1:0"}}); err == nil {
		t.Fatal("there is TLS without a certificate")
	}
	authority := httptest.NewUnstartedServer(nil) // For its certificate.
	authority.StartTLS()
	defer authority.Close()
	d, err := New(Options{
		DataDir: t.TempDir(), ServerOptions: ServerOptions{
			Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0",
			TLSListen: "127.0.0.1:0", TLS: &tls.Config{MinVersion: tls.VersionTLS12, Certificates: authority.TLS.Certificates},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	d.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config("http://127.0.0.1:1/")))
	d.Synced()
	roots := authority.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	for version, want := range map[bool]string{false: "HTTP/1.1", true: "HTTP/2.0"} {
		var protocols http.Protocols
		protocols.SetHTTP1(!version)
		protocols.SetHTTP2(version)
		transport := &http.Transport{Protocols: &protocols,
			TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: "example.com"}}
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+d.TLSAddr().String()+"/v1/track",
			strings.NewReader(`{"userId":"u","event":"E"}`))
		if err != nil {
			t.Fatal(err)
		}
		r.SetBasicAuth(liveconfigtest.Key, "")
		resp, err := (&http.Client{Transport: transport}).Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		transport.CloseIdleConnections()
		if resp.StatusCode != http.StatusOK || resp.Proto != want {
			t.Errorf("%s: %s %d", want, resp.Proto, resp.StatusCode)
		}
	}
	if code, body := send(t, d, "plain"); code != http.StatusOK {
		t.Errorf("without TLS: %d %s", code, body)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
