package simulation

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/host"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
	"github.com/posthorn/posthorn/test/witness"
)

// logKinds are the kinds of steps of processes with a replicated log, beside kinds.
var logKinds = []kind{
	{"a process reaches no server", (*world).cutOff},
	{"the servers elect a leader", (*world).elect},
	{"requests to the log are lost", (*world).loseRequests},
	{"a wall clock is wrong", (*world).turnClock},
	{"a process starts with a wrong clock", (*world).misset},
	{"the stream is purged", (*world).purge},
	{"snapshots are lost", (*world).loseSnapshots},
	{"the stream is deleted", (*world).deleteStream},
	{"another installation joins", (*world).join},
	{"files of an earlier owner are adopted", (*world).adoptOlder},
}

// rejoining is the time after which each process accepts calls again. A process that reaches no server remains ready, and
// returns 503 for its calls.
const rejoining = 12 * time.Second

// repairTime is the time in which an owner replaces what a log lacks.
const repairTime = 45 * time.Second

// disturb makes the log fail for at most a number of seconds, in which the owner can change.
func (w *world) disturb(f witness.Fault, seconds int, set func(fails bool)) {
	w.recover()
	f.Repeats = witness.InFlight
	end := w.Fault(f)
	w.mu.Lock()
	w.disturbed = w.Clock.Now()
	set(true)
	w.mu.Unlock()
	time.Sleep(time.Duration(w.rand.IntN(1000*seconds)) * time.Millisecond)
	w.mu.Lock()
	set(false)
	w.mu.Unlock()
	w.recover()
	w.progress()
	_ = w.report()
	time.Sleep(rejoining)
	end()
	w.mu.Lock()
	w.disturbed = 0
	w.mu.Unlock()
}

// cutOff separates a process from the servers.
func (w *world) cutOff() {
	p := w.ownerOr(w.some())
	w.disturb(witness.Fault{Name: "network partition", Process: p.name}, 90, func(fails bool) { p.cut = fails })
}

// elect leaves the stream and the directory without a leader.
func (w *world) elect() {
	w.disturb(witness.Fault{Name: "election"}, 30, func(fails bool) {
		w.log.stream.SetLeader(!fails)
		w.log.directory.SetLeader(!fails)
	})
}

// loseRequests loses requests of all processes and their responses, executes some late, and makes reads stale.
func (w *world) loseRequests() {
	w.disturb(witness.Fault{Name: "lost requests"}, 30, func(fails bool) { w.log.flaky = fails })
}

// turnClock sets the wall clock of a process, which hands over its slot if another process has a right one.
func (w *world) turnClock() {
	p := w.ownerOr(w.some())
	ahead := time.Duration(w.rand.IntN(int(20*time.Minute))) - 10*time.Minute
	w.disturb(witness.Fault{Name: "wrong wall clock", Process: p.name}, 30, func(fails bool) {
		if p.ahead = 0; fails {
			p.ahead = ahead
		}
	})
}

// misset starts a process with a wall clock that is hours ahead or behind, and loses the others in half of the cases.
func (w *world) misset() {
	w.recover()
	p := w.some()
	p.wrong = (time.Hour + time.Duration(w.rand.Int64N(int64(11*time.Hour)))) * time.Duration(1-2*w.rand.IntN(2))
	w.replace(p)
	time.Sleep(time.Duration(w.rand.IntN(20_000)) * time.Millisecond)
	if w.rand.IntN(2) == 0 {
		w.loseAll(p, true)
		time.Sleep(2 * grace)
	}
	p.wrong = 0
	w.replace(p)
	w.recover()
}

// ownerOr returns the process that owns the slot in two of three cases, or another one.
func (w *world) ownerOr(other *pod) *pod {
	if w.rand.IntN(3) == 0 {
		return other
	}
	return cmp.Or(w.newestOwner(), other)
}

// newestOwner returns the process that owns the slot, or nil. An earlier owner may not know yet that it has lost the slot.
func (w *world) newestOwner() (owner *pod) {
	newest := uint64(0)
	for _, p := range w.pods {
		if epoch := p.owns(); epoch > newest {
			owner, newest = p, epoch
		}
	}
	return owner
}

// loseContent removes content of the log. After the time in which the owner replaces it, all processes are lost.
func (w *world) loseContent(name string, remove func()) {
	w.recover()
	w.loseNone() // The files of the owner are needed.
	w.progress()
	end := w.Fault(witness.Fault{Name: name, Repeats: witness.Unrecorded}) // The owner can be lost meanwhile.
	remove()
	time.Sleep(repairTime)
	w.recover()
	w.progress()
	end()
	w.loseAll(nil, true)
	w.recover()
}

// loseAll ends all processes but one without a warning, with power by a power loss.
func (w *world) loseAll(but *pod, power bool) {
	for _, p := range w.pods {
		if p == but {
			continue
		}
		w.mu.Lock()
		p.life.power = power
		p.life.lose()
		w.mu.Unlock()
	}
}

// join starts a process without an identity, or with another one. Then it is alone for longer than the grace period.
func (w *world) join() {
	w.recover()
	w.progress()
	foreign := newForeign(w, []string{"", "news/posthorn"}[w.rand.IntN(2)])
	foreign.start()
	time.Sleep(time.Duration(w.rand.IntN(10_000)) * time.Millisecond)
	w.loseAll(nil, true)
	time.Sleep(3 * grace)
	foreign.end()
	w.recover()
}

func (w *world) purge() {
	w.loseContent("purged stream", func() {
		log := slotstest.NewLog(w.log.stream)
		if state, err := log.State(w.Context()); err == nil {
			_ = log.Trim(w.Context(), state.Last+1) // A log without faults returns no error.
		}
	})
}

func (w *world) loseSnapshots() {
	w.loseContent("deleted snapshots", func() {
		names, _ := w.log.snapshots.List(w.Context()) // It returns no error.
		for _, name := range names {
			_ = w.log.snapshots.Delete(w.Context(), name)
		}
	})
}

// deleteStream replaces the stream by an empty one, and makes the slot continue with the files of the owner.
func (w *world) deleteStream() {
	w.recover()
	w.loseNone()
	w.progress()
	owner := w.newestOwner()
	if owner == nil || owner.living() == nil {
		return
	}
	end := w.Fault(witness.Fault{Name: "deleted stream", Repeats: witness.InFlight})
	w.log.stream.Replace()
	for end := time.Now().Add(time.Minute); owner.owns() > 0 && time.Now().Before(end); {
		time.Sleep(time.Second)
	}
	if err := w.adopt(owner); err != nil {
		w.Errorf("adoption with the files of %s: got error %v, want none", owner.name, err)
	}
	w.mu.Lock()
	w.epoch = 0 // The epochs of the new stream begin with 1.
	w.mu.Unlock()
	w.progress()
	end()
}

// adopt makes the slot continue with the files of a process, as posthorn replication adopt does.
func (w *world) adopt(p *pod) error {
	slot := slots.Slot{Log: slotstest.NewLog(w.log.stream), Objects: w.log.snapshots, Dir: host.QueueFolder("data", 0),
		Store: pebblestore.Options{FS: p.disk, MemTableBytes: 256 << 10, Logger: slog.New(slog.DiscardHandler)}}
	ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
	defer cancel()
	_, err := slot.Adopt(ctx, w.log.stream.Rename, true, func(*pebblestore.Store) error { return nil })
	return err
}

// adoptOlder adopts the files of an owner that reached no server while another process took its slot. It is an error, unless
// the log has all that the files have.
func (w *world) adoptOlder() {
	w.recover()
	w.loseNone()
	w.progress()
	owner := w.newestOwner()
	if owner == nil {
		return
	}
	end := w.Fault(witness.Fault{Name: "network partition", Process: owner.name, Repeats: witness.InFlight})
	w.mu.Lock()
	w.disturbed, owner.cut = w.Clock.Now(), true
	w.mu.Unlock()
	time.Sleep(30 * time.Second)
	w.progress()
	_ = w.report()
	w.loseAll(nil, false)
	w.mu.Lock()
	w.disturbed, owner.cut = 0, false
	w.mu.Unlock()
	if err := w.adopt(owner); err != nil && !errors.Is(err, slots.ErrOlderFiles) {
		w.Errorf("adoption with the files of %s: got error %v, want none or %v", owner.name, err, slots.ErrOlderFiles)
	}
	w.recover()
	w.progress()
	end()
}
