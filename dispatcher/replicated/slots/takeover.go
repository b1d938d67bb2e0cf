package slots

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// Slot is the access of a pod to a slot, and the folder of its copy.
type Slot struct {
	Log Log
	// Objects has the snapshots; nil for a slot without snapshots.
	Objects Objects
	// Dir is the data directory of the store, and Store has its options. Dir with the suffixes .restore,
	// .snapshot and .slot is used, too.
	Dir   string
	Store pebblestore.Options
	// Damaged, when set, is an error of pebblestore.Open about files in Dir that seem sound to a copy: they are
	// replaced as those that are found damaged.
	Damaged *pebblestore.CorruptError
	Options
}

// TakeOver makes the store in Dir the store of the slot: it applies all records of the stream,
// claims the slot, and returns the Log with which pebblestore.Open opens the store. Files that are
// damaged or not a part of the stream are first replaced by the newest snapshot. They are kept when
// there is no snapshot and the stream does not begin with the first batch.
//
// The caller must know that the slot may be claimed. The claim ends the session that had the slot.
func (s Slot) TakeOver(ctx context.Context) (*Writer, error) { return s.open(ctx, true) }

// Follow keeps a copy in Dir as TakeOver does, and applies the records of the stream to it until the
// slot has no owner; see the function Follow.
func (s Slot) Follow(ctx context.Context) (*Writer, error) { return s.open(ctx, false) }

func (s Slot) open(ctx context.Context, force bool) (*Writer, error) {
	s.setStoreDefaults()
	r := &restorer{log: s.Log, objects: s.Objects, fs: s.Store.FS, dir: s.Dir, tried: map[uint64]bool{}}
	emptied := false
	_, missing := s.Store.FS.Stat(s.Dir)
	for {
		var w *Writer
		var err error
		if s.Damaged != nil {
			err, s.Damaged = s.Damaged, nil
		} else {
			w, err = s.claim(ctx, force)
		}
		gap, isGap := errors.AsType[*GapError](err)
		if isGap { // Only a snapshot that has more than the copy may replace it.
			if r.behind = gap.Copied; r.restore(ctx) == nil {
				s.Logger.Warn("the log lacks records; the copy was replaced by a newer snapshot", "dir", s.Dir, "error", err)
				continue
			}
		}
		if isGap || !isUnusable(err) {
			if err != nil {
				err = fmt.Errorf("open a slot: %w", err)
			}
			return w, err
		}
		r.behind = 0
		if errors.Is(missing, fs.ErrNotExist) {
			s.Logger.Info("no local files; restoring the newest snapshot", "dir", s.Dir)
		} else {
			s.Logger.Warn("local files are not a part of the log; restoring them", "dir", s.Dir, "error", err)
		}
		missing = nil
		restoreErr := r.restore(ctx)
		if errors.Is(restoreErr, errNoSnapshot) && !emptied {
			emptied = true
			restoreErr = s.empty(ctx, restoreErr)
		}
		if restoreErr != nil {
			return nil, fmt.Errorf("open a slot: %w; restoring the files failed: %w", err, restoreErr)
		}
	}
}

func (s *Slot) setStoreDefaults() {
	if s.Logger == nil {
		s.Logger = s.Store.Logger
	}
	s.setDefaults()
	s.Store.Log, s.Store.Logger = nil, s.Logger
	if s.Store.FS == nil {
		s.Store.FS = vfs.Default
	}
}

// claim opens the copy and claims the slot with it.
func (s Slot) claim(ctx context.Context, force bool) (*Writer, error) {
	r, err := pebblestore.OpenReplica(s.Dir, s.Store)
	if err != nil {
		return nil, err
	}
	w, err := s.claimWith(ctx, r, force)
	if err = errors.Join(err, r.Close()); err != nil && w != nil {
		w.Close()
	}
	return w, err
}

// claimWith claims the slot with an open copy. The lock of the copy is held.
func (s Slot) claimWith(ctx context.Context, r *pebblestore.Replica, force bool) (*Writer, error) {
	stored, err := readLocal(s.Store.FS, s.Dir)
	if err != nil {
		return nil, err
	}
	state, err := s.Log.State(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the state of the log: %w", err)
	}
	if err := s.checkFiles(ctx, stored, state, r.Position()); err != nil {
		return nil, err
	}
	if isOther(state.ID, stored.Stream) { // The copy is new, or the stream was adopted.
		stored.Durable = 0
	}
	if stored.Stream = state.ID; s.Exited == (pebblestore.Session{}) {
		s.Exited = stored.session()
	}
	if err := stored.write(s.Store.FS, s.Dir); err != nil {
		return nil, err
	}
	w, err := newSession(ctx, s.Log, r, s.Options, force)
	if err != nil {
		return nil, err
	}
	session := w.Session()
	stored.Session, stored.Epoch, stored.Durable = hex.EncodeToString(session[:]), w.Epoch(), 0
	err = stored.write(s.Store.FS, s.Dir)
	w.onDurable(func(batch uint64) error {
		stored.Durable = batch
		return stored.write(s.Store.FS, s.Dir)
	})
	return w, err
}

// checkFiles returns an error if the stream cannot replace what the local files, or the object store,
// have of the slot.
func (s Slot) checkFiles(ctx context.Context, stored local, state State, copied pebblestore.Position) error {
	switch {
	case copied.Batch == 0 && state.Last == 0:
		return s.checkUnused(ctx)
	case copied.Batch == 0:
		return nil
	case isOther(state.ID, stored.Stream):
		return stored.checkStream(state, s.Dir)
	}
	return checkDurable(ctx, s.Log, state, stored.durable(copied), s.Dir)
}

// checkUnused returns ErrEmptied if a stream without any record has snapshots: it was deleted and created
// again.
func (s Slot) checkUnused(ctx context.Context) error {
	if s.Objects == nil {
		return nil
	}
	names, err := s.Objects.List(ctx)
	if err != nil {
		return fmt.Errorf("list the objects of the slot: %w", err)
	}
	if slices.ContainsFunc(names, isManifest) {
		return fmt.Errorf("%w, or run posthorn replication adopt to continue with the newest snapshot", ErrEmptied)
	}
	return nil
}

// empty removes the copy if the stream has all batches.
func (s Slot) empty(ctx context.Context, cause error) error {
	state, err := s.Log.State(ctx)
	if err != nil {
		return fmt.Errorf("read the state of the log: %w", err)
	}
	if state.First > state.Last && state.Last > 0 {
		return ErrEmptied
	}
	_, h, err := findBatch(ctx, s.Log, state, 1)
	switch {
	case err != nil && !errors.Is(err, ErrNoRecord):
		return err
	case err == nil && h.first > 1:
		return fmt.Errorf("%w, and the log begins with batch %d; an owner stores a snapshot within 30 s. Without one, run posthorn replication adopt, or restore the stream and the objects of the slot", cause, h.first)
	}
	return s.Store.FS.RemoveAll(s.Dir)
}

// isUnusable reports whether the files of a copy, and not the log, are the cause of an error.
func isUnusable(err error) bool {
	var corrupt *pebblestore.CorruptError
	return errors.Is(err, ErrForeignCopy) || errors.As(err, &corrupt)
}
