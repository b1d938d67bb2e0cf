package peer

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/quick"

	"github.com/google/go-cmp/cmp"
)

// A frame is read as it was written, also after others.
func TestFrames(t *testing.T) {
	want := []frame{
		{number: 1, target: "/v1/track?a=b", host: "calls.example.com",
			header: http.Header{"Authorization": {"Basic a2V5Og=="}, "X-Forwarded-For": {"192.0.2.1", "192.0.2.2"}}, body: []byte(`{"userId":"u"}`)},
		{number: 1 << 40, status: http.StatusServiceUnavailable, header: http.Header{"Retry-After": {""}}, body: []byte{}},
		{number: 3, target: "/", header: http.Header{}, body: bytes.Repeat([]byte("a"), streamedBytes)},
	}
	var all []byte
	for _, f := range want {
		all = f.append(all)
	}
	in := bufio.NewReader(bytes.NewReader(all))
	for _, f := range want {
		got, err := readFrame(in, streamedBytes)
		if diff := cmp.Diff(f, got, cmp.AllowUnexported(frame{})); diff != "" || err != nil {
			t.Errorf("got error %v and a difference:\n%s", err, diff)
		}
	}
	if _, err := readFrame(in, streamedBytes); !errors.Is(err, io.EOF) {
		t.Errorf("after the last one: got %v, want EOF", err)
	}
	q, err := readStreamed(bufio.NewReader(bytes.NewReader(all)))
	if err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(q.Body); q.number != 1 || q.URL.Path != "/v1/track" || q.URL.RawQuery != "a=b" || q.Host != want[0].host ||
		string(body) != string(want[0].body) || err != nil {
		t.Errorf("request: got %v for %q with body %q and error %v", q.URL, q.Host, body, err)
	}
}

// A damaged frame is an error. It neither panics nor needs more memory than its limits.
func TestDamagedFrames(t *testing.T) {
	f := frame{number: 7, target: "/v1/track", host: "a", header: http.Header{"A": {"1", "2"}, "B": {"3"}}, body: []byte("body")}
	good := f.append(nil)
	read := func(b []byte) error {
		_, err := readFrame(bufio.NewReader(bytes.NewReader(b)), streamedBytes)
		return err
	}
	for n := range good {
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if err := read(good[:n]); !errors.Is(err, want) {
			t.Errorf("the first %d of %d bytes: got error %v, want %v", n, len(good), err, want)
		}
	}
	if err := read(append([]byte{0xff}, good[1:]...)); err == nil || !strings.Contains(err.Error(), "more than 262144") {
		t.Errorf("large head: got %v, want an error with the limit", err)
	}
	f.body = make([]byte, streamedBytes+1)
	if err := read(f.append(nil)); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("large body: got %v, want an error with the limit", err)
	}
	longer := bytes.Clone(good) // The head has bytes after its last line.
	longer[lengthBytes-1]++
	longer[2*lengthBytes-1]--
	if err := read(longer); !errors.Is(err, errFrame) {
		t.Errorf("long head: got %v, want %v", err, errFrame)
	}
	if err := quick.Check(func(at uint16, value byte) bool {
		damaged := bytes.Clone(good)
		damaged[int(at)%len(good)] = value
		_ = read(damaged)
		return true
	}, &quick.Config{MaxCount: 20_000}); err != nil {
		t.Error(err)
	}
}
