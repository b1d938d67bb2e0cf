package controllers

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/kinds"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

func TestWriteKeys(t *testing.T) {
	day := func(d int) time.Time { return time.Date(2026, 1, d, 0, 0, 0, 0, time.UTC) }
	holder := func(namespace string, d int) keyHolder {
		return keyHolder{namespace: namespace, name: "web", created: day(d)}
	}
	k := newWriteKeys()
	steps := []struct {
		name      string
		namespace string
		holders   map[string]keyHolder
		affected  []string
		older     map[string]map[string]string // namespace -> hash -> older Source
	}{
		{"the first", "b", map[string]keyHolder{"x": holder("b", 2)}, nil, map[string]map[string]string{"b": {}}},
		{"another key", "c", map[string]keyHolder{"y": holder("c", 1)}, nil, map[string]map[string]string{"b": {}, "c": {}}},
		{"an older Source", "a", map[string]keyHolder{"x": holder("a", 1)}, []string{"b"}, map[string]map[string]string{"a": {}, "b": {"x": "a/web"}}},
		{"the same again", "a", map[string]keyHolder{"x": holder("a", 1)}, nil, map[string]map[string]string{"a": {}, "b": {"x": "a/web"}}},
		{"equally old", "c", map[string]keyHolder{"x": holder("c", 1)}, []string{"a", "b"}, map[string]map[string]string{"a": {}, "b": {"x": "a/web"}, "c": {"x": "a/web"}}},
		{"the oldest takes another key", "a", map[string]keyHolder{"z": holder("a", 1)}, []string{"b", "c"}, map[string]map[string]string{"a": {}, "b": {"x": "c/web"}, "c": {}}},
		{"a namespace is removed", "c", nil, []string{"b"}, map[string]map[string]string{"a": {}, "b": {}, "c": {}}},
	}
	for _, step := range steps {
		if diff := cmp.Diff(step.affected, k.set(step.namespace, step.holders)); diff != "" {
			t.Errorf("%s: affected (-want +got):\n%s", step.name, diff)
		}
		for namespace, want := range step.older {
			if diff := cmp.Diff(want, k.older(namespace)); diff != "" {
				t.Errorf("%s: older than %s (-want +got):\n%s", step.name, namespace, diff)
			}
		}
	}
	k.set("a", nil)
	k.set("b", nil)
	if len(k.byHash)+len(k.byNamespace) != 0 {
		t.Errorf("the index still has %v %v", k.byHash, k.byNamespace)
	}
}

func TestSecretsAreCachedWithoutContents(t *testing.T) {
	strip := stripSecret("posthorn-system")
	secret := func(namespace, name string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, ResourceVersion: "7", Labels: map[string]string{liveconfig.LabelNamespace: "a"},
			Annotations:   map[string]string{corev1.LastAppliedConfigAnnotation: "hush"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl"}},
		}}
	}
	for name, want := range map[string]map[string]string{"other": nil, liveconfig.SecretName("a"): {liveconfig.LabelNamespace: "a"}} {
		got, err := strip(secret("posthorn-system", name))
		if err != nil {
			t.Fatal(err)
		}
		wanted := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "posthorn-system", Name: name, ResourceVersion: "7", Labels: want}}
		if diff := cmp.Diff(wanted, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if got, err := strip(&corev1.Secret{}); err == nil {
		t.Errorf("a Secret with contents would be cached as %v", got)
	}
}

func kindOf(name string) kinds.Kind {
	k, _ := kinds.All.ByName(name)
	return k
}

// The status of a kind that runs once causes a compilation when the phase of the run changes.
func TestInputOfJobs(t *testing.T) {
	running := &v1alpha1.Redelivery{}
	running.Status.StartTime = &metav1.Time{Time: time.Unix(1, 0)}
	progress := running.DeepCopy()
	progress.Status.Redelivered = 5
	ended := &v1alpha1.DeletionRequest{}
	ended.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionFailed, Status: metav1.ConditionTrue}}
	for name, c := range map[string]struct {
		kind          string
		before, after client.Object
		want          bool
	}{
		"start of a Redelivery":      {"Redelivery", &v1alpha1.Redelivery{}, running, true},
		"progress of a Redelivery":   {"Redelivery", running, progress, false},
		"end of a DeletionRequest":   {"DeletionRequest", &v1alpha1.DeletionRequest{}, ended, true},
		"start of a DeletionRequest": {"DeletionRequest", &v1alpha1.DeletionRequest{}, &v1alpha1.DeletionRequest{Status: v1alpha1.DeletionRequestStatus{JobStatus: running.Status.JobStatus}}, false},
	} {
		if got := inputChanged(kindOf(c.kind)).Update(event.UpdateEvent{ObjectOld: c.before, ObjectNew: c.after}); got != c.want {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}

// After an interruption, a watch delivers one update even if the object was deleted and
// created again, and a deletion may have the last known version.
func TestPredicates(t *testing.T) {
	source := func(uid string, generation int64, labels map[string]string) *v1alpha1.Source {
		return &v1alpha1.Source{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "web", UID: types.UID(uid), Generation: generation, Labels: labels}}
	}
	before := source("1", 1, map[string]string{"team": "shop"})
	for name, test := range map[string]struct {
		after *v1alpha1.Source
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

	r := &configReconciler{release: "posthorn-system", written: map[string]liveSecret{"a": {revision: "r", resourceVersion: "7"}}}
	secret := func(namespace, version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: liveconfig.SecretName("a"), ResourceVersion: version}}
	}
	own := r.notOwnWrite()
	for name, test := range map[string]struct{ got, want bool }{
		"own update":        {own.Update(event.UpdateEvent{ObjectOld: secret("posthorn-system", "6"), ObjectNew: secret("posthorn-system", "7")}), false},
		"foreign update":    {own.Update(event.UpdateEvent{ObjectOld: secret("posthorn-system", "7"), ObjectNew: secret("posthorn-system", "8")}), true},
		"relisted":          {own.Update(event.UpdateEvent{ObjectOld: secret("other", "8"), ObjectNew: secret("other", "8")}), false},
		"another namespace": {own.Create(event.CreateEvent{Object: secret("other", "7")}), true},
		"own creation":      {own.Create(event.CreateEvent{Object: secret("posthorn-system", "7")}), false},
		"deletion":          {own.Delete(event.DeleteEvent{Object: secret("posthorn-system", "7")}), true},
	} {
		if test.got != test.want {
			t.Errorf("%s: %v, want %v", name, test.got, test.want)
		}
	}
}

func TestDifferences(t *testing.T) {
	report := func(change func(*adminapi.Report)) *adminapi.Report {
		r := &adminapi.Report{Ready: true, Namespaces: []adminapi.NamespaceReport{{Namespace: "a", Revision: "1"}, {Namespace: "b", Revision: "1"}}}
		if change != nil {
			change(r)
		}
		return r
	}
	tests := []struct {
		name          string
		before, after *adminapi.Report
		namespaces    []string
		all           bool
	}{
		{"the first", nil, report(nil), nil, true},
		{"equal", report(nil), report(nil), nil, false},
		{"one changed", report(nil), report(func(r *adminapi.Report) { r.Namespaces[1].Revision = "2" }), []string{"b"}, false},
		{"one removed", report(nil), report(func(r *adminapi.Report) { r.Namespaces = r.Namespaces[:1] }), []string{"b"}, false},
		{"one added", report(func(r *adminapi.Report) { r.Namespaces = r.Namespaces[1:] }), report(nil), []string{"a"}, false},
		{"disk full", report(nil), report(func(r *adminapi.Report) { r.Storage.Pressure = true }), nil, true},
		{"disk used", report(nil), report(func(r *adminapi.Report) { r.Storage.UsedBytes = 1 }), nil, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			namespaces, all := differences(test.before, test.after)
			if diff := cmp.Diff(test.namespaces, namespaces); diff != "" || all != test.all {
				t.Errorf("all %v, want %v; namespaces (-want +got):\n%s", all, test.all, diff)
			}
		})
	}
}
