package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"
)

const (
	ok      = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	timeout = time.Second // deadline of a POST to a faulty receiver
	posts   = 3           // consecutive POSTs, so that persistent connections are reused
)

// fault is a receiver that misbehaves. handle serves the n-th connection; it
// counts the requests that it has read and the bytes that it could send.
type fault struct {
	name   string
	body   int // bytes of the request; 1 KB when 0
	handle func(s *seen, n int, c net.Conn)
}

type seen struct{ requests, sent atomic.Int64 }

// request reads one; false at the connection's end.
func (s *seen) request(r *bufio.Reader) bool {
	if skipRequest(r) != nil {
		return false
	}
	s.requests.Add(1)
	return true
}

// says answers each request with a text.
func says(text string) func(*seen, int, net.Conn) {
	return func(s *seen, _ int, c net.Conn) {
		for r := bufio.NewReader(c); s.request(r); {
			s.send(c, text)
		}
	}
}

// saysAndCloses answers one request with a text and closes the connection.
func saysAndCloses(text string) func(*seen, int, net.Conn) {
	return func(s *seen, _ int, c net.Conn) {
		if s.request(bufio.NewReader(c)) {
			s.send(c, text)
		}
	}
}

// forever answers with a head and then repeats a text.
func forever(head, text string, pause time.Duration) func(*seen, int, net.Conn) {
	return func(s *seen, _ int, c net.Conn) {
		if !s.request(bufio.NewReader(c)) || !s.send(c, head) {
			return
		}
		for s.send(c, text) {
			time.Sleep(pause)
		}
	}
}

func (s *seen) send(c net.Conn, text string) bool {
	n, err := io.WriteString(c, text)
	s.sent.Add(int64(n))
	return err == nil
}

var receivers = []fault{
	{name: "closes after each answer, without notice", handle: saysAndCloses(ok)},
	{name: "reads a second request of a connection and closes", handle: func(s *seen, _ int, c net.Conn) {
		r := bufio.NewReader(c)
		if s.request(r) && s.send(c, ok) {
			s.request(r)
		}
	}},
	{name: "sends a second, unrequested answer (500)", handle: func(s *seen, _ int, c net.Conn) {
		for r := bufio.NewReader(c); s.request(r); {
			s.send(c, ok)
			time.Sleep(20 * time.Millisecond)
			s.send(c, strings.Replace(ok, "200 OK", "500 No", 1))
		}
	}},
	{name: "closes in the body of a 200", handle: saysAndCloses("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")},
	{name: "closes in a chunk of a 200", handle: saysAndCloses("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc")},
	{name: "resets instead of an answer", handle: func(s *seen, _ int, c net.Conn) {
		s.request(bufio.NewReader(c))
		_ = c.(*net.TCPConn).SetLinger(0)
	}},
	{name: "status line without a number", handle: says("HTTP/1.1 OK\r\nContent-Length: 0\r\n\r\n")},
	{name: "status +20", handle: says("HTTP/1.1 +20 OK\r\nContent-Length: 0\r\n\r\n")},
	{name: "answers in HTTP/0.9", handle: saysAndCloses("<html>hello</html>\n")},
	{name: "length and chunks together", handle: says("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")},
	{name: "two different lengths", handle: says("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok")},
	{name: "space before a header's colon", handle: says("HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok")},
	{name: "chunk size that is not a number", handle: says("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n")},
	{name: "a byte of the head every 50 ms", handle: forever("HTTP/1.1 200 OK\r\nX: ", "x", 50*time.Millisecond)},
	{name: "a byte of the body every 50 ms", handle: forever("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", "x", 50*time.Millisecond)},
	{name: "endless interim answers", handle: forever("", "HTTP/1.1 100 Continue\r\n\r\n", 0)},
	{name: "endless headers", handle: forever("HTTP/1.1 200 OK\r\n", "X-Header: "+strings.Repeat("x", 1000)+"\r\n", 0)},
	{name: "1 GB of body to a 200", handle: forever("HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n", strings.Repeat("x", 64<<10), 0)},
	{name: "answers 413 before it has read 8 MB, then closes", body: 8 << 20, handle: func(s *seen, _ int, c net.Conn) {
		s.send(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		_ = c.(*net.TCPConn).CloseWrite()
		time.Sleep(50 * time.Millisecond)
	}},
}

// faults prints the results of each client with faulty receivers.
func faults(out io.Writer) error {
	clients := []func(string) *client{posthorn, netHTTP, fastHTTP}
	fmt.Fprintf(out, "Faulty receivers: the results of %d consecutive POSTs, with a deadline of %v each; then, if different, the requests\nthat arrived, the time beyond all deadlines, and the data sent to the client\n\n", posts, timeout)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "receiver")
	for _, newClient := range clients {
		fmt.Fprintf(w, "\t%s", newClient("127.0.0.1:1").name)
	}
	fmt.Fprintln(w)
	for _, f := range receivers {
		fmt.Fprint(w, f.name)
		for _, newClient := range clients {
			outcome, err := meet(f, newClient)
			if err != nil {
				return err
			}
			fmt.Fprintf(w, "\t%s", outcome)
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(out, "One of the connections is reset while %d POSTs are in flight\n\n", *workers)
	for _, newClient := range []func(string) *client{posthorn, netHTTP, netHTTP2, fastHTTP} {
		if err := broken(w, newClient); err != nil {
			return err
		}
	}
	return w.Flush()
}

// broken counts the POSTs that fail with one connection. HTTP/2 has one for all.
func broken(w io.Writer, newClient func(string) *client) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	first := &firstConn{Listener: l, got: make(chan net.Conn, 1)}
	release := make(chan struct{})
	var inside atomic.Int64
	server := netHTTPServer(func() {
		if inside.Add(1) > 1 {
			<-release
		}
	})
	go server.Serve(first) //nolint:errcheck // it is closed below
	defer server.Close()
	c := newClient(l.Addr().String())
	defer c.close()
	if _, err := c.post(time.Now().Add(timeout), []byte("x")); err != nil { // It opens the first connection.
		return err
	}
	var failed atomic.Int64
	var done sync.WaitGroup
	for range *workers {
		done.Go(func() {
			if status, err := c.post(time.Now().Add(10*time.Second), []byte("x")); err != nil || status != 200 {
				failed.Add(1)
			}
		})
	}
	for inside.Load() < 1+int64(*workers) {
		time.Sleep(time.Millisecond)
	}
	conn := <-first.got
	_ = conn.(*net.TCPConn).SetLinger(0)
	_ = conn.Close()
	time.Sleep(100 * time.Millisecond)
	close(release)
	done.Wait()
	fmt.Fprintf(w, "%s\t%d fail\n", c.name, failed.Load())
	return nil
}

// firstConn passes on its first connection.
type firstConn struct {
	net.Listener
	got chan net.Conn
}

func (l *firstConn) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		select {
		case l.got <- c:
		default:
		}
	}
	return c, err
}

// meet runs a client with a faulty receiver.
func meet(f fault, newClient func(string) *client) (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	var s seen
	go accept(l, func(n int, c net.Conn) { f.handle(&s, n, c) })
	c := newClient(l.Addr().String())
	defer c.close()
	size := f.body
	if size == 0 {
		size = 1024
	}
	body := bytes.Repeat([]byte("x"), size)
	var got []string
	var late time.Duration
	for range posts {
		deadline := time.Now().Add(timeout)
		status, err := c.post(deadline, body)
		late = max(late, time.Since(deadline))
		text := fmt.Sprint(status)
		if err != nil {
			text = "error"
		}
		got = append(got, text)
		time.Sleep(50 * time.Millisecond) // Wait for the receiver's actions after a response.
	}
	outcome := strings.Join(got, " ")
	if n := s.requests.Load(); n > posts {
		outcome += fmt.Sprintf("; %d arrived", n)
	}
	if late > timeout/4 {
		outcome += fmt.Sprintf("; %.1f s late", late.Seconds())
	}
	if mb := s.sent.Load() >> 20; mb > 0 {
		outcome += fmt.Sprintf("; %d MB", mb)
	}
	return outcome, nil
}
