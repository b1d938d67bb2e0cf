package ingest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/posthorn/posthorn/event"
	"github.com/posthorn/posthorn/test/wait"
)

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(wait.Limit))
	return c
}

// When one connection too many comes, who has waited longest makes room, and
// nobody who is in the middle of a request.
func TestConnectionsAreBounded(t *testing.T) {
	f := newFixture(t)
	crowd := newCrowd(3)
	addr, _ := serve(t, f, func(s *http.Server) { s.ConnState = crowd.follow })
	// are waits until so many are open, and so many of them wait.
	are := func(open, waiting int) {
		t.Helper()
		for deadline := time.Now().Add(wait.Limit); ; time.Sleep(time.Millisecond) {
			crowd.mu.Lock()
			o, w := len(crowd.places), crowd.waiting.Len()
			crowd.mu.Unlock()
			if o == open && w == waiting {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d connections are open and %d wait, want %d and %d", o, w, open, waiting)
			}
		}
	}
	head := fmt.Sprintf("POST /v1/track HTTP/1.1\r\nHost: x\r\nAuthorization: Basic d2ViLWtleTo=\r\nContent-Length: %d\r\n\r\n", len(track))
	begin := func() net.Conn {
		t.Helper()
		c := dial(t, addr)
		_, _ = io.WriteString(c, head)
		return c
	}
	end := func(c net.Conn) {
		t.Helper()
		_, _ = io.WriteString(c, track)
		if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("%v, %v; want 200", resp, err)
		}
	}
	gone := func(c net.Conn) {
		t.Helper()
		if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("a connection that should have made room is open")
		}
	}
	busy := begin()
	are(1, 0)
	idle := begin()
	end(idle)
	are(2, 1)
	halfway := dial(t, addr)
	_, _ = io.WriteString(halfway, "POST /v1/track HTTP/1.1\r\nX: ")
	are(3, 2)
	second := begin()
	are(3, 1)
	gone(idle)
	third := begin()
	are(3, 0)
	gone(halfway)
	gone(dial(t, addr))
	for _, c := range []net.Conn{busy, second, third} {
		end(c)
	}
	are(3, 3)
}

// What a client of HTTP/2 announces must not cost memory before it comes.
func TestHTTP2PromisesLittle(t *testing.T) {
	addr, _ := serve(t, newFixture(t))
	c := dial(t, addr)
	_, _ = io.WriteString(c, http2.ClientPreface)
	framer := http2.NewFramer(c, c)
	if err := framer.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	frame, err := framer.ReadFrame()
	if err != nil {
		t.Fatal(err)
	}
	settings := frame.(*http2.SettingsFrame)
	for id, most := range map[http2.SettingID]uint32{http2.SettingMaxFrameSize: 16 << 10, http2.SettingMaxConcurrentStreams: 100, http2.SettingMaxHeaderListSize: 9 << 10} {
		if got, ok := settings.Value(id); !ok || got > most {
			t.Errorf("%v is %d, want at most %d", id, got, most)
		}
	}
	_, _ = c.Write([]byte{0x0f, 0xff, 0xff, 0x20, 0, 0, 0, 0, 0}) // a frame of 1 MiB
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			t.Fatalf("no answer to a frame that is too large: %v", err)
		}
		if away, ok := frame.(*http2.GoAwayFrame); ok {
			if away.ErrCode != http2.ErrCodeFrameSize {
				t.Error(away)
			}
			return
		}
	}
}

// unread is an answer that its client does not take.
type unread struct {
	http.ResponseWriter
	length chan int
	taken  chan struct{}
}

func (u unread) Write(b []byte) (int, error) {
	u.length <- len(b)
	<-u.taken
	return len(b), nil
}

func (u unread) Header() http.Header { return http.Header{} }
func (u unread) WriteHeader(int)     {}

// Headers and answers count as memory, too: until the answer is taken.
func TestHeadersAndAnswersAreInTheBudget(t *testing.T) {
	for name, c := range map[string]struct {
		header, call string
		calls        int
	}{
		"headers":                     {strings.Repeat("h", 20<<10), `{"type":"track","userId":"u","event":"E"}`, 1},
		"answer with many rejections": {"", `{"type":"track","userId":"u"}`, event.MaxBatchCalls},
		"answer with long rejections": {"", `{"type":"x","userId":"u"}`, event.MaxBatchCalls},
		"answer about too many calls": {"", `0`, 200_000},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			w := unread{length: make(chan int), taken: make(chan struct{})}
			body := `{"batch":[` + strings.TrimSuffix(strings.Repeat(c.call+",", c.calls), ",") + `]}`
			done := make(chan struct{})
			go func() {
				defer close(done)
				f.ServeHTTP(w, post("/v1/batch", "web-key", body, "X-Large", c.header))
			}()
			if least := int64(len(c.header) + <-w.length); f.memory.held() < least {
				t.Errorf("%d bytes counted for headers and an answer of %d", f.memory.held(), least)
			}
			close(w.taken)
			<-done
			if held := f.memory.held(); held != 0 {
				t.Errorf("%d bytes stay held", held)
			}
		})
	}
}
