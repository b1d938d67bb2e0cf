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

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/cmd/internal/logs"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/repair"
	"github.com/posthorn/posthorn/dispatcher/replicated/host"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/jetstream"
)

func newLog() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "log",
		Short: "Repair a replicated log, or move a store to it",
		Args:  command.OnlyCommands,
		RunE:  command.ShowHelp,
	}
	cmd.AddCommand(newAdopt(), newLogImport())
	return cmd
}

func newAdopt() *cobra.Command {
	var logging logs.Flags
	var log logFlags
	var data string
	var only int
	var yes bool
	cmd := &cobra.Command{
		Use:   "adopt --log nats://HOST:PORT --log-name NAME [--log-installation ID] [--data DIR]",
		Short: "Continue with a replicated log that was restored from a backup, or lost",
		Long: `A process is not ready when the log lacks records that it had: its streams were
restored from a backup, deleted, or created again. This command decides what the
slots continue with.

Without --data: with the records of the streams. A slot whose stream has no record
continues with the newest snapshot of its object store. A slot whose stream lacks
records behind the newest snapshot continues without their batches, which are named. Messages that were delivered
after the backup or the snapshot are delivered again; calls that were accepted after
it are missing. Processes then remove files of a later time from their data
directories.

With --data: with the files in the data directory of a process. The process that
delivered last has everything that was accepted. Its files replace the records of the
stream. The process may still run while it is not ready, for example in the pod in
which you run this command.

With several slots, repeat the command with --slot and --data for slots whose newest
files are in different processes.`,
		Example: `  posthorn log adopt --log nats://nats-0:4222,nats://nats-1:4222 --log-name shop --log-installation eu-1/shop
  posthorn log adopt --log nats://nats-0:4222 --log-name shop --log-installation eu-1/shop --data /var/lib/posthorn
  posthorn log adopt --log nats://nats-0:4222 --log-name shop --log-installation eu-1/shop --log-slots 9 --slot 3 --data /var/lib/posthorn --yes`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			logger, err := logging.Logger(cmd.ErrOrStderr())
			if err != nil {
				return command.UsageError(err)
			}
			if log.config.URL == "" {
				return command.Usagef("the addresses of the NATS servers are missing; set --log as for the processes")
			}
			if err := log.parse(); err != nil {
				return err
			}
			if only < -1 || only >= log.slots {
				return command.Usagef("--slot %d: use a slot from 0 to %d, or set --log-slots", only, log.slots-1)
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
			for slot := range log.slots {
				if only >= 0 && slot != only {
					continue
				}
				if err := a.adopt(cmd.Context(), slot); err != nil {
					return fmt.Errorf("slot %d: %w", slot, err)
				}
			}
			return nil
		},
	}
	log.register(cmd)
	f := cmd.Flags()
	f.IntVar(&log.slots, "log-slots", 1, "number of slots of --log")
	f.IntVar(&only, "slot", -1, "slot to adopt; -1: all")
	f.StringVar(&data, "data", "", "data directory of the process whose files the slots continue with; empty: the streams")
	f.BoolVarP(&yes, "yes", "y", false, "do not ask for confirmation")
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

func (a adopter) adopt(ctx context.Context, slot int) error {
	dir := host.QueueFolder(a.data, a.slots, slot)
	if a.data == "" {
		temporary, err := os.MkdirTemp("", "posthorn-adopt-")
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(temporary) }()
		dir = filepath.Join(temporary, "queue")
	} else if _, err := os.Stat(dir); err != nil {
		return fmt.Errorf("the data directory has no files of the slot: %w", err)
	}
	var adopted slots.Adoption
	var missing []slots.Batches
	err := try(ctx, func() error {
		remote, err := a.client.OpenAdopted(ctx, a.slots, slot)
		if err != nil {
			return err
		}
		s := slots.Slot{Log: remote.Log, Objects: remote.Snapshots, Dir: dir, Store: pebblestore.Options{Logger: a.logger}}
		adopted, err = s.Adopt(ctx, remote.Rename, a.data != "")
		if errors.Is(err, slots.ErrIncomplete) && a.data == "" { // s.Dir is a temporary folder.
			adopted, missing, err = a.pass(ctx, s, remote)
		}
		return err
	})
	if err != nil {
		return err
	}
	switch adopted.Content {
	case slots.ContentNothing:
		fmt.Fprintf(a.out, "slot %d: neither the stream nor the object store has messages; nothing was changed\n", slot)
	case slots.ContentStream:
		fmt.Fprintf(a.out, "slot %d continues with the records of the stream, up to batch %d\n", slot, adopted.Batch)
	case slots.ContentSnapshot:
		fmt.Fprintf(a.out, "slot %d continues with the newest snapshot, up to batch %d\n", slot, adopted.Batch)
	case slots.ContentOwner:
		fmt.Fprintf(a.out, "slot %d has an owner, which has all messages, up to batch %d, and repairs the log by itself within 30 s; nothing was changed\n", slot, adopted.Batch)
	case slots.ContentFiles:
		if a.data == "" {
			fmt.Fprintf(a.out, "slot %d continues with the newest snapshot and the records of the stream%s\n", slot, without(missing))
			break
		}
		fmt.Fprintf(a.out, "slot %d continues with the files in %s, up to batch %d\n", slot, dir, adopted.Batch)
	}
	return nil
}

// pass makes a store of what the newest snapshot and a stream with gaps have, and continues with it.
func (a adopter) pass(ctx context.Context, s slots.Slot, remote slots.Remote) (adopted slots.Adoption, missing []slots.Batches, err error) {
	if err := os.RemoveAll(s.Dir); err != nil {
		return adopted, nil, err
	}
	if missing, err = s.Salvage(ctx); err != nil {
		return adopted, missing, err
	}
	r, err := repair.Run(s.Dir, true, pebblestore.Verify)
	if err != nil {
		return adopted, missing, fmt.Errorf("repair the store without the missing batches: %w", err)
	}
	for _, lost := range r.Lost {
		fmt.Fprintf(a.out, "lost: %s\n", lost)
	}
	if err := pebblestore.Attach(s.Dir, s.Store); err != nil {
		return adopted, missing, err
	}
	adopted, err = s.Adopt(ctx, remote.Rename, true)
	return adopted, missing, err
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
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, jetstream.ErrNotConnected) && !errors.Is(err, jetstream.ErrOffline) && !errors.Is(err, syscall.EAGAIN) {
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
