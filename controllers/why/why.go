// Package why explains why messages of one WebhookDestination do not arrive. Explain
// turns objects and reports into findings along the path of a message: destination,
// config, Sources, filter, endpoints, backlog. It is pure.
package why

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/controllers/observed"
	"github.com/posthorn/posthorn/internal/plural"
)

// Level is the severity of a finding.
type Level string

// The levels, in descending severity.
const (
	// Problem: messages do not arrive because of this.
	Problem Level = "PROBLEM"
	// Notice: useful information; it can be intended.
	Notice Level = "NOTICE"
	// Fine: this part works.
	Fine Level = "OK"
)

// Finding is the result of one check along the delivery path.
type Finding struct {
	Level Level `json:"level"`
	// About is the checked part: Operator, Kind, Manifest, Destination, Secret, Config, Source, Filter,
	// Redact, Disk, Endpoint, Backlog or DeadLetters.
	About string `json:"about"`
	// Text is the result.
	Text string `json:"text"`
	// Fix is the action for the user; empty if none is necessary.
	Fix string `json:"fix,omitempty"`
	// Reason is the reason of the condition or of the failed attempt, Since the time of its begin, and StatusCode the
	// status code of the last failed attempt; empty if there is none.
	Reason     string    `json:"reason,omitempty"`
	Since      time.Time `json:"since,omitzero"`
	StatusCode int32     `json:"statusCode,omitempty"`
	// Idle is true for a Source that has never had a call, as in a new installation.
	Idle bool `json:"idle,omitempty"`
}

// Facts are the input of Explain.
type Facts struct {
	Namespace, Name string
	// Destinations and Sources of the namespace.
	Destinations []v1beta1.WebhookDestination
	Sources      []v1beta1.Source
	// Reports of the dispatchers, if available: all of them, as their numbers replace the numbers of
	// the status.
	Reports []*podreport.Index
	// OperatorRenewed is when the operator last renewed its Lease; zero if that is not known.
	OperatorRenewed time.Time
	// KindsGone are the kinds that the cluster does not serve.
	KindsGone []string
	// Manifests are the problems of the manifests of posthorn run; empty in a cluster.
	Manifests []manifest.Problem
	// UnknownKeys are the recent requests with an unknown write key, of all dispatchers; empty if
	// they are not available.
	UnknownKeys []adminapi.UnknownKey
	// Attempts are the last attempts at the destination, oldest first, for the receiver's answer;
	// empty if they are not available.
	Attempts []adminapi.Attempt
	Now      time.Time
}

// Explain returns the findings along the delivery path. Cause selects the one to fix first.
func Explain(f Facts) []Finding {
	i := slices.IndexFunc(f.Destinations, func(d v1beta1.WebhookDestination) bool { return d.Name == f.Name })
	if i < 0 {
		e := explainer{Facts: f}
		e.operator()
		if e.kindsGone(); slices.Contains(f.KindsGone, "WebhookDestination") {
			e.kept()
			return e.found
		}
		before := len(e.found)
		e.manifests()
		if len(e.found) > before && e.found[before].Level == Problem {
			return e.found
		}
		fix := "create it; if it was removed less than 10 minutes ago, its messages are kept and sent when it is restored"
		if names := destinationNames(f.Destinations); len(names) > 0 {
			fix = "did you mean one of these: " + list(names) + "?"
		}
		e.add(Problem, "Destination", fix, "there is no WebhookDestination %q in namespace %q", f.Name, f.Namespace)
		e.kept()
		return e.found
	}
	e := explainer{Facts: f, d: &f.Destinations[i]}
	e.observe()
	e.operator()
	e.kindsGone()
	e.manifests()
	e.spec()
	e.kept()
	e.config()
	e.sources()
	e.unknownKeys()
	e.filter()
	e.redact()
	e.endpoints()
	e.backlog()
	return e.found
}

// Cause returns the finding to fix first, or nil. A full disk, and then an idle Source, is the cause only if there is no
// other problem, such as an endpoint that rejects messages, which fill the disk.
func Cause(findings []Finding) (cause *Finding) {
	rank := func(f *Finding) int {
		switch {
		case f.Idle:
			return 2
		case f.About == aboutDisk:
			return 1
		}
		return 0
	}
	for i := range findings {
		if f := &findings[i]; f.Level == Problem && (cause == nil || rank(f) < rank(cause)) {
			cause = f
		}
	}
	return cause
}

const aboutDisk = "Disk"

// DiskFull explains that a dispatcher's disk is full: by what, how much space is missing, and what to do. It names the
// destinations of one namespace, or of all with "".
func DiskFull(r *podreport.Index, namespace string) Finding {
	const mib, most = 1 << 20, 3
	s := r.Storage
	f := Finding{Level: Problem, About: aboutDisk, Reason: v1beta1.ReasonStoragePressure}
	f.Text = fmt.Sprintf("the disk of dispatcher %s is full, so new calls are answered 503", r.Pod)
	if s.LackingBytes > 0 {
		f.Text += fmt.Sprintf(" until %d MiB become free", s.LackingBytes/mib)
	}
	others := max(s.TotalBytes-s.FreeBytes-s.UsedBytes, 0)
	f.Text += fmt.Sprintf("; of %d MiB, Posthorn uses %d MiB and other files %d MiB", s.TotalBytes/mib, s.UsedBytes/mib, others/mib)
	type backlog struct {
		name            string
		pending, stored int64
		reason          string
	}
	var backlogs []backlog
	for name, n := range r.Namespaces() {
		if namespace != "" && name != namespace {
			continue
		}
		for d := range n.Destinations() {
			if d.Pending+d.DeadLettersStored == 0 {
				continue
			}
			b := backlog{name + "/" + d.Name, d.Pending, d.DeadLettersStored, ""}
			for _, p := range d.Endpoints {
				if p.LastFailure != nil && !p.LastSuccess.After(p.LastFailure.Time) {
					b.reason = cmp.Or(b.reason, ", "+p.LastFailure.Reason)
				}
			}
			backlogs = append(backlogs, b)
		}
	}
	slices.SortFunc(backlogs, func(a, b backlog) int {
		return cmp.Or(cmp.Compare(b.pending+b.stored, a.pending+a.stored), strings.Compare(a.name, b.name))
	})
	var names []string
	for _, b := range backlogs[:min(len(backlogs), most)] {
		names = append(names, fmt.Sprintf("%s (%d pending, %s%s)", b.name, b.pending, plural.Count(b.stored, "dead letter"), b.reason))
	}
	if names != nil {
		f.Text += "; the largest backlogs are " + strings.Join(names, ", ")
	}
	f.Fix = "fix the receivers with the largest backlog, purge dead letters, or enlarge the volume"
	if others > s.UsedBytes {
		f.Fix = "remove other files from the volume, or enlarge it"
	}
	return f
}

type explainer struct {
	Facts
	d     *v1beta1.WebhookDestination
	found []Finding
	// paused is true if nothing is sent because of the spec.
	paused bool
	// filterFailure describes the last failure of the filter; empty if there was none lately.
	filterFailure string
	// unmatched is observed.Destination.Unmatched.
	unmatched *adminapi.UnmatchedPaths
	// lineBreak is true if a Secret's value ends with a line break, which is not used.
	lineBreak bool
	// failing has the times since when endpoints fail, of the reports.
	failing map[string]time.Time
	// expires is observed.Destination.Expires.
	expires time.Time
	// delivers is true if an endpoint accepts all messages, so that another one that fails does not
	// prevent the delivery.
	delivers bool
}

func (e *explainer) add(level Level, about, fix, format string, args ...any) {
	e.found = append(e.found, Finding{Level: level, About: about, Text: fmt.Sprintf(format, args...), Fix: fix})
}

// because adds the machine-readable cause to the last finding.
func (e *explainer) because(reason string, since time.Time, statusCode int32) {
	f := &e.found[len(e.found)-1]
	f.Reason, f.Since, f.StatusCode = reason, since, statusCode
}

// observe replaces the numbers and the states of the endpoints in the destination's status by the numbers
// and states of the reports.
func (e *explainer) observe() {
	delivering := meta.FindStatusCondition(e.d.Status.Conditions, v1beta1.ConditionDelivering)
	if e.delivers = delivering != nil && delivering.Status == metav1.ConditionTrue; delivering != nil &&
		delivering.Reason == v1beta1.ReasonFilterFailed {
		e.filterFailure = delivering.Message
	}
	live, reported := observed.NewDestination(e.d.Spec.Endpoints), false
	var r adminapi.DestinationReport
	for _, x := range e.Reports {
		if x.Namespace(e.Namespace).ReadDestination(e.Name, &r) {
			live.Add(&r, false)
			e.addFailing(r.Endpoints)
			reported = true
		}
	}
	if !reported {
		return
	}
	d := *e.d // The object belongs to the caller.
	e.d = &d
	e.expires = live.Expires
	d.Status.Delivery, d.Status.Endpoints = &live.Delivery, live.Statuses(d.Status.Endpoints, e.Now, true)
	if e.filterFailure = ""; live.FilterFailure != nil {
		e.filterFailure = fmt.Sprintf("the expression fails for some calls, which become dead letters; the last one %s: %s", ago(e.Now, live.FilterFailure.Time), live.FilterFailure.Message)
	}
	e.unmatched = live.Unmatched
	_, working := live.Failing()
	e.delivers = working > 0 && d.Spec.SuccessPolicy != v1beta1.EveryEndpoint
}

// addFailing records since when the endpoints of a report fail: the earliest time of all reports.
func (e *explainer) addFailing(endpoints []adminapi.EndpointReport) {
	for _, ep := range endpoints {
		if before, ok := e.failing[ep.Name]; ep.State != adminapi.EndpointHealthy && ep.State != adminapi.EndpointIdle &&
			(!ok || ep.Since.Before(before)) {
			if e.failing == nil {
				e.failing = map[string]time.Time{}
			}
			e.failing[ep.Name] = ep.Since
		}
	}
}

// failingSince returns since when an endpoint fails: from the reports, or without them from the condition Delivering. It is
// zero if that is not known.
func (e *explainer) failingSince(endpoint string) time.Time {
	if since, ok := e.failing[endpoint]; ok {
		return since
	}
	if c := meta.FindStatusCondition(e.d.Status.Conditions, v1beta1.ConditionDelivering); c != nil && c.Status == metav1.ConditionFalse {
		return c.LastTransitionTime.Time
	}
	return time.Time{}
}

// operatorAway is the age of the operator's Lease from which the statuses are outdated. A replica takes over within
// 30 s.
const operatorAway = 2 * time.Minute

// OperatorAway explains that the operator does not run, so that all statuses are outdated; nil if it does.
func OperatorAway(renewed, now time.Time) *Finding {
	if renewed.IsZero() || now.Sub(renewed) < operatorAway {
		return nil
	}
	return &Finding{Level: Problem, About: "Operator",
		Text: fmt.Sprintf("the operator does not run: it was last active %s, and no status was written since; dispatchers continue with their last configs", ago(now, renewed)),
		Fix:  "ask an administrator to check the operator's log"}
}

// operator adds that the operator does not run, and otherwise that the status of the destination is older than
// its promise: a retry was due before, so the numbers have changed since.
func (e *explainer) operator() {
	if f := OperatorAway(e.OperatorRenewed, e.Now); f != nil {
		e.found = append(e.found, *f)
		return
	}
	if !e.OperatorRenewed.IsZero() || len(e.Reports) > 0 || e.d == nil || e.d.Status.ObservedTime == nil || e.d.Status.Delivery == nil {
		return
	}
	observed, due := e.d.Status.ObservedTime.Time, e.d.Status.Delivery.NextAttemptTime
	if due != nil && e.Now.Sub(due.Time) > statusPromise && e.Now.Sub(observed) > statusPromise {
		e.add(Problem, "Operator", "ask an administrator to check the operator's log", "the operator has not written this status for %s, although a retry was due %s", e.Now.Sub(observed).Round(time.Second), ago(e.Now, due.Time))
	}
}

// statusPromise is the age that the numbers of an object with traffic do not reach with 10,000 objects.
const statusPromise = 10 * time.Minute

// KindGone explains that the cluster does not serve a kind.
func KindGone(kind string) Finding {
	return Finding{Level: Problem, About: "Kind",
		Text: fmt.Sprintf("the cluster does not serve the kind %s: its CustomResourceDefinition was deleted, and its objects with it; their messages are kept for 7 days, and not sent", kind),
		Fix:  "apply the CustomResourceDefinitions (helm upgrade does), then the objects"}
}

func (e *explainer) kindsGone() {
	for _, kind := range e.KindsGone {
		e.found = append(e.found, KindGone(kind))
	}
}

func (e *explainer) manifests() {
	e.found = append(e.found, Manifests(e.Facts.Manifests, "WebhookDestination", e.Namespace, e.Name, e.Now)...)
}

// Manifests explains the rejected manifests: first the manifests of an object, then the others of its
// namespace, whose objects may have an effect on it.
func Manifests(problems []manifest.Problem, kind, namespace, name string, now time.Time) (found []Finding) {
	own := kind + " " + namespace + "/" + name
	for _, level := range []Level{Problem, Notice} {
		for _, p := range problems {
			if p.Within(namespace) && p.About(own) == (level == Problem) {
				if p.Parked {
					parked := Parked(p, now)
					parked.Level = level
					found = append(found, parked)
					continue
				}
				found = append(found, Finding{Level: level, About: "Manifest", Text: fmt.Sprintf("rejected %s: %s", ago(now, p.Since), p.Detail()),
					Reason: v1beta1.ReasonManifestRejected, Since: p.Since,
					Fix: "correct the manifest"})
			}
		}
	}
	return found
}

// Fix returns the action for the user for a reason of a condition; "" if the message is enough.
func Fix(reason string) string { return fixes[reason].fix }

// Parked explains a parked object of posthorn run.
func Parked(p manifest.Problem, now time.Time) Finding {
	p.Object = "" // It is the subject of the finding.
	return Finding{Level: Problem, About: "Manifest", Text: fmt.Sprintf("parked %s: %s", ago(now, p.Since), p.Detail())}
}

// fixes maps a reason of Accepted, ResolvedRefs or Receiving to the action for the user.
var fixes = map[string]struct{ about, fix string }{
	v1beta1.ReasonSecretNotFound:       {"Secret", "create the Secret in this namespace; no restart is necessary"},
	v1beta1.ReasonSecretKeyMissing:     {"Secret", "add the key to the Secret, or correct the reference"},
	v1beta1.ReasonInvalidSecret:        {"Secret", "correct the value in the Secret"},
	v1beta1.ReasonConfigMapNotFound:    {"ConfigMap", "create the ConfigMap in this namespace; no restart is necessary"},
	v1beta1.ReasonConfigMapKeyMissing:  {"ConfigMap", "add the key to the ConfigMap, or correct the reference"},
	v1beta1.ReasonInvalidConfigMap:     {"ConfigMap", "correct the value in the ConfigMap"},
	v1beta1.ReasonInvalidURL:           {"Destination", "correct the URL: http:// or https:// and a host"},
	v1beta1.ReasonInvalidFilter:        {"Filter", "correct spec.filter.expression"},
	v1beta1.ReasonNoSource:             {"Source", "create the Source, or correct spec.sourceRefs, spec.sourceSelector or spec.sourceRef"},
	v1beta1.ReasonDestinationNotFound:  {"Dead letters", "create the destination, or correct spec.deadLetters.forwardTo"},
	v1beta1.ReasonInvalidForwardTarget: {"Dead letters", "change the destination that the message names, or name another one"},
	v1beta1.ReasonCeilingExceeded:      {"Destination", "lower the timeout or the retry window, or ask an administrator to raise the ceiling"},
	v1beta1.ReasonEgressDenied:         {"Destination", "ask an administrator to allow the address (--egress-allow), or use another"},
	v1beta1.ReasonExpressionBudget:     {"Filter", "remove or shorten expressions, or filter by types and events"},
	v1beta1.ReasonConfigTooLarge:       {"Config", "remove headers or large certificates, or destinations, or use another namespace"},
	v1beta1.ReasonInvalidSpec:          {"Destination", "correct the field that the message names"},
	v1beta1.ReasonWriteKeyConflict:     {"Source", "set another write key"},
	v1beta1.ReasonWriteKeyReserved:     {"Source", "set another write key, or ask an administrator to release it"},
	v1beta1.ReasonStoragePressure:      {aboutDisk, "fix the destinations with the largest backlog, or ask an administrator for disk space"},
	v1beta1.ReasonRejectingCalls:       {"Source", "fix the sender; the message gives the reason"},
}

// refusals returns the conditions Accepted and ResolvedRefs that are False.
func refusals(conditions []metav1.Condition) (list []metav1.Condition) {
	for _, conditionType := range []string{v1beta1.ConditionAccepted, v1beta1.ConditionResolvedRefs} {
		if c := meta.FindStatusCondition(conditions, conditionType); c != nil && c.Status == metav1.ConditionFalse {
			list = append(list, *c)
		}
	}
	return list
}

// lineBreakNote is a part of the message of Accepted when the value of a Secret ends with a line break, which
// is not used. Package compile writes it.
const lineBreakNote = "ends with a line break"

func (e *explainer) spec() {
	accepted, refused := meta.FindStatusCondition(e.d.Status.Conditions, v1beta1.ConditionAccepted), refusals(e.d.Status.Conditions)
	switch {
	case accepted == nil || accepted.ObservedGeneration < e.d.Generation:
		e.add(Problem, "Destination", "check the operator's log", "the operator has not processed this version of the destination yet")
	case len(refused) > 0:
		for _, c := range refused {
			fix, ok := fixes[c.Reason]
			if !ok {
				fix.about = "Destination"
			}
			then := ""
			if !slices.Contains(v1beta1.ReasonsWithDelivery, c.Reason) {
				e.paused, then = true, "; messages are kept, not sent"
			}
			e.add(Problem, fix.about, fix.fix, "%s (%s)%s", c.Message, c.Reason, then)
			e.because(c.Reason, c.LastTransitionTime.Time, 0)
		}
		e.suspended()
	case e.suspended():
	case strings.Contains(accepted.Message, "; spec."): // notes about unusual values
		e.lineBreak = strings.Contains(accepted.Message, lineBreakNote)
		e.add(Notice, "Destination", "", "%s", accepted.Message)
	default:
		e.add(Fine, "Destination", "", "%s", cmp.Or(accepted.Message, "the spec is valid"))
	}
}

// suspended reports a suspension, which can be beside other problems.
func (e *explainer) suspended() bool {
	if !ptr.Deref(e.d.Spec.Suspend, false) {
		return false
	}
	e.paused = true
	e.add(Problem, "Destination", "set spec.suspend to false", "the destination is suspended; messages wait and keep their space on the disk, and the time does not count towards their retry windows")
	e.because(v1beta1.ReasonSuspended, time.Time{}, 0)
	return true
}

// discardNote begins the announcement of discards ahead in the message of Ready. Package health writes it.
const discardNote = "pending messages "

// AnnouncedDiscard returns the announcement of discards ahead in the conditions of an object; "" if there is
// none.
func AnnouncedDiscard(conditions []metav1.Condition) string {
	ready := meta.FindStatusCondition(conditions, v1beta1.ConditionReady)
	if ready == nil {
		return ""
	}
	if i := strings.Index(ready.Message, discardNote); i >= 0 {
		return ready.Message[i:]
	}
	return ""
}

// strandedNote begins the part of the message of Ready about messages on the volumes of removed pods. Package health
// writes it.
const strandedNote = "stranded: "

// Stranded returns the messages on volumes that no dispatcher uses, from the conditions of an object; "" if
// there are none.
func Stranded(conditions []metav1.Condition) string {
	ready := meta.FindStatusCondition(conditions, v1beta1.ConditionReady)
	if ready == nil {
		return ""
	}
	_, text, _ := strings.Cut(ready.Message, strandedNote)
	text, _, _ = strings.Cut(text, "; "+discardNote)
	return text
}

// kept explains the messages that the dispatchers keep for a part of the destination that is missing:
// it was deleted, and they are discarded soon, or its config is lost.
func (e *explainer) kept() {
	discards := map[string]adminapi.Discard{}
	for _, r := range e.Reports {
		n := r.Config(e.Namespace)
		for _, d := range n.Discards {
			if d.Destination != e.Name || d.Messages == 0 {
				continue
			}
			sum, known := discards[d.Source]
			if !known || d.At.Before(sum.At) {
				sum.At = d.At
			}
			sum.Messages += d.Messages
			discards[d.Source] = sum
		}
		if !n.Missing.IsZero() {
			e.add(Problem, "Config", "contact an administrator: the operator must write the config again; messages are kept, and calls are answered 503 until then",
				"dispatcher %s has no config of this namespace since %s", r.Pod, n.Missing.UTC().Format(time.RFC3339))
		} else if slices.ContainsFunc(n.Parked, func(p adminapi.ParkedObject) bool { return p.Object == "destinations/"+e.Name }) {
			e.add(Notice, "Config", "create the destination again to deliver them; create and delete it to discard them",
				"dispatcher %s keeps messages of this destination, which is missing although it was not deleted", r.Pod)
		}
	}
	for _, source := range slices.Sorted(maps.Keys(discards)) {
		d := discards[source]
		e.add(Notice, "Backlog", "to keep them, create what was deleted again before that time",
			"%s of Source %q will be discarded at %s, because the Source, the destination or its endpoint was deleted or disconnected", plural.Count(d.Messages, "pending message"), source, d.At.UTC().Format(time.RFC3339))
	}
	if e.d != nil {
		if text := Stranded(e.d.Status.Conditions); text != "" {
			e.add(Problem, "Backlog", "ask an administrator to scale up again, or to drain the volume with a Job", "%s", text)
		}
	}
	if len(e.Reports) == 0 && e.d != nil {
		if text := AnnouncedDiscard(e.d.Status.Conditions); text != "" {
			e.add(Notice, "Backlog", "", "%s", text)
		}
	}
}

// DiscardsAhead describes the pending messages of a namespace ("" for all) that will be discarded, a
// text for each Source and destination.
func DiscardsAhead(configs []adminapi.ConfigReport, namespace string, now time.Time) (texts []string) {
	for _, c := range configs {
		for _, d := range c.Discards {
			if d.Messages == 0 || namespace != "" && c.Namespace != namespace {
				continue
			}
			texts = append(texts, fmt.Sprintf("%s of Source %q for WebhookDestination %q in namespace %s will be discarded in %s, at %s; to keep them, create what was deleted again before that time",
				plural.Count(d.Messages, "pending message"), d.Source, d.Destination, c.Namespace, max(0, d.At.Sub(now)).Round(time.Second),
				d.At.UTC().Format(time.RFC3339)))
		}
	}
	return texts
}

func (e *explainer) config() {
	for _, r := range e.Reports {
		if n := r.Namespace(e.Namespace); n != nil && n.Refused != nil {
			e.add(Problem, "Config", "ask an administrator to update operator and dispatchers together", "dispatcher %s rejects the config and keeps the previous one: %s", r.Pod, n.Refused.Error)
			return
		}
		if r.Storage.Pressure {
			e.found = append(e.found, DiskFull(r, e.Namespace))
		} else if days := r.Storage.DaysLeft; days > 0 {
			e.add(Notice, "Config", "", "the disk of dispatcher %s is full in at most %s at the present rate; then calls are answered 503", r.Pod, plural.Count(days, "day"))
		}
	}
	programmed := meta.FindStatusCondition(e.d.Status.Conditions, v1beta1.ConditionProgrammed)
	if programmed == nil || programmed.Status == metav1.ConditionUnknown || withoutEffect(programmed.Reason) {
		return
	}
	if programmed.Status == metav1.ConditionTrue {
		e.add(Fine, "Config", "", "every ready dispatcher runs this version")
		return
	}
	fix := "wait some seconds; if the problem remains, check the logs of the dispatchers"
	switch programmed.Reason {
	case v1beta1.ReasonNoDispatcher:
		fix = "contact an administrator: the dispatchers are not ready"
	case v1beta1.ReasonUnowned:
		fix = "contact an administrator: kubectl posthorn slots has the reasons"
	}
	e.add(Problem, "Config", fix, "%s (%s)", programmed.Message, programmed.Reason)
	e.because(programmed.Reason, programmed.LastTransitionTime.Time, 0)
}

// withoutEffect reports whether a reason of Programmed means that the object has no effect.
func withoutEffect(reason string) bool {
	return reason == v1beta1.ReasonNotAccepted || reason == v1beta1.ReasonUnresolvedRefs
}

// chosen returns the Sources of the destination.
func (e *explainer) chosen() []v1beta1.Source {
	s := &e.d.Spec
	match := func(o v1beta1.Source) bool {
		return slices.Contains(s.SourceRefs, v1beta1.SourceReference{Name: o.Name})
	}
	if s.SourceSelector != nil {
		selector, err := metav1.LabelSelectorAsSelector(s.SourceSelector)
		if err != nil {
			return nil
		}
		match = func(o v1beta1.Source) bool { return selector.Matches(labels.Set(o.Labels)) }
	}
	var chosen []v1beta1.Source
	for _, o := range e.Sources {
		if match(o) {
			chosen = append(chosen, o)
		}
	}
	return chosen
}

func (e *explainer) sources() {
	chosen, builtIn := e.chosen(), ""
	for _, name := range v1beta1.BuiltInSources {
		if slices.Contains(e.d.Spec.SourceRefs, v1beta1.SourceReference{Name: name}) {
			builtIn = name
			e.add(Fine, "Source", "", "Source %q is built in", name)
		}
	}
	if len(chosen) == 0 && builtIn == "" {
		if !slices.ContainsFunc(e.found, func(f Finding) bool { return f.About == "Source" }) {
			e.add(Problem, "Source", "create the Source, or correct spec.sourceRefs or spec.sourceSelector", "spec.sourceRefs or spec.sourceSelector matches no Source in this namespace")
		}
		return
	}
	for _, s := range chosen {
		refused := refusals(s.Status.Conditions)
		receiving := meta.FindStatusCondition(s.Status.Conditions, v1beta1.ConditionReceiving)
		last := s.Status.LastReceivedTime
		var calls v1beta1.CallCounts
		if s.Status.Calls != nil {
			calls = *s.Status.Calls
		}
		if r := e.sourceReports(s.Name); r != nil {
			calls.Accepted, calls.Rejected = r.Accepted, r.Rejected
			if !r.LastAccepted.IsZero() {
				last = &metav1.Time{Time: r.LastAccepted}
			}
		}
		refusing := Refusing(e.Reports, e.Namespace, s.Name, e.Now)
		switch {
		case ptr.Deref(s.Spec.Suspend, false):
			e.add(Problem, "Source", "set its spec.suspend to false", "Source %q is suspended: its calls are answered 503, and clients send them again", s.Name)
		case len(refused) > 0:
			text := "Source %q rejects all calls: %s (%s)"
			if p := meta.FindStatusCondition(s.Status.Conditions, v1beta1.ConditionProgrammed); p != nil && !withoutEffect(p.Reason) {
				text = "Source %q accepts calls with one of its write keys only: %s (%s)"
			}
			for _, c := range refused {
				e.add(Problem, "Source", fixes[c.Reason].fix, text, s.Name, c.Message, c.Reason)
				e.because(c.Reason, c.LastTransitionTime.Time, 0)
			}
		case receiving != nil && receiving.Status == metav1.ConditionFalse:
			e.add(Problem, cmp.Or(fixes[receiving.Reason].about, "Source"), fixes[receiving.Reason].fix, "Source %q: %s (%s)", s.Name,
				receiving.Message, receiving.Reason)
			e.because(receiving.Reason, receiving.LastTransitionTime.Time, 0)
		case refusing != nil:
			e.found = append(e.found, *refusing)
		case calls.Accepted == 0:
			e.add(Problem, "Source", "check the sender's address and write key: requests with a wrong key get 401 and are not counted for this Source", "no call has ever been accepted for Source %q", s.Name)
			e.found[len(e.found)-1].Idle = true
		case last == nil:
			e.add(Fine, "Source", "", "Source %q has accepted %s, none since the dispatchers started", s.Name, plural.Count(calls.Accepted, "call"))
		default:
			e.add(Fine, "Source", "", "Source %q has accepted %s, the last one %s", s.Name, plural.Count(calls.Accepted, "call"),
				ago(e.Now, last.Time))
		}
	}
}

// Refusing explains that a Source's calls, or some of them, got 503 within the last minute, because they could not be
// stored; nil if that is not so. While the disk is nearly full, small requests may still fit.
func Refusing(reports []*podreport.Index, namespace, name string, now time.Time) *Finding {
	for _, r := range reports {
		n := r.Namespace(namespace)
		if n == nil || n.Sources[name] == nil {
			continue
		}
		s := n.Sources[name]
		code, _, _ := strings.Cut(s.LastRejection, ": ")
		if slices.Contains([]string{"storage_full", "storage_failed", "not_ready"}, code) && now.Sub(s.LastRejected) < time.Minute {
			f := &Finding{Level: Problem, About: aboutDisk,
				Text: fmt.Sprintf("Source %q: calls are answered 503, the last one %s: %s", name, ago(now, s.LastRejected), s.LastRejection)}
			if code == "storage_full" {
				f.Fix = fixes[v1beta1.ReasonStoragePressure].fix
			}
			return f
		}
	}
	return nil
}

// Defects describes what could not be read or kept of a Source's accepted calls; "" if there is nothing.
func Defects(reports []*podreport.Index, namespace, name string) string {
	var sum adminapi.CallDefects
	for _, r := range reports {
		if n := r.Namespace(namespace); n != nil && n.Sources[name] != nil {
			for i, count := range n.Sources[name].Defects.ByName() {
				*sum.ByName()[i] += *count
			}
		}
	}
	var texts []string
	for i, what := range [...]string{
		"have a timestamp that is not a time", "have an originalTimestamp that is not a time", "have a sentAt that is not a time",
		"have a sentAt too far from the time of receipt to correct the timestamp", "have bytes that are not UTF-8, which were replaced",
	} {
		if n := *sum.ByName()[i]; n > 0 {
			texts = append(texts, fmt.Sprintf("%d %s", n, what))
		}
	}
	if texts == nil {
		return ""
	}
	return "of the accepted calls, " + strings.Join(texts, ", ") + "; send times as 2026-01-02T15:04:05.000Z, and UTF-8"
}

// UnknownKeys describes the recent requests with an unknown write key, which belong to no Source
// and no namespace; "" if there are none.
func UnknownKeys(keys []adminapi.UnknownKey, now time.Time) string {
	const most = 3
	var total int64
	var first, last time.Time
	var senders []string
	for i, k := range keys {
		total += k.Requests
		if first.IsZero() || k.First.Before(first) {
			first = k.First
		}
		if k.Last.After(last) {
			last = k.Last
		}
		if i < most {
			sender := fmt.Sprintf("%d from %s", k.Requests, cmp.Or(k.Address, "an unknown address"))
			if k.Prefix != "" {
				sender += fmt.Sprintf(" with %q", k.Prefix+"…")
			}
			senders = append(senders, sender)
		}
	}
	if total == 0 {
		return ""
	}
	if len(keys) > most {
		senders = append(senders, "…")
	}
	return fmt.Sprintf("%s with an unknown write key since %s, the last one %s: %s", plural.Count(total, "request"),
		first.UTC().Format(time.TimeOnly+"Z"), ago(now, last), strings.Join(senders, ", "))
}

func (e *explainer) unknownKeys() {
	if text := UnknownKeys(e.UnknownKeys, e.Now); text != "" {
		e.add(Notice, "Source", "if the sender is yours, compare its write key with the Secret of the Source", "%s", text)
	}
}

func (e *explainer) sourceReports(name string) *adminapi.SourceReport {
	var sum *adminapi.SourceReport
	for _, r := range e.Reports {
		n := r.Namespace(e.Namespace)
		if n == nil || n.Sources[name] == nil {
			continue
		}
		if sum == nil {
			sum = &adminapi.SourceReport{}
		}
		s := n.Sources[name]
		sum.Accepted += s.Accepted
		sum.Rejected += s.Rejected
		sum.LastAccepted = observed.Later(sum.LastAccepted, s.LastAccepted)
	}
	return sum
}

// counts returns the destination's numbers, if there are any.
func (e *explainer) counts() (c v1beta1.DeliveryStatus, known bool) {
	if e.d.Status.Delivery == nil {
		return c, false
	}
	return *e.d.Status.Delivery, true
}

func (e *explainer) filter() {
	if e.filterFailure != "" {
		e.add(Problem, "Filter", fmt.Sprintf("correct spec.filter.expression, then redeliver the dead letters: posthorn redeliver %s --reason %s", e.Name, v1beta1.ReasonFilterFailed), "%s", e.filterFailure)
	}
	c, known := e.counts()
	switch {
	case !known || c.Filtered == 0:
	case c.Delivered+c.Pending+c.DeadLettered == 0:
		fix := "relax spec.filter, or add this destination to the integrations of the calls"
		switch {
		case e.d.Spec.Filter == nil:
			fix = "the destination has no filter: the calls' own integrations exclude it"
		case e.d.Spec.Filter.Expression != "":
			fix += "; spec.filter.expression excludes every call for which it is not true, also if a field is missing or has another type"
		}
		e.add(Problem, "Filter", fix, "the filter excluded every call so far (%s)", plural.Count(c.Filtered, "message"))
	default:
		e.add(Notice, "Filter", "", "%s so far did not pass the filter or the calls' integrations", plural.Count(c.Filtered, "message"))
	}
	if known && c.Omitted > 0 {
		e.add(Notice, "Request", "", "%s so far omitted, because spec.request.body is null for them", plural.Count(c.Omitted, "message")+map[bool]string{true: " was", false: " were"}[c.Omitted == 1])
	}
}

func (e *explainer) redact() {
	if u := e.unmatched; u != nil && len(u.Paths) > 0 {
		e.add(Notice, "Redact", "compare the path with a message (posthorn tail "+e.Name+" --bodies); it is case-sensitive, and an array needs [*]",
			"%s in spec.redact matched no value in %s since the last change", strings.Join(u.Paths, ", "), plural.Count(u.Messages, "message"))
	}
}

// hint returns the action for a failed attempt at an endpoint.
func (e *explainer) hint(endpoint string, f *v1beta1.DeliveryFailure) string {
	fix := AttemptFix(f.Reason, int(f.StatusCode))
	if f.Reason == v1beta1.ReasonRejected {
		if e.d.Spec.Delivery.Batch == nil || !slices.Contains([]int32{401, 403, 404, 405, 407, 410, 415}, f.StatusCode) { // They retry a batch.
			fix += "; rejected messages are dead letters until the circuit opens; redeliver them after the fix"
		}
		if e.lineBreak && (f.StatusCode == http.StatusUnauthorized || f.StatusCode == http.StatusForbidden) {
			fix = "let the receiver use the secret without the line break at its end, too (see Destination), or " + fix
		}
	}
	plain := slices.ContainsFunc(e.d.Spec.Endpoints, func(p v1beta1.Endpoint) bool {
		return p.Name == endpoint && strings.HasPrefix(strings.ToLower(p.URL), "http://")
	})
	if plain && (f.Reason == v1beta1.ReasonConnectionFailed || f.Reason == v1beta1.ReasonInvalidResponse && f.StatusCode == 0 ||
		f.StatusCode == http.StatusBadRequest) {
		fix += "; if the port uses TLS, set a URL with https://"
	}
	return fix
}

// AttemptFix returns the action for an attempt that failed with a reason, and a status code or 0; "" for a success.
func AttemptFix(reason string, statusCode int) string {
	fix := ""
	switch {
	case reason == v1beta1.ReasonRejected:
		fix = statusHints[int32(statusCode)] //nolint:gosec // A status code has three digits.
	case reason == v1beta1.ReasonInvalidResponse && statusCode != 0:
		fix = `let the receiver return {"failed": [{"index": 0, "status": 422}]} with the rejected messages of the batch, or set spec.delivery.batch.response to Whole`
	}
	return cmp.Or(fix, hints[reason])
}

// answer returns the receiver's last answer with a status code to an endpoint, as a part of a
// sentence; "" if it is not known.
func (e *explainer) answer(endpoint string, statusCode int32) string {
	const most = 200
	for _, a := range slices.Backward(e.Attempts) {
		if text := strings.Join(strings.Fields(a.Response), " "); text != "" && a.Endpoint == endpoint && a.StatusCode == int(statusCode) {
			if runes := []rune(text); len(runes) > most {
				text = string(runes[:most]) + "…"
			}
			return fmt.Sprintf("; it answered %q", text)
		}
	}
	return ""
}

// statusHints maps the status code of a rejected message to the action for the user.
var statusHints = map[int32]string{
	400: "compare the message with what the receiver expects; posthorn deadletters show has the message and the answer",
	401: "check the signing secret and the headers with credentials; posthorn verify checks a signature",
	403: "check the signing secret and the headers with credentials, and what they permit at the receiver",
	404: "check the path of the URL",
	405: "check the path of the URL: the receiver does not accept POST there",
	407: "the answer is from a proxy that requires credentials: use a URL without that proxy",
	410: "the receiver reports that the URL was removed: correct the URL, or remove the endpoint",
	413: "the receiver limits the size of a body: raise its limit, or make the calls smaller",
	415: "check the receiver: it must accept the Content-Type application/json",
	422: "compare the message with what the receiver expects; posthorn deadletters show has the message and the answer",
}

// hints maps the reason of a failed attempt to the action for the user.
var hints = map[string]string{
	v1beta1.ReasonTimedOut:             "the receiver must answer within spec.delivery.timeout; acknowledge first and process asynchronously",
	v1beta1.ReasonConnectionRefused:    "check the host and the port, and that the receiver runs",
	v1beta1.ReasonConnectionFailed:     "check the network between the dispatchers and the receiver",
	v1beta1.ReasonDNSFailed:            "check the host name in the URL",
	v1beta1.ReasonCertificateRejected:  "use a certificate of a known authority, or set spec.endpoints[].tls.ca to the CA of a private one; a self-signed certificate is rejected even if it is listed there",
	v1beta1.ReasonTLSFailed:            "check that the port uses TLS, and whether the receiver requires a client certificate (endpoints[].tls.clientCertSecretRef)",
	v1beta1.ReasonAddressDenied:        "the name resolves to a private address: ask an administrator to allow it (--egress-allow)",
	v1beta1.ReasonProxyFailed:          "this is Posthorn's egress proxy, not the receiver: ask an administrator to check the proxy, its rules and its credentials; messages wait meanwhile",
	v1beta1.ReasonTokenFailed:          "check endpoints[].authentication.oauth2: the token URL, the client ID, the secret and the scopes; messages wait until a token can be obtained",
	v1beta1.ReasonServerError:          "check the receiver's log",
	v1beta1.ReasonThrottled:            "the receiver limits the rate: set spec.delivery.rateLimit",
	v1beta1.ReasonRejected:             "the receiver rejects the message: check the URL, its credentials and headers",
	v1beta1.ReasonRedirected:           "redirects are not followed: set the final URL in the spec",
	v1beta1.ReasonTransformFailed:      "correct the expression of spec.request, for example for missing fields; then redeliver the dead letters",
	v1beta1.ReasonRejectedByExpression: "see the response: correct the receiver, or spec.success.expression",
	v1beta1.ReasonInvalidResponse:      "the response is not HTTP; check the port",
}

func (e *explainer) endpoints() {
	// If another endpoint accepts the messages, a failing endpoint is not a Problem.
	level, elsewhere := Problem, ""
	if e.delivers && len(e.d.Status.Endpoints) > 1 {
		level, elsewhere = Notice, "; another endpoint accepts the messages"
	}
	for _, p := range e.d.Status.Endpoints {
		failure := ""
		fix := ""
		if f := p.LastFailure; f != nil {
			failure = fmt.Sprintf("; the last failure was %s: %s (%s)%s", ago(e.Now, f.Time.Time), cmp.Or(f.Message, f.Reason), f.Reason,
				e.answer(p.Name, f.StatusCode))
			fix = e.hint(p.Name, f)
		}
		success := "no successful delivery yet"
		if p.LastSuccessTime != nil {
			success = "last success " + ago(e.Now, p.LastSuccessTime.Time)
		}
		switch {
		case p.State == v1beta1.EndpointGone:
			e.add(level, "Endpoint", "correct the URL, or remove the endpoint; a change of the destination triggers a probe", "%q answered 410 (Gone), one probe an hour is sent; %s%s%s", p.Name, success, failure, elsewhere)
		case p.State == v1beta1.EndpointCircuitOpen && p.LastFailure != nil && p.LastFailure.Reason == v1beta1.ReasonTransformFailed:
			e.add(level, "Endpoint", fix, "no requests can be made for %q, so one message a minute is tried; %s%s%s", p.Name, success, failure, elsewhere)
		case p.State == v1beta1.EndpointCircuitOpen:
			e.add(level, "Endpoint", fix, "circuit breaker of %q is open, %s; %s%s%s", p.Name, e.probes(), success, failure, elsewhere)
		case p.State == v1beta1.EndpointDegraded && p.LastSuccessTime != nil && p.LastFailure != nil &&
			!p.LastSuccessTime.Before(&p.LastFailure.Time):
			e.add(Notice, "Endpoint", "", "%q fails now and then, or recovers; %s%s", p.Name, success, failure)
		case p.State == v1beta1.EndpointDegraded:
			e.add(level, "Endpoint", fix, "deliveries to %q fail; %s%s%s", p.Name, success, failure, elsewhere)
		case p.State == v1beta1.EndpointIdle:
			e.add(Notice, "Endpoint", "", "no deliveries to %q since the dispatchers started, or since the last change; %s", p.Name, success)
		default:
			e.add(Fine, "Endpoint", "", "%q works; %s", p.Name, success)
		}
		if f := p.LastFailure; f != nil && p.State != v1beta1.EndpointHealthy && p.State != v1beta1.EndpointIdle {
			e.because(f.Reason, e.failingSince(p.Name), f.StatusCode)
		}
		if p.CompressionRefused {
			e.add(Notice, "Endpoint", "let it accept Content-Encoding: gzip, or remove spec.delivery.compression",
				"%q answered 415 to a compressed request; it gets uncompressed ones until its definition changes, or its dispatchers restart", p.Name)
		}
		pending, skipped := p.FirstAttemptsPending, p.FirstAttemptsSkipped
		if len(e.d.Status.Endpoints) > 1 && pending > 0 {
			e.add(Notice, "Endpoint", "", "%s not been sent to %q yet",
				plural.Count(pending, "message")+map[bool]string{true: " has", false: " have"}[pending == 1], p.Name)
		}
		if skipped > 0 {
			e.add(Notice, "Endpoint", "make it answer faster or more reliably, or remove it; with successPolicy: EveryEndpoint such messages become dead letters",
				"%s never sent to %q: the retry window ended before their turn, or the dispatcher needed the disk space", plural.Count(skipped, "message")+map[bool]string{true: " was", false: " were"}[skipped == 1], p.Name)
		}
	}
}

// probes describes the requests to an endpoint with an open circuit.
func (e *explainer) probes() string {
	c, known := e.counts()
	if known && c.Pending == 0 {
		return "and no message is pending; the next one is sent as a probe"
	}
	text := "only probes are sent"
	if known && c.NextAttemptTime != nil && !e.paused {
		if in := c.NextAttemptTime.Sub(e.Now); in > time.Second {
			text += ", the next one in " + in.Round(time.Second).String() + "; all pending messages follow when it succeeds"
		}
	}
	return text
}

// nothingIsSent reports whether the destination is paused, or its endpoints get at most probes. Then a
// lane does not advance, so its pending messages include those that the filter excludes.
func (e *explainer) nothingIsSent() bool {
	return e.paused || len(e.d.Status.Endpoints) > 0 && !slices.ContainsFunc(e.d.Status.Endpoints, func(p v1beta1.EndpointStatus) bool {
		return p.State != v1beta1.EndpointCircuitOpen && p.State != v1beta1.EndpointGone
	})
}

func (e *explainer) backlog() {
	c, known := e.counts()
	if !known {
		return
	}
	if c.Pending == 0 {
		e.add(Fine, "Backlog", "", "no backlog; %s delivered so far", plural.Count(c.Delivered, "message"))
	} else {
		text := plural.Count(c.Pending, "message") + " pending"
		switch {
		case c.Retrying == 1:
			text += ", 1 of them is a retry"
		case c.Retrying > 1:
			text += fmt.Sprintf(", %d of them are retries", c.Retrying)
		}
		if c.OldestPendingTime != nil {
			text += ", the oldest was accepted " + ago(e.Now, c.OldestPendingTime.Time)
			if !e.expires.IsZero() {
				text += " and expires in " + max(0, e.expires.Sub(e.Now)).Round(time.Second).String()
			}
		}
		if c.NextAttemptTime != nil && !e.paused {
			if in := c.NextAttemptTime.Sub(e.Now); in > time.Second {
				text += ", the next attempt is in " + in.Round(time.Second).String()
			}
			text += e.requestedWait(c.NextAttemptTime.Time)
		}
		if e.d.Spec.Filter != nil && e.nothingIsSent() {
			text += ", including messages that the filter will exclude"
		}
		e.add(Notice, "Backlog", "", "%s; %s delivered so far", text, plural.Count(c.Delivered, "message"))
	}
	switch {
	case c.DeadLettersStored > 0:
		e.add(Notice, "DeadLetters", "fix the cause, then redeliver them", "%s stored; %s became dead letters so far",
			plural.Count(c.DeadLettersStored, "dead letter"), plural.Count(c.DeadLettered, "message"))
	case c.DeadLettered > 0:
		e.add(Fine, "DeadLetters", "", "none stored; %s became dead letters so far", plural.Count(c.DeadLettered, "message"))
	}
}

// requestedWait explains that messages wait because the receiver requested it, as a part of a sentence; "" if none is
// known to wait so.
func (e *explainer) requestedWait(next time.Time) string {
	succeeded := map[string]bool{}
	for _, a := range slices.Backward(e.Attempts) {
		switch {
		case a.Reason == "":
			succeeded[a.Endpoint] = true // It has ended earlier waits.
		case a.RetryAfter > 0 && !succeeded[a.Endpoint] && a.Time.Add(a.RetryAfter).After(e.Now):
			return fmt.Sprintf(": messages wait until %s because %q answered %d with Retry-After: %d %s; a success or an edit of the destination ends the wait earlier",
				next.UTC().Format(time.RFC3339), a.Endpoint, a.StatusCode, int64(a.RetryAfter.Seconds()), ago(e.Now, a.Time))
		}
	}
	return ""
}

func ago(now, t time.Time) string {
	d := max(0, now.Sub(t))
	if d < 2*time.Second {
		return "just now"
	}
	if d > 48*time.Hour {
		return plural.Count(int(d.Hours()/24), "day") + " ago"
	}
	return d.Round(time.Second).String() + " ago"
}

func destinationNames(all []v1beta1.WebhookDestination) []string {
	names := make([]string, 0, len(all))
	for _, d := range all {
		names = append(names, d.Name)
	}
	slices.Sort(names)
	return names
}

func list(names []string) string {
	const most = 10
	if len(names) > most {
		return strings.Join(names[:most], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}
