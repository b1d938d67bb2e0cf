// Package health computes the status of the objects from the compiler's verdicts and
// the dispatcher pods' reports. Its functions are pure: equal inputs return an equal
// status, so that an unchanged object causes no write. The package uses neither the
// API server nor HTTP.
//
// A status has transitions and numbers. A transition must be written immediately: a
// change of a condition (of the traffic condition, only of its status), of the revision,
// of the generation, of a Source's destinations, or of a circuit. Numbers (counts, times,
// failure messages) are written with a transition, or when the caller requests them. The summary
// follows the conditions and is not compared. A status contains no names and counts of pods, because
// every rollout would change it, except for the volumes of removed pods that have messages. The parts of a
// run are counted once, at its start.
//
// A pod that starts, stops or does not answer changes no status: its last report is used
// until there is another one, and Programmed keeps its value while nothing is known about a
// pod. It ends when no pod has been ready for a while.
package health

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/observed"
)

// Pod is a dispatcher pod that is ready, or that was.
type Pod struct {
	Name string
	// Report is the last state of the pod, or of its predecessor with the same name and
	// store; nil if there is none since the start of the operator.
	Report *podreport.Index
	// Configs is the state of an absent pod that answers; nil otherwise. Of it, only the states of the
	// live configs are used.
	Configs *podreport.Index
	// Absent is true while the pod is not ready. It need not confirm anything.
	Absent bool
	// Silent is true while a ready pod does not answer, or has not answered yet.
	Silent bool
	// Outdated is true if an absent or silent pod sent Report so long ago that only its
	// counters are used.
	Outdated bool
	// Removed is true if the StatefulSet does not have the pod any more. Report then has only counters, and
	// its pending messages are on a volume that no pod uses.
	Removed bool
	// NoneReady is true in an entry without a name while no pod has been ready for a while.
	NoneReady bool
	// Unowned is true if no pod has had the store for a while, although pods that could have it are ready.
	Unowned bool
	// Starting is true for some time after a pod became ready. Meanwhile it can load the
	// newest configs.
	Starting bool
}

// Answers reports whether the pod's report is the present one.
func (p Pod) Answers() bool { return !p.Absent && !p.Silent && p.Report != nil }

// maxMessageBytes bounds the message of a condition.
const maxMessageBytes = 2048

// maxSummaryBytes is the bound of a summary's message in the API.
const maxSummaryBytes = 512

// reports reads the reports about one kind of object.
type reports[R any] struct {
	// find returns the report about an object, or nil. It may write the report to scratch.
	find func(n *podreport.NamespaceIndex, name string, scratch *R) *R
	// running returns the revision and generation that the pod runs.
	running func(*R) (revision string, generation int64)
}

// inMap returns the function find for reports that are in a map.
func inMap[R any](byName func(*podreport.NamespaceIndex) map[string]*R) func(*podreport.NamespaceIndex, string, *R) *R {
	return func(n *podreport.NamespaceIndex, name string, _ *R) *R { return byName(n)[name] }
}

// of returns a pod's report about one object, or nil. The next call with the same scratch can replace
// it.
func (p reports[R]) of(pod Pod, namespace, name string, scratch *R) *R {
	n := pod.Report.Namespace(namespace)
	if n == nil {
		return nil
	}
	return p.find(n, name, scratch)
}

// coverage is how many of the pods have a report about an object.
type coverage int

const (
	// none: no pod reports the object.
	none coverage = iota
	// partial: a pod has no report about the object, for example because it was not ready since
	// the start of the operator, or because it rejected the config.
	partial
	// full: every pod has a report about the object.
	full
)

// counts reports whether sums replace the numbers of a status. While a pod has no report, they do
// so only if none of the counters that never decrease would: the share of that pod is
// missing. Each pair has the old and the new value of such a counter.
func (c coverage) counts(counters ...[2]int64) bool {
	return c == full || c == partial && !slices.ContainsFunc(counters, func(c [2]int64) bool { return c[1] < c[0] })
}

// each calls f with each pod's last report about one object. The report is valid until f returns.
func (p reports[R]) each(pods []Pod, namespace, name string, f func(Pod, *R)) coverage {
	reported, known, scratch := none, full, new(R)
	for _, pod := range inOrder(pods) {
		r := p.of(pod, namespace, name, scratch)
		if r == nil {
			if !pod.Removed || pod.Report == nil {
				known = partial
			}
			continue
		}
		reported = full
		f(pod, r)
	}
	return min(reported, known)
}

// facts are the inputs of the conditions of every kind.
type facts struct {
	verdict    compile.Verdict
	generation int64
	old        []metav1.Condition
	now        metav1.Time

	// ready counts the ready pods, confirmed those that run the object's revision, and
	// unknown those without a report.
	ready, confirmed, unknown int
	// silent is true if a ready pod does not answer, unowned if no pod has the store, down if no pod has been
	// ready for a while.
	silent, unowned, down bool
	// tooOld is true if a ready pod does not know a field of the object.
	tooOld bool
	// refused is the message about the first of these pods that rejects the config.
	refused string
	// recompiled is true if the status describes another revision of the object.
	recompiled bool
	// discardAhead announces the discards of the object's messages; "" if there are none.
	discardAhead string
	// belowDispatchers is true if a limit is smaller than the number of dispatchers, and each has 1 of it.
	belowDispatchers bool
	// stranded describes the object's messages on volumes of removed pods; "" if there are none.
	stranded string
}

// gather counts the pods that confirm an object's revision.
func gather[R any](verdict compile.Verdict, object metav1.ObjectMeta, old []metav1.Condition, namespace string, pods []Pod, now time.Time,
	p reports[R]) facts {
	f, scratch := facts{verdict: verdict, generation: object.Generation, old: old, now: observed.Timestamp(now)}, new(R)
	for _, pod := range inOrder(pods) {
		f.unowned, f.down = f.unowned || pod.Unowned, f.down || pod.NoneReady
		if pod.Absent {
			continue
		}
		f.ready++
		f.silent = f.silent || !pod.Answers()
		if r := p.of(pod, namespace, object.Name, scratch); r != nil {
			if revision, generation := p.running(r); revision == verdict.Revision && generation >= object.Generation {
				f.confirmed++
				continue
			} else if strings.HasPrefix(revision, liveconfig.UnknownField) {
				f.tooOld = true
			}
		}
		if pod.Report == nil {
			f.unknown++
		}
		if n := pod.Report.Namespace(namespace); n != nil && n.Refused != nil && f.refused == "" {
			f.refused = "a dispatcher rejected the config and keeps the previous one: " + n.Refused.Error
		}
	}
	return f
}

// observed returns the time of the numbers in a status: now if they were reported, and
// otherwise the time in the previous status.
func (f facts) observed(before *metav1.Time, reported bool) *metav1.Time {
	if reported {
		return f.now.DeepCopy()
	}
	return before.DeepCopy()
}

// state returns the state of the object in the config.
func (f facts) state() liveconfig.State {
	switch {
	case f.verdict.State != "":
		return f.verdict.State
	case !f.verdict.OK():
		return liveconfig.Paused
	case f.verdict.Reason == v1beta1.ReasonSuspended:
		return liveconfig.Suspended
	}
	return liveconfig.Active
}

// conditions returns Accepted, ResolvedRefs, Programmed, Ready, the traffic condition
// and, while it is True, Stalled. programmable is false if the object has no effect on
// the dispatchers. Ready also announces discards ahead.
func (f facts) conditions(programmable bool, traffic metav1.Condition) []metav1.Condition {
	accepted := metav1.Condition{Type: v1beta1.ConditionAccepted, Status: status(f.verdict.Accepted), Reason: f.verdict.Reason,
		Message: f.verdict.Message}
	resolved := f.resolvedRefs()
	programmed := f.programmed(programmable)
	ready := metav1.Condition{Type: v1beta1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1beta1.ReasonReady,
		Message: "accepted, and every ready dispatcher runs this revision"}
	for _, c := range []metav1.Condition{programmed, resolved, accepted} { // The last one takes precedence.
		if c.Status != metav1.ConditionTrue {
			ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, c.Reason, c.Message
		}
	}
	if f.stranded != "" {
		stranded := "; " + f.stranded
		ready.Message = compile.Truncate(ready.Message, maxMessageBytes/2-len(stranded)) + stranded
	}
	if f.discardAhead != "" {
		if ready.Status == metav1.ConditionTrue {
			ready.Reason = v1beta1.ReasonDiscardAhead
		}
		ahead := "; " + f.discardAhead
		ready.Message = compile.Truncate(ready.Message, maxMessageBytes-len(ahead)) + ahead
	}
	all := []metav1.Condition{accepted, resolved, programmed, ready, traffic}
	for _, c := range []metav1.Condition{accepted, resolved} {
		if c.Status == metav1.ConditionFalse && needsPerson(c.Reason) {
			c.Type, c.Status = v1beta1.ConditionStalled, metav1.ConditionTrue
			all = append(all, c)
			break
		}
	}
	var out []metav1.Condition
	for _, c := range all {
		c.ObservedGeneration, c.LastTransitionTime, c.Message = f.generation, f.now, compile.Truncate(c.Message, maxMessageBytes)
		if before := meta.FindStatusCondition(f.old, c.Type); before != nil && before.Status == c.Status && !before.LastTransitionTime.IsZero() {
			c.LastTransitionTime = before.LastTransitionTime
		}
		out = append(out, c)
	}
	return out
}

// needsPerson reports whether a person has to change the spec, or a value in a Secret or a ConfigMap.
// This is not so for missing objects: usually the same change or another controller
// creates them a moment later.
func needsPerson(reason string) bool {
	switch reason {
	case v1beta1.ReasonSecretNotFound, v1beta1.ReasonSecretKeyMissing, v1beta1.ReasonConfigMapNotFound, v1beta1.ReasonConfigMapKeyMissing,
		v1beta1.ReasonNoSource, v1beta1.ReasonDestinationNotFound:
		return false
	}
	return true
}

func (f facts) resolvedRefs() metav1.Condition {
	set := conditionOf(v1beta1.ConditionResolvedRefs)
	if u := f.verdict.Unresolved; u != nil {
		return set(metav1.ConditionFalse, u.Reason, u.Message)
	}
	return set(metav1.ConditionTrue, v1beta1.ReasonResolvedRefs, "every reference resolves")
}

// noEffect returns the reason of Programmed and the traffic condition of an object
// without effect.
func (f facts) noEffect() string {
	if f.verdict.Accepted && f.verdict.Unresolved != nil {
		return v1beta1.ReasonUnresolvedRefs
	}
	return v1beta1.ReasonNotAccepted
}

func (f facts) programmed(programmable bool) metav1.Condition {
	c := metav1.Condition{Type: v1beta1.ConditionProgrammed, Status: metav1.ConditionFalse}
	switch {
	// An object that is too large and not paused is not in the config.
	case !programmable, f.verdict.Reason == v1beta1.ReasonConfigTooLarge && f.state() != liveconfig.Paused && f.confirmed < f.ready:
		c.Reason, c.Message = f.noEffect(), "the object has no effect; see the conditions Accepted and ResolvedRefs"
	case f.ready > 0 && f.confirmed == f.ready:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1beta1.ReasonProgrammed, "every ready dispatcher runs this revision"
		if f.belowDispatchers {
			c.Message += "; spec.delivery.maxInFlight is less than the number of dispatchers, and each can have one request in flight to an endpoint"
		}
	case f.down:
		c.Reason, c.Message = v1beta1.ReasonNoDispatcher, noneReady
	case f.unowned:
		c.Reason, c.Message = v1beta1.ReasonUnowned, "no dispatcher owns this namespace's part of the replicated log: calls are answered 503, and nothing is sent; ask an administrator to run kubectl posthorn slots"
	case f.tooOld:
		c.Reason, c.Message = v1beta1.ReasonDispatcherTooOld, "a dispatcher of an older release does not know a field of the spec: its messages wait; update the dispatchers"
	case f.keepsProgrammed():
		before := f.before(v1beta1.ConditionProgrammed)
		c.Status, c.Reason, c.Message = before.Status, before.Reason, before.Message
	case f.ready == 0:
		c.Reason, c.Message = v1beta1.ReasonNoDispatcher, "no dispatcher is ready; check the logs of the dispatchers"
	case f.refused != "":
		c.Reason, c.Message = v1beta1.ReasonConfigRefused, f.refused
	default:
		c.Reason, c.Message = v1beta1.ReasonPending, "not every ready dispatcher has confirmed this revision yet; if this persists, check the logs of the dispatchers"
	}
	return c
}

const noneReady = "no dispatcher has been ready for minutes: calls are refused, and nothing is sent; check the logs of the dispatchers"

// keepsProgrammed reports whether Programmed keeps its value for an object that did not
// change: nothing is known about any pod that has not confirmed the object, or no pod is
// ready.
func (f facts) keepsProgrammed() bool {
	before := f.before(v1beta1.ConditionProgrammed)
	return before != nil && before.ObservedGeneration == f.generation && !f.recompiled && f.confirmed+f.unknown == f.ready
}

// conditionOf returns a function that creates conditions of a type.
func conditionOf(conditionType string) func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
	return func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return metav1.Condition{Type: conditionType, Status: status, Reason: reason, Message: message}
	}
}

// Pending reports whether an object waits only for the confirmation of the pods, as it
// does for a moment after every change.
func Pending(conditions []metav1.Condition) bool {
	c := meta.FindStatusCondition(conditions, v1beta1.ConditionProgrammed)
	return c != nil && c.Reason == v1beta1.ReasonPending
}

// before returns a condition of the previous status, for the time in which the pods report
// nothing about it. It is nil if the previous condition describes the spec.
func (f facts) before(conditionType string) *metav1.Condition {
	c := meta.FindStatusCondition(f.old, conditionType)
	if c == nil || aboutSpec(c.Reason) {
		return nil
	}
	return c
}

// inOrder returns the pods sorted by name. Usually they are, and a pass asks for every object.
func inOrder(pods []Pod) []Pod {
	byName := func(a, b Pod) int { return cmp.Compare(a.Name, b.Name) }
	if slices.IsSortedFunc(pods, byName) {
		return pods
	}
	return slices.SortedFunc(slices.Values(pods), byName)
}

func status(is bool) metav1.ConditionStatus {
	if is {
		return metav1.ConditionTrue
	}
	return metav1.ConditionFalse
}
