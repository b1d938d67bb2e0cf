package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notifier reports the state of the process to systemd, for units with Type=notify: READY when
// calls are accepted, STOPPING when the process drains, and WATCHDOG while it answers requests.
type notifier struct {
	log *slog.Logger
	// ready returns nil when calls are accepted.
	ready func() error
	// alive returns an error when the process does not answer requests.
	alive func(context.Context) error
	// poll is the time between two looks at ready.
	poll time.Duration
}

// newNotifier makes the notifier of the process whose admin listener has an address.
func newNotifier(admin net.Addr, ready func() error, log *slog.Logger) *notifier {
	url := "http://" + admin.String() + "/healthz"
	return &notifier{log: log, ready: ready, poll: 100 * time.Millisecond, alive: func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		return resp.Body.Close()
	}}
}

// run reports until ctx is done. Without systemd it only waits.
func (n *notifier) run(ctx context.Context) error {
	watchdog, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return fmt.Errorf("watchdog of systemd: %w", err)
	}
	ticks := make(<-chan time.Time)
	if watchdog > 0 {
		ticker := time.NewTicker(watchdog / 3)
		defer ticker.Stop()
		ticks = ticker.C
	}
	poll := time.NewTicker(n.poll)
	defer poll.Stop()
	polls := poll.C
	for {
		select {
		case <-ctx.Done():
			n.send(daemon.SdNotifyStopping)
			return nil
		case <-polls:
			if n.ready() == nil {
				n.send(daemon.SdNotifyReady)
				polls = nil
			}
		case <-ticks:
			ask, cancel := context.WithTimeout(ctx, watchdog/3)
			err := n.alive(ask)
			cancel()
			if err != nil && ctx.Err() == nil {
				n.log.Warn("no answer from the own admin address; systemd restarts the process if this continues", "error", err)
			} else {
				n.send(daemon.SdNotifyWatchdog)
			}
		}
	}
}

func (n *notifier) send(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		n.log.Warn("report to systemd failed", "state", state, "error", err)
	}
}
