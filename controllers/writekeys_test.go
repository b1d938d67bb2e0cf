package controllers

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
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
		{"the removed key is reserved", live("b", keys{x: compile.KeyReserved, "z": compile.KeyInUse}), []string{"a"},
			map[string]keys{"a": reserved, "b": {}}},
		{"the owner adds the key again", held("b", 2, x), []string{"a"}, map[string]keys{"a": reserved, "b": {}}},
		{"the owner uses it again", live("b", used), []string{"a"}, map[string]keys{"a": used, "b": {}}},
		{"the owner is removed", func() []string { k.set("b", nil); return k.setLive("b", reserved) }, []string{"a"},
			map[string]keys{"a": reserved}},
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

func TestLiveHolders(t *testing.T) {
	created := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	source := &v1beta1.Source{}
	source.Namespace, source.Name, source.CreationTimestamp = "shop", "web", metav1.NewTime(created)
	destination := &v1beta1.WebhookDestination{}
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
