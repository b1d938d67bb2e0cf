package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// RedeliverySpec says which dead letters are sent once more. It cannot be
// changed: what has been redelivered cannot be called back. Delete the
// Redelivery to stop it.
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec cannot be changed; delete this Redelivery and create another"
type RedeliverySpec struct {
	// Name of the WebhookDestination, in this namespace, whose dead letters are redelivered.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +required
	Destination string `json:"destination"`

	// Which dead letters. A dead letter must pass every part that is set.
	// Without it: all that the destination has when the redelivery starts.
	// +optional
	Selector *DeadLetterSelector `json:"selector,omitempty"`

	// Only count what would be redelivered, in status.matched. Default false.
	// +optional
	DryRun bool `json:"dryRun,omitempty"`

	// Dead letters a second, over all dispatcher pods. 1 to 10,000, default 100.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	// +kubebuilder:default=100
	// +optional
	Rate int32 `json:"rate,omitempty"`

	// How many seconds after its end the Redelivery is deleted. 0 to 31,536,000
	// (a year), default 3600.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=31536000
	// +kubebuilder:default=3600
	// +optional
	TTLSecondsAfterFinished *int32 `json:"ttlSecondsAfterFinished,omitempty"`
}

// DeadLetterSelector chooses dead letters.
// +kubebuilder:validation:XValidation:rule="!has(self.since) || !has(self.until) || self.since < self.until",message="since must be before until"
type DeadLetterSelector struct {
	// Those whose last attempt failed at this time or later.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:MaxLength=64
	// +optional
	Since *metav1.Time `json:"since,omitempty"`

	// Those whose last attempt failed before this time.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:MaxLength=64
	// +optional
	Until *metav1.Time `json:"until,omitempty"`

	// Those with one of these reasons, for example Expired or Rejected. At most 32.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=64
	// +listType=set
	// +optional
	Reasons []string `json:"reasons,omitempty"`

	// Those of these types of call.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=7
	// +listType=set
	// +optional
	Types []CallType `json:"types,omitempty"`

	// Those of these events, by their exact names. At most 100.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=255
	// +listType=set
	// +optional
	Events []string `json:"events,omitempty"`
}

// RedeliveryPhase says how far a redelivery is.
// +kubebuilder:validation:Enum=Pending;Running;Succeeded;Failed
type RedeliveryPhase string

// The phases.
const (
	// RedeliveryPending: it waits, for its destination or for another redelivery.
	RedeliveryPending RedeliveryPhase = "Pending"
	// RedeliveryRunning: dead letters are counted or redelivered.
	RedeliveryRunning RedeliveryPhase = "Running"
	// RedeliverySucceeded: all that matched were redelivered (or counted, in a dry run).
	RedeliverySucceeded RedeliveryPhase = "Succeeded"
	// RedeliveryFailed: it ended, and some that matched were not redelivered.
	RedeliveryFailed RedeliveryPhase = "Failed"
)

// RedeliveryStatus is how far a redelivery is.
type RedeliveryStatus struct {
	// Accepted and Complete.
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// The generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// Pending, Running, Succeeded or Failed.
	// +optional
	Phase RedeliveryPhase `json:"phase,omitempty"`

	// Dead letters that the selector chose, over all dispatcher pods.
	// +optional
	Matched int64 `json:"matched,omitempty"`

	// Of those, the ones that are pending again at the destination.
	// +optional
	Redelivered int64 `json:"redelivered,omitempty"`

	// Of those, the ones that could not be redelivered; known at the end. They
	// are dead letters still, unless their retention ended meanwhile.
	// +optional
	Failed int64 `json:"failed,omitempty"`

	// When it started. Dead letters that failed later are left alone.
	// +optional
	StartTime *metav1.Time `json:"startTime,omitempty"`

	// When it ended.
	// +optional
	FinishTime *metav1.Time `json:"finishTime,omitempty"`

	// How far each dispatcher pod is.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=256
	// +optional
	Dispatchers []RedeliveryDispatcher `json:"dispatchers,omitempty"`
}

// RedeliveryDispatcher is one dispatcher pod's part of a redelivery.
type RedeliveryDispatcher struct {
	// Name of the pod.
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// Dead letters of this pod that the selector chose.
	Matched int64 `json:"matched"`
	// Of those, the ones that are pending again.
	Redelivered int64 `json:"redelivered"`
	// Whether the pod is done, well or not.
	// +optional
	Done bool `json:"done,omitempty"`
	// What went wrong last.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	Message string `json:"message,omitempty"`
}

// Redelivery sends dead letters of a WebhookDestination once more: those that a
// selector chooses, at a bounded rate, from every dispatcher pod. It runs once,
// goes on after a restart of the operator, and is deleted some time after its end.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=rdl,categories=posthorn
// +kubebuilder:printcolumn:name="Destination",type=string,JSONPath=`.spec.destination`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Matched",type=integer,JSONPath=`.status.matched`
// +kubebuilder:printcolumn:name="Redelivered",type=integer,JSONPath=`.status.redelivered`
// +kubebuilder:printcolumn:name="Failed",type=integer,JSONPath=`.status.failed`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Dry Run",type=boolean,JSONPath=`.spec.dryRun`,priority=1
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.type=="Complete")].message`,priority=1
type Redelivery struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec RedeliverySpec `json:"spec"`
	// +optional
	Status RedeliveryStatus `json:"status,omitempty"`
}

// RedeliveryList is a list of Redeliveries.
// +kubebuilder:object:root=true
type RedeliveryList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Redelivery `json:"items"`
}
