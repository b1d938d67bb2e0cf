package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AudienceKind says what is told of a user.
// +kubebuilder:validation:Enum=Audience;ComputedTrait
type AudienceKind string

const (
	// AudienceKindAudience means that the trait is true for a member and false for who is no longer one.
	AudienceKindAudience AudienceKind = "Audience"
	// AudienceKindComputedTrait means that the trait is the value that the sync gives for each user.
	AudienceKindComputedTrait AudienceKind = "ComputedTrait"
)

// AudienceSpec says what the audience is called and whose destinations are told.
// +kubebuilder:validation:XValidation:rule="has(self.key) || self.name.matches('[\\\\p{L}\\\\p{N}]')",message="name has no letter or digit to make a key of; set key"
type AudienceSpec struct {
	// The Source, of the same namespace, whose write key syncs the members. An
	// identify call for each change goes to every WebhookDestination that takes
	// this Source's calls. Another Source starts the audience afresh: its next
	// sync tells all members.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +required
	Source string `json:"source"`

	// What people call the audience, for example "First Time Shoppers".
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=100
	// +required
	Name string `json:"name"`

	// Audience, the default: the trait is true or false. ComputedTrait: the
	// trait is a value for each user. Another kind starts the audience afresh.
	// +kubebuilder:default=Audience
	// +optional
	Kind AudienceKind `json:"kind,omitempty"`

	// The name of the trait, and of the audience in the path of a sync. The
	// default is the snake_case form of name: "First Time Shoppers" becomes
	// first_time_shoppers. Two audiences of one Source must not share a key: the
	// younger one gets Accepted=False (KeyConflict). Another key starts the
	// audience afresh.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=100
	// +kubebuilder:validation:XValidation:rule="self.matches('^[A-Za-z0-9_][A-Za-z0-9_.-]*$')",message="must be letters, digits, '_', '-' and '.', and not begin with '-' or '.'"
	// +optional
	Key string `json:"key,omitempty"`

	// The share of members, in percent, that a snapshot may remove. One that
	// would remove more is refused (422), unless the sync says that it is meant:
	// a broken export should not tell everybody's exit. Default 50.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	// +kubebuilder:default=50
	// +optional
	MaxRemovalPercent *int32 `json:"maxRemovalPercent,omitempty"`
}

// AudienceStatus is what is known of an audience, from the spec and its syncs.
type AudienceStatus struct {
	// Accepted, Programmed, Ready and Synced.
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// The generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// The key in effect: members are sent to /v1/audiences/KEY/members.
	// +kubebuilder:validation:MaxLength=200
	// +optional
	Key string `json:"key,omitempty"`

	// Dispatcher pods that are ready, and that run this generation.
	// +optional
	Dispatchers *DispatcherCount `json:"dispatchers,omitempty"`

	// When the last sync was taken. This and the numbers are written at most every 30 s.
	// +optional
	LastSyncTime *metav1.Time `json:"lastSyncTime,omitempty"`

	// Members as of the last sync.
	// +optional
	Members *int64 `json:"members,omitempty"`

	// Users who joined in the last sync.
	// +optional
	Added *int64 `json:"added,omitempty"`

	// Users who left in the last sync.
	// +optional
	Removed *int64 `json:"removed,omitempty"`

	// Users whose value changed in the last sync, of a computed trait.
	// +optional
	Changed *int64 `json:"changed,omitempty"`

	// Identify calls of the last sync that are not in the queue yet. They follow
	// at the pace of the destinations, so that live calls are not held up.
	// +optional
	Pending *int64 `json:"pending,omitempty"`
}

// Audience is a set of users that is kept elsewhere and synced to Posthorn over
// HTTP. Its destinations get an identify call for every user who joins, leaves,
// or has another value.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=paud,categories=posthorn
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Synced",type=string,JSONPath=`.status.conditions[?(@.type=="Synced")].status`
// +kubebuilder:printcolumn:name="Members",type=integer,JSONPath=`.status.members`
// +kubebuilder:printcolumn:name="Added",type=integer,JSONPath=`.status.added`
// +kubebuilder:printcolumn:name="Removed",type=integer,JSONPath=`.status.removed`
// +kubebuilder:printcolumn:name="Pending",type=integer,JSONPath=`.status.pending`
// +kubebuilder:printcolumn:name="Last Sync",type=date,JSONPath=`.status.lastSyncTime`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Key",type=string,JSONPath=`.status.key`,priority=1
// +kubebuilder:printcolumn:name="Source",type=string,JSONPath=`.spec.source`,priority=1
// +kubebuilder:printcolumn:name="Changed",type=integer,JSONPath=`.status.changed`,priority=1
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,priority=1
type Audience struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec AudienceSpec `json:"spec"`
	// +optional
	Status AudienceStatus `json:"status,omitempty"`
}

// AudienceList is a list of Audiences.
// +kubebuilder:object:root=true
type AudienceList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Audience `json:"items"`
}
