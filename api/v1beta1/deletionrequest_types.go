package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// DeletionRequestSpec names the user whose data is to be deleted, and the affected Sources.
// +kubebuilder:validation:XValidation:rule="self.userID == oldSelf.userID && self.suppress == oldSelf.suppress && has(self.sourceRefs) == has(oldSelf.sourceRefs) && (!has(self.sourceRefs) || self.sourceRefs == oldSelf.sourceRefs) && has(self.requestID) == has(oldSelf.requestID) && (!has(self.requestID) || self.requestID == oldSelf.requestID) && has(self.activeDeadlineSeconds) == has(oldSelf.activeDeadlineSeconds) && (!has(self.activeDeadlineSeconds) || self.activeDeadlineSeconds == oldSelf.activeDeadlineSeconds)",message="spec is immutable except for ttlSecondsAfterFinished; delete this DeletionRequest and create another one"
// +kubebuilder:validation:XValidation:rule="!self.suppress || !has(self.ttlSecondsAfterFinished)",fieldPath=".ttlSecondsAfterFinished",message="suppress lasts as long as this object, so the object must not be deleted by itself: remove ttlSecondsAfterFinished, or suppress"
type DeletionRequestSpec struct {
	// The user whose data is to be deleted.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +required
	UserID string `json:"userID"`

	// The affected Sources, in this namespace. Default: all Sources.
	// Each Source that has a WebhookDestination gets one delete message,
	// which is sent to these destinations. The run determines its destinations at the
	// start; destinations that are created later are not notified.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:XValidation:rule="self.all(a, self.exists_one(b, a.name == b.name))",message="a Source is named twice; remove one of the two"
	// +listType=atomic
	// +optional
	SourceRefs []ObjectReference `json:"sourceRefs,omitempty"`

	// If true, later calls of this user to these Sources are rejected (403,
	// user_suppressed) while this object exists. Calls that have only an
	// anonymousId are not affected. With suppress, ttlSecondsAfterFinished must not be
	// set.
	// +kubebuilder:default=false
	// +optional
	Suppress bool `json:"suppress,omitempty"`

	JobSpec `json:",inline"`
}

// NotificationState is the outcome of one notification.
// +kubebuilder:validation:Enum=Pending;Delivered;DeadLettered;Discarded
type NotificationState string

const (
	// NotificationPending means that the notification is not delivered yet, or is being retried.
	NotificationPending NotificationState = "Pending"
	// NotificationDelivered means that the destination accepted it.
	NotificationDelivered NotificationState = "Delivered"
	// NotificationDeadLettered means that it could not be delivered and is a dead letter.
	NotificationDeadLettered NotificationState = "DeadLettered"
	// NotificationDiscarded means that the destination was deleted before the delivery.
	NotificationDiscarded NotificationState = "Discarded"
)

// Notification is the delete message of one Source for one destination.
type Notification struct {
	// Name of the affected Source.
	// +kubebuilder:validation:MaxLength=253
	// +required
	Source string `json:"source"`
	// Name of the WebhookDestination that is notified.
	// +kubebuilder:validation:MaxLength=253
	// +required
	Destination string `json:"destination"`
	// The state is Pending at first, then Delivered, DeadLettered or Discarded.
	// +required
	State NotificationState `json:"state"`
	// The reason of the dead letter.
	// +kubebuilder:validation:MaxLength=64
	// +optional
	Reason string `json:"reason,omitempty"`
	// The time at which the dispatcher recorded the state.
	// +optional
	Time *metav1.Time `json:"time,omitempty"`
}

// DeletionRequestStatus reports the notifications.
type DeletionRequestStatus struct {
	JobStatus `json:",inline"`

	// The number of notifications: delivered + pending + deadLettered + discarded.
	// +optional
	Total *int32 `json:"total,omitempty"`

	// The number of notifications that were delivered.
	// +optional
	Delivered *int32 `json:"delivered,omitempty"`

	// The number of notifications that are pending.
	// +optional
	Pending *int32 `json:"pending,omitempty"`

	// The number of notifications that became dead letters.
	// +optional
	DeadLettered *int32 `json:"deadLettered,omitempty"`

	// The number of notifications that were discarded.
	// +optional
	Discarded *int32 `json:"discarded,omitempty"`

	// The notifications: one for each Source and destination, at most 200.
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=200
	// +optional
	Notifications []Notification `json:"notifications,omitempty"`
}

// DeletionRequest notifies webhooks that a user's data is to be deleted: one delete
// message for each affected Source, followed to its final outcome. A completed request is not repeated
// within 30 days, even if the object is deleted and created again.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=pdel,categories=posthorn
// +kubebuilder:printcolumn:name="Complete",type=string,JSONPath=`.status.conditions[?(@.type=="Complete")].status`
// +kubebuilder:printcolumn:name="Failed",type=string,JSONPath=`.status.conditions[?(@.type=="Failed")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.reason`
// +kubebuilder:printcolumn:name="Total",type=integer,JSONPath=`.status.total`
// +kubebuilder:printcolumn:name="Delivered",type=integer,JSONPath=`.status.delivered`
// +kubebuilder:printcolumn:name="Pending",type=integer,JSONPath=`.status.pending`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Suppress",type=boolean,JSONPath=`.spec.suppress`,priority=1
// +kubebuilder:printcolumn:name="Started",type=date,JSONPath=`.status.startTime`,priority=1
// +kubebuilder:printcolumn:name="Completed",type=date,JSONPath=`.status.completionTime`,priority=1
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`,priority=1
type DeletionRequest struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec DeletionRequestSpec `json:"spec"`
	// +kubebuilder:default={reason: "Pending", message: "waiting for the operator", conditions: {{type: "Accepted", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "ResolvedRefs", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Complete", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Failed", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Ready", status: "Unknown", reason: "Pending", message: "waiting for the operator", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	// +optional
	Status DeletionRequestStatus `json:"status,omitempty"`
}

// DeletionRequestList is a list of DeletionRequests.
// +kubebuilder:object:root=true
type DeletionRequestList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	// +required
	Items []DeletionRequest `json:"items"`
}
