package delivery

import (
	"cmp"
	"slices"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// Lanes returns the state of every lane, sorted.
func (e *Engine) Lanes() []adminapi.LaneState {
	e.mu.Lock()
	lanes := make([]adminapi.LaneState, 0, len(e.lanes))
	at := make([]*lane, 0, len(e.lanes))
	for _, l := range e.lanes {
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

// snapshot makes the snapshot of a lane. The lock is held.
func (l *lane) snapshot() adminapi.LaneState {
	s := adminapi.LaneState{
		Source: l.id.Source, Destination: l.id.Destination, Endpoint: l.id.Endpoint, State: "idle",
		InFlight: l.inFlight, Leased: l.leased, Draining: l.draining, Dropped: l.dropAt,
	}
	switch {
	case l.parked():
		s.State = "parked"
	case l.waited:
		s.State = "blocked"
	case l.inFlight > 0:
		s.State = "sending"
	case l.queued:
		s.State = "ready"
	}
	for _, t := range l.targets {
		status := t.machine.Status()
		b := adminapi.BreakerState{
			Endpoint: t.name, State: adminapi.EndpointState(status.State), Open: t.machine.Open(), Probing: t.machine.Probing(),
			InFlight: t.inFlight, Window: t.machine.Window(), ConsecutiveFailures: status.Failures,
		}
		if b.Open {
			b.NextAttempt = t.machine.ProbeAt()
		}
		s.Breakers = append(s.Breakers, b)
	}
	return s
}
