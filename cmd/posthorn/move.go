package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/cmd/internal/logs"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/jobs/audience"
	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/jetstream"
	"github.com/posthorn/posthorn/internal/plural"
)

func newLogImport() *cobra.Command {
	var add bool
	cmd := newMove(func(m mover, ctx context.Context) error {
		if add {
			return m.add(ctx)
		}
		return m.store(ctx)
	}, &cobra.Command{
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
audiences and DeletionRequests, and then add those of the others with --add: the
waiting messages and the dead letters are moved to the slots of their namespaces, and
their retry windows begin again. Ledgers, duplicate messageIds and circuits are not
moved. After an error or a kill, call the command again: at most 256 messages are
delivered twice. Until it has ended, the directory starts no dispatcher.`,
		Example: `  posthorn log import --data /var/lib/posthorn --log nats://nats-0:4222,nats://nats-1:4222 --log-name shop --log-installation eu-1/shop
  posthorn log import --data /mnt/data-1 --add --log nats://nats-0:4222,nats://nats-1:4222 --log-name shop --log-installation eu-1/shop
  posthorn log import --data /mnt/data --log nats://nats-0:4222 --log-name shop --log-installation eu-1/shop --log-slots 8 --slot 3`,
	})
	cmd.Flags().BoolVar(&add, "add", false, "add the waiting messages and dead letters to the slots that have the content of another data directory; --slot is that of namespaces without a slot")
	return cmd
}

func newLogExport() *cobra.Command {
	return newMove(mover.load, &cobra.Command{
		Use:   "export --data DIR --log nats://HOST:PORT --log-name NAME [--log-installation ID]",
		Short: "Write a slot of a replicated log to a data directory without a log",
		Long: `Writes the content of a slot to a data directory without a store, and reads all files
to check them. A dispatcher without --log continues with it: waiting messages,
retries, dead letters, ledgers, circuits, duplicate messageIds, the members of
audiences, and DeletionRequests.

No process may run with the log. The log keeps its content: delete its streams, or do
not use it again, because both would deliver the waiting messages.`,
		Example: `  posthorn log export --data /var/lib/posthorn --log nats://nats-0:4222,nats://nats-1:4222 --log-name shop --log-installation eu-1/shop
  posthorn log export --data /mnt/data-3 --log nats://nats-0:4222 --log-name shop --log-installation eu-1/shop --log-slots 8 --slot 3`,
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
	directory, done, err := m.directory(ctx, false) // It is created before the slots.
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
		err = fmt.Errorf("%w; to add the messages and dead letters of a further data directory, use --add", err)
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(m.out, "slot %d has the messages, dead letters, ledgers and audiences of %s; start the processes with this log, and remove the directory when posthorn slots shows a ready standby\n", m.slot, m.data)
	return nil
}

// addFolder has the files of the slot while messages are added.
const addFolder = "adding"

// add moves the messages and dead letters of the data directory to the slots of their namespaces.
func (m mover) add(ctx context.Context) (err error) {
	if err := m.checkStore(); err != nil {
		return err
	}
	m.log.config.MaxBytes = jetstream.MinBytes // Existing streams are larger, and are not changed.
	from, err := m.openStore()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	directory, done, err := m.directory(ctx, true)
	if err != nil {
		return explainUnused(err)
	}
	defer done()
	bySlot := map[int][]string{}
	for _, namespace := range from.Namespaces() {
		slot := m.slot
		if directory != nil {
			if known, ok := directory.Slot(namespace); ok {
				slot = known
			}
		}
		bySlot[slot] = append(bySlot[slot], namespace)
	}
	dir := filepath.Join(m.data, addFolder)
	defer os.RemoveAll(dir)
	for _, slot := range slices.Sorted(maps.Keys(bySlot)) {
		m.slot = slot
		var moved redelivery.Moved
		err := m.with(ctx, dir, func(client *jetstream.Client) (slots.Remote, error) {
			return client.OpenExisting(ctx, m.log.slots, slot)
		}, func(to slots.Slot, remote slots.Remote) error {
			if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)); err != nil {
				return err
			}
			state, err := remote.Log.State(ctx)
			if err != nil {
				return fmt.Errorf("read the state of the log: %w", err)
			}
			return to.Use(ctx, func(store *pebblestore.Store) error {
				if err := m.assign(ctx, directory, bySlot[slot]); err != nil {
					return err
				}
				some, err := redelivery.Move(ctx, from, store, state.ID, func(namespace string) bool { return slices.Contains(bySlot[slot], namespace) })
				moved.Messages, moved.DeadLetters = moved.Messages+some.Messages, moved.DeadLetters+some.DeadLetters
				return err
			})
		})
		if err != nil {
			return explainUnused(err)
		}
		fmt.Fprintf(m.out, "slot %d has %s and %s more, of the namespaces %s\n", slot, plural.Count(moved.Messages, "message"), plural.Count(moved.DeadLetters, "dead letter"), strings.Join(bySlot[slot], ", "))
	}
	fmt.Fprintf(m.out, "%s has no messages and dead letters any more; remove it\n", m.data)
	return nil
}

// explainUnused adds the fix to the error of a slot without content.
func explainUnused(err error) error {
	if errors.Is(err, slots.ErrUnused) || errors.Is(err, jetstream.ErrNoSlot) {
		return fmt.Errorf("%w; first import the data directory of pod 0 without --add, and use the same --log-name, --log-slots and --slot", err)
	}
	return err
}

// openStore opens the store of the data directory.
func (m mover) openStore() (*pebblestore.Store, error) {
	o := m.options
	o.DuplicateWindow, o.MaxBytesPerSource, o.DataDir = pebblestore.MaxDuplicateWindow, pebblestore.NoQuota, m.data
	return pebblestore.Open(filepath.Join(m.data, backup.QueueFolder), o)
}

// directory returns the directory of a log with several slots; nil for a log with one. exists requires the slot, so
// that a wrong name creates nothing.
func (m mover) directory(ctx context.Context, exists bool) (directory *slots.Directory, done func(), err error) {
	if m.log.slots == 1 {
		return nil, func() {}, nil
	}
	client, err := jetstream.New(m.log.config, m.options.Logger)
	if err != nil {
		return nil, nil, err
	}
	err = try(ctx, func() error {
		if exists {
			if _, err := client.OpenExisting(ctx, m.log.slots, m.slot); err != nil {
				return err
			}
		}
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
			return fmt.Errorf("namespace %s is in slot %d; use --slot %d, or, for a further data directory, --add, and call the command again", namespace, slot, slot)
		}
	}
	return nil
}

// assignAll assigns the namespaces of the data directory to the slot. It fails if some of its messages were added to
// a log. A repeated import has done it.
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
	if err := errors.Join(redelivery.CheckMoved(store), store.Close()); err != nil {
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
