package controllers

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/kinds"
)

// BenchmarkPodChange measures what the operator computes with 10,000 destinations in 50 namespaces and
// 50 pods: when a pod leaves and its successor sends a full report ("successor"), and when a pod
// reports numbers of every destination of one namespace ("numbers").
func BenchmarkPodChange(b *testing.B) {
	const namespaces, perNamespace, pods = 50, 200, 50
	api := benchAPI{byNamespace: map[string][]v1beta1.WebhookDestination{}}
	cache := newVerdictCache()
	for n := range namespaces {
		namespace, verdicts := fmt.Sprintf("team-%02d", n), verdictsByUID{}
		for i := range perNamespace {
			name := fmt.Sprintf("destination-%03d", i)
			uid := types.UID(namespace + name)
			api.byNamespace[namespace] = append(api.byNamespace[namespace], v1beta1.WebhookDestination{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: uid, Generation: 1, ResourceVersion: "1"},
				Spec:       v1beta1.WebhookDestinationSpec{Endpoints: []v1beta1.Endpoint{{Name: "primary", URL: "https://hooks.example/in"}}},
			})
			verdicts[uid] = generationVerdict{generation: 1,
				Verdict: compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "m", State: liveconfig.Active, Revision: "r"}}
		}
		cache.set(namespace, verdicts)
	}
	changes := &reportChanges{byNamespace: map[string]uint64{}}
	reports := newProber(nil, time.Second, nil, changes.add, func(Pod, bool) {})
	reports.listed = true
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	report := func(only string, delivered int64) *adminapi.Report {
		r := adminapi.Report{Ready: true, Delta: only != ""}
		for namespace := range api.byNamespace {
			if only != "" && only != namespace {
				continue
			}
			n := adminapi.NamespaceReport{Namespace: namespace}
			for i := range perNamespace {
				n.Destinations = append(n.Destinations, adminapi.DestinationReport{
					Name: fmt.Sprintf("destination-%03d", i), Generation: 1, Revision: "r",
					Ledger:    adminapi.Ledger{Accepted: delivered, Delivered: delivered},
					Endpoints: []adminapi.EndpointReport{{Name: "primary", State: adminapi.EndpointHealthy, LastSuccess: now}},
				})
			}
			r.Namespaces = append(r.Namespaces, n)
		}
		return &r
	}
	kind := kinds.All[slices.IndexFunc(kinds.All, func(k kinds.Kind) bool { return k.Health.Name == "WebhookDestination" })]
	r := &statusReconciler{
		Client: api, kinds: kinds.Table{kind}, verdicts: cache, reports: reports, changes: changes,
		events: &events.FakeRecorder{}, budget: newWriteBudget(), memos: map[string]map[types.UID]*memo{},
		now: func() time.Time { return now }, numbersInterval: 30 * time.Second,
	}
	passes := func() {
		for namespace := range api.byNamespace {
			if _, err := r.Reconcile(b.Context(), namespaceRequest(namespace)); err != nil {
				b.Fatal(err)
			}
		}
	}
	list := make([]Pod, pods)
	full, err := json.Marshal(report("", 1))
	if err != nil {
		b.Fatal(err)
	}
	decoded := func() *adminapi.Report {
		r := new(adminapi.Report)
		if err := json.Unmarshal(full, r); err != nil {
			b.Fatal(err)
		}
		return r
	}
	for i := range list {
		list[i] = Pod{Name: fmt.Sprintf("dispatcher-%02d", i)}
		reports.record(b.Context(), list[i], newProbe(reports, list[i], false), podreport.Changes{Report: decoded()}, nil)
	}
	states, _ := reports.reports()
	for namespace, objects := range api.byNamespace {
		verdicts, _ := cache.get(namespace)
		for i := range objects {
			_, latest := kind.Health.Next(&objects[i], verdicts[objects[i].UID].Verdict, namespace, states, now)
			objects[i] = *latest.(*v1beta1.WebhookDestination)
		}
	}
	passes()
	for _, memos := range r.memos {
		for _, m := range memos {
			m.numbersTime = now // No numbers are due.
		}
	}
	b.Run("successor", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			pod := &list[i%pods]
			delete(reports.probes, *pod)
			changes.add(reportChange{pods: true})
			passes()
			pod.URL = fmt.Sprint(i)
			reports.record(b.Context(), *pod, newProbe(reports, *pod, true), podreport.Changes{Report: decoded()}, nil)
			passes()
		}
	})
	b.Run("numbers", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			namespace, pod := fmt.Sprintf("team-%02d", i%namespaces), list[i%pods]
			reports.record(b.Context(), pod, reports.probes[pod], podreport.Changes{Report: report(namespace, int64(i+2))}, nil)
			if _, err := r.Reconcile(b.Context(), namespaceRequest(namespace)); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// benchAPI lists destinations and stores no status.
type benchAPI struct {
	client.Client
	byNamespace map[string][]v1beta1.WebhookDestination
}

func (a benchAPI) List(_ context.Context, list client.ObjectList, options ...client.ListOption) error {
	var o client.ListOptions
	o.ApplyOptions(options)
	list.(*v1beta1.WebhookDestinationList).Items = append([]v1beta1.WebhookDestination(nil), a.byNamespace[o.Namespace]...)
	return nil
}
