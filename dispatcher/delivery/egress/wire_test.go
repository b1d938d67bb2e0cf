package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/wait"
)

// generousTimeout is a timeout for slow machines.
const generousTimeout = wait.Limit

// withTimeouts runs a check of an attempt whose timeout is part of the result. The timeout also bounds the
// steps before, so a check that fails runs again with a longer one.
func withTimeouts(t *testing.T, check func(timeout time.Duration) error) {
	t.Helper()
	var err error
	for _, timeout := range []time.Duration{time.Second, 5 * time.Second, 20 * time.Second} {
		if err = check(timeout); err == nil {
			return
		}
	}
	t.Error(err)
}

// noLeaks fails the test when goroutines or sockets remain at its end.
func noLeaks(t *testing.T) {
	t.Helper()
	files := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return 0
		}
		n := 0
		for _, e := range entries {
			if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, "socket:") {
				n++
			}
		}
		return n
	}
	goroutines, sockets := runtime.NumGoroutine(), files()
	t.Cleanup(func() {
		deadline := time.Now().Add(generousTimeout)
		for runtime.NumGoroutine() > goroutines || files() > sockets {
			if time.Now().After(deadline) {
				stacks := make([]byte, 1<<20)
				t.Errorf("%d goroutines, %d sockets before; %d and %d after\n%s", goroutines, sockets, runtime.NumGoroutine(), files(),
					stacks[:runtime.Stack(stacks, true)])
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
}

// listen calls serve for each connection, with its number from 0, and closes the connection
// afterwards.
func listen(t testing.TB, serve func(n int, c net.Conn)) *wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u := &wire{address: l.Addr().String()}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			n := int(u.connections.Add(1)) - 1
			all.Go(func() {
				defer c.Close()
				serve(n, c)
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	return u
}

type wire struct {
	address     string
	connections atomic.Int32
}

// readRequest reads one request of a connection; nil at the end of the connection.
func readRequest(r *bufio.Reader) []byte {
	request, err := http.ReadRequest(r)
	if err != nil {
		return nil
	}
	body, err := io.ReadAll(request.Body)
	if err != nil {
		return nil
	}
	return body
}

// answers returns a server that reads a request, sends the text, and waits until the client
// closes the connection.
func answers(text string) func(int, net.Conn) {
	return func(_ int, c net.Conn) {
		r := bufio.NewReader(c)
		for readRequest(r) != nil {
			if _, err := io.WriteString(c, text); err != nil {
				return
			}
		}
	}
}

// answersAndCloses returns a server that reads a request, sends the text, and closes the
// connection.
func answersAndCloses(text string) func(int, net.Conn) {
	return func(_ int, c net.Conn) {
		if readRequest(bufio.NewReader(c)) != nil {
			_, _ = io.WriteString(c, text)
		}
	}
}

func resets(c net.Conn) {
	_ = c.(*net.TCPConn).SetLinger(0)
	_ = c.Close()
}

// secretEndpoint returns an endpoint with the canary in each secret field.
func secretEndpoint(t testing.TB, c *Client, base string, tls *liveconfig.TLS) *Endpoint {
	t.Helper()
	e, err := c.Prepare(liveconfig.Endpoint{
		Name: "primary", URL: liveconfig.NewSecret(base + "/" + canary + "/x?token=" + canary + "&" + canary),
		Headers: []liveconfig.Header{{Name: "Authorization", Value: liveconfig.NewSecret("Bearer " + canary)}}, TLS: tls,
	})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// post posts with the canary in body and headers, and checks the guarantees of every result.
func post(t testing.TB, ctx context.Context, c *Client, e *Endpoint) Result {
	t.Helper()
	return postBody(t, ctx, c, e, []byte(`{"traits":"`+canary+`"}`))
}

func postBody(t testing.TB, ctx context.Context, c *Client, e *Endpoint, body []byte) Result {
	t.Helper()
	r := c.Post(ctx, e, []Header{{"X-Signature", canary}, {"Idempotency-Key", "m1"}}, body)
	for _, text := range []string{r.Message, string(r.Reason), r.RemoteAddr, fmt.Sprintf("%v %+v %#v %s %q", e, e, e, e, e), fmt.Sprint(*e)} {
		if strings.Contains(text, canary) || strings.Contains(text, "token=") {
			t.Errorf("a secret got out: %s", text)
		}
	}
	switch {
	case (r.Reason == "") != (r.StatusCode/100 == 2) || (r.Reason == "") != (r.Message == ""):
		t.Errorf("contradictory result %+v", r)
	case r.StatusCode != 0 && (!r.Sent || r.RemoteAddr == ""):
		t.Errorf("an answer to nothing: %+v", r)
	case len(r.Response) > 1024 || r.RetryAfter < 0 || r.RetryAfter > 24*time.Hour || len(r.Message) > 1500:
		t.Errorf("unbounded result %+v", r)
	case r.Timing.Total <= 0 || r.Timing.FirstByte > r.Timing.Total:
		t.Errorf("impossible timing %+v", r.Timing)
	}
	return r
}

const ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

func TestWireFaults(t *testing.T) {
	// It is locked for writing during the posts.
	var posts sync.RWMutex
	hang := func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }
	big := strings.Repeat("x", 1<<20)
	tests := []struct {
		name    string
		serve   func(n int, c net.Conn)
		body    int  // size; 0: a small one
		timeout bool // The case never ends, and the timeout is the expected outcome.
		reason  Reason
		status  int
		message string // A part of the message.
		conns   int    // Connections of two posts; 0: any.
	}{
		{name: "plain answer", serve: answers(ok), status: 200, conns: 1},
		{name: "no content", serve: answers("HTTP/1.1 204 No Content\r\n\r\n"), status: 204, conns: 1},
		{name: "no reason phrase", serve: answers("HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n"), status: 200, conns: 1},
		{name: "bare line feeds", serve: answers("HTTP/1.1 200 OK\nContent-Length: 2\n\nok"), status: 200, conns: 1},
		{name: "chunked", serve: answers("HTTP/1.1 201 Created\r\nTransfer-Encoding: Chunked\r\n\r\n3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nX-T: 1\r\n\r\n"), status: 201, conns: 1},
		{name: "HTTP/1.0", serve: answersAndCloses("HTTP/1.0 200 OK\r\n\r\nhello"), status: 200, conns: 2},
		{name: "HTTP/1.0 with length", serve: answers("HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"), status: 200, conns: 2},
		{name: "until close", serve: answersAndCloses("HTTP/1.1 200 OK\r\n\r\nhello"), status: 200, conns: 2},
		{name: "Connection: close", serve: answers("HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 2\r\n\r\nok"), status: 200, conns: 2},
		{name: "64 KiB of body", serve: answers("HTTP/1.1 200 OK\r\nContent-Length: 65536\r\n\r\n" + big[:65536]), status: 200, conns: 1},
		{name: "more than 64 KiB of body", serve: answers("HTTP/1.1 200 OK\r\nContent-Length: 65537\r\n\r\n" + big[:65537]),
			status: 200, conns: 2},
		{name: "more than 64 KiB in chunks", serve: answers("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100000\r\n" + big + "\r\n0\r\n\r\n"), status: 200, conns: 2},
		{name: "1 GB of body", serve: func(_ int, c net.Conn) {
			readRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
			for range 1000 {
				if _, err := io.WriteString(c, big); err != nil {
					return
				}
			}
		}, status: 200, conns: 2},
		{name: "1 GB of an error's body, no length", serve: func(_ int, c net.Conn) {
			readRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, "HTTP/1.1 500 Oops\r\n\r\n")
			for range 1000 {
				if _, err := io.WriteString(c, big); err != nil {
					return
				}
			}
		}, reason: ServerError, status: 500, message: "answered 500 Internal Server Error", conns: 2},
		{name: "a long header", serve: answers("HTTP/1.1 200 OK\r\nX-Long: " + big[:30000] + "\r\nContent-Length: 2\r\n\r\nok"),
			status: 200, conns: 1},
		{name: "a folded header", serve: answers("HTTP/1.1 200 OK\r\nX-Fold: a\r\n b\r\nContent-Length: 2\r\n\r\nok"), status: 200, conns: 2},
		{name: "100-continue", serve: answers("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ok), status: 200, conns: 1},
		{name: "twice the same length", serve: answers("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok"), status: 200, conns: 1},
		{name: "length and chunks", serve: answers("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), status: 200, conns: 2},
		{name: "more than its length", serve: answers(ok + ok), status: 200, conns: 2},
		{name: "closes behind the answer", serve: answersAndCloses(ok), status: 200},

		{name: "redirect", serve: answers("HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/" + canary + "\r\nContent-Length: 0\r\n\r\n"),
			reason: Redirected, status: 302, message: "redirects are not followed", conns: 1},
		{name: "not modified", serve: answers("HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n"), reason: Redirected,
			status: 304, conns: 1},
		{name: "bad request", serve: answers("HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n"), reason: Rejected, status: 400,
			message: "answered 400 Bad Request", conns: 1},
		{name: "gone", serve: answers("HTTP/1.1 410 " + canary + "\r\nContent-Length: 0\r\n\r\n"), reason: Rejected, status: 410,
			message: "answered 410 Gone", conns: 1},
		{name: "request timeout", serve: answersAndCloses("HTTP/1.1 408 T\r\nConnection: close\r\n\r\n"), reason: Throttled, status: 408},
		{name: "too many requests", serve: answers("HTTP/1.1 429 T\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"), reason: Throttled, status: 429, conns: 1},
		{name: "server error", serve: answers("HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n"), reason: ServerError, status: 503, conns: 1},
		{name: "an error that breaks off", serve: answersAndCloses("HTTP/1.1 400 Bad\r\nContent-Length: 100\r\n\r\nabc"), reason: Rejected,
			status: 400},

		{name: "closes after accept", serve: func(_ int, _ net.Conn) {}, reason: ConnectionFailed, message: "closed the connection without a response"},
		{name: "resets after accept", serve: func(_ int, c net.Conn) { resets(c) }, reason: ConnectionFailed, message: "closed the connection"},
		{name: "closes after the request", serve: func(_ int, c net.Conn) { readRequest(bufio.NewReader(c)) }, reason: ConnectionFailed, message: "without a response", conns: 2},
		{name: "resets after the request", serve: func(_ int, c net.Conn) {
			readRequest(bufio.NewReader(c))
			resets(c)
		}, reason: ConnectionFailed, conns: 2},
		{name: "closes in the status line", serve: answersAndCloses("HTTP/1.1 20"), reason: ConnectionFailed,
			message: "in the middle of its response", conns: 2},
		{name: "closes in the headers", serve: answersAndCloses("HTTP/1.1 200 OK\r\nContent-"), reason: ConnectionFailed,
			message: "in the middle of its response", conns: 2},
		{name: "closes in the body", serve: answersAndCloses("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"), reason: ConnectionFailed,
			message: "in the middle of its response", conns: 2},
		{name: "closes in a chunk", serve: answersAndCloses("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc"), reason: ConnectionFailed, message: "in the middle of its response", conns: 2},
		{name: "closes before the last chunk", serve: answersAndCloses("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"), reason: ConnectionFailed, message: "in the middle of its response", conns: 2},
		{name: "closes in an interim answer", serve: answersAndCloses("HTTP/1.1 100 Continue\r\n\r\n"), reason: ConnectionFailed,
			message: "in the middle of its response", conns: 2},

		{name: "never answers", serve: func(_ int, c net.Conn) { hang(c) }, timeout: true, reason: TimedOut, message: "no response from 127.0.0.1", conns: 2},
		{name: "trickles the head", serve: func(_ int, c net.Conn) {
			readRequest(bufio.NewReader(c))
			for _, b := range []byte("HTTP/1.1 200 OK\r\n" + big) {
				if _, err := c.Write([]byte{b}); err != nil {
					return
				}
				time.Sleep(50 * time.Millisecond)
			}
		}, timeout: true, reason: TimedOut, message: "no complete response", conns: 2},
		{name: "trickles the body", serve: func(_ int, c net.Conn) {
			readRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
			for {
				if _, err := c.Write([]byte("x")); err != nil {
					return
				}
				time.Sleep(50 * time.Millisecond)
			}
		}, timeout: true, reason: TimedOut, message: "no complete response", conns: 2},
		{name: "an error that never ends", serve: func(_ int, c net.Conn) {
			readRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, "HTTP/1.1 500 X\r\nContent-Length: 1000\r\n\r\nabc")
			hang(c)
		}, timeout: true, reason: ServerError, status: 500, conns: 2},
		{name: "sends interim answers without end", serve: func(_ int, c net.Conn) {
			readRequest(bufio.NewReader(c))
			for {
				if _, err := io.WriteString(c, "HTTP/1.1 102 Processing\r\n\r\n"); err != nil {
					return
				}
			}
		}, reason: InvalidResponse, message: "interim", conns: 2},
		{name: "sends headers without end", serve: func(_ int, c net.Conn) {
			readRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n")
			for {
				if _, err := io.WriteString(c, "X-A: b\r\n"); err != nil {
					return
				}
			}
		}, reason: InvalidResponse, message: "larger than 64 KiB", conns: 2},
		{name: "sends one header without end", serve: func(_ int, c net.Conn) {
			readRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nX-A: ")
			for {
				if _, err := io.WriteString(c, big); err != nil {
					return
				}
			}
		}, reason: InvalidResponse, message: "larger than 64 KiB", conns: 2},
		{name: "sends trailers without end", serve: func(_ int, c net.Conn) {
			readRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
			for {
				if _, err := io.WriteString(c, "X-A: b\r\n"); err != nil {
					return
				}
			}
		}, reason: InvalidResponse, message: "larger than 64 KiB", conns: 2},
		{name: "sends tiny chunks without end", serve: func(_ int, c net.Conn) {
			readRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			for {
				if _, err := io.WriteString(c, "1\r\nx\r\n"); err != nil {
					return
				}
			}
		}, reason: InvalidResponse, message: "larger than 64 KiB", conns: 2},

		{name: "answers before it has read the body, then closes", body: 8 << 20, serve: func(_ int, c net.Conn) {
			_, _ = io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
			// Its receive buffer has unread data, so the close is a reset.
			_, _ = c.Read(make([]byte, 100))
		}, reason: Rejected, status: 413, conns: 2},
		{name: "answers before it has read the body, then hangs", body: 8 << 20, serve: func(_ int, c net.Conn) {
			_, _ = io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
			_ = c.(*net.TCPConn).CloseWrite()
			time.Sleep(100 * time.Millisecond)
		}, reason: Rejected, status: 413, conns: 2},
		{name: "answers before it was asked", serve: func(_ int, c net.Conn) {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
			hang(c)
		}, status: 200, conns: 2},
		{name: "reads a large body", body: 8 << 20, serve: answers(ok), status: 200, conns: 1},
		{name: "never reads a large body", body: 8 << 20, timeout: true, serve: func(int, net.Conn) {
			posts.RLock()
			defer posts.RUnlock()
		}, reason: TimedOut, conns: 2},

		{name: "not HTTP", serve: answers("220 mail.example ESMTP " + canary + "\r\n"), reason: InvalidResponse,
			message: "does not begin with an HTTP/1.x status line", conns: 2},
		{name: "echoes the request line", serve: answers("POST /" + canary + " HTTP/1.1\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "HTTP/2 preface", serve: answers("\x00\x00\x12\x04\x00\x00\x00\x00\x00\r\n"), reason: InvalidResponse, conns: 2},
		{name: "HTTP/2 GOAWAY, then closes", serve: answersAndCloses("\x00\x00\x08\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"), reason: ConnectionFailed, message: "closed the connection", conns: 2},
		{name: "HTTP/2.0", serve: answers("HTTP/2.0 200 OK\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "HTTP/0.9", serve: answersAndCloses("<html>" + canary + "</html>\n"), reason: InvalidResponse, conns: 2},
		{name: "TLS at the http port", serve: answers("\x15\x03\x01\x00\x02\x02\x16\n"), reason: InvalidResponse,
			message: "use an https URL", conns: 2},
		{name: "status of letters", serve: answers("HTTP/1.1 abc OK\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "status of two digits", serve: answers("HTTP/1.1 20 OK\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "status of four digits", serve: answers("HTTP/1.1 2000 OK\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "status with a sign", serve: answers("HTTP/1.1 +20 OK\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "status 099", serve: answers("HTTP/1.1 099 OK\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "status 600", serve: answers("HTTP/1.1 600 OK\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "an endless status line", serve: answers("HTTP/1.1 200 " + big[:10000] + "\r\n\r\n"), reason: InvalidResponse,
			message: "status line is too long", conns: 2},
		{name: "space before the first header", serve: answers("HTTP/1.1 200 OK\r\n X-A: b\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "header without a colon", serve: answers("HTTP/1.1 200 OK\r\n" + canary + "\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "header without a name", serve: answers("HTTP/1.1 200 OK\r\n: x\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "space before the colon", serve: answers("HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "NUL in a header's name", serve: answers("HTTP/1.1 200 OK\r\nX\x00: 0\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "two lengths", serve: answers("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok"), reason: InvalidResponse, message: "Content-Length", conns: 2},
		{name: "negative length", serve: answers("HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok"), reason: InvalidResponse,
			message: "Content-Length", conns: 2},
		{name: "length with a plus", serve: answers("HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok"), reason: InvalidResponse,
			message: "Content-Length", conns: 2},
		{name: "absurd length", serve: answers("HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nok"), reason: InvalidResponse, message: "Content-Length", conns: 2},
		{name: "a length longer than the buffer", serve: answers("HTTP/1.1 200 OK\r\nContent-Length: " + strings.Repeat("0",
			9000) + "2\r\n\r\nok"), reason: InvalidResponse, message: "too long", conns: 2},
		{name: "unknown encoding", serve: answers("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"), reason: InvalidResponse, message: "Transfer-Encoding", conns: 2},
		{name: "chunked twice", serve: answers("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), reason: InvalidResponse, conns: 2},
		{name: "chunk size of letters", serve: answers("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"), reason: InvalidResponse, message: "chunk", conns: 2},
		{name: "negative chunk size", serve: answers("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"), reason: InvalidResponse,
			message: "chunk", conns: 2},
		{name: "absurd chunk size", serve: answers("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"), reason: InvalidResponse, message: "chunk", conns: 2},
		{name: "endless chunk extension", serve: answers("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + big[:9000] + "\r\n"),
			reason: InvalidResponse, message: "chunk", conns: 2},
		{name: "chunk line without CR", serve: answers("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\nx\r\n0\r\n\r\n"), reason: InvalidResponse, message: "CR LF", conns: 2},
		{name: "chunk longer than its size", serve: answers("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n"), reason: InvalidResponse, message: "chunk", conns: 2},
		{name: "switches protocols", serve: answers("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"), reason: InvalidResponse, conns: 2},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			noLeaks(t)
			body := []byte(canary)
			if test.body > 0 {
				body = bytes.Repeat([]byte("x"), test.body)
			}
			check := func(timeout time.Duration) error {
				server := listen(t, test.serve)
				c := newClient(t, "127.0.0.1")
				e := secretEndpoint(t, c, "http://"+server.address, nil)
				posts.Lock()
				defer posts.Unlock()
				for range 2 {
					r := postBody(t, withTimeout(t, timeout), c, e, body)
					if r.Reason != test.reason || r.StatusCode != test.status || !strings.Contains(r.Message, test.message) {
						return fmt.Errorf("got %d %q %q, want %d %q and %q in the message", r.StatusCode, r.Reason, r.Message, test.status, test.reason,
							test.message)
					}
					if r.RemoteAddr != server.address {
						return fmt.Errorf("RemoteAddr = %q, want %q", r.RemoteAddr, server.address)
					}
				}
				if n := int(server.connections.Load()); test.conns != 0 && n != test.conns {
					return fmt.Errorf("%d connections for two posts, want %d", n, test.conns)
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

func TestNothingListens(t *testing.T) {
	noLeaks(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	_ = l.Close()
	c := newClient(t, "127.0.0.1")
	r := post(t, withTimeout(t, generousTimeout), c, secretEndpoint(t, c, "http://"+address, nil))
	if r.Reason != ConnectionRefused || r.Sent || !strings.Contains(r.Message, address) {
		t.Errorf("unexpected result %+v", r)
	}
}

// A listener whose queue is full drops new connections without a response.
func TestBlackHole(t *testing.T) {
	withTimeouts(t, func(timeout time.Duration) error { return postToBlackHole(t, timeout) })
}

func postToBlackHole(t *testing.T, timeout time.Duration) error {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Skip(err)
	}
	defer syscall.Close(fd)
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Skip(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Skip(err)
	}
	bound, err := syscall.Getsockname(fd)
	if err != nil {
		t.Skip(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", bound.(*syscall.SockaddrInet4).Port)
	full := false
	for range 8 {
		c, err := net.DialTimeout("tcp", address, timeout)
		if full = err != nil; full {
			break
		}
		defer c.Close()
	}
	if !full {
		t.Skip("this system accepts more connections than its limit")
	}
	c := newClient(t, "127.0.0.1")
	r := post(t, withTimeout(t, timeout), c, secretEndpoint(t, c, "http://"+address, nil))
	if r.Reason != TimedOut || r.Sent || !strings.Contains(r.Message, "no connection to "+address) {
		return fmt.Errorf("unexpected result %+v", r)
	}
	return nil
}

func TestDNSHangs(t *testing.T) {
	noLeaks(t)
	c := newClient(t)
	released := make(chan struct{})
	defer close(released)
	c.resolver = resolver(func(string) []string { <-released; return nil })
	r := post(t, withTimeout(t, time.Second), c, secretEndpoint(t, c, "http://hooks.example", nil))
	if r.Reason != DNSFailed || r.Sent || !strings.Contains(r.Message, "timed out") || r.Timing.DNS <= 0 {
		t.Errorf("unexpected result %+v", r)
	}
}

// The response is slower than the interval at which a wait checks its context.
func TestSlowAnswer(t *testing.T) {
	noLeaks(t)
	ca := issue(t, nil, authority("test authority"))
	cert := issue(t, ca, nil)
	slow := func(_ int, c net.Conn) {
		r := bufio.NewReader(c)
		for readRequest(r) != nil {
			for _, part := range []string{"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", "ok"} {
				time.Sleep(cancelCheck + cancelCheck/4)
				_, _ = io.WriteString(c, part)
			}
		}
	}
	plain := listen(t, slow)
	secure, _ := listenTLS(t, func() *tls.Config { return &tls.Config{Certificates: []tls.Certificate{cert.forServer}} }, slow)
	c := newClient(t, "127.0.0.1")
	for _, e := range []*Endpoint{secretEndpoint(t, c, "http://"+plain.address, nil),
		secretEndpoint(t, c, "https://"+secure.address, &liveconfig.TLS{CA: ca.pem})} {
		// One post on a new connection and one on a reused connection.
		for _, ctx := range []context.Context{withTimeout(t, generousTimeout),
			WithDeadline(context.Background(), time.Now().Add(generousTimeout))} {
			if r := post(t, ctx, c, e); r.StatusCode != 200 || r.Timing.FirstByte < cancelCheck {
				t.Errorf("unexpected result %+v", r)
			}
		}
	}
	if n := plain.connections.Load() + secure.connections.Load(); n != 2 {
		t.Errorf("%d connections, want 2", n)
	}
}

func TestWithDeadline(t *testing.T) {
	noLeaks(t)
	server := listen(t, func(_ int, c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	c := newClient(t, "127.0.0.1")
	e := secretEndpoint(t, c, "http://"+server.address, nil)
	ctx := WithDeadline(withTimeout(t, generousTimeout), time.Now().Add(time.Second))
	if r := post(t, ctx, c, e); r.Reason != TimedOut || r.Timing.Total >= generousTimeout {
		t.Errorf("unexpected result %+v", r)
	}
	sooner := time.Now().Add(time.Minute)
	parent, cancel := context.WithDeadline(context.Background(), sooner)
	defer cancel()
	if at, _ := WithDeadline(parent, sooner.Add(time.Hour)).Deadline(); !at.Equal(sooner) {
		t.Errorf("deadline %v is later than the parent's", at)
	}
}

func TestContextEnds(t *testing.T) {
	noLeaks(t)
	got := make(chan struct{})
	server := listen(t, func(_ int, c net.Conn) {
		if readRequest(bufio.NewReader(c)) != nil {
			close(got)
			_, _ = io.Copy(io.Discard, c)
		}
	})
	c := newClient(t, "127.0.0.1")
	e := secretEndpoint(t, c, "http://"+server.address, nil)
	ctx, cancel := context.WithCancel(withTimeout(t, generousTimeout))
	go func() { <-got; cancel() }()
	r := post(t, ctx, c, e)
	if r.Reason != ConnectionFailed || !strings.Contains(r.Message, "canceled") || !r.Sent {
		t.Errorf("unexpected result %+v", r)
	}
	r = post(t, ctx, c, e)
	if r.Reason != ConnectionFailed || !strings.Contains(r.Message, "canceled") || r.Sent {
		t.Errorf("unexpected result %+v", r)
	}
	if n := server.connections.Load(); n != 1 {
		t.Errorf("%d connections; a canceled context still dialled", n)
	}
}

// The deadline bounds an attempt even if ctx has none, and a later response is not used for the
// next request.
func TestAnswerAfterTheDeadline(t *testing.T) {
	noLeaks(t)
	withTimeouts(t, func(timeout time.Duration) error { return postBeforeALateAnswer(t, timeout) })
}

func postBeforeALateAnswer(t *testing.T, timeout time.Duration) error {
	late := make(chan struct{})
	answer := sync.OnceFunc(func() { close(late) })
	defer answer()
	server := listen(t, func(n int, c net.Conn) {
		r := bufio.NewReader(c)
		for readRequest(r) != nil {
			if n == 0 {
				<-late
				_, _ = io.WriteString(c, "HTTP/1.1 500 late\r\nContent-Length: 0\r\n\r\n")
				continue
			}
			_, _ = io.WriteString(c, ok)
		}
	})
	c := newClient(t, "127.0.0.1")
	e := secretEndpoint(t, c, "http://"+server.address, nil)
	if r := post(t, withTimeout(t, timeout), c, e); r.Reason != TimedOut || !r.Sent {
		return fmt.Errorf("unexpected result %+v", r)
	}
	answer()
	if r := post(t, withTimeout(t, generousTimeout), c, e); r.StatusCode != 200 {
		return fmt.Errorf("unexpected result %+v", r)
	}
	return nil
}

// A request is repeated if the endpoint closed a kept connection before or during the request.
func TestStaleConnection(t *testing.T) {
	tests := []struct {
		name  string
		first func(c net.Conn, r *bufio.Reader, answered chan<- struct{}) // On the first connection, after its first response.
	}{
		{"closed while unused", func(c net.Conn, _ *bufio.Reader, answered chan<- struct{}) { _ = c.Close(); close(answered) }},
		{"reset while unused", func(c net.Conn, _ *bufio.Reader, answered chan<- struct{}) { resets(c); close(answered) }},
		{"408 while unused", func(c net.Conn, _ *bufio.Reader, answered chan<- struct{}) {
			_, _ = io.WriteString(c, "HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
			close(answered)
			_, _ = io.Copy(io.Discard, c)
		}},
		{"a second answer while unused", func(c net.Conn, _ *bufio.Reader, answered chan<- struct{}) {
			_, _ = io.WriteString(c, "HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n")
			close(answered)
			_, _ = io.Copy(io.Discard, c)
		}},
		{"closed at the next request", func(_ net.Conn, r *bufio.Reader, answered chan<- struct{}) {
			close(answered)
			readRequest(r)
		}},
		{"reset at the next request", func(c net.Conn, r *bufio.Reader, answered chan<- struct{}) {
			close(answered)
			readRequest(r)
			resets(c)
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			noLeaks(t)
			answered := make(chan struct{})
			server := listen(t, func(n int, c net.Conn) {
				r := bufio.NewReader(c)
				for readRequest(r) != nil {
					_, _ = io.WriteString(c, ok)
					if n == 0 {
						test.first(c, r, answered)
						return
					}
				}
			})
			c := newClient(t, "127.0.0.1")
			e := secretEndpoint(t, c, "http://"+server.address, nil)
			if r := post(t, withTimeout(t, generousTimeout), c, e); r.StatusCode != 200 {
				t.Fatalf("unexpected result %+v", r)
			}
			<-answered
			if r := post(t, withTimeout(t, generousTimeout), c, e); r.StatusCode != 200 {
				t.Errorf("unexpected result %+v", r)
			}
			if n := server.connections.Load(); n != 2 {
				t.Errorf("%d connections, want 2", n)
			}
		})
	}
}

// The request is repeated only once: an endpoint that closes every connection without a
// response has failed.
func TestStaleConnectionIsRetriedOnce(t *testing.T) {
	noLeaks(t)
	var requests atomic.Int32
	server := listen(t, func(n int, c net.Conn) {
		r := bufio.NewReader(c)
		for readRequest(r) != nil {
			if requests.Add(1) > 1 {
				return
			}
			_, _ = io.WriteString(c, ok)
		}
	})
	c := newClient(t, "127.0.0.1")
	e := secretEndpoint(t, c, "http://"+server.address, nil)
	post(t, withTimeout(t, generousTimeout), c, e)
	if r := post(t, withTimeout(t, generousTimeout), c, e); r.Reason != ConnectionFailed || !r.Sent {
		t.Errorf("unexpected result %+v", r)
	}
	if n := requests.Load(); n != 3 {
		t.Errorf("%d requests, want 3: one answered, one stale, one again", n)
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	tests := []struct {
		value string
		want  time.Duration
	}{
		{"", 0}, {"0", 0}, {"7", 7 * time.Second}, {"007", 7 * time.Second}, {"86400", 24 * time.Hour}, {"86401", 24 * time.Hour},
		{"99999999999999999999999", 24 * time.Hour}, {"9223372036854775807", 24 * time.Hour}, {"-5", 0}, {"+5", 0}, {"1.5", 0},
		{"soon", 0}, {"5s", 0},
		{"Sun, 01 Mar 2026 12:00:30 GMT", 30 * time.Second}, {"Sunday, 01-Mar-26 12:00:30 GMT", 30 * time.Second},
		{"Sun Mar  1 12:00:30 2026", 30 * time.Second},
		{"Sun, 01 Mar 2026 11:00:30 GMT", 0}, {"Fri, 01 Mar 2999 12:00:30 GMT", 24 * time.Hour}, {"Sun, 99 Mar 2026 12:00:30 GMT", 0},
	}
	for _, test := range tests {
		if got := parseRetryAfter(test.value, now); got != test.want {
			t.Errorf("%q: %v, want %v", test.value, got, test.want)
		}
	}
	// Retry-After on every retried status, in both forms. The first of two headers applies.
	for _, status := range []string{"408 X", "429 X", "500 X", "501 X", "502 X", "503 X", "504 X", "599 X"} {
		soon := time.Now().Add(time.Hour).UTC()
		for form, test := range map[string]struct {
			value    string
			from, to time.Duration
		}{
			"seconds": {"7", 7 * time.Second, 7 * time.Second},
			"date":    {soon.Format(http.TimeFormat), time.Hour - generousTimeout, time.Hour},
		} {
			server := listen(t, answers("HTTP/1.1 "+status+"\r\nretry-after: "+test.value+"\r\nRetry-After: 9\r\nContent-Length: 0\r\n\r\n"))
			c := newClient(t, "127.0.0.1")
			if r := post(t, withTimeout(t, generousTimeout), c, secretEndpoint(t, c, "http://"+server.address, nil)); r.RetryAfter < test.from ||
				r.RetryAfter > test.to {
				t.Errorf("status %s, %s: RetryAfter = %v", status, form, r.RetryAfter)
			}
		}
	}
}

// A server that supports only HTTP/2 receives no request, and the result has a reason.
func TestHTTP2Only(t *testing.T) {
	noLeaks(t)
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var hits atomic.Int32
	server := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hits.Add(1) }), Protocols: &protocols,
		ReadHeaderTimeout: generousTimeout}
	go func() { _ = server.Serve(l) }()
	defer server.Close()
	c := newClient(t, "127.0.0.1")
	for range 2 {
		r := post(t, withTimeout(t, generousTimeout), c, secretEndpoint(t, c, "http://"+l.Addr().String(), nil))
		if r.Reason == "" || r.Reason == TimedOut || r.Reason == ConnectionRefused {
			t.Errorf("unexpected result %+v", r)
		}
		t.Log(r.StatusCode, r.Reason, r.Message)
	}
	if hits.Load() > 0 {
		t.Error("the request was taken")
	}
}

// An endpoint whose address changes receives its requests at the new address: at once when the
// old address fails, otherwise after the lifetime of a connection.
func TestAddressChanges(t *testing.T) {
	for _, test := range []struct {
		name   string
		stays  bool // The old address still responds.
		maxAge time.Duration
	}{
		{"the old one is down", false, time.Hour},
		{"the old one answers", true, 100 * time.Millisecond},
	} {
		t.Run(test.name, func(t *testing.T) {
			noLeaks(t)
			var moved atomic.Bool
			old := listen(t, func(_ int, c net.Conn) {
				r := bufio.NewReader(c)
				for readRequest(r) != nil && (test.stays || !moved.Load()) {
					_, _ = io.WriteString(c, ok)
				}
			})
			_, port, _ := net.SplitHostPort(old.address)
			l, err := net.Listen("tcp", "127.0.0.2:"+port)
			if err != nil {
				t.Skip("the port is taken at 127.0.0.2")
			}
			next := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), ReadHeaderTimeout: generousTimeout}
			go func() { _ = next.Serve(l) }()
			defer next.Close()
			c := New(Options{Policy: newClient(t, "127.0.0.0/8").policy, MaxAge: test.maxAge})
			defer c.Close()
			c.resolver = resolver(func(string) []string {
				if moved.Load() {
					return []string{"127.0.0.2"}
				}
				return []string{"127.0.0.1"}
			})
			e := secretEndpoint(t, c, "http://hooks.example:"+port, nil)
			for range 3 {
				if r := post(t, withTimeout(t, generousTimeout), c, e); r.StatusCode != 200 || r.RemoteAddr != "127.0.0.1:"+port {
					t.Fatalf("before it moves: %+v", r)
				}
			}
			moved.Store(true)
			var r Result
			for deadline := time.Now().Add(generousTimeout); time.Now().Before(deadline); {
				if r = post(t, withTimeout(t, generousTimeout), c, e); r.RemoteAddr == "127.0.0.2:"+port || r.StatusCode != 200 || !test.stays {
					break
				}
			}
			if r.StatusCode != 200 || r.RemoteAddr != "127.0.0.2:"+port {
				t.Errorf("after it moved: %+v", r)
			}
		})
	}
}

func TestResponseIsRedacted(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		switch r.Header.Get("Idempotency-Key") {
		case "echo":
			_, _ = fmt.Fprintf(w, "no such hook %s (%s) for %q", r.RequestURI, strings.ReplaceAll(r.RequestURI, "/", `\/`), r.Header)
		case "cut": // The secret begins in the kept part and continues after it.
			_, _ = io.WriteString(w, strings.Repeat("-", 1020)+canary+strings.Repeat("-", 3041)+canary)
		case "break":
			w.Header().Set("Content-Length", "1000")
			_, _ = io.WriteString(w, "tail "+canary[:15])
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
	}))
	server.Config.ErrorLog = nil
	defer server.Close()
	c := newClient(t, "127.0.0.1")
	e := secretEndpoint(t, c, server.URL, nil)
	for key, want := range map[string]string{"echo": "no such hook [redacted]", "cut": strings.Repeat("-", 1020), "break": "tail "} {
		r := c.Post(withTimeout(t, generousTimeout), e, []Header{{"Idempotency-Key", key}}, nil)
		if r.Reason != Rejected || !strings.HasPrefix(string(r.Response), want) || strings.Contains(string(r.Response), canary[:10]) ||
			len(r.Response) > 1024 {
			t.Errorf("%s: unexpected result %+v: %s", key, r, r.Response)
		}
	}
}

// resolver answers address lookups with the results of lookup; without results: no such host.
func resolver(lookup func(name string) []string) *net.Resolver {
	return resolverByType(func(name string, _ dnsmessage.Type) ([]string, dnsmessage.RCode, bool) {
		all := lookup(name)
		if len(all) == 0 {
			return nil, dnsmessage.RCodeNameError, true
		}
		return all, dnsmessage.RCodeSuccess, true
	})
}

// resolverByType is resolver with a result for each type of record; answered is false for a query that is never answered.
func resolverByType(lookup func(name string, of dnsmessage.Type) (addresses []string, code dnsmessage.RCode, answered bool)) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		client, server := net.Pipe()
		context.AfterFunc(ctx, func() { _ = server.Close() })
		go func() {
			defer server.Close()
			size := make([]byte, 2)
			if _, err := io.ReadFull(server, size); err != nil {
				return
			}
			packet := make([]byte, int(size[0])<<8|int(size[1]))
			if _, err := io.ReadFull(server, packet); err != nil {
				return
			}
			var message dnsmessage.Message
			if err := message.Unpack(packet); err != nil {
				return
			}
			question := message.Questions[0]
			message.Response, message.RecursionAvailable, message.Additionals = true, true, nil
			addresses, code, answered := lookup(strings.TrimSuffix(question.Name.String(), "."), question.Type)
			if message.RCode = code; !answered {
				<-ctx.Done()
				return
			}
			for _, address := range addresses {
				ip := net.ParseIP(address)
				header := dnsmessage.ResourceHeader{Name: question.Name, Type: question.Type, Class: question.Class}
				if v4 := ip.To4(); v4 != nil && !strings.Contains(address, ":") {
					if question.Type == dnsmessage.TypeA {
						message.Answers = append(message.Answers, dnsmessage.Resource{Header: header, Body: &dnsmessage.AResource{A: [4]byte(v4)}})
					}
				} else if question.Type == dnsmessage.TypeAAAA {
					message.Answers = append(message.Answers, dnsmessage.Resource{Header: header,
						Body: &dnsmessage.AAAAResource{AAAA: [16]byte(ip.To16())}})
				}
			}
			packet, err := message.Pack()
			if err != nil {
				return
			}
			_, _ = server.Write(append([]byte{byte(len(packet) >> 8), byte(len(packet))}, packet...))
		}()
		return client, nil
	}}
}

func TestEgressGuardEndToEnd(t *testing.T) {
	noLeaks(t)
	var hits atomic.Int32
	server := listen(t, func(n int, c net.Conn) { hits.Add(1); answersAndCloses(ok)(n, c) })
	_, port, _ := net.SplitHostPort(server.address)
	t.Setenv("HTTP_PROXY", "http://"+server.address)
	t.Setenv("http_proxy", "http://"+server.address)
	t.Setenv("ALL_PROXY", "http://"+server.address)
	tests := []struct {
		name   string
		allow  []string
		host   string
		dns    []string // Results of the lookups.
		reason Reason
		sent   bool
	}{
		{"public, through no proxy", nil, "denied.example", []string{"127.0.0.1"}, AddressDenied, false},
		{"literal", nil, "127.0.0.1", nil, AddressDenied, false},
		{"literal mapped", nil, "[::ffff:127.0.0.1]", nil, AddressDenied, false},
		{"literal unspecified", nil, "0.0.0.0", nil, AddressDenied, false},
		{"literal IPv6 unspecified", nil, "[::]", nil, AddressDenied, false},
		{"localhost", nil, "localhost", []string{"127.0.0.1", "::1"}, AddressDenied, false},
		{"resolves to loopback", nil, "hooks.example", []string{"127.0.0.1"}, AddressDenied, false},
		{"resolves to mapped loopback", nil, "hooks.example", []string{"::ffff:127.0.0.1"}, AddressDenied, false},
		{"resolves to unspecified", nil, "hooks.example", []string{"0.0.0.0"}, AddressDenied, false},
		{"resolves to metadata", []string{"*.example", "0.0.0.0/0"}, "hooks.example", []string{"169.254.169.254"}, AddressDenied, false},
		{"resolves to NAT64 metadata", []string{"*.example"}, "hooks.example", []string{"64:ff9b::a9fe:a9fe"}, AddressDenied, false},
		{"resolves to many, all denied", []string{"10.0.0.0/8"}, "hooks.example", []string{"127.0.0.1", "127.0.0.2", "::1", "fe80::1"},
			AddressDenied, false},
		{"allowed by CIDR", []string{"127.0.0.0/8"}, "hooks.example", []string{"127.0.0.1"}, "", true},
		{"allowed by host", []string{"hooks.example"}, "hooks.example", []string{"127.0.0.1"}, "", true},
		{"allowed by suffix", []string{"*.example"}, "Hooks.Example.", []string{"127.0.0.1"}, "", true},
		{"one of several is allowed", []string{"127.0.0.1"}, "hooks.example", []string{"127.0.0.2", "127.0.0.1"}, "", true},
		{"one of two families is allowed", []string{"127.0.0.1"}, "hooks.example", []string{"::1", "127.0.0.1"}, "", true},
		{"no such host", []string{"127.0.0.1"}, "hooks.example", nil, DNSFailed, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			hits.Store(0)
			c := newClient(t, test.allow...)
			c.resolver = resolver(func(name string) []string {
				if !strings.EqualFold(name, strings.TrimSuffix(test.host, ".")) {
					return nil
				}
				return test.dns
			})
			r := post(t, withTimeout(t, generousTimeout), c, secretEndpoint(t, c, "http://"+test.host+":"+port, nil))
			if r.Reason != test.reason || r.Sent != test.sent {
				t.Errorf("unexpected result %+v", r)
			}
			if test.reason == AddressDenied && !strings.Contains(r.Message, "egress policy denies") {
				t.Errorf("unhelpful message: %s", r.Message)
			}
			if got := hits.Load() > 0; got != test.sent {
				t.Errorf("the server was reached: %v", got)
			}
		})
	}
}

// A name that resolves to an allowed address first and to another one later is checked each
// time.
func TestDNSRebinding(t *testing.T) {
	noLeaks(t)
	server := listen(t, answersAndCloses("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"))
	_, port, _ := net.SplitHostPort(server.address)
	var lookups atomic.Int32
	c := newClient(t, "127.0.0.1")
	c.resolver = resolver(func(string) []string {
		return []string{[]string{"127.0.0.1", "127.0.0.2", "169.254.169.254", "127.0.0.1"}[int(lookups.Load())%4]}
	})
	e := secretEndpoint(t, c, "http://rebind.example:"+port, nil)
	for i, want := range []Reason{"", AddressDenied, AddressDenied, ""} {
		lookups.Store(int32(i))
		if r := post(t, withTimeout(t, generousTimeout), c, e); r.Reason != want {
			t.Errorf("lookup %d: %+v, want %q", i, r, want)
		}
	}
	if n := server.connections.Load(); n != 2 {
		t.Errorf("%d connections, want 2", n)
	}
}

func TestRedirectIsNotFollowed(t *testing.T) {
	noLeaks(t)
	target := listen(t, answersAndCloses(ok))
	for _, status := range []string{"301", "302", "303", "307", "308"} {
		server := listen(t,
			answersAndCloses("HTTP/1.1 "+status+" X\r\nLocation: http://"+target.address+"/"+canary+
				"\r\nRefresh: 0; url=http://"+target.address+"\r\nContent-Length: 0\r\n\r\n"))
		c := newClient(t, "127.0.0.1")
		if r := post(t, withTimeout(t, generousTimeout), c, secretEndpoint(t, c, "http://"+server.address, nil)); r.Reason != Redirected {
			t.Errorf("status %s: %+v", status, r)
		}
	}
	if n := target.connections.Load(); n != 0 {
		t.Errorf("%d redirects were followed", n)
	}
}
