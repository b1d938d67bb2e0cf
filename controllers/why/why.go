// Package why answers "why is nothing arriving?" for one WebhookDestination, in
// words for people. It is pure: from objects and reports to findings, along the
// way of a message: destination, config, Sources, filter, endpoints, backlog.
package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// Level says how much a finding matters.
type Level string

// The levels, the worst first.
const (
	// Problem: because of this nothing, or not everything, arrives.
	Problem Level = "PROBLEM"
	// Notice: worth knowing; it may be meant so.
	Notice Level = "NOTICE"
	// Fine: this part works.
	Fine Level = "OK"
)

// Finding is what is so at one station of the way.
type Finding struct {
	Level Level `json:"level"`
	// About is the station: Destination, Secret, Config, Source, Filter, Endpoint, Backlog, DeadLetters.
	About string `json:"about"`
	// Text says what is so.
	Text string `json:"text"`
	// Fix says what to do; empty when there is nothing to do.
	Fix string `json:"fix,omitempty"`
}

// Facts are what is known.
type Facts struct {
	Namespace, Name string
	// Destinations and Sources of the namespace.
	Destinations []v1alpha1.WebhookDestination
	Sources      []v1alpha1.Source
	// Reports of dispatchers, when they could be asked: newer than status.
	Reports []liveconfig.Report
	Now     time.Time
}

// Explain returns the findings along the way; the first Problem is the cause to mend first.
func Explain(f Facts) []Finding {
	i := slices.IndexFunc(f.Destinations, func(d v1alpha1.WebhookDestination) bool { return d.Name == f.Name })
	if i < 0 {
		fix := "create it"
		if names := destinationNames(f.Destinations); len(names) > 0 {
			fix = "is it one of these: " + list(names) + "?"
		}
		return []Finding{{Problem, "Destination", fmt.Sprintf("there is no WebhookDestination %q in namespace %q", f.Name, f.Namespace), fix}}
	}
	e := explainer{Facts: f, d: &f.Destinations[i]}
	e.spec()
	e.config()
	e.sources()
	e.filter()
	e.endpoints()
	e.backlog()
	return e.found
}

// Cause returns the finding to mend first, or nil.
func Cause(findings []Finding) *Finding {
	if i := slices.IndexFunc(findings, func(f Finding) bool { return f.Level == Problem }); i >= 0 {
		return &findings[i]
	}
	return nil
}

type explainer struct {
	Facts
	d     *v1alpha1.WebhookDestination
	found []Finding
	// held is true when nothing is sent because of the spec.
	held bool
}

func (e *explainer) add(level Level, about, fix, format string, args ...any) {
	e.found = append(e.found, Finding{level, about, fmt.Sprintf(format, args...), fix})
}

// fixes says what to do about a reason of Accepted.
var fixes = map[string]struct{ about, fix string }{
	v1alpha1.ReasonSecretNotFound:   {"Secret", "create the Secret in this namespace; nothing has to be restarted"},
	v1alpha1.ReasonSecretKeyMissing: {"Secret", "add the key to the Secret, or correct the reference"},
	v1alpha1.ReasonInvalidSecret:    {"Secret", "correct the value in the Secret"},
	v1alpha1.ReasonInvalidURL:       {"Destination", "correct the URL: http:// or https:// and a host"},
	v1alpha1.ReasonInvalidFilter:    {"Filter", "correct spec.filter.expression"},
	v1alpha1.ReasonNoSource:         {"Source", "create the Source, or correct spec.sources"},
	v1alpha1.ReasonEgressDenied:     {"Destination", "ask the cluster's admin to allow the address (--egress-allow), or use another"},
	v1alpha1.ReasonConfigTooLarge:   {"Config", "remove headers or large certificates, or destinations, or use another namespace"},
	v1alpha1.ReasonInvalidSpec:      {"Destination", "correct the spec; it was stored under older rules"},
}

func (e *explainer) spec() {
	accepted := meta.FindStatusCondition(e.d.Status.Conditions, v1alpha1.ConditionAccepted)
	switch {
	case accepted == nil || accepted.ObservedGeneration < e.d.Generation:
		e.add(Problem, "Destination", "look at the operator's pod and its log", "the operator has not looked at this version of the destination yet")
	case accepted.Status != metav1.ConditionTrue:
		fix, ok := fixes[accepted.Reason]
		if !ok {
			fix.about = "Destination"
		}
		then := ""
		if accepted.Reason != v1alpha1.ReasonNoSource { // It works for the Sources that it has.
			e.held, then = true, "; messages are kept, not sent"
		}
		e.add(Problem, fix.about, fix.fix, "%s (%s)%s", accepted.Message, accepted.Reason, then)
	case e.d.Spec.Enabled != nil && !*e.d.Spec.Enabled:
		e.held = true
		e.add(Problem, "Destination", "set spec.enabled to true", "it is switched off; messages are kept up to the retry window and sent when it is on again")
	default:
		e.add(Fine, "Destination", "", "%s", cmp.Or(accepted.Message, "the spec is valid"))
	}
}

func (e *explainer) config() {
	for _, r := range e.Reports {
		for _, t := range r.Tenants {
			if t.Tenant == e.Namespace && t.Refused != nil {
				e.add(Problem, "Config", "tell who runs Posthorn; update operator and dispatchers together", "dispatcher %s refuses the config and keeps the one before: %s", r.Pod, t.Refused.Error)
				return
			}
		}
		if r.Storage.Pressure {
			e.add(Problem, "Config", "tell who runs Posthorn: its disk is full", "dispatcher %s takes no calls: its disk is full", r.Pod)
		}
	}
	programmed := meta.FindStatusCondition(e.d.Status.Conditions, v1alpha1.ConditionProgrammed)
	if programmed == nil || programmed.Reason == v1alpha1.ReasonNotAccepted {
		return
	}
	if programmed.Status == metav1.ConditionTrue {
		e.add(Fine, "Config", "", "every ready dispatcher runs this version")
		return
	}
	fix := "wait some seconds; if it stays, look at the dispatcher pods"
	if programmed.Reason == v1alpha1.ReasonNoDispatcher {
		fix = "tell who runs Posthorn: its dispatcher pods are not ready"
	}
	e.add(Problem, "Config", fix, "%s (%s)", programmed.Message, programmed.Reason)
}

// chosen are the Sources of the destination.
func (e *explainer) chosen() []v1alpha1.Source {
	s := e.d.Spec.Sources
	match := func(o v1alpha1.Source) bool { return slices.Contains(s.Names, o.Name) }
	if s.Selector != nil {
		selector, err := metav1.LabelSelectorAsSelector(s.Selector)
		if err != nil {
			return nil
		}
		match = func(o v1alpha1.Source) bool { return selector.Matches(labels.Set(o.Labels)) }
	}
	var chosen []v1alpha1.Source
	for _, o := range e.Sources {
		if match(o) {
			chosen = append(chosen, o)
		}
	}
	return chosen
}

func (e *explainer) sources() {
	chosen := e.chosen()
	if len(chosen) == 0 {
		if !slices.ContainsFunc(e.found, func(f Finding) bool { return f.About == "Source" }) {
			e.add(Problem, "Source", "create the Source, or correct spec.sources", "no Source of this namespace is chosen by spec.sources")
		}
		return
	}
	for _, s := range chosen {
		accepted := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.ConditionAccepted)
		receiving := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.ConditionReceiving)
		last := s.Status.LastReceivedTime
		var calls v1alpha1.CallCounts
		if s.Status.Calls != nil {
			calls = *s.Status.Calls
		}
		if r := e.sourceReports(s.Name); r != nil {
			calls.Accepted, calls.Rejected = r.Accepted, r.Rejected
			if !r.LastAccepted.IsZero() {
				last = &metav1.Time{Time: r.LastAccepted}
			}
		}
		switch {
		case s.Spec.Enabled != nil && !*s.Spec.Enabled:
			e.add(Problem, "Source", "set its spec.enabled to true", "Source %q is switched off: its calls are refused with 403", s.Name)
		case accepted != nil && accepted.Status == metav1.ConditionFalse:
			fix := fixes[accepted.Reason].fix
			if accepted.Reason == v1alpha1.ReasonWriteKeyConflict {
				fix = "give it a write key of its own"
			}
			text := "Source %q takes no calls: %s (%s)"
			if p := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.ConditionProgrammed); p != nil && p.Reason != v1alpha1.ReasonNotAccepted {
				text = "Source %q takes calls with one of its write keys only: %s (%s)"
			}
			e.add(Problem, "Source", fix, text, s.Name, accepted.Message, accepted.Reason)
		case receiving != nil && receiving.Status == metav1.ConditionFalse:
			e.add(Problem, "Source", "mend what sends the calls; the message says what is wrong with them", "Source %q: %s (%s)", s.Name, receiving.Message, receiving.Reason)
		case calls.Accepted == 0:
			e.add(Problem, "Source", "check the sender's address and write key: a wrong key is answered 401 and counted nowhere here", "no call has ever been accepted for Source %q", s.Name)
		case last == nil:
			e.add(Fine, "Source", "", "Source %q has accepted %s, none since the dispatchers started", s.Name, count(calls.Accepted, "call"))
		default:
			e.add(Fine, "Source", "", "Source %q has accepted %s, the last one %s", s.Name, count(calls.Accepted, "call"), ago(e.Now, last.Time))
		}
	}
}

func (e *explainer) sourceReports(name string) *liveconfig.SourceReport {
	var sum *liveconfig.SourceReport
	for _, r := range e.Reports {
		for _, t := range r.Tenants {
			for _, s := range t.Sources {
				if t.Tenant != e.Namespace || s.Name != name {
					continue
				}
				if sum == nil {
					sum = &liveconfig.SourceReport{}
				}
				sum.Accepted += s.Accepted
				sum.Rejected += s.Rejected
				if s.LastAccepted.After(sum.LastAccepted) {
					sum.LastAccepted = s.LastAccepted
				}
			}
		}
	}
	return sum
}

// counts are the destination's messages: of the reports if there are any, else of status.
func (e *explainer) counts() (c v1alpha1.DeliveryStatus, known bool) {
	for _, r := range e.Reports {
		for _, t := range r.Tenants {
			for _, d := range t.Destinations {
				if t.Tenant != e.Namespace || d.Name != e.Name {
					continue
				}
				known = true
				c.Delivered += d.Delivered
				c.Filtered += d.Filtered
				c.DeadLettered += d.DeadLettered
				c.Pending += d.Pending
				c.Retrying += d.Retrying
				if !d.OldestPending.IsZero() && (c.OldestPendingTime == nil || d.OldestPending.Before(c.OldestPendingTime.Time)) {
					c.OldestPendingTime = &metav1.Time{Time: d.OldestPending}
				}
				if !d.NextAttempt.IsZero() && (c.NextAttemptTime == nil || d.NextAttempt.Before(c.NextAttemptTime.Time)) {
					c.NextAttemptTime = &metav1.Time{Time: d.NextAttempt}
				}
			}
		}
	}
	if !known && e.d.Status.Delivery != nil {
		return *e.d.Status.Delivery, true
	}
	return c, known
}

func (e *explainer) filter() {
	c, known := e.counts()
	switch {
	case !known || c.Filtered == 0:
	case c.Delivered+c.Pending+c.DeadLettered == 0:
		fix := "loosen spec.filter, or let the senders' integrations name this destination"
		switch {
		case e.d.Spec.Filter == nil:
			fix = "the destination has no filter: the calls' own integrations exclude it"
		case e.d.Spec.Filter.Expression != "":
			fix += "; spec.filter.expression keeps out every call for which it is not true, also where a field is missing or has another type"
		}
		e.add(Problem, "Filter", fix, "all of %s so far were filtered out", count(c.Filtered, "message"))
	default:
		e.add(Notice, "Filter", "", "%s so far did not pass the filter or the calls' integrations", count(c.Filtered, "message"))
	}
}

// hints say what to do about a reason of a failed attempt.
var hints = map[string]string{
	v1alpha1.ReasonTimedOut:            "the receiver must answer within spec.delivery.timeout; let it take the message first and work on it later",
	v1alpha1.ReasonConnectionRefused:   "nothing listens there: check the host and the port, and that the receiver runs",
	v1alpha1.ReasonConnectionFailed:    "check the network between the dispatchers and the receiver",
	v1alpha1.ReasonDNSFailed:           "check the host name in the URL",
	v1alpha1.ReasonCertificateRejected: "give the receiver a certificate of a known authority, or name a private one in endpoints[].tls.caSecretRef; self-signed ones are never taken",
	v1alpha1.ReasonTLSFailed:           "check that the receiver speaks TLS there, and whether it wants a client certificate (endpoints[].tls.clientCertSecretRef)",
	v1alpha1.ReasonAddressDenied:       "the name resolves to a private address: ask the cluster's admin to allow it (--egress-allow)",
	v1alpha1.ReasonServerError:         "look into the receiver's log",
	v1alpha1.ReasonThrottled:           "the receiver asks for less: set spec.delivery.rateLimit",
	v1alpha1.ReasonRejected:            "the receiver refuses the message: check its credentials and headers; refused messages are dead letters, redeliver them after the fix",
	v1alpha1.ReasonRedirected:          "redirects are not followed: put the final URL into the spec",
	v1alpha1.ReasonInvalidResponse:     "what listens there does not speak HTTP; check the port",
}

func (e *explainer) endpoints() {
	// While another endpoint takes the messages, one that fails keeps none from arriving.
	level, elsewhere := Problem, ""
	if meta.IsStatusConditionTrue(e.d.Status.Conditions, v1alpha1.ConditionDelivering) && len(e.d.Status.Endpoints) > 1 {
		level, elsewhere = Notice, "; another endpoint takes the messages"
	}
	for _, p := range e.d.Status.Endpoints {
		failure := ""
		fix := ""
		if f := p.LastFailure; f != nil {
			failure = fmt.Sprintf("; the last failure was %s: %s (%s)", ago(e.Now, f.Time.Time), cmp.Or(f.Message, f.Reason), f.Reason)
			fix = hints[f.Reason]
		}
		success := "it has never taken a message"
		if p.LastSuccessTime != nil {
			success = "it took a message last " + ago(e.Now, p.LastSuccessTime.Time)
		}
		switch {
		case p.State == v1alpha1.EndpointCircuitOpen:
			e.add(level, "Endpoint", fix, "%q failed so often that only probes are sent to it; %s%s%s", p.Name, success, failure, elsewhere)
		case p.State == v1alpha1.EndpointDegraded && p.LastSuccessTime != nil && p.LastFailure != nil && !p.LastSuccessTime.Before(&p.LastFailure.Time):
			e.add(Notice, "Endpoint", "", "%q fails now and then, or recovers; %s%s", p.Name, success, failure)
		case p.State == v1alpha1.EndpointDegraded:
			e.add(level, "Endpoint", fix, "deliveries to %q fail; %s%s%s", p.Name, success, failure, elsewhere)
		case p.State == v1alpha1.EndpointIdle:
			e.add(Notice, "Endpoint", "", "nothing has been sent to %q since the dispatchers started, or since the last change", p.Name)
		default:
			e.add(Fine, "Endpoint", "", "%q works; %s", p.Name, success)
		}
		pending, skipped := e.firstAttempts(p)
		if len(e.d.Status.Endpoints) > 1 && pending > 0 {
			e.add(Notice, "Endpoint", "", "%s not been sent to %q yet", count(pending, "message")+map[bool]string{true: " has", false: " have"}[pending == 1], p.Name)
		}
		if skipped > 0 {
			e.add(Notice, "Endpoint", "make it answer faster or more reliably, or remove it; with success: EveryEndpoint such messages become dead letters",
				"%s never sent to %q: the retry window ended before their turn, or the dispatcher needed the room on its disk", count(skipped, "message")+map[bool]string{true: " was", false: " were"}[skipped == 1], p.Name)
		}
	}
}

// firstAttempts returns how many messages an endpoint was not sent yet, and never
// will be: by the reports if there are any, else by its status.
func (e *explainer) firstAttempts(p v1alpha1.EndpointStatus) (pending, skipped int64) {
	known := false
	for _, r := range e.Reports {
		for _, t := range r.Tenants {
			for _, d := range t.Destinations {
				if t.Tenant != e.Namespace || d.Name != e.Name {
					continue
				}
				for _, ep := range d.Endpoints {
					if ep.Name == p.Name {
						known = true
						pending += ep.FirstAttemptsPending
						skipped += ep.FirstAttemptsSkipped
					}
				}
			}
		}
	}
	if !known {
		return p.FirstAttemptsPending, p.FirstAttemptsSkipped
	}
	return pending, skipped
}

func (e *explainer) backlog() {
	c, known := e.counts()
	if !known {
		return
	}
	if c.Pending == 0 {
		e.add(Fine, "Backlog", "", "nothing waits; %s delivered so far", count(c.Delivered, "message"))
	} else {
		text := count(c.Pending, "message") + map[bool]string{true: " waits", false: " wait"}[c.Pending == 1]
		if c.Retrying > 0 {
			text += fmt.Sprintf(", %d of them failed before", c.Retrying)
		}
		if c.OldestPendingTime != nil {
			text += ", the oldest was accepted " + ago(e.Now, c.OldestPendingTime.Time)
		}
		if c.NextAttemptTime != nil && !e.held {
			if in := c.NextAttemptTime.Sub(e.Now); in > time.Second {
				text += ", the next attempt is in " + in.Round(time.Second).String()
			}
		}
		e.add(Notice, "Backlog", "", "%s; %s delivered so far", text, count(c.Delivered, "message"))
	}
	if c.DeadLettered > 0 {
		e.add(Notice, "DeadLetters", "mend the cause, then redeliver them", "%s became dead letters so far", count(c.DeadLettered, "message"))
	}
}

func count(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func ago(now, t time.Time) string {
	d := max(0, now.Sub(t))
	if d < 2*time.Second {
		return "just now"
	}
	if d > 48*time.Hour {
		return fmt.Sprintf("%d days ago", int(d.Hours()/24))
	}
	return d.Round(time.Second).String() + " ago"
}

func destinationNames(all []v1alpha1.WebhookDestination) []string {
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
