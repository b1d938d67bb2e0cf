package slots

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Assignments is the stream of a Directory: one record per namespace, which is never removed. All
// methods may be called concurrently.
type Assignments interface {
	// Create appends an assignment if its namespace has none, and returns the sequence of the
	// record. After ErrWrongSequence this call does not append it: another record of the namespace
	// exists or is being appended. Any other error says nothing about the effect of the call.
	Create(ctx context.Context, a Assignment) (sequence uint64, err error)
	// Get returns the assignment of a namespace and its sequence, or ErrNoRecord. It may not see the
	// newest records.
	Get(ctx context.Context, namespace string) (a Assignment, sequence uint64, err error)
	// State returns the Last and the ID of the stream, or ErrNoStream. It may not see the newest records.
	State(ctx context.Context) (State, error)
	// Tail calls fn for the records from a sequence on, in order, also for those appended later. It
	// ends with the error of fn or of ctx, or when the stream cannot be read.
	Tail(ctx context.Context, from uint64, fn func(sequence uint64, a Assignment) error) error
}

// Assignment is the slot of a namespace.
type Assignment struct {
	Namespace string `json:"namespace"`
	Slot      int    `json:"slot"`
}

// namespaceName excludes the characters that have a meaning in subjects.
var namespaceName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)

// MaxSlots bounds the slots of an installation.
const MaxSlots = 1024

// Validate returns an error that names the field and the rule.
func (a Assignment) Validate() error {
	switch {
	case !namespaceName.MatchString(a.Namespace):
		return fmt.Errorf("namespace %q is not a DNS name: use at most 253 lower-case letters, digits, dots and hyphens", a.Namespace)
	case a.Slot < 0 || a.Slot >= MaxSlots:
		return fmt.Errorf("slot %d of namespace %s is not between 0 and %d", a.Slot, a.Namespace, MaxSlots-1)
	}
	return nil
}

// ErrReplaced reports that the directory's stream is not the one that this process has read: it was
// deleted and created again. Its assignments may differ from those by which messages are stored.
var ErrReplaced = errors.New("the directory of the slots was deleted or replaced; restore its stream, and restart the dispatchers")

// PinNone makes Assign select the slot.
const PinNone = -1

// Directory has the slot of each namespace. An assignment never changes. All methods may be called
// concurrently.
type Directory struct {
	log    Assignments
	slots  int
	logger *slog.Logger
	// id is the stream's at the start.
	id string
	// fault is why the stream cannot be used; nil if it can.
	fault atomic.Pointer[error]

	mu     sync.RWMutex
	slotOf map[string]int
	// namespaces is the number of namespaces of each slot.
	namespaces []int
	read       uint64 // The last record that was read in order.
}

// errRead ends Tail.
var errRead = errors.New("all records were read")

// OpenDirectory reads the directory of a release with a number of slots. The number may be raised
// later. If it is lowered, slots that have namespaces are kept.
func OpenDirectory(ctx context.Context, log Assignments, slots int, logger *slog.Logger) (*Directory, error) {
	if slots < 1 || slots > MaxSlots {
		return nil, fmt.Errorf("%d slots: use 1 to %d", slots, MaxSlots)
	}
	d := &Directory{log: log, slots: slots, logger: logger, slotOf: map[string]int{}, namespaces: make([]int, slots)}
	state, err := log.State(ctx)
	last := state.Last
	d.id = state.ID
	if err == nil && last > 0 {
		err = log.Tail(ctx, 1, func(sequence uint64, a Assignment) error {
			if err := d.follow(sequence, a); err != nil {
				return err
			}
			if sequence >= last {
				return errRead
			}
			return nil
		})
	}
	if err != nil && !errors.Is(err, errRead) {
		return nil, fmt.Errorf("read the directory of the slots: %w", err)
	}
	return d, nil
}

// Run follows the assignments of other processes until ctx ends. It reads again when the stream cannot
// be read, and returns ErrReplaced when the stream is another one, or lacks records.
func (d *Directory) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return d.readOn(ctx) })
	group.Go(func() error { return d.check(ctx) })
	return group.Wait()
}

const (
	// directoryInterval is the time between two checks of the stream.
	directoryInterval = 5 * time.Second
	// directoryStale is the time for which a server without the newest records may answer.
	directoryStale = 30 * time.Second
)

// check compares the stream with the records that were read, until ctx ends.
func (d *Directory) check(ctx context.Context) error {
	complete := time.Now()
	for {
		select {
		case <-time.After(directoryInterval):
		case <-ctx.Done():
			return ctx.Err()
		}
		state, err := d.log.State(ctx)
		_, read := d.Read()
		switch {
		case errors.Is(err, ErrNoStream):
			d.fault.Store(&err)
			continue
		case err != nil:
			continue // Without an answer, nothing is known.
		case state.ID != d.id:
			return fmt.Errorf("%w: its id was %s, and is %s", ErrReplaced, d.id, state.ID)
		case state.Last >= read:
			complete = time.Now()
		case time.Since(complete) >= directoryStale:
			return fmt.Errorf("%w: it had record %d, and ends with record %d", ErrReplaced, read, state.Last)
		}
		d.fault.Store(nil)
	}
}

// Err returns why the stream cannot be used, with the fix; nil if it can.
func (d *Directory) Err() error {
	if fault := d.fault.Load(); fault != nil {
		return *fault
	}
	return nil
}

// Read returns the id of the stream, and the sequence up to which this process has read it.
func (d *Directory) Read() (id string, sequence uint64) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.id, d.read
}

// readOn reads the records of other processes until ctx ends.
func (d *Directory) readOn(ctx context.Context) error {
	for {
		_, read := d.Read()
		err := d.log.Tail(ctx, read+1, d.follow)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrReplaced):
			return err
		}
		d.logger.Warn("reading the directory of the slots failed; retrying", "error", err)
		select {
		case <-time.After(behindPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// follow adds a record of the tail.
func (d *Directory) follow(sequence uint64, a Assignment) error {
	if err := a.Validate(); err != nil {
		return fmt.Errorf("record %d of the directory: %w", sequence, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if sequence <= d.read {
		return ErrReplaced
	}
	d.read = sequence
	return d.add(a)
}

// add adds an assignment. The caller holds mu.
func (d *Directory) add(a Assignment) error {
	if slot, known := d.slotOf[a.Namespace]; known {
		if slot != a.Slot {
			return fmt.Errorf("%w: namespace %s had slot %d, and has slot %d", ErrReplaced, a.Namespace, slot, a.Slot)
		}
		return nil
	}
	d.slotOf[a.Namespace] = a.Slot
	for len(d.namespaces) <= a.Slot {
		d.namespaces = append(d.namespaces, 0)
	}
	d.namespaces[a.Slot]++
	return nil
}

// created adds an assignment that was created or found outside of the tail.
func (d *Directory) created(sequence uint64, a Assignment) (int, error) {
	if err := a.Validate(); err != nil {
		return 0, fmt.Errorf("record %d of the directory: %w", sequence, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// The tail has read all records up to read.
	if _, known := d.slotOf[a.Namespace]; !known && sequence <= d.read {
		return 0, fmt.Errorf("%w: record %d is of namespace %s now", ErrReplaced, sequence, a.Namespace)
	}
	return a.Slot, d.add(a)
}

// Slot returns the slot of a namespace; ok is false while the namespace has none, as far as this
// process has read.
func (d *Directory) Slot(namespace string) (slot int, ok bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	slot, ok = d.slotOf[namespace]
	return slot, ok
}

// All returns the slot of each namespace, those that are deleted included.
func (d *Directory) All() map[string]int {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return maps.Clone(d.slotOf)
}

// Slots returns the number of slots that need an owner: the configured ones, and the ones of a former
// configuration that have namespaces.
func (d *Directory) Slots() int {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return len(d.namespaces)
}

// HasNamespaces reports whether a slot has namespaces, those that are deleted included.
func (d *Directory) HasNamespaces(slot int) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return slot < len(d.namespaces) && d.namespaces[slot] > 0
}

// Assign returns the slot of a namespace. A namespace without a slot gets the pinned one, or with
// PinNone the one with the fewest namespaces. Processes that assign a namespace at once get the same
// slot. The error wraps queue.ErrUnavailable while the slot is unknown and cannot be written.
func (d *Directory) Assign(ctx context.Context, namespace string, pin int) (int, error) {
	if slot, known := d.Slot(namespace); known {
		return slot, nil
	}
	a := Assignment{namespace, pin}
	if pin == PinNone {
		a.Slot = d.emptiest()
	} else if pin < 0 || pin >= d.slots {
		return 0, fmt.Errorf("pin of namespace %s: slot %d does not exist; use 0 to %d", namespace, pin, d.slots-1)
	}
	if err := a.Validate(); err != nil {
		return 0, err
	}
	for {
		sequence, err := d.log.Create(ctx, a)
		if err == nil {
			return d.created(sequence, a)
		}
		// The record of this call, whose answer was lost, or another process's.
		found, sequence, getErr := d.log.Get(ctx, namespace)
		if getErr == nil {
			return d.created(sequence, found)
		}
		if !errors.Is(err, ErrWrongSequence) || !errors.Is(getErr, ErrNoRecord) {
			return 0, fmt.Errorf("%w: assign a slot to namespace %s: %w", queue.ErrUnavailable, namespace, errors.Join(err, getErr))
		}
		select {
		case <-time.After(repeatAfter):
		case <-ctx.Done():
			return 0, fmt.Errorf("%w: assign a slot to namespace %s: %w", queue.ErrUnavailable, namespace, ctx.Err())
		}
	}
}

// emptiest returns the configured slot with the fewest namespaces.
func (d *Directory) emptiest() (slot int) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for i, n := range d.namespaces[:d.slots] {
		if n < d.namespaces[slot] {
			slot = i
		}
	}
	return slot
}
