package egress

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

type pair struct {
	cert      *x509.Certificate
	key       *ecdsa.PrivateKey
	pem       string
	keyPEM    string
	forServer tls.Certificate
}

// issue returns a certificate signed by the issuer; nil: self-signed.
func issue(t testing.TB, issuer *pair, change func(*x509.Certificate)) *pair {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	serial, _ := rand.Int(rand.Reader, big.NewInt(1<<60))
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "hooks test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"hooks.example"},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(template)
	}
	parent, signer := template, key
	if issuer != nil {
		parent, signer = issuer.cert, issuer.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	p := &pair{key: key, pem: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))}
	if p.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	p.keyPEM = string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}))
	p.forServer = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	return p
}

func authority(name string) func(*x509.Certificate) {
	return func(c *x509.Certificate) {
		c.Subject.CommonName, c.IsCA, c.BasicConstraintsValid = name, true, true
		c.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	}
}

// listenTLS counts the decrypted bytes from clients.
func listenTLS(t testing.TB, config func() *tls.Config, serve func(n int, c net.Conn)) (*wire, *atomic.Int64) {
	var received atomic.Int64
	return listen(t, func(n int, raw net.Conn) {
		c := tls.Server(raw, config())
		defer c.Close()
		if c.Handshake() == nil {
			serve(n, &counted{c, &received})
		}
	}), &received
}

type counted struct {
	net.Conn
	n *atomic.Int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.n.Add(int64(n))
	return n, err
}

func TestTLS(t *testing.T) {
	ca := issue(t, nil, authority("test authority"))
	other := issue(t, nil, authority("another authority"))
	intermediate := issue(t, ca, authority("test intermediate"))
	good := issue(t, ca, nil)
	selfSigned := issue(t, nil, nil)
	selfSignedCA := issue(t, nil, authority("self-signed authority as a server"))
	sameName := issue(t, issue(t, nil, authority("hooks test")), nil) // It has the name of its issuer, but is not self-signed.
	client := issue(t, ca, nil)
	chained := issue(t, intermediate, nil)
	chained.forServer.Certificate = append(chained.forServer.Certificate, intermediate.cert.Raw)
	rooted := issue(t, ca, nil)
	rooted.forServer.Certificate = append(rooted.forServer.Certificate, ca.cert.Raw)
	noSAN := issue(t, ca, func(c *x509.Certificate) { c.Subject.CommonName, c.IPAddresses, c.DNSNames = "hooks.example", nil, nil })
	expired := issue(t, ca, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })
	clientCAs := x509.NewCertPool()
	clientCAs.AddCert(ca.cert)

	tests := []struct {
		name     string
		server   *pair
		config   func(*tls.Config)
		host     string // default 127.0.0.1
		ca       string // default: ca's
		client   *pair
		reason   Reason
		message  []string
		received bool // The server may have seen the request, because TLS 1.3 rejects a client certificate late.
	}{
		{name: "good", server: good},
		{name: "good, TLS 1.2", server: good, config: func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }},
		{name: "good, by name", server: good, host: "hooks.example"},
		{name: "good, by name with a dot", server: good, host: "Hooks.Example."},
		{name: "intermediate", server: chained},
		{name: "bundle of two authorities", server: good, ca: other.pem + ca.pem},
		{name: "server would like HTTP/2", server: good, config: func(c *tls.Config) { c.NextProtos = []string{"h2", "http/1.1"} }},
		{name: "client certificate", server: good, client: client, config: func(c *tls.Config) { c.ClientAuth = tls.RequireAndVerifyClientCert }},
		{name: "client certificate, TLS 1.2", server: good, client: client, config: func(c *tls.Config) {
			c.ClientAuth, c.MaxVersion = tls.RequireAndVerifyClientCert, tls.VersionTLS12
		}},

		{name: "self-signed", server: selfSigned, reason: CertificateRejected, message: []string{"self-signed", "nothing was sent", `subject "CN=hooks test"`, `issuer "CN=hooks test"`, "SHA-256 " + fmt.Sprintf("%x", sha256.Sum256(selfSigned.cert.Raw))}},
		{name: "self-signed, TLS 1.2", server: selfSigned, config: func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }, reason: CertificateRejected, message: []string{"self-signed"}},
		{name: "self-signed, listed as an authority", server: selfSigned, ca: selfSigned.pem, reason: CertificateRejected, message: []string{"self-signed", "nothing was sent"}},
		{name: "self-signed authority, listed", server: selfSignedCA, ca: selfSignedCA.pem, reason: CertificateRejected, message: []string{"self-signed"}},
		{name: "self-signed, listed with others, TLS 1.2", server: selfSigned, ca: ca.pem + selfSigned.pem, config: func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }, reason: CertificateRejected, message: []string{"self-signed"}},
		{name: "self-signed and expired", server: issue(t, nil, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }),
			reason: CertificateRejected},
		{name: "self-signed for another name", server: selfSigned, host: "other.example", reason: CertificateRejected,
			message: []string{"self-signed"}},
		{name: "issuer of the same name", server: sameName, reason: CertificateRejected, message: []string{"authority that signed it is not trusted"}},
		{name: "unknown authority", server: issue(t, other, nil), reason: CertificateRejected, message: []string{"authority that signed it is not trusted", `issuer "CN=another authority"`}},
		{name: "system's authorities", server: good, ca: "-", reason: CertificateRejected, message: []string{"not trusted"}},
		{name: "intermediate missing", server: issue(t, intermediate, nil), reason: CertificateRejected, message: []string{"not trusted", `issuer "CN=test intermediate"`, "chain is incomplete", "must send the intermediate"}},
		{name: "intermediate missing, public CA", server: issue(t, intermediate, func(c *x509.Certificate) { c.IssuingCertificateURL = []string{"http://ca.example/i.crt"} }), ca: "-", reason: CertificateRejected, message: []string{"chain is incomplete", "must send the intermediate"}},
		{name: "private CA, not set", server: good, ca: "-", reason: CertificateRejected, message: []string{`if "CN=test authority" is a private CA, set tls.ca to it`}},
		{name: "private CA with an intermediate, not set", server: chained, ca: "-", reason: CertificateRejected, message: []string{`from the CA "CN=test authority"; if it is a private CA, set tls.ca to it`}},
		{name: "private CA with its root, not set", server: rooted, ca: "-", reason: CertificateRejected, message: []string{`sends the root CA "CN=test authority"; if it is a private CA, set tls.ca to it`}},
		{name: "private CA, another one is set", server: chained, ca: other.pem, reason: CertificateRejected, message: []string{`"CN=test authority"; if it is a private CA, add it to the certificates of tls.ca`}},
		{name: "no SAN, by address", server: noSAN, reason: CertificateRejected, message: []string{`no subject alternative name (SAN); the common name "hooks.example" does not count`, "with the SAN IP:127.0.0.1"}},
		{name: "no SAN, by name", server: noSAN, host: "hooks.example", reason: CertificateRejected,
			message: []string{"with the SAN DNS:hooks.example"}},
		{name: "expired", server: expired, reason: CertificateRejected, message: []string{"expired at " + expired.cert.NotAfter.UTC().Format(time.RFC3339)}},
		{name: "not valid yet", server: issue(t, ca, func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) }), reason: CertificateRejected, message: []string{"not valid before"}},
		{name: "wrong name", server: good, host: "other.example", reason: CertificateRejected,
			message: []string{"not valid for this host, but for", "hooks.example, 127.0.0.1"}},
		{name: "wrong address", server: issue(t, ca, func(c *x509.Certificate) { c.IPAddresses = nil }), reason: CertificateRejected, message: []string{"not valid for this host"}},
		{name: "client's certificate as a server's", server: issue(t, ca, func(c *x509.Certificate) {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		}), reason: CertificateRejected},
		{name: "signed by a certificate that is no authority", server: issue(t, good, nil), reason: CertificateRejected},

		{name: "TLS 1.0 only", server: good, config: func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS10, tls.VersionTLS10 }, reason: TLSFailed, message: []string{"TLS"}},
		{name: "TLS 1.1 only", server: good, config: func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS11, tls.VersionTLS11 }, reason: TLSFailed, message: []string{"TLS"}},
		{name: "no HTTP/1.1", server: good, config: func(c *tls.Config) { c.NextProtos = []string{"acme-tls/1"} }, reason: TLSFailed, message: []string{"HTTP/1.1"}},
		{name: "client certificate missing", server: good, config: func(c *tls.Config) { c.ClientAuth = tls.RequireAndVerifyClientCert }, reason: TLSFailed, message: []string{"none is configured"}, received: true},
		{name: "client certificate missing, TLS 1.2", server: good, config: func(c *tls.Config) { c.ClientAuth, c.MaxVersion = tls.RequireAndVerifyClientCert, tls.VersionTLS12 }, reason: TLSFailed, message: []string{"none is configured"}},
		{name: "client certificate refused", server: good, client: issue(t, other, nil), config: func(c *tls.Config) { c.ClientAuth = tls.RequireAndVerifyClientCert }, reason: TLSFailed, message: []string{"rejects the client certificate"}, received: true},
		{name: "client certificate refused, TLS 1.2", server: good, client: issue(t, other, nil), config: func(c *tls.Config) { c.ClientAuth, c.MaxVersion = tls.RequireAndVerifyClientCert, tls.VersionTLS12 }, reason: TLSFailed, message: []string{"rejects the client certificate"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			noLeaks(t)
			config := &tls.Config{Certificates: []tls.Certificate{test.server.forServer}, ClientCAs: clientCAs}
			if test.config != nil {
				test.config(config)
			}
			server, received := listenTLS(t, func() *tls.Config { return config }, answers(ok))
			_, port, _ := net.SplitHostPort(server.address)
			c := newClient(t, "127.0.0.1")
			c.resolver = resolver(func(string) []string { return []string{"127.0.0.1"} })
			settings := &liveconfig.TLS{CA: ca.pem}
			if test.ca == "-" {
				settings.CA = ""
			} else if test.ca != "" {
				settings.CA = test.ca
			}
			if test.client != nil {
				settings.ClientCert, settings.ClientKey = test.client.pem, liveconfig.NewSecret(test.client.keyPEM)
			}
			host := "127.0.0.1"
			if test.host != "" {
				host = test.host
			}
			e := secretEndpoint(t, c, "https://"+host+":"+port, settings)
			for range 2 {
				r := post(t, withTimeout(t, generousTimeout), c, e)
				if r.Reason != test.reason {
					t.Fatalf("unexpected result %+v", r)
				}
				for _, part := range test.message {
					if !strings.Contains(r.Message, part) {
						t.Errorf("message %q does not hold %q", r.Message, part)
					}
				}
				if test.reason == "" && (!r.Sent || r.RemoteAddr != server.address) {
					t.Errorf("unexpected result %+v", r)
				}
				if test.reason != "" && !test.received && r.Sent {
					t.Errorf("Sent is true: %+v", r)
				}
			}
			if test.reason == "" {
				if n := server.connections.Load(); n != 1 {
					t.Errorf("%d connections for two posts", n)
				}
			} else if !test.received && received.Load() != 0 {
				t.Errorf("%d bytes left", received.Load())
			}
		})
	}
}

func TestTLSAtTheWrongPort(t *testing.T) {
	tests := []struct {
		name    string
		serve   func(n int, c net.Conn)
		timeout bool // The timeout is the expected outcome.
		reason  Reason
		message string
	}{
		{"plain HTTP", func(_ int, c net.Conn) {
			_, _ = bufio.NewReader(c).ReadByte()
			_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
		}, false, TLSFailed, "does not speak TLS"},
		{"closes", func(_ int, c net.Conn) { _, _ = c.Read(make([]byte, 1<<16)) }, false, TLSFailed, "closed the connection during the TLS handshake"},
		{"resets", func(_ int, c net.Conn) { _, _ = c.Read(make([]byte, 10)); resets(c) }, false, TLSFailed, "during the TLS handshake"},
		{"never answers", func(_ int, c net.Conn) { _, _ = io.Copy(io.Discard, c) }, true, TimedOut, "no complete TLS handshake"},
		{"trickles", func(_ int, c net.Conn) {
			for _, b := range append([]byte("\x16\x03\x03\x40\x00"), bytes.Repeat([]byte{0}, 1<<14)...) {
				if _, err := c.Write([]byte{b}); err != nil {
					return
				}
				time.Sleep(20 * time.Millisecond)
			}
		}, true, TimedOut, "no complete TLS handshake"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			noLeaks(t)
			check := func(timeout time.Duration) error {
				server := listen(t, test.serve)
				c := newClient(t, "127.0.0.1")
				r := post(t, withTimeout(t, timeout), c, secretEndpoint(t, c, "https://"+server.address, nil))
				if r.Reason != test.reason || r.Sent || !strings.Contains(r.Message, test.message) || r.RemoteAddr != server.address {
					return fmt.Errorf("unexpected result %+v", r)
				}
				return nil
			}
			if test.timeout {
				withTimeouts(t, check)
			} else if err := check(generousTimeout); err != nil {
				t.Error(err)
			}
		})
	}
}

// After a change to an invalid certificate the next connection is rejected, even if it could
// resume the session.
func TestCertificateChanges(t *testing.T) {
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		noLeaks(t)
		ca := issue(t, nil, authority("test authority"))
		var config atomic.Pointer[tls.Config]
		use := func(p *pair) {
			config.Store(&tls.Config{MaxVersion: version, Certificates: []tls.Certificate{p.forServer}})
		}
		use(issue(t, ca, nil))
		server, received := listenTLS(t, config.Load, answersAndCloses("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"))
		c := newClient(t, "127.0.0.1")
		e := secretEndpoint(t, c, "https://"+server.address, &liveconfig.TLS{CA: ca.pem})
		for range 2 {
			if r := post(t, withTimeout(t, generousTimeout), c, e); r.Reason != "" {
				t.Fatalf("unexpected result %+v", r)
			} else if r.CertificateExpires.Before(time.Now()) {
				t.Errorf("certificate expires: got %v, want a time in the future", r.CertificateExpires)
			}
		}
		before := received.Load()
		use(issue(t, nil, nil))
		if r := post(t, withTimeout(t, generousTimeout), c, e); r.Reason != CertificateRejected || r.Sent {
			t.Errorf("unexpected result %+v", r)
		}
		if received.Load() != before {
			t.Error("bytes left")
		}
		use(issue(t, ca, nil))
		if r := post(t, withTimeout(t, generousTimeout), c, e); r.Reason != "" {
			t.Errorf("unexpected result %+v", r)
		}
	}
}

// Unrequested data of a TLS endpoint, in the same packet as its response or
// later, does not count as the next response.
func TestUnaskedAnswerOverTLS(t *testing.T) {
	noLeaks(t)
	ca := issue(t, nil, authority("test authority"))
	cert := issue(t, ca, nil)
	var posts atomic.Int32
	server, _ := listenTLS(t, func() *tls.Config { return &tls.Config{Certificates: []tls.Certificate{cert.forServer}} },
		func(_ int, c net.Conn) {
			r := bufio.NewReader(c)
			for readRequest(r) != nil {
				posts.Add(1)
				// Two records, which the client may read together.
				_, _ = io.WriteString(c, ok)
				_, _ = io.WriteString(c, "HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n")
			}
		})
	c := newClient(t, "127.0.0.1")
	e := secretEndpoint(t, c, "https://"+server.address, &liveconfig.TLS{CA: ca.pem})
	for range 20 {
		if r := post(t, withTimeout(t, generousTimeout), c, e); r.Reason != "" {
			t.Fatalf("unexpected result %+v", r)
		}
		time.Sleep(20 * time.Millisecond) // The second response is in transit.
	}
	if posts.Load() != 20 {
		t.Errorf("%d requests, want 20", posts.Load())
	}
}

func TestStaleConnectionOverTLS(t *testing.T) {
	noLeaks(t)
	ca := issue(t, nil, authority("test authority"))
	cert := issue(t, ca, nil)
	server, _ := listenTLS(t, func() *tls.Config { return &tls.Config{Certificates: []tls.Certificate{cert.forServer}} }, answersAndCloses(ok))
	c := newClient(t, "127.0.0.1")
	e := secretEndpoint(t, c, "https://"+server.address, &liveconfig.TLS{CA: ca.pem})
	for range 20 {
		if r := post(t, withTimeout(t, generousTimeout), c, e); r.Reason != "" {
			t.Fatalf("unexpected result %+v", r)
		}
	}
}
