// Package v1beta1 defines the kinds of posthorn.dev/v1beta1. A Source accepts calls,
// a WebhookDestination delivers them to URLs, an Audience reports the changes of a set of
// users, a Redelivery sends dead letters again, and a DeletionRequest sends deletion
// notifications.
//
// Field comments are the user manual: `kubectl explain` prints them.
// References have no namespace, so an object can use only Secrets and Sources in its
// own namespace.
//
// +kubebuilder:object:generate=true
// +groupName=posthorn.dev
package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the API group and version of every kind in this package.
var GroupVersion = schema.GroupVersion{Group: "posthorn.dev", Version: "v1beta1"}

// AddToScheme registers the kinds of this package with a scheme.
func AddToScheme(scheme *runtime.Scheme) error {
	schemeBuilder := runtime.NewSchemeBuilder(addKnownTypes)
	return schemeBuilder.AddToScheme(scheme)
}

func addKnownTypes(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&Source{}, &SourceList{},
		&WebhookDestination{}, &WebhookDestinationList{},
		&Audience{}, &AudienceList{},
		&DeletionRequest{}, &DeletionRequestList{},
	)
	scheme.AddKnownTypes(GroupVersion, &Redelivery{}, &RedeliveryList{})
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
