package reliability

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// TestPowerLossWithReplicatedLog simulates repeated losses of a dispatcher with its disk under load, while the config changes.
// The next dispatcher restores its store from the last snapshot and the log. Snapshots follow each other, so most losses are
// during one. After a loss at any time, also during a start: every call that was answered 200 is delivered or rejected
// by the receiver, a call that is sent again is not accepted twice, the ledger balances at
// every start, and only deliveries in flight or not yet recorded are repeated. A dispatcher that
// starts with an old config sends nothing and accepts no call until it has a newer one.
//
// POSTHORN_CRASH_SEEDS sets the number of seeds, POSTHORN_CRASH_SEED the first one.
func TestPowerLossWithReplicatedLog(t *testing.T) {
	first := number("POSTHORN_CRASH_SEED", 1)
	var all tally
	seeds := number("POSTHORN_CRASH_SEEDS", 20)
	for seed := first; seed < first+seeds; seed++ {
		if !t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			w := &world{t: t, rnd: rand.New(rand.NewPCG(uint64(seed), 0)), acked: map[string]bool{}, sent: map[string]bool{}, total: &all}
			w.run(machine{vfs.NewCrashableMem(), slotstest.NewStream(0), slotstest.NewObjectStore(0)})
		}) {
			t.Logf("to reproduce: POSTHORN_CRASH_SEED=%d POSTHORN_CRASH_SEEDS=1", seed)
		}
	}
	t.Cleanup(func() {
		t.Logf("%d power losses (%d of them during a start), %d accepted calls, %d deliveries, %d of them repeated; at most %d unrecorded deliveries of a receiver at one power loss; %d snapshots",
			all.cuts, all.early, all.accepted, all.deliveries, all.repeated, all.peak, all.snapshots)
		if all.snapshots == 0 {
			t.Error("snapshots: got none, want some")
		}
	})
}

// tally has the sums of all seeds.
type tally struct {
	sync.Mutex
	cuts, early, accepted, deliveries, repeated, peak, snapshots int
}

// The receivers: steady accepts all messages, flaky fails at random, picky rejects some
// permanently, and a filter excludes some for partial.
const (
	steady = iota
	flaky
	picky
	partial
	receivers
)

var names = [receivers]string{"steady", "flaky", "picky", "partial"}

// maxInFlight bounds the deliveries that a power loss can interrupt, per destination.
const maxInFlight = 16

// world has the state that survives a power loss, of senders and receivers.
type world struct {
	t     *testing.T
	rnd   *rand.Rand // for the main goroutine only
	urls  [receivers]string
	total *tally

	mu    sync.Mutex
	life  *life // the current one; nil between a power loss and the next start
	calm  bool  // true when flaky no longer fails
	dice  *rand.Rand
	sent  map[string]bool // all calls
	acked map[string]bool // calls that were answered 200 before a power loss
	got   [receivers]map[string]int
	// number is the newest config's, and proven the number of a config that the store must know, because calls
	// were answered 200 after it; 0 for none.
	number, proven int64
	oldURL         string // of the receivers in old configs
	// unrecorded counts deliveries that the ledger did not contain at the starts; peak is the
	// maximum for a receiver and a start.
	unrecorded, peak int
}

// machine is what a dispatcher stores its data on: a disk, and a replicated log with the objects of its snapshots.
type machine struct {
	disk    *vfs.MemFS
	log     *slotstest.Stream
	objects *slotstest.ObjectStore
}

// crash returns the machine after a power loss: its log and an empty disk.
func (m machine) crash() machine {
	// The log first: an object is deleted only after the record that replaces it, and no record is
	// appended meanwhile.
	log := m.log.Clone()
	return machine{vfs.NewCrashableMem(), log, m.objects.Clone()}
}

// queue returns the options of the queue in dir. changing is called before each change that can
// survive. snapshots takes snapshots of the store until the log is closed, and returns the function
// that closes it.
func (m machine) queue(dir string, changing func()) (o pebblestore.Options, snapshots func(*pebblestore.Store, *tally) (closeLog func()),
	err error) {
	log := slotstest.NewLog(m.log)
	log.OnPublish = func() {
		changing()
		slowSync()
	}
	o = pebblestore.Options{FS: m.disk, Logger: slog.New(slog.DiscardHandler)}
	writer, err := slots.Slot{Log: log, Objects: m.objects, Dir: dir, Store: o}.TakeOver(context.Background())
	if err != nil {
		return o, nil, err
	}
	o.Log = writer
	return o, func(store *pebblestore.Store, total *tally) func() {
		s := &slots.Snapshotter{Log: log, Objects: m.objects, Writer: writer, Store: store, FS: m.disk, Dir: dir + ".snapshot", Logger: o.Logger}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for writer.Err() == nil {
				if s.Take(context.Background()) == nil {
					total.Lock()
					total.snapshots++
					total.Unlock()
				}
				time.Sleep(5 * time.Millisecond)
			}
		}()
		return func() {
			writer.Close()
			<-done
		}
	}, nil
}

// life is the time of a dispatcher from a start to a power loss.
type life struct {
	machine machine
	// path distinguishes its deliveries from late ones of the previous life.
	path string
	// The power loss happens when one of these reaches 0; a negative one is ignored.
	operations, answers, deliveries int
	// after is the machine after the power loss.
	after machine
	cut   chan struct{}
}

// die simulates the power loss. The caller has locked the world, so no later answer or
// delivery is counted.
func (w *world) die() {
	l := w.life
	l.after = l.machine.crash()
	w.life = nil
	close(l.cut)
}

// step decrements one of the counts that trigger the power loss.
func (w *world) step(l *life, count *int) {
	if w.life == l && *count > 0 {
		if *count--; *count == 0 {
			w.die()
		}
	}
}

func (w *world) run(m machine) {
	t := w.t
	w.dice = rand.New(rand.NewPCG(w.rnd.Uint64(), 0))
	for i := range w.urls {
		w.got[i] = map[string]int{}
		w.urls[i] = receive(t, func(rw http.ResponseWriter, r *http.Request) { w.deliver(i, rw, r) }).url
	}
	w.oldURL = receive(t, func(http.ResponseWriter, *http.Request) { t.Error("delivery: got one by an old config, want none") }).url
	var pending [4][]string // the unanswered calls of each sender
	cuts := 3 + w.rnd.IntN(3)
	for n := range cuts {
		l := &life{machine: m, path: fmt.Sprint("/", n), operations: -1, answers: -1, deliveries: -1,
			cut: make(chan struct{})}
		switch w.rnd.IntN(3) {
		case 0:
			l.operations = 1 + w.rnd.IntN(1<<w.rnd.IntN(10)) // The power loss is often during the start.
		case 1:
			l.answers = 1 + w.rnd.IntN(200)
		case 2:
			l.deliveries = 1 + w.rnd.IntN(1500)
		}
		w.mu.Lock()
		w.life = l
		w.mu.Unlock()
		w.live(l, n, &pending)
		m = l.after
		w.total.Lock()
		w.total.cuts++
		w.total.Unlock()
		if t.Failed() {
			return
		}
	}
	// The last life has no power loss.
	l := &life{machine: m, path: fmt.Sprint("/", cuts), operations: -1, answers: -1, deliveries: -1, cut: make(chan struct{})}
	w.mu.Lock()
	w.life, w.calm = l, true
	w.mu.Unlock()
	w.live(l, cuts, &pending)
}

// live starts a dispatcher on the life's machine, checks its store, and sends calls until the
// power loss or, in the last life, until all calls are delivered.
func (w *world) live(l *life, n int, pending *[4][]string) {
	t := w.t
	last := l.operations < 0 && l.answers < 0 && l.deliveries < 0
	queueOptions, snapshots, err := l.machine.queue(filepath.Join("data", "queue"), func() { w.changing(l) })
	if err != nil {
		t.Fatalf("take-over in life %d: got error %v, want none", n, err)
	}
	o := options(t, "data", queueOptions)
	o.DrainTimeout = 20 * time.Millisecond
	// With a guard there is no token for backups, which is a file on the real disk.
	o.AdminGuard = func(h http.Handler) http.Handler { return h }
	d, err := dispatcher.New(o)
	if err != nil {
		t.Fatalf("start of life %d: got error %v, want none", n, err)
	}
	closeLog := snapshots(d.Store(), w.total)
	defer closeLog()
	w.checkStore(d, n)
	r := run(d)
	defer func() {
		if err := r.stop(); err != nil && last {
			t.Error(err)
		}
	}()
	w.setOld(l, r)
	destinations := make([]liveconfig.Destination, receivers)
	for i := range destinations {
		destinations[i] = destination(names[i], "web", w.urls[i]+l.path)
		destinations[i].Delivery.MaxInFlight = maxInFlight
	}
	destinations[partial].Filter = &liveconfig.Filter{Events: []string{"Order"}}
	w.set(r, destinations)
	number := w.number
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
				// The store may have the calls of an earlier life already: then their answer proves no write.
				isNew := strings.HasPrefix(pending[s][0], fmt.Sprintf("%d-", n))
				if w.send(ctx, c, r, l, pending[s]) {
					if isNew {
						w.prove(number)
					}
					pending[s] = nil
				}
			}
		})
	}
	if !last {
		if !w.change(l, r, destinations) {
			t.Errorf("life %d had no power loss within %s: %d operations, %d answers, %d deliveries remain", n, waitLimit, l.operations, l.answers, l.deliveries)
			w.mu.Lock()
			w.die()
			w.mu.Unlock()
		}
		cancel()
		senders.Wait()
		return
	}
	senders.Wait()
	wait.For(t, "no pending messages", func() error {
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
	w.checkEnd(r)
}

// change changes the config repeatedly until the power loss: it disables, limits and removes
// destinations. It returns false if there is no power loss.
func (w *world) change(l *life, r *running, destinations []liveconfig.Destination) bool {
	for deadline := time.Now().Add(waitLimit); time.Now().Before(deadline); {
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
		w.set(r, changed)
	}
	return false
}

// set activates a config that is newer than all before.
func (w *world) set(r *running, destinations []liveconfig.Destination) {
	w.number += 2
	r.Set(namespace, w.numbered(w.number, destinations))
	r.Synced()
	for _, n := range r.Report().Namespaces {
		if n.Refused != nil {
			w.t.Fatalf("config %d: got error %s, want none", w.number, n.Refused.Error)
		}
	}
}

// prove notes that a call was answered 200 after a config had been set.
func (w *world) prove(number int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.proven = number
}

// setOld passes an old config, as a process does whose watch hangs. It must have no effect.
func (w *world) setOld(l *life, r *running) {
	if w.proven == 0 {
		return
	}
	old := make([]liveconfig.Destination, receivers)
	for i := range old {
		old[i] = destination(names[i], "web", w.oldURL)
	}
	r.Set(namespace, w.numbered(w.proven-1, old))
	r.Synced()
	c := newClient()
	defer c.close()
	if a, err := c.batch(w.t.Context(), r.Addr(), "web", call("old", "")); err == nil &&
		a.status != http.StatusServiceUnavailable && !dead(l) {
		w.t.Errorf("call to a dispatcher with an old config: got status %d, want 503", a.status)
	}
}

// numbered returns the stored form of a config.
func (w *world) numbered(number int64, destinations []liveconfig.Destination) liveconfig.Stored {
	data, revision, err := liveconfig.Encode(config([]liveconfig.Source{source("web")}, destinations...))
	if err != nil {
		w.t.Fatal(err)
	}
	head, err := liveconfig.EncodeHead(liveconfig.Head{Version: liveconfig.HeadVersion, Number: number, Revision: revision})
	if err != nil {
		w.t.Fatal(err)
	}
	return liveconfig.Stored{Config: data, Head: head}
}

// changing counts a record of the log.
func (w *world) changing(l *life) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step(l, &l.operations)
}

// slowSync makes a sync as slow as on a disk, so that other operations run concurrently.
func slowSync() { time.Sleep(time.Millisecond) }

func dead(l *life) bool {
	select {
	case <-l.cut:
		return true
	default:
		return false
	}
}

// send posts calls and records the answers before the power loss.
func (w *world) send(ctx context.Context, c *client, r *running, l *life, ids []string) bool {
	var calls []string
	w.mu.Lock()
	for _, id := range ids {
		w.sent[id] = true
		calls = append(calls, call(id, ""))
		if filtered(id) { // The filter of partial excludes other events.
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
			w.t.Errorf("batch: got status %d, want 200 or 503; body: %s", a.status, a.body)
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
func rejected(id string) bool { return strings.HasSuffix(id, "-2") }

// deliver is the handler of the receivers.
func (w *world) deliver(i int, rw http.ResponseWriter, r *http.Request) {
	id, err := messageID(r)
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.life == nil || r.URL.Path != w.life.path:
		panic(http.ErrAbortHandler) // The power loss has ended the connection.
	case err != nil || !w.sent[id]:
		w.t.Errorf("delivery at %s: got message %q and error %v, want a sent message", names[i], id, err)
	case i == flaky && !w.calm && w.dice.IntN(3) == 0:
		rw.WriteHeader(http.StatusBadGateway)
	case i == picky && rejected(id):
		rw.WriteHeader(http.StatusConflict) // It never opens the circuit.
	default:
		if i == partial && filtered(id) {
			w.t.Errorf("delivery at partial: got %s, which its filter excludes", id)
		}
		w.got[i][id]++
		w.step(w.life, &w.life.deliveries)
	}
}

// checkStore compares the store at a start with the state of senders and receivers.
func (w *world) checkStore(d *dispatcher.Dispatcher, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	source := d.Store().SourceStats(namespace + "/web")
	if err := source.Ledger.Balance(); err != nil {
		w.t.Errorf("start %d: ledger of the Source: got error %v, want none", n, err)
	}
	accepted := source.Accepted
	if int(accepted) < len(w.acked) || int(accepted) > len(w.sent) {
		w.t.Errorf("start %d: accepted calls: got %d, want %d (answered 200) to %d (sent)", n, accepted, len(w.acked), len(w.sent))
	}
	for i, name := range names {
		s := d.Store().LaneStats(queue.LaneID{Source: namespace + "/web", Destination: namespace + "/" + name, Any: true})
		if s.Accepted == 0 && s.Pending == 0 && accepted == 0 {
			continue // The lane may not have been opened before the power loss.
		}
		if s.Accepted != accepted || s.Balance() != nil || s.InFlight != 0 {
			w.t.Errorf("start %d: ledger of %s: got %+v, want a balance of %d accepted and none in flight", n, name, s, accepted)
		}
		if int(s.Delivered) > len(w.got[i]) {
			w.t.Errorf("start %d: Delivered of %s: got %d, want at most the %d received messages", n, name, s.Delivered, len(w.got[i]))
		}
		w.unrecorded += len(w.got[i]) - int(s.Delivered)
		w.peak = max(w.peak, len(w.got[i])-int(s.Delivered))
		if i != picky && s.DeadLettered > 0 || i != partial && s.Filtered > 0 || s.Discarded > 0 {
			w.t.Errorf("start %d: ledger of %s: got %+v, want no dead letters except at picky, no filtered messages except at partial, and none discarded", n, name, s)
		}
	}
}

// checkEnd checks that no call is lost and none was accepted twice.
func (w *world) checkEnd(r *running) {
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
		t.Errorf("accepted calls at the end: got %d, with %d answered 200, want the %d distinct calls that were sent", accepted, len(w.acked), len(w.sent))
	}
	balanced(t, r)
	repeated := 0
	for i, name := range names {
		for id := range w.acked {
			switch n := w.got[i][id]; {
			case i == partial && filtered(id):
			case i == picky && rejected(id):
				if !dead[id] {
					t.Errorf("call %s, which %s rejects: got no dead letter, want one", id, name)
				}
			case n == 0:
				t.Errorf("call %s, which was answered 200: got no delivery at %s, want one", id, name)
			}
		}
		report := ledger(t, r, name)
		if err := balance(report); err != nil {
			t.Error(err)
		}
		// The ledger counts a repeated delivery once.
		check.Equal(t, "Delivered of "+name, int(report.Delivered), len(w.got[i]))
		for _, n := range w.got[i] {
			repeated += n - 1
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
	if repeated > w.unrecorded {
		t.Errorf("repeated deliveries: got %d, want at most the %d that were not recorded at a power loss", repeated, w.unrecorded)
	}
	w.total.repeated += repeated
	w.total.peak = max(w.total.peak, w.peak)
}
