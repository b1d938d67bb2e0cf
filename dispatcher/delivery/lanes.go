package delivery

import (
	"cmp"
	"slices"
	"time"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// LaneState is a snapshot of a lane, for diagnosis.
type LaneState struct {
	// Source and Destination are "namespace/name".
	Source      string `json:"source"`
	Destination string `json:"destination"`
	Endpoint    string `json:"endpoint,omitempty"`
	// State is "ready" (waiting for its turn), "sending", "idle" (nothing to do now), "blocked"
	// (waiting for its share of the requests in flight), or "parked" (nothing is sent: disabled,
	// paused, missing in the config, or storage fails).
	State string `json:"state"`
	// Position is the last message of the Source's log that the lane has read; LogEnd is the end of
	// the log.
	Position uint64 `json:"position"`
	LogEnd   uint64 `json:"logEnd"`
	Pending  int64  `json:"pending"`
	Retrying int64  `json:"retrying"`
	// FirstAttempts is the part of Pending without an attempt at the endpoint. Skipped counts the
	// messages that are never attempted, because another endpoint accepted them and their retry
	// window ended or the space was needed.
	FirstAttempts int64 `json:"firstAttempts"`
	Skipped       int64 `json:"skipped,omitempty"`
	// InFlight counts requests; Leased counts leased messages, including those that wait for a
	// request.
	InFlight int `json:"inFlight"`
	Leased   int `json:"leased"`
	// OldestPending and NextRetry are absent if there is none.
	OldestPending time.Time `json:"oldestPending,omitzero"`
	NextRetry     time.Time `json:"nextRetry,omitzero"`
	// Draining: another lane takes over. Dropped: when a lane that is missing in the config is
	// dropped.
	Draining bool      `json:"draining,omitempty"`
	Dropped  time.Time `json:"dropped,omitzero"`
	// Breakers are the circuit breakers of the lane's endpoints.
	Breakers []BreakerState `json:"breakers,omitempty"`
}

// BreakerState is a snapshot of an endpoint's circuit breaker.
type BreakerState struct {
	Endpoint string                   `json:"endpoint"`
	State    liveconfig.EndpointState `json:"state"`
	// Open: only probes are sent; the next one at NextAttempt, unless one is in flight (Probing).
	Open        bool      `json:"open"`
	Probing     bool      `json:"probing,omitempty"`
	NextAttempt time.Time `json:"nextAttempt,omitzero"`
	// InFlight counts the requests of all lanes; Window is their present limit.
	InFlight int `json:"inFlight"`
	Window   int `json:"window"`
	// ConsecutiveFailures as in the report.
	ConsecutiveFailures int `json:"consecutiveFailures,omitempty"`
}

// Lanes returns the state of every lane, sorted.
func (e *Engine) Lanes() []LaneState {
	e.mu.Lock()
	lanes := make([]LaneState, 0, len(e.lanes))
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
	slices.SortFunc(lanes, func(a, b LaneState) int {
		return cmp.Or(cmp.Compare(a.Destination, b.Destination), cmp.Compare(a.Source, b.Source), cmp.Compare(a.Endpoint, b.Endpoint))
	})
	return lanes
}

// snapshot makes the snapshot of a lane. The lock is held.
func (l *lane) snapshot() LaneState {
	s := LaneState{
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
		b := BreakerState{
			Endpoint: t.name, State: t.health.state, Open: t.circuit.open, Probing: t.circuit.probing,
			InFlight: t.inFlight, Window: int(t.circuit.window), ConsecutiveFailures: t.health.consecutive,
		}
		if b.Open {
			b.NextAttempt, b.Window = t.circuit.probeAt, 1
		}
		s.Breakers = append(s.Breakers, b)
	}
	return s
}
