package slots

import (
	"context"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// HasLease reports whether the lease of the session has not ended.
func (w *Writer) HasLease() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.p.hasLease(w.now())
}

// SetClaimAfter replaces the time for which a suspect must be the last record before a claim.
func (o *Options) SetClaimAfter(d time.Duration) { o.claimAfter = d }

// ErrNoSnapshot reports that a slot has no snapshot that can be restored.
var ErrNoSnapshot = errNoSnapshot

// RestoreFiles replaces the files in dir by the files of the newest snapshot that was not tried.
func RestoreFiles(ctx context.Context, log Log, objects Objects, fs vfs.FS, dir string, tried map[uint64]bool) error {
	return (&restorer{log: log, objects: objects, fs: fs, dir: dir, tried: tried}).restore(ctx)
}

// ErrStaleRead reports that a read did not see a record that exists.
var ErrStaleRead = errStaleRead

// NewestSnapshot returns the sequence of the last snapshot record; 0 for none.
func NewestSnapshot(ctx context.Context, log Log) (uint64, error) { return newestSnapshot(ctx, log) }
