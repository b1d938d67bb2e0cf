package controllers

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/kinds"
)

func TestWriteKeys(t *testing.T) {
	day := func(d int) time.Time { return time.Date(2026, 1, d, 0, 0, 0, 0, time.UTC) }
	holder := func(namespace string, d int) keyHolder {
		return keyHolder{namespace: namespace, name: "web", created: day(d)}
	}
	k := newWriteKeys()
	type keys = map[string]compile.KeyUse
	x, used, reserved := "x", keys{"x": compile.KeyInUse}, keys{"x": compile.KeyReserved}
	held := func(namespace string, day int, hash string) func() []string {
		return func() []string {
			return k.set(namespace, map[string]keyHolder{hash: holder(namespace, day)})
		}
	}
	live := func(namespace string, keys keys) func() []string {
		return func() []string { return k.setLive(namespace, keys) }
	}
	// Each step asks for the foreign keys of the namespaces in the order of their names, and the
	// first one without a foreign key owns it.
	steps := []struct {
		name     string
		do       func() []string
		affected []string
		foreign  map[string]keys // by namespace
	}{
		{"the first", held("b", 2, x), nil, map[string]keys{"b": {}}},
		{"another key", held("c", 1, "y"), nil, map[string]keys{"b": {}, "c": {}}},
		{"an older Source", held("a", 1, x), []string{"b"}, map[string]keys{"a": used, "b": {}}},
		{"the same again", held("a", 1, x), nil, map[string]keys{"a": used, "b": {}}},
		{"the live config of the owner", live("b", used), nil, map[string]keys{"a": used, "b": {}}},
		{"the live config of another namespace", live("a", used), nil, map[string]keys{"a": used, "b": {}}},
		{"the owner removes the key", held("b", 2, "z"), []string{"a"}, map[string]keys{"a": used, "b": {}}},
		{"the removed key is reserved", live("b", keys{x: compile.KeyReserved, "z": compile.KeyInUse}), []string{"a"}, map[string]keys{"a": reserved, "b": {}}},
		{"the owner adds the key again", held("b", 2, x), []string{"a"}, map[string]keys{"a": reserved, "b": {}}},
		{"the owner uses it again", live("b", used), []string{"a"}, map[string]keys{"a": used, "b": {}}},
		{"the owner is removed", func() []string { k.set("b", nil); return k.setLive("b", reserved) }, []string{"a"}, map[string]keys{"a": reserved}},
		{"a third namespace", held("c", 3, x), []string{"a"}, map[string]keys{"a": reserved, "c": reserved}},
		{"the reservation ends", live("b", nil), []string{"a", "c"}, map[string]keys{"a": {}, "c": used}},
	}
	for _, step := range steps {
		if diff := cmp.Diff(step.affected, step.do()); diff != "" {
			t.Errorf("%s: affected (-want +got):\n%s", step.name, diff)
		}
		for _, namespace := range slices.Sorted(maps.Keys(step.foreign)) {
			if diff := cmp.Diff(step.foreign[namespace], k.foreign(namespace)); diff != "" {
				t.Errorf("%s: foreign keys of %s (-want +got):\n%s", step.name, namespace, diff)
			}
		}
	}
	for _, namespace := range []string{"a", "b", "c"} {
		k.set(namespace, nil)
		k.setLive(namespace, nil)
	}
	if len(k.byHash)+len(k.byNamespace)+len(k.owners)+len(k.owned) != 0 {
		t.Errorf("the index still has %v %v %v %v", k.byHash, k.byNamespace, k.owners, k.owned)
	}

	k.set("young", map[string]keyHolder{x: holder("young", 2)})
	k.set("old", map[string]keyHolder{x: holder("old", 1)})
	if diff := cmp.Diff(used, k.foreign("young")); diff != "" {
		t.Errorf("foreign keys of the younger Source (-want +got):\n%s", diff)
	}
}

// partOfA is the name of a part of the live config of namespace a.
var partOfA = "posthorn-part-a-" + strings.Repeat("0", 64)

func TestSecretsAreCachedWithoutContents(t *testing.T) {
	strip := stripSecret("posthorn-system")
	secret := func(namespace, name string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, ResourceVersion: "7", Labels: map[string]string{liveconfig.LabelNamespace: "a"},
			Annotations:   map[string]string{corev1.LastAppliedConfigAnnotation: "hush"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl"}},
		}}
	}
	for name, want := range map[string]map[string]string{"other": nil, liveconfig.SecretName("a"): {liveconfig.LabelNamespace: "a"}, partOfA: {liveconfig.LabelNamespace: "a"}} {
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
	return *kinds.All.ByName(name)
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

	r := &configReconciler{release: "posthorn-system", parts: newPartSecrets(nil, nil, "posthorn-system", secretOwner{}), written: map[string]liveSecret{"a": {revision: "r", resourceVersion: "7"}}}
	secret := func(namespace, version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: liveconfig.SecretName("a"), ResourceVersion: version}}
	}
	part := func(version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "posthorn-system", Name: partOfA, ResourceVersion: version}}
	}
	r.parts.record("a", partOfA, "7")
	own := r.notOwnWrite()
	for name, test := range map[string]struct{ got, want bool }{
		"own update":        {own.Update(event.UpdateEvent{ObjectOld: secret("posthorn-system", "6"), ObjectNew: secret("posthorn-system", "7")}), false},
		"foreign update":    {own.Update(event.UpdateEvent{ObjectOld: secret("posthorn-system", "7"), ObjectNew: secret("posthorn-system", "8")}), true},
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

func TestConcernsAll(t *testing.T) {
	index := func(r adminapi.Report) *podreport.Index { return podreport.NewIndex(r) }
	tests := []struct {
		name          string
		before, after *podreport.Index
		want          bool
	}{
		{"the first report", nil, index(adminapi.Report{}), true},
		{"equal", index(adminapi.Report{Ready: true}), index(adminapi.Report{Ready: true}), false},
		{"ready", index(adminapi.Report{}), index(adminapi.Report{Ready: true}), true},
		{"disk full", index(adminapi.Report{}), index(adminapi.Report{Storage: adminapi.StorageReport{Pressure: true}}), true},
		{"disk used", index(adminapi.Report{}), index(adminapi.Report{Storage: adminapi.StorageReport{UsedBytes: 1}}), false},
		{"a namespace", index(adminapi.Report{}), index(adminapi.Report{Namespaces: []adminapi.NamespaceReport{{Namespace: "a"}}}), false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := concernsAll(test.before, test.after); got != test.want {
				t.Errorf("concerns all namespaces: got %v, want %v", got, test.want)
			}
		})
	}
}

func TestLiveHolders(t *testing.T) {
	created := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	source := &v1alpha1.Source{}
	source.Namespace, source.Name, source.CreationTimestamp = "shop", "web", metav1.NewTime(created)
	destination := &v1alpha1.WebhookDestination{}
	destination.Namespace, destination.Name = "shop", "deleted"
	live := liveconfig.Config{Namespace: "shop", Sources: []liveconfig.Source{
		{Name: "deleted", WriteKeySHA256: liveconfig.KeyHashes{"cc"}},
		{Name: "web", WriteKeySHA256: liveconfig.KeyHashes{"aa", "bb"}},
	}}
	holder := keyHolder{namespace: "shop", name: "web", created: created}
	want := map[string]keyHolder{"aa": holder, "bb": holder}
	if diff := cmp.Diff(want, liveHolders(live, []compile.Object{destination, source}), cmp.AllowUnexported(keyHolder{})); diff != "" {
		t.Errorf("holders (-want +got):\n%s", diff)
	}
}

// Traffic requests passes over all namespaces all the time. One that has changed is taken before them,
// also if it waits for such a pass itself.
func TestChangesOvertakeReports(t *testing.T) {
	queue := priorityqueue.New[reconcile.Request]("test")
	defer queue.ShutDown()
	tr := &trigger{}
	if err := tr.Start(t.Context(), queue); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		tr.fireAfter(fmt.Sprintf("busy-%02d", i), 0)
	}
	tr.fireAfter("edited-first", time.Hour)
	tr.fireChange("edited-first")
	tr.fireChange("busy-49")
	var got []string
	for range 51 {
		request, _, _ := queue.GetWithPriority()
		got = append(got, request.Name)
	}
	want := []string{"edited-first", "busy-49"}
	for i := range 49 {
		want = append(want, fmt.Sprintf("busy-%02d", i))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("order of the passes (-want +got):\n%s", diff)
	}
}
