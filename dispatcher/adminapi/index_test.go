package adminapi

import (
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestMerge(t *testing.T) {
	namespace := func(name, revision string, destinations ...DestinationReport) NamespaceReport {
		return NamespaceReport{Namespace: name, Revision: revision, Destinations: destinations}
	}
	full := Report{Cursor: "1", Namespaces: []NamespaceReport{
		namespace("a", "1", DestinationReport{Name: "x", Revision: "1"}, DestinationReport{Name: "y", Revision: "1"}),
		namespace("b", "1"),
	}}
	removed := namespace("a", "2", DestinationReport{Name: "z", Revision: "2"})
	removed.Removed.Destinations = []string{"x"}
	complete := namespace("a", "2", DestinationReport{Name: "z", Revision: "2"})
	complete.Complete = true
	for _, test := range []struct {
		name    string
		report  Report
		want    Report
		changed []string
	}{
		{"an empty delta", Report{Cursor: "2", Delta: true, Ready: true}, Report{Cursor: "2", Ready: true, Namespaces: full.Namespaces}, nil},
		{
			"changed, added and removed objects", Report{Cursor: "2", Delta: true, Namespaces: []NamespaceReport{removed}},
			Report{Cursor: "2", Namespaces: []NamespaceReport{namespace("a", "2", DestinationReport{Name: "y", Revision: "1"}, DestinationReport{Name: "z", Revision: "2"}), full.Namespaces[1]}},
			[]string{"a"},
		},
		{
			"a complete namespace", Report{Cursor: "2", Delta: true, Namespaces: []NamespaceReport{complete}},
			Report{Cursor: "2", Namespaces: []NamespaceReport{namespace("a", "2", DestinationReport{Name: "z", Revision: "2"}), full.Namespaces[1]}},
			[]string{"a"},
		},
		{
			"added and removed namespaces", Report{Cursor: "2", Delta: true, Namespaces: []NamespaceReport{namespace("c", "1")}, RemovedNamespaces: []string{"a"}},
			Report{Cursor: "2", Namespaces: []NamespaceReport{full.Namespaces[1], namespace("c", "1")}},
			[]string{"a", "c"},
		},
		{"an equal full report", Report{Cursor: "2", Namespaces: full.Namespaces}, Report{Cursor: "2", Namespaces: full.Namespaces}, nil},
		{
			"another full report", Report{Cursor: "2", Namespaces: []NamespaceReport{full.Namespaces[0], namespace("c", "1")}},
			Report{Cursor: "2", Namespaces: []NamespaceReport{full.Namespaces[0], namespace("c", "1")}},
			[]string{"b", "c"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := NewIndex(full)
			got, changed := before.Merge(test.report, nil)
			if diff := cmp.Diff(NewIndex(test.want), got, cmp.AllowUnexported(Index{}), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("merged (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.changed, changed); diff != "" {
				t.Errorf("changed namespaces (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(NewIndex(full), before, cmp.AllowUnexported(Index{})); diff != "" {
				t.Errorf("the Index before the merge was changed (-want +got):\n%s", diff)
			}
		})
	}
}

// reportOf is a full report about destinations in one namespace, as a pod sends it.
func reportOf(tb testing.TB, destinations int, delivered int64) Report {
	tb.Helper()
	n := NamespaceReport{Namespace: "shop"}
	for i := range destinations {
		n.Destinations = append(n.Destinations, DestinationReport{
			Name: fmt.Sprintf("destination-%d", i), Generation: 1, Revision: strings.Repeat("a", 56) + fmt.Sprintf("%08d", i),
			Ledger:    Ledger{Accepted: delivered, Delivered: delivered},
			Endpoints: []EndpointReport{{Name: "primary", State: EndpointHealthy, LastSuccess: time.Unix(delivered, 0)}},
		})
	}
	text, err := json.Marshal(Report{Ready: true, Namespaces: []NamespaceReport{n}})
	if err != nil {
		tb.Fatal(err)
	}
	report, err := DecodeReport(text)
	if err != nil {
		tb.Fatal(err)
	}
	return report
}

// The states of several pods share the strings that are equal in them, also after deltas.
func TestSharedStrings(t *testing.T) {
	first := NewIndex(reportOf(t, 1, 1))
	second, _ := (*Index)(nil).Merge(reportOf(t, 1, 2), first)
	delta := reportOf(t, 1, 3)
	delta.Delta = true
	third, _ := second.Merge(delta, nil)
	want := first.Namespace("shop").Destinations["destination-0"]
	for name, index := range map[string]*Index{"full": second, "delta": third} {
		got := index.Namespace("shop").Destinations["destination-0"]
		if got == want || got.Delivered == want.Delivered {
			t.Errorf("%s: the reports are the same", name)
		}
		for field, s := range map[string][2]string{
			"name": {got.Name, want.Name}, "revision": {got.Revision, want.Revision},
			"endpoint": {got.Endpoints[0].Name, want.Endpoints[0].Name}, "state": {string(got.Endpoints[0].State), string(want.Endpoints[0].State)},
		} {
			if unsafe.StringData(s[0]) != unsafe.StringData(s[1]) {
				t.Errorf("%s: %s %q is a copy", name, field, s[0])
			}
		}
	}
}

// BenchmarkIndexMemory prints the bytes for each object and pod.
func BenchmarkIndexMemory(b *testing.B) {
	const pods, destinations = 20, 10_000
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for b.Loop() {
		before := heap()
		var all []*Index
		var like *Index
		for range pods {
			like, _ = (*Index)(nil).Merge(reportOf(b, destinations, 1), like)
			all = append(all, like)
		}
		b.ReportMetric(float64(heap()-before)/pods/destinations, "bytes/object")
		runtime.KeepAlive(all)
	}
}
