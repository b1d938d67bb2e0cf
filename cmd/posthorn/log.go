package main

import (
	"context"
	"log/slog"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/queue/slots"
	"github.com/posthorn/posthorn/dispatcher/queue/slots/jetstream"
)

// logFlags are the flags of the replicated log.
type logFlags struct {
	config   jetstream.Config
	maxBytes string
}

func (l *logFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&l.config.URL, "log", "", "NATS servers whose JetStream stores the calls in place of the data directory alone: nats://HOST:PORT or tls://HOST:PORT, separated by commas. Processes with the same --log and --log-name take over from each other; only one delivers. Empty: the write-ahead log is in --data")
	f.StringVar(&l.config.Name, "log-name", "posthorn", "name of this installation in the NATS servers")
	f.IntVar(&l.config.Replicas, "log-replicas", jetstream.MinReplicas, "number of NATS servers with a copy of each call")
	f.StringVar(&l.maxBytes, "log-max-bytes", "4Gi", "size of the stream; above 70 % calls are answered 503. The object stores get four times as much")
	f.StringVar(&l.config.Credentials, "log-credentials", "", "file with the credentials of the NATS user (.creds), read again at each connection")
	f.StringVar(&l.config.CA, "log-ca", "", "PEM file of the certificates that sign those of the NATS servers; empty: the system's")
	f.StringVar(&l.config.Cert, "log-cert", "", "PEM file of the client certificate for the NATS servers")
	f.StringVar(&l.config.Key, "log-key", "", "PEM file of the client certificate's key")
	f.StringVar(&l.config.Monitoring, "log-monitoring", "", "URL of the monitoring port of a NATS server, to check that it syncs each call (sync_interval: always); empty: not checked")
	f.BoolVar(&l.config.AllowWeak, "log-allow-weak", false, "accept settings with which the loss of one NATS server loses calls, for tests")
}

// parse validates the flags.
func (l *logFlags) parse() error {
	if l.config.URL == "" {
		return nil
	}
	size, err := resource.ParseQuantity(l.maxBytes)
	if err != nil {
		return command.Usagef("--log-max-bytes %q: use a size such as 4Gi", l.maxBytes)
	}
	l.config.MaxBytes = size.Value()
	if err := l.config.Validate(); err != nil {
		return command.Usagef("--log: %v", err)
	}
	return nil
}

// isReplicated reports whether the calls are stored in a replicated log.
func (d *dataFlags) isReplicated() bool { return d.log.config.URL != "" }

// serve makes the dispatcher and calls run with it, and runs the other functions beside it. With a
// replicated log, run is called each time when this process becomes the owner.
func (d *dataFlags) serve(ctx context.Context, log *slog.Logger, run func(context.Context, *dispatcher.Dispatcher) error, others ...func(context.Context) error) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, other := range others {
		group.Go(func() error { return other(ctx) })
	}
	if d.isReplicated() {
		listeners, err := dispatcher.Listen(d.options)
		if err != nil {
			return err
		}
		d.options.Listeners = listeners
		client, err := jetstream.New(d.log.config, log)
		if err != nil {
			return err
		}
		defer client.Close()
		open := func(ctx context.Context) (slots.Remote, error) { return client.OpenSlot(ctx, 0) }
		group.Go(func() error { return dispatcher.RunSlot(ctx, d.options, open, run) })
		isUp := func() error { return nil } // A standby is ready, too.
		group.Go(func() error { return newNotifier(listeners.AdminAddr(), isUp, log).run(ctx) })
	} else {
		one, err := dispatcher.New(d.options)
		if err != nil {
			return err
		}
		group.Go(func() error { return run(ctx, one) })
		group.Go(func() error { return newNotifier(one.AdminAddr(), one.Ready, log).run(ctx) })
	}
	return group.Wait()
}
