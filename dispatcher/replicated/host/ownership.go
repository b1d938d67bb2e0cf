package host

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/jobs/audience"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// ownership is the time for which this process owns a slot.
type ownership struct {
	replica *replica
	// stopping is closed when dispatcher.New need not continue.
	stopping <-chan struct{}
	remote   slots.Remote
	writer   *slots.Writer
	dir      string
	logger   *slog.Logger
	clock    *clockCheck
	// snapshots is set when the store is open.
	snapshots  atomic.Pointer[slots.Snapshotter]
	durability durability
}

// run runs a Dispatcher until ctx is done or the ownership has ended.
func (t *ownership) run(ctx context.Context, d *dispatcher.Dispatcher, run func(context.Context, *dispatcher.Dispatcher) error) error {
	defer t.writer.Close()
	running, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-t.writer.Done():
			stop()
		case <-running.Done():
		}
	}()
	go t.durability.watch(running, t.readDurability(d), t.repair, t.logger)
	go t.clock.Watch(running, t.replica.slot, t.remote.Clocks)
	taken := make(chan struct{})
	go func() {
		defer close(taken)
		t.takeSnapshots(running, d.Store())
	}()
	defer func() {
		stop()
		if ctx.Err() == nil { // The next ownership uses the same folder.
			<-taken
		}
	}()
	err := run(running, d)
	if t.Ended() {
		if ctx.Err() == nil {
			t.logger.Warn("another process owns the slot now, or the log is damaged; becoming a standby", "error", t.writer.Err())
		}
		if errors.Is(err, slots.ErrSessionEnded) {
			err = nil // The writes of a session that has ended fail.
		}
		return err
	}
	return errors.Join(err, t.release(ctx))
}

// release ends the ownership in order, also when ctx is done.
func (t *ownership) release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	return t.writer.Release(ctx)
}

// options returns the options of the Dispatcher of this ownership.
func (t *ownership) options() dispatcher.Options {
	o := t.replica.o.Options
	o.Lease, o.Listeners, o.HandOver = t, &dispatcher.Listeners{}, cmp.Or(o.HandOver, handOverTimeout)
	return o
}

// Log implements dispatcher.Lease.
func (t *ownership) Log() pebblestore.Log { return t.writer }

// MaySend implements dispatcher.Lease.
func (t *ownership) MaySend() bool {
	return t.writer.MaySend() && !t.clock.mustHandOver(t.replica.slot)
}

// MayExpire implements dispatcher.Lease.
func (t *ownership) MayExpire() bool { return t.clock.isTrusted() }

// Report implements dispatcher.Lease.
func (t *ownership) Report() *adminapi.ReplicationReport {
	return &adminapi.ReplicationReport{Epoch: t.writer.Epoch(), Slot: t.replica.slot}
}

// abandonAfter is the time without an acknowledgement of the log after which the end of an ownership does not wait for it.
const abandonAfter = 5 * time.Second

// Abandon implements dispatcher.Lease.
func (t *ownership) Abandon() {
	if t.writer.Status().Unacknowledged >= abandonAfter {
		t.logger.Warn("the log does not answer; stopping without it. Calls in progress are refused")
		t.writer.Close()
	}
}

// Ended implements dispatcher.Lease.
func (t *ownership) Ended() bool { return t.writer.Err() != nil }

// Members implements dispatcher.Lease.
func (t *ownership) Members() audience.Copies {
	return ownedCopies{t.remote.Members, t.writer, t.stopping}
}

// ownedCopies are copies of which only the ones of this owner and of earlier owners are listed. A process
// that was stopped, and has lost the slot, must not remove the files of the next owner as unknown
// ones. Reads, which only New needs, end with the session and with the process.
type ownedCopies struct {
	audience.Copies
	writer interface {
		MaySend() bool
		Done() <-chan struct{}
	}
	stopping <-chan struct{}
}

// List implements audience.Copies.
func (c ownedCopies) List(ctx context.Context) ([]string, error) {
	names, err := c.Copies.List(ctx)
	// The check is after the list: a later owner adds its files after this moment.
	if err == nil && !c.writer.MaySend() {
		return nil, errors.New("this process may have lost the slot; the copies are listed again at the next start")
	}
	return names, err
}

// Get implements audience.Copies.
func (c ownedCopies) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-c.writer.Done():
			cancel()
		case <-c.stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	r, err := c.Copies.Get(ctx, name)
	if err != nil {
		cancel()
		return nil, err
	}
	return untilClosed{r, cancel}, nil
}

// untilClosed is a reader whose context ends when it is closed.
type untilClosed struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (r untilClosed) Close() error {
	defer r.cancel()
	return r.ReadCloser.Close()
}

// takeSnapshots takes snapshots of the store until ctx is done. It may end a few seconds later, when a
// request to the object store ends, so the release of the slot does not wait for it.
func (t *ownership) takeSnapshots(ctx context.Context, store *pebblestore.Store) {
	s := &slots.Snapshotter{
		Log: t.remote.Log, Objects: t.remote.Snapshots, Writer: t.writer, Store: store,
		FS: t.replica.o.fs(), Dir: t.dir + ".snapshot", Logger: t.logger, Limiter: t.replica.host.uploads,
	}
	t.snapshots.Store(s)
	s.Run(ctx)
}

// State implements dispatcher.Lease.
func (t *ownership) State(ready error) *adminapi.ReplicationState {
	status := t.writer.Status()
	state := &adminapi.ReplicationState{
		Pod: t.replica.o.Pod, Slot: t.replica.slot, Owner: true, Ready: ready == nil, Sequence: status.Sequence,
		Epoch: t.writer.Epoch(), MaySend: t.writer.MaySend(), Bytes: status.Bytes, MaxBytes: status.MaxBytes,
		Snapshot: t.snapshotTaken(), Clock: t.clock.problem(),
	}
	t.durability.describe(state)
	state.Gaps = t.gaps()
	if ready != nil {
		state.Reason = ready.Error()
	}
	return state
}

// snapshotTaken returns the time of the last snapshot; zero before the first one.
func (t *ownership) snapshotTaken() time.Time {
	if s := t.snapshots.Load(); s != nil {
		return s.Taken()
	}
	return time.Time{}
}

// repair makes a snapshot replace the records that a server lacks; false if the store is not open yet.
func (t *ownership) repair() bool {
	s := t.snapshots.Load()
	if s != nil {
		s.Repair()
	}
	return s != nil
}

// gaps returns what the log lacks.
func (t *ownership) gaps() (gaps []string) {
	if s := t.snapshots.Load(); s != nil {
		gaps = s.Gaps()
	}
	return slices.Concat(gaps, t.durability.known().Gaps)
}

// foundGaps returns the number of checks that found something that the log lacks.
func (t *ownership) foundGaps() (n int64) {
	if s := t.snapshots.Load(); s != nil {
		n = s.Repairs()
	}
	return n + t.durability.gaps.Load()
}

// uploaded returns the number of bytes that were uploaded for snapshots.
func (t *ownership) uploaded() int64 {
	if s := t.snapshots.Load(); s != nil {
		return s.Uploaded()
	}
	return 0
}
