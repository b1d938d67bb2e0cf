// Command audience measures syncs of an audience with `posthorn run` in a separate process,
// with a queue that syncs to disk and signed deliveries over HTTP. It prints the times per
// million members of a first sync and of a sync with 1 % changes, and the memory of the
// process. It is part of `make bench`.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/posthorn/posthorn/test/process"
)

var (
	members = flag.Int("members", 1_000_000, "members of the audience")
	deliver = flag.Bool("deliver", true, "deliver the identify calls; false: the destination's filter excludes them")
)

const writeKey = "bench-write-key"

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "posthorn-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	sink, received, err := startSink()
	if err != nil {
		return err
	}
	p, err := start(ctx, dir, sink)
	if err != nil {
		return err
	}
	defer func() { _ = p.Stop(syscall.SIGTERM) }()

	fmt.Printf("%d x %s/%s, %s; %d members\n", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, runtime.Version(), *members)
	fmt.Printf("%-24s %12s %14s %12s %14s\n", "per million members", "accepted", "in the queue", "delivered", "calls")
	millions := float64(*members) / 1e6
	idle, _ := process.Memory(p.Pid())
	for _, sync := range []struct {
		name       string
		from, want int // the first member, and the expected number of calls
	}{{"first sync", 0, *members}, {"1 % changed", *members / 200, *members / 200 * 2}} {
		received.Store(0)
		begin := time.Now()
		accepted, err := p.sync(ctx, sync.from)
		if err != nil {
			return err
		}
		queued, err := p.until(ctx, begin, func() (bool, error) {
			a, err := p.do(ctx, http.MethodGet, "", nil)
			return a.Sent, err
		})
		if err != nil {
			return err
		}
		delivered := "-"
		if *deliver {
			took, err := p.until(ctx, begin, func() (bool, error) { return received.Load() >= int64(sync.want), nil })
			if err != nil {
				return err
			}
			if n := received.Load(); n != int64(sync.want) {
				return fmt.Errorf("%s: calls: got %d, want %d", sync.name, n, sync.want)
			}
			delivered = fmt.Sprintf("%.2f s", took.Seconds()/millions)
		}
		fmt.Printf("%-24s %10.2f s %12.2f s %12s %14d\n", sync.name, accepted.Seconds()/millions, queued.Seconds()/millions, delivered, sync.want)
	}
	_, peak := process.Memory(p.Pid())
	fmt.Printf("memory of the process: %d MB before, %d MB at most\n", idle/1e6, peak/1e6)
	return nil
}

// startSink accepts and counts calls.
func startSink() (addr string, received *atomic.Int64, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	received = &atomic.Int64{}
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		received.Add(1)
	})}
	go func() { _ = server.Serve(l) }()
	return l.Addr().String(), received, nil
}

// posthorn is a process of `posthorn run`.
type posthorn struct{ *process.Posthorn }

func start(ctx context.Context, dir, sink string) (p posthorn, err error) {
	binary, err := process.Build(dir)
	if err != nil {
		return p, err
	}
	types := "identify"
	if !*deliver {
		types = "track"
	}
	manifests := filepath.Join(dir, "manifests")
	if err := os.Mkdir(manifests, 0o700); err != nil {
		return p, err
	}
	if err := os.WriteFile(filepath.Join(manifests, "all.yaml"), fmt.Appendf(nil, `
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {writeKey: %s, sharedSecret: bench-shared-secret}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: web}
spec:
  writeKeys: [{name: main, secretKeyRef: {name: keys, key: writeKey}}]
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: sink}
spec:
  sourceRefs: [{name: web}]
  endpoints:
  - name: primary
    url: http://%s/
  signing:
    schemes:
    - name: sha1
      type: HMACSHA1
      secretKeyRef: {name: keys, key: sharedSecret}
  delivery: {maxInFlight: 256}
  filter: {types: [%s]}
---
apiVersion: posthorn.dev/v1beta1
kind: Audience
metadata: {name: bench}
spec: {sourceRef: {name: web}, key: bench}
`, writeKey, sink, types), 0o600); err != nil {
		return p, err
	}
	p.Posthorn = process.Run(binary, manifests, filepath.Join(dir, "data"), "--log-level", "error")
	p.Log = os.Stderr
	if err := p.Start(); err != nil {
		return p, err
	}
	_, err = p.until(ctx, time.Now(), func() (bool, error) {
		_, err := p.do(ctx, http.MethodGet, "", nil)
		return err == nil, nil
	})
	if err != nil {
		return p, errors.Join(err, p.Stop(os.Kill))
	}
	time.Sleep(2 * time.Second) // Wait for the end of the start's work.
	return p, nil
}

// until polls a condition and returns the time since begin when it is true.
func (p posthorn) until(ctx context.Context, begin time.Time, done func() (bool, error)) (time.Duration, error) {
	for {
		ok, err := done()
		if ok || err != nil {
			return time.Since(begin), err
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-p.Exited():
			return 0, errors.New("posthorn ended")
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (p posthorn) do(ctx context.Context, method, query string, body io.Reader) (answer struct {
	Sent bool
	Time time.Time
}, err error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+p.Addr+"/v1/audiences/bench/members"+query, body)
	if err != nil {
		return answer, err
	}
	req.SetBasicAuth(writeKey, "")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= http.StatusBadRequest {
		err = fmt.Errorf("%s: %s", resp.Status, text)
	}
	if err == nil {
		err = json.Unmarshal(text, &answer)
	}
	return answer, err
}

// sync sends the members and returns the time until the sync was accepted.
// The answer is sent later, when all calls are in the queue.
func (p posthorn) sync(ctx context.Context, from int) (time.Duration, error) {
	before, err := p.do(ctx, http.MethodGet, "", nil)
	if err != nil {
		return 0, err
	}
	failed := make(chan error, 1)
	begin := time.Now()
	go func() {
		_, err := p.do(ctx, http.MethodPut, "", &lines{from: from})
		failed <- err
	}()
	return p.until(ctx, begin, func() (bool, error) {
		select {
		case err := <-failed:
			return true, err
		default:
		}
		now, err := p.do(ctx, http.MethodGet, "", nil)
		return now.Time.After(before.Time), err
	})
}

// lines reads members in an unsorted order.
type lines struct {
	from, n int
	left    bytes.Buffer
}

func (l *lines) Read(p []byte) (int, error) {
	for l.left.Len() < len(p) && l.n < *members {
		fmt.Fprintf(&l.left, "{\"userId\":\"user-%d\"}\n", l.from+l.n*7919%*members)
		l.n++
	}
	if l.left.Len() == 0 {
		return 0, io.EOF
	}
	return l.left.Read(p)
}
