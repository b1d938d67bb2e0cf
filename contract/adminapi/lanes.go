package adminapi

import "time"

// LaneState is a snapshot of a lane, for diagnosis.
type LaneState struct {
	// Source and Destination are "namespace/name".
	Source      string `json:"source"`
	Destination string `json:"destination"`
	Endpoint    string `json:"endpoint,omitempty"`
	// State is "ready" (waiting for its turn), "sending", "idle" (nothing to do now), "blocked"
	// (waiting for its share of the requests in flight), or "parked" (nothing is sent: suspended,
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
	Endpoint string        `json:"endpoint"`
	State    EndpointState `json:"state"`
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
