package liveconfig

import "time"

// Report is what one dispatcher pod says of itself on GET /report: which
// revisions it runs and what its traffic looks like. It carries no secrets, no
// URLs and no user data.
type Report struct {
	// Pod is the pod's name.
	Pod string `json:"pod"`
	// Ready is true once the pod has loaded its first full config.
	Ready bool `json:"ready"`
	// Tenants, sorted by name.
	Tenants []TenantReport `json:"tenants,omitempty"`
	// Storage of the pod.
	Storage StorageReport `json:"storage"`
}

// TenantReport is one tenant's part of a Report.
type TenantReport struct {
	Tenant string `json:"tenant"`
	// Revision of the Config that is in effect.
	Revision string `json:"revision"`
	// Refused is set while the newest config that the pod saw was refused.
	Refused *RefusedConfig `json:"refused,omitempty"`
	// Sources and Destinations, sorted by name.
	Sources      []SourceReport      `json:"sources,omitempty"`
	Destinations []DestinationReport `json:"destinations,omitempty"`
	// Audiences, sorted by name.
	Audiences []AudienceReport `json:"audiences,omitempty"`
	// Deletions, sorted by name.
	Deletions []DeletionReport `json:"deletions,omitempty"`
}

// DeletionReport is a deletion request as the pod runs it.
type DeletionReport struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// Owner is true on the pod that sends the notifications; the rest is zero elsewhere.
	Owner bool `json:"owner,omitempty"`
	// Started is when the notifications were decided; zero before.
	Started       time.Time            `json:"started,omitzero"`
	Notifications []NotificationReport `json:"notifications,omitempty"`
}

// NotificationReport is one destination that is told of a deletion request.
type NotificationReport struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	// State is one of the constants below; Reason is why it was dead-lettered.
	State  string    `json:"state"`
	Reason string    `json:"reason,omitempty"`
	Time   time.Time `json:"time"`
}

// States of a notification, as in the API.
const (
	NotificationPending      = "Pending"
	NotificationDelivered    = "Delivered"
	NotificationFiltered     = "Filtered"
	NotificationDeadLettered = "DeadLettered"
	NotificationDiscarded    = "Discarded"
)

// AudienceReport is an audience as the pod runs it.
type AudienceReport struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// Owner is true on the pod that keeps the members; the rest is zero elsewhere.
	Owner bool `json:"owner,omitempty"`
	// Members as of the last sync.
	Members int64 `json:"members,omitempty"`
	// LastSync is when the last sync was taken; zero before the first. Added,
	// Removed and Changed are what it found.
	LastSync time.Time `json:"lastSync,omitzero"`
	Added    int64     `json:"added,omitempty"`
	Removed  int64     `json:"removed,omitempty"`
	Changed  int64     `json:"changed,omitempty"`
	// Unsent is how many identify calls of the last sync are not in the queue yet.
	// Waits says what they wait for, if anything.
	Unsent int64  `json:"unsent,omitempty"`
	Waits  string `json:"waits,omitempty"`
	// LastRefused is when a sync was refused last since the pod started, and Refusal why.
	LastRefused time.Time `json:"lastRefused,omitzero"`
	Refusal     string    `json:"refusal,omitempty"`
}

// RefusedConfig is a config that the pod did not take.
type RefusedConfig struct {
	Revision string `json:"revision"`
	Error    string `json:"error"`
}

// SourceReport is a Source as the pod runs it.
type SourceReport struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// Accepted is durable: it counts from the day the pod's store was made.
	// Rejected and Duplicates count from the start of the pod.
	Accepted   int64 `json:"accepted"`
	Rejected   int64 `json:"rejected"`
	Duplicates int64 `json:"duplicates"`
	// LastAccepted and LastRejected are zero when there was none since the start.
	LastAccepted time.Time `json:"lastAccepted,omitzero"`
	LastRejected time.Time `json:"lastRejected,omitzero"`
	// LastRejection says why, in words. Calls that a disabled Source refused are not told.
	LastRejection string `json:"lastRejection,omitempty"`
	// Messages is the durable ledger of the calls: each counts once for each
	// destination (or endpoint, under EveryEndpoint) that it is for, those that are deleted by now included.
	Messages Ledger `json:"messages"`
	// StoragePressure is true while calls are refused because storage or the Source's quota is full.
	StoragePressure bool `json:"storagePressure,omitempty"`
}

// Ledger says what became of messages. It is durable and balances:
// accepted = delivered + filtered + deadLettered + discarded + pending.
type Ledger struct {
	Accepted     int64 `json:"accepted"`
	Delivered    int64 `json:"delivered"`
	Filtered     int64 `json:"filtered"`
	DeadLettered int64 `json:"deadLettered"`
	// Discarded messages were pending when their owner deleted what they were for.
	Discarded int64 `json:"discarded"`
	Pending   int64 `json:"pending"`
}

// DestinationReport is a destination as the pod runs it.
type DestinationReport struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`

	Ledger
	// Retrying is the part of Pending that failed at least once.
	Retrying int64 `json:"retrying"`
	// OldestPending is when the oldest pending message was accepted; zero when none waits.
	OldestPending time.Time `json:"oldestPending,omitzero"`
	// NextAttempt is when the next retry or probe is due; zero when none is planned.
	NextAttempt time.Time        `json:"nextAttempt,omitzero"`
	Endpoints   []EndpointReport `json:"endpoints,omitempty"`
}

// EndpointState is the health of an endpoint, as in the API.
type EndpointState string

// The endpoint states, from best to worst after Idle.
const (
	EndpointIdle        EndpointState = "Idle"
	EndpointHealthy     EndpointState = "Healthy"
	EndpointDegraded    EndpointState = "Degraded"
	EndpointCircuitOpen EndpointState = "CircuitOpen"
)

// EndpointReport is one endpoint's traffic as the pod saw it.
type EndpointReport struct {
	Name  string        `json:"name"`
	State EndpointState `json:"state"`
	// Since is when the endpoint entered State.
	Since       time.Time `json:"since,omitzero"`
	LastSuccess time.Time `json:"lastSuccess,omitzero"`
	// ConsecutiveFailures since the last success.
	ConsecutiveFailures int `json:"consecutiveFailures,omitempty"`
	// LastFailure stays after recovery; compare its time with LastSuccess. An
	// endpoint that has one and is Idle was changed since, and not tried again.
	LastFailure *Failure `json:"lastFailure,omitempty"`
	// FirstAttemptsPending counts the messages that the endpoint has not been sent
	// yet. Under AnyEndpoint another endpoint may have taken them.
	FirstAttemptsPending int64 `json:"firstAttemptsPending,omitempty"`
	// FirstAttemptsSkipped counts the messages that were never sent to this endpoint
	// of several under AnyEndpoint, because their retry window ended or the room was
	// needed. Those that no other endpoint took are dead letters. It is durable.
	FirstAttemptsSkipped int64 `json:"firstAttemptsSkipped,omitempty"`
}

// Failure is a failed attempt, redacted.
type Failure struct {
	Time time.Time `json:"time"`
	// Reason is one of the delivery reasons (egress.Reason), e.g. "TimedOut".
	Reason     string `json:"reason"`
	StatusCode int    `json:"statusCode,omitempty"`
	Message    string `json:"message,omitempty"`
}

// StorageReport is the pod's disk.
type StorageReport struct {
	UsedBytes  int64 `json:"usedBytes"`
	FreeBytes  int64 `json:"freeBytes"`
	TotalBytes int64 `json:"totalBytes"`
	// Pressure is true above the high-water mark: ingest answers 503.
	Pressure bool `json:"pressure,omitempty"`
}
