package compile

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

func TestDeletions(t *testing.T) {
	request := func(name, uid string, spec v1alpha1.DeletionRequestSpec) v1alpha1.DeletionRequest {
		return v1alpha1.DeletionRequest{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid), Generation: 3}, Spec: spec}
	}
	s := Snapshot{
		Namespace: "shop", Sources: []v1alpha1.Source{{ObjectMeta: metav1.ObjectMeta{Name: "web"}}, {ObjectMeta: metav1.ObjectMeta{Name: "ios"}}},
		Deletions: []v1alpha1.DeletionRequest{
			request("all", "1", v1alpha1.DeletionRequestSpec{UserID: "u1", Suppress: true}),
			request("all-again", "2", v1alpha1.DeletionRequestSpec{UserID: "u1"}),
			request("some", "3", v1alpha1.DeletionRequestSpec{UserID: "u1", Sources: []string{"web", "ios"}}),
			request("some-missing", "4", v1alpha1.DeletionRequestSpec{UserID: "u1", Sources: []string{"web", "tv"}}),
			request("nobody", "5", v1alpha1.DeletionRequestSpec{}),
		},
	}
	c, verdicts := Compile(s)
	data, _, err := liveconfig.Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := liveconfig.Decode(data); err != nil {
		t.Fatalf("the dispatcher refuses it: %v", err)
	}
	reasons := map[string]string{"all": v1alpha1.ReasonAccepted, "all-again": v1alpha1.ReasonAccepted, "some": v1alpha1.ReasonAccepted, "some-missing": v1alpha1.ReasonNoSource, "nobody": v1alpha1.ReasonInvalidSpec}
	ids := map[string]string{}
	for _, d := range c.Deletions {
		v := verdicts.Deletions[d.Name]
		if v.Reason != reasons[d.Name] || v.Accepted != (d.ID != "") || v.Revision != d.Revision || d.Generation != 3 || d.Suppress != (d.Name == "all") {
			t.Errorf("%s: %+v %+v", d.Name, d, v)
		}
		if other := ids[d.ID]; d.ID != "" && other != "" {
			t.Errorf("%s and %s have the same id", d.Name, other)
		}
		ids[d.ID] = d.Name
	}
	if len(c.Deletions) != 5 {
		t.Errorf("%d deletions", len(c.Deletions))
	}
	// What was told does not depend on what may change without it.
	id := c.Deletions[3].ID
	s.Deletions[2].Generation, s.Deletions[2].Spec.Suppress, s.Deletions[2].Spec.Sources = 9, true, []string{"ios", "web"}
	if again, _ := Compile(s); again.Deletions[3].ID != id {
		t.Error("the id changed with the generation, suppress, or the order of Sources")
	}
	s.Deletions[2].Spec.UserID = "u2"
	if again, _ := Compile(s); again.Deletions[3].ID == id {
		t.Error("another user has the same id")
	}
	if v := verdicts.tooLarge(1, liveconfig.MaxEncodedBytes, liveconfig.Config{}).Deletions["all"]; v.Accepted {
		t.Errorf("too large: %+v", v)
	}
}
