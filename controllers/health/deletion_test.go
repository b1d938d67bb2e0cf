package health

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/invariants"
)

func TestDeletionRequest(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	accepted := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "ok", State: liveconfig.Active, Revision: "r"}
	paused := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "ok", Unresolved: &compile.Unresolved{Reason: v1beta1.ReasonNoSource, Message: "no source"}, State: liveconfig.Paused, Revision: "r"}
	request := v1beta1.DeletionRequest{ObjectMeta: metav1.ObjectMeta{Name: "u1", Generation: 2}}
	pods := func(started time.Time, states ...string) []Pod {
		report := func(owner bool) *podreport.Index {
			d := adminapi.DeletionReport{Name: "u1", Generation: 2, Revision: "r", Owner: owner}
			if owner {
				d.Started = started
				for i, state := range states {
					d.Notifications = append(d.Notifications, adminapi.NotificationReport{Source: "web", Destination: fmt.Sprint(i), State: state,
						Time: started.Add(time.Duration(i) * time.Second)})
				}
			}
			return podreport.NewIndex(adminapi.Report{Ready: true,
				Namespaces: []adminapi.NamespaceReport{{Namespace: "shop", Deletions: []adminapi.DeletionReport{d}}}})
		}
		return []Pod{{Name: "a", Report: report(true)}, {Name: "b", Report: report(false)}}
	}
	with := func(pods []Pod, change func(*adminapi.DeletionReport)) []Pod {
		change(pods[0].Report.Namespace("shop").Deletions["u1"])
		return pods
	}
	recorded := func(pods []Pod) []Pod {
		return with(pods, func(r *adminapi.DeletionReport) { r.Completed = true })
	}
	const delivered, pending = adminapi.NotificationDelivered, adminapi.NotificationPending
	for _, c := range []struct {
		name    string
		verdict compile.Verdict
		pods    []Pod
		// want lists the conditions that are True, and the reason.
		want  string
		total int32
	}{
		{"not started", accepted, pods(time.Time{}), "Accepted ResolvedRefs: Waiting", -1},
		{"no pod", accepted, nil, "Accepted ResolvedRefs: Waiting", -1},
		{"paused", paused, pods(time.Time{}), "Accepted: NoSource", -1},
		{"invalid", compile.Verdict{Reason: v1beta1.ReasonInvalidSpec, State: liveconfig.Paused, Revision: "r"}, pods(time.Time{}), "ResolvedRefs Stalled: InvalidSpec", -1},
		{"pending", accepted, pods(now, delivered, pending), "Accepted ResolvedRefs: Running", 2},
		{"not recorded", accepted, pods(now, delivered), "Accepted ResolvedRefs: Running", 1},
		{"delivered", accepted, recorded(pods(now, delivered, delivered)), "Accepted ResolvedRefs Complete Ready: Delivered", 2},
		{"a dead letter", accepted, pods(now, delivered, adminapi.NotificationDeadLettered), "Accepted ResolvedRefs Failed Stalled: NotDelivered", 2},
		{"discarded", accepted, pods(now, adminapi.NotificationDiscarded), "Accepted ResolvedRefs Failed Stalled: NotDelivered", 1},
		{"no destinations", accepted, recorded(pods(now)), "Accepted ResolvedRefs Complete Ready: NoDestinations", 0},
		{"many", accepted, pods(now, make([]string, 300)...), "Accepted ResolvedRefs Failed Stalled: NotDelivered", 300},
		{"already done", accepted, with(pods(time.Time{}), func(r *adminapi.DeletionReport) { r.AlreadyDone = true }), "Accepted ResolvedRefs Complete Ready: AlreadyDone", -1},
		{"deadline", accepted, with(pods(now, delivered, adminapi.NotificationDeadLettered), func(r *adminapi.DeletionReport) { r.DeadlineExceeded = true }), "Accepted ResolvedRefs Failed Stalled: DeadlineExceeded", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := request
			d.Status.Conditions = []metav1.Condition{{Type: "Foreign", Status: metav1.ConditionTrue, Reason: "Kept",
				LastTransitionTime: metav1.NewTime(now)}}
			d.Status = DeletionRequest(d, c.verdict, "shop", c.pods, now)
			if got := jobSummary(t, d.Status.JobStatus, d.Generation); got != c.want {
				t.Errorf("conditions %q, want %q", got, c.want)
			}
			if meta.FindStatusCondition(d.Status.Conditions, "Foreign") != nil {
				t.Error("the status has the condition of another controller, which would take it over")
			}
			if s := d.Status; c.total < 0 != (s.Total == nil) || s.Total != nil && *s.Total != c.total || len(s.Notifications) > 200 {
				t.Errorf("total %v, %d notifications", s.Total, len(s.Notifications))
			} else if s.Total != nil && *s.Total != *s.Delivered+*s.Pending+*s.DeadLettered+*s.Discarded {
				t.Errorf("total: got %d, want %d delivered, %d pending, %d dead-lettered and %d discarded", *s.Total, *s.Delivered,
					*s.Pending, *s.DeadLettered, *s.Discarded)
			}
			complete := meta.IsStatusConditionTrue(d.Status.Conditions, v1beta1.ConditionComplete)
			if s := d.Status; complete != (s.CompletionTime != nil) || v1beta1.JobEnded(s.JobStatus) && s.StartTime == nil {
				t.Errorf("started %v, completed %v", s.StartTime, s.CompletionTime)
			}
			if again := DeletionRequest(d, c.verdict, "shop", c.pods, now.Add(time.Hour)); !equality.Semantic.DeepEqual(again, d.Status) {
				t.Error("equal inputs return another status")
			}
			// While the pods restart, the notifications are kept.
			gone := DeletionRequest(d, c.verdict, "shop", nil, now)
			if !equality.Semantic.DeepEqual(gone.Notifications, d.Status.Notifications) {
				t.Errorf("without pods: %+v", gone)
			}
			if !v1beta1.JobEnded(d.Status.JobStatus) {
				return
			}
			// The end is final: other reports, another verdict or a new TTL do not change it.
			d.Generation++
			final := DeletionRequest(d, paused, "shop", pods(now, pending), now.Add(time.Hour))
			if got := jobSummary(t, final.JobStatus, d.Generation); got != c.want {
				t.Errorf("after the end: conditions %q, want %q", got, c.want)
			}
		})
	}
}

// jobSummary lists the conditions that are True, and the reason, and checks that
// the conditions agree.
func jobSummary(t *testing.T, s v1beta1.JobStatus, generation int64) string {
	t.Helper()
	if s.ObservedGeneration != generation {
		t.Errorf("observedGeneration %d, want %d", s.ObservedGeneration, generation)
	}
	var are []string
	for _, conditionType := range []string{v1beta1.ConditionAccepted, v1beta1.ConditionResolvedRefs, v1beta1.ConditionComplete,
		v1beta1.ConditionFailed, v1beta1.ConditionReady, v1beta1.ConditionStalled} {
		c := meta.FindStatusCondition(s.Conditions, conditionType)
		switch {
		case c == nil && conditionType == v1beta1.ConditionStalled:
			continue
		case c == nil:
			t.Fatalf("no condition %s in %+v", conditionType, s.Conditions)
		case c.ObservedGeneration != generation || !invariants.Reason.MatchString(c.Reason) || c.LastTransitionTime.IsZero():
			t.Errorf("%+v", c)
		case c.Status == metav1.ConditionTrue:
			are = append(are, conditionType)
		}
	}
	return strings.Join(are, " ") + ": " + meta.FindStatusCondition(s.Conditions, v1beta1.ConditionReady).Reason
}

// The message of a run names the notifications that wait for suspended destinations.
func TestMessageWithSuspendedDestinations(t *testing.T) {
	report := adminapi.DeletionReport{Notifications: []adminapi.NotificationReport{
		{Destination: "crm", State: adminapi.NotificationPending}, {Destination: "erp", State: adminapi.NotificationPending},
		{Destination: "crm", State: adminapi.NotificationDelivered}}}
	for want, suspended := range map[string][]string{
		"2 of 3 notifications pending": {"other"},
		"2 of 3 notifications pending; 1 of them for suspended destinations, until spec.suspend is false": {"crm", "other"},
	} {
		check.Equal(t, "message", outcome(new(v1beta1.DeletionRequestStatus), &report, suspended).Message, want)
	}
}

// The message of a completed request has the number of notifications, or the reason why there are none.
func TestMessageOfACompletedDeletionRequest(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	delivered := []adminapi.NotificationReport{{State: adminapi.NotificationDelivered}, {State: adminapi.NotificationDelivered}}
	for want, r := range map[string]adminapi.DeletionReport{
		"Delivered: 2 notifications delivered": {Notifications: delivered},
		"NoDestinations: no notification was sent: no WebhookDestination that takes deletions (spec.deletions) has an affected Source": {},
	} {
		r.Started, r.Completed = now, true
		o := outcome(new(v1beta1.DeletionRequestStatus), &r, nil)
		if got := o.Reason + ": " + o.Message; got != want || !o.Complete {
			t.Errorf("outcome: got %q, complete %t, want %q and complete", got, o.Complete, want)
		}
	}
}

// A request that suppresses the user ends when every dispatcher rejects the calls.
func TestDeletionRequestSuppresses(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	v := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, State: liveconfig.Active, Revision: "r"}
	pod := func(name, revision string, owner bool) Pod {
		r := adminapi.DeletionReport{Name: "u1", Generation: 1, Revision: revision, Owner: owner}
		if owner {
			r.Started, r.Completed = now, true
		}
		return Pod{Name: name,
			Report: podreport.NewIndex(adminapi.Report{Namespaces: []adminapi.NamespaceReport{{Namespace: "shop",
				Deletions: []adminapi.DeletionReport{r}}}})}
	}
	d := v1beta1.DeletionRequest{ObjectMeta: metav1.ObjectMeta{Name: "u1", Generation: 1}, Spec: v1beta1.DeletionRequestSpec{Suppress: true}}
	for revision, want := range map[string]string{"old": "Accepted ResolvedRefs: Running", "r": "Accepted ResolvedRefs Complete Ready: NoDestinations"} {
		s := DeletionRequest(d, v, "shop", []Pod{pod("a", "r", true), pod("b", revision, false)}, now)
		if got := jobSummary(t, s.JobStatus, 1); got != want {
			t.Errorf("with a dispatcher that runs revision %s: %q, want %q", revision, got, want)
		}
	}
}

func TestDeletionRequestExpires(t *testing.T) {
	end := metav1.NewTime(time.Unix(1_800_000_000, 0))
	ended := func(conditionType string) v1beta1.DeletionRequest {
		d := v1beta1.DeletionRequest{ObjectMeta: metav1.ObjectMeta{Generation: 1}}
		d.Spec.TTLSecondsAfterFinished = ptr.To(int32(60))
		d.Status.Conditions = []metav1.Condition{{Type: conditionType, Status: metav1.ConditionTrue, LastTransitionTime: end}}
		return d
	}
	for _, conditionType := range []string{v1beta1.ConditionComplete, v1beta1.ConditionFailed} {
		o := ended(conditionType)
		if at, ok := DeletionRequests.Expires(&o); !ok || !at.Equal(end.Add(time.Minute)) {
			t.Errorf("%s: %v %v", conditionType, at, ok)
		}
	}
	for name, change := range map[string]func(*v1beta1.DeletionRequest){
		"no ttl":    func(d *v1beta1.DeletionRequest) { d.Spec.TTLSecondsAfterFinished = nil },
		"not ended": func(d *v1beta1.DeletionRequest) { d.Status.Conditions = nil },
	} {
		changed := ended(v1beta1.ConditionComplete)
		change(&changed)
		if at, ok := DeletionRequests.Expires(&changed); ok {
			t.Errorf("%s: it expires at %v", name, at)
		}
	}
}

// Failures and the end of a run cause Events. Every Event has an action, because the API
// rejects Events without one.
func TestEventsOfAudiencesAndDeletions(t *testing.T) {
	condition := func(conditionType string, status metav1.ConditionStatus, reason string) []metav1.Condition {
		return []metav1.Condition{{Type: conditionType, Status: status, Reason: reason, Message: "m"}}
	}
	const synced, complete, failed = v1beta1.ConditionSynced, v1beta1.ConditionComplete, v1beta1.ConditionFailed
	for _, c := range []struct {
		old, new []metav1.Condition
		want     string
	}{
		{nil, condition(synced, "Unknown", v1beta1.ReasonNoSyncYet), ""},
		{condition(synced, "Unknown", v1beta1.ReasonNoSyncYet), condition(synced, "True", v1beta1.ReasonSynced), "Normal Synced Sync"},
		{condition(synced, "True", v1beta1.ReasonSynced), condition(synced, "False", v1beta1.ReasonSyncRefused), "Warning SyncRefused Sync"},
		{nil, condition(synced, "False", v1beta1.ReasonNotAccepted), ""},
		{condition(synced, "True", v1beta1.ReasonSending), condition(synced, "True", v1beta1.ReasonSynced), ""},
		{condition(synced, "False", v1beta1.ReasonSyncRefused), condition(synced, "True", v1beta1.ReasonSynced), "Normal Synced Sync"},
		{nil, condition(complete, "False", v1beta1.ReasonRunning), ""},
		{condition(complete, "Unknown", v1beta1.ReasonPending), condition(complete, "False", v1beta1.ReasonRunning), ""},
		{condition(complete, "False", v1beta1.ReasonRunning), condition(complete, "True", v1beta1.ReasonDelivered), "Normal Delivered Run"},
		{condition(complete, "False", v1beta1.ReasonRunning), condition(complete, "False", v1beta1.ReasonNotDelivered), ""},
		{condition(failed, "False", v1beta1.ReasonRunning), condition(failed, "True", v1beta1.ReasonNotDelivered), "Warning NotDelivered Run"},
		{condition(failed, "False", v1beta1.ReasonRunning), condition(failed, "False", v1beta1.ReasonDelivered), ""},
		{nil, condition(v1beta1.ConditionStalled, "True", v1beta1.ReasonNotDelivered), ""},
		{condition(v1beta1.ConditionAccepted, "Unknown", v1beta1.ReasonPending), condition(v1beta1.ConditionAccepted, "True", v1beta1.ReasonAccepted), ""},
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

// A report is found in sorted and in unsorted lists.
func TestReportsInAnyOrder(t *testing.T) {
	for _, names := range [][]string{{"a", "b", "c", "d"}, {"d", "c", "b", "a"}, {"b", "d", "a", "c"}} {
		namespace := adminapi.NamespaceReport{Namespace: "shop"}
		for _, name := range names {
			namespace.Deletions = append(namespace.Deletions, adminapi.DeletionReport{Name: name})
		}
		pod := Pod{Report: podreport.NewIndex(adminapi.Report{Namespaces: []adminapi.NamespaceReport{namespace}})}
		for _, name := range names {
			if r := deletionReports.of(pod, "shop", name, nil); r == nil || r.Name != name {
				t.Errorf("%v: the report about %s is %+v", names, name, r)
			}
		}
		if r := deletionReports.of(pod, "shop", "bb", nil); r != nil {
			t.Errorf("%v: found %+v", names, r)
		}
	}
}
