package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SourceSpec configures the write keys, the origins and the rate limit of a sender.
type SourceSpec struct {
	// If true, calls with this Source's write keys get 503 with Retry-After, so that clients
	// send them again later; messages accepted earlier are still delivered. Accepted and
	// Receiving have the reason Suspended. To revoke a write key, remove it. Default false.
	// +kubebuilder:default=false
	// +optional
	Suspend *bool `json:"suspend,omitempty"`

	// The write keys of this Source by name, one or two. Each key identifies this Source.
	// With two keys, clients can change from the old key to the new one without
	// rejected calls. An unusable key makes ResolvedRefs (SecretNotFound,
	// SecretKeyMissing, InvalidSecret) or Accepted (WriteKeyConflict, WriteKeyReserved) False; calls
	// with the other key are accepted. Calls with a removed key are answered 503
	// during the grace period (10 minutes), then 401.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:XValidation:rule="self.size() != 2 || self[0].secretKeyRef != self[1].secretKeyRef",message="the two write keys must have different references; remove one of them or change it"
	// +listType=map
	// +listMapKey=name
	// +required
	WriteKeys []WriteKey `json:"writeKeys"`

	// Browser origins that may send calls (CORS), as scheme://host[:port]. Apps and
	// extensions have schemes of their own (capacitor://localhost). https://*.shop.example stands for
	// all subdomains, null for pages without an origin, and * for every origin. A call from a
	// page of another origin is answered 403; clients that send no origin are not affected.
	// At most 64.
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=255
	// +kubebuilder:validation:items:XValidation:rule="self.matches(r'^(\\*|null|file://|[A-Za-z][A-Za-z0-9+.\\-]*://((\\*\\.)?[A-Za-z0-9._\\-]+|\\[[0-9A-Fa-f:.]+\\])(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?)$')",message="must be *, null or scheme://host[:port] without a path, the port from 1 to 65535; the host may begin with *. for subdomains"
	// +listType=set
	// +optional
	AllowedOrigins []string `json:"allowedOrigins,omitempty"`

	// The limit of calls per second, over all dispatchers together. Calls above it are answered 429 with
	// Retry-After. Default: no limit.
	// +optional
	RateLimit *CallRateLimit `json:"rateLimit,omitempty"`
}

// BuiltInSources are the names of the Sources that exist in every namespace without an object.
// WebhookDestinations get their messages by spec.sourceRefs.
var BuiltInSources = []string{"posthorn-dead-letters", "posthorn-notices"}

// WriteKey is a secret that identifies a Source.
type WriteKey struct {
	// Name of the write key within this Source, for messages, such as "main" or "2026-11".
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",message="must be lower case letters, digits and '-', and begin and end with a letter or digit"
	// +required
	Name string `json:"name"`

	// The Secret key that contains the write key. A client sends it as its HTTP
	// Basic user name, or as "writeKey" in the body. 1 to 256 bytes; white space
	// around it is ignored. The dispatchers get only its SHA-256. A change of
	// the Secret takes effect within a second. Two Sources must not share a write
	// key: one keeps it, the other one gets WriteKeyConflict. A key that was removed in
	// another namespace is reserved for it for 7 days (WriteKeyReserved).
	// +required
	SecretKeyRef SecretKeyReference `json:"secretKeyRef"`
}

// CallRateLimit bounds the calls that all dispatchers together accept from a Source. Each has a share, which follows
// the traffic.
// +kubebuilder:validation:XValidation:rule="!has(self.burst) || self.burst >= self.callsPerSecond",message="burst must be at least callsPerSecond; raise burst or leave it out"
type CallRateLimit struct {
	// Calls per second, over all dispatchers. Each call of a batch counts, and every 4 KiB of messages count as at
	// least one call. 1 to 1,000,000.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	// +required
	CallsPerSecond int32 `json:"callsPerSecond"`

	// The maximum number of calls accepted at once after an idle period, over all dispatchers. It must be
	// at least callsPerSecond; the default is twice callsPerSecond.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=2000000
	// +optional
	Burst *int32 `json:"burst,omitempty"`
}

// SourceStatus is the observed state of a Source, from the spec and from real traffic.
type SourceStatus struct {
	// The conditions Accepted, ResolvedRefs, Programmed, Ready and Receiving;
	// Stalled is present only while it is True. Conditions of other types, which
	// other controllers set, are kept.
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// The generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	Summary `json:",inline"`

	// Names of the accepted WebhookDestinations that receive this Source's calls, sorted; the first
	// 100.
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MaxLength=253
	// +optional
	Destinations []string `json:"destinations,omitempty"`

	// The time of the numbers in this status. They are written with every transition,
	// and otherwise at most every 30 s for an object and 20 times a second for all
	// objects.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`

	// The time at which the last call was accepted, as of observedTime.
	// +optional
	LastReceivedTime *metav1.Time `json:"lastReceivedTime,omitempty"`

	// The number of calls since the dispatchers' stores were created, over all
	// pods, as of observedTime.
	// +optional
	Calls *CallCounts `json:"calls,omitempty"`

	// The outcomes of the accepted calls, over all pods, as of observedTime.
	// +optional
	Messages *MessageCounts `json:"messages,omitempty"`
}

// MessageCounts is a Source's ledger: accepted = delivered + filtered + omitted +
// deadLettered + discarded + pending. A call counts once for each of its destinations.
type MessageCounts struct {
	// Messages that were stored for destinations.
	// +required
	Accepted int64 `json:"accepted"`
	// Messages that were delivered.
	// +required
	Delivered int64 `json:"delivered"`
	// Messages that a filter or the call's integrations excluded.
	// +required
	Filtered int64 `json:"filtered"`
	// Experimental: can change or be removed in a minor release.
	// Messages that a destination omitted, because its spec.request.body is null for them.
	// +optional
	Omitted int64 `json:"omitted,omitempty"`
	// Messages that became dead letters.
	// +required
	DeadLettered int64 `json:"deadLettered"`
	// Messages that were discarded because their destination was deleted or no longer receives
	// this Source's calls.
	// +required
	Discarded int64 `json:"discarded"`
	// Messages that are not attempted yet, in flight, or waiting for a retry.
	// +required
	Pending int64 `json:"pending"`
}

// CallCounts counts a Source's calls.
type CallCounts struct {
	// Calls that were stored and acknowledged, including redelivered messages and the
	// messages of audiences and deletion requests.
	// +required
	Accepted int64 `json:"accepted"`
	// Calls that were rejected (invalid, too large, over the rate limit, storage full). The calls of a
	// batch that was not read to its end are estimated by its size, which the message of Receiving shows.
	// +required
	Rejected int64 `json:"rejected"`
	// Calls with the messageId of an earlier call; they were acknowledged and not stored again.
	// +required
	Duplicates int64 `json:"duplicates"`
}

// Source declares a sender of calls: its write keys, the browser origins
// that may use it, and a rate limit. WebhookDestinations of the same namespace
// select the Sources whose calls they receive.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:validation:XValidation:rule="!self.metadata.name.startsWith('posthorn-')",message="names that begin with posthorn- are reserved for built-in Sources; choose another name"
// +kubebuilder:resource:shortName=psrc,categories=posthorn
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.reason`
// +kubebuilder:printcolumn:name="Receiving",type=string,JSONPath=`.status.conditions[?(@.type=="Receiving")].status`
// +kubebuilder:printcolumn:name="Calls",type=integer,JSONPath=`.status.calls.accepted`
// +kubebuilder:printcolumn:name="Last Received",type=date,JSONPath=`.status.lastReceivedTime`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Rejected",type=integer,JSONPath=`.status.calls.rejected`,priority=1
// +kubebuilder:printcolumn:name="Duplicates",type=integer,JSONPath=`.status.calls.duplicates`,priority=1
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`,priority=1
type Source struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec SourceSpec `json:"spec"`
	// +kubebuilder:default={reason: "Pending", message: "waiting for the operator", conditions: {{type: "Accepted", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "ResolvedRefs", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Programmed", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Ready", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Receiving", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	// +optional
	Status SourceStatus `json:"status,omitempty"`
}

// SourceList is a list of Sources.
// +kubebuilder:object:root=true
type SourceList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	// +required
	Items []Source `json:"items"`
}
