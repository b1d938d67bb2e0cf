package compile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

const (
	// maxRedeliveries bounds the concurrent runs of a namespace, with one run for each
	// destination. maxRedeliveryRate bounds the sum of their rates, in dead letters a
	// second.
	maxRedeliveries   = 4
	maxRedeliveryRate = 10_000
)

// Redeliveries are the kind Redelivery.
var Redeliveries = NewKind(Definition[*v1beta1.Redelivery, liveconfig.Redelivery]{
	Section: "redeliveries",
	Entries: func(c *liveconfig.Config) *[]liveconfig.Redelivery { return &c.Redeliveries },
	ID:      func(e liveconfig.Redelivery) (string, string) { return e.Name, e.Revision },
	Compiler: func(s Snapshot, _ liveconfig.Config, _ Verdicts,
		objects []*v1beta1.Redelivery) func(*v1beta1.Redelivery) (liveconfig.Redelivery, bool, Verdict) {
		destinations := objectsOf[*v1beta1.WebhookDestination](s)
		waits := waitingRedeliveries(objects, destinations)
		return func(o *v1beta1.Redelivery) (liveconfig.Redelivery, bool, Verdict) {
			entry, verdict := s.redelivery(o, destinations)
			verdict.Waits = waits[o.Name]
			return entry, verdict.OK() && verdict.Waits == "" && entry.Phase != "", verdict
		}
	},
	Weight: func(r liveconfig.Redelivery) int { return len(r.Name) + len(strings.Join(r.Events, "")) },
})

// redelivery compiles one Redelivery. After the start of the run, a missing destination has
// no effect.
func (s Snapshot) redelivery(o *v1beta1.Redelivery, destinations []*v1beta1.WebhookDestination) (liveconfig.Redelivery, Verdict) {
	r := newResolver(nil)
	name := o.Spec.DestinationRef.Name
	if name == "" {
		r.add(v1beta1.ReasonInvalidSpec, "spec.destinationRef.name", "must be set")
	} else if o.Status.StartTime == nil && !contains(destinations, name) {
		r.add(v1beta1.ReasonDestinationNotFound, "spec.destinationRef.name", "WebhookDestination %q does not exist in this namespace; create it", name)
	}
	c := liveconfig.Redelivery{
		Name: o.Name, ID: RedeliveryID(s.Namespace, o), UID: string(o.UID), Destination: name, Phase: RedeliveryPhase(o),
		DryRun: o.Spec.DryRun, Rate: float64(rateOf(o)),
	}
	if d := o.Status.Parts; d != nil && d.Total > 1 {
		c.Rate /= float64(d.Total)
	}
	if o.Status.StartTime != nil {
		// Dead letters that failed after the start may have been redelivered by this run.
		c.Until = o.Status.StartTime.UTC()
	}
	if match := o.Spec.Match; match != nil {
		c.Reasons, c.Events = slices.Sorted(slices.Values(match.Reasons)), slices.Sorted(slices.Values(match.Events))
		if match.NoResponse {
			c.StatusCodes = append(c.StatusCodes, 0)
		}
		for _, code := range slices.Sorted(slices.Values(match.StatusCodes)) {
			c.StatusCodes = append(c.StatusCodes, int(code))
		}
		for _, t := range match.Types {
			c.Types = append(c.Types, string(t))
		}
		slices.Sort(c.Types)
		if match.Since != nil {
			c.Since = match.Since.UTC()
		}
		if match.Until != nil && match.Until.Time.Before(c.Until) {
			c.Until = match.Until.UTC()
		}
	}
	v := Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, State: liveconfig.Active, Message: "the spec is valid"}
	if len(r.problems) > 0 {
		v.State = liveconfig.Paused
		r.apply(&v, "")
	}
	c.Revision = revision(c, nil, nil)
	c.Generation = o.Generation
	v.Revision = c.Revision
	return c, v
}

// RedeliveryPhase returns the phase of a run, which the object's status determines; "" if
// the run has ended or the object is being deleted.
func RedeliveryPhase(o *v1beta1.Redelivery) liveconfig.RedeliveryPhase {
	s := o.Status
	switch {
	case v1beta1.JobEnded(s.JobStatus) || o.DeletionTimestamp != nil:
		return ""
	case s.StartTime == nil:
		return liveconfig.RedeliveryBegin
	case s.Parts != nil && s.Parts.Done >= s.Parts.Total:
		return liveconfig.RedeliveryRecord
	}
	return liveconfig.RedeliveryRun
}

// waitingRedeliveries returns the Redeliveries that do not start because of the limits of
// the namespace, with the reason. Runs that have started continue; of the others, the
// oldest start first. Only one whose destination exists can start.
func waitingRedeliveries(redeliveries []*v1beta1.Redelivery, destinations []*v1beta1.WebhookDestination) map[string]string {
	byDestination := map[string]string{}
	perSecond := int32(0)
	start := func(o *v1beta1.Redelivery) {
		byDestination[o.Spec.DestinationRef.Name] = o.Name
		perSecond += rateOf(o)
	}
	var candidates []*v1beta1.Redelivery
	for _, o := range redeliveries {
		switch {
		case RedeliveryPhase(o) == "":
		case o.Status.StartTime != nil:
			start(o)
		case contains(destinations, o.Spec.DestinationRef.Name):
			candidates = append(candidates, o)
		}
	}
	waiting := map[string]string{}
	for _, o := range byAge(candidates) {
		other := byDestination[o.Spec.DestinationRef.Name]
		switch {
		case other != "":
			waiting[o.Name] = fmt.Sprintf("Redelivery %q of the same destination runs", other)
		case len(byDestination) >= maxRedeliveries:
			waiting[o.Name] = fmt.Sprintf("%d other Redeliveries of this namespace run", len(byDestination))
		case len(byDestination) > 0 && perSecond+rateOf(o) > maxRedeliveryRate:
			waiting[o.Name] = fmt.Sprintf("with the Redeliveries of this namespace that run, spec.deadLettersPerSecond would exceed %d dead letters a second", maxRedeliveryRate)
		default:
			start(o)
		}
	}
	return waiting
}

func rateOf(o *v1beta1.Redelivery) int32 {
	return max(1, cmp.Or(o.Spec.DeadLettersPerSecond, v1beta1.DefaultRedeliveryRate))
}
