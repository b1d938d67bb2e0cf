package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // the specified signature
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/process"
)

const (
	secret     = "bench-shared-secret"
	connection = 64
)

// roles are the processes of a benchmark; each prints one line of JSON when it is up.
var roles = map[string]func([]string) error{"sink": sinkRole, "direct": directRole, "queue": queueRole, "dispatcher": dispatcherRole}

type bench struct {
	root string
	sink *sinkProcess
}

func newBench(ctx context.Context) (*bench, error) {
	root, err := os.MkdirTemp("", "posthorn-bench-")
	if err != nil {
		return nil, err
	}
	b := &bench{root: root}
	p, err := spawn(ctx, "sink")
	if err != nil {
		return nil, err
	}
	b.sink = &sinkProcess{child: p}
	if err := json.Unmarshal(p.hello, &b.sink.sinkAddrs); err != nil {
		return nil, err
	}
	return b, nil
}

func (b *bench) close() {
	b.sink.stop()
	_ = os.RemoveAll(b.root)
}

func (b *bench) dir(name string) string { return filepath.Join(b.root, name) }

// child is this binary in a role, in a process of its own.
type child struct {
	cmd   *exec.Cmd
	hello []byte
	stdin io.Closer
	rest  *bufio.Reader
}

// spawn starts this binary in a role and waits for its first line.
func spawn(ctx context.Context, role string, args ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Env = append(os.Environ(), "POSTHORN_BENCH_ROLE="+role)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	rest := bufio.NewReader(stdout)
	hello, err := rest.ReadBytes('\n')
	if err != nil {
		return nil, fmt.Errorf("%s did not start: %w", role, err)
	}
	return &child{cmd: cmd, hello: hello, stdin: stdin, rest: rest}, nil
}

func (p *child) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.cmd.Wait()
}

func (p *child) cpu() time.Duration { return process.CPU(p.cmd.Process.Pid) }

func (p *child) rss() int64 {
	now, _ := process.Memory(p.cmd.Process.Pid)
	return now
}

// The sink: a do-nothing HTTP/1.1 receiver that counts and samples latencies.

type sinkAddrs struct{ Addr, BlackHole, Failing, Slow, Control string }

type sinkProcess struct {
	*child
	sinkAddrs
}

type sinkStats struct {
	Count       int64
	Connections int64 // accepted
	Samples     []time.Duration
}

// dead are the addresses of receivers that are of no use.
func (s *sinkProcess) dead() []struct{ name, addr string } {
	return []struct{ name, addr string }{{"refused", "127.0.0.1:1"}, {"black hole", s.BlackHole}, {"5 s slow", s.Slow}, {"500s", s.Failing}}
}

// take returns what the sink has counted since the last take.
func (s *sinkProcess) take() (stats sinkStats, err error) {
	resp, err := http.Get("http://" + s.Control) //nolint:noctx // a local control request
	if err != nil {
		return stats, err
	}
	defer resp.Body.Close()
	return stats, json.NewDecoder(resp.Body).Decode(&stats)
}

func sinkRole([]string) error {
	var count, connections atomic.Int64
	var mu sync.Mutex
	var samples []time.Duration
	listen := func(handle func(net.Conn)) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			panic(err)
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				connections.Add(1)
				go handle(c)
			}
		}()
		return l.Addr().String()
	}
	answer := func(response string, good bool) func(net.Conn) {
		return func(c net.Conn) {
			defer c.Close()
			r := bufio.NewReaderSize(c, 4<<10)
			var body []byte
			for {
				length := 0
				for {
					line, err := r.ReadSlice('\n')
					if err != nil {
						return
					}
					if len(line) <= 2 {
						break
					}
					if len(line) > 15 && strings.EqualFold(string(line[:15]), "content-length:") {
						length, _ = strconv.Atoi(strings.TrimSpace(string(line[15:])))
					}
				}
				body = slices.Grow(body[:0], length)[:length]
				if _, err := io.ReadFull(r, body); err != nil {
					return
				}
				if good {
					// One message in 4 is a latency sample.
					if n := count.Add(1); n%4 == 0 {
						if d := age(body); d > 0 {
							mu.Lock()
							samples = append(samples, d)
							mu.Unlock()
						}
					}
				}
				if _, err := io.WriteString(c, response); err != nil {
					return
				}
			}
		}
	}
	addrs := sinkAddrs{
		Addr:    listen(answer("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", true)),
		Failing: listen(answer("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\nno", false)),
		Slow: listen(func(c net.Conn) {
			time.Sleep(4900 * time.Millisecond)
			answer("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", false)(c)
		}),
		BlackHole: listen(func(c net.Conn) { _, _ = io.Copy(io.Discard, c); c.Close() }),
	}
	control, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	addrs.Control = control.Addr().String()
	hello, _ := json.Marshal(addrs)
	fmt.Println(string(hello))
	return http.Serve(control, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { //nolint:gosec // a local control listener
		mu.Lock()
		defer mu.Unlock()
		_ = json.NewEncoder(w).Encode(sinkStats{Count: count.Swap(0), Connections: connections.Swap(0), Samples: samples})
		samples = nil
	}))
}

const stamp = `"sent":`

// age is how long ago a message's body says it was sent.
func age(body []byte) time.Duration {
	_, rest, ok := bytes.Cut(body, []byte(stamp))
	if !ok {
		return 0
	}
	end := bytes.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	sent, err := strconv.ParseInt(string(rest[:max(end, 0)]), 10, 64)
	if err != nil {
		return 0
	}
	return time.Duration(time.Now().UnixMicro()-sent) * time.Microsecond
}

// body is a call of about 1 KB.
func appendBody(dst []byte, id int64) []byte {
	return fmt.Appendf(dst, `{"type":"track","event":"Order Completed","userId":"user-%d","messageId":"bench-%d-%d","timestamp":"%s",`+
		`"properties":{%s%d,"orderId":"50314b8e9bcf000000000000","total":27.5,"revenue":25,"currency":"USD","coupon":"hasbros","discount":2.5,`+
		`"products":[{"productId":"507f1f77bcf86cd799439011","sku":"45790-32","name":"Monopoly: 3rd Edition","price":19,"quantity":1,"category":"Games"},`+
		`{"productId":"505bd76785ebb509fc183733","sku":"46493-32","name":"Uno Card Game","price":3,"quantity":2,"category":"Games"}]},`+
		`"context":{"library":{"name":"analytics-go","version":"2.1.0"},"userAgent":"Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15",`+
		`"locale":"en-US","page":{"path":"/checkout","title":"Checkout","url":"https://shop.example/checkout"}}}`,
		id%1000, os.Getpid(), id, time.Now().UTC().Format("2006-01-02T15:04:05.000Z"), stamp, time.Now().UnixMicro())
}

// counters are what a process has used since it began.
type counters struct {
	allocations, bytes                                        float64 // of memory
	reads, writes, waits                                      float64 // system calls; times that a thread waited
	commits, commitMessages, commitSeconds, syncs, syncSecond float64
}

// counters reads those that the kernel keeps, and those of the dispatcher's metrics.
func (p *dispatcherProcess) counters() (c counters, err error) {
	proc := fmt.Sprintf("/proc/%d/", p.cmd.Process.Pid)
	number := func(text, name string) float64 {
		_, rest, _ := strings.Cut(text, "\n"+name)
		value, _, _ := strings.Cut(strings.TrimLeft(rest, ": \t"), "\n")
		n, _ := strconv.ParseFloat(value, 64)
		return n
	}
	text, err := os.ReadFile(proc + "io")
	if err != nil {
		return c, err
	}
	c.reads, c.writes = number(string(text), "syscr"), number(string(text), "syscw")
	threads, err := filepath.Glob(proc + "task/*/status")
	if err != nil {
		return c, err
	}
	for _, thread := range threads {
		if text, err := os.ReadFile(thread); err == nil {
			c.waits += number(string(text), "voluntary_ctxt_switches")
		}
	}
	resp, err := http.Get("http://" + p.Admin + "/metrics") //nolint:noctx // a local control request
	if err != nil {
		return c, err
	}
	defer resp.Body.Close()
	if text, err = io.ReadAll(resp.Body); err != nil {
		return c, err
	}
	for name, value := range map[string]*float64{
		"go_memstats_mallocs_total": &c.allocations, "go_memstats_alloc_bytes_total": &c.bytes,
		"posthorn_queue_commit_seconds_count": &c.commits, "posthorn_queue_commit_seconds_sum": &c.commitSeconds, "posthorn_queue_commit_messages_sum": &c.commitMessages,
		"posthorn_queue_sync_seconds_count": &c.syncs, "posthorn_queue_sync_seconds_sum": &c.syncSecond,
	} {
		*value = number(string(text), name)
	}
	return c, nil
}

// sample is a measurement.
type sample struct {
	rate, cpu     float64  // per second; microseconds per message, of the process that is measured
	senders, sink float64  // microseconds per message of the others
	connections   float64  // that the sink accepted, per 1,000 messages
	cost          counters // of the measured process, per message
	commits       string   // what was made durable at once, and how long that took
	p50, p99      time.Duration
	rss           int64
}

func (s sample) mean(t sample) sample {
	return sample{rate: (s.rate + t.rate) / 2, cpu: (s.cpu + t.cpu) / 2, p50: (s.p50 + t.p50) / 2, p99: (s.p99 + t.p99) / 2}
}

// directLoop runs the loop that everything is compared with.
func (b *bench) directLoop(destinations int) (sample, error) {
	s, err := b.loop("direct", b.sink.Addr, b.window().String(), strconv.Itoa(destinations))
	_, _ = b.sink.take()
	return s, err
}

// loop runs a process that measures itself.
func (b *bench) loop(role string, args ...string) (sample, error) {
	p, err := spawn(context.Background(), role, args...)
	if err != nil {
		return sample{}, err
	}
	_ = p.cmd.Wait()
	var out struct{ Rate, CPU float64 }
	err = json.Unmarshal(p.hello, &out)
	return sample{rate: out.Rate, cpu: out.CPU}, err
}

// measured prints what a loop did since begin.
func measured(messages int64, begin time.Time) error {
	took := time.Since(begin)
	fmt.Printf(`{"Rate":%f,"CPU":%f}`+"\n", float64(messages)/took.Seconds(), float64(ownCPU().Microseconds())/float64(messages))
	return nil
}

// ownCPU is the processor time that this process has used.
func ownCPU() time.Duration {
	var usage syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// queueRole appends batches from as many goroutines as the batches row has
// senders, and settles all of it on one lane.
func queueRole(args []string) error {
	window, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	s, err := pebblestore.Open(args[0], pebblestore.Options{DuplicateWindow: 10 * time.Minute})
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	lane := queue.LaneID{Source: "bench/s0000", Destination: "bench/d0000"}
	more := make(chan struct{}, 1)
	s.SetNotify(func(queue.LaneID) {
		select {
		case more <- struct{}{}:
		default:
		}
	})
	if err := s.OpenLane(lane); err != nil {
		return err
	}
	var appended, settled atomic.Int64
	var group errgroup.Group
	begin := time.Now()
	payload := appendBody(nil, 1)
	for range 8 {
		group.Go(func() error {
			for time.Since(begin) < window {
				batch := make([]queue.Message, 20)
				for i := range batch {
					batch[i] = queue.Message{Source: lane.Source, ID: "bench-" + strconv.FormatInt(appended.Add(1), 10), Type: "track", Event: "Order Completed", AcceptedAt: time.Now(), Body: payload}
				}
				if _, err := s.Append(context.Background(), batch); err != nil {
					return err
				}
			}
			return nil
		})
	}
	done := make(chan error, 1)
	go func() { done <- group.Wait() }()
	var leased []queue.Delivery
	for ended := false; !ended || settled.Load() < appended.Load(); {
		if leased, err = s.Lease(lane, 64, leased[:0]); err != nil {
			return err
		}
		for _, d := range leased {
			s.Ack(d)
		}
		settled.Add(int64(len(leased)))
		if len(leased) > 0 {
			continue
		}
		select {
		case <-more:
		case err := <-done:
			if err != nil {
				return err
			}
			ended, done = true, nil
		}
	}
	return measured(settled.Load(), begin)
}

// directRole posts from 64 goroutines to one destination, or to many in turn,
// each with connections of its own.
func directRole(args []string) error {
	window, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	destinations, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	clients := make([]*http.Client, destinations)
	for i := range clients {
		clients[i] = &http.Client{
			Timeout:   5 * time.Second,
			Transport: &http.Transport{MaxIdleConnsPerHost: connection, DisableCompression: true},
		}
	}
	var sent atomic.Int64
	var group sync.WaitGroup
	message := string(appendBody(nil, 1))
	begin := time.Now()
	for n := range connection {
		group.Go(func() {
			for i := n; time.Since(begin) < window; i += connection {
				mac := hmac.New(sha1.New, []byte(secret))
				mac.Write([]byte(message))
				req, _ := http.NewRequest(http.MethodPost, "http://"+args[0]+"/in", strings.NewReader(message)) //nolint:noctx // the bare loop
				req.Header.Set("Content-Type", "application/json")
				req.Header.Set("User-Agent", "Posthorn/1.0")
				req.Header.Set("X-Signature", hex.EncodeToString(mac.Sum(nil)))
				resp, err := clients[i%destinations].Do(req)
				if err != nil {
					panic(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				sent.Add(1)
			}
		})
	}
	group.Wait()
	return measured(sent.Load(), begin)
}

// destination is a lane to measure; source numbers the Source it reads.
type destination struct {
	addr     string
	source   int
	disabled bool
}

func destinations(n int, addr string) []destination {
	d := make([]destination, n)
	for i := range d {
		d[i].addr = addr
	}
	return d
}

func writeKey(source int) string { return "key-" + strconv.Itoa(source) }

func config(list []destination) liveconfig.Config {
	c := liveconfig.Config{Version: liveconfig.FormatVersion, Tenant: "bench"}
	sources := 1
	for _, d := range list {
		sources = max(sources, d.source+1)
	}
	for i := range sources {
		sum := sha256.Sum256([]byte(writeKey(i)))
		c.Sources = append(c.Sources, liveconfig.Source{Name: fmt.Sprintf("s%04d", i), Revision: "1", Enabled: true, WriteKeySHA256: hex.EncodeToString(sum[:])})
	}
	for i, d := range list {
		state := liveconfig.Active
		if d.disabled {
			state = liveconfig.Disabled
		}
		c.Destinations = append(c.Destinations, liveconfig.Destination{
			Name: fmt.Sprintf("d%04d", i), Revision: "1", State: state, Sources: []string{fmt.Sprintf("s%04d", d.source)},
			Endpoints:   []liveconfig.Endpoint{{Name: "primary", URL: liveconfig.NewSecret("http://" + d.addr + "/in")}},
			Signing:     &liveconfig.Signing{Scheme: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret(secret)},
			Success:     liveconfig.AnyEndpoint,
			Delivery:    liveconfig.Delivery{TimeoutMS: 5000, RetryWindowMS: (4 * time.Hour).Milliseconds(), MinBackoffMS: 1000, MaxBackoffMS: 300_000, MaxInFlight: 64},
			DeadLetters: liveconfig.DeadLetters{RetentionMS: time.Hour.Milliseconds(), MaxBytes: 1 << 30},
		})
	}
	return c
}

type dispatcherProcess struct {
	*child
	Addr, Admin string
	sources     int
}

// start runs a dispatcher on a folder and returns once it is ready.
func (b *bench) start(ctx context.Context, list []destination, dir string) (*dispatcherProcess, error) {
	c := config(list)
	data, _, err := liveconfig.Encode(c)
	if err != nil {
		return nil, err
	}
	file := dir + ".config"
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return nil, err
	}
	p, err := spawn(ctx, "dispatcher", dir, file, *profile)
	if err != nil {
		return nil, err
	}
	d := &dispatcherProcess{child: p, sources: len(c.Sources)}
	return d, json.Unmarshal(p.hello, d)
}

func dispatcherRole(args []string) error {
	data, err := os.ReadFile(args[1])
	if err != nil {
		return err
	}
	policy, err := egress.ParsePolicy([]string{netip.PrefixFrom(netip.MustParseAddr("127.0.0.0"), 8).String()})
	if err != nil {
		return err
	}
	d, err := dispatcher.New(dispatcher.Options{
		DataDir: args[0], Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0", Pod: "bench", Egress: policy,
		Queue:  pebblestore.Options{DuplicateWindow: 10 * time.Minute},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	if err != nil {
		return err
	}
	d.Set("bench", data)
	d.Synced()
	if args[2] != "" {
		stop, err := startProfiles(args[2])
		if err != nil {
			return err
		}
		defer stop()
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	fmt.Printf(`{"Addr":%q,"Admin":%q}`+"\n", d.Addr().String(), d.AdminAddr().String())
	return d.Run(ctx)
}

// startProfiles profiles this process until stop writes what was found.
func startProfiles(dir string) (stop func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.Create(filepath.Join(dir, "cpu"))
	if err != nil {
		return nil, err
	}
	runtime.SetMutexProfileFraction(10)
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, err
	}
	return func() {
		pprof.StopCPUProfile()
		_ = f.Close()
		for _, name := range []string{"allocs", "mutex"} {
			if f, err := os.Create(filepath.Join(dir, name)); err == nil {
				_ = pprof.Lookup(name).WriteTo(f, 0)
				_ = f.Close()
			}
		}
	}, nil
}

// load is what the benchmark sends.
type load struct {
	batch, clients int
	perSecond      float64 // 0: as fast as it is taken
}

// throughput runs a dispatcher under a load. Senders stop while too much waits,
// so that what is measured is the whole pipeline and not its front.
func (b *bench) throughput(ctx context.Context, l load, list []destination) (sample, error) {
	dir := b.dir(fmt.Sprint("run-", time.Now().UnixNano()))
	defer os.RemoveAll(dir)
	p, err := b.start(ctx, list, dir)
	if err != nil {
		return sample{}, err
	}
	defer p.stop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var group sync.WaitGroup
	var sent, delivered atomic.Int64
	good := 0
	for _, d := range list {
		if d.addr == b.sink.Addr {
			good++
		}
	}
	perSource := max(1, good/p.sources)
	var id atomic.Int64
	gap := time.Duration(0)
	if l.perSecond > 0 {
		gap = time.Duration(float64(l.batch*l.clients) / l.perSecond * float64(time.Second))
	}
	for n := range l.clients {
		group.Go(func() {
			s := newSender(p)
			defer s.close()
			time.Sleep(gap * time.Duration(n) / time.Duration(l.clients)) // One after the other, not all at once.
			for i := n; ctx.Err() == nil; i += l.clients {
				if gap > 0 {
					select {
					case <-time.After(gap):
					case <-ctx.Done():
						return
					}
				}
				for sent.Load()*int64(perSource)-delivered.Load() > 8000*int64(perSource) && ctx.Err() == nil {
					time.Sleep(time.Millisecond)
				}
				if err := s.send(i%p.sources, l.batch, &id); err != nil && ctx.Err() == nil {
					fmt.Fprintln(os.Stderr, "send:", err)
					return
				}
				sent.Add(int64(l.batch))
			}
		})
	}
	drain := func(window time.Duration) (sinkStats, time.Duration, error) {
		var all sinkStats
		begin := time.Now()
		for time.Since(begin) < window {
			time.Sleep(20 * time.Millisecond)
			s, err := b.sink.take()
			if err != nil {
				return all, 0, err
			}
			delivered.Add(s.Count)
			all.Count += s.Count
			all.Connections += s.Connections
			all.Samples = append(all.Samples, s.Samples...)
		}
		return all, time.Since(begin), nil
	}
	// Warm up, then measure.
	if _, _, err := drain(b.window() / 4); err != nil {
		return sample{}, err
	}
	before, err := p.counters()
	if err != nil {
		return sample{}, err
	}
	cpu, own, sink := p.cpu(), ownCPU(), b.sink.cpu()
	stats, took, err := drain(b.window())
	used, own, sink := p.cpu()-cpu, ownCPU()-own, b.sink.cpu()-sink
	if err != nil {
		return sample{}, err
	}
	after, err := p.counters()
	rss := p.rss()
	cancel()
	group.Wait()
	if err != nil {
		return sample{}, err
	}
	if stats.Count == 0 {
		return sample{}, fmt.Errorf("nothing was delivered")
	}
	sortDurations(stats.Samples)
	each := func(d time.Duration) float64 { return float64(d.Microseconds()) / float64(stats.Count) }
	n := float64(stats.Count)
	return sample{
		cost: counters{
			allocations: (after.allocations - before.allocations) / n, bytes: (after.bytes - before.bytes) / n,
			reads: (after.reads - before.reads) / n, writes: (after.writes - before.writes) / n, waits: (after.waits - before.waits) / n,
		},
		commits: fmt.Sprintf("%.0f calls, %.2f ms; sync %.2f ms", (after.commitMessages-before.commitMessages)/(after.commits-before.commits),
			1000*(after.commitSeconds-before.commitSeconds)/(after.commits-before.commits), 1000*(after.syncSecond-before.syncSecond)/(after.syncs-before.syncs)),
		rate: n / took.Seconds(), cpu: each(used), senders: each(own), sink: each(sink),
		connections: 1000 * float64(stats.Connections) / float64(stats.Count),
		p50:         quantile(stats.Samples, 0.5), p99: quantile(stats.Samples, 0.99), rss: rss,
	}, nil
}

// fill sends n messages and returns how long that took.
func (b *bench) fill(p *dispatcherProcess, n int) (time.Duration, error) {
	begin := time.Now()
	var id atomic.Int64
	var group sync.WaitGroup
	var failed atomic.Pointer[error]
	for range 8 {
		group.Go(func() {
			s := newSender(p)
			defer s.close()
			for id.Load() < int64(n) {
				if err := s.send(0, 100, &id); err != nil {
					failed.Store(&err)
					return
				}
			}
		})
	}
	group.Wait()
	if err := failed.Load(); err != nil {
		return 0, *err
	}
	return time.Since(begin), nil
}

// sender posts calls on one connection. It is leaner than net/http's client: it
// shares the machine with what is measured, and is not measured itself.
type sender struct {
	addr    string
	conn    net.Conn
	answers *bufio.Reader
	request []byte
	calls   []byte
}

func newSender(p *dispatcherProcess) *sender { return &sender{addr: p.Addr} }

func (s *sender) close() {
	if s.conn != nil {
		_ = s.conn.Close()
	}
}

func (s *sender) send(source, batch int, id *atomic.Int64) error {
	if s.conn == nil {
		conn, err := net.Dial("tcp", s.addr)
		if err != nil {
			return err
		}
		s.conn, s.answers = conn, bufio.NewReader(conn)
	}
	path := "/v1/track"
	if batch == 1 {
		s.calls = appendBody(s.calls[:0], id.Add(1))
	} else {
		path = "/v1/batch"
		s.calls = append(s.calls[:0], `{"batch":[`...)
		for i := range batch {
			if i > 0 {
				s.calls = append(s.calls, ',')
			}
			s.calls = appendBody(s.calls, id.Add(1))
		}
		s.calls = append(s.calls, `]}`...)
	}
	s.request = fmt.Appendf(s.request[:0], "POST %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: bench\r\nAuthorization: Basic %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n",
		path, s.addr, base64.StdEncoding.EncodeToString([]byte(writeKey(source)+":")), len(s.calls))
	s.request = append(s.request, s.calls...)
	_ = s.conn.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := s.conn.Write(s.request); err != nil {
		return err
	}
	status, answer, err := readAnswer(s.answers)
	if err == nil && !strings.Contains(status, " 200 ") {
		err = fmt.Errorf("%s: %s", status, answer)
	}
	return err
}

// readAnswer reads an answer whose length is given.
func readAnswer(r *bufio.Reader) (status string, body []byte, err error) {
	length := 0
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return "", nil, err
		}
		if status == "" {
			status = string(line)
			continue
		}
		if len(line) <= 2 {
			break
		}
		if name, value, _ := bytes.Cut(line, []byte(":")); bytes.EqualFold(name, []byte("Content-Length")) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return "", nil, err
			}
		}
	}
	body = make([]byte, length)
	_, err = io.ReadFull(r, body)
	return strings.TrimSpace(status), body, err
}
