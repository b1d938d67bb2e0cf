package compile

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/check"
)

func TestDeletions(t *testing.T) {
	request := func(name, uid string, spec v1beta1.DeletionRequestSpec) v1beta1.DeletionRequest {
		return v1beta1.DeletionRequest{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid), Generation: 3}, Spec: spec}
	}
	refs := func(names ...string) (out []v1beta1.ObjectReference) {
		for _, name := range names {
			out = append(out, v1beta1.ObjectReference{Name: name})
		}
		return out
	}
	started := metav1.Now()
	ended := v1beta1.JobStatus{StartTime: &started, Conditions: []metav1.Condition{{Type: v1beta1.ConditionFailed,
		Status: metav1.ConditionTrue}}}
	requests := []v1beta1.DeletionRequest{
		request("all", "1", v1beta1.DeletionRequestSpec{UserID: "u1", Suppress: true}),
		request("all-again", "2", v1beta1.DeletionRequestSpec{UserID: "u1",
			JobSpec: v1beta1.JobSpec{ActiveDeadlineSeconds: ptr.To(int64(60))}}),
		request("ended", "6", v1beta1.DeletionRequestSpec{UserID: "u1"}),
		request("ended-suppresses", "7", v1beta1.DeletionRequestSpec{UserID: "u1", Suppress: true, SourceRefs: refs("tv")}),
		request("no-user", "5", v1beta1.DeletionRequestSpec{}),
		request("some", "3", v1beta1.DeletionRequestSpec{UserID: "u1", SourceRefs: refs("web", "ios")}),
		request("some-missing", "4", v1beta1.DeletionRequestSpec{UserID: "u1", SourceRefs: refs("web", "tv")}),
		request("started", "8", v1beta1.DeletionRequestSpec{UserID: "u1", SourceRefs: refs("tv")}),
	}
	requests[2].Status.JobStatus, requests[3].Status.JobStatus = ended, ended
	requests[7].Status.StartTime = &started
	s := Snapshot{
		Namespace: "shop",
		Objects: slices.Concat(pointers(requests...), []Object{
			&v1beta1.Source{ObjectMeta: metav1.ObjectMeta{Name: "web"}}, &v1beta1.Source{ObjectMeta: metav1.ObjectMeta{Name: "ios"}},
		}),
	}
	c, verdicts := table.Compile(s)
	data, _, err := liveconfig.Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := liveconfig.Decode(data); err != nil {
		t.Fatalf("the dispatcher rejects the config: %v", err)
	}
	var got []string
	ids := map[string]string{}
	for _, d := range c.Deletions {
		v := verdicts["deletions"][d.Name]
		reason, _ := v.Cause()
		got = append(got, fmt.Sprintf("%s: %s, runs %t, ends after %d s", d.Name, reason, d.ID != "" && !d.Ended, d.DeadlineSeconds))
		if v.OK() != (d.ID != "") || v.Revision != d.Revision || d.Generation != 3 || d.ID != "" && d.UID == "" {
			t.Errorf("%s: %+v %+v", d.Name, d, v)
		}
		if other := ids[d.ID]; d.ID != "" && other != "" {
			t.Errorf("%s and %s have the same id", d.Name, other)
		}
		ids[d.ID] = d.Name
	}
	want := []string{
		"all: Accepted, runs true, ends after 0 s", "all-again: Accepted, runs true, ends after 60 s",
		"ended-suppresses: Accepted, runs false, ends after 0 s",
		"no-user: InvalidSpec, runs false, ends after 0 s", "some: Accepted, runs true, ends after 0 s",
		"some-missing: NoSource, runs false, ends after 0 s", "started: Accepted, runs true, ends after 0 s",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if v, ok := verdicts["deletions"]["ended"]; !ok || !v.Accepted {
		t.Errorf("an ended request without suppression has the verdict %+v", v)
	}
	if v := table.tooLarge(verdicts, 1, DefaultLimit, liveconfig.Config{})["deletions"]["all"]; v.Accepted {
		t.Errorf("too large: %+v", v)
	}
}

// The namespace, the name and the spec without its TTL determine the ID of a run.
func TestJobIDs(t *testing.T) {
	base := func() *v1beta1.Redelivery {
		return &v1beta1.Redelivery{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "again", UID: "1", Generation: 1},
			Spec: v1beta1.RedeliverySpec{
				DestinationRef: v1beta1.ObjectReference{Name: "crm"}, DeadLettersPerSecond: 100,
				Match: &v1beta1.DeadLetterMatch{Reasons: []string{"Expired", "Rejected"}, Types: []v1beta1.MessageType{"page", "track"}},
			},
		}
	}
	// Dispatchers store IDs, so later releases must compute the same ones.
	if got, want := RedeliveryID("shop", base()), "7fea234228fcad2b0c52ae72ec226e81"; got != want {
		t.Errorf("the ID of a Redelivery is %s, want %s", got, want)
	}
	for name, c := range map[string]struct {
		change func(*v1beta1.Redelivery)
		same   bool
	}{
		"object": {func(o *v1beta1.Redelivery) { o.UID, o.Generation, o.Labels = "2", 7, map[string]string{"a": "b"} }, true},
		"TTL":    {func(o *v1beta1.Redelivery) { o.Spec.TTLSecondsAfterFinished = ptr.To(int32(5)) }, true},
		"order": {func(o *v1beta1.Redelivery) {
			slices.Reverse(o.Spec.Match.Reasons)
			slices.Reverse(o.Spec.Match.Types)
		}, true},
		"default rate": {func(o *v1beta1.Redelivery) { o.Spec.DeadLettersPerSecond = 0 }, true},
		"namespace":    {func(o *v1beta1.Redelivery) { o.Namespace = "other" }, false},
		"name":         {func(o *v1beta1.Redelivery) { o.Name = "other" }, false},
		"destination":  {func(o *v1beta1.Redelivery) { o.Spec.DestinationRef.Name = "other" }, false},
		"match":        {func(o *v1beta1.Redelivery) { o.Spec.Match = nil }, false},
		"dry run":      {func(o *v1beta1.Redelivery) { o.Spec.DryRun = true }, false},
		"rate":         {func(o *v1beta1.Redelivery) { o.Spec.DeadLettersPerSecond = 7 }, false},
		"requestID":    {func(o *v1beta1.Redelivery) { o.Spec.RequestID = "2" }, false},
		"deadline":     {func(o *v1beta1.Redelivery) { o.Spec.ActiveDeadlineSeconds = ptr.To(int64(5)) }, false},
	} {
		changed := base()
		if c.change(changed); (RedeliveryID(changed.Namespace, changed) == RedeliveryID("shop", base())) != c.same {
			t.Errorf("Redelivery with another %s: the same ID is %t, want %t", name, !c.same, c.same)
		}
	}
	deletion := func() *v1beta1.DeletionRequest {
		return &v1beta1.DeletionRequest{ObjectMeta: metav1.ObjectMeta{Name: "u1", UID: "1"},
			Spec: v1beta1.DeletionRequestSpec{UserID: "u1", SourceRefs: []v1beta1.ObjectReference{{Name: "ios"}, {Name: "web"}}}}
	}
	if got, want := DeletionRequestID("shop", deletion()), "2ff75516675fad9c6bb72848a09ebda6"; got != want {
		t.Errorf("the ID of a DeletionRequest is %s, want %s", got, want)
	}
	for name, c := range map[string]struct {
		change func(*v1beta1.DeletionRequest)
		same   bool
	}{
		"object":    {func(o *v1beta1.DeletionRequest) { o.UID = "2" }, true},
		"TTL":       {func(o *v1beta1.DeletionRequest) { o.Spec.TTLSecondsAfterFinished = ptr.To(int32(5)) }, true},
		"order":     {func(o *v1beta1.DeletionRequest) { slices.Reverse(o.Spec.SourceRefs) }, true},
		"user":      {func(o *v1beta1.DeletionRequest) { o.Spec.UserID = "u2" }, false},
		"Sources":   {func(o *v1beta1.DeletionRequest) { o.Spec.SourceRefs = nil }, false},
		"suppress":  {func(o *v1beta1.DeletionRequest) { o.Spec.Suppress = true }, false},
		"requestID": {func(o *v1beta1.DeletionRequest) { o.Spec.RequestID = "2" }, false},
		"deadline":  {func(o *v1beta1.DeletionRequest) { o.Spec.ActiveDeadlineSeconds = ptr.To(int64(5)) }, false},
	} {
		changed := deletion()
		if c.change(changed); (DeletionRequestID("shop", changed) == DeletionRequestID("shop", deletion())) != c.same {
			t.Errorf("DeletionRequest with another %s: the same ID is %t, want %t", name, !c.same, c.same)
		}
	}
}

func TestSuspendedDestinationsOfADeletionRequest(t *testing.T) {
	suspended, active := heavy("crm", 0, 1), heavy("erp", 0, 1)
	suspended.Spec.Suspend = ptr.To(true)
	s := namespaceOf(suspended, active)
	s.Objects = append(s.Objects, pointers(v1beta1.DeletionRequest{ObjectMeta: metav1.ObjectMeta{Name: "forget"}, Spec: v1beta1.DeletionRequestSpec{UserID: "u1"}})...)
	_, verdicts := table.Compile(s)
	check.Same(t, "suspended destinations", verdicts["deletions"]["forget"].Destinations, []string{"crm"})
}

// A destination of deletions only gets no call, and has no filter of its own.
func TestDeletionsOnly(t *testing.T) {
	b := builder{resolver: newResolver(nil)}
	if diff := cmp.Diff(&liveconfig.Filter{Types: []string{"delete"}}, b.messages(nil, v1beta1.OnlyDeletions)); diff != "" || len(b.problems) > 0 {
		t.Errorf("without a filter: got problems %v, want none; filter (-want +got):\n%s", b.problems, diff)
	}
	if b.messages(&v1beta1.Filter{Events: []string{"E"}}, v1beta1.OnlyDeletions); len(b.problems) != 1 {
		t.Errorf("with a filter: got problems %v, want one", b.problems)
	}
}
