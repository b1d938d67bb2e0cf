package egress

import (
	"bufio"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

func itoa(n int) string { return strconv.Itoa(n) }

// FuzzReadAnswer: any input is read within the bounds. If this reader would reuse the
// connection, net/http reads the same response and stops at the same byte.
func FuzzReadAnswer(f *testing.F) {
	for _, s := range []string{
		ok, ok + ok, "HTTP/1.1 204 X\r\n\r\n", "HTTP/1.1 100 C\r\n\r\n" + ok, "HTTP/1.0 200 OK\r\n\r\nabc",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nX: y\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 200 OK\nContent-Length: 1\n\nx",
		"HTTP/1.1 200 OK\r\nconnection: close\r\nKeep-Alive: timeout=5\r\nRetry-After: 5\r\n\r\n",
		"HTTP/1.1 404 X\r\nContent-Length: 3\r\n\r\nab", "HTTP/1.1 304 X\r\nContent-Length: 3\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) == 0 {
			return
		}
		var body sink
		r := bufio.NewReaderSize(strings.NewReader(string(data)), 4<<10)
		a, err := readAnswer(r, &body, maxKeptBytes)
		if len(body.kept) > maxKeptBytes || body.left < 0 {
			t.Fatalf("out of bounds: kept %d, left %d", len(body.kept), body.left)
		}
		if err != nil || !a.keep {
			return
		}
		if a.status < 200 || a.status > 599 || r.Buffered() != 0 {
			t.Fatalf("kept after status %d with %d bytes left", a.status, r.Buffered())
		}
		theirs := bufio.NewReader(strings.NewReader(string(data)))
		var response *http.Response
		for {
			if response, err = http.ReadResponse(theirs, &http.Request{Method: http.MethodPost}); err != nil {
				t.Skip("net/http is stricter") // about what this client does not look at
			}
			if response.StatusCode >= 200 {
				break
			}
		}
		b, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatalf("kept, but net/http fails in the body: %v", err)
		}
		rest, _ := io.ReadAll(theirs)
		if response.StatusCode != a.status || len(rest) != 0 || response.Close {
			t.Fatalf("status %d, close %v, %d bytes left; want %d and nothing left", response.StatusCode, response.Close, len(rest), a.status)
		}
		if string(b[:min(len(b), maxKeptBytes)]) != string(body.kept) {
			t.Fatalf("body %q, want %q", body.kept, b)
		}
	})
}
