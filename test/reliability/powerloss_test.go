package reliability

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/storetest"
)

// TestPowerLoss cuts the power of a dispatcher under load, again and again, on
// a file system that keeps a random part of what was not synced, while its config
// changes. Whatever the moment, also while it starts: every call answered 200 arrives or becomes a
// dead letter by the receiver's own will, a call sent again after the cut is
// not taken twice, the ledger adds up at every start, and only what was in
// flight or not yet written as delivered arrives twice.
//
// POSTHORN_CRASH_SEEDS sets how many seeds run, POSTHORN_CRASH_SEED which one is the first.
func TestPowerLoss(t *testing.T) {
	first := number("POSTHORN_CRASH_SEED", 1)
	var all tally
	seeds := number("POSTHORN_CRASH_SEEDS", 20)
	for seed := first; seed < first+seeds; seed++ {
		if !t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			w := &world{t: t, rnd: rand.New(rand.NewPCG(uint64(seed), 0)), acked: map[string]bool{}, sent: map[string]bool{}, total: &all}
			w.run()
		}) {
			t.Logf("run it alone with POSTHORN_CRASH_SEED=%d POSTHORN_CRASH_SEEDS=1", seed)
		}
	}
	t.Cleanup(func() {
		t.Logf("%d power cuts (%d of them during a start), %d calls accepted, %d deliveries, %d of them again; at most %d were forgotten for a receiver at one cut",
			all.cuts, all.early, all.accepted, all.deliveries, all.again, all.most)
	})
}

// tally is what all seeds add up to.
type tally struct {
	sync.Mutex
	cuts, early, accepted, deliveries, again, most int
}

// The receivers: one takes everything, one fails at random, one refuses some
// for good, one is sent only a part.
const (
	steady = iota
	flaky
	picky
	partial
	receivers
)

var names = [receivers]string{"steady", "flaky", "picky", "partial"}

// maxInFlight bounds what a cut can interrupt, per destination.
const maxInFlight = 16

// world is what a power cut does not touch: senders, receivers and their memory.
type world struct {
	t     *testing.T
	rnd   *rand.Rand // Of the main goroutine only.
	urls  [receivers]string
	total *tally

	mu    sync.Mutex
	life  *life // What runs; nil between a cut and the next start.
	calm  bool  // The flaky one has stopped failing.
	dice  *rand.Rand
	sent  map[string]bool // Every call, answered or not.
	acked map[string]bool // Answered 200 before a cut.
	got   [receivers]map[string]int
	// unwritten is how many arrivals the ledger had forgotten at the starts, together and most at once for a receiver.
	unwritten, most int
}

// life is a dispatcher's time from one start to its cut.
type life struct {
	disk *vfs.MemFS
	// path tells its deliveries from those of the life before, which may still be on their way.
	path string
	// The cut comes when one of these reaches 0; below 0 it never does.
	operations, answers, deliveries int
	percent                         int
	rnd                             *rand.Rand
	// after is the disk as the cut left it.
	after *vfs.MemFS
	cut   chan struct{}
}

// die cuts the power at this instant. The world's lock is held, so nothing is
// counted as answered or delivered that came after it.
func (w *world) die() {
	l := w.life
	l.after = l.disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: l.percent, RNG: l.rnd})
	w.life = nil
	close(l.cut)
}

// step counts one of the things that a cut may wait for.
func (w *world) step(l *life, count *int) {
	if w.life == l && *count > 0 {
		if *count--; *count == 0 {
			w.die()
		}
	}
}

func (w *world) run() {
	t := w.t
	w.dice = rand.New(rand.NewPCG(w.rnd.Uint64(), 0))
	for i := range w.urls {
		w.got[i] = map[string]int{}
		w.urls[i] = receive(t, func(rw http.ResponseWriter, r *http.Request) { w.deliver(i, rw, r) }).url
	}
	disk := vfs.NewCrashableMem()
	var pending [4][]string // What each sender got no answer to.
	cuts := 3 + w.rnd.IntN(3)
	for n := range cuts {
		l := &life{disk: disk, path: fmt.Sprint("/", n), operations: -1, answers: -1, deliveries: -1, percent: w.rnd.IntN(101), rnd: rand.New(rand.NewPCG(w.rnd.Uint64(), 0)), cut: make(chan struct{})}
		switch w.rnd.IntN(3) {
		case 0:
			l.operations = 1 + w.rnd.IntN(1<<w.rnd.IntN(10)) // Often while it starts.
		case 1:
			l.answers = 1 + w.rnd.IntN(200)
		case 2:
			l.deliveries = 1 + w.rnd.IntN(1500)
		}
		w.mu.Lock()
		w.life = l
		w.mu.Unlock()
		w.live(l, n, &pending)
		disk = l.after
		w.total.Lock()
		w.total.cuts++
		w.total.Unlock()
		if t.Failed() {
			return
		}
	}
	// The last life is let live to its end.
	l := &life{disk: disk, path: fmt.Sprint("/", cuts), operations: -1, answers: -1, deliveries: -1, cut: make(chan struct{})}
	w.mu.Lock()
	w.life, w.calm = l, true
	w.mu.Unlock()
	w.live(l, cuts, &pending)
}

// live starts a dispatcher on the life's disk, checks what it remembers and
// loads it until the cut; or, without one, until all is delivered.
func (w *world) live(l *life, n int, pending *[4][]string) {
	t := w.t
	last := l.operations < 0 && l.answers < 0 && l.deliveries < 0
	o := options(t, "data", pebblestore.Options{FS: storetest.Watch(l.disk, func() { w.changing(l) }, takeAMoment)})
	o.DrainTimeout = 20 * time.Millisecond
	d, err := dispatcher.New(o)
	if err != nil {
		t.Fatalf("life %d does not start on what the cut left: %v", n, err)
	}
	w.remembers(d, n)
	r := run(d)
	defer func() {
		if err := r.stop(); err != nil && last {
			t.Error(err)
		}
	}()
	destinations := make([]liveconfig.Destination, receivers)
	for i := range destinations {
		destinations[i] = destination(names[i], "web", w.urls[i]+l.path)
		destinations[i].Delivery.MaxInFlight = maxInFlight
	}
	destinations[partial].Filter = &liveconfig.Filter{Events: []string{"Order"}}
	r.set(t, config([]liveconfig.Source{source("web")}, destinations...))
	if dead(l) {
		w.total.Lock()
		w.total.early++
		w.total.Unlock()
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var senders sync.WaitGroup
	for s := range pending {
		rnd := rand.New(rand.NewPCG(w.rnd.Uint64(), uint64(s)))
		senders.Go(func() {
			c := newClient()
			defer c.close()
			for i := 0; ctx.Err() == nil && (!last || len(pending[s]) > 0); i++ {
				if len(pending[s]) == 0 {
					for j := range 1 + rnd.IntN(4) {
						pending[s] = append(pending[s], fmt.Sprintf("%d-%d-%d-%d", n, s, i, j))
					}
				}
				if w.send(ctx, c, r, l, pending[s]) {
					pending[s] = nil
				}
			}
		})
	}
	if !last {
		if !w.change(l, r, destinations) {
			t.Errorf("life %d never came to its cut: operations %d, answers %d, deliveries %d left", n, l.operations, l.answers, l.deliveries)
			w.mu.Lock()
			w.die()
			w.mu.Unlock()
		}
		cancel()
		senders.Wait()
		return
	}
	senders.Wait()
	eventually(t, "all that was accepted is settled", func() error {
		for _, name := range names {
			report := ledger(t, r, name)
			if err := balance(report); err != nil {
				t.Fatal(err)
			}
			if report.Pending > 0 {
				return fmt.Errorf("%d pending for %s", report.Pending, name)
			}
		}
		return nil
	})
	w.conclude(r)
}

// change changes the config again and again until the cut, which it waits for:
// destinations are disabled, limited, and gone for a moment.
func (w *world) change(l *life, r *running, destinations []liveconfig.Destination) bool {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		select {
		case <-l.cut:
			return true
		case <-time.After(time.Duration(w.rnd.IntN(1<<w.rnd.IntN(10))) * time.Millisecond):
		}
		var changed []liveconfig.Destination
		for _, d := range destinations {
			d.Revision = fmt.Sprint(w.rnd.Uint64())
			switch w.rnd.IntN(8) {
			case 0:
				continue
			case 1:
				d.State = liveconfig.Disabled
			case 2:
				d.Delivery.MaxInFlight = 1 + w.rnd.IntN(maxInFlight)
			case 3:
				d.Delivery.RequestsPerSecond = 100 + w.rnd.IntN(1000)
			}
			changed = append(changed, d)
		}
		r.set(w.t, config([]liveconfig.Source{source("web")}, changed...))
	}
	return false
}

// changing counts an operation of the file system towards the cut.
func (w *world) changing(l *life) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step(l, &l.operations)
}

// takeAMoment makes a sync take one, as on a disk, so that much happens around it.
func takeAMoment() { time.Sleep(time.Millisecond) }

func dead(l *life) bool {
	select {
	case <-l.cut:
		return true
	default:
		return false
	}
}

// send posts calls and notes what was answered before the cut.
func (w *world) send(ctx context.Context, c *client, r *running, l *life, ids []string) bool {
	var calls []string
	w.mu.Lock()
	for _, id := range ids {
		w.sent[id] = true
		calls = append(calls, call(id, "")) // Filtered out for one receiver when its event is another.
		if filtered(id) {
			calls[len(calls)-1] = strings.Replace(call(id, ""), `"Order"`, `"Other"`, 1)
		}
	}
	w.mu.Unlock()
	a, err := c.batch(ctx, r.Addr(), "web", calls...)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil || w.life != l {
		return false
	}
	if a.status != http.StatusOK {
		if a.status != http.StatusServiceUnavailable {
			w.t.Errorf("a batch was answered %d %s", a.status, a.body)
		}
		return false
	}
	for _, id := range ids {
		w.acked[id] = true
	}
	w.step(l, &l.answers)
	return true
}

func filtered(id string) bool { return strings.HasSuffix(id, "-1") }
func refused(id string) bool  { return strings.HasSuffix(id, "-2") }

// deliver is what the receivers do.
func (w *world) deliver(i int, rw http.ResponseWriter, r *http.Request) {
	id, err := messageID(r)
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.life == nil || r.URL.Path != w.life.path:
		panic(http.ErrAbortHandler) // The cut has ended the connection.
	case err != nil || !w.sent[id]:
		w.t.Errorf("%s got something that was never sent: %q %v", names[i], id, err)
	case i == flaky && !w.calm && w.dice.IntN(3) == 0:
		rw.WriteHeader(http.StatusBadGateway)
	case i == picky && refused(id):
		rw.WriteHeader(http.StatusGone)
	default:
		if i == partial && filtered(id) {
			w.t.Errorf("%s arrived at the receiver that filters it out", id)
		}
		w.got[i][id]++
		w.step(w.life, &w.life.deliveries)
	}
}

// remembers checks the store as a start finds it against what the world knows.
func (w *world) remembers(d *dispatcher.Dispatcher, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	source := d.Store().SourceStats(namespace + "/web")
	if err := source.Ledger.Balance(); err != nil {
		w.t.Errorf("start %d: %v", n, err)
	}
	accepted := source.Accepted
	if int(accepted) < len(w.acked) || int(accepted) > len(w.sent) {
		w.t.Errorf("start %d: %d calls accepted; %d were answered 200 of %d sent", n, accepted, len(w.acked), len(w.sent))
	}
	for i, name := range names {
		s := d.Store().LaneStats(queue.LaneID{Source: namespace + "/web", Destination: namespace + "/" + name, Any: true})
		if s.Accepted == 0 && s.Pending == 0 && accepted == 0 {
			continue // The lane may not have been opened before the cut.
		}
		if s.Accepted != accepted || s.Balance() != nil || s.InFlight != 0 {
			w.t.Errorf("start %d: the ledger of %s is %+v of %d accepted", n, name, s, accepted)
		}
		if int(s.Delivered) > len(w.got[i]) {
			w.t.Errorf("start %d: %d are written as delivered to %s, but %d arrived", n, s.Delivered, name, len(w.got[i]))
		}
		w.unwritten += len(w.got[i]) - int(s.Delivered)
		w.most = max(w.most, len(w.got[i])-int(s.Delivered))
		if i != picky && s.DeadLettered > 0 || i != partial && s.Filtered > 0 || s.Discarded > 0 {
			w.t.Errorf("start %d: %s gave up messages: %+v", n, name, s)
		}
	}
}

// conclude checks the end: nothing is lost, nothing was taken twice.
func (w *world) conclude(r *running) {
	t := w.t
	dead := map[string]bool{}
	err := r.Store().DeadLetters(t.Context(), namespace+"/"+names[picky], "", func(l queue.DeadLetter) bool {
		dead[l.ID] = true
		return true
	})
	if err != nil {
		t.Error(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if accepted := r.Store().SourceStats(namespace + "/web").Accepted; int(accepted) != len(w.acked) || len(w.acked) != len(w.sent) {
		t.Errorf("%d accepted in the end; %d distinct calls were sent and %d answered 200", accepted, len(w.sent), len(w.acked))
	}
	balanced(t, r)
	again := 0
	for i, name := range names {
		for id := range w.acked {
			switch n := w.got[i][id]; {
			case i == partial && filtered(id):
			case i == picky && refused(id):
				if !dead[id] {
					t.Errorf("%s was refused by %s and is no dead letter", id, name)
				}
			case n == 0:
				t.Errorf("%s was answered 200 and never arrived at %s", id, name)
			}
		}
		report := ledger(t, r, name)
		if err := balance(report); err != nil {
			t.Error(err)
		}
		// What is delivered is delivered once in the ledger, however often it arrived.
		if int(report.Delivered) != len(w.got[i]) {
			t.Errorf("%s: %d delivered by the ledger, %d arrived", name, report.Delivered, len(w.got[i]))
		}
		for _, n := range w.got[i] {
			again += n - 1
		}
	}
	w.total.Lock()
	defer w.total.Unlock()
	w.total.accepted += len(w.acked)
	for i := range names {
		for _, n := range w.got[i] {
			w.total.deliveries += n
		}
	}
	if again > w.unwritten {
		t.Errorf("%d deliveries came again; only %d had not been written as delivered at a cut", again, w.unwritten)
	}
	w.total.again += again
	w.total.most = max(w.total.most, w.most)
}
