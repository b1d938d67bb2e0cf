package slots

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// ErrUnused reports that a slot has no content.
var ErrUnused = errors.New("the slot was not used yet")

// Use calls fn with the store of the slot, whose files are in Dir meanwhile, and releases the slot. Snapshots are
// taken as they are by an owner. No process may use the slot; otherwise the error is ErrInUse. The slot must have
// content; otherwise the error is ErrUnused.
func (s Slot) Use(ctx context.Context, fn func(*pebblestore.Store) error) error {
	s.setStoreDefaults()
	state, err := s.checkIdle(ctx)
	if err != nil {
		return err
	}
	if state.Last == 0 {
		return ErrUnused
	}
	return s.use(ctx, func(store *pebblestore.Store, snapshots *Snapshotter) error {
		taking, stop := context.WithCancel(ctx)
		var ended sync.WaitGroup
		ended.Go(func() { snapshots.Run(taking) })
		defer ended.Wait()
		defer stop()
		return fn(store)
	})
}

// use calls fn with the store of the slot and its snapshots, and releases the slot.
func (s Slot) use(ctx context.Context, fn func(*pebblestore.Store, *Snapshotter) error) error {
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
	err = fn(store, &Snapshotter{Log: s.Log, Objects: s.Objects, Writer: w, Store: store, FS: s.Store.FS, Dir: s.Dir + ".snapshot", Logger: s.Logger, Limiter: rate.NewLimiter(rate.Inf, 0)})
	if failed := store.Close(); failed != nil {
		return errors.Join(err, failed)
	}
	releasing, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	return errors.Join(err, w.Release(releasing))
}
