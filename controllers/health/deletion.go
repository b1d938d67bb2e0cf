package health

import (
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// maxNotifications is the API's bound of status.notifications.
const maxNotifications = 200

// DeletionRequest returns the status that follows from the compiler's verdict v
// and the reports of the ready dispatcher pods; one of them sends the notifications.
//
// numbersDue changes nothing: each notification has its final state once.
func DeletionRequest(old v1alpha1.DeletionRequest, v compile.Verdict, tenant string, pods []Pod, now time.Time, _ bool) v1alpha1.DeletionRequestStatus {
	f := gather(v, old.ObjectMeta, old.Status.Conditions, tenant, pods, now, deletionPart)
	s := v1alpha1.DeletionRequestStatus{ObservedGeneration: old.Generation, Dispatchers: f.dispatchers()}
	var owner *liveconfig.DeletionReport
	deletionPart.each(pods, tenant, old.Name, func(_ Pod, r *liveconfig.DeletionReport) {
		// What a pod says of an earlier revision is not about this one.
		if r.Owner && r.Revision == v.Revision && !r.Started.IsZero() {
			owner = r
		}
	})
	var finished metav1.Condition
	switch {
	case f.state() == liveconfig.Held:
		finished = metav1.Condition{Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNotAccepted, Message: "nobody is told: " + v.Message}
	case owner != nil:
		finished = count(&s, owner)
	case old.Status.ObservedGeneration == old.Generation && old.Status.StartTime != nil: // the owner restarts
		kept := old.Status.DeepCopy()
		s.StartTime, s.CompletionTime, s.Notifications = kept.StartTime, kept.CompletionTime, kept.Notifications
		s.Total, s.Delivered, s.Pending = kept.Total, kept.Delivered, kept.Pending
		if before := f.before(v1alpha1.ConditionFinished); before != nil {
			finished = *before
		}
	}
	if finished.Status == "" {
		finished = metav1.Condition{Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNotifying, Message: "waiting for the dispatcher pod that sends the notifications"}
	}
	finished.Type = v1alpha1.ConditionFinished
	s.Conditions = f.conditions(f.state() != liveconfig.Held, finished)
	return s
}

// count brings what the owner reports into the status.
func count(s *v1alpha1.DeletionRequestStatus, owner *liveconfig.DeletionReport) metav1.Condition {
	var delivered, pending, failed int32
	last := owner.Started
	for i, n := range owner.Notifications {
		switch n.State {
		case liveconfig.NotificationDelivered:
			delivered++
		case liveconfig.NotificationPending:
			pending++
		case liveconfig.NotificationFiltered:
		default:
			failed++
		}
		last = later(last, n.Time)
		if i < maxNotifications {
			s.Notifications = append(s.Notifications, v1alpha1.Notification{
				Source: n.Source, Destination: n.Destination, State: v1alpha1.NotificationState(n.State),
				Reason: truncate(n.Reason, maxFailureReasonBytes), Time: optional(n.Time),
			})
		}
	}
	total := int32(len(owner.Notifications))
	s.StartTime, s.Total, s.Delivered, s.Pending = optional(owner.Started), &total, &delivered, &pending
	if pending > 0 {
		return metav1.Condition{Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNotifying, Message: fmt.Sprintf("%d of %d notifications are pending", pending, total)}
	}
	s.CompletionTime = optional(last)
	done := metav1.Condition{Status: metav1.ConditionTrue}
	switch {
	case total == 0:
		done.Reason, done.Message = v1alpha1.ReasonNobodyToTell, "no affected Source has an enabled WebhookDestination"
	case failed > 0:
		done.Reason, done.Message = v1alpha1.ReasonNotDelivered, fmt.Sprintf("%d of %d notifications could not be delivered; see status.notifications and the dead letters", failed, total)
	default:
		done.Reason, done.Message = v1alpha1.ReasonDelivered, fmt.Sprintf("%d of %d notifications were delivered, the others filtered out", delivered, total)
	}
	return done
}

var deletionPart = part[liveconfig.DeletionReport]{
	list:    func(t *liveconfig.TenantReport) []liveconfig.DeletionReport { return t.Deletions },
	running: func(r *liveconfig.DeletionReport) (string, string, int64) { return r.Name, r.Revision, r.Generation },
}

// DeletionRequestExpires returns when a request is to be deleted; false for one that stays.
func DeletionRequestExpires(d v1alpha1.DeletionRequest) (time.Time, bool) {
	ttl, done := d.Spec.TTLSecondsAfterFinished, d.Status.CompletionTime
	if ttl == nil || done == nil || d.Spec.Suppress || d.Status.ObservedGeneration != d.Generation {
		return time.Time{}, false
	}
	return done.Add(time.Duration(*ttl) * time.Second), true
}
