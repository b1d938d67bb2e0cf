// Package invariants checks what holds for every status of an object, whatever happened to it.
package invariants

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
)

// The bounds of the API.
const (
	maxMessageBytes        = 2048
	maxFailureReasonBytes  = 64
	maxFailureMessageBytes = 512
	maxDestinations        = 100
)

// Destination returns the violated invariants of a destination's status.
func Destination(d v1beta1.WebhookDestination) error {
	errs := conditions(d.Generation, d.Status.ObservedGeneration, d.Status.Summary, d.Status.Conditions, v1beta1.ConditionDelivering)
	if len(d.Status.Endpoints) != len(d.Spec.Endpoints) {
		errs = append(errs, fmt.Errorf("status has %d endpoints, spec %d", len(d.Status.Endpoints), len(d.Spec.Endpoints)))
	}
	for _, e := range d.Status.Endpoints {
		if !slices.ContainsFunc(d.Spec.Endpoints, func(s v1beta1.Endpoint) bool { return s.Name == e.Name }) {
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

// Source returns the violated invariants of a Source's status.
func Source(s v1beta1.Source) error {
	errs := conditions(s.Generation, s.Status.ObservedGeneration, s.Status.Summary, s.Status.Conditions, v1beta1.ConditionReceiving)
	if n := len(s.Status.Destinations); n > maxDestinations || !slices.IsSorted(s.Status.Destinations) {
		errs = append(errs, fmt.Errorf("%d destinations: too many, or not sorted", n))
	}
	return errors.Join(errs...)
}

// Audience returns the violated invariants of an Audience's status.
func Audience(a v1beta1.Audience) error {
	return errors.Join(conditions(a.Generation, a.Status.ObservedGeneration, a.Status.Summary, a.Status.Conditions,
		v1beta1.ConditionSynced)...)
}

// Reason matches the reasons that the API server accepts and tools expect.
var Reason = regexp.MustCompile(`^[A-Z][A-Za-z0-9]*$`)

// conditions checks the conditions of an object, without those that other programs have added.
func conditions(generation, observed int64, summary v1beta1.Summary, all []metav1.Condition, traffic string) (errs []error) {
	want := []string{v1beta1.ConditionAccepted, v1beta1.ConditionResolvedRefs, v1beta1.ConditionProgrammed,
		v1beta1.ConditionReady, traffic}
	conditions := slices.DeleteFunc(slices.Clone(all), func(c metav1.Condition) bool {
		return c.Type != v1beta1.ConditionStalled && !slices.Contains(want, c.Type)
	})
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	var types []string
	for _, c := range conditions {
		types = append(types, c.Type)
		if !Reason.MatchString(c.Reason) {
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
	if meta.IsStatusConditionTrue(conditions, v1beta1.ConditionStalled) {
		want = append(want, v1beta1.ConditionStalled)
	}
	if !slices.Equal(types, want) {
		fail("conditions %v, want %v", types, want)
		return errs
	}
	if worst := v1beta1.Worst(conditions); summary.Reason != worst.Reason ||
		!strings.HasPrefix(worst.Message, strings.TrimSuffix(summary.Message, "…")) {
		fail("the reason is %q (%s), want %q (%s)", summary.Reason, summary.Message, worst.Reason, worst.Message)
	}
	if observed > generation {
		fail("observedGeneration %d is above generation %d", observed, generation)
	}
	accepted, resolved, programmed, ready := conditions[0], conditions[1], conditions[2], conditions[3]
	works := !slices.ContainsFunc(conditions[:3], func(c metav1.Condition) bool { return c.Status != metav1.ConditionTrue })
	if works != (ready.Status == metav1.ConditionTrue) {
		fail("Ready is %s, Accepted %s, ResolvedRefs %s, Programmed %s", ready.Status, accepted.Status, resolved.Status, programmed.Status)
	}
	if works && ready.Reason != v1beta1.ReasonReady && ready.Reason != v1beta1.ReasonDiscardAhead {
		fail("Ready is True with reason %s", ready.Reason)
	}
	if !works && !slices.ContainsFunc(conditions[:3], func(c metav1.Condition) bool {
		return c.Status != metav1.ConditionTrue && c.Reason == ready.Reason
	}) {
		fail("Ready has reason %s, which no condition that is not True has", ready.Reason)
	}
	for _, c := range conditions[:4] {
		if c.Status == metav1.ConditionUnknown {
			fail("%s is Unknown", c.Type)
		}
	}
	if len(conditions) == 6 && ready.Status == metav1.ConditionTrue {
		fail("Stalled is True although Ready is")
	}
	if accepted.Status == metav1.ConditionFalse && len(conditions) != 6 {
		fail("Accepted is False, but Stalled is not True")
	}
	return errs
}
