package egress

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if os.Getenv("EGRESS_BENCH_SINK") != "" {
		benchSink()
		return
	}
	os.Exit(m.Run())
}

// benchSink answers requests of a fixed head form as fast as it can, until its stdin ends.
func benchSink() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(l.Addr())
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				r := bufio.NewReaderSize(c, 16<<10)
				for {
					length := 0
					for {
						line, err := r.ReadSlice('\n')
						if err != nil {
							return
						}
						if len(line) == 2 {
							break
						}
						if value, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
							length, _ = strconv.Atoi(string(bytes.TrimSpace(value)))
						}
					}
					_, _ = r.Discard(length)
					_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nDate: Sun, 01 Mar 2026 12:00:30 GMT\r\nContent-Length: 2\r\n\r\nok")
				}
			}()
		}
	}()
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkPost compares this client with net/http's Transport, tuned, on the
// same work: 64 keep-alive connections, 1 KB of body, a deadline per request,
// the sink in another process. cpu-us/op is the client's alone.
//
//	go test -bench Post -benchtime 3s ./dispatcher/egress
func BenchmarkPost(b *testing.B) {
	sink := exec.Command(os.Args[0])
	sink.Env = append(os.Environ(), "EGRESS_BENCH_SINK=1", "GOMAXPROCS=1")
	stdin, _ := sink.StdinPipe()
	stdout, _ := sink.StdoutPipe()
	if err := sink.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = stdin.Close(); _ = sink.Wait() })
	address, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	target := "http://" + strings.TrimSpace(address) + "/in"
	body := bytes.Repeat([]byte("x"), 1024)
	parent := b.Context()
	signature := strings.Repeat("ab", 20)

	run := func(b *testing.B, post func() bool) {
		b.SetParallelism(32) // of GOMAXPROCS = 2: 64 workers
		b.ReportAllocs()
		before := cpu()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if !post() {
					b.Error("post failed")
				}
			}
		})
		b.ReportMetric(float64(cpu()-before)/1e3/float64(b.N), "cpu-us/op")
	}
	b.Run("nethttp", func(b *testing.B) {
		transport := &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true}
		defer transport.CloseIdleConnections()
		run(b, func() bool {
			ctx, cancel := context.WithTimeout(parent, 5*time.Second)
			defer cancel()
			request, err := http.NewRequestWithContext(ctx, http.MethodPost, target, bytes.NewReader(body))
			if err != nil {
				return false
			}
			request.Header = http.Header{
				"Content-Type": {"application/json"}, "User-Agent": {userAgent}, "X-Env": {"prod"},
				"X-Signature": {signature}, "Idempotency-Key": {"0f8fad5b-d9cb-469f-a165-70867728950e"},
			}
			response, err := transport.RoundTrip(request)
			if err != nil {
				return false
			}
			_, _ = io.Copy(io.Discard, io.LimitReader(response.Body, maxBodyBytes))
			_ = response.Body.Close()
			return response.StatusCode == 200
		})
	})
	b.Run("lean", func(b *testing.B) {
		c := newClient(b, "127.0.0.1")
		e := prepareURL(b, c, target)
		run(b, func() bool {
			r := c.Post(WithDeadline(parent, time.Now().Add(5*time.Second)), e, []Header{{"X-Env", "prod"}, {"X-Signature", signature}, {"Idempotency-Key", "0f8fad5b-d9cb-469f-a165-70867728950e"}}, body)
			return r.Reason == ""
		})
	})
}
