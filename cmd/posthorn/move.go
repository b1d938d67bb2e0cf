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
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/jobs/audience"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/jetstream"
)

func newLogImport() *cobra.Command {
	return newMove(mover.store, &cobra.Command{
		Use:   "import --data DIR --log nats://HOST:PORT --log-name NAME [--log-installation ID]",
		Short: "Move the data directory of a stopped dispatcher to a replicated log",
		Long: `Makes the data directory of a dispatcher without a replicated log the content of a
slot: waiting messages, retries, dead letters, ledgers, circuits, duplicate
messageIds, the members of audiences, and DeletionRequests. Nothing is lost, and
nothing is delivered again, except for requests that were in flight at a kill -9.

The dispatcher must not run, and the log must be new: no process was started with
this --log-name. Afterwards start the processes with the same flags.
The data directory then belongs to the log: without the log it does not start.
Take a backup before (posthorn backup), and remove the directory when posthorn slots
shows a ready standby.

Of a release with several dispatchers, import the volume of pod 0, which has the
audiences and DeletionRequests, and drain the others (posthorn drain).`,
		Example: `  posthorn log import --data /var/lib/posthorn --log nats://nats-0:4222,nats://nats-1:4222 --log-name shop --log-installation eu-1/shop
  posthorn log import --data /mnt/data --log nats://nats-0:4222 --log-name shop --log-installation eu-1/shop --log-slots 8 --slot 3`,
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
	if err := m.checkStore(); err != nil {
		return err
	}
	directory, done, err := m.directory(ctx) // It is created before the slots.
	if err != nil {
		return err
	}
	defer done()
	err = m.with(ctx, m.data, func(client *jetstream.Client) (r slots.Remote, err error) {
		return client.OpenAdopted(ctx, m.log.slots, m.slot)
	}, func(slot slots.Slot, remote slots.Remote) error {
		return slot.Import(ctx, remote.Rename, func() error {
			if err := m.assignAll(ctx, directory); err != nil {
				return err
			}
			// The members first: the store names them.
			if err := audience.StoreFiles(ctx, vfs.Default, filepath.Join(m.data, backup.MembersFolder), remote.Members); err != nil {
				return fmt.Errorf("store the members of audiences: %w", err)
			}
			return nil
		})
	})
	if errors.Is(err, slots.ErrUsed) {
		err = fmt.Errorf("%w; use another --log-name, or deliver the messages of the data directory with posthorn drain", err)
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(m.out, "slot %d has the messages, dead letters, ledgers and audiences of %s; start the processes with this log, and remove the directory when posthorn slots shows a ready standby\n", m.slot, m.data)
	return nil
}

// openStore opens the store of the data directory.
func (m mover) openStore() (*pebblestore.Store, error) {
	o := m.options
	o.DuplicateWindow, o.MaxBytesPerSource, o.DataDir = pebblestore.MaxDuplicateWindow, pebblestore.NoQuota, m.data
	return pebblestore.Open(filepath.Join(m.data, backup.QueueFolder), o)
}

// directory returns the directory of a log with several slots; nil for a log with one.
func (m mover) directory(ctx context.Context) (directory *slots.Directory, done func(), err error) {
	if m.log.slots == 1 {
		return nil, func() {}, nil
	}
	client, err := jetstream.New(m.log.config, m.options.Logger)
	if err != nil {
		return nil, nil, err
	}
	err = try(ctx, func() error {
		assignments, err := client.OpenDirectory(ctx, m.log.slots)
		if err == nil {
			directory, err = slots.OpenDirectory(ctx, assignments, m.log.slots, m.options.Logger)
		}
		return err
	})
	if err != nil {
		client.Close()
		return nil, nil, err
	}
	return directory, client.Close, nil
}

// assign assigns namespaces to the slot, unless the log has one slot.
func (m mover) assign(ctx context.Context, directory *slots.Directory, namespaces []string) error {
	if directory == nil {
		return nil
	}
	for _, namespace := range namespaces {
		slot, err := directory.Assign(ctx, namespace, m.slot)
		if err != nil {
			return err
		}
		if slot != m.slot {
			return fmt.Errorf("namespace %s is in slot %d; use --slot %d, and call the command again", namespace, slot, slot)
		}
	}
	return nil
}

// assignAll assigns the namespaces of the data directory to the slot. A repeated import has done it.
func (m mover) assignAll(ctx context.Context, directory *slots.Directory) error {
	at, err := pebblestore.ReadPosition(vfs.Default, filepath.Join(m.data, backup.QueueFolder))
	if err != nil || at.Batch > 0 {
		return err
	}
	store, err := m.openStore()
	if err != nil {
		return err
	}
	names := store.Namespaces()
	if err := store.Close(); err != nil {
		return err
	}
	return m.assign(ctx, directory, names)
}

// checkStore checks that the data directory has a store.
func (m mover) checkStore() error {
	if _, err := os.Stat(filepath.Join(m.data, backup.QueueFolder)); err != nil {
		return fmt.Errorf("the data directory has no store: %w", err)
	}
	return nil
}
