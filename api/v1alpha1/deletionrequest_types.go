package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// DeletionRequestSpec says whose data is to be deleted, and who is told.
type DeletionRequestSpec struct {
	// The user whose data is to be deleted.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +required
	UserID string `json:"userId"`

	// The Sources, of the same namespace, that are affected; the default is all.
	// Each that has an enabled WebhookDestination gets one delete message, which
	// goes to these destinations. Destinations are those of the moment at which
	// the request is taken; later ones are not told.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	// +listType=set
	// +optional
	Sources []string `json:"sources,omitempty"`

	// Whether later calls of this user to these Sources are refused (403,
	// user_suppressed), for as long as this object exists. Calls with an
	// anonymousId alone are not affected. Default false.
	// +optional
	Suppress bool `json:"suppress,omitempty"`

	// After how many seconds a finished request is deleted. Without it, and while
	// suppress is true, it stays. Without a cluster its manifest is removed, if the
	// file holds nothing else.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=31536000
	// +optional
	TTLSecondsAfterFinished *int32 `json:"ttlSecondsAfterFinished,omitempty"`
}

// NotificationState is what became of one notification.
// +kubebuilder:validation:Enum=Pending;Delivered;Filtered;DeadLettered;Discarded
type NotificationState string

const (
	// NotificationPending means: not delivered yet, or being retried.
	NotificationPending NotificationState = "Pending"
	// NotificationDelivered means: the destination has taken it.
	NotificationDelivered NotificationState = "Delivered"
	// NotificationFiltered means: the destination's filter keeps it out.
	NotificationFiltered NotificationState = "Filtered"
	// NotificationDeadLettered means: it could not be delivered; it is among the dead letters.
	NotificationDeadLettered NotificationState = "DeadLettered"
	// NotificationDiscarded means: the destination was deleted before it took it.
	NotificationDiscarded NotificationState = "Discarded"
)

// Notification is one destination that is told, of one Source.
type Notification struct {
	// +kubebuilder:validation:MaxLength=253
	// +required
	Source string `json:"source"`
	// +kubebuilder:validation:MaxLength=253
	// +required
	Destination string `json:"destination"`
	// Pending, and then Delivered, Filtered, DeadLettered or Discarded.
	// +required
	State NotificationState `json:"state"`
	// Why it was dead-lettered, as in the dead letter.
	// +kubebuilder:validation:MaxLength=64
	// +optional
	Reason string `json:"reason,omitempty"`
	// When the state was found.
	// +optional
	Time *metav1.Time `json:"time,omitempty"`
}

// DeletionRequestStatus is how far the notifications are.
type DeletionRequestStatus struct {
	// Accepted, Programmed, Ready and Finished.
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// The generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// Dispatcher pods that are ready, and that run this generation.
	// +optional
	Dispatchers *DispatcherCount `json:"dispatchers,omitempty"`

	// When the delete messages were made.
	// +optional
	StartTime *metav1.Time `json:"startTime,omitempty"`

	// When the last notification had its final state.
	// +optional
	CompletionTime *metav1.Time `json:"completionTime,omitempty"`

	// Notifications in all.
	// +optional
	Total *int32 `json:"total,omitempty"`

	// Notifications that were delivered.
	// +optional
	Delivered *int32 `json:"delivered,omitempty"`

	// Notifications that are pending.
	// +optional
	Pending *int32 `json:"pending,omitempty"`

	// Each notification; the first 200.
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=200
	// +optional
	Notifications []Notification `json:"notifications,omitempty"`
}

// DeletionRequest tells webhooks that a user's data is to be deleted: one delete
// message for each affected Source, followed to its final outcome.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=pdel,categories=posthorn
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Finished",type=string,JSONPath=`.status.conditions[?(@.type=="Finished")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Finished")].reason`
// +kubebuilder:printcolumn:name="Total",type=integer,JSONPath=`.status.total`
// +kubebuilder:printcolumn:name="Delivered",type=integer,JSONPath=`.status.delivered`
// +kubebuilder:printcolumn:name="Pending",type=integer,JSONPath=`.status.pending`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Suppress",type=boolean,JSONPath=`.spec.suppress`,priority=1
// +kubebuilder:printcolumn:name="Completed",type=date,JSONPath=`.status.completionTime`,priority=1
type DeletionRequest struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec DeletionRequestSpec `json:"spec"`
	// +optional
	Status DeletionRequestStatus `json:"status,omitempty"`
}

// DeletionRequestList is a list of DeletionRequests.
// +kubebuilder:object:root=true
type DeletionRequestList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []DeletionRequest `json:"items"`
}
