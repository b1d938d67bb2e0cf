package delivery

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Lanes returns the state of every lane, sorted.
func (e *Engine) Lanes() []adminapi.LaneState {
	e.mu.Lock()
	lanes := make([]adminapi.LaneState, 0, len(e.registry.lanes))
	at := make([]*lane, 0, len(e.registry.lanes))
	for _, l := range e.registry.lanes {
		lanes = append(lanes, l.snapshot())
		at = append(at, l)
	}
	e.mu.Unlock()
	for i := range lanes {
		s, stats := &lanes[i], e.o.Store.LaneStats(at[i].id)
		s.Position, s.LogEnd = e.o.Store.Position(at[i].id)
		s.FirstAttempts, s.Skipped = stats.FirstAttempts, stats.Skipped
		s.Pending, s.Retrying, s.OldestPending, s.NextRetry = stats.Pending, stats.Retrying, stats.OldestPending, stats.NextRetry
	}
	slices.SortFunc(lanes, func(a, b adminapi.LaneState) int {
		return cmp.Or(cmp.Compare(a.Destination, b.Destination), cmp.Compare(a.Source, b.Source), cmp.Compare(a.Endpoint, b.Endpoint))
	})
	return lanes
}

// Report returns the destinations of a config that are in effect: their ledgers, including lanes of
// an earlier config and dropped ones, and the health of their endpoints.
func (e *Engine) Report(config liveconfig.Config) []adminapi.DestinationReport {
	now := e.o.Now()
	reports := make([]adminapi.DestinationReport, 0, len(config.Destinations))
	lanes := make([][]queue.LaneID, 0, len(config.Destinations))
	sets := make([]*destinationConfig, 0, len(config.Destinations))
	uses, inFlight := make([]use, 0, len(config.Destinations)), make([]int, 0, len(config.Destinations))
	e.mu.Lock()
	for i := range config.Destinations {
		d := e.registry.destinations[config.Namespace+"/"+config.Destinations[i].Name]
		if d == nil || d.set == nil {
			continue
		}
		r := adminapi.DestinationReport{
			Name: d.name, Generation: d.set.generation, Revision: d.set.revision,
			Endpoints: make([]adminapi.EndpointReport, 0, len(d.set.targets)),
		}
		for _, t := range d.set.targets {
			if t.machine.Refresh(now) && t.logState(e.o.Logger, now) {
				e.early.set()
			}
			if at := t.machine.RefreshAt(now); !at.IsZero() {
				d.changed.TransitionAt(at)
			}
			ep := endpointReport(t.name, t.machine.Status())
			ep.CompressionRefused = t.to.CompressionRefused()
			r.Endpoints = append(r.Endpoints, ep)
			if t.machine.Open() && d.set.active {
				r.NextAttempt = earlier(r.NextAttempt, t.machine.ProbeAt())
			}
		}
		if f := d.filterFailure; f != nil && now.Sub(f.Time) < filterFailureFor {
			r.FilterFailure = f
			d.changed.TransitionAt(f.Time.Add(filterFailureFor))
		}
		r.Unmatched = d.matches.report(d.set.redaction.redactor)
		ids, flying := make([]queue.LaneID, 0, len(d.lanes)), 0
		for _, l := range d.lanes {
			ids = append(ids, l.id)
			flying += l.inFlight
		}
		uses, inFlight = append(uses, e.limitUse(d, now)), append(inFlight, flying)
		reports, lanes, sets = append(reports, r), append(lanes, ids), append(sets, d.set)
	}
	e.mu.Unlock()
	for i := range reports {
		r := &reports[i]
		var nextRetry time.Time
		stats := e.o.Store.DestinationStats(config.Namespace + "/" + r.Name)
		r.Ledger, r.DeadLettersStored = adminapi.Ledger(stats.Ledger), stats.DeadLetters
		for _, id := range lanes[i] {
			s := e.o.Store.LaneStats(id)
			for j := range r.Endpoints {
				if ep := &r.Endpoints[j]; ep.Name == id.Endpoint {
					ep.FirstAttemptsPending += s.FirstAttempts
					ep.FirstAttemptsSkipped += s.Skipped
				}
			}
		}
		for _, s := range ledgers(e.o.Store, lanes[i]) {
			r.Retrying += s.Retrying
			r.OldestPending = earlier(r.OldestPending, s.OldestPending)
			nextRetry = earlier(nextRetry, s.NextRetry)
		}
		if !r.OldestPending.IsZero() && !sets[i].suspensions.active() {
			r.OldestExpires = e.settler.windowEnd(sets[i], r.OldestPending, now)
		}
		r.Retrying = min(r.Retrying, r.Pending) // They were not counted at the same instant.
		r.Limit = uses[i].report(r.Pending-r.Retrying, inFlight[i])
		switch {
		case r.Pending == 0:
			r.NextAttempt = time.Time{}
		case sets[i].active && !allOpen(r.Endpoints):
			r.NextAttempt = nextRetry
		}
	}
	return reports
}

// Discards returns the discards ahead, by namespace: the messages of lanes whose destination, endpoint or Source
// was removed, that were pending at the removal, sorted by destination and Source. Messages that were accepted
// after it are no loss that somebody did not intend. A message counts once for a group of lanes, as in the ledger.
func (e *Engine) Discards() map[string][]adminapi.Discard {
	e.mu.Lock()
	orphans, most := make(map[queue.LaneID]time.Time, len(e.orphans.lanes)), make(map[queue.LaneID]int64, len(e.orphans.lanes))
	for l := range e.orphans.lanes {
		orphans[l.id], most[l.id] = l.dropAt, math.MaxInt64
		if !l.lost {
			most[l.id] = l.pendingAtRemoval
		}
	}
	e.mu.Unlock()
	counted := map[queue.LaneID]bool{}
	all := map[string][]adminapi.Discard{}
	for _, id := range slices.SortedFunc(maps.Keys(orphans), func(a, b queue.LaneID) int {
		return cmp.Or(strings.Compare(a.Destination, b.Destination), strings.Compare(a.Source, b.Source), strings.Compare(a.Endpoint, b.Endpoint))
	}) {
		namespace, destination := split(id.Destination)
		_, source := split(id.Source)
		list, unit, before, after := all[namespace], discardUnit(id), int64(0), int64(0)
		if !counted[unit] {
			counted[unit] = true
			pending := e.o.Store.LaneStats(unit).Pending
			before = min(pending, most[id])
			after = pending - before
		}
		if n := len(list); n > 0 && list[n-1].Destination == destination && list[n-1].Source == source {
			list[n-1].Messages += before
			list[n-1].Later += after
			list[n-1].At = earlier(list[n-1].At, orphans[id])
			continue
		}
		all[namespace] = append(list, adminapi.Discard{Source: source, Destination: destination, Messages: before, Later: after, At: orphans[id]})
	}
	return all
}

func endpointReport(name string, s endpoint.Status) adminapi.EndpointReport {
	r := adminapi.EndpointReport{
		Name: name, State: adminapi.EndpointState(s.State), Since: s.Since, LastSuccess: s.LastSuccess, ConsecutiveFailures: s.Failures,
	}
	if failure := adminapi.Failure(s.LastFailure); !failure.Time.IsZero() {
		r.LastFailure = &failure
	}
	return r
}

// DeadLettersStored returns the number of stored dead letters of a destination ("namespace/name").
func (e *Engine) DeadLettersStored(destination string) int64 {
	return e.o.Store.DestinationStats(destination).DeadLetters
}

// markChanged marks the numbers of a destination.
func (e *Engine) markChanged(destination string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if d := e.registry.destinations[destination]; d != nil {
		d.changed.Numbers()
	}
}

// DestinationsOf implements changes.Lanes.
func (e *Engine) DestinationsOf(source string) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	lanes := e.registry.bySource[source]
	keys := make([]string, 0, len(lanes))
	for _, l := range lanes {
		keys = append(keys, l.id.Destination)
	}
	return keys
}

// SourcesOf implements changes.Lanes.
func (e *Engine) SourcesOf(destination string) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	d := e.registry.destinations[destination]
	if d == nil {
		return nil
	}
	keys := make([]string, 0, len(d.lanes))
	for _, l := range d.lanes {
		keys = append(keys, l.id.Source)
	}
	return keys
}

// Takes reports whether a lane is part of the present config, so that a message appended to it is delivered eventually.
func (e *Engine) Takes(id queue.LaneID) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.registry.lanes[id]
	return l != nil && l.destination.set != nil && l.dropAt.IsZero() && !l.draining
}

// allOpen reports whether only probes are sent.
func allOpen(endpoints []adminapi.EndpointReport) bool {
	for _, ep := range endpoints {
		if !ep.State.Open() {
			return false
		}
	}
	return len(endpoints) > 0
}

// earlier returns the earlier of two times; a zero time counts as absent.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
