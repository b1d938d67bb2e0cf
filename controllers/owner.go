package controllers

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Labels of the Secrets that the operator writes.
const (
	labelName      = "app.kubernetes.io/name"
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "posthorn-operator"
)

// secretOwner makes the dispatchers' StatefulSet the owner of the Secrets that the operator
// writes, so that Kubernetes deletes them when the release is deleted: they contain the
// credentials of all namespaces. The StatefulSet exists as long as a dispatcher may need them;
// the operator's own objects can be deleted while the dispatchers continue.
type secretOwner struct {
	direct client.Reader
	// statefulSet is the name in namespace; with "" the Secrets have no owner.
	namespace, statefulSet string
}

// owns reports whether a Secret needs no write because of its owner. Any owner is sufficient:
// Kubernetes deletes a Secret whose owners do not exist, and the operator then writes it again.
func (o secretOwner) owns(secret metav1.Object) bool {
	return o.statefulSet == "" || len(secret.GetOwnerReferences()) > 0
}

// +kubebuilder:rbac:groups=apps,resources=statefulsets,namespace=posthorn-system,verbs=get

// references returns the owner references of a Secret that is written now. It fails if the
// StatefulSet does not exist or is being deleted: a Secret that is written while the release is
// deleted would remain.
func (o secretOwner) references(ctx context.Context) ([]*metav1ac.OwnerReferenceApplyConfiguration, error) {
	if o.statefulSet == "" {
		return nil, nil
	}
	key := types.NamespacedName{Namespace: o.namespace, Name: o.statefulSet}
	m := &metav1.PartialObjectMetadata{}
	m.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("StatefulSet"))
	if err := o.direct.Get(ctx, key, m); err != nil {
		return nil, fmt.Errorf("read StatefulSet %s, the owner of the operator's Secrets: %w", key, err)
	}
	if m.DeletionTimestamp != nil {
		return nil, fmt.Errorf("StatefulSet %s, the owner of the operator's Secrets, is being deleted", key)
	}
	return []*metav1ac.OwnerReferenceApplyConfiguration{
		metav1ac.OwnerReference().WithAPIVersion(m.APIVersion).WithKind(m.Kind).WithName(m.Name).WithUID(m.UID),
	}, nil
}

// apply writes a Secret with an owner and the labels of all Secrets of the operator. The Secret then has its new state.
func (o secretOwner) apply(ctx context.Context, c client.Client, secret *corev1ac.SecretApplyConfiguration) error {
	owners, err := o.references(ctx)
	if err != nil {
		return err
	}
	secret.WithOwnerReferences(owners...).WithLabels(map[string]string{labelName: "posthorn", labelManagedBy: managedBy})
	if err := c.Apply(ctx, secret, fieldOwner, client.ForceOwnership); err != nil {
		return fmt.Errorf("apply Secret %s/%s: %w", *secret.Namespace, *secret.Name, err)
	}
	return nil
}
