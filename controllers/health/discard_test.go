package health

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/compile"
)

// discarding returns a pod that runs the destination crm and the Source web, with discards ahead.
func discarding(name string, list ...adminapi.Discard) Pod {
	p := runs(name, healthy("a"))
	next, _ := p.Report.Merge(adminapi.Report{
		Pod: name, Ready: true, Delta: true, Configs: []adminapi.ConfigReport{{Namespace: "other",
			Discards: []adminapi.Discard{{Source: "web", Destination: "crm", Messages: 1, At: at(0)}}}, {Namespace: namespace, Discards: list}},
		Namespaces: []adminapi.NamespaceReport{{Namespace: namespace,
			Sources: []adminapi.SourceReport{{Name: "web", Generation: 4, Revision: "r1", Accepted: 1}}}},
	}, nil)
	p.Report = next
	return p
}

// Ready announces discards ahead with their time, at the Source and at the destination. It remains True.
func TestDiscardAhead(t *testing.T) {
	with := func(p Pod, change func(*Pod)) Pod { change(&p); return p }
	discard := func(source, destination string, messages int64, after time.Duration) adminapi.Discard {
		return adminapi.Discard{Source: source, Destination: destination, Messages: messages, At: at(after)}
	}
	const ready = "accepted, and every ready dispatcher runs this revision"
	const cause = ", its connection or an endpoint was deleted; create it again to keep them"
	noSource := accepted()
	noSource.Unresolved = &compile.Unresolved{Reason: v1beta1.ReasonNoSource, Message: strings.Repeat("x", maxMessageBytes)}
	for _, c := range []struct {
		name                string
		pods                []Pod
		verdict             compile.Verdict
		source, destination string // "reason: message" of Ready
	}{
		{"none", []Pod{discarding("p1")}, accepted(), "Ready: " + ready, "Ready: " + ready},
		{"no messages", []Pod{discarding("p1", discard("web", "crm", 0, time.Minute))}, accepted(), "Ready: " + ready, "Ready: " + ready},
		{"a deleted destination", []Pod{discarding("p1", discard("web", "old", 7, 10*time.Minute))}, accepted(),
			"DiscardAhead: " + ready + `; pending messages for WebhookDestination "old" will be discarded at 2026-03-01T12:10:00Z, because the destination` + cause, "Ready: " + ready},
		{"a deleted Source", []Pod{discarding("p1", discard("ios", "crm", 7, 10*time.Minute))}, accepted(),
			"Ready: " + ready, "DiscardAhead: " + ready + `; pending messages of Source "ios" will be discarded at 2026-03-01T12:10:00Z, because the Source` + cause},
		{"a destination among others", []Pod{discarding("p1", discard("web", "a", 1, time.Minute), discard("ios", "crm", 1, 10*time.Minute),
			discard("web", "d", 1, 2*time.Minute))}, accepted(),
			"DiscardAhead: " + ready + `; pending messages for WebhookDestination "a", "d" will be discarded at 2026-03-01T12:01:00Z, because the destination` + cause,
			"DiscardAhead: " + ready + `; pending messages of Source "ios" will be discarded at 2026-03-01T12:10:00Z, because the Source` + cause},
		{"a removed connection, at the earliest time of two pods",
			[]Pod{discarding("p1", discard("web", "crm", 7, 10*time.Minute)), discarding("p2", discard("web", "crm", 1, 9*time.Minute))}, accepted(),
			"DiscardAhead: " + ready + `; pending messages for WebhookDestination "crm" will be discarded at 2026-03-01T12:09:00Z, because the destination` + cause,
			"DiscardAhead: " + ready + `; pending messages of Source "web" will be discarded at 2026-03-01T12:09:00Z, because the Source` + cause},
		{"many", []Pod{discarding("p1", discard("a", "crm", 1, time.Minute), discard("b", "crm", 1, time.Second),
			discard("c", "crm", 1, time.Minute), discard("d", "crm", 1, time.Minute), discard("e", "crm", 1, time.Minute))}, accepted(),
			"Ready: " + ready, "DiscardAhead: " + ready + `; pending messages of Source "a", "b", "c", 2 others will be discarded at 2026-03-01T12:00:01Z, because the Source` + cause},
		{"not ready for another reason, which is long", []Pod{discarding("p1", discard("ios", "crm", 7, 10*time.Minute))}, noSource,
			"NoSource: " + strings.Repeat("x", 2048), "NoSource: " + strings.Repeat("x", 1876) + `…; pending messages of Source "ios" will be discarded at 2026-03-01T12:10:00Z, because the Source` + cause},
		{"an absent pod", []Pod{discarding("p1"), with(discarding("p2", discard("ios", "crm", 7, 10*time.Minute)), func(p *Pod) {
			p.Absent = true
		})}, accepted(),
			"Ready: " + ready, "DiscardAhead: " + ready + `; pending messages of Source "ios" will be discarded at 2026-03-01T12:10:00Z, because the Source` + cause},
		{"a pod that is absent for a long time", []Pod{discarding("p1"),
			with(discarding("p2", discard("ios", "crm", 7, 10*time.Minute)), func(p *Pod) { p.Absent, p.Outdated = true, true })}, accepted(),
			"Ready: " + ready, "Ready: " + ready},
		{"a pod without a report", []Pod{discarding("p1"), {Name: "p2", Absent: true}}, accepted(), "Ready: " + ready, "Ready: " + ready},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), c.verdict, c.pods, t0)
			s := sourceStatus(t, source(), c.verdict, c.pods, t0)
			for _, o := range []struct {
				kind, want string
				conditions []metav1.Condition
			}{{"Source", c.source, s.Status.Conditions}, {"destination", c.destination, d.Status.Conditions}} {
				got := meta.FindStatusCondition(o.conditions, v1beta1.ConditionReady)
				if diff := cmp.Diff(o.want, got.Reason+": "+got.Message); diff != "" {
					t.Errorf("Ready of the %s (-want +got):\n%s", o.kind, diff)
				}
			}
		})
	}
}

// A discard ahead is one transition: neither the number of messages nor the time that passes changes
// the status.
func TestDiscardAheadIsWrittenOnce(t *testing.T) {
	d := destination(v1beta1.AnyEndpoint, "a")
	d.Status = pacedDestination(d, accepted(), namespace, []Pod{discarding("p1")}, t0, true)
	ahead := adminapi.Discard{Source: "ios", Destination: "crm", Messages: 7, At: at(10 * time.Minute)}
	first := pacedDestination(d, accepted(), namespace, []Pod{discarding("p1", ahead)}, t0, false)
	if cmp.Equal(d.Status, first) {
		t.Fatal("a discard ahead is no transition")
	}
	d.Status = first
	ahead.Messages = 3
	if diff := cmp.Diff(first, pacedDestination(d, accepted(), namespace, []Pod{discarding("p1", ahead)}, at(9*time.Minute),
		false)); diff != "" {
		t.Errorf("the announcement was written again:\n%s", diff)
	}
}
