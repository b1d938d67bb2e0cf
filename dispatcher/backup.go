package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/admin"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/jobs/audience"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/repair"
)

// holdFS is the file system of the audiences' members. While mu is locked, no file is removed.
type holdFS struct {
	vfs.FS
	mu sync.RWMutex
}

func (f *holdFS) Remove(name string) error {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.FS.Remove(name)
}

func (f *holdFS) RemoveAll(name string) error {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.FS.RemoveAll(name)
}

// hold delays removals until release is called.
func (f *holdFS) hold() (release func()) {
	f.mu.Lock()
	return f.mu.Unlock
}

// newBackupToken replaces the token for backups, so that one that was sent to another process, which
// listened at the admin address before, is not valid.
func newBackupToken(dataDir string) (admin.BackupToken, error) {
	file, err := filepath.Abs(filepath.Join(dataDir, backup.TokenName))
	if err != nil {
		return admin.BackupToken{}, err
	}
	token, err := backup.NewToken(dataDir)
	return admin.BackupToken{File: file, Value: token}, err
}

// Backup writes an archive of the data directory, one at a time. It ends early when ctx is done, and
// when the disk is above its high-water mark: the archive's hard links keep space that the store has
// freed.
func (d *Dispatcher) Backup(ctx context.Context, w io.Writer) error {
	if d.options.Lease.Log() != nil {
		return errors.New("this store has a replicated log; back up the streams of the NATS servers instead")
	}
	if !d.backingUp.TryLock() {
		return adminapi.ErrBackupRunning
	}
	defer d.backingUp.Unlock()
	started := time.Now()
	d.log.Info("backup started")
	index, err := takeBackup(ctx, d.options.DataDir, d.store, d.memberFiles.hold, d.options.Version, w)
	if err != nil {
		d.log.Error("backup failed", "error", err)
		return err
	}
	d.log.Info("backup complete", "bytes", index.Bytes, "duration", time.Since(started).Round(time.Millisecond).String())
	return nil
}

func takeBackup(ctx context.Context, dir string, store *pebblestore.Store, hold func() func(), version string,
	w io.Writer) (backup.Index, error) {
	var states map[string][]byte
	check := func() error {
		if store.Full() {
			return errors.Join(errors.New("the backup ended early, because it delays the removal of files; free space and try again"), queue.ErrFull)
		}
		return context.Cause(ctx)
	}
	return backup.Take(backup.Options{
		DataDir: dir, HoldRemovals: hold, Version: version, Now: time.Now, Check: check,
		Checkpoint: func(to string) (err error) {
			// The files of these states exist; the checkpoint may have newer states.
			if states, err = store.AllMeta(); err != nil {
				return err
			}
			_, err = store.Checkpoint(to)
			return err
		},
		Verify: func(dir string) error {
			store := filepath.Join(dir, backup.QueueFolder)
			err := repair.Check(store, check)
			if errors.Is(err, repair.ErrDamaged) {
				return fmt.Errorf("%w; stop Posthorn and run posthorn repair", err)
			}
			if err != nil {
				return err
			}
			if err := os.Remove(filepath.Join(store, "LOCK")); err != nil {
				return err
			}
			return audience.VerifyFiles(vfs.Default, filepath.Join(dir, backup.MembersFolder), states, check)
		},
	}, w)
}

// VerifyCopy reads all files of a copy of a data directory and checks its ledgers. It returns the
// numbers of lanes and of dead letters.
func VerifyCopy(ctx context.Context, dir string) (lanes, deadLetters int, err error) {
	proceed := func() error { return context.Cause(ctx) }
	if err := repair.Check(filepath.Join(dir, backup.QueueFolder), proceed); err != nil {
		return 0, 0, err
	}
	store, err := openClosed(dir)
	if err != nil {
		return 0, 0, err
	}
	lanes, deadLetters, err = store.VerifyLedgers()
	states, metaErr := store.AllMeta()
	if err := errors.Join(err, metaErr, store.Close()); err != nil {
		return 0, 0, err
	}
	return lanes, deadLetters, audience.VerifyFiles(vfs.Default, filepath.Join(dir, backup.MembersFolder), states, proceed)
}

// openClosed opens the store of a data directory that no dispatcher uses.
func openClosed(dataDir string) (*pebblestore.Store, error) {
	return pebblestore.Open(filepath.Join(dataDir, backup.QueueFolder), pebblestore.Options{
		DuplicateWindow: pebblestore.MaxDuplicateWindow, Logger: slog.New(slog.DiscardHandler), DataDir: dataDir,
	})
}

// BackupStopped writes an archive of the data directory of a stopped dispatcher.
func BackupStopped(ctx context.Context, dataDir, version string, w io.Writer) error {
	store, err := openClosed(dataDir)
	if err != nil {
		return err
	}
	_, err = takeBackup(ctx, dataDir, store, func() func() { return func() {} }, version, w)
	return errors.Join(err, store.Close())
}
