package delivery

import (
	"time"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Report returns every destination of a namespace's config: its ledger, including lanes of an
// earlier config and dropped ones, and the health of its endpoints. It is cheap enough to be called
// every second.
func (e *Engine) Report(namespace string) []adminapi.DestinationReport {
	now := time.Now()
	e.mu.Lock()
	destinations := e.namespaces[namespace]
	reports := make([]adminapi.DestinationReport, 0, len(destinations))
	lanes := make([][]queue.LaneID, 0, len(destinations))
	active := make([]bool, 0, len(destinations))
	for _, d := range destinations {
		r := adminapi.DestinationReport{
			Name: d.name, Generation: d.set.generation, Revision: d.set.revision,
			Endpoints: make([]adminapi.EndpointReport, 0, len(d.set.targets)),
		}
		for _, t := range d.set.targets {
			if t.machine.Refresh(now) {
				e.logState(t.liveEndpoint, now)
			}
			r.Endpoints = append(r.Endpoints, endpointReport(t.name, t.machine.Status()))
			if t.machine.Open() && d.set.active {
				r.NextAttempt = earlier(r.NextAttempt, t.machine.ProbeAt())
			}
		}
		ids := make([]queue.LaneID, 0, len(d.lanes))
		for _, l := range d.lanes {
			ids = append(ids, l.id)
		}
		reports, lanes, active = append(reports, r), append(lanes, ids), append(active, d.set.active)
	}
	e.mu.Unlock()
	for i := range reports {
		r := &reports[i]
		var nextRetry time.Time
		r.Ledger = adminapi.Ledger(e.o.Store.DestinationStats(namespace + "/" + r.Name).Ledger)
		groups := map[queue.LaneID]bool{}
		for _, id := range lanes[i] {
			s := e.o.Store.LaneStats(id)
			for j := range r.Endpoints {
				if ep := &r.Endpoints[j]; ep.Name == id.Endpoint {
					ep.FirstAttemptsPending += s.FirstAttempts
					ep.FirstAttemptsSkipped += s.Skipped
				}
			}
			if id.Any {
				if groups[id.Group()] {
					continue
				}
				groups[id.Group()] = true
				s = e.o.Store.LaneStats(id.Group())
			}
			r.Retrying += s.Retrying
			r.OldestPending = earlier(r.OldestPending, s.OldestPending)
			nextRetry = earlier(nextRetry, s.NextRetry)
		}
		r.Retrying = min(r.Retrying, r.Pending) // They were not counted at the same instant.
		switch {
		case r.Pending == 0:
			r.NextAttempt = time.Time{}
		case active[i] && !allOpen(r.Endpoints):
			r.NextAttempt = nextRetry
		}
	}
	return reports
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

// Takes reports whether a lane is part of the present config, so that a message appended to it is
// delivered eventually.
func (e *Engine) Takes(id queue.LaneID) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.lanes[id]
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
