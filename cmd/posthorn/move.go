package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/cmd/internal/logs"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/audience"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/plural"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/slots"
	"github.com/posthorn/posthorn/dispatcher/queue/slots/jetstream"
)

func newLogImport() *cobra.Command {
	return newMove(mover.store, &cobra.Command{
		Use:   "import --data DIR --log nats://HOST:PORT --log-name NAME",
		Short: "Move the data directory of a stopped dispatcher to a replicated log",
		Long: `Makes the data directory of a dispatcher without a replicated log the content of a
slot: waiting messages, retries, dead letters, ledgers, circuits, duplicate
messageIds, the members of audiences, and DeletionRequests. Nothing is lost, and
nothing is delivered again, except for requests that were in flight at a kill -9.

The dispatcher must not run, and the log must be new: no process was started with
this --log-name. Afterwards start the processes with the same --log and --log-name.
The data directory then belongs to the log: without the log it does not start.
Take a backup before (posthorn backup), and remove the directory when posthorn slots
shows a ready standby.

Of a release with several dispatchers, import the volume of pod 0, which has the
audiences and DeletionRequests, and drain those of the others.`,
		Example: `  posthorn log import --data /var/lib/posthorn --log nats://nats-0:4222,nats://nats-1:4222 --log-name shop
  posthorn log import --data /mnt/data --log nats://nats-0:4222 --log-name shop --log-slots 8 --slot 3`,
	})
}

func newLogExport() *cobra.Command {
	return newMove(mover.load, &cobra.Command{
		Use:   "export --data DIR --log nats://HOST:PORT --log-name NAME",
		Short: "Write a slot of a replicated log to a data directory without a log",
		Long: `Writes the content of a slot to a data directory without a store, and reads all files
to check them. A dispatcher without --log continues with it: waiting messages,
retries, dead letters, ledgers, circuits, duplicate messageIds, the members of
audiences, and DeletionRequests.

No process may run with the log. The log keeps its content: delete its streams, or do
not use it again, because both would deliver the waiting messages.`,
		Example: `  posthorn log export --data /var/lib/posthorn --log nats://nats-0:4222,nats://nats-1:4222 --log-name shop
  posthorn log export --data /mnt/data-3 --log nats://nats-0:4222 --log-name shop --log-slots 8 --slot 3`,
	})
}

// newMove completes a command that moves a slot.
func newMove(move func(mover, context.Context) error, cmd *cobra.Command) *cobra.Command {
	var logging logs.Flags
	var log logFlags
	var data string
	var slot int
	cmd.Args = command.ExactArgs()
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		logger, err := logging.Logger(cmd.ErrOrStderr())
		if err != nil {
			return command.UsageError(err)
		}
		switch {
		case log.config.URL == "":
			return command.Usagef("the addresses of the NATS servers are missing; set --log as for the processes")
		case data == "":
			return command.Usagef("the data directory is missing; set --data")
		}
		if err := log.parse(); err != nil {
			return err
		}
		if slot < 0 || slot >= log.slots {
			return command.Usagef("--slot %d: use a slot from 0 to %d, or set --log-slots", slot, log.slots-1)
		}
		return move(mover{out: cmd.OutOrStdout(), log: log, data: data, slot: slot, options: pebblestore.Options{Logger: logger}}, cmd.Context())
	}
	log.register(cmd)
	f := cmd.Flags()
	f.IntVar(&log.slots, "log-slots", 1, "number of slots of --log")
	f.IntVar(&slot, "slot", 0, "slot of the data directory")
	f.StringVar(&data, "data", "", "data directory of the dispatcher without a log")
	logging.Register(cmd)
	return cmd
}

// mover moves a slot from or to a data directory.
type mover struct {
	out     io.Writer
	log     logFlags
	data    string
	slot    int
	options pebblestore.Options
}

// with connects to the log, and calls move with the slot, whose files are in dir.
func (m mover) with(ctx context.Context, dir string, open func(*jetstream.Client) (slots.Remote, error), move func(slots.Slot, slots.Remote) error) error {
	client, err := jetstream.New(m.log.config, m.options.Logger)
	if err != nil {
		return err
	}
	defer client.Close()
	return try(ctx, func() error {
		remote, err := open(client)
		if err == nil {
			err = move(slots.Slot{Log: remote.Log, Objects: remote.Snapshots, Dir: filepath.Join(dir, backup.QueueFolder), Store: m.options}, remote)
		}
		if err != nil {
			return fmt.Errorf("slot %d: %w", m.slot, err)
		}
		return nil
	})
}

// store makes the data directory the content of the slot.
func (m mover) store(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(m.data, backup.QueueFolder)); err != nil {
		return fmt.Errorf("the data directory has no store: %w", err)
	}
	if err := dispatcher.CheckUpgraded(m.data); err != nil {
		return err
	}
	err := m.with(ctx, m.data, func(client *jetstream.Client) (r slots.Remote, err error) {
		if m.log.slots > 1 { // The directory is created before the slots.
			if _, err := client.OpenDirectory(ctx, m.log.slots); err != nil {
				return r, err
			}
		}
		return client.OpenAdopted(ctx, m.log.slots, m.slot)
	}, func(slot slots.Slot, remote slots.Remote) error {
		// The members first: the store names them.
		return slot.Import(ctx, remote.Rename, func() error {
			if err := audience.StoreFiles(ctx, vfs.Default, filepath.Join(m.data, backup.MembersFolder), remote.Members); err != nil {
				return fmt.Errorf("store the members of audiences: %w", err)
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(m.out, "slot %d has the messages, dead letters, ledgers and audiences of %s; start the processes with this log, and remove the directory when posthorn slots shows a ready standby\n", m.slot, m.data)
	return nil
}

// load writes the content of the slot to the data directory.
func (m mover) load(ctx context.Context) error {
	m.log.config.MaxBytes = jetstream.MinBytes // Existing streams are larger, and are not changed.
	lanes, deadLetters, err := placeStore(ctx, m.data, func(dir string) error {
		return m.with(ctx, dir, func(client *jetstream.Client) (slots.Remote, error) {
			return client.OpenExisting(ctx, m.log.slots, m.slot)
		}, func(slot slots.Slot, remote slots.Remote) error {
			// It may have the rest of a try that got no answer.
			if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700), slot.Export(ctx)); err != nil {
				return err
			}
			if err := audience.FetchFiles(ctx, remote.Members, vfs.Default, filepath.Join(dir, backup.MembersFolder)); err != nil {
				return fmt.Errorf("read the members of audiences: %w", err)
			}
			return nil
		})
	}, func(err error) error { return fmt.Errorf("the exported files are not complete: %w; export again", err) })
	if err != nil {
		return err
	}
	fmt.Fprintf(m.out, "%s has the messages, dead letters, ledgers and audiences of slot %d: %s, %s; start a dispatcher without --log with it, and delete the streams of the log, which still have the messages\n",
		m.data, m.slot, plural.Count(lanes, "lane"), plural.Count(deadLetters, "dead letter"))
	return nil
}
