package egress

import (
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// A resolver that answers only the query for one family does not prevent a delivery to it.
func TestFamiliesAreResolvedSeparately(t *testing.T) {
	serve := func(address string) (port string) {
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Skipf("no address of this family: %v", err)
		}
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for n := 0; ; n++ {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					answersAndCloses(ok)(n, c)
				}()
			}
		}()
		_, port, _ = net.SplitHostPort(l.Addr().String())
		return port
	}
	const silent = dnsmessage.RCode(999)
	type reply struct {
		code      dnsmessage.RCode
		addresses []string
	}
	v4, v6, none := reply{addresses: []string{"127.0.0.1"}}, reply{addresses: []string{"::1"}}, reply{}
	port4 := serve("127.0.0.1:0")
	for _, test := range []struct {
		name    string
		a, aaaa reply
		port    string
		reason  Reason
		message string
		remote  string
	}{
		{"AAAA is never answered", v4, reply{code: silent}, port4, "", "", "127.0.0.1:"},
		{"AAAA fails", v4, reply{code: dnsmessage.RCodeServerFailure}, port4, "", "", "127.0.0.1:"},
		{"AAAA is no such host", v4, reply{code: dnsmessage.RCodeNameError}, port4, "", "", "127.0.0.1:"},
		{"no AAAA", v4, none, port4, "", "", "127.0.0.1:"},
		{"nothing listens at AAAA", v4, v6, port4, "", "", "127.0.0.1:"},
		{"A is never answered", reply{code: silent}, v6, "6", "", "", "[::1]:"},
		{"A fails", reply{code: dnsmessage.RCodeServerFailure}, v6, "6", "", "", "[::1]:"},
		{"no such host", reply{code: dnsmessage.RCodeNameError}, reply{code: dnsmessage.RCodeNameError}, port4, DNSFailed, `no address for host "hooks.example"`, ""},
		{"no address", none, none, port4, DNSFailed, "no address", ""},
		{"both fail", reply{code: dnsmessage.RCodeServerFailure}, reply{code: dnsmessage.RCodeServerFailure}, port4, DNSFailed, "DNS lookup failed for", ""},
		{"none is answered", reply{code: silent}, reply{code: silent}, port4, DNSFailed, "timed out", ""},
		{"no A, AAAA is never answered", none, reply{code: silent}, port4, DNSFailed, "timed out", ""},
		{"A is denied, AAAA is never answered", reply{addresses: []string{"127.0.0.2"}}, reply{code: silent}, port4, AddressDenied,
			"egress policy denies", ""},
		{"A is denied, no AAAA", reply{addresses: []string{"127.0.0.2"}}, none, port4, AddressDenied, "egress policy denies", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.port == "6" {
				test.port = serve("[::1]:0")
			}
			noLeaks(t)
			c := newClient(t, "127.0.0.1", "::1")
			c.resolver = resolverByType(func(_ string, of dnsmessage.Type) ([]string, dnsmessage.RCode, bool) {
				r := test.a
				if of == dnsmessage.TypeAAAA {
					r = test.aaaa
				}
				return r.addresses, r.code, r.code != silent
			})
			timeout := generousTimeout
			if test.reason != "" {
				timeout = time.Second // A query without an answer ends with the attempt.
			}
			r := post(t, withTimeout(t, timeout), c, secretEndpoint(t, c, "http://hooks.example:"+test.port, nil))
			if r.Reason != test.reason || !strings.Contains(r.Message, test.message) || test.reason == "" && r.RemoteAddr != test.remote+test.port {
				t.Errorf("got %q %q from %q, want %q %q from %q", r.Reason, r.Message, r.RemoteAddr, test.reason, test.message, test.remote)
			}
		})
	}
}
