package health

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/test/check"
)

// The operator processes reports later in which only numbers changed. So they must not cause a
// transition: with reports whose states are equal except for numbers, the status remains.
func TestNumbersCauseNoTransition(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	// Half of the pairs have the same choices of what is not a number.
	var state *rand.Rand
	when := func() time.Time { return []time.Time{{}, at(-time.Minute), at(-time.Second), at(0)}[random.IntN(4)] }
	number := func() int64 { return int64(random.IntN(3)) }
	failure := func() *adminapi.Failure {
		if state.IntN(2) == 0 {
			return nil
		}
		return []*adminapi.Failure{{Time: at(-time.Minute), Reason: "TimedOut"},
			{Time: at(0), Reason: "Rejected", StatusCode: 500}}[random.IntN(2)]
	}
	states := []adminapi.EndpointState{adminapi.EndpointIdle, adminapi.EndpointHealthy, adminapi.EndpointDegraded,
		adminapi.EndpointCircuitOpen, adminapi.EndpointGone}
	ledger := func() adminapi.Ledger {
		return adminapi.Ledger{Accepted: number(), Delivered: number(), Filtered: number(), DeadLettered: number(), Discarded: number(),
			Pending: number()}
	}
	d := destination(v1beta1.AnyEndpoint, "primary")
	source := v1beta1.Source{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web", Generation: 4}}
	report := func(seed uint64) Pod {
		state = rand.New(rand.NewPCG(seed, 0))
		discards := []adminapi.Discard{{Source: "web", Destination: "old", Messages: 1 + number(), At: []time.Time{at(0), at(time.Minute)}[state.IntN(2)]}, {Source: "old", Destination: d.Name, At: when()}}
		if state.IntN(4) > 0 {
			discards = nil
		}
		return Pod{Name: "pod", Report: podreport.NewIndex(adminapi.Report{Ready: true,
			Configs: []adminapi.ConfigReport{{Namespace: namespace, Discards: discards}}, Namespaces: []adminapi.NamespaceReport{{
				Namespace: namespace,
				Sources: []adminapi.SourceReport{{
					Name: "web", Generation: 4, Revision: "r1", Accepted: number(), Rejected: number(), Duplicates: number(),
					LastAccepted: when(), LastRejected: []time.Time{{}, at(-time.Second), at(0)}[state.IntN(3)], Messages: ledger(),
					StoragePressure: state.IntN(4) == 0,
				}},
				Destinations: []adminapi.DestinationReport{{
					Name: d.Name, Generation: 4, Revision: []string{"r0", "r1"}[state.IntN(2)], Ledger: ledger(),
					DeadLettersStored: number(), DeadLettersForwarded: number(), Retrying: number(), OldestPending: when(), OldestExpires: when(),
					NextAttempt: when(),
					Endpoints: []adminapi.EndpointReport{{
						Name: "primary", State: states[state.IntN(len(states))], LastSuccess: when(),
						ConsecutiveFailures: state.IntN(2) * (1 + random.IntN(3)),
						LastFailure:         failure(), FirstAttemptsPending: number(), FirstAttemptsSkipped: number(),
					}},
				}},
			}}})}
	}
	equal, transitions := 0, 0
	for i := range uint64(5_000) {
		before, after := report(i), report(i+i%2)
		same := before.Report.EqualExceptNumbers(after.Report, namespace)
		first, _ := Destinations.Next(&d, accepted(), namespace, []Pod{before}, at(0))
		second, _ := Destinations.Next(first, accepted(), namespace, []Pod{after}, at(0))
		firstSource, _ := Sources.Next(&source, accepted(), namespace, []Pod{before}, at(0))
		secondSource, _ := Sources.Next(firstSource, accepted(), namespace, []Pod{after}, at(0))
		transition := !equality.Semantic.DeepEqual(first, second) || !equality.Semantic.DeepEqual(firstSource, secondSource)
		if transition {
			transitions++
		}
		if same {
			equal++
		}
		if same && transition {
			t.Fatalf("a transition although only numbers changed:\n%s%s", cmp.Diff(first, second), cmp.Diff(firstSource, secondSource))
		}
	}
	if equal < 100 || transitions < 100 {
		t.Errorf("%d pairs that are equal except for numbers and %d with transitions, want 100 of each", equal, transitions)
	}
}

// The numbers of a destination whose filter excludes all calls are idle.
func TestIdleNumbers(t *testing.T) {
	pod := func(change func(*adminapi.DestinationReport)) []Pod {
		p := runs("p1", healthy("a"))
		p.change(func(d *adminapi.DestinationReport) { d.Pending, d.Retrying = 0, 0; change(d) })
		return []Pod{p}
	}
	before := destinationStatus(t, destination(v1beta1.AnyEndpoint, "a"), accepted(),
		pod(func(d *adminapi.DestinationReport) { d.Filtered = 5 }), t0)
	for name, c := range map[string]struct {
		change func(*adminapi.DestinationReport)
		want   bool
	}{
		"filtered":             {func(d *adminapi.DestinationReport) { d.Filtered = 9 }, true},
		"filtered in a moment": {func(d *adminapi.DestinationReport) { d.Filtered, d.Pending, d.OldestPending = 8, 1, at(time.Minute) }, true},
		"delivered":            {func(d *adminapi.DestinationReport) { d.Filtered, d.Delivered = 9, 6 }, false},
		"pending":              {func(d *adminapi.DestinationReport) { d.Filtered, d.Pending, d.OldestPending = 9, 1, at(0) }, false},
		"dead-lettered":        {func(d *adminapi.DestinationReport) { d.DeadLettered = 1 }, false},
	} {
		after := destinationStatus(t, before, accepted(), pod(c.change), at(time.Minute))
		check.Equal(t, name, Destinations.Idle(&before, &after), c.want)
	}
}
