package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/cmd/internal/logs"
	"github.com/posthorn/posthorn/controllers/standalone"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/configsource"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/internal/plural"
)

const (
	drainPoll     = 250 * time.Millisecond
	drainProgress = 10 * time.Second
	// drainSettle is how long nothing must be left before a drain ends. Jobs add messages every second.
	drainSettle = 2500 * time.Millisecond
	// drainListed bounds the destinations in a progress report.
	drainListed = 20
)

func newDrain() *cobra.Command {
	var logging logs.Flags
	var data dataFlags
	var ceilings ceilingFlags
	var manifests, namespace, kubeconfig, log string
	var secrets []string
	var timeout time.Duration
	var redeliver bool
	cmd := &cobra.Command{
		Use:   "drain --data DIR {-f DIR | --system-namespace NAME}",
		Short: "Deliver what is pending in the data directory of a stopped dispatcher, and end",
		Long: `Opens the data directory of a dispatcher that does not run any more, delivers its
pending messages without accepting calls, and ends with exit code 0 when none is
left. Use it for a volume without a pod, or before a move to a replicated log.

The destinations are read from a folder of manifests or, with --system-namespace, from a
release in a cluster: the live-config Secrets of its namespace, which the command
must be permitted to list and watch. A message is kept while its destination is
not in the config, suspended or paused. The retry windows of all messages begin
again. A message that is rejected, or not accepted in its retry window, becomes a
dead letter; dead letters remain in the data directory. With --redeliver those that
are stored at the start are sent again.

Every 10 s the command prints how many messages are pending, and why. After --timeout
it ends with exit code 1 and the list of pending messages. An interrupt ends it, too; it
continues when it is started again.`,
		Example: `  posthorn drain --data /var/lib/posthorn -f ./webhooks
  posthorn drain --data /mnt/data-posthorn-dispatcher-2 --system-namespace posthorn-system --timeout 1h
  posthorn drain --data ./data --system-namespace posthorn-system --kubeconfig ~/.kube/config --egress-allow 10.20.0.0/16`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			logger, err := logging.Logger(cmd.ErrOrStderr())
			if err != nil {
				return command.UsageError(err)
			}
			bridgeLogs(logger.Handler())
			switch {
			case log != "":
				return command.Usagef("--replication-url: a replicated log is not drained; its messages are delivered by any process that runs with the same --replication-url")
			case (manifests == "") == (namespace == ""):
				return command.Usagef("set either -f or --system-namespace: the destinations are read there")
			case manifests == "" && len(secrets) > 0:
				return command.Usagef("--secret needs -f; with --system-namespace the values are in the live-config Secrets")
			case manifests != "" && kubeconfig != "":
				return command.Usagef("--kubeconfig needs --system-namespace")
			case timeout < 0:
				return command.Usagef("--timeout %v: use a positive duration, or 0 for no limit", timeout)
			}
			if manifests != "" {
				if err := command.CheckManifests(manifests); err != nil {
					return err
				}
			}
			if err := checkLoopback(data.options.AdminListen); err != nil {
				return command.Usagef("--admin-listen %q: %v", data.options.AdminListen, err)
			}
			data.sourceQuota = "none"
			if err := data.parse(); err != nil {
				return err
			}
			if err := checkDrained(data.options.DataDir); err != nil {
				return err
			}
			o := &data.options
			o.Drain, o.Logger, o.Pod, o.Version = true, logger, "drain", command.BuildVersion()
			o.Queue.DuplicateWindow = pebblestore.MaxDuplicateWindow
			o.DrainTimeout = ceilings.drain(o.DrainTimeout)
			var feed func(context.Context, *dispatcher.Dispatcher) error
			if manifests != "" {
				values, err := standalone.ReadSecretValues(secrets)
				if err != nil {
					return command.Usagef("--secret: %v", err)
				}
				policy, err := ceilings.policy(o.Egress)
				if err != nil {
					return err
				}
				o.Namespace = standalone.DefaultNamespace
				feed = func(ctx context.Context, d *dispatcher.Dispatcher) error {
					return standalone.New(standalone.Options{Dir: manifests, StateFile: filepath.Join(o.DataDir, "manifests.json"), SecretValues: values,
						Policy: policy, Logger: logger, Sink: d, Changes: d.Changes}).Run(ctx)
				}
			} else {
				client, err := kubeClient(kubeconfig)
				if err != nil {
					return err
				}
				o.Namespace = namespace
				feed = func(ctx context.Context, d *dispatcher.Dispatcher) error {
					return configsource.Watch(ctx, client, namespace, d, logger)
				}
			}
			d, err := dispatcher.New(*o)
			if err != nil {
				return err
			}
			return (&drain{d: d, feed: feed, dir: o.DataDir, timeout: timeout, redeliver: redeliver, out: cmd.OutOrStdout()}).run(cmd.Context())
		},
	}
	f := cmd.Flags()
	command.ManifestsFlag(cmd, &manifests, "folder of the manifests")
	registerSecrets(cmd, &secrets)
	f.StringVar(&namespace, "system-namespace", "", "namespace of a release, with the live-config Secrets")
	f.StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file; default: the pod's service account, or KUBECONFIG")
	f.DurationVar(&timeout, "timeout", 0, "end with exit code 1 after this time if messages are still pending; 0: no limit")
	f.BoolVar(&redeliver, "redeliver", false, "send the dead letters that are stored now, too")
	f.StringVar(&log, "replication-url", "", "refused")
	_ = f.MarkHidden("replication-url")
	ceilings.register(cmd)
	data.registerDelivery(cmd, "", "")
	f.Lookup("data").Usage = "data directory of a stopped dispatcher; required"
	f.Lookup("admin-listen").Usage = "loopback address of the admin API and metrics; empty: none"
	f.Lookup("drain-timeout").Usage = "how long an interrupt waits for deliveries in progress; raised to the longest delivery timeout and 5s"
	logging.Register(cmd)
	f.Lookup("log-level").DefValue = "warn"
	_ = f.Lookup("log-level").Value.Set("warn")
	return cmd
}

// checkLoopback checks an address that has no authentication.
func checkLoopback(address string) error {
	host, _, err := net.SplitHostPort(address)
	if address == "" || err != nil {
		return nil // parse checks the format.
	}
	if ip, err := netip.ParseAddr(host); host != "localhost" && (err != nil || !ip.IsLoopback()) {
		return errors.New("the address has no authentication; use a loopback address, for example 127.0.0.1:8081")
	}
	return nil
}

// checkDrained checks that a folder is a data directory with a store.
func checkDrained(dir string) error {
	if dir == "" {
		return command.Usagef("the data directory is missing; set --data to the data directory of a stopped dispatcher")
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return command.Usagef("--data %q is not a folder; use the data directory of a stopped dispatcher", dir)
	}
	queue := filepath.Join(dir, backup.QueueFolder)
	names, err := os.ReadDir(queue)
	switch {
	case errors.Is(err, os.ErrNotExist) && filepath.Base(filepath.Clean(dir)) == backup.QueueFolder:
		return command.Usagef("--data %q has no folder %s; use the folder above it, %s", dir, backup.QueueFolder,
			filepath.Dir(filepath.Clean(dir)))
	case errors.Is(err, os.ErrNotExist):
		return command.Usagef("--data %q has no folder %s, so no dispatcher has stored messages there; use the data directory of a stopped dispatcher", dir, backup.QueueFolder)
	case err != nil:
		return fmt.Errorf("--data: %w", err)
	case len(names) == 0:
		return command.Usagef("--data: the folder %s is empty, so it has no messages; use the data directory of a stopped dispatcher", queue)
	}
	return checkOwner(queue)
}

// drain is one run of the command.
type drain struct {
	d *dispatcher.Dispatcher
	// feed provides the config until its context is done.
	feed    func(context.Context, *dispatcher.Dispatcher) error
	dir     string
	timeout time.Duration
	// redeliver is true if the stored dead letters are redelivered.
	redeliver bool
	out       io.Writer

	started time.Time
	// first is the backlog at the start, last the one at the last poll.
	first, last dispatcher.Backlog
}

// run delivers until nothing is left, the timeout ends or ctx is done.
func (r *drain) run(ctx context.Context) error {
	first, err := r.d.Backlog()
	if err != nil {
		return errors.Join(err, r.d.Close())
	}
	r.started, r.first, r.last = time.Now(), first, first
	fmt.Fprintf(r.out, "draining %s: %s\n", r.dir, r.left())
	running, stop := context.WithCancel(ctx)
	defer stop()
	group, running := errgroup.WithContext(running)
	group.Go(func() error { return r.d.Run(running) })
	group.Go(func() error { return r.feed(running, r.d) })
	redelivered := make(chan int64, 1)
	if r.redeliver {
		group.Go(func() error {
			n, err := r.d.RedeliverAll(running)
			if err != nil && running.Err() == nil {
				return fmt.Errorf("redeliver dead letters: %w", err)
			}
			redelivered <- n
			return nil
		})
	}
	drained := false
	group.Go(func() (err error) {
		defer stop()
		drained, err = r.watch(running, redelivered)
		return err
	})
	if err := group.Wait(); err != nil {
		return err
	}
	if drained {
		return r.report()
	}
	if ctx.Err() != nil {
		return command.Interrupted(fmt.Errorf("drain interrupted: what is still pending is kept in %s; run the command again", r.dir))
	}
	r.list(len(r.last.Destinations))
	return fmt.Errorf("drain not complete after --timeout %v: %s; they are kept in %s: remove the reasons above and run the command again", r.timeout, r.left(), r.dir)
}

// watch prints the progress until nothing is left, the timeout ends or ctx is done. redelivered gets
// the number of redelivered dead letters, if they are redelivered.
func (r *drain) watch(ctx context.Context, redelivered <-chan int64) (drained bool, err error) {
	var deadline <-chan time.Time
	if r.timeout > 0 {
		deadline = time.After(r.timeout)
	}
	poll, progress := time.NewTicker(drainPoll), time.NewTicker(drainProgress)
	defer poll.Stop()
	defer progress.Stop()
	redelivering, emptySince := r.redeliver, time.Time{}
	for {
		select {
		case <-ctx.Done():
			return false, nil
		case <-deadline:
			return false, nil
		case n := <-redelivered:
			redelivering = false
			fmt.Fprintf(r.out, "redelivering %s\n", plural.Count(n, "dead letter"))
			continue
		case <-progress.C:
			r.progress()
			r.list(drainListed)
			continue
		case <-poll.C:
		}
		if r.last, err = r.d.Backlog(); err != nil {
			return false, err
		}
		switch {
		case redelivering || !r.last.Empty():
			emptySince = time.Time{}
		case emptySince.IsZero():
			emptySince = time.Now()
		case time.Since(emptySince) >= drainSettle:
			return true, nil
		}
	}
}

// left describes the rest.
func (r *drain) left() string {
	text := plural.Count(r.last.Ledger.Pending, "pending message") + " of " + plural.Count(len(r.last.Destinations), "destination")
	if n := len(r.last.Jobs); n > 0 {
		text += ", " + plural.Count(n, "unfinished job")
	}
	return text
}

func (r *drain) progress() {
	done := r.last.Ledger.Minus(r.first.Ledger)
	fmt.Fprintf(r.out, "%s: pending %d, delivered %d, filtered %d, dead letters %d\n", time.Since(r.started).Round(time.Second), r.last.Ledger.Pending, done.Delivered, done.Filtered, done.DeadLettered)
}

// list prints why messages are pending, for at most some destinations.
func (r *drain) list(most int) {
	if r.last.Waits != "" {
		fmt.Fprintf(r.out, "  %s\n", r.last.Waits)
	}
	for i, d := range r.last.Destinations {
		if i == most {
			fmt.Fprintf(r.out, "  and %s\n", plural.Count(len(r.last.Destinations)-most, "other destination"))
			break
		}
		fmt.Fprintf(r.out, "  %s: %d pending: %s\n", d.Name, d.Pending, d.Reason)
	}
	for _, job := range r.last.Jobs {
		fmt.Fprintf(r.out, "  %s\n", job)
	}
}

// report prints the result of a complete drain.
func (r *drain) report() error {
	done := r.last.Ledger.Minus(r.first.Ledger)
	fmt.Fprintf(r.out, "drained: nothing is pending; delivered %d, filtered %d, dead letters %d, discarded %d\n", done.Delivered, done.Filtered, done.DeadLettered, done.Discarded)
	if n := r.last.DeadLetters; n > 0 {
		fmt.Fprintf(r.out, "%s in %s; before you remove it, see the section Dead letters in docs/drain.md\n", plural.Count(n, "dead letter"), r.dir)
	}
	return r.last.Ledger.Balance()
}
