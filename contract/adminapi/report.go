package adminapi

import (
	"time"

	"github.com/posthorn/posthorn/analytics/event"
)

// Report is the report of one dispatcher pod on GET /report: its revisions and its traffic. It
// contains no secrets, no URLs and no user data.
type Report struct {
	// Pod is the pod's name.
	Pod string `json:"pod"`
	// Cursor identifies the state that the report describes; see Client.Report.
	Cursor string `json:"cursor,omitempty"`
	// Delta is true if the report has only what changed since the cursor of the request; see
	// Index.Merge.
	Delta bool `json:"delta,omitempty"`
	// Ready is true once the pod has loaded its first full config.
	Ready bool `json:"ready"`
	// Namespaces are the namespaces, sorted by name. A delta has the namespaces with a change.
	Namespaces []NamespaceReport `json:"namespaces,omitempty"`
	// RemovedNamespaces are the namespaces that were removed since the cursor, sorted, in a delta.
	RemovedNamespaces []string `json:"removedNamespaces,omitempty"`
	// Configs are the states of the live configs, sorted by namespace. They are complete in a
	// delta, too.
	Configs []ConfigReport `json:"configs,omitempty"`
	// Shares is the number of the shares of limits that the pod applies; 0 if the pod has the whole limits.
	Shares int64 `json:"shares,omitempty"`
	// AboveShares are the objects with an endpoint that still has more requests in flight than its share, sorted:
	// "namespace/section/name".
	AboveShares []string `json:"aboveShares,omitempty"`
	// Storage of the pod.
	Storage StorageReport `json:"storage"`
	// Replication is the pod's part in a replicated log; nil for a pod whose log is on its volume.
	Replication *ReplicationReport `json:"replication,omitempty"`
}

// ReplicationReport is the part of a pod in a replicated log.
type ReplicationReport struct {
	// Epoch is the number of the owner's claim. Of two owners, the one with the lower epoch has lost
	// the messages to the other one.
	Epoch uint64 `json:"epoch,omitempty"`
	// Slot is the slot of the report.
	Slot int `json:"slot,omitempty"`
	// Number is the number of slots of the log in the report of a pod; 0 in the report of a slot.
	// The report has no namespaces: GET /slots/N/report lists the namespaces of slot N. Slots are the slots that
	// the pod owns, sorted.
	Number int   `json:"number,omitempty"`
	Slots  []int `json:"slots,omitempty"`
	// Standbys is the number of other processes that should keep a copy of each slot, at least, in the report of a pod.
	Standbys int `json:"standbys,omitempty"`
}

// HasSlots reports whether a pod of a replicated log sent the report, whose slots have reports of their own. The
// ReplicationReport may be nil.
func (l *ReplicationReport) HasSlots() bool { return l != nil && l.Number > 0 }

// ConfigReport is the state of a namespace's live config. A namespace without a number, and a removed
// one, have none unless there is something else to report.
type ConfigReport struct {
	Namespace string `json:"namespace"`
	// Number is the highest number of a live config that was in effect, also before a restart; 0
	// if no config had a number.
	Number int64 `json:"number,omitempty"`
	// Missing is when the namespace's live config was lost although it was not deleted; zero if
	// there is one. The namespace's messages are then parked: neither sent nor discarded.
	Missing time.Time `json:"missing,omitzero"`
	// Parked are the objects without a config that were not deleted, sorted by Object.
	Parked []ParkedObject `json:"parked,omitempty"`
	// Discards are the discards ahead, sorted by destination and Source.
	Discards []Discard `json:"discards,omitempty"`
	// Reserved are the write keys that only a Source of the namespace may have although its live
	// config has none with them, sorted by SHA256: keys that the last config reserved, and keys of
	// parked Sources.
	Reserved []ReservedKey `json:"reserved,omitempty"`
}

// ReservedKey is a write key that was removed, or whose Source is parked since then.
type ReservedKey struct {
	SHA256    string    `json:"sha256"`
	RemovedAt time.Time `json:"removedAt"`
}

// NamespaceReport is one namespace's part of a Report. In a delta it has the changed objects.
type NamespaceReport struct {
	Namespace string `json:"namespace"`
	// Complete is true if the namespace of a delta has all its objects.
	Complete bool `json:"complete,omitempty"`
	// Removed names the objects that were removed since the cursor, in a delta.
	Removed RemovedObjects `json:"removed,omitzero"`
	// Revision of the Config that is in effect.
	Revision string `json:"revision"`
	// Refused is set while the newest config of the namespace is rejected.
	Refused *RefusedConfig `json:"refused,omitempty"`
	// Sources and Destinations, sorted by name.
	Sources      []SourceReport      `json:"sources,omitempty"`
	Destinations []DestinationReport `json:"destinations,omitempty"`
	// Audiences, sorted by name.
	Audiences []AudienceReport `json:"audiences,omitempty"`
	// Deletions, sorted by name.
	Deletions []DeletionReport `json:"deletions,omitempty"`
	// Redeliveries, sorted by name.
	Redeliveries []RedeliveryReport `json:"redeliveries,omitempty"`
}

// RemovedObjects are names, sorted.
type RemovedObjects struct {
	Sources      []string `json:"sources,omitempty"`
	Destinations []string `json:"destinations,omitempty"`
	Audiences    []string `json:"audiences,omitempty"`
	Deletions    []string `json:"deletions,omitempty"`
	Redeliveries []string `json:"redeliveries,omitempty"`
}

// ParkedObject is an object whose data the pod keeps and does not use: it is missing in the live
// config, and was not deleted.
type ParkedObject struct {
	// Object is "section/name"; see liveconfig.Ref.
	Object string `json:"object"`
	// Number of the last live config that contained the object.
	Number int64     `json:"number"`
	Since  time.Time `json:"since"`
}

// Discard is the removal of pending messages at the end of the grace period, because their owner has
// deleted their destination, endpoint or Source. It does not take place if the owner restores the
// object before.
type Discard struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	// Messages that were pending at the deletion and are pending now, and Later those that were accepted after it:
	// the Source's calls until the end of the grace period, which the destination gets if it is restored. They
	// count as in the ledger.
	Messages int64     `json:"messages"`
	Later    int64     `json:"later,omitempty"`
	At       time.Time `json:"at"`
}

// RedeliveryReport is the state of the pod's part of a Redelivery.
type RedeliveryReport struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// UID of the object that the pod has in its config.
	UID string `json:"uid"`
	// Begun is true when the pod has recorded its part of this object's run. The fields
	// below are zero before.
	Begun bool `json:"begun,omitempty"`
	// Matched counts the selected dead letters, Redelivered those that are pending again,
	// and Left those that cannot be redelivered, because the destination no longer has
	// their Source or endpoint.
	Matched     int64 `json:"matched,omitempty"`
	Redelivered int64 `json:"redelivered,omitempty"`
	Left        int64 `json:"left,omitempty"`
	// Done is true when the part has ended: no selected dead letter is left to process, or
	// the pod stopped after repeated errors (Failed).
	Done   bool `json:"done,omitempty"`
	Failed bool `json:"failed,omitempty"`
	// Error is the last error, which is retried unless Failed.
	Error string `json:"error,omitempty"`
	// Completed is true when the end of the whole run is recorded, and AlreadyDone when it
	// was recorded for another object with the same ID.
	Completed   bool `json:"completed,omitempty"`
	AlreadyDone bool `json:"alreadyDone,omitempty"`
}

// DeletionReport is the state of a deletion request in the pod.
type DeletionReport struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// Owner is true on the pod that sends the notifications; the other fields are zero elsewhere.
	Owner bool `json:"owner,omitempty"`
	// Started is when the notifications were planned; zero before.
	Started       time.Time            `json:"started,omitzero"`
	Notifications []NotificationReport `json:"notifications,omitempty"`
	// Completed is true when the end of a run without failures is recorded, and
	// AlreadyDone when it was recorded for another object with the same ID.
	Completed   bool `json:"completed,omitempty"`
	AlreadyDone bool `json:"alreadyDone,omitempty"`
	// DeadlineExceeded is true when the deadline ended the run.
	DeadlineExceeded bool `json:"deadlineExceeded,omitempty"`
}

// NotificationReport is the outcome for one destination of a deletion request.
type NotificationReport struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	// State is one of the constants below; Reason is the reason of a dead letter.
	State  string    `json:"state"`
	Reason string    `json:"reason,omitempty"`
	Time   time.Time `json:"time"`
}

// States of a notification, as in the API.
const (
	NotificationPending      = "Pending"
	NotificationDelivered    = "Delivered"
	NotificationDeadLettered = "DeadLettered"
	NotificationDiscarded    = "Discarded"
)

// ReasonDeadlineExceeded is the reason of a notification that the deadline ended,
// and of its dead letter.
const ReasonDeadlineExceeded = "DeadlineExceeded"

// AudienceReport is the state of an audience in the pod.
type AudienceReport struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// Owner is true on the pod that stores the members; the other fields are zero elsewhere.
	Owner bool `json:"owner,omitempty"`
	// Members as of the last sync.
	Members int64 `json:"members,omitempty"`
	// LastSync is when the last sync was accepted; zero before the first. Added, Removed and
	// Changed are its results.
	LastSync time.Time `json:"lastSync,omitzero"`
	Added    int64     `json:"added,omitempty"`
	Removed  int64     `json:"removed,omitempty"`
	Changed  int64     `json:"changed,omitempty"`
	// Unsent is how many identify calls of the last sync are not in the queue yet. Waits is the
	// reason of the wait, if any.
	Unsent int64  `json:"unsent,omitempty"`
	Waits  string `json:"waits,omitempty"`
	// LastRefused is when a sync was last rejected since the start of the pod; Refusal is the
	// reason.
	LastRefused time.Time `json:"lastRefused,omitzero"`
	Refusal     string    `json:"refusal,omitempty"`
}

// RefusedConfig is a config that the pod rejected.
type RefusedConfig struct {
	Revision string `json:"revision"`
	Error    string `json:"error"`
}

// SourceReport is the state of a Source in the pod.
type SourceReport struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`
	// The numbers count since the creation of the pod's store. Accepted is durable. After a crash,
	// Rejected and Duplicates lack the calls of the last 10 seconds.
	Accepted   int64 `json:"accepted"`
	Rejected   int64 `json:"rejected"`
	Duplicates int64 `json:"duplicates"`
	// LastAccepted and LastRejected are zero if there was none. After a restart, LastAccepted can be a
	// minute too old.
	LastAccepted time.Time `json:"lastAccepted,omitzero"`
	LastRejected time.Time `json:"lastRejected,omitzero"`
	// LastRejection is the reason in words. It excludes calls that were rejected because the Source
	// is suspended.
	LastRejection string `json:"lastRejection,omitempty"`
	// Defects counts accepted calls.
	Defects CallDefects `json:"defects,omitzero"`
	// Messages is the durable ledger of the calls: each call counts once per destination (or
	// endpoint, under EveryEndpoint) that gets it, including deleted destinations.
	Messages Ledger `json:"messages"`
	// StoragePressure is true while calls are rejected because storage, the namespace's share or the
	// Source's quota is full. Share is nil otherwise.
	StoragePressure bool          `json:"storagePressure,omitempty"`
	Share           *StorageShare `json:"share,omitempty"`
	// Limit is the use of spec.rateLimit.
	Limit LimitUse `json:"limit,omitzero"`
}

// LimitUse is the traffic that the limits of an object bound, in a pod that has a share of them. It is zero for little
// traffic.
type LimitUse struct {
	// Used is in millionths of the total: of the rate, or of maxInFlight if that is more.
	Used int64 `json:"used,omitempty"`
	// Limited is true if more traffic waits for the pod's share.
	Limited bool `json:"limited,omitempty"`
}

// StorageShare is a part of a pod's disk and its use by undelivered calls.
type StorageShare struct {
	UsedBytes int64 `json:"usedBytes"`
	// MaxBytes is the share of the namespace, or the Source's quota; 0 for no bound.
	MaxBytes int64 `json:"maxBytes"`
	// Quota is true if both count the Source alone.
	Quota bool `json:"quota,omitempty"`
}

// CallDefects counts accepted calls of which something could not be read or kept.
type CallDefects struct {
	// Calls whose time is not a time: it counts as missing.
	Timestamp         int64 `json:"timestamp,omitempty"`
	OriginalTimestamp int64 `json:"originalTimestamp,omitempty"`
	SentAt            int64 `json:"sentAt,omitempty"`
	// Clock counts calls whose timestamp was not corrected, because sentAt is too far from the time of receipt.
	Clock int64 `json:"clock,omitempty"`
	// Encoding counts calls with bytes that are not UTF-8.
	Encoding int64 `json:"encoding,omitempty"`
}

// ByName returns the counters in the order of event.DefectNames.
func (d *CallDefects) ByName() [len(event.DefectNames)]*int64 {
	return [...]*int64{&d.Timestamp, &d.OriginalTimestamp, &d.SentAt, &d.Clock, &d.Encoding}
}

// Ledger counts the outcomes of messages. It is durable and balances: accepted = delivered +
// filtered + omitted + deadLettered + discarded + pending.
type Ledger struct {
	Accepted  int64 `json:"accepted"`
	Delivered int64 `json:"delivered"`
	Filtered  int64 `json:"filtered"`
	// Omitted messages have the body null in spec.request.
	Omitted      int64 `json:"omitted,omitempty"`
	DeadLettered int64 `json:"deadLettered"`
	// Discarded messages were pending when their owner deleted their destination, endpoint or
	// Source.
	Discarded int64 `json:"discarded"`
	Pending   int64 `json:"pending"`
}

// DestinationReport is the state of a destination in the pod.
type DestinationReport struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Revision   string `json:"revision"`

	Ledger
	// DeadLettersStored is the number of dead letters that are stored now; DeadLettered also
	// counts those that were redelivered, removed or expired since.
	DeadLettersStored int64 `json:"deadLettersStored,omitempty"`
	// DeadLettersForwarded is the number of dead letters that were forwarded to another
	// destination. It is durable.
	DeadLettersForwarded int64 `json:"deadLettersForwarded,omitempty"`
	// Retrying is the part of Pending that failed at least once.
	Retrying int64 `json:"retrying"`
	// OldestPending is when the oldest pending message was accepted; zero if none is pending.
	OldestPending time.Time `json:"oldestPending,omitzero"`
	// OldestExpires is the end of its retry window; zero if none is pending, and while the destination is suspended.
	OldestExpires time.Time `json:"oldestExpires,omitzero"`
	// NextAttempt is when the next retry or probe is due; zero when none is planned.
	NextAttempt time.Time        `json:"nextAttempt,omitzero"`
	Endpoints   []EndpointReport `json:"endpoints,omitempty"`
	// FilterFailure is the last failure of the filter's expression since the destination was changed, unless it is
	// older than 10 minutes; the call is a dead letter.
	FilterFailure *Failure `json:"filterFailure,omitempty"`
	// Unmatched are paths of spec.redact that matched no message since the destination was changed; nil if each matched
	// one, or there were few messages.
	Unmatched *UnmatchedPaths `json:"unmatched,omitempty"`
	// Limit is the use of spec.delivery.rateLimit and maxInFlight, of the endpoint that uses most.
	Limit LimitUse `json:"limit,omitzero"`
}

// EndpointState is the health of an endpoint, as in the API.
type EndpointState string

// The endpoint states, from best to worst after Idle.
const (
	EndpointIdle        EndpointState = "Idle"
	EndpointHealthy     EndpointState = "Healthy"
	EndpointDegraded    EndpointState = "Degraded"
	EndpointCircuitOpen EndpointState = "CircuitOpen"
	EndpointGone        EndpointState = "Gone"
)

// Open reports whether only probes are sent.
func (s EndpointState) Open() bool { return s == EndpointCircuitOpen || s == EndpointGone }

// EndpointReport is one endpoint's traffic in the pod.
type EndpointReport struct {
	Name  string        `json:"name"`
	State EndpointState `json:"state"`
	// Since is when the endpoint entered State.
	Since       time.Time `json:"since,omitzero"`
	LastSuccess time.Time `json:"lastSuccess,omitzero"`
	// ConsecutiveFailures since the last success.
	ConsecutiveFailures int `json:"consecutiveFailures,omitempty"`
	// LastFailure is kept after a recovery; compare its time with LastSuccess. An Idle endpoint
	// with a LastFailure was changed since, and not attempted again.
	LastFailure *Failure `json:"lastFailure,omitempty"`
	// FirstAttemptsPending counts the messages without an attempt at the endpoint. Under
	// AnyEndpoint another endpoint may have accepted them.
	FirstAttemptsPending int64 `json:"firstAttemptsPending,omitempty"`
	// FirstAttemptsSkipped counts the messages that were never sent to this endpoint of several
	// under AnyEndpoint, because their retry window ended or the space was needed. Messages that no
	// other endpoint accepted are dead letters. It is durable.
	FirstAttemptsSkipped int64 `json:"firstAttemptsSkipped,omitempty"`
	// CompressionRefused is true if the endpoint answered 415 to a compressed request, and gets uncompressed ones since.
	CompressionRefused bool `json:"compressionRefused,omitempty"`
}

// UnmatchedPaths are paths, such as drop[context.ip], that are in none of a number of messages.
type UnmatchedPaths struct {
	Messages int64    `json:"messages"`
	Paths    []string `json:"paths"`
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
	// LackingBytes must become free before calls are accepted again; 0 without Pressure, or if that is not known.
	LackingBytes int64 `json:"lackingBytes,omitempty"`
	// DaysLeft is for how many days, rounded up, the disk lasts at the present rate until it reaches
	// the high-water mark; 0 if it lasts more than 30 days or the rate is not known yet.
	DaysLeft int `json:"daysLeft,omitempty"`
}
