package slots

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// SlotStore is the store of one slot; pebblestore.Store.
type SlotStore interface {
	queue.Store
	// Full reports whether Append returns ErrFull because of the disk.
	Full() bool
	// SourceQuota is the number of bytes of undelivered messages that one Source may have; 0 for
	// no bound.
	SourceQuota() int64
	// DiskBytes is the size of the store's files.
	DiskBytes() int64
}

// NotHeldError reports that this process does not have the slot of a namespace. The caller can send
// the request to the owner. It wraps queue.ErrUnavailable, and queue.ErrNoLane: the lanes of the slot
// have ended in this process.
type NotHeldError struct {
	Namespace string
	// Slot is the slot of the namespace; -1 when it has none yet.
	Slot int
	// Owner is the address of the process that has the slot; empty if unknown.
	Owner string
}

func (e *NotHeldError) Error() string {
	switch {
	case e.Slot < 0:
		return fmt.Sprintf("namespace %s has no slot yet", e.Namespace)
	case e.Owner == "":
		return fmt.Sprintf("slot %d of namespace %s has no known owner", e.Slot, e.Namespace)
	}
	return fmt.Sprintf("slot %d of namespace %s is owned by %s", e.Slot, e.Namespace, e.Owner)
}

// Unwrap makes errors.Is find the errors of package queue.
func (e *NotHeldError) Unwrap() []error { return []error{queue.ErrUnavailable, queue.ErrNoLane} }

// MultiplexerOptions configure a Multiplexer.
type MultiplexerOptions struct {
	// SlotOf returns the slot of a namespace; Directory.Slot.
	SlotOf func(namespace string) (slot int, ok bool)
	// Owner returns the address of the process that has a slot, or an empty string; nil when the
	// addresses are unknown.
	Owner func(slot int) string
	// MetaNamespace returns the namespace of a name of queue.Meta. When nil, names have the form
	// prefix/namespace or prefix/namespace/rest.
	MetaNamespace func(name string) string
}

// Multiplexer is the queue.Store of a process with several slots. It routes each call by the
// namespace to the store of the namespace's slot. Slots are added and removed while it is used.
type Multiplexer struct {
	o MultiplexerOptions

	mu       sync.RWMutex
	held     map[int]*heldSlot
	openings uint64
	closed   bool
	notify   func(queue.LaneID)
}

var _ SlotStore = (*Multiplexer)(nil)

// heldSlot is a slot of this process.
type heldSlot struct {
	store SlotStore
	// opening is Delivery.Opening of the messages that the store leases.
	opening uint64
	// draining slots only settle messages. The Multiplexer's lock protects it.
	draining bool
	// leasing is held shared by each Lease. Drain holds it when it begins, so that it sees the
	// messages of all leases.
	leasing sync.RWMutex
}

// NewMultiplexer returns a Multiplexer without slots.
func NewMultiplexer(o MultiplexerOptions) *Multiplexer {
	if o.Owner == nil {
		o.Owner = func(int) string { return "" }
	}
	if o.MetaNamespace == nil {
		o.MetaNamespace = secondPart
	}
	return &Multiplexer{o: o, held: map[int]*heldSlot{}}
}

// secondPart returns the namespace of a name of the form prefix/namespace/rest.
func secondPart(name string) string {
	_, rest, _ := strings.Cut(name, "/")
	return namespaceOf(rest)
}

// namespaceOf returns the namespace of "namespace/name".
func namespaceOf(name string) string {
	namespace, _, _ := strings.Cut(name, "/")
	return namespace
}

// Add adds the store of a slot, without open lanes. The Multiplexer closes it. Add fails, and does not
// use the store, if the directory has another slot for a namespace with messages in the store.
func (m *Multiplexer) Add(slot int, store SlotStore) error {
	for _, name := range slices.Concat(store.Sources(), store.Destinations()) {
		if other, known := m.o.SlotOf(namespaceOf(name)); known && other != slot {
			return fmt.Errorf("slot %d has messages of %s, but the directory has slot %d for its namespace; restore the directory's stream", slot, name, other)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return queue.ErrClosed
	case m.held[slot] != nil:
		return fmt.Errorf("slot %d was added before", slot)
	}
	m.openings++
	h := &heldSlot{store: store, opening: m.openings}
	store.SetNotify(func(lane queue.LaneID) {
		m.mu.RLock()
		notify := m.notify
		if m.held[slot] != h || h.draining {
			notify = nil
		}
		m.mu.RUnlock()
		if notify != nil {
			notify(lane)
		}
	})
	m.held[slot] = h
	return nil
}

// drainPoll is the time between two looks at the leased messages of a draining slot.
const drainPoll = 10 * time.Millisecond

// Drain prepares the hand-over of a slot: all calls but those that settle messages fail with a
// NotHeldError. Drain returns when no message is leased, or with the error of ctx.
func (m *Multiplexer) Drain(ctx context.Context, slot int) error {
	m.mu.Lock()
	h := m.held[slot]
	if h != nil {
		h.draining = true
	}
	m.mu.Unlock()
	if h == nil {
		return nil
	}
	h.leasing.Lock()
	h.leasing.Unlock() //nolint:staticcheck // It waits for the leases in progress.
	for {
		var leased int64
		for _, lane := range h.store.Lanes() {
			leased += h.store.LaneStats(lane).InFlight
		}
		if leased == 0 {
			return nil
		}
		select {
		case <-time.After(drainPoll):
		case <-ctx.Done():
			return fmt.Errorf("drain slot %d: %d messages are in flight: %w", slot, leased, ctx.Err())
		}
	}
}

// Remove removes a slot and closes its store. Calls in progress, and all later ones, fail with a
// NotHeldError. Messages that were leased from the store cannot be settled any more.
func (m *Multiplexer) Remove(slot int) error {
	m.mu.Lock()
	h := m.held[slot]
	delete(m.held, slot)
	m.mu.Unlock()
	if h == nil {
		return nil
	}
	return h.store.Close()
}

// Held returns the slots of this process that accept calls, in order.
func (m *Multiplexer) Held() (held []int) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for slot, h := range m.held {
		if !h.draining {
			held = append(held, slot)
		}
	}
	slices.Sort(held)
	return held
}

// slotOf returns the slot of a namespace; -1 for none.
func (m *Multiplexer) slotOf(namespace string) int {
	if slot, ok := m.o.SlotOf(namespace); ok {
		return slot
	}
	return -1
}

// route returns the slot of a namespace.
func (m *Multiplexer) route(namespace string) (*heldSlot, error) {
	slot := m.slotOf(namespace)
	m.mu.RLock()
	closed, h := m.closed, m.held[slot]
	usable := h != nil && !h.draining
	m.mu.RUnlock()
	switch {
	case closed:
		return nil, queue.ErrClosed
	case !usable:
		return nil, m.notHeld(namespace, slot)
	}
	return h, nil
}

func (m *Multiplexer) notHeld(namespace string, slot int) error {
	e := &NotHeldError{Namespace: namespace, Slot: slot}
	if slot >= 0 {
		e.Owner = m.o.Owner(slot)
	}
	return e
}

// explain replaces the error of a store that was closed because its slot was removed.
func (m *Multiplexer) explain(namespace string, err error) error {
	if !errors.Is(err, queue.ErrClosed) {
		return err
	}
	m.mu.RLock()
	closed := m.closed
	m.mu.RUnlock()
	if closed {
		return err
	}
	return m.notHeld(namespace, m.slotOf(namespace))
}

// do calls fn with the store of a namespace.
func (m *Multiplexer) do(namespace string, fn func(SlotStore) error) error {
	h, err := m.route(namespace)
	if err != nil {
		return err
	}
	return m.explain(namespace, fn(h.store))
}

// all returns the stores of all slots that accept calls, in the order of the slots.
func (m *Multiplexer) all() (all []SlotStore, closed bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	numbers := make([]int, 0, len(m.held))
	for slot, h := range m.held {
		if !h.draining {
			numbers = append(numbers, slot)
		}
	}
	slices.Sort(numbers)
	for _, slot := range numbers {
		all = append(all, m.held[slot].store)
	}
	return all, m.closed
}

// Append implements queue.Store. The messages must be of one slot: those of one Source always are.
func (m *Multiplexer) Append(ctx context.Context, msgs []queue.Message) (duplicates []bool, err error) {
	if len(msgs) == 0 {
		return nil, nil
	}
	namespace := namespaceOf(msgs[0].Source)
	for i := range msgs {
		if msgs[i].Source == msgs[0].Source {
			continue
		}
		if other := namespaceOf(msgs[i].Source); other != namespace && m.slotOf(other) != m.slotOf(namespace) {
			return nil, fmt.Errorf("message %d is of namespace %s, the first one of %s in another slot: append them one after the other", i, other, namespace)
		}
	}
	err = m.do(namespace, func(s SlotStore) (err error) {
		duplicates, err = s.Append(ctx, msgs)
		return err
	})
	return duplicates, err
}

// OpenLane implements queue.Store.
func (m *Multiplexer) OpenLane(lane queue.LaneID) error {
	return m.do(namespaceOf(lane.Source), func(s SlotStore) error { return s.OpenLane(lane) })
}

// DropLane implements queue.Store.
func (m *Multiplexer) DropLane(ctx context.Context, lane queue.LaneID) error {
	return m.do(namespaceOf(lane.Source), func(s SlotStore) error { return s.DropLane(ctx, lane) })
}

// EndLane implements queue.Store.
func (m *Multiplexer) EndLane(lane queue.LaneID, end queue.End) error {
	return m.do(namespaceOf(lane.Source), func(s SlotStore) error { return s.EndLane(lane, end) })
}

// ForgetDestination implements queue.Store.
func (m *Multiplexer) ForgetDestination(destination string) error {
	return m.do(namespaceOf(destination), func(s SlotStore) error { return s.ForgetDestination(destination) })
}

// concat returns the results of all stores.
func concat[T any](m *Multiplexer, list func(SlotStore) []T) (results []T) {
	all, _ := m.all()
	for _, s := range all {
		results = append(results, list(s)...)
	}
	return results
}

// Lanes implements queue.Store.
func (m *Multiplexer) Lanes() []queue.LaneID { return concat(m, SlotStore.Lanes) }

// Sources implements queue.Store.
func (m *Multiplexer) Sources() []string { return concat(m, SlotStore.Sources) }

// Destinations implements queue.Store.
func (m *Multiplexer) Destinations() []string { return concat(m, SlotStore.Destinations) }

// Lease implements queue.Store.
func (m *Multiplexer) Lease(lane queue.LaneID, n int, buf []queue.Delivery) ([]queue.Delivery, error) {
	first := len(buf)
	err := m.lease(lane, func(h *heldSlot) (err error) {
		buf, err = h.store.Lease(lane, n, buf)
		for i := range buf[first:] {
			buf[first+i].Opening = h.opening
		}
		return err
	})
	return buf, err
}

// LeaseOldest implements queue.Store.
func (m *Multiplexer) LeaseOldest(lane queue.LaneID) (d queue.Delivery, ok bool, err error) {
	err = m.lease(lane, func(h *heldSlot) (err error) {
		if d, ok, err = h.store.LeaseOldest(lane); ok {
			d.Opening = h.opening
		}
		return err
	})
	return d, ok, err
}

// lease calls fn with the slot of a lane. Drain waits for it.
func (m *Multiplexer) lease(lane queue.LaneID, fn func(*heldSlot) error) error {
	namespace := namespaceOf(lane.Source)
	h, err := m.route(namespace)
	if err != nil {
		return err
	}
	h.leasing.RLock()
	defer h.leasing.RUnlock()
	m.mu.RLock()
	draining := h.draining
	m.mu.RUnlock()
	if draining {
		return m.notHeld(namespace, m.slotOf(namespace))
	}
	return m.explain(namespace, fn(h))
}

// SetNotify implements queue.Store.
func (m *Multiplexer) SetNotify(notify func(queue.LaneID)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.notify = notify
}

// lessor returns the store that leased a message; an error if its slot was removed since then, also
// when it was added again.
func (m *Multiplexer) lessor(d queue.Delivery) (SlotStore, error) {
	namespace := namespaceOf(d.Lane.Source)
	slot := m.slotOf(namespace)
	m.mu.RLock()
	closed, h := m.closed, m.held[slot]
	m.mu.RUnlock()
	switch {
	case closed:
		return nil, queue.ErrClosed
	case h == nil || h.opening != d.Opening:
		return nil, m.notHeld(namespace, slot)
	}
	return h.store, nil
}

// Ack implements queue.Store.
func (m *Multiplexer) Ack(d queue.Delivery) (first bool) {
	s, err := m.lessor(d)
	return err == nil && s.Ack(d)
}

// Release implements queue.Store.
func (m *Multiplexer) Release(d queue.Delivery) {
	if s, err := m.lessor(d); err == nil {
		s.Release(d)
	}
}

// Retry implements queue.Store.
func (m *Multiplexer) Retry(d queue.Delivery, at time.Time, f queue.Failure) {
	if s, err := m.lessor(d); err == nil {
		s.Retry(d, at, f)
	}
}

// Bury implements queue.Store.
func (m *Multiplexer) Bury(d queue.Delivery, f queue.Failure) (buried bool, err error) {
	s, err := m.lessor(d)
	if err != nil {
		return false, err
	}
	buried, err = s.Bury(d, f)
	return buried, m.explain(namespaceOf(d.Lane.Source), err)
}

// BuryExpired implements queue.Store.
func (m *Multiplexer) BuryExpired(ctx context.Context, lane queue.LaneID, cut time.Time, f queue.Failure) (n int, err error) {
	err = m.do(namespaceOf(lane.Source), func(s SlotStore) (err error) {
		n, err = s.BuryExpired(ctx, lane, cut, f)
		return err
	})
	return n, err
}

// DeadLetters implements queue.Store.
func (m *Multiplexer) DeadLetters(ctx context.Context, destination, after string, fn func(queue.DeadLetter) bool) error {
	return m.do(namespaceOf(destination), func(s SlotStore) error { return s.DeadLetters(ctx, destination, after, fn) })
}

// DeadLetterMark implements queue.Store.
func (m *Multiplexer) DeadLetterMark(destination string) (key string, err error) {
	err = m.do(namespaceOf(destination), func(s SlotStore) (err error) {
		key, err = s.DeadLetterMark(destination)
		return err
	})
	return key, err
}

// DeleteDeadLetters implements queue.Store.
func (m *Multiplexer) DeleteDeadLetters(ctx context.Context, destination string, keys ...string) error {
	return m.do(namespaceOf(destination), func(s SlotStore) error { return s.DeleteDeadLetters(ctx, destination, keys...) })
}

// TrimDeadLetters implements queue.Store.
func (m *Multiplexer) TrimDeadLetters(ctx context.Context, destination string, before, young time.Time, maxBytes int64) (n int, err error) {
	err = m.do(namespaceOf(destination), func(s SlotStore) (err error) {
		n, err = s.TrimDeadLetters(ctx, destination, before, young, maxBytes)
		return err
	})
	return n, err
}

// PutMeta implements queue.Store.
func (m *Multiplexer) PutMeta(name string, value []byte) error {
	return m.do(m.o.MetaNamespace(name), func(s SlotStore) error { return s.PutMeta(name, value) })
}

// PutMetaDurable implements queue.Store.
func (m *Multiplexer) PutMetaDurable(name string, value []byte) error {
	return m.do(m.o.MetaNamespace(name), func(s SlotStore) error { return s.PutMetaDurable(name, value) })
}

// AllMeta implements queue.Store.
func (m *Multiplexer) AllMeta() (map[string][]byte, error) {
	stores, closed := m.all()
	if closed {
		return nil, queue.ErrClosed
	}
	all := map[string][]byte{}
	for _, s := range stores {
		values, err := s.AllMeta()
		if errors.Is(err, queue.ErrClosed) {
			continue // The slot was removed.
		}
		if err != nil {
			return nil, err
		}
		for name, value := range values {
			all[name] = value
		}
	}
	return all, nil
}

// LaneStats implements queue.Store.
func (m *Multiplexer) LaneStats(lane queue.LaneID) (stats queue.LaneStats) {
	_ = m.do(namespaceOf(lane.Source), func(s SlotStore) error { stats = s.LaneStats(lane); return nil })
	return stats
}

// Position implements queue.Store.
func (m *Multiplexer) Position(lane queue.LaneID) (read, end uint64) {
	_ = m.do(namespaceOf(lane.Source), func(s SlotStore) error { read, end = s.Position(lane); return nil })
	return read, end
}

// SourceStats implements queue.Store.
func (m *Multiplexer) SourceStats(source string) (stats queue.SourceStats) {
	_ = m.do(namespaceOf(source), func(s SlotStore) error { stats = s.SourceStats(source); return nil })
	return stats
}

// DestinationStats implements queue.Store.
func (m *Multiplexer) DestinationStats(destination string) (stats queue.DestinationStats) {
	_ = m.do(namespaceOf(destination), func(s SlotStore) error { stats = s.DestinationStats(destination); return nil })
	return stats
}

// Trace implements queue.Store. The result is incomplete if a slot was removed during the search.
func (m *Multiplexer) Trace(ctx context.Context, id string, since time.Time) (queue.TraceResult, error) {
	result := queue.TraceResult{Complete: true}
	stores, closed := m.all()
	if closed {
		return result, queue.ErrClosed
	}
	for _, s := range stores {
		r, err := s.Trace(ctx, id, since)
		if errors.Is(err, queue.ErrClosed) {
			result.Complete = false
			continue
		}
		result.Traces = append(result.Traces, r.Traces...)
		result.Scanned += r.Scanned
		if r.Scanned > 0 {
			result.Until = r.Until
		}
		result.Complete = result.Complete && r.Complete
		if err != nil || ctx.Err() != nil {
			result.Complete = false
			return result, err
		}
	}
	return result, nil
}

// Full implements SlotStore: it reports whether each slot of this process is full.
func (m *Multiplexer) Full() bool {
	all, _ := m.all()
	return len(all) > 0 && !slices.ContainsFunc(all, func(s SlotStore) bool { return !s.Full() })
}

// SourceQuota implements SlotStore: it returns the smallest quota of the slots.
func (m *Multiplexer) SourceQuota() (quota int64) {
	all, _ := m.all()
	for _, s := range all {
		if q := s.SourceQuota(); q > 0 && (quota == 0 || q < quota) {
			quota = q
		}
	}
	return quota
}

// DiskBytes implements SlotStore.
func (m *Multiplexer) DiskBytes() (bytes int64) {
	all, _ := m.all()
	for _, s := range all {
		bytes += s.DiskBytes()
	}
	return bytes
}

// Close implements queue.Store. It closes the stores of all slots.
func (m *Multiplexer) Close() error {
	m.mu.Lock()
	held := m.held
	m.held, m.closed = map[int]*heldSlot{}, true
	m.mu.Unlock()
	var closing sync.WaitGroup
	errs := make(chan error, len(held))
	for _, h := range held {
		closing.Go(func() { errs <- h.store.Close() })
	}
	closing.Wait()
	close(errs)
	var err error
	for e := range errs {
		err = errors.Join(err, e)
	}
	return err
}
