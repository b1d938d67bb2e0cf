package compile

import (
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

func audience(name string, age time.Duration, spec v1beta1.AudienceSpec) v1beta1.Audience {
	return v1beta1.Audience{ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 2,
		CreationTimestamp: metav1.NewTime(time.Unix(1e9, 0).Add(-age))}, Spec: spec}
}

func TestAudiences(t *testing.T) {
	source := func(name string) v1beta1.Source { return v1beta1.Source{ObjectMeta: metav1.ObjectMeta{Name: name}} }
	percent := int32(5)
	bad := int32(101)
	s := Snapshot{
		Namespace: "shop", Objects: slices.Concat(pointers(source("web"), source("ios")), pointers(
			audience("young", 0, v1beta1.AudienceSpec{SourceRef: v1beta1.ObjectReference{Name: "web"}, Key: "big_spenders"}),
			audience("old", time.Hour, v1beta1.AudienceSpec{SourceRef: v1beta1.ObjectReference{Name: "web"}, Key: "big_spenders", MaxRemovalPercent: &percent}),
			audience("other-source", 0, v1beta1.AudienceSpec{SourceRef: v1beta1.ObjectReference{Name: "ios"}, Key: "big_spenders", Type: "ComputedTrait"}),
			audience("own-key", 0, v1beta1.AudienceSpec{SourceRef: v1beta1.ObjectReference{Name: "web"}, Key: "spenders"}),
			audience("nowhere", 0, v1beta1.AudienceSpec{SourceRef: v1beta1.ObjectReference{Name: "tv"}, Key: "viewers"}),
			audience("nameless", 0, v1beta1.AudienceSpec{SourceRef: v1beta1.ObjectReference{Name: "web"}}),
			audience("odd", 0, v1beta1.AudienceSpec{SourceRef: v1beta1.ObjectReference{Name: "web"}, Key: "odd", Type: "Odd", MaxRemovalPercent: &bad}),
		)),
	}
	c, verdicts := table.Compile(s)
	data, _, err := liveconfig.Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := liveconfig.Decode(data); err != nil {
		t.Fatalf("the dispatcher rejects the config: %v", err)
	}
	if len(c.Audiences) != 7 || !slices.IsSortedFunc(c.Audiences, func(a, b liveconfig.Audience) int {
		return slices.Compare([]byte(a.Name), []byte(b.Name))
	}) {
		t.Fatalf("audiences %+v", c.Audiences)
	}
	for _, a := range c.Audiences {
		v := verdicts["audiences"][a.Name]
		want := map[string]struct{ reason, key string }{
			"young": {v1beta1.ReasonKeyConflict, ""}, "old": {v1beta1.ReasonAccepted, "big_spenders"},
			"other-source": {v1beta1.ReasonAccepted, "big_spenders"}, "own-key": {v1beta1.ReasonAccepted, "spenders"},
			"nowhere": {v1beta1.ReasonNoSource, ""}, "nameless": {v1beta1.ReasonInvalidSpec, ""}, "odd": {v1beta1.ReasonInvalidSpec, ""},
		}[a.Name]
		if reason, _ := v.Cause(); reason != want.reason || a.Key != want.key || v.OK() != (want.key != "") ||
			v.Revision != a.Revision || a.Revision == "" || a.Generation != 2 {
			t.Errorf("%s: %+v %+v", a.Name, a, v)
		}
	}
	if c.Audiences[slices.IndexFunc(c.Audiences, func(a liveconfig.Audience) bool { return a.Name == "old" })].MaxRemovalPercent != 5 {
		t.Error("maxRemovalPercent is not in the config")
	}
	large := table.tooLarge(verdicts, 1, DefaultLimit, liveconfig.Config{})
	if v := large["audiences"]["old"]; v.Accepted || v.Reason != v1beta1.ReasonConfigTooLarge {
		t.Errorf("too large: %+v", v)
	}
	// The order of the objects has no effect.
	slices.Reverse(s.Objects)
	again, _ := table.Compile(s)
	if _, one, _ := liveconfig.Encode(c); true {
		if _, two, _ := liveconfig.Encode(again); one != two {
			t.Error("the config depends on the order of the objects")
		}
	}
}
