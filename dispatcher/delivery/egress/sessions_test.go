package egress

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"net"
	"sync/atomic"
	"testing"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// resuming is a TLS server that closes each connection after a response, and counts handshakes and resumed ones.
func resuming(t *testing.T, certificate *pair, version uint16) (address string, handshakes, resumed *atomic.Int32) {
	handshakes, resumed = new(atomic.Int32), new(atomic.Int32)
	config := &tls.Config{Certificates: []tls.Certificate{certificate.forServer}, MaxVersion: version}
	server := listen(t, func(n int, raw net.Conn) {
		c := tls.Server(raw, config)
		defer c.Close()
		if c.Handshake() != nil {
			return
		}
		handshakes.Add(1)
		if c.ConnectionState().DidResume {
			resumed.Add(1)
		}
		answersAndCloses("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")(n, c)
	})
	return server.address, handshakes, resumed
}

// chain returns a certificate with an intermediate authority in its chain, and the root.
func chain(t testing.TB, root, intermediate *pair) *pair {
	leaf := issue(t, intermediate, nil)
	leaf.forServer.Certificate = append(leaf.forServer.Certificate, intermediate.cert.Raw)
	return leaf
}

// Endpoints with other TLS settings do not share sessions, each handshake after the first is resumed, and the sessions
// share the certificates of authorities.
func TestSessionsAreResumed(t *testing.T) {
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		t.Run(tls.VersionName(version), func(t *testing.T) {
			noLeaks(t)
			root, other := issue(t, nil, authority("test root")), issue(t, nil, authority("another root"))
			intermediate := issue(t, root, authority("test intermediate"))
			c := newClient(t, "127.0.0.1")
			const hosts = 3
			var leaves int
			for i := range hosts {
				leaf := chain(t, root, intermediate)
				leaves += len(leaf.cert.Raw)
				address, handshakes, resumed := resuming(t, leaf, version)
				one := secretEndpoint(t, c, "https://"+address, &liveconfig.TLS{CA: root.pem})
				for range 4 {
					if r := post(t, withTimeout(t, generousTimeout), c, one); r.Reason != "" || !r.CertificateExpires.Equal(leaf.cert.NotAfter) {
						t.Fatalf("host %d: got %+v, want success and the certificate's expiry", i, r)
					}
				}
				two := secretEndpoint(t, c, "https://"+address, &liveconfig.TLS{CA: root.pem + other.pem})
				post(t, withTimeout(t, generousTimeout), c, two)
				if got, want := [2]int32{handshakes.Load(), resumed.Load()}, [2]int32{5, 3}; got != want {
					t.Errorf("host %d: handshakes and resumed ones: got %v, want %v", i, got, want)
				}
				c.Forget(two)
			}
			authorities := len(root.cert.Raw) + len(intermediate.cert.Raw)
			c.sessions.mu.Lock()
			if got, want := [2]int{len(c.sessions.of), len(c.sessions.authorities)}, [2]int{hosts, 2}; got != want {
				t.Errorf("sessions and shared certificates: got %v, want %v", got, want)
			}
			if got, most := c.sessions.used, authorities+leaves+hosts*(sessionOverhead+500); got > most {
				t.Errorf("bytes of sessions: got %d, want at most %d", got, most)
			}
			c.sessions.mu.Unlock()
		})
	}
}

// With a forgotten endpoint its session is dropped, with the certificates that no other session has.
func TestForgottenSessionIsDropped(t *testing.T) {
	noLeaks(t)
	root := issue(t, nil, authority("test root"))
	intermediate := issue(t, root, authority("test intermediate"))
	address, _, _ := resuming(t, chain(t, root, intermediate), tls.VersionTLS13)
	c := newClient(t, "127.0.0.1")
	e := secretEndpoint(t, c, "https://"+address, &liveconfig.TLS{CA: root.pem})
	post(t, withTimeout(t, generousTimeout), c, e)
	if got := len(c.sessions.of); got != 1 {
		t.Fatalf("sessions: got %d, want 1", got)
	}
	c.Forget(e)
	if got, want := [3]int{len(c.sessions.of), len(c.sessions.authorities), c.sessions.used}, [3]int{}; got != want {
		t.Errorf("sessions, certificates and bytes after it was forgotten: got %v, want %v", got, want)
	}
}

// Above the bound the session that was used longest ago is dropped, and what sessions share is counted once.
func TestSessionsAreBounded(t *testing.T) {
	certificate := func(kind byte, size int) []byte {
		der := bytes.Repeat([]byte{kind}, size)
		copy(der, []byte{0x30, 0x82, byte((size - 4) >> 8), byte(size - 4)})
		return append([]byte{0, byte(size >> 8), byte(size)}, der...)
	}
	encoded := func(i int, authority byte) []byte {
		return bytes.Join([][]byte{fmt.Appendf(nil, "session %4d ", i), certificate(byte(i), 300), certificate(authority, 1000), []byte("end")}, nil)
	}
	key := func(i int) poolKey { return poolKey{host: fmt.Sprint(i)} }
	own := len(encoded(0, 0)) - 1000 + sessionOverhead + len("ticket")
	s := newSessions(1000 + 10*own)
	for i := range 15 {
		s.get(key(0)) // It is the one used last again.
		s.put(key(i), []byte("ticket"), encoded(i, 'a'))
	}
	for i := range 15 {
		ticket, got := s.get(key(i))
		if kept := i == 0 || i >= 6; kept != (got != nil) {
			t.Errorf("session %d is kept: got %v, want %v", i, got != nil, kept)
		} else if kept && (!bytes.Equal(got, encoded(i, 'a')) || string(ticket) != "ticket") {
			t.Errorf("session %d: got %q, want %q", i, got, encoded(i, 'a'))
		}
	}
	if got, want := s.used, 1000+10*own; got != want {
		t.Errorf("bytes: got %d, want %d", got, want)
	}
	s.put(key(14), []byte("ticket"), encoded(14, 'b')) // A second shared certificate takes the place of sessions.
	if got, most := s.used, s.bound; got > most {
		t.Errorf("bytes: got %d, want at most %d", got, most)
	}
	for i := range 15 {
		s.drop(key(i))
	}
	if got, want := [3]int{len(s.of), len(s.authorities), s.used}, [3]int{}; got != want {
		t.Errorf("sessions, certificates and bytes at the end: got %v, want %v", got, want)
	}
}
