package health

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
)

var redeliveryNow = time.Unix(1_800_000_000, 0)

// redeliveryPods returns pods with these reports about the Redelivery shop/again; a pod with
// a nil report does not answer.
func redeliveryPods(reports ...*adminapi.RedeliveryReport) (pods []Pod) {
	for i, r := range reports {
		pod := Pod{Name: string(rune('a' + i))}
		if r != nil {
			report := *r
			report.Name, report.Generation = "again", 2
			if report.UID == "" {
				report.UID = "1"
			}
			if report.Revision == "" {
				report.Revision = "r"
			}
			pod.Report = podreport.NewIndex(adminapi.Report{Ready: true,
				Namespaces: []adminapi.NamespaceReport{{Namespace: "shop", Redeliveries: []adminapi.RedeliveryReport{report}}}})
		}
		pods = append(pods, pod)
	}
	return pods
}

// redeliveryOf returns a Redelivery whose run started a minute ago with n pods; 0 means
// that it has not started.
func redeliveryOf(n int32) v1beta1.Redelivery {
	o := v1beta1.Redelivery{ObjectMeta: metav1.ObjectMeta{Name: "again", UID: "1", Generation: 2}}
	if n > 0 {
		start := metav1.NewTime(redeliveryNow.Add(-time.Minute))
		o.Status.StartTime = &start
		o.Status.Parts = &v1beta1.RedeliveryParts{Total: n}
	}
	return o
}

func TestRedelivery(t *testing.T) {
	type report = adminapi.RedeliveryReport
	accepted := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "ok", State: liveconfig.Active, Revision: "r"}
	waits := accepted
	waits.Waits = "another one runs"
	missing := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "ok", Unresolved: &compile.Unresolved{Reason: v1beta1.ReasonDestinationNotFound, Message: "no destination"}, State: liveconfig.Paused, Revision: "r"}
	invalid := compile.Verdict{Reason: v1beta1.ReasonInvalidSpec, Message: "bad", State: liveconfig.Paused, Revision: "r"}
	begun := &report{Begun: true}
	done := func(n int64) *report { return &report{Begun: true, Matched: n, Redelivered: n, Done: true} }
	completed := func(n int64) *report { r := done(n); r.Completed = true; return r }
	since := func(d time.Duration) func(*v1beta1.Redelivery) {
		return func(o *v1beta1.Redelivery) {
			at := metav1.NewTime(redeliveryNow.Add(-d))
			o.Status.Parts.UnavailableSince = &at
		}
	}
	dryRun := func(o *v1beta1.Redelivery) { o.Spec.DryRun = true }
	deadline := func(o *v1beta1.Redelivery) { o.Spec.ActiveDeadlineSeconds = ptr.To(int64(60)) }
	allDone := func(o *v1beta1.Redelivery) { o.Status.Parts.Done = o.Status.Parts.Total }
	for _, c := range []struct {
		name    string
		verdict compile.Verdict
		started int32
		change  func(*v1beta1.Redelivery)
		pods    []Pod
		// want lists the conditions that are True, and the reason.
		want    string
		message string
		// counts are matched, redelivered and notRedelivered.
		counts [3]int64
		phase  liveconfig.RedeliveryPhase
	}{
		{"missing destination", missing, 0, nil, redeliveryPods(begun), "Accepted: DestinationNotFound", "nothing is redelivered: no destination",
			[3]int64{}, liveconfig.RedeliveryBegin},
		{"invalid", invalid, 0, nil, redeliveryPods(begun), "ResolvedRefs Stalled: InvalidSpec", "nothing is redelivered: bad", [3]int64{},
			liveconfig.RedeliveryBegin},
		{"waits for another one", waits, 0, nil, redeliveryPods(begun), "Accepted ResolvedRefs: Waiting", "another one runs", [3]int64{},
			liveconfig.RedeliveryBegin},
		{"no pod", accepted, 0, nil, nil, "Accepted ResolvedRefs: Waiting", "no dispatcher is ready", [3]int64{}, liveconfig.RedeliveryBegin},
		{"one of two pods has begun", accepted, 0, nil, redeliveryPods(begun, &report{}), "Accepted ResolvedRefs: Waiting",
			"waiting for every dispatcher to record the run", [3]int64{}, liveconfig.RedeliveryBegin},
		{"a pod does not answer", accepted, 0, nil, redeliveryPods(begun, nil), "Accepted ResolvedRefs: Waiting", "waiting for every dispatcher to record the run; a dispatcher does not answer; check the logs of the dispatchers", [3]int64{}, liveconfig.RedeliveryBegin},
		{"begun for a deleted object", accepted, 0, nil, redeliveryPods(&report{Begun: true, UID: "0"}), "Accepted ResolvedRefs: Waiting", "waiting for every dispatcher to record the run", [3]int64{}, liveconfig.RedeliveryBegin},
		{"all pods have begun", accepted, 0, nil, redeliveryPods(begun, begun), "Accepted ResolvedRefs: Running", "the dispatchers count the dead letters",
			[3]int64{}, liveconfig.RedeliveryRun},
		{"one pod has the record of a completed run", accepted, 0, nil, redeliveryPods(begun, &report{AlreadyDone: true}), "Accepted ResolvedRefs Complete Ready: AlreadyDone", "a Redelivery with the same name and spec completed within the last 30 days, so nothing was redelivered; set spec.requestID to run it again", [3]int64{}, ""},
		{"running", accepted, 2, nil, redeliveryPods(done(4), &report{Begun: true, Matched: 6, Redelivered: 1}), "Accepted ResolvedRefs: Running", "5 of 10 dead letters redelivered so far", [3]int64{10, 5, 0}, liveconfig.RedeliveryRun},
		{"running, with an error", accepted, 1, nil, redeliveryPods(&report{Begun: true, Matched: 6, Redelivered: 1, Error: "storage is full"}), "Accepted ResolvedRefs: Running", "1 of 6 dead letters redelivered so far; storage is full", [3]int64{6, 1, 0}, liveconfig.RedeliveryRun},
		{"the destination was deleted", missing, 1, nil, redeliveryPods(&report{Begun: true, Matched: 6}), "Accepted: Running", "0 of 6 dead letters redelivered so far", [3]int64{6, 0, 0}, liveconfig.RedeliveryRun},
		{"all done, not recorded", accepted, 2, nil, redeliveryPods(done(4), done(0)), "Accepted ResolvedRefs: Running", "4 of 4 dead letters redelivered; waiting for the dispatchers to record the end", [3]int64{4, 4, 0}, liveconfig.RedeliveryRecord},
		{"complete", accepted, 2, allDone, redeliveryPods(completed(4), done(3)), "Accepted ResolvedRefs Complete Ready: Redelivered", "7 dead letters redelivered", [3]int64{7, 7, 0}, ""},
		{"complete, while a pod restarts", accepted, 2, allDone, redeliveryPods(completed(4), nil), "Accepted ResolvedRefs Complete Ready: Redelivered",
			"4 dead letters redelivered", [3]int64{4, 4, 0}, ""},
		{"dry run", accepted, 1, func(o *v1beta1.Redelivery) { dryRun(o); allDone(o) }, redeliveryPods(&report{Begun: true, Matched: 9, Done: true, Completed: true}), "Accepted ResolvedRefs Complete Ready: Counted", "9 dead letters would be redelivered", [3]int64{9, 0, 0}, ""},
		{"without a receiver", accepted, 1, nil, redeliveryPods(&report{Begun: true, Matched: 7, Redelivered: 4, Left: 3, Done: true}), "Accepted ResolvedRefs Failed Stalled: NotRedelivered", "4 of 7 dead letters redelivered; 3 dead letters kept, because the Source or the endpoint was removed from the destination", [3]int64{7, 4, 3}, ""},
		{"a failed part", accepted, 2, nil, redeliveryPods(done(2), &report{Begun: true, Matched: 7, Done: true, Failed: true, Error: "storage is full"}), "Accepted ResolvedRefs Failed Stalled: NotRedelivered", "2 of 9 dead letters redelivered; storage is full", [3]int64{9, 2, 7}, ""},
		{"a failed part, another one runs", accepted, 2, nil, redeliveryPods(begun, &report{Begun: true, Matched: 7, Done: true, Failed: true, Error: "storage is full"}), "Accepted ResolvedRefs: Running", "0 of 7 dead letters redelivered so far; storage is full", [3]int64{7, 0, 0}, liveconfig.RedeliveryRun},
		{"a pod is unavailable", accepted, 2, nil, redeliveryPods(done(2)), "Accepted ResolvedRefs: Running", "2 of 2 dead letters redelivered so far; a dispatcher is not ready or does not answer", [3]int64{2, 2, 0}, liveconfig.RedeliveryRun},
		{"a pod is unavailable for four minutes", accepted, 2, since(4 * time.Minute), redeliveryPods(done(2), nil), "Accepted ResolvedRefs: Running", "2 of 2 dead letters redelivered so far; a dispatcher is not ready or does not answer", [3]int64{2, 2, 0}, liveconfig.RedeliveryRun},
		{"a pod is unavailable for five minutes", accepted, 2, since(5 * time.Minute), redeliveryPods(done(2), nil), "Accepted ResolvedRefs Failed Stalled: NotRedelivered", "2 of 2 dead letters redelivered; a dispatcher is not ready or does not answer", [3]int64{2, 2, 0}, ""},
		{"a pod lost its store", accepted, 1, since(5 * time.Minute), redeliveryPods(&report{}), "Accepted ResolvedRefs Failed Stalled: NotRedelivered", "0 of 0 dead letters redelivered; a dispatcher is not ready or does not answer", [3]int64{}, ""},
		{"the deadline", accepted, 1, deadline, redeliveryPods(&report{Begun: true, Matched: 7, Redelivered: 2}), "Accepted ResolvedRefs Failed Stalled: DeadlineExceeded", "the run did not end within spec.activeDeadlineSeconds; 2 of 7 dead letters redelivered", [3]int64{7, 2, 5}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := redeliveryOf(c.started)
			if c.change != nil {
				c.change(&o)
			}
			o.Status = Redelivery(o, c.verdict, "shop", c.pods, redeliveryNow)
			if got := jobSummary(t, o.Status.JobStatus, o.Generation); got != c.want {
				t.Errorf("conditions: got %q, want %q", got, c.want)
			}
			if got := meta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionReady).Message; got != c.message {
				t.Errorf("message: got %q, want %q", got, c.message)
			}
			if diff := cmp.Diff(c.counts, [3]int64{ptr.Deref(o.Status.Matched, 0), ptr.Deref(o.Status.Redelivered, 0),
				ptr.Deref(o.Status.NotRedelivered, 0)}); diff != "" {
				t.Errorf("matched, redelivered and notRedelivered (-want +got):\n%s", diff)
			}
			if got := compile.RedeliveryPhase(&o); got != c.phase {
				t.Errorf("next phase: got %q, want %q", got, c.phase)
			}
			complete := meta.IsStatusConditionTrue(o.Status.Conditions, v1beta1.ConditionComplete)
			if complete != (o.Status.CompletionTime != nil) {
				t.Errorf("completionTime: got %v, want one: %v", o.Status.CompletionTime, complete)
			}
			if !v1beta1.JobEnded(o.Status.JobStatus) {
				return
			}
			// The end is final.
			o.Generation++
			final := Redelivery(o, missing, "shop", redeliveryPods(begun), redeliveryNow.Add(time.Hour))
			if got := jobSummary(t, final.JobStatus, o.Generation); got != c.want {
				t.Errorf("after the end: got conditions %q, want %q", got, c.want)
			}
		})
	}
}

// Equal inputs return an equal status, and the start time includes every dead letter that
// failed before.
func TestRedeliveryStart(t *testing.T) {
	now := redeliveryNow.Add(300 * time.Millisecond)
	v := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "ok", Revision: "r"}
	pods := redeliveryPods(&adminapi.RedeliveryReport{Begun: true})
	o := redeliveryOf(0)
	o.Status = Redelivery(o, v, "shop", pods, now)
	if got, want := o.Status.StartTime.Time, redeliveryNow.Add(time.Second); !got.Equal(want) {
		t.Errorf("startTime: got %s, want %s", got, want)
	}
	if diff := cmp.Diff(&v1beta1.RedeliveryParts{Total: 1}, o.Status.Parts); diff != "" {
		t.Errorf("dispatchers (-want +got):\n%s", diff)
	}
	o.Status = Redelivery(o, v, "shop", pods, now)
	if again := Redelivery(o, v, "shop", pods, now.Add(time.Second)); !equality.Semantic.DeepEqual(again, o.Status) {
		t.Error("equal inputs return another status")
	}
}

// Counts are numbers; the end of a part is a transition.
func TestRedeliveryNumbers(t *testing.T) {
	v := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "ok", Revision: "r"}
	next := func(o v1beta1.Redelivery, due bool, r adminapi.RedeliveryReport) v1beta1.Redelivery {
		return *paced(Redeliveries, &o, v, "shop", redeliveryPods(&r), redeliveryNow, due)
	}
	o := next(redeliveryOf(1), true, adminapi.RedeliveryReport{Begun: true, Matched: 5, Redelivered: 1})
	progress := adminapi.RedeliveryReport{Begun: true, Matched: 5, Redelivered: 3}
	if got := *next(o, false, progress).Status.Redelivered; got != 1 {
		t.Errorf("redelivered, numbers not due: got %d, want 1", got)
	}
	if got := *next(o, true, progress).Status.Redelivered; got != 3 {
		t.Errorf("redelivered, numbers due: got %d, want 3", got)
	}
	progress.Done = true
	if got := next(o, false, progress).Status.Parts.Done; got != 1 {
		t.Errorf("done, numbers not due: got %d, want 1", got)
	}
}
