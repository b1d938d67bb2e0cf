package egress

import (
	"bufio"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
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

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(generousTimeout); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never happened: " + what)
		}
	}
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
		eventually(t, "idle connections closed", func() bool { return open.Load() == 0 && c.idle.Load() == 0 })
		eventually(t, "pool unknown", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return len(c.pools) == 0 })
	}
}

func TestForgetAndClose(t *testing.T) {
	noLeaks(t)
	server, open := counting(t, ok)
	c := newClient(t, "127.0.0.1")
	e1, e2, e3 := prepareURL(t, c, "http://"+server.address), prepareURL(t, c, "http://"+server.address), prepareURL(t, c, "http://"+server.address)
	for _, e := range []*Endpoint{e1, e2, e3} {
		post(t, withTimeout(t, generousTimeout), c, e)
	}
	if n := open.Load(); n != 3 {
		t.Fatalf("%d connections are open, want 3: each endpoint has its own", n)
	}
	c.Forget(e1)
	c.Forget(e1)
	eventually(t, "connection of the forgotten endpoint closed", func() bool { return open.Load() == 2 })
	if r := post(t, withTimeout(t, generousTimeout), c, e1); r.StatusCode != 200 {
		t.Errorf("unexpected result %+v", r)
	}
	eventually(t, "its later connection closed after use", func() bool { return open.Load() == 2 })
	c.Close()
	c.Close()
	eventually(t, "all closed", func() bool { return open.Load() == 0 && c.idle.Load() == 0 })
	for _, e := range []*Endpoint{e2, prepareURL(t, c, "http://"+server.address)} {
		if r := post(t, withTimeout(t, generousTimeout), c, e); r.StatusCode != 200 {
			t.Errorf("unexpected result %+v", r)
		}
	}
	eventually(t, "all closed", func() bool { return open.Load() == 0 && c.idle.Load() == 0 })
}

func TestMaxIdle(t *testing.T) {
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
	c := New(Options{Policy: newClient(t, "127.0.0.1").policy, MaxIdle: 3})
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
	eventually(t, "three are left", func() bool { return open.Load() == 3 && c.idle.Load() == 3 })
}

// Endpoints share half of the kept connections: each may have more while it has fewer than are
// free. Of the other half each endpoint gets as many as it needs, until none is free. An
// endpoint keeps its connections and may always have one.
func TestShare(t *testing.T) {
	noLeaks(t)
	server, open := counting(t, ok)
	c := New(Options{Policy: newClient(t, "127.0.0.1").policy, MaxIdle: 6})
	defer c.Close()
	var endpoints []*Endpoint
	want := func(needed int, shares ...int) {
		t.Helper()
		for i, e := range endpoints {
			if got := e.Share(needed); got != shares[i] {
				t.Errorf("with %d connections endpoint %d, which needs %d, has a share of %d, want %d", open.Load(), i, needed, got, shares[i])
			}
		}
	}
	connect := func(e *Endpoint) *conn {
		cn, err := c.dial(t.Context(), e, time.Now().Add(generousTimeout), new(Timing))
		if err != nil {
			t.Fatal(err)
		}
		return cn
	}
	for range 4 {
		endpoints = append(endpoints, prepareURL(t, c, "http://"+server.address))
	}
	want(1, 3, 3, 3, 3)
	for _, e := range endpoints[:2] {
		post(t, withTimeout(t, generousTimeout), c, e)
		post(t, withTimeout(t, generousTimeout), c, e) // On the same connection.
	}
	want(1, 1, 1, 1, 1)
	want(5, 5, 5, 5, 5)
	first := connect(endpoints[0])
	want(1, 2, 1, 1, 1)
	want(5, 5, 5, 5, 5)
	others := []*conn{connect(endpoints[0]), connect(endpoints[1]), connect(endpoints[1])}
	want(5, 3, 3, 1, 1)
	// When the others use all connections, every endpoint gets an equal part.
	c.used.Add(-1)
	want(5, 3, 3, 3, 3)
	c.used.Add(1)
	first.close()
	first.close()
	want(5, 5, 5, 5, 5)
	for _, cn := range others {
		cn.close()
	}
	want(1, 1, 1, 1, 1)
	for _, e := range endpoints {
		c.Forget(e)
	}
	post(t, withTimeout(t, generousTimeout), c, prepareURL(t, c, "http://127.0.0.1:1"))
	eventually(t, "all closed", func() bool { return c.open.Load() == 0 })
	want(1, 3, 3, 3, 3)
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
	const first = time.Second
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
		t.Errorf("unexpected result %+v on connection %d", r, server.connections.Load())
	}
}
