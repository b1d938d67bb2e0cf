package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/durable"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
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
			if data != "" {
				if cmd.Flags().Changed("admin") || cmd.Flags().Changed("token-file") {
					return command.Usagef("set either --data or --admin and --token-file")
				}
				open = func(context.Context) (io.ReadCloser, error) { return openStopped(data) }
			}
			return saveBackup(cmd, open, args[0])
		},
	}
	cmd.Flags().StringVar(&admin, "admin", "127.0.0.1:8081", "admin address of a running Posthorn")
	cmd.Flags().StringVar(&tokenFile, "token-file", filepath.Join(defaultDataDir(), backup.TokenName), "token file in the data directory of a running Posthorn")
	cmd.Flags().StringVar(&data, "data", "", "data directory of a stopped Posthorn")
	return cmd
}

func saveBackup(cmd *cobra.Command, open func(context.Context) (io.ReadCloser, error), target string) error {
	started := time.Now()
	if err := backup.CheckTarget(target); err != nil {
		return err
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
	fmt.Fprintf(cmd.OutOrStdout(), "%s: %d bytes of files, begun at %s, written in %s\n", target, index.Bytes, index.Time.Format(time.RFC3339), time.Since(started).Round(time.Millisecond))
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
	if _, ok := errors.AsType[*adminapi.StatusError](err); ok {
		return nil, err
	}
	return nil, fmt.Errorf("%w\nIs Posthorn running there? Set --admin, or use --data to back up a stopped one", err)
}

func openStopped(data string) (io.ReadCloser, error) {
	// Open would create a missing store.
	if _, err := os.Stat(filepath.Join(data, backup.QueueFolder)); err != nil {
		return nil, command.Usagef("--data %q is not a data directory: %v", data, err)
	}
	r, w := io.Pipe()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		w.CloseWithError(dispatcher.BackupStopped(data, command.BuildVersion(), w))
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
		Long: `Checks a backup (its checksums, and the ledger of each lane) and puts it into a data
directory without a store. Move an existing store aside first.

Messages that were delivered after the backup began are delivered again, with the
same Idempotency-Key. Calls that were accepted after it are missing.`,
		Example: `  posthorn restore /backup/posthorn.tar --data /var/lib/posthorn`,
		Args:    command.ExactArgs("BACKUP"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if data == "" {
				return command.Usagef("the data directory is missing; set --data to the dispatcher's data directory")
			}
			return restore(cmd.OutOrStdout(), args[0], data)
		},
	}
	cmd.Flags().StringVar(&data, "data", "", "data directory of the dispatcher; created if it is missing")
	return cmd
}

// restore puts the store in place last: without it, an interrupted restore can be repeated.
func restore(out io.Writer, from, data string) error {
	store := filepath.Join(data, backup.QueueFolder)
	if _, err := os.Lstat(store); err == nil {
		return fmt.Errorf("%s exists; stop Posthorn, move the data directory aside, and try again", store)
	}
	if err := os.MkdirAll(data, 0o700); err != nil {
		return err
	}
	// A name that begins with a dot is not part of a backup.
	partial, err := os.MkdirTemp(data, ".restore-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(partial)
	r, err := backup.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	index, err := backup.Extract(r, partial, freeBytes)
	if err != nil {
		return err
	}
	lanes, deadLetters, err := pebblestore.Verify(filepath.Join(partial, backup.QueueFolder))
	if err != nil {
		return err
	}
	names, err := backup.Names(partial)
	if err != nil {
		return err
	}
	for _, name := range names {
		to := filepath.Join(data, name)
		if name != backup.QueueFolder { // The rest of an interrupted restore.
			if err := os.RemoveAll(to); err != nil {
				return err
			}
		}
		// Rename fails if a Posthorn that was started meanwhile has a store.
		if err := errors.Join(os.Rename(filepath.Join(partial, name), to), durable.SyncFolder(data)); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "Restored the backup of %s: %d lanes, %d dead letters, %d bytes. Start Posthorn with --data %s.\n", index.Time.Format(time.RFC3339), lanes, deadLetters, index.Bytes, data)
	return nil
}
