package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/signature"
)

const (
	secret     = "bench-shared-secret"
	connection = 64
)

// roles are the processes of a benchmark; each prints one line of JSON when it is up.
var roles = map[string]func([]string) error{"sink": sinkRole, "tlssink": tlsSinkRole, "direct": directRole, "queue": queueRole,
	"dispatcher": dispatcherRole,
	"attack":     attackRole, "gateway": gatewayRole, "slots": slotsRole}

type bench struct {
	root string
	sink *sinkProcess
	// memory is the limit of the memory of dispatchers, in bytes; 0 sets none.
	memory int64
}

func newBench(ctx context.Context) (*bench, error) {
	root, err := os.MkdirTemp("", "posthorn-bench-")
	if err != nil {
		return nil, err
	}
	b := &bench{root: root}
	if b.sink, err = startSink(ctx, 0); err != nil {
		return nil, err
	}
	return b, nil
}

func (b *bench) close() {
	b.sink.stop()
	_ = os.RemoveAll(b.root)
}

func (b *bench) dir(name string) string { return filepath.Join(b.root, name) }

// child is a process of this binary in a role.
type child struct {
	cmd   *exec.Cmd
	hello []byte
	stdin io.WriteCloser
	rest  *bufio.Reader
}

// program returns the path of the binary of the processes.
var program = os.Executable

// spawn starts this binary in a role and waits for its first line.
func spawn(ctx context.Context, role string, args ...string) (*child, error) {
	self, err := program()
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

// directLoop runs the direct loop, the base of the ratios.
func (b *bench) directLoop(destinations int) (sample, error) {
	s, err := b.loop("direct", b.sink.Addr, b.window().String(), strconv.Itoa(destinations))
	_, _ = b.sink.take()
	return s, err
}

// directLoopTo runs the direct loop to receivers in turn.
func (b *bench) directLoopTo(addrs []string) (sample, error) {
	file := b.dir("addresses.json")
	text, err := json.Marshal(addrs)
	if err != nil {
		return sample{}, err
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return sample{}, err
	}
	s, err := b.loop("direct", "@"+file, b.window().String(), strconv.Itoa(len(addrs)))
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

// measured prints the rate and the CPU time of a loop since begin, when the process had used some CPU time.
func measured(messages int64, begin time.Time, used time.Duration) error {
	took := time.Since(begin)
	fmt.Printf(`{"Rate":%f,"CPU":%f}`+"\n", float64(messages)/took.Seconds(), float64((ownCPU()-used).Microseconds())/float64(messages))
	return nil
}

// ownCPU returns the CPU time of this process.
func ownCPU() time.Duration {
	var usage syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// queueRole appends batches from as many goroutines as the batches row has
// senders, and acknowledges all messages of one lane.
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
	payload := appendBody(nil, 1, plainID)
	for range 8 {
		group.Go(func() error {
			for time.Since(begin) < window {
				batch := make([]queue.Message, 20)
				for i := range batch {
					batch[i] = queue.Message{Source: lane.Source, ID: "bench-" + strconv.FormatInt(appended.Add(1), 10), Type: "track",
						Event: "Order Completed", AcceptedAt: time.Now(), Body: payload}
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
	return measured(settled.Load(), begin, 0)
}

// directRole posts from 64 goroutines to one destination, or to many in turn,
// each with separate connections. All have the address in the first argument, or those in its @FILE.
func directRole(args []string) error {
	window, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	destinations, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	addrs := []string{args[0]}
	if file, ok := strings.CutPrefix(args[0], "@"); ok {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(text, &addrs); err != nil {
			return err
		}
	}
	clients := make([]*http.Client, destinations)
	for i := range clients {
		clients[i] = &http.Client{
			Timeout:   5 * time.Second,
			Transport: &http.Transport{MaxIdleConnsPerHost: connection, DisableCompression: true},
		}
	}
	message := string(appendBody(nil, 1, plainID))
	post := func(i int) {
		//nolint:noctx // the bare loop
		req, _ := http.NewRequest(http.MethodPost, "http://"+addrs[i%len(addrs)]+"/in", strings.NewReader(message))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("User-Agent", "Posthorn/1.0")
		req.Header.Set("X-Signature", signature.SHA1(secret, message))
		resp, err := clients[i%destinations].Do(req)
		if err != nil {
			panic(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	// run posts from all goroutines in turn while more returns true, and returns the number of messages.
	run := func(more func(i int) bool) int64 {
		var sent atomic.Int64
		var group sync.WaitGroup
		for n := range connection {
			group.Go(func() {
				for i := n; more(i); i += connection {
					post(i)
					sent.Add(1)
				}
			})
		}
		group.Wait()
		return sent.Load()
	}
	run(func(i int) bool { return i < destinations }) // The connections exist before the measurement.
	begin, used := time.Now(), ownCPU()
	return measured(run(func(int) bool { return time.Since(begin) < window }), begin, used)
}

// destination describes a measured destination; source is the number of its Source.
type destination struct {
	addr      string
	second    string // the address of another URL under AnyEndpoint, or empty
	source    int
	suspended bool
	// proxy is the address of the egress proxy of the dispatcher, or empty; one for
	// all destinations.
	proxy  string
	change func(*liveconfig.Destination) // or nil
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
	c := liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: "bench"}
	sources := 1
	for _, d := range list {
		sources = max(sources, d.source+1)
	}
	for i := range sources {
		sum := sha256.Sum256([]byte(writeKey(i)))
		c.Sources = append(c.Sources, liveconfig.Source{Name: fmt.Sprintf("s%04d", i), Revision: "1",
			WriteKeySHA256: liveconfig.KeyHashes{hex.EncodeToString(sum[:])}})
	}
	for i, d := range list {
		state := liveconfig.Active
		if d.suspended {
			state = liveconfig.Suspended
		}
		endpoints := []liveconfig.Endpoint{{Name: "primary", URL: liveconfig.NewSecret("http://" + d.addr + "/in")}}
		if d.second != "" {
			endpoints = append(endpoints, liveconfig.Endpoint{Name: "second", URL: liveconfig.NewSecret("http://" + d.second + "/in")})
		}
		c.Destinations = append(c.Destinations, liveconfig.Destination{
			Name: fmt.Sprintf("d%04d", i), Revision: "1", State: state, Sources: []string{fmt.Sprintf("s%04d", d.source)},
			Endpoints: endpoints,
			Signing:   liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret(secret)}},
			Success:   liveconfig.AnyEndpoint,
			Delivery: liveconfig.Delivery{TimeoutMS: 5000, RetryWindowMS: (4 * time.Hour).Milliseconds(), MinBackoffMS: 1000,
				MaxBackoffMS: 300_000, MaxInFlight: 1000},
			DeadLetters: liveconfig.DeadLetters{RetentionMS: time.Hour.Milliseconds(), MaxBytes: 1 << 30},
		})
		if d.change != nil {
			d.change(&c.Destinations[i])
		}
	}
	return c
}

type dispatcherProcess struct {
	*child
	Addr, Admin string
	sources     int
}

// start runs a dispatcher with a data directory and returns when it is ready.
func (b *bench) start(ctx context.Context, list []destination, dir string) (*dispatcherProcess, error) {
	return b.startWithLog(ctx, list, dir, "")
}

// startWithLog does the same. log is "URL NAME" of a replicated log, or empty.
func (b *bench) startWithLog(ctx context.Context, list []destination, dir, log string) (*dispatcherProcess, error) {
	return b.startPattern(ctx, list, dir, ".config", log)
}

// startPattern does the same with the configs in all files that have the name of the directory and a suffix.
func (b *bench) startPattern(ctx context.Context, list []destination, dir, pattern, log string) (*dispatcherProcess, error) {
	c := config(list)
	data, _, err := liveconfig.Encode(c)
	if err != nil {
		return nil, err
	}
	file := dir + ".config"
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return nil, err
	}
	proxy := ""
	for _, d := range list {
		proxy = cmp.Or(proxy, d.proxy)
	}
	p, err := b.startFiles(ctx, dir, pattern, proxy, log)
	if err == nil {
		p.sources = len(c.Sources)
	}
	return p, err
}

// startFiles does the same with configs that exist, and an egress proxy, or empty.
func (b *bench) startFiles(ctx context.Context, dir, pattern, proxy, log string) (*dispatcherProcess, error) {
	p, err := spawn(ctx, "dispatcher", dir, dir+pattern, *profile, proxy, log, "", strconv.FormatInt(b.memory, 10))
	if err != nil {
		return nil, err
	}
	d := &dispatcherProcess{child: p}
	return d, json.Unmarshal(p.hello, d)
}

// dispatcherRole runs a dispatcher. Its arguments are the data directory, a pattern of the files of the configs, the
// directory of profiles, the address of a proxy, "URL NAME" of the log, "standby" for a process that follows it, and the limit of
// the memory, which may be missing.
func dispatcherRole(args []string) error {
	configs, err := readConfigs(args[1])
	if err != nil {
		return err
	}
	policy, err := egress.ParsePolicy([]string{netip.PrefixFrom(netip.MustParseAddr("127.0.0.0"), 8).String()})
	if err != nil {
		return err
	}
	var proxy *egress.Proxy
	if args[3] != "" {
		if proxy, err = egress.NewProxy("http://"+args[3], nil, ""); err != nil {
			return err
		}
	}
	o := dispatcher.Options{
		Proxy:   proxy,
		DataDir: args[0], ServerOptions: dispatcher.ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0"}, Pod: "bench",
		Egress: policy,
		Queue:  pebblestore.Options{DuplicateWindow: 10 * time.Minute},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	}
	if os.Getenv(stallSyncs) != "" {
		o.Queue.FS = stallingFS{vfs.Default}
	}
	defer writeLocks()
	if len(args) > 6 {
		if o.Memory, err = strconv.ParseInt(args[6], 10, 64); err != nil {
			return err
		}
	}
	if args[4] != "" { // The servers of the log fill the same disk.
		o.Queue.MaxBytesPerSource = pebblestore.NoQuota
	}
	if args[2] != "" {
		stop, err := startProfiles(args[2])
		if err != nil {
			return err
		}
		defer stop()
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	configure := func(d *dispatcher.Dispatcher, at *dispatcher.Listeners) {
		for namespace, data := range configs {
			d.Set(namespace, liveconfig.Stored{Config: data})
		}
		d.Synced()
		hello(at.Addr().String(), at.AdminAddr().String())
	}
	if args[4] != "" {
		return runReplicated(ctx, o, args[4], args[5] == "standby", configure)
	}
	d, err := dispatcher.New(o)
	if err != nil {
		return err
	}
	configure(d, d.Listeners())
	return d.Run(ctx)
}

// readConfigs reads the files of a pattern, and returns them by their namespace.
func readConfigs(pattern string) (map[string][]byte, error) {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return nil, err
	}
	configs := map[string][]byte{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		c, _, err := liveconfig.Decode(data)
		if err != nil {
			return nil, err
		}
		configs[c.Namespace] = data
	}
	return configs, nil
}

// startProfiles starts profiles of this process. stop writes them.
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
