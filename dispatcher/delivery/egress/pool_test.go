package egress

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/wait"
)

// counting is a server that counts open connections.
func counting(t *testing.T, answer string) (*wire, *atomic.Int32) {
	var open atomic.Int32
	return listen(t, func(n int, c net.Conn) {
		open.Add(1)
		answers(answer)(n, c)
		open.Add(-1)
	}), &open
}

func TestIdleConnectionsAreClosed(t *testing.T) {
	noLeaks(t)
	server, open := counting(t, ok)
	c := New(Options{Policy: newClient(t, "127.0.0.1").policy, IdleTimeout: 50 * time.Millisecond})
	defer c.Close()
	e := prepareURL(t, c, "http://"+server.address)
	for range 3 {
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() { post(t, withTimeout(t, generousTimeout), c, e) })
		}
		all.Wait()
		wait.True(t, "idle connections closed", func() bool { return open.Load() == 0 && c.idle.Load() == 0 })
		wait.True(t, "no timer left", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return c.sweeper == nil })
	}
}

// Endpoints of a host share its connections, and the last one that is forgotten closes them.
func TestForgetAndClose(t *testing.T) {
	noLeaks(t)
	server, open := counting(t, ok)
	c := newClient(t, "127.0.0.1")
	var endpoints []*Endpoint
	for _, path := range []string{"/one", "/two", "/three"} {
		e := prepareURL(t, c, "http://"+server.address+path)
		post(t, withTimeout(t, generousTimeout), c, e)
		endpoints = append(endpoints, e)
	}
	if got := server.connections.Load(); got != 1 {
		t.Errorf("connections for 3 endpoints of a host, one after the other: got %d, want 1", got)
	}
	c.Forget(endpoints[0])
	c.Forget(endpoints[0]) // Counts once.
	c.Forget(endpoints[1])
	post(t, withTimeout(t, generousTimeout), c, endpoints[2])
	if got := server.connections.Load(); got != 1 {
		t.Errorf("connections after two endpoints were forgotten: got %d, want the same one", got)
	}
	c.Forget(endpoints[2])
	wait.True(t, "connection of the last endpoint closed", func() bool { return open.Load() == 0 })
	if r := post(t, withTimeout(t, generousTimeout), c, endpoints[0]); r.StatusCode != 200 {
		t.Errorf("post to a forgotten endpoint: got %+v, want 200", r)
	}
	wait.True(t, "its connection closed after use", func() bool { return open.Load() == 0 })
	e := prepareURL(t, c, "http://"+server.address)
	post(t, withTimeout(t, generousTimeout), c, e)
	c.Close()
	c.Close()
	wait.True(t, "all closed", func() bool { return open.Load() == 0 && c.idle.Load() == 0 })
	for _, e := range []*Endpoint{e, prepareURL(t, c, "http://"+server.address), prepareURL(t, c, "http://localhost:1")} {
		c.Forget(e)
	}
	if got := len(c.pools); got != 0 {
		t.Errorf("pools without endpoints: got %d, want 0", got)
	}
}

// Two endpoints share connections if and only if these are interchangeable.
func TestPoolIdentity(t *testing.T) {
	ca, other := issue(t, nil, authority("one")), issue(t, nil, authority("two"))
	client, second := issue(t, ca, nil), issue(t, ca, nil)
	endpoint := func(url string, change func(*liveconfig.Endpoint)) liveconfig.Endpoint {
		e := liveconfig.Endpoint{Name: "primary", URL: liveconfig.NewSecret(url)}
		if change != nil {
			change(&e)
		}
		return e
	}
	withTLS := func(config liveconfig.TLS) func(*liveconfig.Endpoint) {
		return func(e *liveconfig.Endpoint) { e.TLS = &config }
	}
	base := endpoint("https://hooks.example/a", nil)
	for _, test := range []struct {
		name   string
		config liveconfig.Endpoint
		shared bool
	}{
		{"another path and query", endpoint("https://hooks.example/b?token=2", nil), true},
		{"the default port", endpoint("https://hooks.example:443/", nil), true},
		{"another spelling of the host", endpoint("https://HOOKS.example/", nil), true},
		{"another name and header", endpoint("https://hooks.example/", func(e *liveconfig.Endpoint) {
			e.Name, e.Headers = "second", []liveconfig.Header{{Name: "X-Key", Value: liveconfig.NewSecret("k")}}
		}), true},
		{"http", endpoint("http://hooks.example:443/", nil), false},
		{"another port", endpoint("https://hooks.example:8443/", nil), false},
		{"another host", endpoint("https://hooks2.example/", nil), false},
		{"no search domains", endpoint("https://hooks.example./", nil), false},
		{"a private CA", endpoint("https://hooks.example/", withTLS(liveconfig.TLS{CA: ca.pem})), false},
		{"a client certificate", endpoint("https://hooks.example/",
			withTLS(liveconfig.TLS{ClientCert: client.pem, ClientKey: liveconfig.NewSecret(client.keyPEM)})), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newClient(t)
			if got := prepareConfig(t, c, base).pool == prepareConfig(t, c, test.config).pool; got != test.shared {
				t.Errorf("shared with %s: got %v, want %v", base.URL.Reveal(), got, test.shared)
			}
		})
	}
	configs := []liveconfig.TLS{
		{CA: ca.pem}, {CA: other.pem},
		{CA: ca.pem, ClientCert: client.pem, ClientKey: liveconfig.NewSecret(client.keyPEM)},
		{CA: ca.pem, ClientCert: second.pem, ClientKey: liveconfig.NewSecret(second.keyPEM)},
	}
	c := newClient(t)
	pools := map[*pool]bool{}
	for range 2 {
		for _, config := range configs {
			pools[prepareConfig(t, c, endpoint("https://hooks.example/", withTLS(config))).pool] = true
		}
	}
	if got := len(pools); got != len(configs) {
		t.Errorf("pools of %d TLS settings, each used twice: got %d", len(configs), got)
	}
}

func prepareConfig(t *testing.T, c *Client, config liveconfig.Endpoint) *Endpoint {
	t.Helper()
	e, err := c.Prepare(config)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// Requests that hang at one path of a host do not block another path of the same host.
func TestHangingPath(t *testing.T) {
	noLeaks(t)
	release := make(chan struct{})
	var hanging sync.WaitGroup
	hanging.Add(4)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hangs" {
			hanging.Done()
			<-release
		}
	}))
	defer server.Close()
	c := New(Options{Policy: newClient(t, "127.0.0.1").policy, MaxOpen: 4})
	defer c.Close()
	hangs, works := prepareURL(t, c, server.URL+"/hangs"), prepareURL(t, c, server.URL+"/works")
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() { post(t, withTimeout(t, generousTimeout), c, hangs) })
	}
	hanging.Wait()
	if got := works.Room(1, 0); got < 1 {
		t.Errorf("room of the path that works: got %d, want at least 1", got)
	}
	if got := hangs.Room(1, 4); got > 0 {
		t.Errorf("room of the path that hangs, with its part in use: got %d, want none", got)
	}
	for range 3 {
		if r := post(t, withTimeout(t, generousTimeout), c, works); r.StatusCode != 200 {
			t.Errorf("post to the path that works: got %+v, want 200", r)
		}
	}
	close(release)
	all.Wait()
}

func TestMaxOpen(t *testing.T) {
	noLeaks(t)
	var busy sync.WaitGroup
	busy.Add(8)
	var open atomic.Int32
	server := listen(t, func(_ int, c net.Conn) {
		open.Add(1)
		defer open.Add(-1)
		r := bufio.NewReader(c)
		for readRequest(r) != nil {
			busy.Done()
			busy.Wait() // All at once.
			_, _ = io.WriteString(c, ok)
		}
	})
	c := New(Options{Policy: newClient(t, "127.0.0.1").policy, MaxOpen: 3})
	defer c.Close()
	e := prepareURL(t, c, "http://"+server.address)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if r := post(t, withTimeout(t, generousTimeout), c, e); r.StatusCode != 200 {
				t.Errorf("unexpected result %+v", r)
			}
		})
	}
	all.Wait()
	wait.True(t, "three are left", func() bool { return open.Load() == 3 && c.idle.Load() == 3 })
}

// Hosts share half of the open connections: each may have more while it has fewer than are free. Of
// the other half each endpoint gets as many as it needs, until all are in use. A host keeps its
// connections and may always have one.
func TestRoom(t *testing.T) {
	noLeaks(t)
	c := New(Options{Policy: newClient(t, "127.0.0.1").policy, MaxOpen: 6})
	defer c.Close()
	var endpoints []*Endpoint
	inFlight := make([]int, 4)
	want := func(needed int, rooms ...int) {
		t.Helper()
		for i, e := range endpoints {
			if got := e.Room(needed, inFlight[i]) + inFlight[i]; got != rooms[i] {
				t.Errorf("with %d connections endpoint %d, which needs %d, may have %d requests in flight, want %d", c.open.Load(), i, needed, got, rooms[i])
			}
		}
	}
	connect := func(i int) *conn {
		cn, err := c.dial(t.Context(), endpoints[i], time.Now().Add(generousTimeout), new(Timing))
		if err != nil {
			t.Fatal(err)
		}
		inFlight[i]++
		return cn
	}
	for range 4 {
		server, _ := counting(t, ok)
		endpoints = append(endpoints, prepareURL(t, c, "http://"+server.address))
	}
	want(1, 3, 3, 3, 3)
	for _, e := range endpoints[:2] {
		post(t, withTimeout(t, generousTimeout), c, e)
		post(t, withTimeout(t, generousTimeout), c, e) // On the same connection.
	}
	want(1, 1, 1, 1, 1)
	want(5, 5, 5, 5, 5)
	first := connect(0)
	want(1, 2, 1, 1, 1)
	want(5, 5, 5, 5, 5)
	others := []*conn{connect(0), connect(1), connect(1)}
	want(1, 3, 3, 1, 1)
	want(5, 5, 5, 5, 5) // The unused ones can be closed for them.
	for i, e := range endpoints[:2] {
		others = append(others, e.pool.get(t.Context(), time.Now(), time.Now().Add(generousTimeout)))
		inFlight[i]++
	}
	want(5, 3, 3, 1, 1)
	// When the others use all connections, every host gets an equal part.
	c.used.Add(-1)
	want(5, 3, 3, 3, 3)
	c.used.Add(1)
	first.close()
	first.close()
	inFlight[0]--
	want(5, 5, 5, 5, 5)
	for _, cn := range others {
		cn.close()
	}
	clear(inFlight)
	want(1, 3, 3, 3, 3)
	for _, e := range endpoints {
		c.Forget(e)
	}
	wait.True(t, "all closed", func() bool { return c.open.Load() == 0 })
	want(1, 3, 3, 3, 3)
}

// Endpoints of a host share its part: each may use what the others leave, and has an equal part.
func TestRoomOfASharedHost(t *testing.T) {
	noLeaks(t)
	server, _ := counting(t, ok)
	c := New(Options{Policy: newClient(t, "127.0.0.1").policy, MaxOpen: 8})
	defer c.Close()
	a, b := prepareURL(t, c, "http://"+server.address+"/a"), prepareURL(t, c, "http://"+server.address+"/b")
	if got := a.Room(1, 0); got != 4 {
		t.Errorf("room of an endpoint alone: got %d, want half of the connections, 4", got)
	}
	var busy []*conn
	for range 4 {
		cn, err := c.dial(t.Context(), a, time.Now().Add(generousTimeout), new(Timing))
		if err != nil {
			t.Fatal(err)
		}
		busy = append(busy, cn)
	}
	if got := a.Room(1, 4); got != 0 {
		t.Errorf("room of the endpoint with all connections: got %d, want 0", got)
	}
	if got := b.Room(1, 0); got != 2 {
		t.Errorf("room beside an endpoint with all connections: got %d, want an equal part, 2", got)
	}
	for _, cn := range busy {
		cn.close()
	}
}

// The endpoint's keep-alive timeout, less a second, bounds the use of a connection.
func TestKeepAliveTimeout(t *testing.T) {
	noLeaks(t)
	for value, want := range map[string]time.Duration{
		"timeout=5, max=100": 4 * time.Second, "max=3,TIMEOUT=2": time.Second, "timeout=1": time.Millisecond, "timeout=0": time.Millisecond,
		"timeout=": 0, "timeout": 0, "timeout=x": 0, "timeout=99999999": 0, "max=5": 0, "": 0,
	} {
		if got := keepAliveTimeout([]byte(value)); got != want {
			t.Errorf("%q: %v, want %v", value, got, want)
		}
	}
	server, _ := counting(t, "HTTP/1.1 200 OK\r\nKeep-Alive: timeout=1\r\nContent-Length: 2\r\n\r\nok")
	c := newClient(t, "127.0.0.1")
	e := prepareURL(t, c, "http://"+server.address)
	for range 2 {
		post(t, withTimeout(t, generousTimeout), c, e)
		time.Sleep(5 * time.Millisecond)
	}
	if n := server.connections.Load(); n != 2 {
		t.Errorf("%d connections, want 2", n)
	}
}

// Many goroutines post while connections are closed at random: each post gets its own response.
func TestConcurrentPosts(t *testing.T) {
	noLeaks(t)
	var n atomic.Int32
	server := listen(t, func(_ int, c net.Conn) {
		r := bufio.NewReader(c)
		for {
			body := readRequest(r)
			if body == nil {
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 400 X\r\nContent-Length: "+itoa(len(body))+"\r\n\r\n"+string(body))
			if n.Add(1)%7 == 0 {
				return
			}
		}
	})
	c := newClient(t, "127.0.0.1")
	e := prepareURL(t, c, "http://"+server.address)
	var all sync.WaitGroup
	for w := range 16 {
		all.Go(func() {
			for i := range 50 {
				body := "worker " + itoa(w) + " post " + itoa(i)
				r := c.Post(withTimeout(t, generousTimeout), e, nil, []byte(body))
				// An endpoint that closes two connections in a row without a response has
				// failed.
				if string(r.Response) != body && r.Reason != ConnectionFailed {
					t.Errorf("got %+v %q, want %q", r, r.Response, body)
				}
			}
		})
	}
	all.Wait()
}

// A connection does not keep the deadlines of an earlier exchange: a longer one does not end at
// them.
func TestEarlierDeadlines(t *testing.T) {
	noLeaks(t)
	withTimeouts(t, func(first time.Duration) error { return postAfterADeadline(t, first) })
}

// postAfterADeadline posts with a timeout, and then with a generous one until that timeout has passed.
func postAfterADeadline(t *testing.T, first time.Duration) error {
	server := listen(t, func(_ int, c net.Conn) {
		r := bufio.NewReader(c)
		if readRequest(r) == nil {
			return
		}
		_, _ = io.WriteString(c, ok)
		time.Sleep(first + first/4) // The next request fills all buffers meanwhile.
		if readRequest(r) != nil {
			_, _ = io.WriteString(c, ok)
		}
	})
	c := newClient(t, "127.0.0.1")
	e := prepareURL(t, c, "http://"+server.address)
	post(t, withTimeout(t, first), c, e)
	r := c.Post(withTimeout(t, generousTimeout), e, nil, make([]byte, 16<<20))
	if r.StatusCode != 200 || server.connections.Load() != 1 {
		return fmt.Errorf("unexpected result %+v on connection %d", r, server.connections.Load())
	}
	return nil
}
