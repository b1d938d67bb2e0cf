package dispatcher

import (
	"crypto/tls"
	"io"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/wait"
)

// Requests that a proxy could read differently, and heads that are too large, are
// refused on the ports for calls and on the admin port, with and without TLS.
func TestEveryPortIsStrict(t *testing.T) {
	certificate := httptest.NewUnstartedServer(nil)
	certificate.StartTLS()
	defer certificate.Close()
	config := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: certificate.TLS.Certificates}
	for _, adminTLS := range []*tls.Config{nil, config} {
		d, stop := started(t, t.TempDir(), func(o *Options) { o.TLSListen, o.TLS, o.AdminTLS = "127.0.0.1:0", config, adminTLS })
		d.Synced()
		for name, port := range map[string]struct {
			net.Addr
			encrypted bool
			large     int
		}{"calls": {d.Addr(), false, 300 << 10}, "calls over TLS": {d.TLSAddr(), true, 300 << 10},
			"admin": {d.AdminAddr(), adminTLS != nil, 17 << 10}} {
			for headers, want := range map[string]string{
				"": "HTTP/1.1 200 ",
				"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n": "HTTP/1.1 400 ",
				"X: a\r\n b\r\n": "HTTP/1.1 400 ",
				"X: a\n":         "HTTP/1.1 400 ",
				"X: " + strings.Repeat("x", port.large) + "\r\n": "HTTP/1.1 431 ",
			} {
				raw, err := net.Dial("tcp", port.String())
				if err != nil {
					t.Fatal(err)
				}
				c := raw
				if port.encrypted {
					//nolint:gosec // the certificate is not the subject
					c = tls.Client(raw, &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true})
				}
				_ = c.SetDeadline(time.Now().Add(wait.Limit))
				ending := "\r\n"
				if want != "HTTP/1.1 400 " {
					ending = "Connection: close\r\n\r\n"
				}
				_, _ = io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n"+headers+ending)
				answer, _ := io.ReadAll(c) // Ends when the connection is closed.
				if !strings.HasPrefix(string(answer), want) {
					t.Errorf("%s: %.40q is answered %.60q, want %s", name, headers, answer, want)
				}
				_ = raw.Close()
			}
		}
		stop()
	}
}
