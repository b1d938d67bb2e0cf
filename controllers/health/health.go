// Package health computes the status of Sources, WebhookDestinations and Audiences
// from the compiler's verdicts and the dispatcher pods' reports. It is pure: equal
// facts give an equal status, so that nothing is written when nothing happened.
// It knows neither the API server nor HTTP.
//
// A status has transitions and numbers. Transitions are due at once: a condition
// (of the traffic condition: its status), the revision, the generation, a circuit
// that opens or closes, a Source's destinations. Numbers (counts, times, failure
// messages) are written with a transition, or when the caller says that they are
// due. A status names and counts no pods: it would change with every rollout.
package health

import (
	"cmp"
	"slices"
	"sort"
	"strings"
	"time"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// Pod is a dispatcher pod that is ready.
type Pod struct {
	Name string
	// Report is the pod's newest report; nil when it has not answered.
	Report *liveconfig.Report
}

const (
	// maxMessageBytes bounds the message of a condition.
	maxMessageBytes = 2048
)

// namespaceReport returns a pod's part of one namespace, or nil.
func (p Pod) namespaceReport(namespace string) *liveconfig.NamespaceReport {
	if p.Report == nil {
		return nil
	}
	i := slices.IndexFunc(p.Report.Namespaces, func(t liveconfig.NamespaceReport) bool { return t.Namespace == namespace })
	if i < 0 {
		return nil
	}
	return &p.Report.Namespaces[i]
}

// part is what pods report of one kind of object.
type part[R any] struct {
	list func(*liveconfig.NamespaceReport) []R
	// running says which object this is of, and what the pod runs of it.
	running func(*R) (name, revision string, generation int64)
}

// of returns what a pod reports of one object, or nil.
func (p part[R]) of(pod Pod, namespace, name string) *R {
	t := pod.namespaceReport(namespace)
	if t == nil {
		return nil
	}
	list := p.list(t)
	is := func(i int) string { n, _, _ := p.running(&list[i]); return n }
	// As a rule they are sorted; a namespace may have many thousands.
	if i := sort.Search(len(list), func(i int) bool { return is(i) >= name }); i < len(list) && is(i) == name {
		return &list[i]
	}
	for i := range list {
		if is(i) == name {
			return &list[i]
		}
	}
	return nil
}

// each calls f with what each pod reports of one object. It returns false when a
// pod did not answer or none knows the object: sums over some would jump.
func (p part[R]) each(pods []Pod, namespace, name string, f func(Pod, *R)) (complete bool) {
	reported, answered := 0, true
	for _, pod := range inOrder(pods) {
		answered = answered && pod.Report != nil
		if r := p.of(pod, namespace, name); r != nil {
			reported++
			f(pod, r)
		}
	}
	return answered && reported > 0
}

// facts are what conditions of either kind are made of.
type facts struct {
	verdict    compile.Verdict
	generation int64
	old        []metav1.Condition
	now        metav1.Time

	ready, confirmed int
	// silent is true when a pod that has not confirmed does not answer; refused
	// is the first refusal among the pods that have not confirmed.
	silent  bool
	refused string
}

// gather counts the pods that confirm an object.
func gather[R any](verdict compile.Verdict, object metav1.ObjectMeta, old []metav1.Condition, namespace string, pods []Pod, now time.Time, p part[R]) facts {
	f := facts{verdict: verdict, generation: object.Generation, old: old, now: timestamp(now), ready: len(pods)}
	for _, pod := range inOrder(pods) {
		if r := p.of(pod, namespace, object.Name); r != nil {
			if _, revision, generation := p.running(r); revision == verdict.Revision && generation >= object.Generation {
				f.confirmed++
				continue
			}
		}
		f.silent = f.silent || pod.Report == nil
		if t := pod.namespaceReport(namespace); t != nil && t.Refused != nil && f.refused == "" {
			f.refused = "a dispatcher pod refused the config and keeps the previous one: " + t.Refused.Error
		}
	}
	return f
}

// state is what the config makes of the object.
func (f facts) state() liveconfig.State {
	switch {
	case f.verdict.State != "":
		return f.verdict.State
	case !f.verdict.OK():
		return liveconfig.Paused
	case f.verdict.Reason == v1alpha1.ReasonDisabled:
		return liveconfig.Disabled
	}
	return liveconfig.Active
}

// conditions returns Accepted, ResolvedRefs, Programmed, Ready, the traffic
// condition and, while it is True, Stalled. programmable is false for an object
// of which nothing can be in effect.
func (f facts) conditions(programmable bool, traffic metav1.Condition) []metav1.Condition {
	accepted := metav1.Condition{Type: v1alpha1.ConditionAccepted, Status: status(f.verdict.Accepted), Reason: f.verdict.Reason, Message: f.verdict.Message}
	resolved := f.resolvedRefs()
	programmed := f.programmed(programmable)
	ready := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady, Message: "accepted, and every ready dispatcher pod runs this revision"}
	for _, c := range []metav1.Condition{programmed, resolved, accepted} { // The first cause is last and wins.
		if c.Status != metav1.ConditionTrue {
			ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, c.Reason, c.Message
		}
	}
	all := []metav1.Condition{accepted, resolved, programmed, ready, traffic}
	for _, c := range []metav1.Condition{accepted, resolved} {
		if c.Status == metav1.ConditionFalse && needsPerson(c.Reason) {
			c.Type, c.Status = v1alpha1.ConditionStalled, metav1.ConditionTrue
			all = append(all, c)
			break
		}
	}
	var out []metav1.Condition
	for _, c := range all {
		c.ObservedGeneration, c.LastTransitionTime, c.Message = f.generation, f.now, truncate(c.Message, maxMessageBytes)
		if before := meta.FindStatusCondition(f.old, c.Type); before != nil && before.Status == c.Status && !before.LastTransitionTime.IsZero() {
			c.LastTransitionTime = before.LastTransitionTime
		}
		out = append(out, c)
	}
	return out
}

// needsPerson reports whether the object stays as it is until a person changes
// the spec, or a value in a Secret. A missing object is not such a cause: as a
// rule it is created a moment later, by the same change or by another controller.
func needsPerson(reason string) bool {
	switch reason {
	case v1alpha1.ReasonSecretNotFound, v1alpha1.ReasonSecretKeyMissing, v1alpha1.ReasonNoSource, v1alpha1.ReasonDestinationNotFound:
		return false
	}
	return true
}

func (f facts) resolvedRefs() metav1.Condition {
	set := conditionOf(v1alpha1.ConditionResolvedRefs)
	if u := f.verdict.Unresolved; u != nil {
		return set(metav1.ConditionFalse, u.Reason, u.Message)
	}
	return set(metav1.ConditionTrue, v1alpha1.ReasonResolvedRefs, "every reference resolves")
}

// noEffect returns the reason of the other conditions of an object that has no effect.
func (f facts) noEffect() string {
	if f.verdict.Accepted && f.verdict.Unresolved != nil {
		return v1alpha1.ReasonUnresolvedRefs
	}
	return v1alpha1.ReasonNotAccepted
}

func (f facts) programmed(programmable bool) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionProgrammed, Status: metav1.ConditionFalse}
	switch {
	// Too large and not even paused, it is in no config.
	case !programmable, f.verdict.Reason == v1alpha1.ReasonConfigTooLarge && f.state() != liveconfig.Paused && f.confirmed < f.ready:
		c.Reason, c.Message = f.noEffect(), "the object has no effect, so there is nothing to program; see the conditions Accepted and ResolvedRefs"
	case f.ready == 0:
		c.Reason, c.Message = v1alpha1.ReasonNoDispatcher, "no dispatcher pod is ready; see the pods of the release's namespace"
	case f.confirmed == f.ready:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonProgrammed, "every ready dispatcher pod runs this revision"
	case f.refused != "":
		c.Reason, c.Message = v1alpha1.ReasonConfigRefused, f.refused
	default:
		c.Reason, c.Message = v1alpha1.ReasonPending, "not every ready dispatcher pod runs this revision yet"
		if f.silent {
			c.Message = "not every ready dispatcher pod has confirmed this revision: a pod does not answer; see the operator's log and the pods of the release's namespace"
		}
	}
	return c
}

// conditionOf makes conditions of a type.
func conditionOf(conditionType string) func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
	return func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return metav1.Condition{Type: conditionType, Status: status, Reason: reason, Message: message}
	}
}

// Pending reports whether an object only waits for pods that have not confirmed
// it yet, as it does for a moment after every change.
func Pending(conditions []metav1.Condition) bool {
	c := meta.FindStatusCondition(conditions, v1alpha1.ConditionProgrammed)
	return c != nil && c.Reason == v1alpha1.ReasonPending
}

// before returns a traffic condition of the previous status, for use while there
// are no facts: a pod that restarted has seen no traffic, but there was some. It
// is nil when the condition describes the spec and not traffic.
func (f facts) before(conditionType string) *metav1.Condition {
	c := meta.FindStatusCondition(f.old, conditionType)
	if c == nil || aboutSpec(c.Reason) {
		return nil
	}
	return c
}

func inOrder(pods []Pod) []Pod {
	return slices.SortedFunc(slices.Values(pods), func(a, b Pod) int { return cmp.Compare(a.Name, b.Name) })
}

func status(is bool) metav1.ConditionStatus {
	if is {
		return metav1.ConditionTrue
	}
	return metav1.ConditionFalse
}

// timestamp has the precision that survives the API.
func timestamp(t time.Time) metav1.Time { return metav1.NewTime(t.UTC().Truncate(time.Second)) }

// maxSkew is how far a pod's clock may be ahead of ours.
const maxSkew = time.Minute

// ahead reports whether a time was told by a clock that was wrong: kept, it would
// hide everything that happens until then.
func ahead(t *metav1.Time, now time.Time) bool { return t != nil && t.After(now.Add(maxSkew)) }

// latest returns the later of a time of the old status and one of a report; nil when there is none.
func latest(old *metav1.Time, t, now time.Time) *metav1.Time {
	if ahead(old, now) {
		old = nil
	}
	if t.IsZero() {
		return old.DeepCopy()
	}
	if next := timestamp(t); old == nil || old.Before(&next) {
		return &next
	}
	return old.DeepCopy()
}

// optional returns nil for the zero time.
func optional(t time.Time) *metav1.Time {
	if t.IsZero() {
		return nil
	}
	out := timestamp(t)
	return &out
}

// earlier returns the earlier of two times that may be zero.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// truncate cuts at a rune's boundary.
func truncate(s string, maxBytes int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= maxBytes {
		return s
	}
	cut := maxBytes - len("…")
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}
