package controllers

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// partOfA is the name of a part of the live config of namespace a.
var partOfA = "posthorn-part-a-" + strings.Repeat("0", 64)

// After an interruption, a watch delivers one update even if the object was deleted and
// created again, and a deletion may have the last known version.
func TestPredicates(t *testing.T) {
	source := func(uid string, generation int64, labels map[string]string) *v1beta1.Source {
		return &v1beta1.Source{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "web", UID: types.UID(uid), Generation: generation,
			Labels: labels}}
	}
	before := source("1", 1, map[string]string{"team": "shop"})
	for name, test := range map[string]struct {
		after *v1beta1.Source
		want  bool
	}{
		"status":        {source("1", 1, map[string]string{"team": "shop"}), false},
		"spec":          {source("1", 2, map[string]string{"team": "shop"}), true},
		"labels":        {source("1", 1, nil), true},
		"created again": {source("2", 1, map[string]string{"team": "shop"}), true},
	} {
		if got := inputChanged(kindOf("Source")).Update(event.UpdateEvent{ObjectOld: before, ObjectNew: test.after}); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}

	s := &liveSecrets{release: "posthorn-system", parts: newPartSecrets(nil, nil, "posthorn-system", secretOwner{}),
		written: map[string]liveSecret{"a": {revision: "r", resourceVersion: "7"}}}
	secret := func(namespace, version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: liveconfig.SecretName("a"),
			ResourceVersion: version}}
	}
	part := func(version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "posthorn-system", Name: partOfA, ResourceVersion: version}}
	}
	s.parts.record("a", partOfA, "7")
	own := s.notOwnWrite()
	for name, test := range map[string]struct{ got, want bool }{
		"own update": {own.Update(event.UpdateEvent{ObjectOld: secret("posthorn-system", "6"), ObjectNew: secret("posthorn-system", "7")}),
			false},
		"foreign update": {own.Update(event.UpdateEvent{ObjectOld: secret("posthorn-system", "7"), ObjectNew: secret("posthorn-system", "8")}),
			true},
		"relisted":          {own.Update(event.UpdateEvent{ObjectOld: secret("other", "8"), ObjectNew: secret("other", "8")}), false},
		"another namespace": {own.Create(event.CreateEvent{Object: secret("other", "7")}), true},
		"own creation":      {own.Create(event.CreateEvent{Object: secret("posthorn-system", "7")}), false},
		"own part":          {own.Create(event.CreateEvent{Object: part("7")}), false},
		"foreign part":      {own.Create(event.CreateEvent{Object: part("8")}), true},
		"deleted part":      {own.Delete(event.DeleteEvent{Object: part("7")}), true},
		"deletion":          {own.Delete(event.DeleteEvent{Object: secret("posthorn-system", "7")}), true},
	} {
		if test.got != test.want {
			t.Errorf("%s: %v, want %v", name, test.got, test.want)
		}
	}
}
