package health

import (
	"errors"
	"fmt"
	"regexp"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1alpha1"
)

// CheckDestination returns what in a destination's status must never be so. It
// is for tests.
func CheckDestination(d v1alpha1.WebhookDestination) error {
	errs := checkConditions(d.Generation, d.Status.ObservedGeneration, d.Status.Conditions, d.Status.Dispatchers, v1alpha1.ConditionDelivering)
	if len(d.Status.Endpoints) != len(d.Spec.Endpoints) {
		errs = append(errs, fmt.Errorf("status has %d endpoints, spec %d", len(d.Status.Endpoints), len(d.Spec.Endpoints)))
	}
	for _, e := range d.Status.Endpoints {
		if !slices.ContainsFunc(d.Spec.Endpoints, func(s v1alpha1.Endpoint) bool { return s.Name == e.Name }) {
			errs = append(errs, fmt.Errorf("endpoint %q is not in spec", e.Name))
		}
		if f := e.LastFailure; f != nil && (f.Time.IsZero() || len(f.Message) > maxFailureMessageBytes || len(f.Reason) > maxFailureReasonBytes) {
			errs = append(errs, fmt.Errorf("endpoint %q: last failure %+v", e.Name, f))
		}
	}
	if d.Status.Revision != "" && d.Status.RevisionTime == nil {
		errs = append(errs, errors.New("revision without revisionTime"))
	}
	if n := d.Status.Delivery; n != nil && (n.Pending < 0 || n.Delivered < 0 || n.Retrying > n.Pending) {
		errs = append(errs, fmt.Errorf("delivery: %+v", n))
	}
	return errors.Join(errs...)
}

// CheckSource returns what in a Source's status must never be so. It is for tests.
func CheckSource(s v1alpha1.Source) error {
	errs := checkConditions(s.Generation, s.Status.ObservedGeneration, s.Status.Conditions, s.Status.Dispatchers, v1alpha1.ConditionReceiving)
	if n := len(s.Status.Destinations); n > maxDestinations || !slices.IsSorted(s.Status.Destinations) {
		errs = append(errs, fmt.Errorf("%d destinations: too many, or not sorted", n))
	}
	return errors.Join(errs...)
}

var reasonPattern = regexp.MustCompile(`^[A-Z][A-Za-z0-9]*$`)

func checkConditions(generation, observed int64, conditions []metav1.Condition, dispatchers *v1alpha1.DispatcherCount, traffic string) (errs []error) {
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	var types []string
	for _, c := range conditions {
		types = append(types, c.Type)
		if !reasonPattern.MatchString(c.Reason) {
			fail("%s: reason %q", c.Type, c.Reason)
		}
		if c.ObservedGeneration > generation {
			fail("%s: observedGeneration %d is above generation %d", c.Type, c.ObservedGeneration, generation)
		}
		if c.LastTransitionTime.IsZero() || c.LastTransitionTime.Nanosecond() != 0 {
			fail("%s: lastTransitionTime %v is zero or does not survive the API", c.Type, c.LastTransitionTime)
		}
		if c.Message == "" || len(c.Message) > maxMessageBytes {
			fail("%s: message of %d bytes", c.Type, len(c.Message))
		}
	}
	if want := []string{v1alpha1.ConditionAccepted, v1alpha1.ConditionProgrammed, v1alpha1.ConditionReady, traffic}; !slices.Equal(types, want) {
		fail("conditions %v, want %v", types, want)
		return errs
	}
	if observed > generation {
		fail("observedGeneration %d is above generation %d", observed, generation)
	}
	accepted, programmed, ready := conditions[0], conditions[1], conditions[2]
	if both := meta.IsStatusConditionTrue(conditions, accepted.Type) && meta.IsStatusConditionTrue(conditions, programmed.Type); both != (ready.Status == metav1.ConditionTrue) {
		fail("Ready is %s, Accepted %s, Programmed %s", ready.Status, accepted.Status, programmed.Status)
	}
	if ready.Status != metav1.ConditionTrue && ready.Reason != accepted.Reason && ready.Reason != programmed.Reason {
		fail("Ready has reason %s, which is neither Accepted's nor Programmed's", ready.Reason)
	}
	for _, c := range conditions[:3] {
		if c.Status == metav1.ConditionUnknown {
			fail("%s is Unknown", c.Type)
		}
	}
	switch {
	case dispatchers == nil:
		fail("dispatchers are missing")
	case dispatchers.Programmed > dispatchers.Ready:
		fail("%d of %d dispatchers are programmed", dispatchers.Programmed, dispatchers.Ready)
	case programmed.Status == metav1.ConditionTrue && (dispatchers.Ready == 0 || dispatchers.Programmed < dispatchers.Ready):
		fail("Programmed is True with %d of %d dispatchers", dispatchers.Programmed, dispatchers.Ready)
	}
	return errs
}
