package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/internal/durable"
	"github.com/posthorn/posthorn/internal/plural"
)

func newBackup() *cobra.Command {
	var admin, data, tokenFile string
	cmd := &cobra.Command{
		Use:   "backup TARGET",
		Short: "Back up the data directory of a running or stopped Posthorn",
		Long: `Writes a backup of a data directory: pending messages, dead letters, the members
of audiences, and the state of the manifests. Posthorn continues to receive and
deliver. The backup is consistent: it has every call that was answered before it
began.

TARGET is a tar file if its name ends in .tar, otherwise a folder. It must not
exist, and appears only when it is whole. It contains personal data and Secrets,
readable only for its owner. The files of the manifests are not part of it.

A running Posthorn is asked at its admin address, with the token in its data
directory, which only its user can read. With --data, it must be stopped.`,
		Example: `  posthorn backup /backup/posthorn.tar
  posthorn backup --token-file /var/lib/posthorn/backup.token /backup/posthorn.tar
  posthorn backup --data /var/lib/posthorn /backup/posthorn`,
		Args: command.ExactArgs("TARGET"),
		RunE: func(cmd *cobra.Command, args []string) error {
			open := func(ctx context.Context) (io.ReadCloser, error) {
				token, err := backup.ReadToken(tokenFile)
				if err != nil && (cmd.Flags().Changed("token-file") || !errors.Is(err, os.ErrNotExist)) {
					return nil, command.Usagef("--token-file: %v", err)
				}
				return openBackup(ctx, admin, token)
			}
			// The token is in the data directory.
			folder := filepath.Dir(tokenFile)
			if data != "" {
				if cmd.Flags().Changed("admin") || cmd.Flags().Changed("token-file") {
					return command.Usagef("set either --data or --admin and --token-file")
				}
				folder = data
				open = func(ctx context.Context) (io.ReadCloser, error) { return openStopped(ctx, data) }
			}
			if err := checkTarget(args[0], folder); err != nil {
				return err
			}
			return saveBackup(cmd, open, args[0])
		},
	}
	command.AdminFlag(cmd, &admin)
	cmd.Flags().StringVar(&tokenFile, "token-file", filepath.Join(defaultDataDir(), backup.TokenName),
		"token file in the data directory of a running Posthorn")
	cmd.Flags().StringVar(&data, "data", "", "data directory of a stopped Posthorn")
	return cmd
}

// checkTarget returns an error if a target cannot be written.
func checkTarget(target, dataDir string) error {
	if target == "-" {
		return command.Usagef("TARGET is %q, but a backup appears only when all of it is written and checked; use the name of a file or folder, and copy that", target)
	}
	if ext := filepath.Ext(target); slices.Contains([]string{".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip"}, strings.ToLower(ext)) {
		return command.Usagef("%s: a backup is not compressed; use a name that ends in .tar, and compress the file afterwards", target)
	}
	inside, err := backup.IsInside(target, dataDir)
	if err != nil {
		return err
	}
	if inside {
		return command.Usagef("%s is inside the data directory %s; use another folder, on another disk if possible", target, dataDir)
	}
	return backup.CheckTarget(target)
}

func saveBackup(cmd *cobra.Command, open func(context.Context) (io.ReadCloser, error), target string) error {
	started := time.Now()
	leftovers, err := backup.RemovePartial(target)
	for _, path := range leftovers {
		fmt.Fprintf(cmd.ErrOrStderr(), "removed %s, the partial copy of an interrupted backup\n", path)
	}
	if err != nil { // The backup needs only the space.
		fmt.Fprintf(cmd.ErrOrStderr(), "a partial copy of an interrupted backup was not removed: %v\n", err)
	}
	r, err := open(cmd.Context())
	if err != nil {
		return err
	}
	defer r.Close()
	index, err := backup.Save(r, target, freeBytes)
	if err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s: %d bytes of files, begun at %s, written in %s\n", target, index.Bytes, index.Time.Format(time.RFC3339),
		time.Since(started).Round(time.Millisecond))
	return nil
}

func openBackup(ctx context.Context, admin, token string) (io.ReadCloser, error) {
	if !strings.Contains(admin, "://") {
		admin = "http://" + admin
	}
	client := adminapi.Client{URL: admin}
	r, err := client.Backup(ctx, token)
	if err == nil {
		return r, nil
	}
	if cause := context.Cause(ctx); cause != nil {
		return nil, cause
	}
	if _, ok := errors.AsType[*adminapi.StatusError](err); ok {
		return nil, err
	}
	return nil, fmt.Errorf("%w\nIs Posthorn running there? Set --admin, or use --data to back up a stopped one", err)
}

func openStopped(ctx context.Context, data string) (io.ReadCloser, error) {
	// Open would create a missing store.
	store := filepath.Join(data, backup.QueueFolder)
	if _, err := os.Stat(store); err != nil {
		return nil, command.Usagef("--data %q is not a data directory: %v", data, err)
	}
	if err := checkOwner(store); err != nil {
		return nil, err
	}
	r, w := io.Pipe()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		w.CloseWithError(dispatcher.BackupStopped(ctx, data, command.BuildVersion(), w))
	}()
	return stoppedBackup{r, closed}, nil
}

// stoppedBackup waits in Close until the store is closed.
type stoppedBackup struct {
	*io.PipeReader
	closed <-chan struct{}
}

func (b stoppedBackup) Close() error {
	err := b.PipeReader.Close()
	<-b.closed
	return err
}

// freeBytes is the free space for this process.
func freeBytes(dir string) (int64, error) {
	usage, err := vfs.Default.GetDiskUsage(dir)
	return int64(min(usage.AvailBytes, math.MaxInt64)), err
}

func newRestore() *cobra.Command {
	var data string
	cmd := &cobra.Command{
		Use:   "restore BACKUP --data DIR",
		Short: "Restore a backup into the data directory of a stopped Posthorn",
		Long: `Checks a backup (its checksums, all files of its store, the members of audiences,
and the ledger of each lane) and puts it into a data directory without a store.
Move an existing store aside first.

Messages that were delivered after the backup began are delivered again, with the
same Idempotency-Key. Calls that were accepted after it are missing.`,
		Example: `  posthorn restore /backup/posthorn.tar --data /var/lib/posthorn`,
		Args:    command.ExactArgs("BACKUP"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if data == "" {
				return command.Usagef("the data directory is missing; set --data to the dispatcher's data directory")
			}
			return restore(cmd.Context(), cmd.OutOrStdout(), args[0], data)
		},
	}
	cmd.Flags().StringVar(&data, "data", "", "data directory of the dispatcher; created if it is missing")
	return cmd
}

// restoreFolder is the folder, in a data directory, of a restore in progress. A name that begins with
// a dot is not part of a backup. The lock of restoreLock excludes other restores.
const (
	restoreFolder = ".restore"
	restoreLock   = ".restore.lock"
)

// restore extracts a backup into a data directory without a store. It puts the store in place last, so an interrupted
// call can be repeated.
func restore(ctx context.Context, out io.Writer, from, data string) (err error) {
	if err := checkNoStore(data); err != nil {
		return err
	}
	r, err := backup.Open(from)
	if err != nil {
		return err
	}
	// A read, for example from a network file system, may have no end.
	defer context.AfterFunc(ctx, func() { _ = r.Close() })()
	defer r.Close()
	if _, missing := os.Stat(data); missing != nil {
		defer func() {
			if err != nil {
				_ = os.Remove(data) // Without effect unless it is empty.
			}
		}()
	}
	if err := os.MkdirAll(data, 0o700); err != nil {
		return err
	}
	unlock, err := lockRestore(data)
	if err != nil {
		return err
	}
	defer unlock()
	// Another restore may have ended meanwhile.
	if err := checkNoStore(data); err != nil {
		return err
	}
	partial := filepath.Join(data, restoreFolder)
	defer os.RemoveAll(partial)
	if err := errors.Join(os.RemoveAll(partial), os.Mkdir(partial, 0o700)); err != nil {
		return err
	}
	index, err := backup.Extract(contextReader{ctx, r}, partial, freeBytes)
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	lanes, deadLetters, err := dispatcher.VerifyCopy(ctx, partial)
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err != nil {
		return fmt.Errorf("%s: %w; use another backup", from, err)
	}
	for _, name := range backup.Entries() {
		if err := moveEntry(partial, data, name); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "Restored the backup of %s: %s, %s, %d bytes. Start Posthorn with --data %s.\n", index.Time.Format(time.RFC3339), plural.Count(lanes, "lane"), plural.Count(deadLetters, "dead letter"), index.Bytes, data)
	return nil
}

func checkNoStore(data string) error {
	store := filepath.Join(data, backup.QueueFolder)
	if _, err := os.Lstat(store); err == nil {
		return fmt.Errorf("%s exists; stop Posthorn, move the data directory aside, and try again", store)
	}
	return nil
}

// lockRestore excludes other restores into a data directory until unlock is called. A kill of the
// process releases the lock.
func lockRestore(data string) (unlock func(), err error) {
	file := filepath.Join(data, restoreLock)
	lock, err := vfs.Default.Lock(file)
	if errors.Is(err, syscall.EAGAIN) {
		return nil, fmt.Errorf("another restore into %s is in progress; wait for its end", data)
	}
	if err != nil {
		return nil, err
	}
	return func() { _ = errors.Join(os.Remove(file), lock.Close()) }, nil
}

// moveEntry moves an entry of an extracted backup, which need not exist, to a data directory. It
// replaces the rest of an earlier store there, but no store: Rename fails if a Posthorn that was
// started meanwhile has one.
func moveEntry(from, data, name string) error {
	to := filepath.Join(data, name)
	if name != backup.QueueFolder {
		if err := os.RemoveAll(to); err != nil {
			return err
		}
	}
	err := os.Rename(filepath.Join(from, name), to)
	if errors.Is(err, os.ErrNotExist) && name != backup.QueueFolder {
		err = nil
	}
	return errors.Join(err, durable.SyncFolder(data))
}

// contextReader fails when its context is done.
type contextReader struct {
	ctx context.Context
	io.Reader
}

func (r contextReader) Read(p []byte) (int, error) {
	if err := context.Cause(r.ctx); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}
