package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// RedeliverySpec selects the dead letters that are sent again.
// +kubebuilder:validation:XValidation:rule="self.destinationRef == oldSelf.destinationRef && self.deadLettersPerSecond == oldSelf.deadLettersPerSecond && self.dryRun == oldSelf.dryRun && has(self.match) == has(oldSelf.match) && (!has(self.match) || self.match == oldSelf.match) && has(self.requestID) == has(oldSelf.requestID) && (!has(self.requestID) || self.requestID == oldSelf.requestID) && has(self.activeDeadlineSeconds) == has(oldSelf.activeDeadlineSeconds) && (!has(self.activeDeadlineSeconds) || self.activeDeadlineSeconds == oldSelf.activeDeadlineSeconds)",message="spec is immutable except for ttlSecondsAfterFinished; delete this Redelivery and create another one"
type RedeliverySpec struct {
	// The WebhookDestination, in this namespace, whose dead letters are redelivered.
	// While it does not exist, the Redelivery waits.
	// +required
	DestinationRef ObjectReference `json:"destinationRef"`

	// The dead letters to redeliver. A dead letter must match every field that is set;
	// statusCodes and noResponse count as one field. Default: all dead letters of the destination at the start of the run.
	// +optional
	Match *DeadLetterMatch `json:"match,omitempty"`

	// If true, the run only counts the matching dead letters (status.matched) and redelivers none.
	// +kubebuilder:default=false
	// +optional
	DryRun bool `json:"dryRun,omitempty"`

	// The limit of dead letters per second, over all dispatcher pods. 1 to 10,000, default 100.
	// The rates of a namespace's running Redeliveries are limited to 10,000 in total.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	// +kubebuilder:default=100
	// +optional
	DeadLettersPerSecond int32 `json:"deadLettersPerSecond,omitempty"`

	JobSpec `json:",inline"`
}

// DeadLetterMatch selects dead letters.
// +kubebuilder:validation:XValidation:rule="has(self.since) || has(self.until) || has(self.reasons) || has(self.statusCodes) || self.noResponse || has(self.types) || has(self.events)",message="set at least one field, or remove match to redeliver all dead letters"
// +kubebuilder:validation:XValidation:rule="!has(self.since) || !has(self.until) || self.since < self.until",message="since must be before until"
type DeadLetterMatch struct {
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
	// +kubebuilder:validation:items:Enum=Expired;Rejected;Redirected;EndpointRemoved;DeadlineExceeded;Damaged;FilterFailed;TransformFailed;RejectedByExpression;TimedOut;ConnectionRefused;ConnectionFailed;DNSFailed;CertificateRejected;TLSFailed;AddressDenied;TokenFailed;ProxyFailed;ServerError;Throttled;InvalidResponse
	// +listType=set
	// +optional
	Reasons []string `json:"reasons,omitempty"`

	// Dead letters whose last response had one of these HTTP status codes, for example 422.
	// With noResponse, also dead letters without a response. At most 32 codes from 100 to 999.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:Minimum=100
	// +kubebuilder:validation:items:Maximum=999
	// +listType=set
	// +optional
	StatusCodes []int32 `json:"statusCodes,omitempty"`

	// If true, dead letters whose last attempt had no response, for example after a timeout.
	// With statusCodes, also dead letters with one of the codes.
	// +kubebuilder:default=false
	// +optional
	NoResponse bool `json:"noResponse,omitempty"`

	// Dead letters of these call types, or "delete" for the notifications of DeletionRequests.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=7
	// +listType=set
	// +optional
	Types []MessageType `json:"types,omitempty"`

	// Dead letters of track calls whose event name matches one of these patterns, as in
	// spec.filter.events of a WebhookDestination: "*" matches any characters ("Order *"), and \* and \\
	// an asterisk and a backslash. Names are case-sensitive. At most 100.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=255
	// +kubebuilder:validation:items:XValidation:rule=`self.matches(r'^([^\\]|\\[*\\])*$')`,message="a backslash must be followed by * or by another backslash"
	// +listType=set
	// +optional
	Events []string `json:"events,omitempty"`
}

// RedeliveryStatus reports the progress of a run.
type RedeliveryStatus struct {
	JobStatus `json:",inline"`

	// The number of dead letters that match, over all dispatcher pods; not set before the run
	// starts.
	// +optional
	Matched *int64 `json:"matched,omitempty"`

	// The number of matching dead letters that are pending again at the destination; not
	// set before the run starts.
	// +optional
	Redelivered *int64 `json:"redelivered,omitempty"`

	// The number of matching dead letters that were not redelivered; set when the
	// run fails. They are still dead letters, unless their retention has ended.
	// +optional
	NotRedelivered *int64 `json:"notRedelivered,omitempty"`

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

// Redelivery sends the dead letters of a WebhookDestination that match
// again, at a limited rate, from every dispatcher pod. A completed run is not repeated within 30 days, even
// if the object is deleted and created again.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=rdl;prdl,categories=posthorn
// +kubebuilder:printcolumn:name="Destination",type=string,JSONPath=`.spec.destinationRef.name`
// +kubebuilder:printcolumn:name="Complete",type=string,JSONPath=`.status.conditions[?(@.type=="Complete")].status`
// +kubebuilder:printcolumn:name="Failed",type=string,JSONPath=`.status.conditions[?(@.type=="Failed")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.reason`
// +kubebuilder:printcolumn:name="Matched",type=integer,JSONPath=`.status.matched`
// +kubebuilder:printcolumn:name="Redelivered",type=integer,JSONPath=`.status.redelivered`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Dry Run",type=boolean,JSONPath=`.spec.dryRun`,priority=1
// +kubebuilder:printcolumn:name="Started",type=date,JSONPath=`.status.startTime`,priority=1
// +kubebuilder:printcolumn:name="Completed",type=date,JSONPath=`.status.completionTime`,priority=1
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`,priority=1
type Redelivery struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec RedeliverySpec `json:"spec"`
	// +kubebuilder:default={reason: "Pending", message: "waiting for the operator", conditions: {{type: "Accepted", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "ResolvedRefs", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Complete", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Failed", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Ready", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
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
