package main

import (
	"context"
	"errors"
	"log/slog"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/replicated/host"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/jetstream"
)

// replicationFlags are the flags of the replicated log.
type replicationFlags struct {
	config   jetstream.Config
	maxBytes string
	// slots is 1 in commands without registerSlots.
	slots, standbys int
	pins            map[string]int
}

// registerSlots registers the flags of a process that can have several slots.
func (l *replicationFlags) registerSlots(cmd *cobra.Command) {
	f := cmd.Flags()
	f.IntVar(&l.slots, "replication-slots", 1, "number of slots of --replication-url: each has the messages of some namespaces, and one of the processes delivers them. Use about three times the number of processes. It can be raised later; all processes need the same number")
	f.IntVar(&l.standbys, "replication-standbys", 1, "number of processes that keep a copy of each slot in addition to its owner")
	f.StringToIntVar(&l.pins, "replication-pin", nil, "slot of a namespace that has none yet, NAMESPACE=SLOT, for example to give a large namespace a slot of its own")
}

// unnamed is the identity of an installation without --replication-installation: all of these look the same.
const unnamed = "unnamed"

func (l *replicationFlags) register(cmd *cobra.Command) {
	l.slots = 1
	f := cmd.Flags()
	f.StringVar(&l.config.URL, "replication-url", "", "NATS servers whose JetStream stores the calls in place of the data directory alone: nats://HOST:PORT or tls://HOST:PORT, separated by commas. Processes with the same --replication-url and --replication-name take over from each other; only one delivers the messages of a slot. Empty: the write-ahead log is in --data")
	f.StringVar(&l.config.Name, "replication-name", "posthorn", "name of this installation in the NATS servers")
	f.StringVar(&l.config.Installation, "replication-installation", unnamed, "identity of this installation: the same in all of its processes, and another one in each other installation. It is recorded in the streams, and a process with another one does not use them")
	f.IntVar(&l.config.Replicas, "replication-replicas", jetstream.MinReplicas, "number of NATS servers with a copy of each call")
	f.StringVar(&l.maxBytes, "replication-max-bytes", "4Gi", "size of the stream of a slot; above 70 % calls are answered 503. The object stores get four times as much")
	f.StringVar(&l.config.Credentials, "replication-credentials", "", "file with the credentials of the NATS user (.creds), read again at each connection")
	f.StringVar(&l.config.CA, "replication-ca", "", "PEM file of the CAs of the NATS servers' certificates; empty: the system's")
	f.StringVar(&l.config.Cert, "replication-cert", "", "PEM file of the client certificate for the NATS servers")
	f.StringVar(&l.config.Key, "replication-key", "", "PEM file of the client certificate's key")
	f.StringVar(&l.config.Monitoring, "replication-monitoring", "", "URLs of the monitoring ports of the NATS servers, separated by commas, to check that each syncs each call (sync_interval: always); empty: not checked")
	f.BoolVar(&l.config.AllowWeak, "replication-allow-weak", false, "accept settings with which the loss of one NATS server loses calls, for tests")
}

// parse validates the flags.
func (l *replicationFlags) parse() error {
	if l.config.URL == "" {
		if l.slots > 1 {
			return command.Usagef("--replication-slots needs --replication-url")
		}
		return nil
	}
	size, err := resource.ParseQuantity(l.maxBytes)
	if err != nil {
		return command.Usagef("--replication-max-bytes %q: use a size such as 4Gi", l.maxBytes)
	}
	l.config.MaxBytes = size.Value()
	if err := l.config.Validate(); err != nil {
		return command.Usagef("--replication-url: %v", err)
	}
	switch {
	case l.slots < 1 || l.slots > slots.MaxSlots:
		return command.Usagef("--replication-slots %d: use 1 to %d", l.slots, slots.MaxSlots)
	case l.standbys < 0 || l.standbys > maxStandbys:
		return command.Usagef("--replication-standbys %d: use 0 to %d", l.standbys, maxStandbys)
	}
	for namespace, slot := range l.pins {
		if slot < 0 || slot >= l.slots {
			return command.Usagef("--replication-pin %s=%d: use a slot from 0 to %d", namespace, slot, l.slots-1)
		}
	}
	return nil
}

// maxStandbys bounds the copies of a slot: each process that keeps one reads all its messages.
const maxStandbys = 4

// isReplicated reports whether the calls are stored in a replicated log.
func (d *dataFlags) isReplicated() bool { return d.log.config.URL != "" }

// service is what runs with the dispatcher of a process: control or watch gives it its live configs.
type service struct {
	// control runs beside a Dispatcher of the process with some listeners. With a replicated log, it is called each time
	// when this process becomes the owner.
	control func(context.Context, *dispatcher.Dispatcher, *dispatcher.Listeners) error
	// watch sends the live configs of all namespaces.
	watch func(context.Context, liveconfig.Sink) error
	// lockWait is how long to wait while another process has the store open.
	lockWait time.Duration
	// others run until the process ends.
	others []func(context.Context) error
}

// serve makes the dispatcher and runs the service with it.
func (d *dataFlags) serve(ctx context.Context, log *slog.Logger, s service) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, other := range s.others {
		group.Go(func() error { return other(ctx) })
	}
	if d.isReplicated() {
		group.Go(func() error { return d.serveReplicated(ctx, log, s) })
		return group.Wait()
	}
	one, err := openWhenFree(ctx, log, s.lockWait, func() (*dispatcher.Dispatcher, error) { return dispatcher.New(d.options) })
	if err != nil {
		return err
	}
	group.Go(func() error { return one.Run(ctx) })
	group.Go(func() error {
		if s.watch != nil {
			return s.watch(ctx, one)
		}
		return s.control(ctx, one, one.Listeners())
	})
	group.Go(func() error { return newNotifier(one.AdminAddr(), one.Ready, log).run(ctx) })
	return group.Wait()
}

// everyProcess is a number of standbys that no installation exceeds: processes of posthorn run compare their manifests with
// their copy.
const everyProcess = 1000

// serveReplicated is serve with a replicated log.
func (d *dataFlags) serveReplicated(ctx context.Context, log *slog.Logger, s service) error {
	if d.log.config.Installation == unnamed {
		log.Warn("--replication-installation is not set; each other process without it that uses this log takes over its messages")
	}
	o := host.Options{Options: d.options, PeerListen: d.peerListen, Lacks: d.lacks}
	var err error
	if o.Listeners, err = host.Listen(o); err != nil {
		return err
	}
	client, err := jetstream.New(d.log.config, log)
	if err != nil {
		return err
	}
	defer client.Close()
	members := host.Slots{
		Number: d.log.slots, Standbys: d.log.standbys, Pins: d.log.pins,
		Open: client.OpenSlot, OpenDirectory: client.OpenDirectory, Bus: client, Watch: s.watch,
	}
	if s.control != nil {
		members.Standbys = everyProcess
		members.Control = func(ctx context.Context, one *dispatcher.Dispatcher) error {
			return s.control(ctx, one, o.Listeners.Listeners)
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return client.Watch(ctx) })
	group.Go(func() error { return host.Run(ctx, o, members) })
	isUp := func() error { return nil } // A standby is ready, too.
	group.Go(func() error { return newNotifier(o.Listeners.AdminAddr(), isUp, log).run(ctx) })
	return group.Wait()
}

// lockWait is how long a dispatcher pod waits for the store of its predecessor: a pod that is deleted by force can
// run for some seconds beside its successor.
const lockWait = 30 * time.Second

// openWhenFree calls open again, until wait has passed, while another process has the store open.
func openWhenFree[T any](ctx context.Context, log *slog.Logger, wait time.Duration, open func() (T, error)) (T, error) {
	for end := time.Now().Add(wait); ; {
		opened, err := open()
		if !errors.Is(err, syscall.EAGAIN) || !time.Now().Before(end) {
			return opened, err
		}
		if log != nil {
			log.Info("waiting for another process to close the store", "atMost", wait.String(), "error", err)
			log = nil
		}
		select {
		case <-ctx.Done():
			return opened, err
		case <-time.After(time.Second):
		}
	}
}
