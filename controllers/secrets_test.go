package controllers

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

func TestSecretsAreCachedWithoutContents(t *testing.T) {
	strip := stripSecret("posthorn-system")
	secret := func(namespace, name string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, ResourceVersion: "7", Labels: map[string]string{liveconfig.LabelNamespace: "a"},
			Annotations:   map[string]string{corev1.LastAppliedConfigAnnotation: "hush"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl"}},
		}}
	}
	for name, want := range map[string]map[string]string{"other": nil, liveconfig.SecretName("a"): {liveconfig.LabelNamespace: "a"},
		partOfA: {liveconfig.LabelNamespace: "a"}} {
		got, err := strip(secret("posthorn-system", name))
		if err != nil {
			t.Fatal(err)
		}
		wanted := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "posthorn-system", Name: name, ResourceVersion: "7",
			Labels: want}}
		if diff := cmp.Diff(wanted, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if got, err := strip(&corev1.Secret{}); err == nil {
		t.Errorf("a Secret with contents would be cached as %v", got)
	}
}
