package health

import (
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
)

// Kind describes the status of one kind of object.
type Kind[T, S any] struct {
	Name string
	// Conditions are the types of the conditions that Compute returns, in order.
	Conditions []string
	// Compute returns the status; see Destination for its parameters.
	Compute func(old T, v compile.Verdict, namespace string, pods []Pod, now time.Time, numbersDue bool) S
	// Status returns an object's status, and the conditions in it.
	Status func(*T) (*S, *[]metav1.Condition)
	// Expires returns when an object is to be deleted; false for an object that is kept.
	// It is nil for kinds without a TTL.
	Expires func(T) (time.Time, bool)
}

// The condition types of each kind, in their order in a status.
var (
	sourceConditions      = conditionTypes(v1alpha1.ConditionReceiving)
	destinationConditions = conditionTypes(v1alpha1.ConditionDelivering)
	audienceConditions    = conditionTypes(v1alpha1.ConditionSynced)
	jobConditions         = []string{v1alpha1.ConditionAccepted, v1alpha1.ConditionComplete, v1alpha1.ConditionFailed, v1alpha1.ConditionReady, v1alpha1.ConditionStalled}
)

func conditionTypes(traffic string) []string {
	return []string{v1alpha1.ConditionAccepted, v1alpha1.ConditionResolvedRefs, v1alpha1.ConditionProgrammed, v1alpha1.ConditionReady, traffic, v1alpha1.ConditionStalled}
}

// Own returns the conditions of these types that the operator has written, in the order
// of types. It excludes those of other controllers and the defaults of the CRD. The API
// server may store conditions in another order.
func Own(conditions []metav1.Condition, types []string) (own []metav1.Condition) {
	for _, conditionType := range types {
		if c := meta.FindStatusCondition(conditions, conditionType); c != nil && !isDefault(*c) {
			own = append(own, *c)
		}
	}
	return own
}

// isDefault reports whether a condition is the default of the CRD.
func isDefault(c metav1.Condition) bool {
	return c.Status == metav1.ConditionUnknown && c.Reason == v1alpha1.ReasonPending
}

// The kinds with conditions.
var (
	Sources = Kind[v1alpha1.Source, v1alpha1.SourceStatus]{
		Name: "Source", Compute: Source, Conditions: sourceConditions,
		Status: func(o *v1alpha1.Source) (*v1alpha1.SourceStatus, *[]metav1.Condition) {
			return &o.Status, &o.Status.Conditions
		},
	}
	Destinations = Kind[v1alpha1.WebhookDestination, v1alpha1.WebhookDestinationStatus]{
		Name: "WebhookDestination", Compute: Destination, Conditions: destinationConditions,
		Status: func(o *v1alpha1.WebhookDestination) (*v1alpha1.WebhookDestinationStatus, *[]metav1.Condition) {
			return &o.Status, &o.Status.Conditions
		},
	}
	Audiences = Kind[v1alpha1.Audience, v1alpha1.AudienceStatus]{
		Name: "Audience", Compute: Audience, Conditions: audienceConditions,
		Status: func(o *v1alpha1.Audience) (*v1alpha1.AudienceStatus, *[]metav1.Condition) {
			return &o.Status, &o.Status.Conditions
		},
	}
	// Redeliveries are not compiled, so they have no Compute.
	Redeliveries = Kind[v1alpha1.Redelivery, v1alpha1.RedeliveryStatus]{
		Name: "Redelivery", Conditions: jobConditions,
		Status: func(o *v1alpha1.Redelivery) (*v1alpha1.RedeliveryStatus, *[]metav1.Condition) {
			return &o.Status, &o.Status.Conditions
		},
	}
	DeletionRequests = Kind[v1alpha1.DeletionRequest, v1alpha1.DeletionRequestStatus]{
		Name: "DeletionRequest", Compute: DeletionRequest, Conditions: jobConditions, Expires: DeletionRequestExpires,
		Status: func(o *v1alpha1.DeletionRequest) (*v1alpha1.DeletionRequestStatus, *[]metav1.Condition) {
			return &o.Status, &o.Status.Conditions
		},
	}
)
