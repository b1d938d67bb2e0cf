package dispatcher

import (
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/admin"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
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

// Backup writes an archive of the data directory, one at a time. It ends early when the disk is
// above its high-water mark: the archive's hard links keep space that the store has freed.
func (d *Dispatcher) Backup(w io.Writer) error {
	if !d.backingUp.TryLock() {
		return adminapi.ErrBackupRunning
	}
	defer d.backingUp.Unlock()
	started := time.Now()
	d.log.Info("backup started")
	index, err := takeBackup(d.options.DataDir, d.store, d.memberFiles.hold, d.options.Version, w)
	if err != nil {
		d.log.Error("backup failed", "error", err)
		return err
	}
	d.log.Info("backup complete", "bytes", index.Bytes, "duration", time.Since(started).Round(time.Millisecond).String())
	return nil
}

func takeBackup(dir string, store *pebblestore.Store, hold func() func(), version string, w io.Writer) (backup.Index, error) {
	return backup.Take(backup.Options{
		DataDir: dir, HoldRemovals: hold, Version: version, Now: time.Now,
		Checkpoint: func(to string) error {
			_, err := store.Checkpoint(to)
			return err
		},
		Check: func() error {
			if store.Full() {
				return errors.Join(errors.New("the backup ended early, because it delays the removal of files; free space and try again"), queue.ErrFull)
			}
			return nil
		},
	}, w)
}

// BackupStopped writes an archive of the data directory of a stopped dispatcher.
func BackupStopped(dataDir, version string, w io.Writer) error {
	store, err := pebblestore.Open(filepath.Join(dataDir, backup.QueueFolder), pebblestore.Options{
		DuplicateWindow: pebblestore.MaxDuplicateWindow, Logger: slog.New(slog.DiscardHandler), DataDir: dataDir,
	})
	if err != nil {
		return err
	}
	_, err = takeBackup(dataDir, store, func() func() { return func() {} }, version, w)
	return errors.Join(err, store.Close())
}
