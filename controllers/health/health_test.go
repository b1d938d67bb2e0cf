package health

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/observed"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/invariants"
)

var t0 = time.Date(2026, 3, 1, 12, 0, 0, 123456789, time.UTC)

func at(d time.Duration) time.Time { return t0.Add(d) }

const namespace = "shop"

// accepted returns the verdict of a valid object.
func accepted() compile.Verdict {
	return compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "fine", State: liveconfig.Active, Revision: "r1"}
}

func refused(reason string) compile.Verdict {
	return compile.Verdict{Reason: reason, Message: "spec.x: broken; change it", State: liveconfig.Paused, Revision: "r1"}
}

// unresolved returns the verdict of an object with a reference that does not resolve.
func unresolved(reason string) compile.Verdict {
	v := accepted()
	v.State, v.Unresolved = liveconfig.Paused, &compile.Unresolved{Reason: reason, Message: "spec.x: missing; create it"}
	return v
}

func suspended() compile.Verdict {
	return compile.Verdict{Accepted: true, Reason: v1beta1.ReasonSuspended, Message: "off", State: liveconfig.Suspended, Revision: "r1"}
}

func destination(success v1beta1.SuccessPolicy, endpoints ...string) v1beta1.WebhookDestination {
	d := v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "crm", Generation: 4}}
	d.Spec.SuccessPolicy = success
	for _, name := range endpoints {
		d.Spec.Endpoints = append(d.Spec.Endpoints, v1beta1.Endpoint{Name: name})
	}
	return d
}

// runs returns a pod that runs the destination with these endpoints.
func runs(name string, endpoints ...adminapi.EndpointReport) Pod {
	return Pod{Name: name, Report: podreport.NewIndex(adminapi.Report{Pod: name, Ready: true, Namespaces: []adminapi.NamespaceReport{
		{Namespace: "other"},
		{Namespace: namespace, Destinations: []adminapi.DestinationReport{
			{Name: "aaa"},
			{Name: "crm", Generation: 4, Revision: "r1", Ledger: adminapi.Ledger{Delivered: 5, Pending: 2}, Retrying: 1, Endpoints: endpoints},
		}},
	}})}
}

// change changes the pod's report about the destination.
func (p Pod) change(f func(d *adminapi.DestinationReport)) {
	var d adminapi.DestinationReport
	n := p.Report.Namespace(namespace)
	n.ReadDestination("crm", &d)
	f(&d)
	next, _ := p.Report.Merge(adminapi.Report{Pod: p.Name, Ready: p.Report.Ready, Delta: true, Namespaces: []adminapi.NamespaceReport{
		{Namespace: namespace, Revision: n.Revision, Refused: n.Refused, Destinations: []adminapi.DestinationReport{d}},
	}}, nil)
	*p.Report = *next
}

// filterFails adds a failure of the filter to the pod's report.
func filterFails(p Pod) Pod {
	p.change(func(d *adminapi.DestinationReport) {
		d.FilterFailure = &adminapi.Failure{Time: at(-time.Minute), Reason: "FilterFailed", Message: "character 1 (call.a): division by zero"}
	})
	return p
}

// tooOld makes the pod one that does not know a field of the destination.
func tooOld(p Pod) Pod {
	p.change(func(d *adminapi.DestinationReport) { d.Revision = liveconfig.UnknownField + d.Revision })
	return p
}

func idle(name string) adminapi.EndpointReport {
	return adminapi.EndpointReport{Name: name, State: adminapi.EndpointIdle}
}

func healthy(name string) adminapi.EndpointReport {
	return adminapi.EndpointReport{Name: name, State: adminapi.EndpointHealthy, Since: at(-time.Hour), LastSuccess: at(-time.Second)}
}

func failing(name, reason string, code int) adminapi.EndpointReport {
	return adminapi.EndpointReport{
		Name: name, State: adminapi.EndpointDegraded, Since: at(-time.Minute), ConsecutiveFailures: 3, LastSuccess: at(-2 * time.Minute),
		LastFailure: &adminapi.Failure{Time: at(-time.Second), Reason: reason, StatusCode: code, Message: "the words"},
	}
}

func open(name, reason string) adminapi.EndpointReport {
	e := failing(name, reason, 0)
	e.State, e.ConsecutiveFailures = adminapi.EndpointCircuitOpen, 10
	return e
}

func gone(name string) adminapi.EndpointReport {
	e := failing(name, "Rejected", 410)
	e.State = adminapi.EndpointGone
	return e
}

func recovering(name string) adminapi.EndpointReport {
	e := failing(name, "TimedOut", 0)
	e.ConsecutiveFailures, e.LastSuccess = 0, at(0)
	return e
}

// destinationStatus computes a status. It checks the invariants, and that equal inputs
// return an equal status.
func destinationStatus(t *testing.T, d v1beta1.WebhookDestination, v compile.Verdict, pods []Pod,
	now time.Time) v1beta1.WebhookDestination {
	t.Helper()
	before := *d.DeepCopy()
	d.Status = pacedDestination(d, v, namespace, pods, now, true)
	if err := invariants.Destination(d); err != nil {
		t.Errorf("invariants: %v", err)
	}
	if diff := cmp.Diff(before.Spec, d.Spec); diff != "" {
		t.Errorf("the input was changed: %s", diff)
	}
	for _, due := range []bool{true, false} {
		slices.Reverse(pods)
		again := pacedDestination(overAPI(t, d), v, namespace, pods, now.Add(time.Hour), due)
		if !equality.Semantic.DeepEqual(d.Status, again) {
			t.Errorf("equal inputs return another status (numbersDue %v):\n%s", due, cmp.Diff(d.Status, again))
		}
	}
	return d
}

// overAPI returns an object as the API server would store it.
func overAPI[T any](t *testing.T, in T) (out T) {
	t.Helper()
	b, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestDestinationConditions(t *testing.T) {
	any1, any2 := destination(v1beta1.AnyEndpoint, "a"), destination(v1beta1.AnyEndpoint, "a", "b")
	every2 := destination(v1beta1.EveryEndpoint, "a", "b")
	pausedForSize := compile.Verdict{Reason: v1beta1.ReasonConfigTooLarge, Message: "too large", State: liveconfig.Paused, Revision: "r2"}
	tooLarge := compile.Verdict{Reason: v1beta1.ReasonConfigTooLarge, Message: "too large", State: liveconfig.Active, Revision: "r2"}
	partial := accepted()
	partial.Unresolved = &compile.Unresolved{Reason: v1beta1.ReasonNoSource, Message: "one is missing"}
	both := unresolved(v1beta1.ReasonSecretNotFound)
	both.Accepted, both.Reason, both.Message = false, v1beta1.ReasonInvalidURL, "not a URL"
	behind := runs("p2", healthy("a"))
	behind.change(func(d *adminapi.DestinationReport) { d.Revision = "r0" })
	older := runs("p2", healthy("a"))
	older.change(func(d *adminapi.DestinationReport) { d.Generation = 3 })
	newer := runs("p1", healthy("a"))
	newer.change(func(d *adminapi.DestinationReport) { d.Generation = 5 })
	refusing := runs("p2", healthy("a"))
	refusing.change(func(d *adminapi.DestinationReport) { d.Revision = "r0" })
	refusing.Report.Namespace(namespace).Refused = &adminapi.RefusedConfig{Revision: "x", Error: "destination \"b\": no"}
	refusingOther := runs("p2", healthy("a"))
	refusingOther.Report.Namespace(namespace).Refused = &adminapi.RefusedConfig{Revision: "x", Error: "destination \"b\": no"}
	silent := Pod{Name: "p3"}
	withoutNamespace := Pod{Name: "p4", Report: podreport.NewIndex(adminapi.Report{})}

	for _, tc := range []struct {
		name    string
		d       v1beta1.WebhookDestination
		v       compile.Verdict
		pods    []Pod
		want    string // "status/reason" of the conditions
		message string // part of the message of the last condition that is not True, or of Delivering
	}{
		{"no problems", any1, accepted(), []Pod{runs("p1", healthy("a"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Delivering", "latest deliveries succeeded"},
		{"a pod ahead", any1, accepted(), []Pod{newer}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Delivering", ""},
		{"no pods", any1, accepted(), nil, "True/Accepted True/ResolvedRefs False/NoDispatcher False/NoDispatcher Unknown/NoTrafficYet", "nothing has been sent"},
		{"one of two behind", any1, accepted(), []Pod{runs("p1", healthy("a")), behind}, "True/Accepted True/ResolvedRefs False/Pending False/Pending True/Delivering", ""},
		{"an older generation", any1, accepted(), []Pod{runs("p1", healthy("a")), older}, "True/Accepted True/ResolvedRefs False/Pending False/Pending True/Delivering", ""},
		{"a silent pod", any1, accepted(), []Pod{runs("p1", healthy("a")), silent, withoutNamespace}, "True/Accepted True/ResolvedRefs False/Pending False/Pending True/Delivering", ""},
		{"refused", any1, accepted(), []Pod{runs("p1", healthy("a")), refusing}, "True/Accepted True/ResolvedRefs False/ConfigRefused False/ConfigRefused True/Delivering", ""},
		{"rejected because of another object", any1, accepted(), []Pod{refusingOther}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Delivering", ""},
		{"paused", any1, unresolved(v1beta1.ReasonSecretNotFound), []Pod{runs("p1", idle("a"))}, "True/Accepted False/SecretNotFound True/Programmed False/SecretNotFound False/Paused", "kept up to the retry window, not sent: spec.x: missing; create it"},
		{"paused, pending", any1, unresolved(v1beta1.ReasonSecretNotFound), []Pod{behind}, "True/Accepted False/SecretNotFound False/Pending False/SecretNotFound False/Paused", ""},
		{"paused in spite of failures", any1, refused(v1beta1.ReasonInvalidURL), []Pod{runs("p1", open("a", "TimedOut"))}, "False/InvalidURL True/ResolvedRefs True/Programmed False/InvalidURL False/Paused True/InvalidURL", ""},
		{"paused, with a value in a Secret that cannot be used", any1, unresolved(v1beta1.ReasonInvalidSecret), []Pod{runs("p1", idle("a"))}, "True/Accepted False/InvalidSecret True/Programmed False/InvalidSecret False/Paused True/InvalidSecret", ""},
		{"paused for two causes", any1, both, []Pod{runs("p1", idle("a"))}, "False/InvalidURL False/SecretNotFound True/Programmed False/InvalidURL False/Paused True/InvalidURL", "not sent: not a URL"},
		{"suspended", any1, suspended(), []Pod{runs("p1", healthy("a"))}, "True/Suspended True/ResolvedRefs True/Programmed True/Ready False/Suspended", "messages wait"},
		{"not accepted but active", any1, partial, []Pod{runs("p1", healthy("a"))},
			"True/Accepted False/NoSource True/Programmed False/NoSource True/Delivering", ""},
		{"config too large", any1, tooLarge, []Pod{runs("p1", healthy("a"))}, "False/ConfigTooLarge True/ResolvedRefs False/NotAccepted False/ConfigTooLarge True/Delivering True/ConfigTooLarge", ""},
		{"config too large, paused but not confirmed yet", any1, pausedForSize, []Pod{runs("p1", idle("a"))}, "False/ConfigTooLarge True/ResolvedRefs False/Pending False/ConfigTooLarge False/Paused True/ConfigTooLarge", ""},
		{"no state in the verdict", any1, compile.Verdict{Reason: v1beta1.ReasonInvalidURL, Message: "m", Revision: "r1"}, []Pod{runs("p1", healthy("a"))}, "False/InvalidURL True/ResolvedRefs True/Programmed False/InvalidURL False/Paused True/InvalidURL", ""},

		{"idle", any1, accepted(), []Pod{runs("p1", idle("a"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready Unknown/NoTrafficYet", ""},
		{"degraded", any1, accepted(), []Pod{runs("p1", failing("a", "ServerError", 503))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/ServerError", "endpoint a fails since 2026-03-01T11:59:00Z: ServerError, status 503: the words"},
		{"timeout", any1, accepted(), []Pod{runs("p1", failing("a", "TimedOut", 0))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/TimedOut", "TimedOut: the words"},
		{"certificate", any1, accepted(), []Pod{runs("p1", failing("a", "CertificateRejected", 0))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/CertificateRejected", ""},
		{"no reason given", any1, accepted(), []Pod{runs("p1", failing("a", "", 0))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/EndpointFailing", ""},
		{"circuit open", any1, accepted(), []Pod{runs("p1", open("a", "ConnectionRefused"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/CircuitOpen", "endpoint a fails, its circuit is open since 2026-03-01T11:59:00Z: ConnectionRefused: the words"},
		{"proxy fails", any1, accepted(), []Pod{runs("p1", failing("a", "ProxyFailed", 0))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/ProxyFailed", "the egress proxy has no connection to endpoint a since 2026-03-01T11:59:00Z: ProxyFailed: the words"},
		{"the filter fails", any1, accepted(), []Pod{runs("p1", healthy("a")), filterFails(runs("p2", healthy("a")))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/FilterFailed", "spec.filter.expression fails for some calls, which become dead letters: character 1 (call.a): division by zero"},
		{"the filter and an endpoint fail", any1, accepted(), []Pod{filterFails(runs("p1", open("a", "ConnectionRefused")))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/CircuitOpen", "endpoint a fails"},
		{"circuit open because of the proxy", any1, accepted(), []Pod{runs("p1", open("a", "ProxyFailed"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/ProxyFailed", "the egress proxy has no connection to endpoint a, its circuit is open since 2026-03-01T11:59:00Z: ProxyFailed: the words"},
		{"an expression fails for some", any1, accepted(), []Pod{runs("p1", failing("a", "TransformFailed", 0))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/TransformFailed", "endpoint a fails since 2026-03-01T11:59:00Z: TransformFailed: the words"},
		{"an expression fails for all", any1, accepted(), []Pod{runs("p1", open("a", "TransformFailed"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/TransformFailing", "no requests can be made for endpoint a, so one message a minute is tried since 2026-03-01T11:59:00Z: TransformFailed: the words"},
		{"an unknown field at one pod of two", any1, accepted(), []Pod{runs("p1", healthy("a")), tooOld(runs("p2", healthy("a")))}, "True/Accepted True/ResolvedRefs False/DispatcherTooOld False/DispatcherTooOld True/Delivering", ""},
		{"gone", any1, accepted(), []Pod{runs("p1", gone("a"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/EndpointGone", "endpoint a fails, it answered 410 Gone and gets hourly probes since 2026-03-01T11:59:00Z: Rejected, status 410: the words"},
		{"gone at one pod of two", any1, accepted(), []Pod{runs("p1", open("a", "TimedOut")), runs("p2", gone("a"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/EndpointGone", "endpoint a fails, it answered 410 Gone"},
		{"any: one of two answered 410", any2, accepted(), []Pod{runs("p1", healthy("a"), gone("b"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Delivering", "delivered to another endpoint, but endpoint b fails, it answered 410 Gone"},
		{"open at one pod of two", any1, accepted(), []Pod{runs("p1", healthy("a")), runs("p2", open("a", "TimedOut"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/CircuitOpen", "endpoint a fails, its circuit is open since 2026-03-01T11:59:00Z: TimedOut"},
		{"recovering", any1, accepted(), []Pod{runs("p1", recovering("a"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Delivering", ""},
		{"any: one of two fails", any2, accepted(), []Pod{runs("p1", healthy("a"), open("b", "TimedOut"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Delivering", "delivered to another endpoint, but endpoint b fails, its circuit is open"},
		{"any: one fails, one idle", any2, accepted(), []Pod{runs("p1", idle("a"), failing("b", "TimedOut", 0))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/TimedOut", "endpoint b"},
		{"any: both fail for the same reason", any2, accepted(), []Pod{runs("p1", failing("a", "TimedOut", 0), failing("b", "TimedOut", 0))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/TimedOut", "endpoint a fails since 2026-03-01T11:59:00Z: TimedOut: the words; endpoint b fails"},
		{"any: both fail for different reasons", any2, accepted(), []Pod{runs("p1", failing("a", "TimedOut", 0), failing("b", "DNSFailed", 0))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/EndpointFailing", ""},
		{"every: one of two fails", every2, accepted(), []Pod{runs("p1", healthy("a"), failing("b", "Rejected", 404))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/Rejected", "endpoint b fails since 2026-03-01T11:59:00Z: Rejected, status 404"},
		{"every: one idle", every2, accepted(), []Pod{runs("p1", healthy("a"), idle("b"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Delivering", ""},
		{"an endpoint that was removed from the spec", any1, accepted(), []Pod{runs("p1", healthy("a"), open("gone", "TimedOut"))}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Delivering", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := destinationStatus(t, tc.d, tc.v, tc.pods, t0)
			if got := summary(d.Status.Conditions); got != tc.want {
				t.Errorf("got  %s\nwant %s", got, tc.want)
			}
			if message := meta.FindStatusCondition(d.Status.Conditions, v1beta1.ConditionDelivering).Message; !strings.Contains(message,
				tc.message) {
				t.Errorf("message %q does not contain %q", message, tc.message)
			}
		})
	}
}

func summary(conditions []metav1.Condition) string {
	var out []string
	for _, c := range conditions {
		out = append(out, string(c.Status)+"/"+c.Reason)
	}
	return strings.Join(out, " ")
}

func TestProgrammedMessages(t *testing.T) {
	message := func(pods ...Pod) string {
		d := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), pods, t0)
		return meta.FindStatusCondition(d.Status.Conditions, v1beta1.ConditionProgrammed).Message
	}
	behind := runs("p2")
	behind.change(func(d *adminapi.DestinationReport) { d.Revision = "r0" })
	pending := "not every ready dispatcher has confirmed this revision yet; if this persists, check the logs of the dispatchers"
	if got := message(runs("p1"), behind); got != pending {
		t.Errorf("a pod is behind: got %q, want %q", got, pending)
	}
	if got := message(runs("p1"), Pod{Name: "p2"}); got != pending {
		t.Errorf("a pod has no report: got %q, want %q", got, pending)
	}
	refusing := Pod{Name: "p2", Report: podreport.NewIndex(adminapi.Report{Namespaces: []adminapi.NamespaceReport{{Namespace: namespace, Refused: &adminapi.RefusedConfig{Error: "because"}}}})}
	if got := message(runs("p1"), refusing); got != "a dispatcher rejected the config and keeps the previous one: because" {
		t.Error(got)
	}
}

// A store that no pod owns is not programmed, whatever the condition was. The pods that have it confirm it again.
func TestUnowned(t *testing.T) {
	before := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), []Pod{runs("p1")}, t0)
	unowned := runs("p1")
	unowned.Absent, unowned.Unowned = true, true
	for name, pods := range map[string][]Pod{
		"with a last report":                {unowned},
		"after a restart of the operator":   {{Name: "p1", Silent: true, Unowned: true}},
		"beside the store of a former mode": {unowned, {Name: "p2", Absent: true}},
	} {
		after := destinationStatus(t, before, accepted(), pods, at(time.Minute))
		for _, condition := range []string{v1beta1.ConditionProgrammed, v1beta1.ConditionReady} {
			if c := meta.FindStatusCondition(after.Status.Conditions, condition); c.Status != metav1.ConditionFalse || c.Reason != "Unowned" {
				t.Errorf("%s: %s: got %s with reason %s, want False with Unowned", name, condition, c.Status, c.Reason)
			}
		}
		again := destinationStatus(t, after, accepted(), []Pod{runs("p1")}, at(time.Hour))
		if c := meta.FindStatusCondition(again.Status.Conditions, v1beta1.ConditionProgrammed); c.Status != metav1.ConditionTrue {
			t.Errorf("%s, then with an owner: got %s with reason %s, want True", name, c.Status, c.Reason)
		}
	}
}

// A status does not depend on the number and the names of the pods: a rollout must not
// cause a write of every object in the cluster.
func TestStatusIsIndependentOfPods(t *testing.T) {
	fails := open("b", "TimedOut")
	one := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a", "b"), accepted(), []Pod{runs("p1", healthy("a"), fails)}, t0)
	idlePod := runs("p2", idle("a"), idle("b"))
	idlePod.change(func(d *adminapi.DestinationReport) { d.Ledger, d.Retrying = adminapi.Ledger{}, 0 })
	many := pacedDestination(one, accepted(), namespace, []Pod{runs("q1", healthy("a"), fails), idlePod}, at(time.Minute), true)
	if diff := cmp.Diff(one.Status, many); diff != "" {
		t.Errorf("another pod changed the status: %s", diff)
	}
	sources := sourceStatus(t, source(), accepted(), []Pod{takes("p1", adminapi.SourceReport{StoragePressure: true})}, t0)
	if diff := cmp.Diff(sources.Status, pacedSource(sources, accepted(), namespace, []Pod{takes("q1", adminapi.SourceReport{StoragePressure: true}), takes("q2", adminapi.SourceReport{})}, at(time.Minute), true)); diff != "" {
		t.Errorf("another pod changed the status of a Source: %s", diff)
	}
}

// A pod that starts, stops or does not answer changes no status; an edit that it has not
// confirmed does.
func TestPodsComeAndGo(t *testing.T) {
	fails := failing("a", "TimedOut", 0)
	behind := runs("p2", fails)
	behind.change(func(d *adminapi.DestinationReport) { d.Revision = "r0" })
	with := func(p Pod, change func(*Pod)) Pod { change(&p); return p }
	silent := func(p *Pod) { p.Silent = true }
	absent := func(p *Pod) { p.Absent = true }
	outdated := func(p *Pod) { p.Absent, p.Outdated = true, true }
	before := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), []Pod{runs("p1", fails), runs("p2", fails)}, t0)
	for _, c := range []struct {
		name string
		pods []Pod
	}{
		{"one is silent", []Pod{runs("p1", fails), with(runs("p2", fails), silent)}},
		{"one is absent", []Pod{runs("p1", fails), with(runs("p2", fails), absent)}},
		{"one is absent, with a config that it did not load", []Pod{runs("p1", fails), with(behind, absent)}},
		{"one is absent for a long time", []Pod{runs("p1", fails), with(runs("p2", open("a", "TimedOut")), outdated)}},
		{"all are absent", []Pod{with(runs("p1", fails), absent), with(runs("p2", fails), absent)}},
		{"all are absent for a long time", []Pod{with(runs("p1", fails), outdated), with(runs("p2", fails), outdated)}},
		{"no pod, after a restart of the operator", nil},
		{"one has no report, after a restart of the operator", []Pod{runs("p1", fails), {Name: "p2"}}},
		{"no pod has a report", []Pod{{Name: "p1"}, {Name: "p2"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			after := destinationStatus(t, before, accepted(), c.pods, at(time.Minute))
			if diff := cmp.Diff(before.Status, after.Status); diff != "" {
				t.Errorf("the status changed: %s", diff)
			}
		})
	}
	edited := *before.DeepCopy()
	edited.Generation++
	recompiled := accepted()
	recompiled.Revision = "r2"
	for _, c := range []struct {
		name string
		d    v1beta1.WebhookDestination
		v    compile.Verdict
		pods []Pod
		want string
	}{
		{"an edit that a silent pod has not confirmed", edited, accepted(), []Pod{with(runs("p1", fails), silent)}, "False/Pending"},
		{"an edit without a ready pod", edited, accepted(), []Pod{with(runs("p1", fails), absent)}, "False/NoDispatcher"},
		{"an edit and a pod without a report", edited, accepted(), []Pod{{Name: "p1"}}, "False/Pending"},
		{"a rotated Secret and a pod without a report", before, recompiled, []Pod{{Name: "p1"}}, "False/Pending"},
		{"an answering pod that runs another revision", before, accepted(), []Pod{runs("p1", fails), behind}, "False/Pending"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := destinationStatus(t, c.d, c.v, c.pods, at(time.Minute))
			if got := summary(d.Status.Conditions[2:3]); got != c.want {
				t.Errorf("Programmed: got %s, want %s", got, c.want)
			}
		})
	}
}

// The defaults of the CRD and the conditions of other controllers do not change a status.
// Without a ready pod for minutes every object reports it, without Events, until its revision is confirmed again.
func TestNoneReady(t *testing.T) {
	down := []Pod{{Report: &podreport.Index{}, Absent: true, Outdated: true, Removed: true, NoneReady: true}}
	last := runs("p0", healthy("a"))
	absent := last
	absent.Absent = true
	before := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), []Pod{last}, t0)
	for name, pods := range map[string][]Pod{"no pod": down, "a pod that is not ready": append(down, absent)} {
		d := destinationStatus(t, before, accepted(), pods, at(time.Minute))
		check.Equal(t, name, summary(d.Status.Conditions), "True/Accepted True/ResolvedRefs False/NoDispatcher False/NoDispatcher True/Delivering")
		check.Same(t, name+": numbers", d.Status.Delivery, before.Status.Delivery)
		check.Equal(t, name+": Events", len(Transitions(before.Status.Conditions, d.Status.Conditions)), 0)
		starting := destinationStatus(t, d, accepted(), []Pod{{Name: "p0"}}, at(2*time.Minute))
		check.Equal(t, name+", then a ready one without a report", summary(starting.Status.Conditions[2:3]), "False/NoDispatcher")
		d = destinationStatus(t, starting, accepted(), []Pod{last}, at(3*time.Minute))
		check.Equal(t, name+", then a ready one", summary(d.Status.Conditions), summary(before.Status.Conditions))
	}
	s := sourceStatus(t, source(), accepted(), []Pod{takes("p0", adminapi.SourceReport{Accepted: 1})}, t0)
	s = sourceStatus(t, s, accepted(), down, at(time.Minute))
	check.Equal(t, "a Source", summary(s.Status.Conditions), "True/Accepted True/ResolvedRefs False/NoDispatcher False/NoDispatcher Unknown/NoDispatcher")
	s = sourceStatus(t, s, suspended(), down, at(time.Minute))
	check.Equal(t, "a suspended Source", summary(s.Status.Conditions[4:]), "False/Suspended")
}

// A pod that the StatefulSet does not have any more changes no condition but Ready, which names its messages.
func TestRemovedPod(t *testing.T) {
	live, removed := runs("p0", healthy("a")), runs("p1", open("a", "TimedOut"))
	removed.change(func(d *adminapi.DestinationReport) { d.Delivered, d.Pending = 7, 3 })
	removed.Absent, removed.Outdated, removed.Removed = true, true, true
	d := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), []Pod{live, removed}, t0)
	check.Equal(t, "conditions", summary(d.Status.Conditions), "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Delivering")
	check.Same(t, "delivered and pending", []int64{d.Status.Delivery.Delivered, d.Status.Delivery.Pending}, []int64{12, 5})
	const want = "stranded: 3 messages on the volume of p1, which does not run"
	if message := d.Status.Conditions[3].Message; !strings.HasSuffix(message, "; "+want) {
		t.Errorf("Ready has the message %q, want the end %q", message, want)
	}
	without := removed
	without.Report = podreport.NewIndex(adminapi.Report{})
	d = destinationStatus(t, d, accepted(), []Pod{live, without}, at(time.Minute))
	check.Equal(t, "delivered with a removed pod that never had the destination", d.Status.Delivery.Delivered, 5)
	unknown := Pod{Name: "p1", Absent: true, Outdated: true, Removed: true}
	before := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), []Pod{live, removed}, t0)
	d = destinationStatus(t, before, accepted(), []Pod{live, unknown}, at(time.Hour))
	check.Same(t, "numbers without the ledgers", d.Status.Delivery, before.Status.Delivery)
}

func TestDefaultsAndForeignConditions(t *testing.T) {
	fresh := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), []Pod{runs("p1", idle("a"))}, t0)
	d := destination(v1beta1.AnyEndpoint, "a")
	for _, conditionType := range destinationConditions[:5] {
		d.Status.Conditions = append(d.Status.Conditions,
			metav1.Condition{Type: conditionType, Status: metav1.ConditionUnknown, Reason: v1beta1.ReasonPending,
				Message: "waiting for the operator", LastTransitionTime: metav1.Unix(0, 0)})
	}
	if got := destinationStatus(t, d, accepted(), []Pod{runs("p1", idle("a"))}, t0); cmp.Diff(fresh.Status, got.Status) != "" {
		t.Errorf("with the defaults: %s", cmp.Diff(fresh.Status, got.Status))
	}
	if got := Transitions(d.Status.Conditions, fresh.Status.Conditions); len(got) != 0 {
		t.Errorf("Events of a new object: %+v", got)
	}
	written := *fresh.DeepCopy()
	slices.Reverse(written.Status.Conditions)
	written.Status.Conditions = append(written.Status.Conditions,
		metav1.Condition{Type: "Synced", Status: metav1.ConditionTrue, Reason: "Foreign"})
	if got := destinationStatus(t, written, accepted(), []Pod{runs("p1", idle("a"))}, at(time.Hour)); cmp.Diff(fresh.Status,
		got.Status) != "" {
		t.Errorf("with a foreign condition: %s", cmp.Diff(fresh.Status, got.Status))
	}
}

func TestDestinationNumbersAddUp(t *testing.T) {
	p1, p2 := runs("p1", healthy("a")), runs("p2", failing("a", "TimedOut", 0))
	p1.change(func(d *adminapi.DestinationReport) {
		*d = adminapi.DestinationReport{Name: "crm", Generation: 4, Revision: "r1",
			Ledger: adminapi.Ledger{Accepted: 15, Delivered: 1, Filtered: 2, DeadLettered: 3, Discarded: 5, Pending: 4}, DeadLettersStored: 2,
			Retrying:      1,
			OldestPending: at(-time.Hour), NextAttempt: at(time.Minute), Endpoints: d.Endpoints}
	})
	p2.change(func(d *adminapi.DestinationReport) {
		*d = adminapi.DestinationReport{Name: "crm", Generation: 4, Revision: "r1",
			Ledger: adminapi.Ledger{Accepted: 150, Delivered: 10, Filtered: 20, DeadLettered: 30, Discarded: 50, Pending: 40}, DeadLettersStored: 20,
			Retrying:      10,
			OldestPending: at(-2 * time.Hour), Endpoints: d.Endpoints}
	})
	p1.change(func(d *adminapi.DestinationReport) {
		d.Endpoints[0].FirstAttemptsPending, d.Endpoints[0].FirstAttemptsSkipped = 3, 5
	})
	p2.change(func(d *adminapi.DestinationReport) {
		d.Endpoints[0].FirstAttemptsPending, d.Endpoints[0].FirstAttemptsSkipped = 30, 50
	})
	d := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), []Pod{p1, p2}, t0)
	sec := func(d time.Duration) *metav1.Time { x := observed.Timestamp(at(d)); return &x }
	want := &v1beta1.DeliveryStatus{Accepted: 165, Delivered: 11, Filtered: 22, DeadLettered: 33, DeadLettersStored: 22, Discarded: 55,
		Pending:  44,
		Retrying: 11, OldestPendingTime: sec(-2 * time.Hour), NextAttemptTime: sec(time.Minute)}
	if diff := cmp.Diff(want, d.Status.Delivery); diff != "" {
		t.Error(diff)
	}
	wantEndpoints := []v1beta1.EndpointStatus{{
		Name: "a", State: v1beta1.EndpointDegraded, LastSuccessTime: sec(-time.Second),
		LastFailure:          &v1beta1.DeliveryFailure{Time: *sec(-time.Second), Reason: "TimedOut", Message: "the words"},
		FirstAttemptsPending: 33, FirstAttemptsSkipped: 55,
	}}
	if diff := cmp.Diff(wantEndpoints, d.Status.Endpoints); diff != "" {
		t.Error(diff)
	}
	if !d.Status.LastSuccessTime.Equal(sec(-time.Second)) {
		t.Errorf("lastSuccessTime %v", d.Status.LastSuccessTime)
	}

	t.Run("a pod that does not answer leaves the sums", func(t *testing.T) {
		d := destinationStatus(t, d, accepted(), []Pod{p1, {Name: "p2"}}, at(time.Minute))
		if diff := cmp.Diff(want, d.Status.Delivery); diff != "" {
			t.Error(diff)
		}
		if e := d.Status.Endpoints[0]; e.FirstAttemptsPending != 33 || e.FirstAttemptsSkipped != 55 {
			t.Errorf("%d first attempts pending and %d skipped", e.FirstAttemptsPending, e.FirstAttemptsSkipped)
		}
	})
	t.Run("after a restart of the operator, a pod is not ready", func(t *testing.T) {
		more := runs("p1", healthy("a"))
		more.change(func(d *adminapi.DestinationReport) {
			d.Ledger = adminapi.Ledger{Accepted: 165, Delivered: 12, Filtered: 22, DeadLettered: 33, Discarded: 55, Pending: 43}
		})
		fewer := runs("p1", healthy("a"))
		fewer.change(func(d *adminapi.DestinationReport) {
			d.Ledger = adminapi.Ledger{Accepted: 123, Delivered: 12, Filtered: 22, DeadLettered: 33, Discarded: 55, Pending: 1}
		})
		for name, c := range map[string]struct {
			pod  Pod
			want int64
		}{"lower counters are not written": {p1, 11}, "higher counters are written": {more, 12},
			"pending messages of the other pod are missing": {fewer, 11}} {
			d := destinationStatus(t, d, accepted(), []Pod{c.pod, {Name: "p2", Absent: true}}, at(time.Minute))
			if got := d.Status.Delivery.Delivered; got != c.want {
				t.Errorf("%s: delivered: got %d, want %d", name, got, c.want)
			}
		}
	})
	t.Run("a pod has rejected the config", func(t *testing.T) {
		refused := runs("p2", healthy("a"))
		refused.Report = podreport.NewIndex(adminapi.Report{Namespaces: []adminapi.NamespaceReport{{Namespace: namespace,
			Refused: &adminapi.RefusedConfig{Error: "no"}}}})
		d := destinationStatus(t, d, accepted(), []Pod{p1, refused}, at(time.Minute))
		if diff := cmp.Diff(want, d.Status.Delivery); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("a restart leaves history and condition", func(t *testing.T) {
		fresh := runs("p1", idle("a"))
		fresh.change(func(d *adminapi.DestinationReport) { d.Delivered = 11 })
		wantEndpoints[0].FirstAttemptsPending, wantEndpoints[0].FirstAttemptsSkipped = 0, 0 // The numbers of this pod.
		d := destinationStatus(t, d, accepted(), []Pod{fresh}, at(time.Minute))
		if got := summary(d.Status.Conditions); !strings.HasSuffix(got, "False/TimedOut") {
			t.Error(got)
		}
		wantEndpoints[0].State = v1beta1.EndpointIdle
		if diff := cmp.Diff(wantEndpoints, d.Status.Endpoints); diff != "" {
			t.Error(diff)
		}
		if !d.Status.LastSuccessTime.Equal(sec(-time.Second)) {
			t.Errorf("lastSuccessTime %v", d.Status.LastSuccessTime)
		}
	})
	t.Run("failures from before a change count no more", func(t *testing.T) {
		changed := idle("a")
		changed.LastFailure = failing("a", "TimedOut", 0).LastFailure
		d := destinationStatus(t, d, accepted(), []Pod{runs("p1", changed)}, at(time.Minute))
		if got := summary(d.Status.Conditions); !strings.HasSuffix(got, "Unknown/NoTrafficYet") {
			t.Error(got)
		}
	})
	t.Run("another generation makes a condition without traffic unknown", func(t *testing.T) {
		d := *d.DeepCopy()
		d.Generation = 5
		fresh := runs("p1", idle("a"))
		fresh.change(func(d *adminapi.DestinationReport) { d.Generation = 5 })
		d = destinationStatus(t, d, accepted(), []Pod{fresh}, at(time.Minute))
		if got := summary(d.Status.Conditions); !strings.HasSuffix(got, "Unknown/NoTrafficYet") {
			t.Error(got)
		}
	})
}

func TestTransitionTimes(t *testing.T) {
	d := destination(v1beta1.AnyEndpoint, "a")
	step := func(now time.Time, v compile.Verdict, e adminapi.EndpointReport, want map[string]time.Duration) {
		t.Helper()
		d = destinationStatus(t, d, v, []Pod{runs("p1", e)}, now)
		for conditionType, after := range want {
			if got := meta.FindStatusCondition(d.Status.Conditions,
				conditionType).LastTransitionTime; !got.Time.Equal(observed.Timestamp(at(after)).Time) {
				t.Errorf("at %v: %s changed at %v, want %v", now.Sub(t0), conditionType, got.Sub(t0.Truncate(time.Second)), after)
			}
		}
	}
	step(at(0), accepted(), idle("a"), map[string]time.Duration{"Ready": 0, "Delivering": 0})
	step(at(time.Minute), accepted(), healthy("a"), map[string]time.Duration{"Ready": 0, "Delivering": time.Minute})
	step(at(2*time.Minute), accepted(), failing("a", "TimedOut", 0), map[string]time.Duration{"Ready": 0, "Delivering": 2 * time.Minute})
	step(at(3*time.Minute), accepted(), open("a", "TimedOut"), map[string]time.Duration{"Ready": 0, "Delivering": 2 * time.Minute})
	step(at(4*time.Minute), refused(v1beta1.ReasonInvalidURL), open("a", "TimedOut"),
		map[string]time.Duration{"Ready": 4 * time.Minute, "Accepted": 4 * time.Minute, "Programmed": 0, "Delivering": 2 * time.Minute})
	if got := d.Status.RevisionTime; !got.Time.Equal(observed.Timestamp(t0).Time) {
		t.Errorf("revisionTime %v", got)
	}
	v := accepted()
	v.Revision = "r2"
	step(at(5*time.Minute), v, healthy("a"), map[string]time.Duration{"Ready": 4 * time.Minute, "Programmed": 5 * time.Minute})
	if got := d.Status.RevisionTime; !got.Time.Equal(observed.Timestamp(at(5 * time.Minute)).Time) {
		t.Errorf("revisionTime %v", got)
	}
}

func TestNumbersWaitTransitionsDoNot(t *testing.T) {
	base := runs("p1", healthy("a"))
	d := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), []Pod{base}, t0)
	for _, tc := range []struct {
		name      string
		v         compile.Verdict
		change    func(*adminapi.DestinationReport)
		immediate bool
	}{
		{"counts", accepted(), func(r *adminapi.DestinationReport) { r.Delivered++; r.Pending++; r.OldestPending = t0 }, false},
		{"last success", accepted(), func(r *adminapi.DestinationReport) { r.Endpoints[0].LastSuccess = at(time.Minute) }, false},
		{"an earlier failure", accepted(), func(r *adminapi.DestinationReport) {
			r.Endpoints[0].LastFailure = failing("a", "TimedOut", 0).LastFailure
		}, false},
		{"degraded, but delivering", accepted(), func(r *adminapi.DestinationReport) { r.Endpoints[0] = recovering("a") }, false},
		{"failing", accepted(), func(r *adminapi.DestinationReport) { r.Endpoints[0] = failing("a", "TimedOut", 0) }, true},
		{"revision", compile.Verdict{Accepted: true, Reason: "Accepted", Message: "fine", State: liveconfig.Active, Revision: "r9"},
			func(*adminapi.DestinationReport) {}, true},
		{"pod behind", accepted(), func(r *adminapi.DestinationReport) { r.Revision = "r0" }, true},
		{"suspended", suspended(), func(*adminapi.DestinationReport) {}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pod := runs("p1", healthy("a"))
			pod.change(tc.change)
			due := pacedDestination(d, tc.v, namespace, []Pod{pod}, at(time.Second), true)
			if equality.Semantic.DeepEqual(d.Status, due) {
				t.Error("no change, although the numbers are due")
			}
			soon := pacedDestination(d, tc.v, namespace, []Pod{pod}, at(time.Second), false)
			if moved := !equality.Semantic.DeepEqual(d.Status, soon); moved != tc.immediate {
				t.Errorf("moved at once: %v\n%s", moved, cmp.Diff(d.Status, soon))
			}
			if tc.immediate && !equality.Semantic.DeepEqual(soon, due) {
				t.Errorf("the transition does not include the numbers:\n%s", cmp.Diff(due, soon))
			}
		})
	}
}

// While an endpoint fails, other reasons are written when numbers are due. A circuit that
// opens, and the recovery after a delay, are written immediately.
func TestPaceOfFailures(t *testing.T) {
	d := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), []Pod{runs("p1", failing("a", "TimedOut", 0))}, t0)
	soon := func(e adminapi.EndpointReport, after time.Duration) string {
		d := d.DeepCopy()
		d.Status = pacedDestination(*d, accepted(), namespace, []Pod{runs("p1", e)}, at(after), false)
		if err := invariants.Destination(*d); err != nil {
			t.Error(err)
		}
		return summary(d.Status.Conditions[4:])
	}
	if got := soon(failing("a", "ServerError", 500), time.Second); got != "False/TimedOut" {
		t.Error(got)
	}
	if got := soon(open("a", "ServerError"), time.Second); got != "False/CircuitOpen" {
		t.Error(got)
	}
	if got := soon(gone("a"), time.Second); got != "False/EndpointGone" {
		t.Error(got)
	}
	if got := soon(healthy("a"), time.Second); got != "False/TimedOut" {
		t.Errorf("a recovery after a second shows at once: %s", got)
	}
	if got := soon(healthy("a"), 10*time.Second); got != "True/Delivering" {
		t.Error(got)
	}
	if got := soon(healthy("a"), -time.Hour); got != "True/Delivering" {
		t.Errorf("with a clock that was set back: %s", got)
	}
	if got := summary(Destination(d, accepted(), namespace, []Pod{runs("p1", healthy("a"))},
		at(time.Second)).Conditions[4:]); got != "True/Delivering" {
		t.Errorf("when numbers are due: %s", got)
	}
}

func TestLongTextsAreCut(t *testing.T) {
	long := strings.Repeat("ä", 40000)
	e := failing("a", long, 500)
	e.LastFailure.Message = long
	v := refused(v1beta1.ReasonInvalidURL)
	v.Message = long
	destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), v, []Pod{runs("p1", e)}, t0)
	pod := runs("p1")
	pod.change(func(d *adminapi.DestinationReport) { d.Revision = "r0" })
	pod.Report.Namespace(namespace).Refused = &adminapi.RefusedConfig{Error: long + "\xff"}
	destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), []Pod{pod}, t0)
}

func source() v1beta1.Source {
	return v1beta1.Source{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web", Generation: 2}}
}

func takes(name string, r adminapi.SourceReport) Pod {
	r.Name, r.Generation, r.Revision = "web", 2, "r1"
	return Pod{Name: name,
		Report: podreport.NewIndex(adminapi.Report{Namespaces: []adminapi.NamespaceReport{{Namespace: namespace,
			Sources: []adminapi.SourceReport{{Name: "aaa"}, r}}}})}
}

func sourceStatus(t *testing.T, s v1beta1.Source, v compile.Verdict, pods []Pod, now time.Time) v1beta1.Source {
	t.Helper()
	s.Status = pacedSource(s, v, namespace, pods, now, true)
	if err := invariants.Source(s); err != nil {
		t.Errorf("invariants: %v", err)
	}
	for _, due := range []bool{true, false} {
		slices.Reverse(pods)
		again := pacedSource(overAPI(t, s), v, namespace, pods, now.Add(time.Hour), due)
		if !equality.Semantic.DeepEqual(s.Status, again) {
			t.Errorf("equal inputs return another status (numbersDue %v):\n%s", due, cmp.Diff(s.Status, again))
		}
	}
	return s
}

func TestSourceConditions(t *testing.T) {
	full := takes("p2", adminapi.SourceReport{Accepted: 5})
	full.Report.Storage.Pressure = true
	for _, tc := range []struct {
		name    string
		v       compile.Verdict
		pods    []Pod
		want    string
		message string
	}{
		{"receiving", accepted(), []Pod{takes("p1", adminapi.SourceReport{Accepted: 5, LastAccepted: at(-time.Second)})}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Receiving", ""},
		{"receiving, after a restart", accepted(), []Pod{takes("p1", adminapi.SourceReport{Accepted: 5})}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Receiving", ""},
		{"no call yet", accepted(), []Pod{takes("p1", adminapi.SourceReport{})}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready Unknown/NoTrafficYet", ""},
		{"no pods", accepted(), nil, "True/Accepted True/ResolvedRefs False/NoDispatcher False/NoDispatcher Unknown/NoTrafficYet", ""},
		{"only rejected calls", accepted(), []Pod{takes("p1", adminapi.SourceReport{Rejected: 3, LastRejected: at(-time.Second), LastRejection: "not JSON"})}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/RejectingCalls", "all of the latest calls were rejected: not JSON"},
		{"only rejected calls for an hour", accepted(), []Pod{takes("p1", adminapi.SourceReport{Accepted: 1, LastAccepted: at(-time.Hour), LastRejected: at(0)})}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/RejectingCalls", ""},
		{"accepted and rejected calls", accepted(), []Pod{takes("p1", adminapi.SourceReport{Accepted: 1, LastAccepted: at(-time.Second), LastRejected: at(0)})}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Receiving", ""},
		{"rejected calls on one pod, accepted calls on another", accepted(), []Pod{takes("p1", adminapi.SourceReport{LastRejected: at(0)}), takes("p2", adminapi.SourceReport{Accepted: 1, LastAccepted: at(-time.Second)})}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready True/Receiving", ""},
		{"share used up", accepted(), []Pod{takes("p1", adminapi.SourceReport{Accepted: 5, StoragePressure: true, Share: &adminapi.StorageShare{UsedBytes: 1_230_000_000, MaxBytes: 900_000_000}}), takes("p2", adminapi.SourceReport{Accepted: 5})}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/StoragePressure", "calls are answered 503: the undelivered calls of this namespace use 1.2 GB, and its share of the storage of dispatcher p1 is 900 MB; see the pending messages of the destinations"},
		{"quota used up", accepted(), []Pod{takes("p1", adminapi.SourceReport{Accepted: 5, StoragePressure: true, Share: &adminapi.StorageShare{UsedBytes: 1_000_000, MaxBytes: 1_000_000, Quota: true}})}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/StoragePressure", "the undelivered calls of this Source use 1 MB, and its quota on dispatcher p1 is 1 MB"},
		{"storage full within the share", accepted(), []Pod{takes("p1", adminapi.SourceReport{Accepted: 5, StoragePressure: true, Share: &adminapi.StorageShare{UsedBytes: 1_000_000, MaxBytes: 2_000_000}})}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/StoragePressure", "a dispatcher's storage is full"},
		{"disk full", accepted(), []Pod{takes("p1", adminapi.SourceReport{}), full}, "True/Accepted True/ResolvedRefs True/Programmed True/Ready False/StoragePressure", "a dispatcher's storage is full"},
		{"suspended", suspended(), []Pod{takes("p1", adminapi.SourceReport{Accepted: 5})}, "True/Suspended True/ResolvedRefs True/Programmed True/Ready False/Suspended", "503"},
		{"not accepted", refused(v1beta1.ReasonWriteKeyConflict), []Pod{takes("p1", adminapi.SourceReport{Accepted: 5})}, "False/WriteKeyConflict True/ResolvedRefs False/NotAccepted False/WriteKeyConflict False/NotAccepted True/WriteKeyConflict", "spec.x: broken"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sourceStatus(t, source(), tc.v, tc.pods, t0)
			if got := summary(s.Status.Conditions); got != tc.want {
				t.Errorf("got  %s\nwant %s", got, tc.want)
			}
			if message := s.Status.Conditions[4].Message; !strings.Contains(message, tc.message) {
				t.Errorf("message %q does not contain %q", message, tc.message)
			}
		})
	}
}

func TestSourceNumbers(t *testing.T) {
	v := accepted()
	for i := range 150 {
		v.Destinations = append(v.Destinations, fmt.Sprintf("d%03d", i))
	}
	p1 := takes("p1", adminapi.SourceReport{Accepted: 1, Rejected: 2, Duplicates: 3, LastAccepted: at(-time.Minute),
		Messages: adminapi.Ledger{Accepted: 15, Delivered: 1, Filtered: 2, DeadLettered: 3, Discarded: 4, Pending: 5}})
	p2 := takes("p2", adminapi.SourceReport{Accepted: 10, Rejected: 20, Duplicates: 30, LastAccepted: at(-time.Second),
		Messages: adminapi.Ledger{Accepted: 150, Delivered: 10, Filtered: 20, DeadLettered: 30, Discarded: 40, Pending: 50}})
	s := sourceStatus(t, source(), v, []Pod{p1, p2}, t0)
	want := &v1beta1.CallCounts{Accepted: 11, Rejected: 22, Duplicates: 33}
	if diff := cmp.Diff(want, s.Status.Calls); diff != "" {
		t.Error(diff)
	}
	messages := &v1beta1.MessageCounts{Accepted: 165, Delivered: 11, Filtered: 22, DeadLettered: 33, Discarded: 44, Pending: 55}
	if diff := cmp.Diff(messages, s.Status.Messages); diff != "" {
		t.Error(diff)
	}
	if len(s.Status.Destinations) != 100 || !s.Status.LastReceivedTime.Time.Equal(observed.Timestamp(at(-time.Second)).Time) {
		t.Errorf("%d destinations, last received %v", len(s.Status.Destinations), s.Status.LastReceivedTime)
	}
	s = sourceStatus(t, s, v, []Pod{p1, {Name: "p2"}}, at(time.Minute))
	if diff := cmp.Diff(want, s.Status.Calls) + cmp.Diff(messages, s.Status.Messages); diff != "" {
		t.Errorf("a pod that does not answer: %s", diff)
	}
	s = sourceStatus(t, s, v, nil, at(time.Minute))
	if got := summary(s.Status.Conditions[4:]); got != "True/Receiving" {
		t.Errorf("without pods: %s", got)
	}

	more := takes("p2", adminapi.SourceReport{Accepted: 11, LastAccepted: at(0)})
	s = sourceStatus(t, s, v, []Pod{p1, p2}, at(time.Minute))
	if next := pacedSource(s, v, namespace, []Pod{p1, more}, at(time.Minute), false); !equality.Semantic.DeepEqual(next, s.Status) {
		t.Errorf("numbers moved before they were due: %s", cmp.Diff(s.Status, next))
	}
	if next := pacedSource(s, suspended(), namespace, []Pod{p1, more}, at(time.Minute), false); next.Calls.Accepted != 12 {
		t.Errorf("the transition does not include the numbers: %+v", next.Calls)
	}
}

// The first rejected call after a restart of the pods does not change Receiving, if a
// call was accepted shortly before.
func TestRejectedCallAfterRestart(t *testing.T) {
	s := sourceStatus(t, source(), accepted(), []Pod{takes("p1", adminapi.SourceReport{Accepted: 5, LastAccepted: at(0)})}, at(0))
	restarted := func(rejected time.Duration) []Pod {
		return []Pod{takes("p1", adminapi.SourceReport{Accepted: 5, Rejected: 1, LastRejected: at(rejected)})}
	}
	s = sourceStatus(t, s, accepted(), restarted(20*time.Second), at(20*time.Second))
	if got := summary(s.Status.Conditions); !strings.HasSuffix(got, "True/Receiving") {
		t.Errorf("20 s after the last accepted call: %s", got)
	}
	s = sourceStatus(t, s, accepted(), restarted(time.Minute), at(time.Minute))
	if got := summary(s.Status.Conditions); !strings.HasSuffix(got, "False/RejectingCalls") {
		t.Errorf("a minute after the last accepted call: %s", got)
	}
}

// A time from a clock that was ahead does not hide later events.
func TestClockAhead(t *testing.T) {
	report := func(when time.Duration) []Pod {
		e := failing("a", "TimedOut", 0)
		e.LastSuccess, e.LastFailure.Time = at(when), at(when)
		return []Pod{runs("p1", e)}
	}
	d := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), report(24*time.Hour), at(24*time.Hour))
	d = destinationStatus(t, d, accepted(), report(time.Minute), at(time.Minute))
	e := d.Status.Endpoints[0]
	for what, got := range map[string]time.Time{"lastSuccessTime": d.Status.LastSuccessTime.Time, "the endpoint's": e.LastSuccessTime.Time,
		"its failure's": e.LastFailure.Time.Time} {
		if !got.Equal(observed.Timestamp(at(time.Minute)).Time) {
			t.Errorf("%s is %v, want %v", what, got, at(time.Minute))
		}
	}
	took := func(when time.Duration) []Pod {
		return []Pod{takes("p1", adminapi.SourceReport{Accepted: 1, LastAccepted: at(when)})}
	}
	s := sourceStatus(t, source(), accepted(), took(24*time.Hour), at(24*time.Hour))
	s = sourceStatus(t, s, accepted(), took(time.Minute), at(time.Minute))
	if got := s.Status.LastReceivedTime.Time; !got.Equal(observed.Timestamp(at(time.Minute)).Time) {
		t.Errorf("lastReceivedTime is %v, want %v", got, at(time.Minute))
	}
}

func TestTransitions(t *testing.T) {
	d := destination(v1beta1.AnyEndpoint, "a")
	noPods := []Pod{}
	refusingPod := runs("p1", healthy("a"))
	refusingPod.change(func(d *adminapi.DestinationReport) { d.Revision = "r0" })
	refusingPod.Report.Namespace(namespace).Refused = &adminapi.RefusedConfig{Error: "no"}
	for i, step := range []struct {
		v    compile.Verdict
		pods []Pod
		want string
	}{
		{unresolved(v1beta1.ReasonSecretNotFound), []Pod{{Name: "p1"}}, "Warning SecretNotFound"},
		{unresolved(v1beta1.ReasonSecretNotFound), []Pod{runs("p1", idle("a"))}, ""},
		{unresolved(v1beta1.ReasonSecretKeyMissing), []Pod{runs("p1", idle("a"))}, "Warning SecretKeyMissing"},
		{accepted(), []Pod{runs("p1", idle("a"))}, "Normal ResolvedRefs"},
		{accepted(), []Pod{runs("p1", healthy("a"))}, "Normal Delivering"},
		{accepted(), []Pod{runs("p1", healthy("a"))}, ""},
		{accepted(), []Pod{runs("p1", failing("a", "TimedOut", 0))}, "Warning TimedOut"},
		{accepted(), []Pod{runs("p1", open("a", "TimedOut"))}, "Warning CircuitOpen"},
		{accepted(), []Pod{runs("p1", healthy("a"))}, "Normal Delivering"},
		{suspended(), []Pod{runs("p1", healthy("a"))}, "Normal Suspended"},
		{accepted(), []Pod{runs("p1", healthy("a"))}, "Normal Accepted"},
		{accepted(), noPods, ""},
		{accepted(), []Pod{refusingPod}, "Warning ConfigRefused"},
		{accepted(), []Pod{runs("p1", healthy("a"))}, "Normal Programmed"},
		{accepted(), []Pod{runs("p1", healthy("a")), {Name: "p2"}}, ""},
		{accepted(), []Pod{runs("p1", healthy("a")), runs("p2", healthy("a"))}, ""},
	} {
		before := d.Status
		d = destinationStatus(t, d, step.v, step.pods, at(time.Duration(i)*time.Minute))
		var got []string
		for _, e := range Transitions(before.Conditions, d.Status.Conditions) {
			if e.Message == "" || e.Action == "" || len(e.Message) > 1024 {
				t.Errorf("step %d: %+v", i, e)
			}
			got = append(got, e.Type+" "+e.Reason)
		}
		if strings.Join(got, ", ") != step.want {
			t.Errorf("step %d: got %v, want %q", i, got, step.want)
		}
	}
	var none v1beta1.SourceStatus
	s := sourceStatus(t, source(), accepted(), []Pod{takes("p1", adminapi.SourceReport{StoragePressure: true})}, t0)
	if got := Transitions(none.Conditions, s.Status.Conditions); len(got) != 1 || got[0].Reason != v1beta1.ReasonStoragePressure ||
		got[0].Type != EventWarning {
		t.Errorf("got %+v", got)
	}
}

// The checks of the invariants find violations.
func TestInvariantsAreChecked(t *testing.T) {
	good := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(), []Pod{runs("p1", healthy("a"))}, t0)
	for name, spoil := range map[string]func(*v1beta1.WebhookDestination){
		"no condition":   func(d *v1beta1.WebhookDestination) { d.Status.Conditions = nil },
		"ready":          func(d *v1beta1.WebhookDestination) { d.Status.Conditions[0].Status = metav1.ConditionFalse },
		"generation":     func(d *v1beta1.WebhookDestination) { d.Status.ObservedGeneration = 5 },
		"its generation": func(d *v1beta1.WebhookDestination) { d.Status.Conditions[1].ObservedGeneration = 5 },
		"reason":         func(d *v1beta1.WebhookDestination) { d.Status.Conditions[4].Reason = "" },
		"stalled": func(d *v1beta1.WebhookDestination) {
			d.Status.Conditions = append(d.Status.Conditions,
				metav1.Condition{Type: v1beta1.ConditionStalled, Status: metav1.ConditionTrue, Reason: "X", Message: "m",
					LastTransitionTime: observed.Timestamp(t0)})
		},
		"message":           func(d *v1beta1.WebhookDestination) { d.Status.Conditions[3].Message = strings.Repeat("x", 40000) },
		"time":              func(d *v1beta1.WebhookDestination) { d.Status.Conditions[3].LastTransitionTime = metav1.Time{} },
		"endpoints":         func(d *v1beta1.WebhookDestination) { d.Status.Endpoints[0].Name = "b" },
		"revision's moment": func(d *v1beta1.WebhookDestination) { d.Status.RevisionTime = nil },
	} {
		d := good.DeepCopy()
		spoil(d)
		if invariants.Destination(*d) == nil {
			t.Errorf("%s: not found", name)
		}
	}
}

// The standard CRDs do not have the field deadLettersForwarded: it is present only with spec.deadLetters.forwardTo.
func TestForwardedOnlyWithATarget(t *testing.T) {
	d := destination(v1beta1.AnyEndpoint, "a")
	forwarding := runs("p1", healthy("a"))
	forwarding.change(func(d *adminapi.DestinationReport) { d.DeadLettersForwarded = 3 })
	if got := destinationStatus(t, d, accepted(), []Pod{forwarding}, t0).Status.Delivery.DeadLettersForwarded; got != nil {
		t.Errorf("without forwardTo: got %d, want none", *got)
	}
	d.Spec.DeadLetters.ForwardTo = &v1beta1.ForwardTo{DestinationRef: v1beta1.ObjectReference{Name: "ops"}}
	if got := destinationStatus(t, d, accepted(), []Pod{forwarding}, t0).Status.Delivery.DeadLettersForwarded; got == nil || *got != 3 {
		t.Errorf("with forwardTo: got %v, want 3", got)
	}
}
