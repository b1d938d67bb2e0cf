package health

import (
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

func TestDeletionRequest(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	accepted := compile.Verdict{Accepted: true, Reason: v1alpha1.ReasonAccepted, Message: "ok", State: liveconfig.Active, Revision: "r"}
	held := compile.Verdict{Reason: v1alpha1.ReasonNoSource, Message: "no source", State: liveconfig.Held, Revision: "r"}
	request := v1alpha1.DeletionRequest{ObjectMeta: metav1.ObjectMeta{Name: "u1", Generation: 2}}
	pods := func(started time.Time, states ...string) []Pod {
		report := func(owner bool) *liveconfig.Report {
			d := liveconfig.DeletionReport{Name: "u1", Generation: 2, Revision: "r", Owner: owner}
			if owner {
				d.Started = started
				for i, state := range states {
					d.Notifications = append(d.Notifications, liveconfig.NotificationReport{Source: "web", Destination: fmt.Sprint(i), State: state, Time: started.Add(time.Duration(i) * time.Second)})
				}
			}
			return &liveconfig.Report{Ready: true, Tenants: []liveconfig.TenantReport{{Tenant: "shop", Deletions: []liveconfig.DeletionReport{d}}}}
		}
		return []Pod{{Name: "a", Report: report(true)}, {Name: "b", Report: report(false)}}
	}
	const delivered, pending = liveconfig.NotificationDelivered, liveconfig.NotificationPending
	for _, c := range []struct {
		name      string
		verdict   compile.Verdict
		pods      []Pod
		status    metav1.ConditionStatus
		reason    string
		total     int32
		completed time.Duration // after the start; -1: not
	}{
		{"not started", accepted, pods(time.Time{}), "False", v1alpha1.ReasonNotifying, -1, -1},
		{"no pod", accepted, nil, "False", v1alpha1.ReasonNotifying, -1, -1},
		{"held", held, pods(time.Time{}), "False", v1alpha1.ReasonNotAccepted, -1, -1},
		{"pending", accepted, pods(now, delivered, pending), "False", v1alpha1.ReasonNotifying, 2, -1},
		{"delivered", accepted, pods(now, delivered, liveconfig.NotificationFiltered, delivered), "True", v1alpha1.ReasonDelivered, 3, 2 * time.Second},
		{"a dead letter", accepted, pods(now, delivered, liveconfig.NotificationDeadLettered), "True", v1alpha1.ReasonNotDelivered, 2, time.Second},
		{"discarded", accepted, pods(now, liveconfig.NotificationDiscarded), "True", v1alpha1.ReasonNotDelivered, 1, 0},
		{"nobody", accepted, pods(now), "True", v1alpha1.ReasonNobodyToTell, 0, 0},
		{"many", accepted, pods(now, make([]string, 300)...), "True", v1alpha1.ReasonNotDelivered, 300, 299 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := request
			d.Status = DeletionRequest(d, c.verdict, "shop", c.pods, now, true)
			if errs := checkConditions(d.Generation, d.Status.ObservedGeneration, d.Status.Conditions, d.Status.Dispatchers, v1alpha1.ConditionFinished); len(errs) > 0 {
				t.Error(errs)
			}
			finished := meta.FindStatusCondition(d.Status.Conditions, v1alpha1.ConditionFinished)
			if finished.Status != c.status || finished.Reason != c.reason {
				t.Errorf("%+v", finished)
			}
			if s := d.Status; c.total < 0 != (s.Total == nil) || s.Total != nil && *s.Total != c.total || len(s.Notifications) > 200 {
				t.Errorf("total %v, %d notifications", s.Total, len(s.Notifications))
			}
			if s := d.Status; c.completed < 0 != (s.CompletionTime == nil) || s.CompletionTime != nil && !s.CompletionTime.Time.Equal(now.Add(c.completed)) {
				t.Errorf("completed %v", s.CompletionTime)
			}
			if again := DeletionRequest(d, c.verdict, "shop", c.pods, now.Add(time.Hour), true); !equality.Semantic.DeepEqual(again, d.Status) {
				t.Error("equal facts gave another status")
			}
			// The pods restart: what is known stays.
			if gone := DeletionRequest(d, c.verdict, "shop", nil, now, true); !equality.Semantic.DeepEqual(gone.Notifications, d.Status.Notifications) || !gone.CompletionTime.Equal(d.Status.CompletionTime) ||
				meta.FindStatusCondition(gone.Conditions, v1alpha1.ConditionFinished).Reason != c.reason {
				t.Errorf("without pods: %+v", gone)
			}
		})
	}
}

func TestDeletionRequestExpires(t *testing.T) {
	ttl, done := int32(60), metav1.NewTime(time.Unix(1_800_000_000, 0))
	d := v1alpha1.DeletionRequest{ObjectMeta: metav1.ObjectMeta{Generation: 1}, Spec: v1alpha1.DeletionRequestSpec{TTLSecondsAfterFinished: &ttl}, Status: v1alpha1.DeletionRequestStatus{ObservedGeneration: 1, CompletionTime: &done}}
	if at, ok := DeletionRequestExpires(d); !ok || !at.Equal(done.Add(time.Minute)) {
		t.Errorf("%v %v", at, ok)
	}
	for name, change := range map[string]func(*v1alpha1.DeletionRequest){
		"no ttl":        func(d *v1alpha1.DeletionRequest) { d.Spec.TTLSecondsAfterFinished = nil },
		"not finished":  func(d *v1alpha1.DeletionRequest) { d.Status.CompletionTime = nil },
		"suppresses":    func(d *v1alpha1.DeletionRequest) { d.Spec.Suppress = true },
		"changed since": func(d *v1alpha1.DeletionRequest) { d.Generation = 2 },
	} {
		changed := *d.DeepCopy()
		change(&changed)
		if at, ok := DeletionRequestExpires(changed); ok {
			t.Errorf("%s: it expires at %v", name, at)
		}
	}
}

// What went wrong and what ended is worth an Event; every Event names its
// action, without which the API refuses it.
func TestEventsOfAudiencesAndDeletions(t *testing.T) {
	condition := func(conditionType string, status metav1.ConditionStatus, reason string) []metav1.Condition {
		return []metav1.Condition{{Type: conditionType, Status: status, Reason: reason, Message: "m"}}
	}
	const synced, finished = v1alpha1.ConditionSynced, v1alpha1.ConditionFinished
	for _, c := range []struct {
		old, new []metav1.Condition
		want     string
	}{
		{nil, condition(synced, "Unknown", v1alpha1.ReasonNoSyncYet), ""},
		{condition(synced, "Unknown", v1alpha1.ReasonNoSyncYet), condition(synced, "True", v1alpha1.ReasonSynced), "Normal Synced Sync"},
		{condition(synced, "True", v1alpha1.ReasonSynced), condition(synced, "False", v1alpha1.ReasonSyncRefused), "Warning SyncRefused Sync"},
		{nil, condition(synced, "False", v1alpha1.ReasonNotAccepted), ""},
		{condition(synced, "True", v1alpha1.ReasonSending), condition(synced, "True", v1alpha1.ReasonSynced), ""},
		{condition(synced, "False", v1alpha1.ReasonSyncRefused), condition(synced, "True", v1alpha1.ReasonSynced), "Normal Synced Sync"},
		{nil, condition(finished, "False", v1alpha1.ReasonNotifying), ""},
		{condition(finished, "False", v1alpha1.ReasonNotifying), condition(finished, "True", v1alpha1.ReasonDelivered), "Normal Delivered Notify"},
		{condition(finished, "False", v1alpha1.ReasonNotifying), condition(finished, "True", v1alpha1.ReasonNotDelivered), "Warning NotDelivered Notify"},
	} {
		got := ""
		for _, e := range Transitions(c.old, c.new) {
			got += e.Type + " " + e.Reason + " " + e.Action
		}
		if got != c.want {
			t.Errorf("%v -> %v: %q, want %q", c.old, c.new, got, c.want)
		}
	}
}

// A report is found wherever it stands.
func TestReportsInAnyOrder(t *testing.T) {
	for _, names := range [][]string{{"a", "b", "c", "d"}, {"d", "c", "b", "a"}, {"b", "d", "a", "c"}} {
		tenant := liveconfig.TenantReport{Tenant: "shop"}
		for _, name := range names {
			tenant.Deletions = append(tenant.Deletions, liveconfig.DeletionReport{Name: name})
		}
		pod := Pod{Report: &liveconfig.Report{Tenants: []liveconfig.TenantReport{tenant}}}
		for _, name := range names {
			if r := deletionPart.of(pod, "shop", name); r == nil || r.Name != name {
				t.Errorf("%v: for %s comes %+v", names, name, r)
			}
		}
		if r := deletionPart.of(pod, "shop", "bb"); r != nil {
			t.Errorf("%v: found %+v", names, r)
		}
	}
}
