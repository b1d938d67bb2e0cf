package simulation

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/intake/ingest"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/storetest"
	"github.com/posthorn/posthorn/dispatcher/replicated/host"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/witness"
)

// pod is a machine with a disk, on which one process after another runs.
type pod struct {
	w    *world
	name string
	disk *vfs.MemFS
	// sound is the disk before a bit was flipped; nil without one.
	sound *vfs.MemFS
	// drift is by how much the clock of leases is faster.
	drift float64
	// installation is the identity of its processes' installation, and configs are the live configs that they get.
	installation string
	configs      map[string]*config

	// wrong is by how much the wall clock of the next process is ahead from its start on.
	wrong time.Duration

	// The world's mu guards the following: the present process, whether it reaches no server of the log, and by how much the
	// reading of its wall clock that is compared with those of the servers is ahead.
	life  *life
	cut   bool
	ahead time.Duration
}

// life is the time of a process, from its start to its end or its loss.
type life struct {
	*receivers
	pod          *pod
	calls, admin http.RoundTripper
	listeners    []*listener
	stop         context.CancelFunc
	ended        chan error
	opened, lost chan struct{} // Closed when requests are served, and at a loss.
	wrong        time.Duration // pod.wrong at its start.

	// The world's mu guards the following. configs takes the live configs; nil before. ending is true from the begin of the
	// end in order on. dead is true after a loss: nothing that the process does has an effect.
	configs      liveconfig.Sink
	ending, dead bool
	// untilLoss counts the operations of the file system until a loss; 0 for none.
	untilLoss int
	// power is true if the loss is one of power: unsynced data is lost, with a replicated log the whole disk.
	power bool
	// restored notes the end of the loss.
	restored func()
}

func newPod(w *world, name string) *pod {
	return &pod{w: w, name: name, disk: vfs.NewCrashableMem(), drift: (w.rand.Float64() - 0.5) * maxDrift,
		installation: own, configs: w.configs}
}

// own is the installation of the log.
const own = "shop/posthorn"

// newForeign returns a machine of another installation, whose live configs have other URLs for the same destinations.
func newForeign(w *world, installation string) *pod {
	p := newPod(w, "foreign")
	p.installation, p.configs = installation, map[string]*config{}
	for _, namespace := range namespaces {
		c := newConfig(namespace)
		for _, d := range c.destinations {
			d.revision = 1000
		}
		c.encode(w.T)
		p.configs[namespace] = c
	}
	return p
}

// maxDrift is by how much the rates of two clocks of leases may differ.
const maxDrift = 0.1

// leaseClock returns the clock of leases of a process that starts now.
func (p *pod) leaseClock() func() time.Time {
	start := time.Now()
	return func() time.Time {
		elapsed := time.Since(start)
		return start.Add(elapsed + time.Duration(p.drift*float64(elapsed)))
	}
}

// now is the wall clock of the process.
func (l *life) now() time.Time { return time.Now().Add(l.wrong) }

// wallClock is the clock that is compared with those of the servers.
func (l *life) wallClock() time.Time {
	l.pod.w.mu.Lock()
	defer l.pod.w.mu.Unlock()
	return l.now().Add(l.pod.ahead)
}

// owns returns the epoch of the process as the owner of the slot; 0 if it does not own it.
func (p *pod) owns() (epoch uint64) {
	l := p.living()
	if l == nil {
		return 0
	}
	c := &adminapi.Client{URL: "http://admin.test", HTTP: &http.Client{Transport: l.admin, Timeout: 5 * time.Second}}
	states, _ := c.Slots(p.w.Context()) // Without an answer it has none.
	for _, s := range states {
		if s.Owner {
			epoch = s.Epoch
		}
	}
	return epoch
}

// living returns the present process, or nil.
func (p *pod) living() *life {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	if p.life == nil || p.life.ending || p.life.dead || p.life.calls == nil {
		return nil
	}
	return p.life
}

// start starts a process on the disk, which may be lost during the start.
func (p *pod) start() {
	l := &life{pod: p, receivers: newReceivers(p.w), ended: make(chan error, 1), opened: make(chan struct{}), lost: make(chan struct{}),
		wrong: p.wrong}
	p.w.mu.Lock()
	p.life = l
	if p.installation == own && p.w.dice.IntN(4) == 0 {
		l.untilLoss, l.power = 1+p.w.dice.IntN(1<<p.w.dice.IntN(9)), true
	}
	p.w.mu.Unlock()
	o := dispatcher.Options{
		DataDir: "data", Pod: p.name, OrphanGrace: grace, Client: l, Logger: slog.New(slog.DiscardHandler), Queue: pebblestore.Options{
			FS: storetest.Watch(p.disk, l.operation, nil), DuplicateWindow: 10 * time.Minute, MemTableBytes: 256 << 10, CacheBytes: 1 << 20,
			Now: l.now,
		},
	}
	o.DrainTimeout = 100 * time.Millisecond
	// With a guard there is no token for backups, which is a file on the real disk.
	o.AdminGuard = func(h http.Handler) http.Handler { return h }
	ctx, stop := context.WithCancel(context.Background())
	if l.stop = stop; p.w.log != nil {
		l.follow(ctx, o)
		return
	}
	o.Listeners, o.Entrance = &dispatcher.Listeners{}, l
	d, err := dispatcher.New(o)
	if err != nil {
		if p.sound == nil || !strings.Contains(err.Error(), "posthorn repair") {
			p.w.Errorf("start of a process: got error %v, want none", err)
			panic(err)
		}
		p.disk, p.sound = p.sound, nil // As from a backup.
		p.w.detected++
		p.start()
		return
	}
	go func() { l.ended <- d.Run(ctx) }()
	<-l.opened
	p.w.configure(l, d)
}

// follow runs a process of the replicated log.
func (l *life) follow(ctx context.Context, o dispatcher.Options) {
	p, network := l.pod, &l.pod.w.network
	for _, name := range []string{".calls:80", ".admin:80", ".peers:80"} {
		l.listeners = append(l.listeners, network.listen(p.name+name))
	}
	remote := newAccess(l, p.w.log)
	h := host.Options{Options: o, PeerListen: l.listeners[2].address, LeaseClock: p.leaseClock(), WallClock: l.wallClock, Dial: network.dial,
		Listeners: host.NewListeners(dispatcher.NewListeners(l.listeners[0], l.listeners[1]), l.listeners[2])}
	go func() {
		l.ended <- host.Run(ctx, h, host.Slots{Number: 1, Standbys: 2, Bus: heartbeats{remote},
			Open: func(ctx context.Context, _ int) (slots.Remote, error) { return remote.remote(), remote.open(ctx) },
			OpenDirectory: func(ctx context.Context, _ int) (slots.Assignments, error) {
				return p.w.log.directory, remote.open(ctx)
			},
			Watch: func(ctx context.Context, to liveconfig.Sink) error {
				p.w.configure(l, to)
				<-ctx.Done()
				return nil
			},
		})
	}()
	transport := &http.Transport{DialContext: network.dial, MaxIdleConnsPerHost: 64}
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	l.calls, l.admin = at{p.name + ".calls:80", transport}, at{p.name + ".admin:80", transport}
}

// at sends requests to an address.
type at struct {
	address string
	*http.Transport
}

// RoundTrip implements http.RoundTripper.
func (a at) RoundTrip(r *http.Request) (*http.Response, error) {
	r.URL.Scheme, r.URL.Host = "http", a.address
	return a.Transport.RoundTrip(r)
}

// handler sends requests to a handler.
type handler struct{ http.Handler }

// RoundTrip implements http.RoundTripper.
func (h handler) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body == nil {
		r.Body = http.NoBody
	}
	answer := httptest.NewRecorder()
	r.RequestURI, r.RemoteAddr = r.URL.RequestURI(), "192.0.2.1:1"
	h.ServeHTTP(answer, r)
	return answer.Result(), nil
}

// end ends the process in order.
func (p *pod) end() {
	if l := p.living(); l != nil {
		p.w.mu.Lock()
		l.ending, l.untilLoss = true, 0
		p.w.mu.Unlock()
		l.stop()
		if err := <-l.ended; err != nil {
			p.w.Errorf("end of a process: got error %v, want none", err)
		}
		l.close()
	}
}

// close closes the connections of a process.
func (l *life) close() {
	for _, opened := range l.listeners {
		opened.cut()
	}
	if a, ok := l.calls.(at); ok {
		a.CloseIdleConnections()
	}
}

// flip flips a bit of a log or a manifest of the store. The engine repeats the compaction of a damaged table without a pause,
// which would stop the virtual time.
func (p *pod) flip(random *rand.Rand) {
	dir := "data/queue"
	if p.w.log != nil {
		dir = host.QueueFolder("data", 0)
	}
	names, _ := p.disk.List(dir) // A copy that is being restored may have no folder.
	slices.Sort(names)
	names = slices.DeleteFunc(names, func(name string) bool {
		return !strings.HasPrefix(name, "MANIFEST") && !strings.HasSuffix(name, ".log")
	})
	if len(names) == 0 {
		return
	}
	path := p.disk.PathJoin(dir, names[random.IntN(len(names))])
	f, err := p.disk.Open(path)
	check.NoError(p.w.T, "open a file of the store", err)
	text, err := io.ReadAll(f)
	check.NoError(p.w.T, "read a file of the store", errors.Join(err, f.Close()))
	if len(text) == 0 {
		return
	}
	text[random.IntN(len(text))] ^= 1 << random.IntN(8)
	f, err = p.disk.Create(path, vfs.WriteCategoryUnspecified)
	check.NoError(p.w.T, "create a file of the store", err)
	_, err = f.Write(text)
	check.NoError(p.w.T, "write a file of the store", errors.Join(err, f.Sync(), f.Close()))
	p.w.Logf("flipped a bit of %s", path)
}

// Open implements dispatcher.Entrance.
func (l *life) Open(_ *dispatcher.Dispatcher, h dispatcher.Handlers) {
	l.pod.w.mu.Lock()
	defer l.pod.w.mu.Unlock()
	l.calls, l.admin = handler{ingest.Normalize(h.Calls)}, handler{h.Admin}
	close(l.opened)
}

// Close implements dispatcher.Entrance.
func (*life) Close(context.Context) error { return nil }

// operation counts operations of the file system until a loss. Before the loss, all that does not wait for the operation may
// happen, such as an answer that is too early.
func (l *life) operation() {
	if !l.counts() {
		return
	}
	for range 1000 {
		runtime.Gosched()
	}
	l.pod.w.mu.Lock()
	defer l.pod.w.mu.Unlock()
	l.lose()
}

// counts counts an operation, and reports whether the loss follows.
func (l *life) counts() bool {
	l.pod.w.mu.Lock()
	defer l.pod.w.mu.Unlock()
	if l.untilLoss == 0 {
		return false
	}
	l.untilLoss--
	return l.untilLoss == 0
}

// lose ends the process without a warning. Files keep what the operating system has, or, without power, what was
// synced and a part of the rest. The caller holds mu.
func (l *life) lose() {
	if l.dead {
		return
	}
	l.dead = true
	w, unsynced, name := l.pod.w, 100, "kill -9"
	if l.power {
		unsynced, name = w.dice.IntN(101), "power loss"
	}
	l.restored = w.Fault(witness.Fault{Name: name, Process: l.pod.name, Repeats: witness.Unrecorded})
	if l.power && w.log != nil {
		l.pod.disk = vfs.NewCrashableMem()
	} else {
		l.pod.disk = l.pod.disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: unsynced, RNG: rand.New(rand.NewPCG(w.dice.Uint64(), 0))})
	}
	close(l.lost)
}

// restart starts processes until one is not lost during its start.
func (p *pod) restart() {
	for {
		l := p.life
		p.w.ending.Go(func() {
			l.close()
			l.stop()
			if err := <-l.ended; err != nil && !l.dead {
				p.w.Errorf("the end of a process: %v", err)
			}
		})
		p.start()
		p.w.progress()
		l.restored()
		if p.living() != nil {
			return
		}
	}
}

// requestAndThen sends a request to the process. then runs with the answer, under the world's mu, unless the process is lost.
func (p *pod) requestAndThen(method, path, body string, change func(*http.Request), then func(status int, text []byte)) {
	l := p.living()
	if l == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, "http://calls.test"+path, strings.NewReader(body))
	if err != nil {
		return
	}
	if change != nil {
		change(r)
	}
	answer, err := l.calls.RoundTrip(r)
	if err != nil {
		return
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	if err == nil && !l.dead {
		then(answer.StatusCode, text)
	}
}

// request sends a request to the process, and returns the answer; status 0 without one.
func (p *pod) request(method, path string) (status int) {
	p.requestAndThen(method, path, "", nil, func(s int, _ []byte) { status = s })
	return status
}
