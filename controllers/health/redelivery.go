package health

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/observed"
	"github.com/posthorn/posthorn/internal/plural"
)

const (
	// redeliveryInterval is the shortest time between two writes of the numbers of a run.
	redeliveryInterval = 2 * time.Second
	// maxUnavailable is the time for which a run waits for a participating pod that is not
	// ready or does not answer.
	maxUnavailable = 5 * time.Minute
)

// Redeliveries are the kind Redelivery.
var Redeliveries = NewKind(Definition[v1beta1.Redelivery, v1beta1.RedeliveryStatus, *v1beta1.Redelivery]{
	Name: "Redelivery", Conditions: jobConditions, Compute: Redelivery,
	Status: func(o *v1beta1.Redelivery) (*v1beta1.RedeliveryStatus, *[]metav1.Condition) {
		return &o.Status, &o.Status.Conditions
	},
	Summary:         func(s *v1beta1.RedeliveryStatus) *v1beta1.Summary { return &s.Summary },
	NumbersInterval: redeliveryInterval,
	ClearNumbers: func(s *v1beta1.RedeliveryStatus) {
		s.Matched, s.Redelivered = nil, nil
		for i := range s.Conditions {
			if c := &s.Conditions[i]; c.Reason == v1beta1.ReasonRunning {
				c.Message = ""
			}
		}
	},
	Job: func(o *v1beta1.Redelivery) *v1beta1.JobStatus { return &o.Status.JobStatus },
	Expires: func(o *v1beta1.Redelivery) (time.Time, bool) {
		return v1beta1.JobExpires(o.Spec.TTLSecondsAfterFinished, o.Status.JobStatus)
	},
	ChangesAt: redeliveryChangesAt,
})

// redeliveryChangesAt returns the end of the deadline, or of the wait for an unavailable pod.
func redeliveryChangesAt(o *v1beta1.Redelivery) (at time.Time, ok bool) {
	if v1beta1.JobEnded(o.Status.JobStatus) || o.Status.StartTime == nil {
		return time.Time{}, false
	}
	if limit := o.Spec.ActiveDeadlineSeconds; limit != nil {
		at = o.Status.StartTime.Add(time.Duration(*limit) * time.Second)
	}
	if d := o.Status.Parts; d != nil && d.UnavailableSince != nil {
		at = observed.Earlier(at, d.UnavailableSince.Add(maxUnavailable))
	}
	return at, !at.IsZero()
}

// Redelivery returns the status of a Redelivery, from the compiler's verdict v and the
// reports of the ready dispatcher pods. Each pod redelivers its own dead letters.
//
// The status determines the phase of the run (compile.RedeliveryPhase): startTime is set
// when every ready pod has recorded its part, and the run is complete when the
// participating pods have recorded that all parts are done.
func Redelivery(old v1beta1.Redelivery, v compile.Verdict, namespace string, pods []Pod, now time.Time) v1beta1.RedeliveryStatus {
	s := *old.Status.DeepCopy()
	if v1beta1.JobEnded(s.JobStatus) {
		s.JobStatus = ObserveEnded(s.JobStatus, old.Generation)
		s.Conditions = Own(s.Conditions, jobConditions)
		return s
	}
	f := gather(v, old.ObjectMeta, old.Status.Conditions, namespace, pods, now, redeliveryReports)
	p := partsOf(old, namespace, pods)
	reason, message := v.Cause()
	var o Outcome
	switch {
	case s.StartTime != nil:
		o = p.run(&s, old.Spec, now)
	case !v.OK():
		o = Outcome{Reason: reason, Message: "nothing is redelivered: " + message}
	case v.Waits != "":
		o = Outcome{Reason: v1beta1.ReasonWaiting, Message: v.Waits}
	case p.alreadyDone:
		s.StartTime = &f.now
		o = Outcome{Complete: true, Reason: v1beta1.ReasonAlreadyDone, Message: "a Redelivery with the same name and spec completed within the last 30 days, so nothing was redelivered; set spec.requestID to run it again"}
	case f.ready == 0:
		o = Outcome{Reason: v1beta1.ReasonWaiting, Message: "no dispatcher is ready"}
	case p.begun < f.ready:
		o = Outcome{Reason: v1beta1.ReasonWaiting, Message: "waiting for every dispatcher to record the run"}
		switch {
		case f.refused != "":
			o.Message = f.refused
		case f.silent:
			o.Message += "; a dispatcher does not answer; check the logs of the dispatchers"
		}
	default:
		// Rounded up to the precision of the API, so that no dead letter is excluded.
		start := observed.Timestamp(now.Add(time.Second - 1))
		s.StartTime = &start
		s.Parts = &v1beta1.RedeliveryParts{Total: int32(f.ready)}
		o = Outcome{Reason: v1beta1.ReasonRunning, Message: "the dispatchers count the dead letters"}
	}
	if o.Failed && !old.Spec.DryRun {
		s.NotRedelivered = ptr.To(max(0, ptr.Deref(s.Matched, 0)-ptr.Deref(s.Redelivered, 0)))
	}
	if o.Complete {
		s.CompletionTime = &f.now
	}
	SetJobConditions(&s.JobStatus, old.Generation, f.now, v, o)
	s.Conditions = Own(s.Conditions, jobConditions)
	return s
}

// parts is the state of a run over all pods.
type parts struct {
	begun, done, completed     int
	matched, redelivered, left int64
	alreadyDone, failed        bool
	// problem is the first error of a pod.
	problem string
}

// partsOf uses only the reports of pods that answer, because a run waits for the others.
func partsOf(o v1beta1.Redelivery, namespace string, pods []Pod) (p parts) {
	pods = slices.DeleteFunc(slices.Clone(pods), func(p Pod) bool { return !p.Answers() })
	redeliveryReports.each(pods, namespace, o.Name, func(_ Pod, r *adminapi.RedeliveryReport) {
		if r.UID != string(o.UID) { // The report is about a deleted object with the same name.
			return
		}
		p.alreadyDone = p.alreadyDone || r.AlreadyDone
		p.problem = cmp.Or(p.problem, r.Error)
		if !r.Begun {
			return
		}
		p.begun++
		p.matched += r.Matched
		p.redelivered += r.Redelivered
		p.left += r.Left
		p.failed = p.failed || r.Failed
		if r.Done {
			p.done++
		}
		if r.Completed {
			p.completed++
		}
	})
	return p
}

// run updates the status of a run that has started.
func (p parts) run(s *v1beta1.RedeliveryStatus, spec v1beta1.RedeliverySpec, now time.Time) Outcome {
	// The status may include the numbers of pods that do not answer now.
	matched, redelivered := max(ptr.Deref(s.Matched, 0), p.matched), max(ptr.Deref(s.Redelivered, 0), p.redelivered)
	s.Matched, s.Redelivered = &matched, &redelivered
	if s.Parts == nil { // The status was changed by another client.
		s.Parts = &v1beta1.RedeliveryParts{Total: int32(max(1, p.begun))}
	}
	d := s.Parts
	d.Total = max(d.Total, int32(p.begun)) // A pod that was not ready at the start may have recorded its part.
	d.Done = max(d.Done, int32(p.done))
	missing := max(0, int(d.Total)-p.begun)
	if missing == 0 {
		d.UnavailableSince = nil
	} else if d.UnavailableSince == nil || observed.Ahead(d.UnavailableSince, now) {
		since := observed.Timestamp(now)
		d.UnavailableSince = &since
	}
	if p.left > 0 {
		p.problem = plural.Count(p.left, "dead letter") + " kept, because the Source or the endpoint was removed from the destination"
	}
	if missing > 0 {
		p.problem = cmp.Or(p.problem, "a dispatcher is not ready or does not answer")
	}
	counts := fmt.Sprintf("%d of %s redelivered", redelivered, plural.Count(matched, "dead letter"))
	problem := ""
	if p.problem != "" {
		problem = "; " + compile.Truncate(p.problem, maxQuotedBytes)
	}
	running := Outcome{Reason: v1beta1.ReasonRunning, Message: counts + " so far" + problem}
	if p.completed > 0 { // Then all parts were done, so other pods are not waited for.
		if spec.DryRun {
			return Outcome{Complete: true, Reason: v1beta1.ReasonCounted, Message: plural.Count(matched, "dead letter") + " would be redelivered"}
		}
		return Outcome{Complete: true, Reason: v1beta1.ReasonRedelivered, Message: plural.Count(redelivered, "dead letter") + " redelivered"}
	}
	if limit := spec.ActiveDeadlineSeconds; limit != nil && now.Sub(s.StartTime.Time) >= time.Duration(*limit)*time.Second {
		return Outcome{Failed: true, Reason: v1beta1.ReasonDeadlineExceeded,
			Message: "the run did not end within spec.activeDeadlineSeconds; " + counts}
	}
	switch {
	case p.done < p.begun || missing > 0 && now.Sub(d.UnavailableSince.Time) < maxUnavailable:
		return running
	case missing > 0 && d.Done < d.Total || p.failed || p.left > 0:
		return Outcome{Failed: true, Reason: v1beta1.ReasonNotRedelivered, Message: counts + problem}
	}
	running.Message = counts + "; waiting for the dispatchers to record the end"
	return running
}

var redeliveryReports = reports[adminapi.RedeliveryReport]{
	find:    inMap(func(n *podreport.NamespaceIndex) map[string]*adminapi.RedeliveryReport { return n.Redeliveries }),
	running: func(r *adminapi.RedeliveryReport) (string, int64) { return r.Revision, r.Generation },
}
