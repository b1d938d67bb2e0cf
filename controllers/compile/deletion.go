package compile

import (
	"slices"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// Deletions are the kind DeletionRequest.
var Deletions = NewKind(Definition[*v1beta1.DeletionRequest, liveconfig.Deletion]{
	Section: "deletions",
	Entries: func(c *liveconfig.Config) *[]liveconfig.Deletion { return &c.Deletions },
	ID:      func(e liveconfig.Deletion) (string, string) { return e.Name, e.Revision },
	Compiler: func(s Snapshot, config liveconfig.Config, _ Verdicts,
		_ []*v1beta1.DeletionRequest) func(*v1beta1.DeletionRequest) (liveconfig.Deletion, bool, Verdict) {
		sources := objectsOf[*v1beta1.Source](s)
		var suspended []string
		for i := range config.Destinations {
			if config.Destinations[i].State == liveconfig.Suspended {
				suspended = append(suspended, config.Destinations[i].Name)
			}
		}
		return func(o *v1beta1.DeletionRequest) (liveconfig.Deletion, bool, Verdict) {
			entry, verdict := s.deletion(o, sources)
			verdict.Destinations = suspended
			return entry, !entry.Ended || entry.Suppress, verdict
		}
	},
	Weight: func(d liveconfig.Deletion) int { return len(d.Name) + len(d.UserID) },
})

// deletion compiles one DeletionRequest. While one of its Sources does not exist, no
// notification is sent, because the run determines its destinations once, at the start.
// After the start a missing Source has no effect. A request whose run has ended is in the
// config only for suppression.
func (s Snapshot) deletion(o *v1beta1.DeletionRequest, sources []*v1beta1.Source) (liveconfig.Deletion, Verdict) {
	r := newResolver(nil)
	ended := v1beta1.JobEnded(o.Status.JobStatus)
	c := liveconfig.Deletion{Name: o.Name, UserID: o.Spec.UserID, Suppress: o.Spec.Suppress, Ended: ended}
	for _, ref := range o.Spec.SourceRefs {
		c.Sources = append(c.Sources, ref.Name)
	}
	slices.Sort(c.Sources)
	if c.UserID == "" {
		r.add(v1beta1.ReasonInvalidSpec, "spec.userID", "must be set")
	}
	for _, name := range c.Sources {
		if !contains(sources, name) && o.Status.StartTime == nil && !ended {
			r.add(v1beta1.ReasonNoSource, "spec.sourceRefs", "Source %q does not exist in this namespace; create it", name)
		}
	}
	v := Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, State: liveconfig.Active, Message: "the spec is valid"}
	if len(r.problems) > 0 {
		v.State = liveconfig.Paused
		r.apply(&v, "")
	} else {
		c.ID, c.UID = DeletionRequestID(s.Namespace, o), string(o.UID)
		if o.Spec.ActiveDeadlineSeconds != nil && !ended {
			c.DeadlineSeconds = *o.Spec.ActiveDeadlineSeconds
		}
	}
	c.Revision = revision(c, nil, nil)
	c.Generation = o.Generation
	v.Revision = c.Revision
	return c, v
}
