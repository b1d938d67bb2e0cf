package egress

import (
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/posthorn/posthorn/test/wait"
)

// names answers lookups with the current addresses and code, and counts the lookups.
type names struct {
	current atomic.Pointer[nameAnswer]
	lookups atomic.Int32
}

type nameAnswer struct {
	addresses []string
	code      dnsmessage.RCode
}

func (n *names) set(code dnsmessage.RCode, addresses ...string) {
	n.current.Store(&nameAnswer{addresses, code})
}

func (n *names) resolver() *net.Resolver {
	return resolverByType(func(_ string, of dnsmessage.Type) ([]string, dnsmessage.RCode, bool) {
		answer := n.current.Load()
		if of == dnsmessage.TypeA {
			n.lookups.Add(1)
		}
		return answer.addresses, answer.code, true
	})
}

// After MaxAge the name is resolved again. The connection is kept if its address is still an answer, or if
// there is no answer, and a new one is checked against the policy.
func TestOldConnectionIsResolvedAgain(t *testing.T) {
	const failed, missing, found = dnsmessage.RCodeServerFailure, dnsmessage.RCodeNameError, dnsmessage.RCodeSuccess
	for _, test := range []struct {
		name      string
		code      dnsmessage.RCode
		addresses []string
		kept      bool
		reason    Reason // of the next request
	}{
		{"the same address", found, []string{"127.0.0.1"}, true, ""},
		{"one of several addresses", found, []string{"127.0.0.2", "127.0.0.1"}, true, ""},
		{"beside a denied address", found, []string{"127.0.0.3", "169.254.169.254", "127.0.0.1"}, true, ""},
		{"no answer", failed, nil, true, ""},
		{"another address", found, []string{"127.0.0.2"}, false, ConnectionRefused},
		{"a denied address only", found, []string{"127.0.0.3"}, false, AddressDenied},
		{"an address of the other family only", found, []string{"::1"}, false, AddressDenied},
		{"no such name", missing, nil, false, DNSFailed},
	} {
		t.Run(test.name, func(t *testing.T) {
			noLeaks(t)
			server, open := counting(t, ok)
			_, port, _ := net.SplitHostPort(server.address)
			var n names
			n.set(found, "127.0.0.1")
			c := New(Options{Policy: newClient(t, "127.0.0.1", "127.0.0.2").policy, Resolver: n.resolver(), MaxAge: time.Nanosecond})
			defer c.Close()
			e := secretEndpoint(t, c, "http://hooks.example:"+port, nil)
			post(t, withTimeout(t, generousTimeout), c, e) // It dials, and resolves the name again.
			wait.True(t, "the name is resolved again", func() bool { return n.lookups.Load() == 2 })
			n.set(test.code, test.addresses...)
			post(t, withTimeout(t, generousTimeout), c, e)
			wait.True(t, "the name has the new answer", func() bool { return n.lookups.Load() >= 3 })
			if !test.kept {
				wait.True(t, "the connection is closed", func() bool { return open.Load() == 0 && c.open.Load() == 0 })
			}
			r := post(t, withTimeout(t, generousTimeout), c, e)
			if r.Reason != test.reason {
				t.Errorf("next request: got %+v, want the reason %q", r, test.reason)
			}
			if got := server.connections.Load(); got != 1 {
				t.Errorf("connections to the first address: got %d, want 1", got)
			}
		})
	}
}

// A connection whose name has moved while a request uses it is closed after that request.
func TestNameMovesDuringARequest(t *testing.T) {
	noLeaks(t)
	server, open := counting(t, ok)
	var n names
	n.set(dnsmessage.RCodeSuccess, "127.0.0.1")
	_, port, _ := net.SplitHostPort(server.address)
	c := New(Options{Policy: newClient(t, "127.0.0.1").policy, Resolver: n.resolver()})
	defer c.Close()
	e := secretEndpoint(t, c, "http://hooks.example:"+port, nil)
	cn, err := c.dial(t.Context(), e, time.Now().Add(generousTimeout), new(Timing))
	if err != nil {
		t.Fatal(err)
	}
	n.set(dnsmessage.RCodeSuccess, "127.0.0.2")
	e.pool.resolve(cn)
	if got := c.open.Load(); got != 1 {
		t.Errorf("connections during the request: got %d, want 1", got)
	}
	e.pool.put(cn)
	wait.True(t, "the connection is closed", func() bool { return open.Load() == 0 && c.open.Load() == 0 && c.idle.Load() == 0 })
}

// A connection with a certificate that has expired since is not kept after MaxAge.
func TestExpiredCertificateEndsAConnection(t *testing.T) {
	noLeaks(t)
	server, open := counting(t, ok)
	c := New(Options{Policy: newClient(t, "127.0.0.1").policy, MaxAge: time.Nanosecond})
	defer c.Close()
	e := prepareURL(t, c, "http://"+server.address)
	cn, err := c.dial(t.Context(), e, time.Now().Add(generousTimeout), new(Timing))
	if err != nil {
		t.Fatal(err)
	}
	cn.expires = time.Now().Add(-time.Second)
	e.pool.put(cn)
	wait.True(t, "the connection is closed", func() bool { return open.Load() == 0 && c.open.Load() == 0 })
}

// Above the bound the connection that was unused longest is closed, whichever host it belongs to.
func TestLongestUnusedIsClosed(t *testing.T) {
	noLeaks(t)
	c := New(Options{Policy: newClient(t, "127.0.0.1").policy, MaxOpen: 3})
	defer c.Close()
	var endpoints []*Endpoint
	var open []*atomic.Int32
	for range 4 {
		server, count := counting(t, ok)
		endpoints, open = append(endpoints, prepareURL(t, c, "http://"+server.address)), append(open, count)
	}
	counts := func() (all []int32) {
		for _, n := range open {
			all = append(all, n.Load())
		}
		return all
	}
	for _, step := range []struct {
		post int
		want []int32
	}{
		{0, []int32{1, 0, 0, 0}}, {1, []int32{1, 1, 0, 0}}, {2, []int32{1, 1, 1, 0}},
		{0, []int32{1, 1, 1, 0}}, // The second one is unused longest now.
		{3, []int32{1, 0, 1, 1}}, {1, []int32{1, 1, 0, 1}}, {2, []int32{0, 1, 1, 1}},
	} {
		post(t, withTimeout(t, generousTimeout), c, endpoints[step.post])
		wait.True(t, "the connections of each host", func() bool { return slices.Equal(counts(), step.want) })
	}
	// One in use is not closed, even if all others are.
	var busy []*conn
	for _, e := range endpoints {
		cn, err := c.dial(t.Context(), e, time.Now().Add(generousTimeout), new(Timing))
		if err != nil {
			t.Fatal(err)
		}
		busy = append(busy, cn)
	}
	wait.True(t, "all unused ones closed", func() bool { return slices.Equal(counts(), []int32{1, 1, 1, 1}) && c.idle.Load() == 0 })
	for i, cn := range busy {
		cn.pool.put(cn)
		if got, want := c.open.Load(), int64(3); got != want {
			t.Errorf("open connections after %d of 4 requests: got %d, want %d", i+1, got, want)
		}
	}
	wait.True(t, "the first one closed", func() bool { return slices.Equal(counts(), []int32{0, 1, 1, 1}) })
	if got := busy[1].addr; got != netip.MustParseAddr("127.0.0.1") {
		t.Errorf("address of a connection: got %v, want 127.0.0.1", got)
	}
}
