package simulation

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/witness"
)

// step is a step of a plan, which its seed determines.
type step struct {
	kind int
	seed uint64
}

// steps is the number of steps of a plan.
const steps = 8

// newPlan returns the plan of a seed, with a replicated log or without.
func newPlan(seed uint64, log bool) (plan []step) {
	n, random := len(kinds), rand.New(rand.NewPCG(seed, 2))
	if !log {
		n -= len(logKinds)
	}
	for range steps {
		plan = append(plan, step{random.IntN(n), random.Uint64()})
	}
	return plan
}

// kinds are the kinds of steps, at the end those with a replicated log.
var kinds []kind

type kind struct {
	name string
	run  func(*world)
}

func init() {
	kinds = []kind{
		{"time passes", func(w *world) { time.Sleep(time.Duration(w.rand.IntN(5000)) * time.Millisecond) }},
		{"the process is killed", func(w *world) { w.lose(w.some(), false, time.Duration(1+w.rand.IntN(1000))*time.Millisecond) }},
		{"the power is lost", func(w *world) { w.lose(w.some(), true, time.Duration(1+w.rand.IntN(1000))*time.Millisecond) }},
		{"the power is lost at a write", (*world).loseAtWrite},
		{"the process ends", (*world).end},
		{"a receiver fails", (*world).failReceiver},
		{"a URL fails", (*world).failURL},
		{"a destination changes", (*world).edit},
		{"a destination is removed", (*world).remove},
		{"a destination is suspended", (*world).suspend},
		{"a bit flips", (*world).flip},
		{"a user is deleted", (*world).deleteUser},
		{"dead letters are redelivered", (*world).redeliver},
	}
	kinds = append(kinds, logKinds...)
}

// some returns one of the machines.
func (w *world) some() *pod { return w.pods[w.rand.IntN(len(w.pods))] }

// lose ends a process without a warning after a time, and starts the next one.
func (w *world) lose(p *pod, power bool, after time.Duration) {
	time.Sleep(after)
	w.mu.Lock()
	p.life.power = power
	p.life.lose()
	w.mu.Unlock()
	time.Sleep(time.Duration(w.rand.IntN(2000)) * time.Millisecond)
	p.restart()
}

// loseAtWrite ends a process at an operation of the file system.
func (w *world) loseAtWrite() {
	p := w.some()
	w.mu.Lock()
	l := p.life
	l.power, l.untilLoss = w.rand.IntN(4) > 0, 1+w.rand.IntN(200)
	w.mu.Unlock()
	select {
	case <-l.lost:
		p.restart()
	case <-time.After(10 * time.Second):
		w.lose(p, l.power, time.Millisecond)
	}
}

// end ends a process in order, and starts the next one.
func (w *world) end() {
	w.recover()
	w.replace(w.some())
	w.recover()
}

// replace ends a process in order, unless it is lost, and starts the next one.
func (w *world) replace(p *pod) {
	if p.living() == nil {
		p.restart()
		return
	}
	end := w.Fault(witness.Fault{Name: "SIGTERM", Process: p.name, Repeats: witness.InFlight})
	p.end()
	p.start()
	w.progress()
	end()
}

// recover starts the processes that are lost, which can happen long after their starts.
func (w *world) recover() {
	for _, p := range w.pods {
		if p.living() == nil {
			p.restart()
		}
	}
}

// failReceiver makes the receivers of a namespace fail for a time.
func (w *world) failReceiver() {
	namespace := namespaces[w.rand.IntN(len(namespaces))]
	w.fail(namespace, witness.Fault{Name: "failing receiver", Namespace: namespace})
}

// failURL makes one URL of several fail for a time.
func (w *world) failURL() {
	d := w.configs[namespaces[w.rand.IntN(len(namespaces))]].destinations[0]
	w.fail(fmt.Sprintf("%s/%d", d.id(), w.rand.IntN(d.positions)), witness.Fault{Name: "failing URL", Destination: d.id()})
}

func (w *world) fail(prefix string, f witness.Fault) {
	w.mu.Lock()
	if _, fails := w.failing[prefix]; fails {
		w.mu.Unlock()
		return
	}
	end := w.Fault(f)
	w.failing[prefix] = receiverFaults[w.rand.IntN(len(receiverFaults))]
	w.mu.Unlock()
	d := time.Duration(w.rand.IntN(15_000)) * time.Millisecond
	w.senders.Go(func() {
		time.Sleep(d)
		w.mu.Lock()
		delete(w.failing, prefix)
		w.mu.Unlock()
		end()
	})
}

// calm lets all faults end.
func (w *world) calm() {
	w.recover()
	w.loseNone()
	w.restoreAll()
	time.Sleep(time.Second)
}

// loseNone cancels the losses at operations of the file system.
func (w *world) loseNone() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.pods {
		p.life.untilLoss = 0
	}
}

// restoreAll starts the processes that are lost, and adds the destinations that were removed.
func (w *world) restoreAll() {
	w.recover()
	for _, d := range w.destinations() {
		w.restore(d)
	}
}

// configure gives a process the live configs, maybe late. The first one can be old, as from a watch that hangs for a time.
func (w *world) configure(l *life, to liveconfig.Sink) {
	if w.one(4) {
		time.Sleep(w.upTo(5 * time.Second))
	}
	hangs := false
	for _, c := range l.pod.configs {
		stored, isOld := c.stored()
		hangs = hangs || isOld
		to.Set(c.namespace, stored)
	}
	if to.Synced(); hangs {
		time.Sleep(w.upTo(3 * time.Second))
		for _, c := range l.pod.configs {
			to.Set(c.namespace, c.newest())
		}
	}
	w.mu.Lock()
	l.configs = to
	w.mu.Unlock()
	if w.log == nil {
		w.confirm()
	}
}

// set gives the processes the next config of a namespace, with a replicated log in a random order and one after another.
func (w *world) set(c *config) bool {
	w.recover()
	c.encode(w.T)
	for _, i := range w.rand.Perm(len(w.pods)) {
		w.mu.Lock()
		to := w.pods[i].life.configs
		w.mu.Unlock()
		if to != nil {
			to.Set(c.namespace, c.newest())
		}
		if w.log != nil {
			time.Sleep(time.Duration(w.rand.IntN(1000)) * time.Millisecond)
		}
	}
	return w.confirm()
}

// confirm notes the revisions that the owner uses, and still uses a moment later: then they are on the disk.
func (w *world) confirm() bool {
	number := map[string]int64{}
	for _, c := range w.configs {
		number[c.namespace] = c.number
	}
	for end := time.Now().Add(20 * time.Second); !w.inUse(); time.Sleep(100 * time.Millisecond) {
		if w.admin() == nil || time.Now().After(end) {
			return false
		}
	}
	time.Sleep(2 * w.bounds.Unrecorded)
	if !w.inUse() {
		return false
	}
	for _, c := range w.configs {
		c.know(number[c.namespace])
		for _, d := range c.destinations {
			if d.unconfirmed {
				d.unconfirmed = false
				w.note(d, witness.Confirmed)
			}
		}
	}
	return true
}

// inUse reports whether the owner uses the newest revisions.
func (w *world) inUse() bool {
	report := w.report()
	if report == nil {
		return false
	}
	revisions := map[string]string{}
	for _, n := range report.Namespaces {
		for _, d := range n.Destinations {
			revisions[n.Namespace+"/"+d.Name] = d.Revision
		}
	}
	for _, d := range w.destinations() {
		if want := d.reported(); revisions[d.id()] != want {
			return false
		}
	}
	return true
}

// edit changes a destination.
func (w *world) edit() {
	c := w.configs[namespaces[w.rand.IntN(len(namespaces))]]
	d := c.destinations[w.rand.IntN(len(c.destinations))]
	if d.removed.IsZero() {
		w.recover()
		if w.rand.IntN(2) == 0 {
			d.perSecond = w.rand.IntN(3) * 50
		}
		if d.name == "crm" && w.rand.IntN(2) == 0 {
			d.every, d.positions = w.rand.IntN(2) == 0, 2+w.rand.IntN(2)
		}
		w.revise(d)
	}
}

// revise applies the next revision of a destination.
func (w *world) revise(d *target) {
	w.recover()
	d.revision++
	d.unconfirmed = true
	w.apply(d)
	w.set(w.configs[d.namespace])
}

// suspend suspends or pauses a destination for a time.
func (w *world) suspend() {
	d := w.destinations()[w.rand.IntN(len(w.destinations()))]
	if !d.removed.IsZero() {
		return
	}
	if w.rand.IntN(2) == 0 { // Retry windows end.
		w.fail(d.namespace, witness.Fault{Name: "failing receiver", Namespace: d.namespace})
	}
	end := w.Fault(witness.Fault{Name: "suspended destination", Namespace: d.namespace})
	d.state = []liveconfig.State{liveconfig.Suspended, liveconfig.Paused}[w.rand.IntN(2)]
	w.revise(d)
	time.Sleep(time.Duration(w.rand.IntN(10_000)) * time.Millisecond)
	d.state = ""
	w.revise(d)
	end()
}

// flip flips a bit of a file while no process runs on the machine.
func (w *world) flip() {
	w.recover()
	p := w.some()
	end := w.Fault(witness.Fault{Name: "flipped bit", Process: p.name, Repeats: witness.InFlight})
	p.end()
	sound := p.disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: w.rand})
	p.flip(w.rand)
	p.sound = sound
	p.start()
	p.sound = nil
	w.progress()
	end()
	w.recover()
}

// remove removes a destination, and restores it within the grace period or after it.
func (w *world) remove() {
	c := w.configs[namespaces[w.rand.IntN(len(namespaces))]]
	d := c.destinations[w.rand.IntN(len(c.destinations))]
	if !d.removed.IsZero() {
		return
	}
	w.note(d, witness.Removing)
	d.removed = time.Now()
	if w.set(c) {
		w.note(d, witness.Removed)
	}
	absent := 2 * grace
	if w.log != nil && w.Clock.Now() > forgetting-3*absent {
		absent = max(1, grace/2-time.Since(d.removed)) // The restoration needs some seconds, too.
	}
	if w.log != nil || w.rand.IntN(2) == 0 {
		time.Sleep(time.Duration(w.rand.IntN(int(absent))))
		w.restore(d)
	}
}

// forgetting is the age of an owner from which on it deletes the ledger of a removed destination after the grace period.
const forgetting = time.Minute

// restore adds a destination that was removed.
func (w *world) restore(d *target) {
	if d.removed.IsZero() {
		return
	}
	d.removed = time.Time{}
	w.revise(d)
}

// deleteUser deletes a user: all destinations of the namespace get a message.
func (w *world) deleteUser() {
	c := w.configs[namespaces[w.rand.IntN(len(namespaces))]]
	for _, d := range c.destinations {
		w.restore(d)
	}
	user := fmt.Sprint("gone-", c.namespace, len(c.deletions))
	content := json.RawMessage(fmt.Sprintf(`{"type":"delete","userId":%q}`, user))
	message := func(names ...string) *witness.Call {
		m := witness.Message{Content: content}
		for _, name := range names {
			m.Due = append(m.Due, c.namespace+"/"+name)
		}
		return &witness.Call{Kind: witness.Deletion, Source: c.namespace + "/web", Messages: []witness.Message{m}}
	}
	call, may := message("crm", "people"), message("strict") // Its window may end before an attempt.
	begin := w.Clock.Now()
	c.deletions = append(c.deletions, user)
	w.set(c)
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && call.Status == 0; time.Sleep(100 * time.Millisecond) {
		if w.begun(c) {
			call.Status = http.StatusOK
		}
	}
	w.Sender.Write(witness.Line{Begin: begin, Call: call})
	w.Sender.Write(witness.Line{Begin: begin, Call: may})
}

// begun reports whether the owner has begun the newest deletion of a namespace.
func (w *world) begun(c *config) bool {
	report := w.report()
	return report != nil && slices.ContainsFunc(report.Namespaces, func(n adminapi.NamespaceReport) bool {
		return n.Namespace == c.namespace && slices.ContainsFunc(n.Deletions, func(d adminapi.DeletionReport) bool {
			return d.Name == fmt.Sprint("d", len(c.deletions)-1) && !d.Started.IsZero()
		})
	})
}

// redeliver redelivers dead letters of a destination.
func (w *world) redeliver() {
	w.recover()
	d := w.find(namespaces[w.rand.IntN(len(namespaces))] + "/strict")
	action := adminapi.DeadLetterAction{Destination: d.id(), Rate: 50}
	call := &witness.Call{Kind: witness.Redelivery, Source: d.namespace + "/web"}
	for letter, err := range w.admin().DeadLetters(w.Context(), d.id(), 1000) {
		if err != nil {
			return
		}
		if w.rand.IntN(2) == 0 {
			action.Selector.Keys = append(action.Selector.Keys, letter.Key)
			call.Messages = append(call.Messages, witness.Message{ID: string(letter.MessageID), Due: []string{d.id()}})
		}
	}
	if len(call.Messages) == 0 {
		return
	}
	w.configs[d.namespace].redelivered.Store(true)
	begin := w.Clock.Now()
	ctx, cancel := context.WithTimeout(w.Context(), 5*time.Second)
	defer cancel()
	if p, err := w.admin().Redeliver(ctx, action, nil); err == nil && p.Done {
		call.Status = http.StatusOK
	}
	w.Sender.Write(witness.Line{Begin: begin, Call: call})
}
