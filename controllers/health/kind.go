package health

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
)

// Kind is how to treat the status of one kind of object.
type Kind[T, S any] struct {
	Name string
	// Compute is Source, Destination, Audience or DeletionRequest.
	Compute func(old T, v compile.Verdict, tenant string, pods []Pod, now time.Time, numbersDue bool) S
	// Status returns an object's status, and the conditions in it.
	Status func(*T) (*S, *[]metav1.Condition)
	// Expires, when set, says when an object is to be deleted; false for one that stays.
	Expires func(T) (time.Time, bool)
}

// The kinds that have verdicts.
var (
	Sources = Kind[v1alpha1.Source, v1alpha1.SourceStatus]{
		Name: "Source", Compute: Source,
		Status: func(o *v1alpha1.Source) (*v1alpha1.SourceStatus, *[]metav1.Condition) {
			return &o.Status, &o.Status.Conditions
		},
	}
	Destinations = Kind[v1alpha1.WebhookDestination, v1alpha1.WebhookDestinationStatus]{
		Name: "WebhookDestination", Compute: Destination,
		Status: func(o *v1alpha1.WebhookDestination) (*v1alpha1.WebhookDestinationStatus, *[]metav1.Condition) {
			return &o.Status, &o.Status.Conditions
		},
	}
	Audiences = Kind[v1alpha1.Audience, v1alpha1.AudienceStatus]{
		Name: "Audience", Compute: Audience,
		Status: func(o *v1alpha1.Audience) (*v1alpha1.AudienceStatus, *[]metav1.Condition) {
			return &o.Status, &o.Status.Conditions
		},
	}
	DeletionRequests = Kind[v1alpha1.DeletionRequest, v1alpha1.DeletionRequestStatus]{
		Name: "DeletionRequest", Compute: DeletionRequest, Expires: DeletionRequestExpires,
		Status: func(o *v1alpha1.DeletionRequest) (*v1alpha1.DeletionRequestStatus, *[]metav1.Condition) {
			return &o.Status, &o.Status.Conditions
		},
	}
)
