package slots

import (
	"context"
	"errors"
	"fmt"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// ErrUsed reports that a slot has content of its own.
var ErrUsed = errors.New("the slot has messages, or was used by a process")

// Import makes the store in Dir, which has a log of its own, the content of the slot: its messages, dead letters,
// ledgers and states. The slot must not have been used; otherwise the error is ErrUsed. Import can be called again
// after an error. The store then belongs to the slot, and does not open without it. It fails as Open of the store
// does. rename is that of the Remote. prepare is called when the import is possible, before the store and the slot are
// changed.
func (s Slot) Import(ctx context.Context, rename func(ctx context.Context, replaced ...string) error, prepare func() error) error {
	s.setStoreDefaults()
	at, err := pebblestore.ReadPosition(s.Store.FS, s.Dir)
	if err != nil {
		return err
	}
	state, err := s.Log.State(ctx)
	if err != nil {
		return fmt.Errorf("read the state of the log: %w", err)
	}
	former, err := readLocal(s.Store.FS, s.Dir)
	if err != nil {
		return err
	}
	if err := s.checkImport(ctx, state, former, at); err != nil {
		return err
	}
	if state.ID != "" && former.Stream == state.ID { // A repeated import.
		rename = func(context.Context, ...string) error { return nil }
	}
	if err := prepare(); err != nil {
		return err
	}
	if err := pebblestore.Attach(s.Dir, s.Store); err != nil {
		return err
	}
	_, err = s.Adopt(ctx, rename, true)
	return err
}

// checkImport returns an error unless the stream is unused, or begins with the store at a position.
func (s Slot) checkImport(ctx context.Context, state State, former local, at pebblestore.Position) error {
	if err := former.checkStream(state, s.Dir); err != nil {
		return fmt.Errorf("the store belongs to another log; use its --log-name: %w", err)
	}
	if state.Last == 0 {
		if err := s.checkUnused(ctx); err != nil {
			return fmt.Errorf("%w: %w", ErrUsed, err)
		}
		return nil
	}
	if at.Batch == 0 {
		return ErrUsed
	}
	_, h, err := findBatch(ctx, s.Log, state, at.Batch)
	if errors.Is(err, ErrNoRecord) || err == nil && h.session != at.Session {
		return ErrUsed
	}
	return err
}
