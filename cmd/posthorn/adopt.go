package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/cmd/internal/logs"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/jobs/audience"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/host"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/jetstream"
)

func newReplication() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "replication",
		Short: "Decide what a replicated log continues with",
		Args:  command.OnlyCommands,
		RunE:  command.ShowHelp,
	}
	cmd.AddCommand(newAdopt())
	return cmd
}

func newAdopt() *cobra.Command {
	var logging logs.Flags
	var log replicationFlags
	var data string
	var only int
	var yes bool
	cmd := &cobra.Command{
		Use:   "adopt --replication-url nats://HOST:PORT --replication-name NAME [--replication-installation ID] [--data DIR]",
		Short: "Continue with a replicated log that was restored or lost, or move a store to a new one",
		Long: `A process is not ready when the log lacks records that it had: its streams were
restored from a backup, deleted, or created again. This command decides what the
slots continue with. It also begins a new log with the store of a dispatcher.

Without --data: with the records of the streams. A slot whose stream has no record
continues with the newest snapshot of its object store. A slot whose stream lacks
records behind the newest snapshot continues without their batches, which are named. Messages that were delivered
after the backup or the snapshot are delivered again; calls that were accepted after
it are missing. Processes then remove files of a later time from their data
directories.

With --data of a process with the log: with the files in its data directory. The process
that owned the slot last has everything that was accepted: use the files with the highest
epoch in slots/N/queue.slot. They replace the records of
the stream. Files with an epoch below the newest one in the streams are rejected. The
process may still run while it is not ready, for example in the pod in which you run
this command. With several slots, repeat the command with --slot and
--data for slots whose newest files are in different processes.

With --data of a stopped dispatcher without a log: with its store. Waiting messages,
retries, dead letters, ledgers, circuits, duplicate messageIds, the members of
audiences, and DeletionRequests become the content of the slot (--slot, 0 by default).
Nothing is lost, and nothing is delivered again, except for requests that were in
flight at a kill -9. The log must be new: no process was started with this --replication-name.
Take a backup before (posthorn backup): the data directory then belongs to the log, and
does not start without it. Of a release with several dispatchers, adopt the volume of
pod 0, which has the audiences and DeletionRequests, and drain the others (posthorn
drain).`,
		Example: `  posthorn replication adopt --replication-url nats://nats-0:4222,nats://nats-1:4222 --replication-name shop \
    --replication-installation eu-1/shop
  posthorn replication adopt --replication-url nats://nats-0:4222 --replication-name shop \
    --replication-installation eu-1/shop --data /var/lib/posthorn
  posthorn replication adopt --replication-url nats://nats-0:4222 --replication-name shop \
    --replication-installation eu-1/shop --replication-slots 9 --slot 3 --data /var/lib/posthorn --yes`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			logger, err := logging.Logger(cmd.ErrOrStderr())
			if err != nil {
				return command.UsageError(err)
			}
			if log.config.URL == "" {
				return command.Usagef("the addresses of the NATS servers are missing; set --replication-url as for the processes")
			}
			if err := log.parse(); err != nil {
				return err
			}
			if only < -1 || only >= log.slots {
				return command.Usagef("--slot %d: use a slot from 0 to %d, or set --replication-slots", only, log.slots-1)
			}
			if !yes {
				content := "the records of the streams"
				if data != "" {
					content = "the files in " + data + ", which replace the records of the streams"
				}
				if err := command.Confirm(cmd, fmt.Sprintf("Continue the log %s with %s?", log.config.Name, content), "set --yes"); err != nil {
					return err
				}
			}
			client, err := jetstream.New(log.config, logger)
			if err != nil {
				return err
			}
			defer client.Close()
			a := adopter{client: client, out: cmd.OutOrStdout(), logger: logger, data: data, slots: log.slots}
			if store := filepath.Join(data, backup.QueueFolder); data != "" && exists(store) {
				return a.adopt(cmd.Context(), max(only, 0), store)
			}
			for slot := range log.slots {
				if only >= 0 && slot != only {
					continue
				}
				if err := a.adopt(cmd.Context(), slot, host.QueueFolder(data, slot)); err != nil {
					return err
				}
			}
			return nil
		},
	}
	log.register(cmd)
	f := cmd.Flags()
	f.IntVar(&log.slots, "replication-slots", 1, "number of slots of --replication-url")
	f.IntVar(&only, "slot", -1, "slot to adopt; -1: all")
	f.StringVar(&data, "data", "", "data directory whose files the slots continue with; empty: the streams")
	command.YesFlag(cmd, &yes)
	logging.Register(cmd)
	return cmd
}

// adopter adopts slots of a log.
type adopter struct {
	client *jetstream.Client
	out    io.Writer
	logger *slog.Logger
	data   string // Empty for the streams.
	slots  int
}

const (
	// adoptPause is the time between two tries, and adoptTries their number: the connection is not open
	// at the start, and a process that is not ready opens its files every two seconds.
	adoptPause = 500 * time.Millisecond
	adoptTries = 20
)

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// adopt adopts a slot, with the files in dir if the data directory is set.
func (a adopter) adopt(ctx context.Context, slot int, dir string) error {
	if a.data == "" {
		temporary, err := os.MkdirTemp("", "posthorn-adopt-")
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(temporary) }()
		dir = filepath.Join(temporary, "queue")
	} else if _, err := os.Stat(dir); err != nil {
		return fmt.Errorf("slot %d: the data directory has no files of the slot: %w", slot, err)
	}
	var adopted slots.Adoption
	err := try(ctx, func() error {
		directory, err := a.directory(ctx) // It is created before the slots.
		if err != nil {
			return err
		}
		remote, err := a.client.OpenAdopted(ctx, slot)
		if err != nil {
			return err
		}
		s := slots.Slot{Log: remote.Log, Objects: remote.Snapshots, Dir: dir, Store: pebblestore.Options{Logger: a.logger}}
		adopted, err = s.Adopt(ctx, remote.Rename, a.data != "", func(store *pebblestore.Store) error {
			if err := assign(ctx, directory, store.Namespaces(), slot); err != nil {
				return err
			}
			// The members first: the store names them.
			if err := audience.StoreFiles(ctx, vfs.Default, filepath.Join(a.data, backup.MembersFolder), remote.Members); err != nil {
				return fmt.Errorf("store the members of audiences: %w", err)
			}
			return nil
		})
		return err
	})
	if err != nil {
		return fmt.Errorf("slot %d: %w", slot, err)
	}
	for _, lost := range adopted.Lost {
		fmt.Fprintf(a.out, "lost: %s\n", lost)
	}
	switch adopted.Content {
	case slots.ContentNothing:
		fmt.Fprintf(a.out, "slot %d: neither the stream nor the object store has messages; nothing was changed\n", slot)
	case slots.ContentStream:
		fmt.Fprintf(a.out, "slot %d continues with the records of the stream, up to batch %d\n", slot, adopted.Batch)
	case slots.ContentSnapshot:
		fmt.Fprintf(a.out, "slot %d continues with the newest snapshot, up to batch %d\n", slot, adopted.Batch)
	case slots.ContentRest:
		fmt.Fprintf(a.out, "slot %d continues with the newest snapshot and the records of the stream%s\n", slot, without(adopted.Missing))
	case slots.ContentFiles:
		fmt.Fprintf(a.out, "slot %d continues with the files in %s, up to batch %d\n", slot, dir, adopted.Batch)
	case slots.ContentStore:
		fmt.Fprintf(a.out, "slot %d has the messages, dead letters, ledgers and audiences of %s; start the processes with this log, and remove the directory when posthorn slots shows a ready standby\n", slot, a.data)
	case slots.ContentOwner:
		fmt.Fprintf(a.out, "slot %d has an owner, which has all messages, up to batch %d, and repairs the log by itself within 30 s; nothing was changed\n", slot, adopted.Batch)
	}
	return nil
}

// directory returns the directory of the slots, and creates it if it is missing.
func (a adopter) directory(ctx context.Context) (*slots.Directory, error) {
	assignments, err := a.client.AdoptDirectory(ctx)
	if err != nil {
		return nil, err
	}
	directory, err := slots.OpenDirectory(ctx, assignments, a.slots, a.logger)
	if err == nil && directory.Slots() > a.slots {
		err = fmt.Errorf("the log has %d slots; set --replication-slots to this number or more", directory.Slots())
	}
	return directory, err
}

// assign assigns namespaces to a slot.
func assign(ctx context.Context, directory *slots.Directory, namespaces []string, slot int) error {
	for _, namespace := range namespaces {
		now, err := directory.Assign(ctx, namespace, slot)
		if err != nil {
			return err
		}
		if now != slot {
			return fmt.Errorf("namespace %s is in slot %d; use --slot %d, and call the command again", namespace, now, now)
		}
	}
	return nil
}

// without names missing batches.
func without(missing []slots.Batches) string {
	var names []string
	for _, b := range missing {
		names = append(names, fmt.Sprintf("%d to %d", b.First, b.Last))
	}
	if len(names) == 0 {
		return ", which have all batches"
	}
	return ", without the batches " + strings.Join(names, ", ") + ", which no server has: calls, results of deliveries and states in them are lost"
}

// try repeats a function while the servers are not connected, do not answer or are too few, or another process has
// the lock of the files.
func try(ctx context.Context, fn func() error) (err error) {
	for range adoptTries {
		err = fn()
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, jetstream.ErrNotConnected) && !errors.Is(err, jetstream.ErrOffline) &&
			!errors.Is(err, syscall.EAGAIN) {
			return err
		}
		select {
		case <-time.After(adoptPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("the servers of the log do not answer; check that most of them run, and try again: %w", err)
	}
	return err
}
