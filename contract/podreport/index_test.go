package podreport

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// everyField compares unexported fields, too.
var everyField = cmp.Exporter(func(reflect.Type) bool { return true })

func TestMerge(t *testing.T) {
	namespace := func(name, revision string, destinations ...adminapi.DestinationReport) adminapi.NamespaceReport {
		return adminapi.NamespaceReport{Namespace: name, Revision: revision, Destinations: destinations}
	}
	full := adminapi.Report{Cursor: "1", Namespaces: []adminapi.NamespaceReport{
		namespace("a", "1", adminapi.DestinationReport{Name: "x", Revision: "1"}, adminapi.DestinationReport{Name: "y", Revision: "1"}),
		namespace("b", "1"),
	}}
	removed := namespace("a", "2", adminapi.DestinationReport{Name: "z", Revision: "2"})
	removed.Removed.Destinations = []string{"x"}
	complete := namespace("a", "2", adminapi.DestinationReport{Name: "z", Revision: "2"})
	complete.Complete = true
	for _, test := range []struct {
		name    string
		report  adminapi.Report
		want    adminapi.Report
		changed []string
	}{
		{"an empty delta", adminapi.Report{Cursor: "2", Delta: true, Ready: true},
			adminapi.Report{Cursor: "2", Ready: true, Namespaces: full.Namespaces}, nil},
		{
			"changed, added and removed objects", adminapi.Report{Cursor: "2", Delta: true, Namespaces: []adminapi.NamespaceReport{removed}},
			adminapi.Report{Cursor: "2", Namespaces: []adminapi.NamespaceReport{namespace("a", "2",
				adminapi.DestinationReport{Name: "y", Revision: "1"}, adminapi.DestinationReport{Name: "z", Revision: "2"}), full.Namespaces[1]}},
			[]string{"a"},
		},
		{
			"a complete namespace", adminapi.Report{Cursor: "2", Delta: true, Namespaces: []adminapi.NamespaceReport{complete}},
			adminapi.Report{Cursor: "2", Namespaces: []adminapi.NamespaceReport{namespace("a", "2",
				adminapi.DestinationReport{Name: "z", Revision: "2"}), full.Namespaces[1]}},
			[]string{"a"},
		},
		{
			"added and removed namespaces", adminapi.Report{Cursor: "2", Delta: true, Namespaces: []adminapi.NamespaceReport{namespace("c", "1")}, RemovedNamespaces: []string{"a"}},
			adminapi.Report{Cursor: "2", Namespaces: []adminapi.NamespaceReport{full.Namespaces[1], namespace("c", "1")}},
			[]string{"a", "c"},
		},
		{"an equal full report", adminapi.Report{Cursor: "2", Namespaces: full.Namespaces},
			adminapi.Report{Cursor: "2", Namespaces: full.Namespaces}, nil},
		{
			"another full report", adminapi.Report{Cursor: "2", Namespaces: []adminapi.NamespaceReport{full.Namespaces[0], namespace("c", "1")}},
			adminapi.Report{Cursor: "2", Namespaces: []adminapi.NamespaceReport{full.Namespaces[0], namespace("c", "1")}},
			[]string{"b", "c"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := NewIndex(full)
			got, changed := before.Merge(test.report, nil)
			if diff := cmp.Diff(NewIndex(test.want), got, everyField, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("merged (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.changed, changed); diff != "" {
				t.Errorf("changed namespaces (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(NewIndex(full), before, everyField); diff != "" {
				t.Errorf("the Index before the merge was changed (-want +got):\n%s", diff)
			}
		})
	}
}

// Discards ahead are a change of their namespace, when they begin, have another time, and end. The number
// of their messages is a number.
func TestMergeOfDiscards(t *testing.T) {
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	report := func(discards ...adminapi.Discard) adminapi.Report {
		return adminapi.Report{Namespaces: []adminapi.NamespaceReport{{Namespace: "a"}, {Namespace: "b"}}, Configs: []adminapi.ConfigReport{
			{Namespace: "a", Number: 1, Discards: []adminapi.Discard{{Source: "web", Destination: "x", Messages: 1, At: at}}},
			{Namespace: "b", Number: 1, Discards: discards},
		}}
	}
	one := adminapi.Discard{Source: "web", Destination: "x", Messages: 7, At: at}
	empty, fewer, later, other := one, one, one, one
	empty.Messages, fewer.Messages, later.At, other.Source = 0, 3, at.Add(time.Second), "ios"
	for _, c := range []struct {
		name          string
		before, after adminapi.Report
		changed       []string
	}{
		{"none", report(), report(), nil},
		{"begin", report(), report(one), []string{"b"}},
		{"end", report(one), report(), []string{"b"}},
		{"equal", report(one), report(one), nil},
		{"fewer messages", report(one), report(fewer), nil},
		{"no messages at first", report(), report(empty), nil},
		{"the first message", report(empty), report(one), []string{"b"}},
		{"another time", report(one), report(later), []string{"b"}},
		{"another Source", report(one), report(one, other), []string{"b"}},
		{"the namespace has no config any more", report(one), adminapi.Report{Namespaces: report().Namespaces, Configs: report().Configs[:1]}, []string{"b"}},
	} {
		for _, delta := range []bool{false, true} {
			before, next := NewIndex(c.before), c.after
			if next.Delta = delta; delta {
				next.Namespaces = nil
			}
			after, changed := before.Merge(next, nil)
			if diff := cmp.Diff(c.changed, changed); diff != "" {
				t.Errorf("%s, delta %t: changed namespaces (-want +got):\n%s", c.name, delta, diff)
			}
			for _, namespace := range []string{"a", "b"} {
				if got, want := before.EqualExceptNumbers(after, namespace), !slices.Contains(c.changed, namespace); got != want {
					t.Errorf("%s, delta %t: namespace %s equal except for numbers: got %t, want %t", c.name, delta, namespace, got, want)
				}
			}
		}
	}
}

// reportOf is a full report about destinations in one namespace, as a pod sends it.
func reportOf(tb testing.TB, destinations int, delivered int64) adminapi.Report {
	tb.Helper()
	n := adminapi.NamespaceReport{Namespace: "shop"}
	for i := range destinations {
		n.Destinations = append(n.Destinations, adminapi.DestinationReport{
			Name: fmt.Sprintf("destination-%d", i), Generation: 1, Revision: strings.Repeat("a", 56) + fmt.Sprintf("%08d", i),
			Ledger:    adminapi.Ledger{Accepted: delivered, Delivered: delivered},
			Endpoints: []adminapi.EndpointReport{{Name: "primary", State: adminapi.EndpointHealthy, LastSuccess: time.Unix(delivered, 0)}},
		})
	}
	text, err := json.Marshal(adminapi.Report{Ready: true, Namespaces: []adminapi.NamespaceReport{n}})
	if err != nil {
		tb.Fatal(err)
	}
	var report adminapi.Report
	if err := json.Unmarshal(text, &report); err != nil {
		tb.Fatal(err)
	}
	return report
}

// The states of several dispatchers share the part of a report that is equal in them, also after deltas.
func TestSharedConfig(t *testing.T) {
	first := NewIndex(reportOf(t, 1, 1))
	second, _ := (*Index)(nil).Merge(reportOf(t, 1, 2), first)
	delta := reportOf(t, 1, 3)
	delta.Delta = true
	third, _ := second.Merge(delta, nil)
	config := func(x *Index) *destinationConfig {
		return x.Namespace("shop").destinations.find("destination-0").destinationConfig
	}
	if config(second) != config(first) || config(third) != config(first) {
		t.Error("equal configs are copies")
	}
	for want, x := range map[int64]*Index{1: first, 2: second, 3: third} {
		var d adminapi.DestinationReport
		if x.Namespace("shop").ReadDestination("destination-0", &d); d.Delivered != want {
			t.Errorf("delivered: got %d, want %d", d.Delivered, want)
		}
	}
	other := reportOf(t, 1, 4)
	other.Namespaces[0].Destinations[0].Endpoints[0].Name = "other"
	fourth, _ := (*Index)(nil).Merge(other, third)
	if config(fourth) == config(first) {
		t.Error("reports with different endpoints share their config")
	}
}

// random fills a value; about half of the fields remain zero.
func random(r *rand.Rand, v reflect.Value) {
	if r.IntN(2) == 0 && v.Kind() != reflect.Struct {
		return
	}
	switch v.Kind() {
	case reflect.Int, reflect.Int64:
		v.SetInt(r.Int64N(1e9))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString(fmt.Sprint("text", r.IntN(4)))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		random(r, v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), r.IntN(4), 4))
		for i := range v.Len() {
			random(r, v.Index(i))
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			if r.IntN(2) == 0 {
				v.Set(reflect.ValueOf(time.Unix(r.Int64N(2e9), r.Int64N(1e9)).UTC()))
			}
			return
		}
		for i := range v.NumField() {
			random(r, v.Field(i))
		}
	default:
		panic("unknown kind " + v.Kind().String())
	}
}

// Every field of a report about a destination is read as it was reported, after any sequence of deltas.
func TestRandomDestinations(t *testing.T) {
	r := rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano())))
	want := map[string]adminapi.DestinationReport{}
	x, like := NewIndex(adminapi.Report{}), NewIndex(adminapi.Report{})
	for round := range 300 {
		if r.IntN(50) == 0 {
			want, x = map[string]adminapi.DestinationReport{}, NewIndex(adminapi.Report{})
		}
		changes := map[string]adminapi.DestinationReport{}
		for range r.IntN(4) {
			var d adminapi.DestinationReport
			random(r, reflect.ValueOf(&d).Elem())
			if r.IntN(2) == 0 && len(d.Endpoints) > 0 {
				d.Endpoints[0].State = endpointStates[r.IntN(len(endpointStates))]
			}
			d.Name = fmt.Sprint("d", r.IntN(20))
			changes[d.Name] = d
		}
		n := adminapi.NamespaceReport{Namespace: "shop"}
		for name, d := range changes {
			n.Destinations = append(n.Destinations, d)
			want[name] = d
		}
		for name := range want {
			if _, changed := changes[name]; !changed && r.IntN(10) == 0 {
				n.Removed.Destinations = append(n.Removed.Destinations, name)
				delete(want, name)
			}
		}
		next, _ := x.Merge(adminapi.Report{Delta: true, Namespaces: []adminapi.NamespaceReport{n}}, like)
		x, like = next, x
		got := map[string]adminapi.DestinationReport{}
		for read := range x.Namespace("shop").Destinations() {
			var d adminapi.DestinationReport
			if !x.Namespace("shop").ReadDestination(read.Name, &d) {
				t.Fatalf("round %d: no report about %s", round, read.Name)
			}
			if diff := cmp.Diff(&d, read, cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("round %d: report of the list (-want +got):\n%s", round, diff)
			}
			got[d.Name] = d
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("round %d: reports (-want +got):\n%s", round, diff)
		}
	}
	if x.Namespace("shop").ReadDestination("none", nil) || (*NamespaceIndex)(nil).ReadDestination("d1", nil) {
		t.Error("a destination without a report has one")
	}
}

// BenchmarkIndexMemory prints the bytes for each object and pod.
func BenchmarkIndexMemory(b *testing.B) {
	const pods, destinations = 20, 10_000
	heap := func() uint64 {
		var m runtime.MemStats
		for range 2 { // The first one leaves the buffers of pools.
			runtime.GC()
		}
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

// BenchmarkMerge merges a delta with 10 of 200 destinations in each of 50 namespaces.
func BenchmarkMerge(b *testing.B) {
	full := reportOf(b, 200, 1).Namespaces[0]
	var all, delta adminapi.Report
	delta.Delta = true
	for i := range 50 {
		n := full
		n.Namespace = fmt.Sprint("n", i)
		n.Destinations = append([]adminapi.DestinationReport(nil), full.Destinations...)
		all.Namespaces = append(all.Namespaces, n)
		n.Destinations = full.Destinations[90:100]
		delta.Namespaces = append(delta.Namespaces, n)
	}
	x := NewIndex(all)
	b.ReportAllocs()
	for b.Loop() {
		x, _ = x.Merge(delta, nil)
	}
}
