package health

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/compile"
)

// Event reports a transition. Type is one of core/v1; Action is the attempted action, as
// events.k8s.io requires.
type Event struct{ Type, Reason, Action, Message string }

// The types of an Event.
const (
	EventNormal  = "Normal"
	EventWarning = "Warning"
)

// maxNoteBytes bounds an Event's message; the API allows 1,024.
const maxNoteBytes = 1000

// actions maps a condition to the action that it describes.
var actions = map[string]string{
	v1beta1.ConditionAccepted:     "Compile",
	v1beta1.ConditionResolvedRefs: "Resolve",
	v1beta1.ConditionProgrammed:   "Program",
	v1beta1.ConditionDelivering:   "Deliver",
	v1beta1.ConditionReceiving:    "Receive",
	v1beta1.ConditionSynced:       "Sync",
	v1beta1.ConditionComplete:     "Run",
	v1beta1.ConditionFailed:       "Run",
}

// Transitions returns the Events of a change of conditions from old to new: failures,
// with each new reason, and recoveries. There is no Event for the usual steps of a
// change (Pending, NoTrafficYet) and for reasons that result from another condition
// (Ready, Stalled, Paused).
func Transitions(old, new []metav1.Condition) []Event {
	var events []Event
	for _, c := range new {
		var was metav1.Condition
		if before := meta.FindStatusCondition(old, c.Type); before != nil && !isDefault(*before) {
			was = *before
		}
		if event, ok := transition(was, c); ok {
			events = append(events, event)
		}
	}
	return events
}

func transition(was, is metav1.Condition) (Event, bool) {
	if was.Status == is.Status && was.Reason == is.Reason {
		return Event{}, false
	}
	quiet := func(c metav1.Condition) bool {
		// An outage of the dispatchers is the same for all objects, and has an alert.
		return c.Reason == v1beta1.ReasonPending || c.Reason == v1beta1.ReasonNoDispatcher ||
			c.Type != v1beta1.ConditionAccepted && aboutSpec(c.Reason)
	}
	event := Event{EventNormal, is.Reason, actions[is.Type], compile.Truncate(is.Message, maxNoteBytes)}
	switch {
	case is.Type == v1beta1.ConditionReady || is.Type == v1beta1.ConditionStalled || is.Status == metav1.ConditionUnknown || quiet(is):
		return Event{}, false
	case is.Type == v1beta1.ConditionComplete || is.Type == v1beta1.ConditionFailed: // The end of a run.
		if is.Type == v1beta1.ConditionFailed {
			event.Type = EventWarning
		}
		return event, is.Status == metav1.ConditionTrue
	case is.Status == metav1.ConditionFalse:
		event.Type = EventWarning
		return event, true
	case is.Type == v1beta1.ConditionSynced: // A later successful sync has no Event.
		return event, was.Status != is.Status && !quiet(was)
	// The status is True: a recovery, or the first traffic.
	case is.Type == v1beta1.ConditionDelivering || is.Type == v1beta1.ConditionReceiving:
		return event, !quiet(was)
	case is.Type == v1beta1.ConditionProgrammed:
		return event, was.Status == metav1.ConditionFalse && !quiet(was)
	default: // Accepted, ResolvedRefs
		return event, was.Status != "" || is.Reason == v1beta1.ReasonSuspended
	}
}
