package health

import (
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/observed"
	"github.com/posthorn/posthorn/internal/plural"
)

// maxNotifications is the API's bound of status.notifications.
const maxNotifications = 200

// DeletionRequests are the kind DeletionRequest.
var DeletionRequests = NewKind(Definition[v1beta1.DeletionRequest, v1beta1.DeletionRequestStatus, *v1beta1.DeletionRequest]{
	Name: "DeletionRequest", Conditions: jobConditions, Compute: DeletionRequest,
	Status: func(o *v1beta1.DeletionRequest) (*v1beta1.DeletionRequestStatus, *[]metav1.Condition) {
		return &o.Status, &o.Status.Conditions
	},
	Summary: func(s *v1beta1.DeletionRequestStatus) *v1beta1.Summary { return &s.Summary },
	Job:     func(o *v1beta1.DeletionRequest) *v1beta1.JobStatus { return &o.Status.JobStatus },
	Expires: func(o *v1beta1.DeletionRequest) (time.Time, bool) {
		return v1beta1.JobExpires(o.Spec.TTLSecondsAfterFinished, o.Status.JobStatus)
	},
})

// DeletionRequest returns the status of a DeletionRequest, from the compiler's verdict
// v and the reports of the ready dispatcher pods. One pod, the owner, sends the
// notifications. Every change of a notification is a transition.
func DeletionRequest(old v1beta1.DeletionRequest, v compile.Verdict, namespace string, pods []Pod,
	now time.Time) v1beta1.DeletionRequestStatus {
	s := *old.Status.DeepCopy()
	if v1beta1.JobEnded(s.JobStatus) {
		s.JobStatus = ObserveEnded(s.JobStatus, old.Generation)
		s.Conditions = Own(s.Conditions, jobConditions)
		return s
	}
	f := gather(v, old.ObjectMeta, old.Status.Conditions, namespace, pods, now, deletionReports)
	var owner *adminapi.DeletionReport
	deletionReports.each(pods, namespace, old.Name, func(_ Pod, r *adminapi.DeletionReport) {
		// Ignore the report about an earlier revision.
		if r.Owner && r.Revision == v.Revision && (r.AlreadyDone || !r.Started.IsZero()) {
			owner = r
		}
	})
	reason, message := v.Cause()
	var o Outcome
	switch {
	case !v.OK():
		o = Outcome{Reason: reason, Message: "no notification is sent: " + message}
	case owner != nil && owner.AlreadyDone:
		s.StartTime = &f.now
		o = Outcome{Complete: true, Reason: v1beta1.ReasonAlreadyDone, Message: "a DeletionRequest with the same name and spec completed within the last 30 days, so no notification was sent; set spec.requestID to run it again"}
	case owner != nil:
		o = outcome(&s, owner, v.Destinations)
	case s.StartTime != nil:
		o = Outcome{Reason: v1beta1.ReasonRunning, Message: "waiting for the dispatcher that sends the notifications"}
	default:
		o = Outcome{Reason: v1beta1.ReasonWaiting, Message: "waiting for the dispatcher that sends the notifications"}
	}
	if old.Spec.Suppress && (o.Complete || o.Failed) && f.confirmed < f.ready {
		o = Outcome{Reason: v1beta1.ReasonRunning, Message: "waiting for all dispatchers to reject calls of the user"}
	}
	if o.Complete {
		s.CompletionTime = &f.now
	}
	SetJobConditions(&s.JobStatus, old.Generation, f.now, v, o)
	s.Conditions = Own(s.Conditions, jobConditions)
	return s
}

// outcome copies the owner's report into the status. suspended are the suspended destinations, sorted.
func outcome(s *v1beta1.DeletionRequestStatus, owner *adminapi.DeletionReport, suspended []string) Outcome {
	var delivered, pending, waiting, deadLettered, discarded int32
	s.Notifications = nil
	for i, n := range owner.Notifications {
		switch n.State {
		case adminapi.NotificationDelivered:
			delivered++
		case adminapi.NotificationPending:
			pending++
			if _, waits := slices.BinarySearch(suspended, n.Destination); waits {
				waiting++
			}
		case adminapi.NotificationDiscarded:
			discarded++
		default:
			deadLettered++
		}
		if i < maxNotifications {
			s.Notifications = append(s.Notifications, v1beta1.Notification{
				Source: n.Source, Destination: n.Destination, State: v1beta1.NotificationState(n.State),
				Reason: compile.Truncate(n.Reason, maxFailureReasonBytes), Time: observed.Optional(n.Time),
			})
		}
	}
	total, failed := int32(len(owner.Notifications)), deadLettered+discarded
	s.StartTime, s.Total, s.Delivered, s.Pending = observed.Optional(owner.Started), &total, &delivered, &pending
	s.DeadLettered, s.Discarded = &deadLettered, &discarded
	switch {
	case owner.DeadlineExceeded:
		return Outcome{Failed: true, Reason: v1beta1.ReasonDeadlineExceeded, Message: fmt.Sprintf("the run did not end within spec.activeDeadlineSeconds; %d of %s not delivered", failed, plural.Count(total, "notification"))}
	case pending > 0:
		message := fmt.Sprintf("%d of %s pending", pending, plural.Count(total, "notification"))
		if waiting > 0 {
			message += fmt.Sprintf("; %d of them for suspended destinations, until spec.suspend is false", waiting)
		}
		return Outcome{Reason: v1beta1.ReasonRunning, Message: message}
	case failed > 0:
		return Outcome{Failed: true, Reason: v1beta1.ReasonNotDelivered, Message: fmt.Sprintf("%d of %s not delivered; see status.notifications and the dead letters", failed, plural.Count(total, "notification"))}
	case !owner.Completed:
		return Outcome{Reason: v1beta1.ReasonRunning, Message: "waiting for the dispatcher to record the end"}
	case total == 0:
		return Outcome{Complete: true, Reason: v1beta1.ReasonNoDestinations, Message: "no notification was sent: no WebhookDestination that takes deletions (spec.deletions) has an affected Source"}
	}
	return Outcome{Complete: true, Reason: v1beta1.ReasonDelivered, Message: plural.Count(total, "notification") + " delivered"}
}

var deletionReports = reports[adminapi.DeletionReport]{
	find:    inMap(func(n *podreport.NamespaceIndex) map[string]*adminapi.DeletionReport { return n.Deletions }),
	running: func(r *adminapi.DeletionReport) (string, int64) { return r.Revision, r.Generation },
}
