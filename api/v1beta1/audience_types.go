package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AudienceType is the kind of value that an audience gives its users.
// +kubebuilder:validation:Enum=Audience;ComputedTrait
type AudienceType string

const (
	// AudienceTypeAudience means that the trait is true for a member and false for a former member.
	AudienceTypeAudience AudienceType = "Audience"
	// AudienceTypeComputedTrait means that the trait is the value that the sync
	// gives for each user.
	AudienceTypeComputedTrait AudienceType = "ComputedTrait"
)

// AudienceSpec names the audience and the Source whose destinations receive its
// changes. The Source, the type and the key identify an audience, so they
// cannot be changed.
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.sourceRef) || self.type == oldSelf.type",fieldPath=".type",message="type cannot be changed; delete this Audience and create another"
type AudienceSpec struct {
	// The Source whose write key syncs the members. Each change is sent as an
	// identify call to every WebhookDestination of this Source. It cannot be changed.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="sourceRef cannot be changed; delete this Audience and create another"
	// +required
	SourceRef ObjectReference `json:"sourceRef"`

	// The name of the trait, for example first_time_shoppers, also used as the audience's name in the
	// path of a sync: /v1/audiences/KEY/members. It cannot be changed. Two audiences of one Source must
	// not share a key: the younger one gets Accepted=False (KeyConflict). At most 100 characters.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=100
	// +kubebuilder:validation:XValidation:rule="self.matches('^[A-Za-z0-9_][A-Za-z0-9_.-]*$')",message="must be letters, digits, '_', '-' and '.', and not begin with '-' or '.'"
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="key cannot be changed; delete this Audience and create another"
	// +required
	Key string `json:"key"`

	// A name for people, for example "First Time Shoppers". It has no effect.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=100
	// +optional
	DisplayName string `json:"displayName,omitempty"`

	// Audience, the default: the trait is true or false. ComputedTrait: the
	// trait is a value for each user. It cannot be changed.
	// +kubebuilder:default=Audience
	// +optional
	Type AudienceType `json:"type,omitempty"`

	// The maximum percentage of members that a snapshot may remove. A snapshot
	// that would remove more is rejected (422) unless the sync allows it
	// explicitly, so that a broken export does not report every member as
	// removed. Default 50.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	// +kubebuilder:default=50
	// +optional
	MaxRemovalPercent *int32 `json:"maxRemovalPercent,omitempty"`
}

// AudienceStatus is the observed state of an audience, from its spec and its syncs.
type AudienceStatus struct {
	// The conditions Accepted, ResolvedRefs, Programmed, Ready and Synced; Stalled
	// is present only while it is True. Conditions of other types, which other
	// controllers set, are kept.
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// The generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	Summary `json:",inline"`

	// The time of the numbers in this status. They are written with every transition,
	// and otherwise at most every 30 s for an object and 20 times a second for all
	// objects.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`

	// Number of members after the last sync, as of observedTime.
	// +optional
	Members *int64 `json:"members,omitempty"`

	// The last sync that was accepted.
	// +optional
	LastSync *AudienceSync `json:"lastSync,omitempty"`
}

// AudienceSync is the outcome of a sync.
type AudienceSync struct {
	// The time at which the sync was accepted.
	// +optional
	Time *metav1.Time `json:"time,omitempty"`
	// Number of users that the sync added.
	// +required
	Added int64 `json:"added"`
	// Number of users that the sync removed.
	// +required
	Removed int64 `json:"removed"`
	// Number of users whose value the sync changed; computed traits only.
	// +required
	Changed int64 `json:"changed"`
	// Identify calls that are not in the queue yet. They are queued only as fast as
	// the destinations accept them, so that live calls are not delayed.
	// +required
	Pending int64 `json:"pending"`
}

// Audience is a set of users that another system computes and syncs to Posthorn
// over HTTP. Its destinations get an identify call for every user who joins,
// leaves, or has a new value.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=paud,categories=posthorn
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.reason`
// +kubebuilder:printcolumn:name="Synced",type=string,JSONPath=`.status.conditions[?(@.type=="Synced")].status`
// +kubebuilder:printcolumn:name="Members",type=integer,JSONPath=`.status.members`
// +kubebuilder:printcolumn:name="Pending",type=integer,JSONPath=`.status.lastSync.pending`
// +kubebuilder:printcolumn:name="Last Sync",type=date,JSONPath=`.status.lastSync.time`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Key",type=string,JSONPath=`.spec.key`,priority=1
// +kubebuilder:printcolumn:name="Source",type=string,JSONPath=`.spec.sourceRef.name`,priority=1
// +kubebuilder:printcolumn:name="Added",type=integer,JSONPath=`.status.lastSync.added`,priority=1
// +kubebuilder:printcolumn:name="Removed",type=integer,JSONPath=`.status.lastSync.removed`,priority=1
// +kubebuilder:printcolumn:name="Changed",type=integer,JSONPath=`.status.lastSync.changed`,priority=1
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`,priority=1
type Audience struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec AudienceSpec `json:"spec"`
	// +kubebuilder:default={reason: "Pending", message: "waiting for the operator", conditions: {{type: "Accepted", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "ResolvedRefs", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Programmed", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Ready", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Synced", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	// +optional
	Status AudienceStatus `json:"status,omitempty"`
}

// AudienceList is a list of Audiences.
// +kubebuilder:object:root=true
type AudienceList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	// +required
	Items []Audience `json:"items"`
}
