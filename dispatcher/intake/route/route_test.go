package route

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

func parse(t testing.TB, typ event.Type, body string) *event.Call {
	t.Helper()
	batch, err := event.Request{Type: typ, ReceivedAt: time.Unix(1, 0)}.Parse([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	return &batch.Calls[0]
}

func TestSkip(t *testing.T) {
	c := liveconfig.Config{Namespace: "shop", Destinations: []liveconfig.Destination{
		{Name: "all", Sources: []string{"web", "ios"}},
		{Name: "tracks", Sources: []string{"web"}, Filter: &liveconfig.Filter{Types: []string{"track", "page"}}},
		{Name: "orders", Sources: []string{"web"}, Filter: &liveconfig.Filter{Events: []string{"Order *", "Refund"}}},
		{Name: "big", Sources: []string{"web"}, Filter: &liveconfig.Filter{Expression: "call.properties.total > 100"}},
		{Name: "other", Sources: []string{"android"}, Filter: &liveconfig.Filter{Types: []string{"group"}}},
	}}
	r, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		source string
		typ    event.Type
		body   string
		want   []string
	}{
		"passes everything": {"web", event.Track, `{"userId":"u","event":"Order Done","properties":{"total":101}}`, nil},
		"another source":    {"ios", event.Group, `{"userId":"u","groupId":"g"}`, nil},
		"event and amount": {"web", event.Track, `{"userId":"u","event":"Signed Up","properties":{"total":1}}`,
			[]string{"shop/orders", "shop/big"}},
		"events: track only": {"web", event.Page, `{"userId":"u","properties":{"total":101}}`, []string{"shop/orders"}},
		"type, field absent": {"web", event.Identify, `{"userId":"u"}`, []string{"shop/tracks", "shop/orders", "shop/big"}},
		"all off":            {"ios", event.Identify, `{"userId":"u","integrations":{"All":false}}`, []string{"shop/all"}},
		"all off, named":     {"ios", event.Identify, `{"userId":"u","integrations":{"All":false,"Webhooks":true}}`, nil},
		"case counts":        {"ios", event.Identify, `{"userId":"u","integrations":{"All":false,"webhooks":true}}`, []string{"shop/all"}},
		"own name wins":      {"ios", event.Identify, `{"userId":"u","integrations":{"Webhooks":true,"all":false}}`, []string{"shop/all"}},
		"object is on":       {"ios", event.Identify, `{"userId":"u","integrations":{"All":false,"Webhooks":{"x":1}}}`, nil},
		"unknown source":     {"nobody", event.Identify, `{"userId":"u"}`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, skipOf(r, tc.source, parse(t, tc.typ, tc.body))); diff != "" {
				t.Error(diff)
			}
		})
	}
	if len(r.bySource["web"]) != 4 || len(r.bySource["nobody"]) != 0 {
		t.Errorf("%d and %d destinations", len(r.bySource["web"]), len(r.bySource["nobody"]))
	}
}

func TestABadExpressionHarmsNobodyElse(t *testing.T) {
	c := liveconfig.Config{Namespace: "shop", Destinations: []liveconfig.Destination{
		{Name: "paused", State: liveconfig.Paused, Sources: []string{"web"}, Filter: &liveconfig.Filter{Expression: "call.("}},
		{Name: "ok", State: liveconfig.Active, Sources: []string{"web"}},
	}}
	r, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	failed := []string{queue.FilterFailed("shop/paused", "the filter was not valid when the call was accepted")}
	call := parse(t, event.Identify, `{"userId":"u"}`)
	if diff := cmp.Diff(failed, skipOf(r, "web", call)); diff != "" {
		t.Errorf("destinations that do not get the call (-want +got):\n%s", diff)
	}
	// The controllers leave out what is not valid.
	c.Destinations[0].Filter = &liveconfig.Filter{Invalid: true, Types: []string{"identify"}}
	if r, err = New(c); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(failed, skipOf(r, "web", call)); diff != "" {
		t.Errorf("with types: destinations that do not get the call (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"shop/paused"}, skipOf(r, "web", parse(t, event.Page, `{"userId":"u"}`))); diff != "" {
		t.Errorf("of another type: destinations that do not get the call (-want +got):\n%s", diff)
	}
	c.Destinations[0].Filter = &liveconfig.Filter{Expression: "call.("}
	c.Destinations[0].State = liveconfig.Active
	if _, err := New(c); err == nil || !strings.Contains(err.Error(), `"paused"`) {
		t.Errorf("error %v does not name the destination", err)
	}
}

// The next Router compiles only new expressions, and keeps only those that it uses.
func TestNext(t *testing.T) {
	config := func(expressions ...string) liveconfig.Config {
		c := liveconfig.Config{Namespace: "shop"}
		for i, e := range expressions {
			c.Destinations = append(c.Destinations, liveconfig.Destination{Name: string(rune('a' + i)), State: liveconfig.Active,
				Sources: []string{"web"}, Filter: &liveconfig.Filter{Expression: e}})
		}
		return c
	}
	first, err := New(config("call.userId == 'u'", "call.userId == 'v'"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := first.Next(config("call.userId == 'w'", "call.userId == 'u'"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"shop/a"}, skipOf(second, "web", parse(t, event.Identify, `{"userId":"u"}`))); diff != "" {
		t.Errorf("destinations that do not get the call (-want +got):\n%s", diff)
	}
	if second.programs["call.userId == 'u'"] != first.programs["call.userId == 'u'"] {
		t.Error("an expression of the Router before: got a new program, want the same")
	}
	if len(second.programs) != 2 {
		t.Errorf("programs: got %d, want the 2 of the config", len(second.programs))
	}
	if _, err := second.Next(config("call.(")); err == nil || !strings.Contains(err.Error(), `destination "a": filter.expression`) {
		t.Errorf("an expression that does not compile: got error %v, want one with the destination", err)
	}
}

func TestNothingSkippedAllocatesNothing(t *testing.T) {
	r, err := New(liveconfig.Config{Namespace: "shop", Destinations: []liveconfig.Destination{
		{Name: "a", Sources: []string{"web"}},
		{Name: "b", Sources: []string{"web"}, Filter: &liveconfig.Filter{Types: []string{"page", "track"}, Events: []string{"Refund", "O*r D*"}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	call := parse(t, event.Track, `{"userId":"u","event":"Order Done","integrations":{"All":true,"b":{"x":1}}}`)
	if n := testing.AllocsPerRun(100, func() {
		if skipOf(r, "web", call) != nil {
			t.Error("skipped")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestEveryExpressionIsAsked(t *testing.T) {
	r, err := New(liveconfig.Config{Namespace: "shop", Destinations: []liveconfig.Destination{
		{Name: "a", Sources: []string{"web"}, Filter: &liveconfig.Filter{Expression: "call.properties.total > 100"}},
		{Name: "b", Sources: []string{"web"}, Filter: &liveconfig.Filter{Expression: "call.properties.total > 10"}},
		{Name: "c", Sources: []string{"web"}, Filter: &liveconfig.Filter{Expression: "call.properties.nothing > 10"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"shop/a", "shop/c"}
	if diff := cmp.Diff(want, skipOf(r, "web", parse(t, event.Track, `{"userId":"u","event":"E","properties":{"total":50.5}}`))); diff != "" {
		t.Error(diff)
	}
}

// An expression gets long numbers in the destination's form.
func TestExpressionSeesTheDeliveredNumbers(t *testing.T) {
	expression := &liveconfig.Filter{Expression: `call.properties.id == "12345678901234567890"`}
	number := &liveconfig.Filter{Expression: `call.properties.id > 1e19`}
	r, err := New(liveconfig.Config{Namespace: "shop", Destinations: []liveconfig.Destination{
		{Name: "string", Sources: []string{"web"}, Filter: expression},
		{Name: "exact", Sources: []string{"web"}, Filter: expression, ExactNumbers: true},
		{Name: "string-number", Sources: []string{"web"}, Filter: number},
		{Name: "exact-number", Sources: []string{"web"}, Filter: number, ExactNumbers: true},
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"shop/exact", "shop/string-number"}
	if diff := cmp.Diff(want, skipOf(r, "web", parse(t, event.Track, `{"userId":"u","event":"E","properties":{"id":12345678901234567890}}`))); diff != "" {
		t.Errorf("skipped (-want +got):\n%s", diff)
	}
}

func BenchmarkSkipNothing(b *testing.B) {
	r, err := New(liveconfig.Config{Namespace: "shop",
		Destinations: []liveconfig.Destination{{Name: "a", Sources: []string{"web"}},
			{Name: "b", Sources: []string{"web"}, Filter: &liveconfig.Filter{Types: []string{"track"}, Events: []string{"Order *"}}}}})
	if err != nil {
		b.Fatal(err)
	}
	call := parse(b, event.Track, `{"userId":"u","event":"Order Done","integrations":{"All":true}}`)
	b.ReportAllocs()
	for b.Loop() {
		if skipOf(r, "web", call) != nil {
			b.Fatal("skipped")
		}
	}
}

func TestKeep(t *testing.T) {
	only := &liveconfig.Filter{Types: []string{"page"}}
	router := func(destinations ...liveconfig.Destination) *Router {
		r, err := New(liveconfig.Config{Namespace: "shop", Destinations: destinations})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	skips := func(r *Router, source string) []string {
		return skipOf(r, source, parse(t, event.Track, `{"userId":"u","event":"E"}`))
	}
	at := time.Unix(1000, 0)
	first := router(liveconfig.Destination{Name: "crm", Sources: []string{"web", "ios"}, Filter: only},
		liveconfig.Destination{Name: "old", Sources: []string{"web"}, Filter: only})
	second := router(liveconfig.Destination{Name: "crm", Sources: []string{"web"}})
	second.Keep(first, at, time.Minute)
	if diff := cmp.Diff([]string{"shop/old"}, skips(second, "web")); diff != "" {
		t.Errorf("a removed destination, beside one with a changed filter: %s", diff)
	}
	if diff := cmp.Diff([]string{"shop/crm"}, skips(second, "ios")); diff != "" {
		t.Errorf("one that was disconnected: %s", diff)
	}
	third := router()
	third.Keep(second, at.Add(time.Minute), time.Minute)
	if got := skips(third, "ios"); got != nil {
		t.Errorf("after the grace %v are still asked", got)
	}
	if got := len(third.bySource["web"]); got != 1 {
		t.Errorf("%d destinations of web are asked, want the one that went last", got)
	}
}

func skipOf(r *Router, source string, call *event.Call) []string {
	skip, _ := r.Skip(source, call)
	return skip
}

// Every destination and every filter has a cost, in units that do not depend on the machine.
func TestTheCostOfFilters(t *testing.T) {
	long := `{"userId":"u","event":"E","properties":{"x":"` + strings.Repeat("x", 9_000) + `"}}`
	for name, c := range map[string]struct {
		filter    liveconfig.Filter
		body      string
		min, most int
	}{
		"types":         {liveconfig.Filter{Types: []string{"page"}}, long, 100, 100},
		"events":        {liveconfig.Filter{Events: slices.Repeat([]string{"A*B"}, 40)}, long, 1_100, 1_100},
		"an expression": {liveconfig.Filter{Expression: "call.userId == 'v'"}, `{"userId":"u","event":"E"}`, 300, 800},
		"a long call":   {liveconfig.Filter{Expression: "call.userId == 'v'"}, long, 1_200, 1_700},
		"a long search": {liveconfig.Filter{Expression: "call.properties.x.contains('y')"}, long, 9_000, 12_000},
		"a pattern":     {liveconfig.Filter{Expression: "call.properties.x.matches('[xz]{150}y')"}, long, 90_000, 120_000},
	} {
		config := liveconfig.Config{Namespace: "shop"}
		for i := range 100 {
			config.Destinations = append(config.Destinations,
				liveconfig.Destination{Name: fmt.Sprint("d", i), State: liveconfig.Active, Sources: []string{"web"}, Filter: &c.filter})
		}
		r, err := New(config)
		if err != nil {
			t.Fatal(err)
		}
		if skip, units := r.Skip("web", parse(t, event.Track, c.body)); len(skip) != 100 || units < c.min || units > c.most {
			t.Errorf("%s: got %d destinations that do not get the call, and %d units; want 100, and %d to %d", name, len(skip), units, c.min, c.most)
		}
	}
}
