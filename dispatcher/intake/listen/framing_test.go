package listen

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
)

const post = "POST /v1/track HTTP/1.1\r\nHost: x\r\n"

// faults are requests that two programs may read differently, each with its fault.
var faults = []struct {
	name, request string
	fault         error
}{
	{"length, then chunked", post + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", errBothLengths},
	{"chunked, then length", post + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", errBothLengths},
	{"the same in other cases", post + "tRANSFER-encoding: CHUNKED\r\ncontent-LENGTH:5\r\n\r\n0\r\n\r\n", errBothLengths},
	{"length 0 and chunked", post + "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", errBothLengths},
	{"chunked in HTTP/1.0", "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", errOldChunked},
	{"two equal lengths", post + "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", errLength},
	{"two lengths", post + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", errLength},
	{"a list of lengths", post + "Content-Length: 5, 5\r\n\r\nhello", errLength},
	{"a sign", post + "Content-Length: +5\r\n\r\nhello", errLength},
	{"hexadecimal", post + "Content-Length: 0x5\r\n\r\nhello", errLength},
	{"no length", post + "Content-Length:\r\n\r\n", errLength},
	{"a huge length", post + "Content-Length: 99999999999999999999\r\n\r\n", errLength},
	{"folded with a space", post + "X-A: b\r\n c\r\n\r\n", errFolded},
	{"folded with a tab", post + "X-A: b\r\n\tc\r\n\r\n", errFolded},
	{"a folded length", post + "Content-Length:\r\n 5\r\n\r\nhello", errLength},
	{"a folded Transfer-Encoding", post + "Transfer-Encoding: chunked\r\n , identity\r\n\r\n0\r\n\r\n", errFolded},
	{"folding before the first header", "POST / HTTP/1.1\r\n Host: x\r\n\r\n", errFolded},
	{"a request line with a bare LF", "POST / HTTP/1.1\nHost: x\r\n\r\n", errBareLF},
	{"a header with a bare LF", post + "Content-Length: 5\nX: y\r\n\r\nhello", errBareLF},
	{"a head that ends with a bare LF", post + "Content-Length: 5\r\n\nhello", errBareLF},
	{"a bare CR", post + "X: a\rContent-Length: 5\r\n\r\n", errBareCR},
	{"a space before the colon", post + "Content-Length : 5\r\n\r\nhello", errHeaderName},
	{"no colon", post + "Content-Length 5\r\n\r\n", errHeaderName},
	{"no name", post + ": 5\r\n\r\n", errHeaderName},
	{"another version", "POST / HTTP/1.2\r\nHost: x\r\n\r\n", errVersion},
	{"no version", "GET /\r\n\r\n", errVersion},
	{"HTTP/2 as a second request", post + "\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", errVersion},
	{"many empty lines", "\r\n\r\n\r\n" + post + "\r\n", errVersion},
	{"a chunk size with a sign", post + "Transfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n", errChunkSize},
	{"a chunk size with 0x", post + "Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n", errChunkSize},
	{"no chunk size", post + "Transfer-Encoding: chunked\r\n\r\n;a=b\r\nhello\r\n0\r\n\r\n", errChunkSize},
	{"a huge chunk", post + "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", errChunkSize},
	{"a chunk size with a bare LF", post + "Transfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n", errBareLF},
	{"a trailer with a bare LF", post + "Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\n\r\n", errBareLF},
	{"a folded trailer", post + "Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\r\n z\r\n\r\n", errFolded},
	{"an endless line", post + "X: " + strings.Repeat("x", maxLine+1), errLongLine},
}

// scanAll passes data to a framing in pieces of random size and returns the events.
func scanAll(data []byte, piece func() int) (f *framing, ended int, passed []byte, fault error) {
	f = &framing{http2: true}
	for len(data) > 0 && fault == nil {
		n := min(piece(), len(data))
		var sound int
		var e events
		sound, e, fault = f.scan(data[:n])
		if e&requestEnded != 0 {
			ended++
		}
		passed = append(passed, data[:sound]...)
		data = data[n:]
	}
	return f, ended, passed, fault
}

func TestFaults(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	pieces := map[string]func() int{"at once": func() int { return 1 << 20 }, "byte by byte": func() int {
		return 1
	}, "in pieces": func() int { return 1 + rng.IntN(20) }}
	for _, test := range faults {
		for name, piece := range pieces {
			t.Run(test.name+" "+name, func(t *testing.T) {
				// A sound request before it is read to its end.
				first := post + "Content-Length: 2\r\n\r\n{}"
				_, _, passed, fault := scanAll([]byte(first+test.request), piece)
				if !errors.Is(fault, test.fault) {
					t.Errorf("fault is %v, want %v", fault, test.fault)
				}
				if !bytes.HasPrefix(passed, []byte(first)) {
					t.Errorf("only %q was passed on", passed)
				}
			})
		}
	}
}

// FuzzFraming compares the framing with net/http: without a fault, both find the same
// requests with the same bodies.
func FuzzFraming(f *testing.F) {
	for _, test := range faults {
		if len(test.request) < 1000 {
			f.Add([]byte(test.request), uint64(1))
		}
	}
	f.Add([]byte(post+"Content-Length: 5\r\n\r\nhello\r\n"+post+"Transfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n"+post+"\r\n"), uint64(3))
	f.Add([]byte("GET / HTTP/1.0\r\n\r\n"), uint64(5))
	f.Fuzz(func(t *testing.T, data []byte, seed uint64) { compare(t, data, seed) })
}

func compare(t *testing.T, data []byte, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	state, _, passed, fault := scanAll(data, func() int { return 1 + rng.IntN(30) })
	if fault != nil || state.state == inLast || state.state == inPreface || state.state == inFrames {
		return
	}
	if !bytes.Equal(passed, data) {
		t.Fatalf("%d of %d bytes were passed on without a fault", len(passed), len(data))
	}
	// The framing must find the end of a request where net/http does.
	ends := map[int]bool{}
	var again framing
	for i := range data {
		if _, e, _ := again.scan(data[i : i+1]); e&requestEnded != 0 {
			ends[i+1] = true
		}
	}
	read := &countingReader{Reader: bytes.NewReader(data)}
	in := bufio.NewReader(read)
	for {
		for { // net/http's server skips line ends after a POST.
			b, err := in.Peek(1)
			if err != nil || b[0] != '\r' && b[0] != '\n' {
				break
			}
			_, _ = in.Discard(1)
		}
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return
		}
		if at := read.n - in.Buffered(); !ends[at] {
			t.Fatalf("net/http sees a request end at %d, the framing at %v, of %q", at, ends, data)
		}
	}
}

type countingReader struct {
	io.Reader
	n int
}

func (r *countingReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.n += n
	return n, err
}

// Random streams of sound requests: the framing finds no fault and the end of each request.
// With random damage, net/http and the framing agree.
func TestFramingOfRandomStreams(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for round := range 3000 {
		var data []byte
		requests := 1 + rng.IntN(5)
		for range requests {
			if rng.IntN(4) == 0 {
				data = append(data, "\r\n"...)
			}
			data = append(data, post...)
			for i := range rng.IntN(4) {
				data = fmt.Appendf(data, "X-%d: %s\r\n", i, strings.Repeat("v", rng.IntN(50)))
			}
			switch rng.IntN(3) {
			case 0:
				data = append(data, "\r\n"...)
			case 1:
				body := strings.Repeat("\n b:", rng.IntN(20))
				data = fmt.Appendf(data, "Content-Length: %d\r\n\r\n%s", len(body), body)
			case 2:
				data = append(data, "Transfer-Encoding: chunked\r\n\r\n"...)
				for range rng.IntN(4) {
					body := strings.Repeat("\r\n0\r\n", 1+rng.IntN(10))
					data = fmt.Appendf(data, "%x;e=%d\r\n%s\r\n", len(body), rng.IntN(9), body)
				}
				data = append(data, "0\r\n"...)
				if rng.IntN(2) == 0 {
					data = append(data, "T: v\r\n"...)
				}
				data = append(data, "\r\n"...)
			}
		}
		ended := 0
		var f framing
		for rest := data; len(rest) > 0; {
			_, e, fault := f.scan(rest[:1])
			if fault != nil {
				t.Fatalf("round %d: %v in %q", round, fault, data)
			}
			if e&requestEnded != 0 {
				ended++
			}
			rest = rest[1:]
		}
		if ended != requests {
			t.Fatalf("round %d: %d of %d requests ended in %q", round, ended, requests, data)
		}
		compare(t, data, uint64(round))
		for range 3 {
			damaged := bytes.Clone(data)
			damaged[rng.IntN(len(damaged))] = "\r\n :;0a\x00"[rng.IntN(8)]
			compare(t, damaged, uint64(round))
		}
	}
}

func BenchmarkScan(b *testing.B) {
	request := []byte(post + "Authorization: Basic d2ViLWtleTo=\r\nUser-Agent: analytics/1.0\r\nContent-Type: application/json\r\nAccept-Encoding: gzip\r\nContent-Length: 300\r\n\r\n" + strings.Repeat("x", 300))
	var f framing
	for b.Loop() {
		if _, _, err := f.scan(request); err != nil {
			b.Fatal(err)
		}
	}
}
