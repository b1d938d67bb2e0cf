package slots

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// Adoption is what a slot continues with after Slot.Adopt.
type Adoption struct {
	// Content names the origin of the messages.
	Content Content
	// Batch is the last batch of the slot.
	Batch uint64
	// Missing are the batches that no server has, and Lost names what was lost with them; of ContentRest.
	Missing []Batches
	Lost    []string
}

// Content is the origin of the messages of an adopted slot.
type Content string

// The values of Content.
const (
	// ContentNothing: the slot has no messages.
	ContentNothing Content = "nothing"
	// ContentStream: the records of the stream, and the snapshots behind which they begin.
	ContentStream Content = "stream"
	// ContentSnapshot: the newest snapshot of the object store; the stream has no records.
	ContentSnapshot Content = "snapshot"
	// ContentRest: the newest snapshot, and what the stream has of the records behind it.
	ContentRest Content = "rest"
	// ContentFiles: the files in Dir.
	ContentFiles Content = "files"
	// ContentStore: the store in Dir, which had a log of its own.
	ContentStore Content = "store"
	// ContentOwner: the store of the process that owns the slot. It repairs the log by itself.
	ContentOwner Content = "owner"
)

// ErrInUse reports that a process appends records to a stream.
var ErrInUse = errors.New("a process uses the slot; stop all processes with this log")

// ErrUsed reports that a slot has content of its own, which a store with a log of its own does not replace.
var ErrUsed = errors.New("the slot has messages, or was used by a process; use another --replication-name, or deliver the messages of the data directory with posthorn drain")

// ErrOlderFiles reports that files of a process lack messages that later owners of the slot accepted.
var ErrOlderFiles = errors.New("a later owner of the slot accepted messages that the files lack")

// Adopt makes the slot usable again after its stream was restored from a backup, or deleted, or begins a new slot
// with a store. The slot continues with the files in Dir when useFiles is set; otherwise with the records of the
// stream, without the batches that it lacks behind the newest snapshot; if there are no records, with the newest
// snapshot. These are written to Dir, which has nothing else.
//
// The files of a process replace the records of the stream, unless they are known to be of an owner before the last one:
// then the error is ErrOlderFiles. A store with a log of its own becomes the content of the
// slot, with its messages, dead letters, ledgers and states, and does not open without it from then on. The slot must
// not have been used; otherwise the error is ErrUsed. prepare is called with the store before it is changed.
//
// The stream then has another ID: processes whose files have records of its former content, which the
// new one lacks, remove these files without an error. rename is as in Remote.
//
// Adopt can be called again after an error. While a process owns the slot, nothing is changed: it has all that it has
// acknowledged, and stores a snapshot when the log lacks a part. Then useFiles with other files than the owner's is
// ErrInUse.
func (s Slot) Adopt(ctx context.Context, rename func(ctx context.Context, replaced ...string) error, useFiles bool,
	prepare func(*pebblestore.Store) error) (a Adoption, err error) {
	s.setStoreDefaults()
	state, err := s.checkIdle(ctx)
	if errors.Is(err, ErrInUse) {
		return s.adoptOwner(ctx, state, useFiles)
	}
	if err != nil {
		return a, err
	}
	former, err := readLocal(s.Store.FS, s.Dir)
	if err != nil {
		return a, err
	}
	switch {
	case !useFiles:
		a, err = s.readContent(ctx, state)
	case former.Stream == "":
		a.Content, err = ContentFiles, s.attach(ctx, state, prepare)
	default:
		a.Content = ContentFiles
	}
	if err != nil || a.Content == ContentNothing {
		return a, err
	}
	if a.Content != ContentStream {
		if a.Batch, err = s.anchor(ctx, state, useFiles, former); err != nil {
			return a, err
		}
	}
	if useFiles && a.Batch == pebblestore.AttachedBatch {
		a.Content = ContentStore
	}
	if err := rename(ctx, former.Stream); err != nil {
		return a, fmt.Errorf("change the id of the stream: %w", err)
	}
	if a.Content == ContentStream {
		return a, nil
	}
	// A process that has the lock of the folder can own the slot now, and takes a snapshot then.
	if err := s.storeSnapshot(ctx); err != nil && !errors.Is(err, syscall.EAGAIN) {
		return a, err
	}
	return a, nil
}

// attach makes a store with a log of its own one with which the slot can begin.
func (s Slot) attach(ctx context.Context, state State, prepare func(*pebblestore.Store) error) error {
	return pebblestore.Attach(s.Dir, s.Store, func(store *pebblestore.Store) error {
		if state.Last > 0 {
			return ErrUsed
		}
		if err := s.checkUnused(ctx); err != nil {
			return fmt.Errorf("%w: %w", ErrUsed, err)
		}
		return prepare(store)
	})
}

// readContent determines what the slot continues with without the files of a process, and writes it to Dir unless it
// is the stream.
func (s Slot) readContent(ctx context.Context, state State) (a Adoption, err error) {
	if state.First > state.Last {
		r := &restorer{log: s.Log, objects: s.Objects, fs: s.Store.FS, dir: s.Dir}
		if _, err = r.restoreObject(ctx); errors.Is(err, errNoSnapshot) && state.Last == 0 {
			return Adoption{Content: ContentNothing}, nil
		}
		return Adoption{Content: ContentSnapshot}, err
	}
	if err = s.checkComplete(ctx, state); errors.Is(err, errIncomplete) {
		a.Content = ContentRest
		a.Missing, a.Lost, err = s.salvage(ctx)
		return a, err
	}
	if err == nil {
		a.Content = ContentStream
		a.Batch, err = s.lastBatch(ctx, state)
	}
	return a, err
}

// adoptOwner is Adopt while a process owns the slot.
func (s Slot) adoptOwner(ctx context.Context, state State, useFiles bool) (a Adoption, err error) {
	e, err := s.Log.Get(ctx, state.Last)
	if err != nil {
		return a, fmt.Errorf("read record %d of the log: %w", state.Last, err)
	}
	h, _, err := decodeRecord(e.Record)
	if err != nil {
		return a, badRecord(e.Sequence, err)
	}
	if useFiles {
		if stored, err := readLocal(s.Store.FS, s.Dir); err != nil || stored.session() != h.session {
			return a, errors.Join(err, ErrInUse)
		}
	}
	return Adoption{Content: ContentOwner, Batch: h.last}, nil
}

// checkIdle returns the state of the stream if no process appends records.
func (s Slot) checkIdle(ctx context.Context) (State, error) {
	before, err := s.Log.State(ctx)
	if err != nil {
		return before, fmt.Errorf("read the state of the log: %w", err)
	}
	if before.Last == 0 {
		return before, nil
	}
	if err := pause(ctx, 2*heartbeatInterval); err != nil {
		return before, err
	}
	now, err := s.Log.State(ctx)
	if err != nil {
		return now, fmt.Errorf("read the state of the log: %w", err)
	}
	if now.Last != before.Last {
		return now, ErrInUse
	}
	return now, nil
}

// lastBatch returns the last batch of the stream.
func (s Slot) lastBatch(ctx context.Context, state State) (uint64, error) {
	e, err := s.Log.Get(ctx, state.Last)
	if err != nil {
		return 0, fmt.Errorf("read record %d of the log: %w", state.Last, err)
	}
	h, _, err := decodeRecord(e.Record)
	if err != nil {
		return 0, badRecord(e.Sequence, err)
	}
	return h.last, nil
}

// anchor makes the files in Dir a part of the stream, and returns their last batch: the stream then has
// one record, with the number and the session of that batch. A copy that lacks the batch cannot begin
// with this record, so it is restored from a snapshot. With useFiles, an attached store replaces no records, and so do the
// files of an owner before the last one.
func (s Slot) anchor(ctx context.Context, state State, useFiles bool, former local) (uint64, error) {
	r, err := pebblestore.OpenReplica(s.Dir, s.Store)
	if err != nil {
		return 0, err
	}
	last := r.Position()
	if err := r.Close(); err != nil {
		return 0, err
	}
	if last.Batch == 0 {
		return 0, fmt.Errorf("the files in %s have no messages", s.Dir)
	}
	if _, h, err := findBatch(ctx, s.Log, state, last.Batch); err == nil && h.first <= last.Batch && h.session == last.Session {
		return last.Batch, nil
	}
	if useFiles && last.Batch == pebblestore.AttachedBatch && state.Last > 0 {
		return 0, ErrUsed
	}
	epoch, err := s.lastEpoch(ctx, state)
	if err != nil {
		return 0, err
	}
	if useFiles && former.Epoch > 0 && former.Epoch < epoch && last.Session == former.session() {
		return 0, fmt.Errorf("%w: their owner had epoch %d, and the last one had epoch %d (%s); use the files with the highest epoch. To lose these messages, delete the stream and the object store of the slot first",
			ErrOlderFiles, former.Epoch, epoch, s.Dir+localSuffix)
	}
	if state.First <= state.Last {
		if err := s.Log.Trim(ctx, state.Last+1); err != nil {
			return 0, fmt.Errorf("remove the records of the stream: %w", err)
		}
	}
	h := header{kind: kindBatches, session: last.Session, epoch: epoch + 1, number: randomNumber(), first: last.Batch, last: last.Batch}
	record := appendBatch(make([]byte, headerBytes), nil)
	h.seal(record)
	if _, err := s.Log.Publish(ctx, state.Last, h.id(), record); err != nil {
		return 0, fmt.Errorf("append a record: %w", err)
	}
	return last.Batch, nil
}

// randomNumber returns the number of a record that no other record of its session has.
func randomNumber() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // It never fails.
	return binary.BigEndian.Uint64(b[:]) | 1<<63
}

// lastEpoch returns the highest epoch of the stream's last record and of the objects: a session deletes
// the objects of earlier ones.
func (s Slot) lastEpoch(ctx context.Context, state State) (last uint64, err error) {
	if state.First <= state.Last {
		e, err := s.Log.Get(ctx, state.Last)
		if err != nil {
			return 0, fmt.Errorf("read record %d of the log: %w", state.Last, err)
		}
		if h, _, err := decodeRecord(e.Record); err == nil {
			last = h.epoch
		}
	}
	names, err := s.Objects.List(ctx)
	if err != nil {
		return 0, fmt.Errorf("list the objects: %w", err)
	}
	for _, name := range names {
		if epoch, ok := epochOf(name); ok {
			last = max(last, epoch)
		}
	}
	return last, nil
}

// releaseTimeout bounds the release of a slot by a command.
const releaseTimeout = 10 * time.Second

// storeSnapshot takes a snapshot of the files in Dir, so that processes without a copy can restore the
// slot, and releases the slot.
func (s Slot) storeSnapshot(ctx context.Context) error {
	w, err := s.TakeOver(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	o := s.Store
	o.Log, o.Logger, o.DuplicateWindow = w, s.Logger, pebblestore.MaxDuplicateWindow // A shorter one removes messageIds.
	o.MaxBytesPerSource = pebblestore.NoQuota
	store, err := pebblestore.Open(s.Dir, o)
	if err != nil {
		return fmt.Errorf("open the store of the slot: %w", err)
	}
	snapshots := Snapshotter{Log: s.Log, Objects: s.Objects, Writer: w, Store: store, FS: s.Store.FS, Dir: s.Dir + ".snapshot",
		Logger: s.Logger, Limiter: rate.NewLimiter(rate.Inf, 0)}
	err = snapshots.Take(ctx)
	if failed := store.Close(); failed != nil {
		return errors.Join(err, failed)
	}
	releasing, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	return errors.Join(err, w.Release(releasing))
}
