package simulation

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/intake/ingest"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/storetest"
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
	life  *life // The present process. The world's mu guards it.
}

// life is the time of a process, from its start to its end or its loss.
type life struct {
	*receivers
	pod        *pod
	dispatcher *dispatcher.Dispatcher
	handlers   dispatcher.Handlers
	stop       context.CancelFunc
	ended      chan error
	lost       chan struct{} // Closed at a loss.

	// The world's mu guards the following. ending is true from the begin of the end in order on. dead is true after a loss:
	// nothing that the process does has an effect.
	ending, dead bool
	// untilLoss counts the operations of the file system until a loss; 0 for none.
	untilLoss int
	// power is true if the loss is one of power: unsynced data is lost.
	power bool
	// restored notes the end of the loss.
	restored func()
}

func newPod(w *world) *pod { return &pod{w: w, name: "p0", disk: vfs.NewCrashableMem()} }

// living returns the present process, or nil.
func (p *pod) living() *life {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	if p.life == nil || p.life.ending || p.life.dead || p.life.handlers.Calls == nil {
		return nil
	}
	return p.life
}

// start starts a process on the disk, which may be lost during the start.
func (p *pod) start() {
	l := &life{pod: p, receivers: newReceivers(p.w), ended: make(chan error, 1), lost: make(chan struct{})}
	p.w.mu.Lock()
	p.life = l
	if p.w.dice.IntN(4) == 0 {
		l.untilLoss, l.power = 1+p.w.dice.IntN(1<<p.w.dice.IntN(9)), true
	}
	p.w.mu.Unlock()
	o := dispatcher.Options{
		DataDir: "data", Pod: p.name, OrphanGrace: grace, Client: l, Logger: slog.New(slog.DiscardHandler), Queue: pebblestore.Options{
			FS: storetest.Watch(p.disk, l.operation, nil), DuplicateWindow: 10 * time.Minute, MemTableBytes: 256 << 10, CacheBytes: 1 << 20,
			Now: time.Now,
		},
	}
	o.Listeners, o.Entrance, o.DrainTimeout = &dispatcher.Listeners{}, l, 100*time.Millisecond
	// With a guard there is no token for backups, which is a file on the real disk.
	o.AdminGuard = func(h http.Handler) http.Handler { return h }
	var err error
	if l.dispatcher, err = dispatcher.New(o); err != nil {
		if p.sound == nil || !strings.Contains(err.Error(), "posthorn repair") {
			p.w.Errorf("start of a process: got error %v, want none", err)
			panic(err)
		}
		p.disk, p.sound = p.sound, nil // As from a backup.
		p.w.detected++
		p.start()
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	l.stop = stop
	go func() { l.ended <- l.dispatcher.Run(ctx) }()
	p.w.configure(l)
}

// stop ends the process in order.
func (p *pod) stop() {
	if l := p.living(); l != nil {
		p.w.mu.Lock()
		l.ending, l.untilLoss = true, 0
		p.w.mu.Unlock()
		l.stop()
		if err := <-l.ended; err != nil {
			p.w.Errorf("end of a process: got error %v, want none", err)
		}
	}
}

// flip flips a bit of a log or a manifest of the store. The engine repeats the compaction of a damaged table without a pause,
// which would stop the virtual time.
func (p *pod) flip(random *rand.Rand) {
	const dir = "data/queue"
	names, err := p.disk.List(dir)
	check.NoError(p.w.T, "list the files of the store", err)
	slices.Sort(names)
	names = slices.DeleteFunc(names, func(name string) bool {
		return !strings.HasPrefix(name, "MANIFEST") && !strings.HasSuffix(name, ".log")
	})
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
	h.Calls = ingest.Normalize(h.Calls)
	l.handlers = h
}

// Close implements dispatcher.Entrance.
func (*life) Close(context.Context) error { return nil }

// operation counts operations of the file system until a loss.
func (l *life) operation() {
	l.pod.w.mu.Lock()
	defer l.pod.w.mu.Unlock()
	if l.untilLoss > 0 {
		if l.untilLoss--; l.untilLoss == 0 {
			l.lose()
		}
	}
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
	l.restored = w.begin(witness.Fault{Name: name, Process: l.pod.name, Repeats: witness.Unrecorded})
	l.pod.disk = l.pod.disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: unsynced, RNG: rand.New(rand.NewPCG(w.dice.Uint64(), 0))})
	close(l.lost)
}

// restart starts processes until one is not lost during its start.
func (p *pod) restart() {
	for {
		l := p.life
		p.w.ending.Go(func() {
			l.stop()
			<-l.ended
		})
		p.start()
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
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	if change != nil {
		change(r)
	}
	answer := httptest.NewRecorder()
	l.handlers.Calls.ServeHTTP(answer, r)
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	if !l.dead {
		then(answer.Code, answer.Body.Bytes())
	}
}

// request sends a request to the process, and returns the answer; status 0 without one.
func (p *pod) request(method, path, body string, change func(*http.Request)) (status int, text []byte) {
	p.requestAndThen(method, path, body, change, func(s int, t []byte) { status, text = s, t })
	return status, text
}

// admin is the admin API of the process.
func (p *pod) admin() *adminapi.Client {
	return &adminapi.Client{URL: "http://admin.test", HTTP: &http.Client{Transport: p}}
}

// RoundTrip implements http.RoundTripper.
func (p *pod) RoundTrip(r *http.Request) (*http.Response, error) {
	l := p.living()
	if l == nil {
		return nil, io.ErrUnexpectedEOF
	}
	if r.Body == nil {
		r.Body = io.NopCloser(bytes.NewReader(nil))
	}
	answer := httptest.NewRecorder()
	l.handlers.Admin.ServeHTTP(answer, r)
	return answer.Result(), nil
}
