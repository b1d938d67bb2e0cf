package dispatcher

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/internal/plural"
)

// keepOrphans is the grace period of Options.Drain: a drain may run with an incomplete config.
const keepOrphans = 100 * 365 * 24 * time.Hour

// Backlog is the work of a Dispatcher with Options.Drain.
type Backlog struct {
	// Ledger is the sum over all destinations, those without a config included.
	Ledger queue.Ledger
	// DeadLetters is the number of stored dead letters.
	DeadLetters int64
	// Waits is why nothing is delivered yet; empty after the first full config.
	Waits string
	// Destinations are those with pending messages, sorted by name.
	Destinations []DestinationBacklog
	// Jobs are the unfinished jobs that add messages, with their reason to wait, sorted.
	Jobs []string
}

// DestinationBacklog is what is pending for a destination.
type DestinationBacklog struct {
	// Name is "namespace/name".
	Name    string
	Pending int64
	// Reason is why messages are pending.
	Reason string
}

// Empty reports whether nothing is left to deliver.
func (b Backlog) Empty() bool {
	return b.Waits == "" && b.Ledger.Pending == 0 && len(b.Jobs) == 0
}

// Backlog returns the pending messages and the unfinished jobs.
func (d *Dispatcher) Backlog() (b Backlog, err error) {
	view := d.gate.View()
	if view == nil {
		b.Waits = "waiting for the first full config"
	} else if b.Jobs, err = d.unfinishedJobs(view); err != nil {
		return b, err
	}
	pending := map[string]int64{}
	for _, name := range d.store.Destinations() {
		stats := d.store.DestinationStats(name)
		b.Ledger, b.DeadLetters = b.Ledger.Plus(stats.Ledger), b.DeadLetters+stats.DeadLetters
		if stats.Ledger.Pending > 0 {
			pending[name] = stats.Ledger.Pending
		}
	}
	discards, reports := d.engine.Discards(), map[string][]adminapi.DestinationReport{}
	for _, name := range slices.Sorted(maps.Keys(pending)) {
		left := DestinationBacklog{Name: name, Pending: pending[name], Reason: b.Waits}
		if view != nil {
			namespace, _, _ := strings.Cut(name, "/")
			if _, known := reports[namespace]; !known {
				config, _ := view.Namespace(namespace)
				reports[namespace] = d.engine.Report(config.Config)
			}
			left.Reason = reasonPending(view, name, reports[namespace], discards[namespace])
		}
		b.Destinations = append(b.Destinations, left)
	}
	return b, nil
}

// RedeliverAll redelivers the dead letters of all destinations that were stored before it began, after
// the first full config. It keeps those that no lane of the config takes.
func (d *Dispatcher) RedeliverAll(ctx context.Context) (redelivered int64, err error) {
	for d.gate.View() == nil {
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	for _, name := range d.store.Destinations() {
		p, err := redelivery.Run(ctx, d.gate, d.letters(), name, adminapi.DeadLetterSelector{}, redelivery.Options{Takes: d.engine.Takes})
		redelivered += p.Redelivered
		if err != nil {
			return redelivered, fmt.Errorf("%s: %w", name, err)
		}
	}
	return redelivered, nil
}

// unfinishedJobs lists the jobs that add messages to the store.
func (d *Dispatcher) unfinishedJobs(view *liveconfig.View) (jobs []string, err error) {
	for name, reason := range d.members.Unfinished() {
		job := "sync of Audience " + name
		if reason != "" {
			job += ": " + reason
		}
		jobs = append(jobs, job)
	}
	for _, name := range d.redeliveries.Unfinished(view) {
		jobs = append(jobs, "Redelivery "+name)
	}
	forwards, err := d.forwards.Unfinished(view)
	for _, name := range forwards {
		jobs = append(jobs, "forwarding the dead letters of WebhookDestination "+name)
	}
	slices.Sort(jobs)
	return jobs, err
}

// reasonPending returns why messages of a destination are pending.
func reasonPending(view *liveconfig.View, key string, reports []adminapi.DestinationReport, discards []adminapi.Discard) string {
	namespace, name, _ := strings.Cut(key, "/")
	config, _ := view.Namespace(namespace)
	i := slices.IndexFunc(config.Destinations, func(d liveconfig.Destination) bool { return d.Name == name })
	r := slices.IndexFunc(reports, func(r adminapi.DestinationReport) bool { return r.Name == name })
	switch {
	case view.Unusable(namespace):
		return "the live config of its namespace is missing or rejected; the log has the reason"
	case i < 0:
		return "the WebhookDestination is not in the config; create it again, or leave its messages in the folder"
	case config.Destinations[i].State == liveconfig.Suspended:
		return "the WebhookDestination is suspended; set spec.suspend to false"
	case config.Destinations[i].State == liveconfig.Paused:
		return fmt.Sprintf("the WebhookDestination is paused: %s; its condition Accepted has the details", config.Destinations[i].PausedReason)
	case r < 0:
		return "the config is being loaded"
	}
	var reasons []string
	for _, d := range discards {
		if n := d.Messages + d.Later; d.Destination == name && n > 0 {
			reasons = append(reasons, fmt.Sprintf("%s of Source %s: the destination does not receive calls of this Source, or their endpoint was removed", plural.Count(n, "message"), d.Source))
		}
	}
	for _, e := range reports[r].Endpoints {
		if e.ConsecutiveFailures == 0 && !e.State.Open() {
			continue
		}
		reason := fmt.Sprintf("endpoint %s is %s", e.Name, e.State)
		if e.LastFailure != nil {
			reason += ", last failure " + e.LastFailure.Reason
			if e.LastFailure.Message != "" {
				reason += ": " + e.LastFailure.Message
			}
		}
		reasons = append(reasons, reason)
	}
	if next := reports[r].NextAttempt; !next.IsZero() {
		reasons = append(reasons, "next attempt at "+next.UTC().Format(time.RFC3339))
	}
	if len(reasons) == 0 {
		return "being delivered"
	}
	return strings.Join(reasons, "; ")
}
