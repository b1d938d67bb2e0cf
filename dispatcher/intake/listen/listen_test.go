package listen

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/posthorn/posthorn/test/wait"
)

// fixture is a Server whose handler counts and reads its requests.
type fixture struct {
	*Server
	addr, tlsAddr string
	started       atomic.Int64
	bodies        sync.Map // path -> body
	hold          chan struct{}
	roots         *tls.Config
}

func newFixture(t *testing.T, conns int) *fixture {
	t.Helper()
	f := &fixture{hold: make(chan struct{})}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	f.Server = New(&http.Server{
		Protocols: &protocols, MaxHeaderBytes: 8 << 10, ReadHeaderTimeout: wait.Limit,
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 100},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			f.started.Add(1)
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			f.bodies.Store(r.URL.Path, string(body))
			if r.URL.Path == "/held" {
				<-f.hold
			}
			_, _ = w.Write([]byte("ok"))
		}),
	}, conns, slog.New(slog.DiscardHandler))
	certificate := httptest.NewUnstartedServer(nil)
	certificate.StartTLS()
	t.Cleanup(certificate.Close)
	f.roots = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: certificate.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs,
		ServerName: "example.com"}
	for _, encrypted := range []bool{false, true} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if encrypted {
			f.tlsAddr = l.Addr().String()
			go func() { _ = f.ServeTLS(l, certificate.TLS) }()
		} else {
			f.addr = l.Addr().String()
			go func() { _ = f.Serve(l) }()
		}
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func (f *fixture) dial(t *testing.T, encrypted bool) net.Conn {
	t.Helper()
	var c net.Conn
	var err error
	if encrypted {
		c, err = tls.Dial("tcp", f.tlsAddr, f.roots)
	} else {
		c, err = net.Dial("tcp", f.addr)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(wait.Limit))
	return c
}

func (f *fixture) open() int {
	return f.conns.Len()
}

// The request before the fault gets 200. The faulty request gets 400 or no response and never
// reaches the handler, and no bytes after it are read.
func TestFaultsEndTheConnection(t *testing.T) {
	f := newFixture(t, 100)
	for _, encrypted := range []bool{false, true} {
		for _, test := range faults {
			if errors.Is(test.fault, errLongLine) {
				continue // net/http answers 431 before.
			}
			t.Run(fmt.Sprint(test.name, " TLS ", encrypted), func(t *testing.T) {
				f.bodies.Clear()
				f.started.Store(0)
				before := int64(0)
				c := f.dial(t, encrypted)
				if strings.Contains(test.name, "second request") || strings.Contains(test.name, "chunk") || strings.Contains(test.name, "trailer") {
					before = 1 // The handler starts before the fault is read.
				}
				go func() {
					_, _ = io.WriteString(c, post+"Content-Length: 2\r\n\r\n{}"+test.request+"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
				}()
				answers, _ := io.ReadAll(c)
				if !bytes.HasPrefix(answers, []byte("HTTP/1.1 200 ")) {
					t.Errorf("the sound request before it is answered %.60q", answers)
				}
				if n := bytes.Count(answers, []byte("HTTP/1.1 200 ")); n > 1+int(before) {
					t.Errorf("%d requests are answered 200: %q", n, answers)
				}
				if before == 0 && !bytes.Contains(answers, []byte("HTTP/1.1 400 ")) {
					t.Errorf("no 400: %q", answers)
				}
				if n := f.started.Load(); n > 1+before {
					t.Errorf("%d requests reached the handler, want at most %d", n, 1+before)
				}
				if _, ok := f.bodies.Load("/smuggled"); ok {
					t.Error("the request behind the fault reached the handler")
				}
			})
		}
	}
}

// net/http serves a request with method PRI as HTTP/1 when it is not the preface of
// HTTP/2. The framing must not follow such a connection as frames, unchecked.
func TestHTTP1BehindTheFirstLineOfHTTP2(t *testing.T) {
	f := newFixture(t, 100)
	for _, encrypted := range []bool{false, true} {
		c := f.dial(t, encrypted)
		_, _ = io.WriteString(c, "PRI * HTTP/2.0\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
		answers, _ := io.ReadAll(c)
		if !bytes.HasPrefix(answers, []byte("HTTP/1.1 400 ")) || bytes.Count(answers, []byte("HTTP/1.1 ")) != 1 {
			t.Errorf("TLS %v: the answers are %q, want one 400", encrypted, answers)
		}
	}
	if n := f.started.Load(); n != 0 {
		t.Errorf("%d requests reached the handler, want 0", n)
	}
}

// Sound requests are accepted with both protocols, in clear text and over TLS.
func TestSoundRequestsPass(t *testing.T) {
	f := newFixture(t, 100)
	for _, encrypted := range []bool{false, true} {
		for _, second := range []bool{false, true} {
			var protocols http.Protocols
			protocols.SetHTTP1(!second)
			protocols.SetHTTP2(second && encrypted)
			protocols.SetUnencryptedHTTP2(second && !encrypted)
			transport := &http.Transport{Protocols: &protocols, TLSClientConfig: f.roots}
			t.Cleanup(transport.CloseIdleConnections)
			url := "http://" + f.addr
			if encrypted {
				url = "https://" + f.tlsAddr
			}
			for i, body := range []io.Reader{strings.NewReader("{}"), io.MultiReader(strings.NewReader("{"), strings.NewReader("}")),
				strings.NewReader("{}"), http.NoBody} {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/track", body)
				if err != nil {
					t.Fatal(err)
				}
				if i == 2 {
					r.Header.Set("Expect", "100-continue")
				}
				resp, err := (&http.Client{Transport: transport}).Do(r)
				if err != nil {
					t.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
				want := map[bool]string{false: "HTTP/1.1", true: "HTTP/2.0"}[second]
				if resp.StatusCode != http.StatusOK || resp.Proto != want {
					t.Errorf("TLS %v, body %d: %s %d, want %s 200", encrypted, i, resp.Proto, resp.StatusCode, want)
				}
			}
		}
	}
	// The port for TLS answers clear text with an explanation.
	c, err := net.Dial("tcp", f.tlsAddr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(wait.Limit))
	_, _ = io.WriteString(c, post+"\r\n")
	if answer, _ := io.ReadAll(c); !bytes.Contains(answer, []byte("speaks TLS")) {
		t.Errorf("clear text at the port for TLS is answered %q", answer)
	}
}

// A head of 8,192 bytes is accepted, one of 8,193 gets 431, on the first and on a later request
// of a connection.
func TestHeadIsBounded(t *testing.T) {
	f := newFixture(t, 100)
	for size, want := range map[int]int{8192: http.StatusOK, 8193: http.StatusRequestHeaderFieldsTooLarge,
		9000: http.StatusRequestHeaderFieldsTooLarge, 13000: http.StatusRequestHeaderFieldsTooLarge} {
		for _, later := range []bool{false, true} {
			c := f.dial(t, false)
			in := bufio.NewReader(c)
			if later {
				_, _ = io.WriteString(c, post+"\r\n")
				if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != http.StatusOK {
					t.Fatalf("%v, %v; want 200", resp, err)
				} else if _, err := io.Copy(io.Discard, resp.Body); err != nil {
					t.Fatal(err)
				}
			}
			_, _ = io.WriteString(c, post+"X: "+strings.Repeat("x", size-len(post+"X: \r\n\r\n"))+"\r\n\r\n")
			resp, err := http.ReadResponse(in, nil)
			if err != nil || resp.StatusCode != want {
				t.Errorf("a head of %d bytes, later %v: %v, %v; want %d", size, later, resp, err, want)
			}
		}
	}
}

// A head that is too large ends its HTTP/2 stream only: with one long header, which has the size of several frames,
// and with many short ones.
func TestHeadOfAStreamIsBounded(t *testing.T) {
	f := newFixture(t, 100)
	for _, encrypted := range []bool{false, true} {
		var protocols http.Protocols
		protocols.SetHTTP2(encrypted)
		protocols.SetUnencryptedHTTP2(!encrypted)
		transport := &http.Transport{Protocols: &protocols, TLSClientConfig: f.roots}
		t.Cleanup(transport.CloseIdleConnections)
		url := "http://" + f.addr
		if encrypted {
			url = "https://" + f.tlsAddr
		}
		do := func(path string, change func(http.Header)) (status int, reused bool) {
			trace := httptrace.ClientTrace{GotConn: func(c httptrace.GotConnInfo) { reused = c.Reused }}
			r, _ := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), &trace), http.MethodPost, url+path, strings.NewReader("{}"))
			if change != nil {
				change(r.Header)
			}
			resp, err := (&http.Client{Transport: transport}).Do(r)
			if err != nil {
				t.Errorf("TLS %v, %s: got error %v, want a response", encrypted, path, err)
				return 0, reused
			}
			_ = resp.Body.Close()
			return resp.StatusCode, reused
		}
		started := f.started.Load()
		held := make(chan int)
		go func() {
			status, _ := do("/held", nil)
			held <- status
		}()
		wait.True(t, "a stream is in progress", func() bool { return f.started.Load() > started })
		for name, c := range map[string]struct {
			change func(http.Header)
			want   int
		}{
			"7 KB":  {func(h http.Header) { h.Set("Cookie", strings.Repeat("c", 7<<10)) }, http.StatusOK},
			"9 KB":  {func(h http.Header) { h.Set("Cookie", strings.Repeat("c", 9<<10)) }, http.StatusRequestHeaderFieldsTooLarge},
			"30 KB": {func(h http.Header) { h.Set("Cookie", strings.Repeat("c", 30<<10)) }, http.StatusRequestHeaderFieldsTooLarge},
			"short headers": {func(h http.Header) { h["Cookie"] = slices.Repeat([]string{"name=a value of 24 bytes"}, 500) },
				http.StatusRequestHeaderFieldsTooLarge},
		} {
			if status, reused := do("/v1/track", c.change); status != c.want || !reused {
				t.Errorf("TLS %v, %s: got status %d on the same connection %v, want %d and true", encrypted, name, status, reused, c.want)
			}
		}
		f.hold <- struct{}{}
		if status := <-held; status != http.StatusOK {
			t.Errorf("TLS %v, the stream in progress: got status %d, want 200", encrypted, status)
		}
	}
}

// Clients that do not finish large heads hold at most 16 MB: beyond it connections with a part of a head are closed.
// Other requests are served, with large heads too.
func TestHeadsShareMemory(t *testing.T) {
	const size = 1 << 20
	server := New(&http.Server{MaxHeaderBytes: size, Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}, 100,
		slog.New(slog.DiscardHandler))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	f := &fixture{Server: server, addr: l.Addr().String()}
	idle := f.dial(t, false)
	_, _ = io.WriteString(idle, post+"\r\n")
	in := bufio.NewReader(idle)
	if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("a request: got %v and error %v, want 200", resp, err)
	}
	for range 20 {
		c := f.dial(t, false)
		go func() { _, _ = io.WriteString(c, post+"X: "+strings.Repeat("x", size-1000)) }()
	}
	wait.True(t, "4 of 20 connections are closed", func() bool { return f.open() == 1+16 })
	for _, head := range []int{100, size - 1000} {
		c := f.dial(t, false)
		go func() { _, _ = io.WriteString(c, post+"X: "+strings.Repeat("x", head)+"\r\n\r\n") }()
		if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("a request with a header of %d bytes: got %v and error %v, want 200", head, resp, err)
		}
	}
	_, _ = io.WriteString(idle, post+"\r\n")
	if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("a request of the idle connection: got %v and error %v, want 200", resp, err)
	}
}

// attack sends n rounds of frames on one connection and returns the last frame that it reads. round gets a new
// stream and the headers of a request.
func attack(t *testing.T, f *fixture, encrypted bool, n int,
	round func(to *http2.Framer, stream uint32, headers []byte) error) (frame http2.Frame) {
	t.Helper()
	var c net.Conn
	if encrypted {
		config := f.roots.Clone()
		config.NextProtos = []string{"h2"}
		var err error
		if c, err = tls.Dial("tcp", f.tlsAddr, config); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(wait.Limit))
	} else {
		c = f.dial(t, false)
	}
	_, _ = io.WriteString(c, http2.ClientPreface)
	framer := http2.NewFramer(c, c)
	framer.AllowIllegalWrites = true
	_ = framer.WriteSettings()
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":authority", "x"}, {":path", "/v1/track"}} {
		_ = encoder.WriteField(hpack.HeaderField{Name: h[0], Value: h[1], Sensitive: true})
	}
	go func() {
		for i := range n {
			if round(framer, uint32(2*i+1), block.Bytes()) != nil {
				return
			}
		}
	}()
	in := http2.NewFramer(io.Discard, c)
	for {
		next, err := in.ReadFrame()
		if err != nil {
			return frame
		}
		frame = next
		if _, ok := next.(*http2.GoAwayFrame); ok {
			return next
		}
	}
}

// A client that resets its streams, makes the server reset them, or sends frames without progress, is
// disconnected after a bounded number of them.
func TestFramesWithoutProgress(t *testing.T) {
	open := func(to *http2.Framer, id uint32, headers []byte, end bool) error {
		return to.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: headers, EndStream: end, EndHeaders: true})
	}
	for name, round := range map[string]func(to *http2.Framer, id uint32, headers []byte) error{
		"reset": func(to *http2.Framer, id uint32, headers []byte) error {
			return errors.Join(open(to, id, headers, true), to.WriteRSTStream(id, http2.ErrCodeCancel))
		},
		"window update of 0": func(to *http2.Framer, id uint32, headers []byte) error {
			return errors.Join(open(to, id, headers, false), to.WriteWindowUpdate(id, 0))
		},
		"window overflow": func(to *http2.Framer, id uint32, headers []byte) error {
			return errors.Join(open(to, id, headers, false), to.WriteWindowUpdate(id, 1<<31-1))
		},
		"stream that depends on itself": func(to *http2.Framer, id uint32, headers []byte) error {
			return to.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: headers, EndHeaders: true,
				Priority: http2.PriorityParam{StreamDep: id}})
		},
		"data after the end": func(to *http2.Framer, id uint32, headers []byte) error {
			return errors.Join(open(to, id, headers, true), to.WriteData(id, false, []byte("x")))
		},
		"more streams than allowed": func(to *http2.Framer, id uint32, headers []byte) error { return open(to, id, headers, false) },
		"ping":                      func(to *http2.Framer, _ uint32, _ []byte) error { return to.WritePing(false, [8]byte{}) },
		"settings": func(to *http2.Framer, _ uint32, _ []byte) error {
			return to.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1 << 14})
		},
		"priority": func(to *http2.Framer, _ uint32, _ []byte) error {
			return to.WritePriority(1, http2.PriorityParam{StreamDep: 3})
		},
		"window updates": func(to *http2.Framer, _ uint32, _ []byte) error { return to.WriteWindowUpdate(0, 1) },
		"unknown frames": func(to *http2.Framer, _ uint32, _ []byte) error { return to.WriteRawFrame(0xbe, 0, 0, nil) },
		"empty data": func(to *http2.Framer, id uint32, headers []byte) error {
			if id == 1 {
				return open(to, 1, headers, false)
			}
			return to.WriteData(1, false, nil)
		},
	} {
		for _, encrypted := range []bool{false, true} {
			if encrypted && name != "reset" && name != "window update of 0" {
				continue
			}
			t.Run(fmt.Sprintf("%s, TLS %v", name, encrypted), func(t *testing.T) {
				f := newFixture(t, 100)
				frame := attack(t, f, encrypted, 20_000, round)
				if away, ok := frame.(*http2.GoAwayFrame); ok && away.ErrCode != http2.ErrCodeEnhanceYourCalm {
					t.Errorf("got GOAWAY with %v, want %v", away.ErrCode, http2.ErrCodeEnhanceYourCalm)
				}
				wait.True(t, "the connection is closed", func() bool { return f.open() == 0 })
				// The server can be behind by the frames that it has read at once.
				if n := f.started.Load(); n > 10*maxResets {
					t.Errorf("requests at the handler: got %d, want at most %d", n, 10*maxResets)
				}
			})
		}
	}
}

// A client whose requests are answered before their bodies have arrived keeps its connection, and so does one
// that sends some frames without progress for a long time.
func TestDeclinedBodiesPass(t *testing.T) {
	var s sentFrames
	var frames bytes.Buffer
	framer := http2.NewFramer(&frames, nil)
	for i := range 2000 {
		id := uint32(2*i + 1)
		_ = framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: []byte("headers"), EndHeaders: true, EndStream: true})
		_ = framer.WriteRSTStream(id, http2.ErrCodeNo)
		for range maxLate {
			_ = framer.WriteRSTStream(id, http2.ErrCodeStreamClosed)
		}
		_ = framer.WriteRSTStream(id, http2.ErrCodeInternal)
	}
	for piece := range slices.Chunk(frames.Bytes(), 7) { // The server's writes end within frames.
		s.scan(piece)
	}
	if n := s.resets.Load(); n != 0 {
		t.Errorf("resets because of the client: got %d, want none", n)
	}
	frames.Reset()
	_ = framer.WriteData(5, false, []byte("a body"))
	for _, code := range []http2.ErrCode{http2.ErrCodeProtocol, http2.ErrCodeFlowControl, http2.ErrCodeFrameSize, http2.ErrCodeRefusedStream,
		http2.ErrCodeStreamClosed} {
		_ = framer.WriteRSTStream(7001, code)
	}
	_ = framer.WriteRSTStream(2001*2-3, http2.ErrCodeStreamClosed) // One more than those on their way.
	s.scan(frames.Bytes())
	if n := s.resets.Load(); n != 6 {
		t.Errorf("resets because of the client: got %d, want 6", n)
	}

	f := framing{http2: true}
	if _, _, err := f.scan([]byte(http2.ClientPreface)); err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1, 0)
	for range 10 {
		f.countFrom(now)
		for range maxControl {
			frames.Reset()
			_ = framer.WritePing(false, [8]byte{})
			if _, _, err := f.scan(frames.Bytes()); err != nil {
				t.Fatalf("within the bound: %v", err)
			}
		}
		now = now.Add(controlWindow)
	}
}

// A client that cancels one request in twenty keeps its connection.
func TestFewResetsPass(t *testing.T) {
	f := framing{http2: true}
	if _, _, err := f.scan([]byte(http2.ClientPreface)); err != nil {
		t.Fatal(err)
	}
	var frames bytes.Buffer
	framer := http2.NewFramer(&frames, nil)
	ended := 0
	for i := range 20_000 {
		frames.Reset()
		id := uint32(2*i + 1)
		_ = framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: []byte("headers"), EndHeaders: true})
		_ = framer.WriteData(id, true, []byte("{}"))
		if i%20 == 0 {
			_ = framer.WriteRSTStream(id, http2.ErrCodeCancel)
		}
		for _, piece := range [][]byte{frames.Bytes()[:13], frames.Bytes()[13:]} {
			_, e, err := f.scan(piece)
			if err != nil {
				t.Fatalf("after %d streams and %d resets: %v", f.streams, f.resets, err)
			}
			if e&streamEnded != 0 {
				ended++
			}
		}
	}
	if f.streams != 20_000 || f.resets != 1000 || ended != 20_000 {
		t.Errorf("%d streams, %d resets, %d ended", f.streams, f.resets, ended)
	}
}

// A thousand connections each send a part of a request and stop. A client with one connection
// and a client with a new connection per call lose no call meanwhile.
func TestConnectionsWithinARequest(t *testing.T) {
	const most, attackers = 100, 1000
	for name, beginning := range map[string]string{
		"bodies":         post + "Content-Length: 1000\r\n\r\n{",
		"chunked bodies": post + "Transfer-Encoding: chunked\r\n\r\n3e8\r\n{",
		"heads":          post + "X: ",
		"nothing":        "",
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, most)
			kept, fresh := &http.Transport{}, &http.Transport{DisableKeepAlives: true}
			t.Cleanup(kept.CloseIdleConnections)
			ok, failed, peak := 0, 0, 0
			for i := range attackers {
				c, err := net.Dial("tcp", f.addr)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = c.Close() })
				_, _ = io.WriteString(c, beginning)
				for _, transport := range []*http.Transport{kept, fresh} {
					if transport == fresh && i%10 > 0 {
						continue
					}
					r, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+f.addr+"/v1/track", strings.NewReader("{}"))
					resp, err := (&http.Client{Transport: transport}).Do(r)
					if err != nil || resp.StatusCode != http.StatusOK {
						t.Errorf("call %d: %v", i, err)
						failed++
						continue
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
					ok++
				}
				peak = max(peak, f.open())
			}
			if ok != attackers*11/10 || failed > 0 {
				t.Errorf("%d calls are answered, %d failed; want %d and 0", ok, failed, attackers*11/10)
			}
			if peak > most {
				t.Errorf("%d connections were open, want at most %d", peak, most)
			}
		})
	}
}

// The order in which connections are closed.
func TestWhichConnectionIsClosed(t *testing.T) {
	f := newFixture(t, 4)
	head := post + "Content-Length: 500\r\n\r\n"
	waits := func(n int) {
		t.Helper()
		wait.True(t, fmt.Sprint(n, " connections are open"), func() bool { return f.open() == n })
	}
	gone := func(name string, c net.Conn) {
		t.Helper()
		if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: the connection is open", name)
		}
	}
	held := f.dial(t, false)
	_, _ = io.WriteString(held, "POST /held HTTP/1.1\r\nHost: x\r\n\r\n")
	wait.True(t, "a request is in progress", func() bool { return f.started.Load() == 1 })
	stalled := f.dial(t, false)
	_, _ = io.WriteString(stalled, head)
	wait.True(t, "a second request is in progress", func() bool { return f.started.Load() == 2 })
	steady := f.dial(t, false)
	_, _ = io.WriteString(steady, post+"Content-Length: 100000000\r\n\r\n")
	wait.True(t, "a third request is in progress", func() bool { return f.started.Load() == 3 })
	idle := f.dial(t, false)
	_, _ = io.WriteString(idle, post+"\r\n")
	if resp, err := http.ReadResponse(bufio.NewReader(idle), nil); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v; want 200", resp, err)
	}
	waits(4)
	// 32 MB, less the buffers of the kernel, count for several minutes: this one is never behind.
	if _, err := steady.Write(make([]byte, 32<<20)); err != nil {
		t.Fatalf("send a body: got error %v, want none", err)
	}

	var fresh []net.Conn
	for _, next := range []struct {
		name string
		conn net.Conn
	}{{"the one that has stalled longest", stalled}, {"the idle one", idle}} {
		fresh = append(fresh, f.dial(t, false))
		gone(next.name, next.conn)
		waits(4)
	}
	fresh = append(fresh, f.dial(t, false))
	gone("the first of those that sent nothing", fresh[0])
	waits(4)
	close(f.hold)
	if resp, err := http.ReadResponse(bufio.NewReader(held), nil); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("the request at work is answered %v, %v; want 200", resp, err)
	}
}
