package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// RedeliverySpec selects the dead letters that are sent again.
// +kubebuilder:validation:XValidation:rule="self.destinationRef == oldSelf.destinationRef && self.rate == oldSelf.rate && self.dryRun == oldSelf.dryRun && has(self.selector) == has(oldSelf.selector) && (!has(self.selector) || self.selector == oldSelf.selector) && has(self.requestId) == has(oldSelf.requestId) && (!has(self.requestId) || self.requestId == oldSelf.requestId) && has(self.activeDeadlineSeconds) == has(oldSelf.activeDeadlineSeconds) && (!has(self.activeDeadlineSeconds) || self.activeDeadlineSeconds == oldSelf.activeDeadlineSeconds)",message="spec is immutable except for ttlSecondsAfterFinished; delete this Redelivery and create another one"
type RedeliverySpec struct {
	// The WebhookDestination, in this namespace, whose dead letters are redelivered.
	// While it does not exist, the Redelivery waits.
	// +required
	DestinationRef ObjectReference `json:"destinationRef"`

	// Selects the dead letters to redeliver. A dead letter must match every field that
	// is set. Default: all dead letters of the destination at the start of the run.
	// +optional
	Selector *DeadLetterSelector `json:"selector,omitempty"`

	// If true, the run only counts the matching dead letters (status.matched) and redelivers none.
	// +kubebuilder:default=false
	// +optional
	DryRun bool `json:"dryRun,omitempty"`

	// Dead letters per second, over all dispatcher pods. 1 to 10,000, default 100.
	// The rates of a namespace's running Redeliveries are limited to 10,000 in total.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	// +kubebuilder:default=100
	// +optional
	Rate int32 `json:"rate,omitempty"`

	JobSpec `json:",inline"`
}

// DeadLetterSelector selects dead letters.
// +kubebuilder:validation:XValidation:rule="!has(self.since) || !has(self.until) || self.since < self.until",message="since must be before until"
type DeadLetterSelector struct {
	// Dead letters whose last attempt failed at this time or later.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:MaxLength=64
	// +optional
	Since *metav1.Time `json:"since,omitempty"`

	// Dead letters whose last attempt failed before this time.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:MaxLength=64
	// +optional
	Until *metav1.Time `json:"until,omitempty"`

	// Dead letters with one of these reasons, for example Expired or Rejected. At most 32.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=64
	// +listType=set
	// +optional
	Reasons []string `json:"reasons,omitempty"`

	// Dead letters whose last response had one of these HTTP status codes, for example 422.
	// 0 selects dead letters without a response. At most 32.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:Minimum=0
	// +kubebuilder:validation:items:Maximum=999
	// +listType=set
	// +optional
	StatusCodes []int32 `json:"statusCodes,omitempty"`

	// Dead letters with one of these call types.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=7
	// +listType=set
	// +optional
	Types []CallType `json:"types,omitempty"`

	// Dead letters with one of these event names; the match is exact. At most 100.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=255
	// +listType=set
	// +optional
	Events []string `json:"events,omitempty"`
}

// RedeliveryStatus reports the progress of a run.
type RedeliveryStatus struct {
	JobStatus `json:",inline"`

	// The number of dead letters that match the selector, over all dispatcher pods.
	// +optional
	Matched int64 `json:"matched,omitempty"`

	// The number of matching dead letters that are pending again at the destination.
	// +optional
	Redelivered int64 `json:"redelivered,omitempty"`

	// The number of matching dead letters that were not redelivered; set at the end
	// of the run. They are still dead letters, unless their retention has ended.
	// +optional
	NotRedelivered int64 `json:"notRedelivered,omitempty"`

	// The parts of the run, one for each dispatcher pod that takes part; set at its start.
	// +optional
	Parts *RedeliveryParts `json:"parts,omitempty"`
}

// RedeliveryParts counts the parts of a run. Each dispatcher pod that takes part
// redelivers its own dead letters.
type RedeliveryParts struct {
	// The number of parts: the pods that were ready at the start.
	// +required
	Total int32 `json:"total"`

	// The number of parts that are done: the pod has processed all of its dead letters
	// that match.
	// +required
	Done int32 `json:"done"`

	// The time since which a participating pod is not ready or does not answer; not set
	// while all of them answer.
	// +optional
	UnavailableSince *metav1.Time `json:"unavailableSince,omitempty"`
}

// Redelivery sends the dead letters of a WebhookDestination that match a selector
// again, at a limited rate, from every dispatcher pod.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=rdl,categories=posthorn
// +kubebuilder:printcolumn:name="Destination",type=string,JSONPath=`.spec.destinationRef.name`
// +kubebuilder:printcolumn:name="Complete",type=string,JSONPath=`.status.conditions[?(@.type=="Complete")].status`
// +kubebuilder:printcolumn:name="Failed",type=string,JSONPath=`.status.conditions[?(@.type=="Failed")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Matched",type=integer,JSONPath=`.status.matched`
// +kubebuilder:printcolumn:name="Redelivered",type=integer,JSONPath=`.status.redelivered`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Dry Run",type=boolean,JSONPath=`.spec.dryRun`,priority=1
// +kubebuilder:printcolumn:name="Started",type=date,JSONPath=`.status.startTime`,priority=1
// +kubebuilder:printcolumn:name="Completed",type=date,JSONPath=`.status.completionTime`,priority=1
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`,priority=1
type Redelivery struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec RedeliverySpec `json:"spec"`
	// +kubebuilder:default={conditions: {{type: "Accepted", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Complete", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Failed", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Ready", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	// +optional
	Status RedeliveryStatus `json:"status,omitempty"`
}

// RedeliveryList is a list of Redeliveries.
// +kubebuilder:object:root=true
type RedeliveryList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	// +required
	Items []Redelivery `json:"items"`
}
