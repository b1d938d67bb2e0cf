package host

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/replicated/front"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// namespaces has the live configs of a process; none with Slots.Control. Each Dispatcher gets the configs of its
// slot, by a goroutine of its own: one that waits for its disk delays no other.
type namespaces struct {
	log     *slog.Logger
	index   front.Index
	decoder liveconfig.Decoder

	// directory is nil before it was read. synced is true when the configs of all namespaces are stored,
	// except for the failed ones. Both are read for each call.
	directory atomic.Pointer[slots.Directory]
	synced    atomic.Bool

	mu     sync.Mutex
	stored map[string]liveconfig.Stored
	failed []string
	// invalid are the namespaces whose stored config cannot be decoded.
	invalid map[string]bool
	feeders map[int]*feeder
	// unassigned are the namespaces that may have no slot, with the time of their first config. wake has a
	// value when there are some.
	unassigned map[string]time.Time
	wake       chan struct{}
	versions   configVersions
	// changedAt is when a config was replaced or deleted, by slot.
	changedAt map[int]time.Time
}

func newNamespaces(log *slog.Logger) *namespaces {
	return &namespaces{
		log: log, stored: map[string]liveconfig.Stored{}, invalid: map[string]bool{}, feeders: map[int]*feeder{},
		unassigned: map[string]time.Time{}, wake: make(chan struct{}, 1),
		versions: newConfigVersions(), changedAt: map[int]time.Time{},
	}
}

var _ liveconfig.Sink = (*namespaces)(nil)

// Set implements liveconfig.Sink.
func (n *namespaces) Set(namespace string, stored liveconfig.Stored) {
	// The Dispatcher of the slot reports an invalid config, and the previous one remains in effect.
	live, err := n.decoder.Decode(namespace, stored)
	if err == nil {
		n.index.Set(namespace, live)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.setInvalid(namespace, err != nil && !stored.Incomplete())
	if err == nil {
		n.versions.set(namespace, live.Head.Number)
	}
	n.noteChange(namespace)
	n.stored[namespace] = stored
	n.changed(namespace)
}

// Delete implements liveconfig.Sink.
func (n *namespaces) Delete(namespace string) {
	n.index.Delete(namespace)
	n.decoder.Forget(namespace)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.noteChange(namespace)
	delete(n.stored, namespace)
	n.versions.remove(namespace)
	n.setInvalid(namespace, false)
	n.changed(namespace)
}

// setInvalid stores whether the config of a namespace is invalid. The mutex is held.
func (n *namespaces) setInvalid(namespace string, invalid bool) {
	if invalid {
		n.invalid[namespace] = true
	} else {
		delete(n.invalid, namespace)
	}
}

// isUsable is false if configs are invalid and none is in effect, as Configs.Usable is.
func (n *namespaces) isUsable() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.invalid) == 0 || !n.index.IsEmpty()
}

// Synced implements liveconfig.Sink.
func (n *namespaces) Synced(failed ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failed = slices.Clone(failed)
	n.synced.Store(true)
	n.sync()
}

// sync passes Synced to all Dispatchers. The mutex is held.
func (n *namespaces) sync() {
	for _, f := range n.feeders {
		f.unsynced = true
		f.signal()
	}
}

// changed passes a changed config to the Dispatcher of its slot. The mutex is held.
func (n *namespaces) changed(namespace string) {
	slot, ok := n.SlotOf(namespace)
	if !ok {
		if _, exists := n.stored[namespace]; exists {
			if n.unassigned[namespace].IsZero() {
				n.unassigned[namespace] = time.Now()
			}
			select {
			case n.wake <- struct{}{}:
			default:
			}
		}
		return
	}
	if f := n.feeders[slot]; f != nil {
		f.add(namespace)
	}
}

// newestConfigs returns the newest live configs, for a heartbeat.
func (n *namespaces) newestConfigs() []slots.ConfigNumber {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.versions.newest()
}

// compareConfigs takes the numbers of the live configs that the other processes announce. It returns a problem
// with configs that this process has lacked for longer than a delay; empty for none.
func (n *namespaces) compareConfigs(announced map[string]int64, delay time.Duration) (problem string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	n.versions.compare(now, announced)
	return n.versions.problem(now, delay)
}

// lacksConfigs reports whether another process has a live config that this one lacks.
func (n *namespaces) lacksConfigs() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.versions.lacking) > 0
}

// SlotOf returns the slot of a namespace; ok is false while it has none.
func (n *namespaces) SlotOf(namespace string) (slot int, ok bool) {
	if directory := n.directory.Load(); directory != nil {
		return directory.Slot(namespace)
	}
	return 0, false
}

// isSynced reports whether requests can be routed.
func (n *namespaces) isSynced() bool { return n.synced.Load() && n.directory.Load() != nil }

// changeTime is the time in which the owner of a slot gets a changed config, and reports that it knows other
// write keys.
const changeTime = 5 * time.Second

// noteChange notes that a config is replaced or deleted. The mutex is held.
func (n *namespaces) noteChange(namespace string) {
	if _, exists := n.stored[namespace]; !exists {
		return
	}
	if slot, ok := n.SlotOf(namespace); ok {
		n.changedAt[slot] = time.Now()
	}
}

// changedLately reports whether a config of the slot changed a moment ago.
func (n *namespaces) changedLately(slot int) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	at, ok := n.changedAt[slot]
	return ok && time.Since(at) < changeTime
}

const (
	// assignRetry is the wait after the directory did not answer.
	assignRetry = time.Second
	// turnInterval is the interval in which a process checks whether another one has given a slot, and
	// assignTurn the time after which it does not wait for the other one any longer.
	turnInterval = 100 * time.Millisecond
	assignTurn   = 5 * time.Second
	// assignWarning is the time after which it is logged that a namespace has no slot, because a slot has no
	// owner. A takeover takes less.
	assignWarning = 20 * time.Second
)

// assign gives a slot to each namespace with a live config until ctx is done. pins are slots by
// namespace. isAssigner reports whether this process is the one that gives the slots: several at the same
// time would not know how many namespaces each slot has. uncompared returns why a namespace without a slot
// can have messages in one; it gets none meanwhile.
func (n *namespaces) assign(ctx context.Context, directory *slots.Directory, pins map[string]int, isAssigner func() bool,
	uncompared func() string) {
	n.mu.Lock()
	n.directory.Store(directory)
	for namespace := range n.stored {
		n.changed(namespace)
	}
	n.sync()
	n.mu.Unlock()
	begin, warned := time.Now(), map[string]bool{}
	for {
		n.mu.Lock()
		unassigned := maps.Clone(n.unassigned)
		n.mu.Unlock()
		var err error
		var again <-chan time.Time
		for _, namespace := range slices.Sorted(maps.Keys(unassigned)) {
			if _, known := directory.Slot(namespace); !known {
				waiting := min(time.Since(unassigned[namespace]), time.Since(begin))
				reason := uncompared()
				if reason != "" && waiting >= assignWarning && !warned[namespace] {
					warned[namespace] = true
					n.log.Warn("a namespace has no slot yet, because another slot can have its messages; its calls are answered 503", "namespace", namespace, "reason", reason)
				}
				if reason != "" || !isAssigner() && waiting < assignTurn {
					again = time.After(turnInterval)
					continue
				}
			}
			pin, pinned := pins[namespace]
			if !pinned {
				pin = slots.PinNone
			}
			if _, err = directory.Assign(ctx, namespace, pin); err != nil {
				n.log.Warn("a namespace has no slot yet; its calls are answered 503", "namespace", namespace, "error", err)
				break
			}
			delete(warned, namespace)
			n.assigned(namespace)
		}
		if err != nil {
			again = time.After(assignRetry)
		}
		select {
		case <-n.wake:
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}

// assigned passes the config of a namespace that has got a slot to the Dispatcher of the slot.
func (n *namespaces) assigned(namespace string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.unassigned, namespace)
	n.changed(namespace)
}

// feed passes the live configs of a slot to its Dispatcher until ctx is done.
func (n *namespaces) feed(ctx context.Context, slot int, to liveconfig.Sink) {
	f := &feeder{pending: map[string]bool{}, wake: make(chan struct{}, 1)}
	n.mu.Lock()
	n.feeders[slot] = f
	for namespace := range n.stored {
		if at, ok := n.SlotOf(namespace); ok && at == slot {
			f.pending[namespace] = true
		}
	}
	f.unsynced = true
	f.signal()
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.feeders, slot)
	}()
	for {
		select {
		case <-f.wake:
		case <-ctx.Done():
			return
		}
		for ctx.Err() == nil {
			pass := n.next(f, slot)
			if pass == nil {
				break
			}
			pass(to)
		}
	}
}

// next takes the next change of a Dispatcher's configs and returns a function that passes it; nil if
// there is none. All known configs are passed before Synced.
func (n *namespaces) next(f *feeder, slot int) func(liveconfig.Sink) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for namespace := range f.pending {
		delete(f.pending, namespace)
		stored, exists := n.stored[namespace]
		return func(to liveconfig.Sink) {
			if exists {
				to.Set(namespace, stored)
			} else {
				to.Delete(namespace)
			}
		}
	}
	if !f.unsynced || !n.isSynced() {
		return nil
	}
	f.unsynced = false
	failed := n.failedOf(slot)
	return func(to liveconfig.Sink) { to.Synced(failed...) }
}

// failedOf returns the failed namespaces of a slot. Those without a slot belong to the first one. The
// mutex is held.
func (n *namespaces) failedOf(slot int) (list []string) {
	for _, namespace := range n.failed {
		if at, _ := n.SlotOf(namespace); at == slot {
			list = append(list, namespace)
		}
	}
	return list
}

// feeder has the changes that a Dispatcher does not have yet. The mutex of namespaces guards it.
type feeder struct {
	pending  map[string]bool
	unsynced bool
	wake     chan struct{}
}

func (f *feeder) add(namespace string) {
	f.pending[namespace] = true
	f.signal()
}

func (f *feeder) signal() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}
