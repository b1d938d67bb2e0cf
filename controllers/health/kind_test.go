package health

import (
	"testing"
	"time"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/observed"
)

// paced returns the object that a caller of Kind.Next writes.
func paced[O compile.Object](k Kind, o O, v compile.Verdict, namespace string, pods []Pod, now time.Time, numbersDue bool) O {
	transition, latest := k.Next(o, v, namespace, pods, now)
	if numbersDue {
		return latest.(O)
	}
	return transition.(O)
}

// pacedDestination, pacedSource and pacedAudience return the status that Kind.Next computes.
func pacedDestination(o v1beta1.WebhookDestination, v compile.Verdict, namespace string, pods []Pod, now time.Time,
	numbersDue bool) v1beta1.WebhookDestinationStatus {
	return paced(Destinations, &o, v, namespace, pods, now, numbersDue).Status
}

func pacedSource(o v1beta1.Source, v compile.Verdict, namespace string, pods []Pod, now time.Time, numbersDue bool) v1beta1.SourceStatus {
	return paced(Sources, &o, v, namespace, pods, now, numbersDue).Status
}

func pacedAudience(o v1beta1.Audience, v compile.Verdict, namespace string, pods []Pod, now time.Time,
	numbersDue bool) v1beta1.AudienceStatus {
	return paced(Audiences, &o, v, namespace, pods, now, numbersDue).Status
}

// observedTime is the time of the numbers: it changes only with a status, and remains while
// nothing is reported.
func TestObservedTime(t *testing.T) {
	observed := func(d v1beta1.WebhookDestination, pods []Pod, after time.Duration, due bool) (v1beta1.WebhookDestination, time.Duration) {
		t.Helper()
		d.Status = pacedDestination(d, accepted(), namespace, pods, at(after), due)
		return d, d.Status.ObservedTime.Sub(observed.Timestamp(t0).Time)
	}
	more := runs("p1", healthy("a"))
	more.change(func(d *adminapi.DestinationReport) { d.Delivered++ })
	d, _ := observed(destination(v1beta1.AnyEndpoint, "a"), []Pod{runs("p1", healthy("a"))}, 0, false)
	var got time.Duration
	for _, step := range []struct {
		name  string
		pods  []Pod
		after time.Duration
		due   bool
		want  time.Duration
	}{
		{"the first status", []Pod{runs("p1", healthy("a"))}, 0, true, 0},
		{"equal numbers", []Pod{runs("p1", healthy("a"))}, time.Minute, true, 0},
		{"other numbers that are not due", []Pod{more}, 2 * time.Minute, false, 0},
		{"other numbers that are due", []Pod{more}, 3 * time.Minute, true, 3 * time.Minute},
		{"no report", nil, 4 * time.Minute, true, 3 * time.Minute},
		{"a transition", []Pod{runs("p1", open("a", "TimedOut"))}, 5 * time.Minute, false, 5 * time.Minute},
	} {
		if d, got = observed(d, step.pods, step.after, step.due); got != step.want {
			t.Errorf("%s: observedTime: got %v, want %v", step.name, got, step.want)
		}
	}
}
