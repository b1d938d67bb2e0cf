package delivery

import (
	"cmp"
	"slices"
	"time"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// LaneState is what a lane does at a moment, for those who look for a fault.
type LaneState struct {
	// Source and Destination are "namespace/name".
	Source      string `json:"source"`
	Destination string `json:"destination"`
	Endpoint    string `json:"endpoint,omitempty"`
	// State is "ready" (its turn will come), "sending", "idle" (nothing to do now),
	// "blocked" (it waits for its share of what all have in flight), or "parked"
	// (nothing is sent: disabled, held, gone from the config, or storage fails).
	State string `json:"state"`
	// Position is the last message that the lane has read of its Source's log, of LogEnd.
	Position uint64 `json:"position"`
	LogEnd   uint64 `json:"logEnd"`
	Pending  int64  `json:"pending"`
	Retrying int64  `json:"retrying"`
	// FirstAttempts is the part of Pending that was not attempted at the endpoint yet.
	// Skipped counts the messages that never will be, because another endpoint took
	// them and their retry window ended or the room was needed.
	FirstAttempts int64 `json:"firstAttempts"`
	Skipped       int64 `json:"skipped,omitempty"`
	// InFlight counts requests; Leased messages, those that wait for a request included.
	InFlight int `json:"inFlight"`
	Leased   int `json:"leased"`
	// OldestPending and NextRetry are missing when there is none.
	OldestPending time.Time `json:"oldestPending,omitzero"`
	NextRetry     time.Time `json:"nextRetry,omitzero"`
	// Draining: another lane takes over. Dropped: when a lane that the config does not name is given up.
	Draining bool      `json:"draining,omitempty"`
	Dropped  time.Time `json:"dropped,omitzero"`
	// Breakers are those of the endpoints that the lane sends to.
	Breakers []BreakerState `json:"breakers,omitempty"`
}

// BreakerState is an endpoint's circuit breaker at a moment.
type BreakerState struct {
	Endpoint string                   `json:"endpoint"`
	State    liveconfig.EndpointState `json:"state"`
	// Open: only probes are sent; the next one at NextAttempt, if none is under way (Probing).
	Open        bool      `json:"open"`
	Probing     bool      `json:"probing,omitempty"`
	NextAttempt time.Time `json:"nextAttempt,omitzero"`
	// InFlight counts the requests of all lanes, of Window that there may be at present.
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
		lanes = append(lanes, l.look())
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

// look is what the engine knows of a lane. The lock is held.
func (l *lane) look() LaneState {
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
