package ingest

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/posthorn/posthorn/analytics/event"
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

// An announced HTTP/2 frame or header must not cost memory before it arrives.
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
	for id, most := range map[http2.SettingID]uint32{http2.SettingMaxFrameSize: 16 << 10, http2.SettingMaxConcurrentStreams: 100,
		http2.SettingMaxHeaderListSize: maxReadHead + 10*32} {
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

// unread is a response that its client does not read.
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

// Headers and responses count as memory, too, until the response is read.
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
			if least := int64(len(c.header) + <-w.length); f.memory.Used() < least {
				t.Errorf("%d bytes counted for headers and an answer of %d", f.memory.Used(), least)
			}
			close(w.taken)
			<-done
			if held := f.memory.Used(); held != 0 {
				t.Errorf("%d bytes are still held", held)
			}
		})
	}
}

// waiting is a body of which one part has arrived.
type waiting struct {
	io.Reader
	reached chan<- struct{}
	end     <-chan struct{}
}

func (b *waiting) Read(p []byte) (int, error) {
	if n, _ := b.Reader.Read(p); n > 0 {
		return n, nil
	}
	b.reached <- struct{}{}
	<-b.end
	return 0, io.ErrUnexpectedEOF
}

// A sender that stops occupies the memory of what it sent, whatever its request announces, and the memory of its
// namespace alone.
func TestSlowBodiesOccupyLittle(t *testing.T) {
	f := newFixture(t)
	reached, end := make(chan struct{}), make(chan struct{})
	var group sync.WaitGroup
	for name, c := range map[string]struct {
		key, encoding string
		sent          string
		length        int64
		most          int64
	}{
		"long":             {"", "", "{", event.MaxBodyBytes, 8 << 10},
		"with a key":       {"web-key", "", "{", event.MaxBodyBytes, 8 << 10},
		"chunked":          {"", "", "{", -1, 8 << 10},
		"begin of gzip":    {"", "gzip", "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x00", event.MaxBodyBytes, 8 << 10},
		"a part has come":  {"", "", strings.Repeat("a", 9<<10), event.MaxBodyBytes, 64 << 10},
		"more has come":    {"", "", strings.Repeat("a", 65<<10), event.MaxBodyBytes, 512 << 10},
		"gzip with a part": {"", "gzip", strings.Repeat("a", 9<<10), -1, 64 << 10},
	} {
		before := f.memory.Used()
		r := post("/v1/batch", c.key, "", "Content-Encoding", c.encoding)
		r.Body, r.ContentLength = io.NopCloser(&waiting{strings.NewReader(c.sent), reached, end}), c.length
		group.Go(func() { f.ServeHTTP(httptest.NewRecorder(), r) })
		<-reached
		if got, most := f.memory.Used()-before, c.most+int64(headerBytes(r.Header)); got > most {
			t.Errorf("%s: got %d bytes for %d that have arrived, want at most %d", name, got, len(c.sent), most)
		}
	}
	close(end)
	group.Wait()
	if held := f.memory.Used(); held != 0 {
		t.Errorf("afterwards: got %d bytes, want none", held)
	}
}
