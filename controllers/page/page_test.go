package page

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/why"
)

func TestDenied(t *testing.T) {
	for _, c := range []struct {
		host, remote, site string
		want               int
	}{
		{"127.0.0.1:8081", "127.0.0.1:5", "", http.StatusOK},
		{"localhost", "[::1]:5", "same-origin", http.StatusOK},
		{"[::1]:8081", "[::ffff:127.0.0.1]:5", "none", http.StatusOK},
		{"posthorn.example", "127.0.0.1:5", "", http.StatusForbidden},
		{"localhost.attacker.example", "127.0.0.1:5", "", http.StatusForbidden},
		{"10.0.0.7:8081", "127.0.0.1:5", "", http.StatusForbidden},
		{"127.0.0.1:8081", "10.0.0.8:5", "", http.StatusForbidden},
		{"127.0.0.1:8081", "127.0.0.1:5", "cross-site", http.StatusForbidden},
	} {
		r := httptest.NewRequest(http.MethodGet, "/page/style.css", nil)
		r.Host, r.RemoteAddr = c.host, c.remote
		r.Header.Set("Sec-Fetch-Site", c.site)
		w := httptest.NewRecorder()
		New(Options{}).ServeHTTP(w, r)
		if w.Code != c.want {
			t.Errorf("Host %q from %s, site %q: got %d, want %d", c.host, c.remote, c.site, w.Code, c.want)
		}
	}
}

func TestShownConfig(t *testing.T) {
	spec := v1beta1.WebhookDestinationSpec{Endpoints: []v1beta1.Endpoint{{
		Name: "a", URL: "https://user:password@hooks.example/path-token/in?token=query#part",
		Headers: []v1beta1.Header{{Name: "X-Token", Value: ptr.To("value")}},
	}}}
	text, err := shownConfig(spec)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"user", "password", "path-token", "query", "part", "value: value"} {
		if strings.Contains(text, secret) {
			t.Errorf("the config shows %q:\n%s", secret, text)
		}
	}
	if want := "https://hooks.example/(hidden)"; !strings.Contains(text, want) {
		t.Errorf("the config lacks %q:\n%s", want, text)
	}
	if got := *spec.Endpoints[0].Headers[0].Value; got != "value" {
		t.Errorf("header of the input: got %q, want it unchanged", got)
	}
}

// A Source without calls is one notice of a new installation, not a problem, and always of the same
// destination.
func TestIdleSourceIsANotice(t *testing.T) {
	v := view{indices: map[string]*podreport.Index{"a": podreport.NewIndex(adminapi.Report{Ready: true})},
		destinations: map[key]*v1beta1.WebhookDestination{}}
	v.sources = map[string][]v1beta1.Source{"shop": {{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "shop"}}}}
	for i := range 20 {
		d := &v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("d%02d", i), Namespace: "shop"}}
		d.Spec.SourceRefs = []v1beta1.SourceReference{{Name: "web"}}
		d.Status.Conditions = []metav1.Condition{{Type: v1beta1.ConditionAccepted, Status: metav1.ConditionTrue}}
		v.destinations[key{"shop", d.Name}] = d
	}
	o := New(Options{}).newOverview(v, "")
	if len(o.Problems) != 0 {
		t.Errorf("problems: got %+v, want none", o.Problems)
	}
	if len(o.Notices) != 1 || o.Notices[0].Object != "shop/d00" || !strings.Contains(o.Notices[0].Text, "no call has ever been accepted") {
		t.Errorf("notices: got %+v, want one, of shop/d00", o.Notices)
	}
	if o.Rows[0].State != "notice" {
		t.Errorf("state of a row: got %q, want notice", o.Rows[0].State)
	}
}

// A table shows the first lines of a state, so the cause is there.
func TestStateBeginsWithTheReason(t *testing.T) {
	now := time.Unix(1800000000, 0)
	for _, c := range []struct {
		finding why.Finding
		want    string
	}{
		{why.Finding{Reason: v1beta1.ReasonRejected, StatusCode: 404, Since: now.Add(-11 * time.Minute), Text: "circuit breaker is open"},
			"Rejected 404 for 11 min: circuit breaker is open"},
		{why.Finding{Reason: v1beta1.ReasonConnectionRefused, Text: "deliveries fail"}, "ConnectionRefused: deliveries fail"},
		{why.Finding{Text: "no Source"}, "no Source"},
	} {
		if got := shortly(c.finding, now); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

// Many failing destinations are a line each, a few are explained.
func TestManyProblemsAreBrief(t *testing.T) {
	for _, n := range []int{longList - 1, longList} {
		list := slices.Repeat([]problem{{Object: "shop/crm", Text: "circuit breaker is open", Brief: "Rejected 404"}}, n)
		explainFew(list)
		for _, p := range list {
			if brief := p.Brief != ""; brief != (n >= longList) {
				t.Errorf("%d problems: got brief %v, want %v", n, brief, n >= longList)
			}
		}
	}
}

// The counts of a Source and a destination before their first sample are not growth.
func TestHistoryOfANewcomer(t *testing.T) {
	h := newHistory()
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	reports := []adminapi.Report{{}}
	for _, n := range []int64{1_000_000, 1_000_003} {
		reports = append(reports, adminapi.Report{Namespaces: []adminapi.NamespaceReport{{
			Namespace: "shop", Sources: []adminapi.SourceReport{{Name: "web", Accepted: n}},
			Destinations: []adminapi.DestinationReport{{Name: "crm", Ledger: adminapi.Ledger{Accepted: n, Delivered: n}}},
		}}})
	}
	for i, r := range reports {
		h.sample(view{now: at.Add(time.Duration(i) * interval), indices: map[string]*podreport.Index{"a": podreport.NewIndex(r)}})
	}
	want := []point{{}, {accepted: 3, delivered: 3}}
	if d := cmp.Diff(want, h.total.list(), cmp.AllowUnexported(point{})); d != "" {
		t.Errorf("past of all (-want +got):\n%s", d)
	}
	if d := cmp.Diff(want, h.series[key{"shop", "crm"}].list(), cmp.AllowUnexported(point{})); d != "" {
		t.Errorf("past of the destination (-want +got):\n%s", d)
	}
}

// The past has at most maxSeries destinations, those with trouble first, and 60 minutes of each.
func TestHistoryIsBounded(t *testing.T) {
	h := newHistory()
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	const destinations = maxSeries + 50
	for i := range points + 10 {
		r := adminapi.NamespaceReport{Namespace: "shop"}
		for d := range destinations {
			report := adminapi.DestinationReport{Name: "d" + num(d), Ledger: adminapi.Ledger{Delivered: int64(i * d)}}
			if d == 0 {
				report.Ledger, report.Retrying = adminapi.Ledger{}, 1
			}
			r.Destinations = append(r.Destinations, report)
		}
		x := podreport.NewIndex(adminapi.Report{Namespaces: []adminapi.NamespaceReport{r}})
		h.sample(view{now: at.Add(time.Duration(i) * interval), indices: map[string]*podreport.Index{"a": x}})
	}
	if got := len(h.series); got != maxSeries {
		t.Errorf("destinations with a past: got %d, want %d", got, maxSeries)
	}
	for name, want := range map[string]bool{"d0": true, "d1": false, "d249": true} {
		if got := h.series[key{"shop", name}] != nil; got != want {
			t.Errorf("%s has a past: got %v, want %v", name, got, want)
		}
	}
	if got := len(h.total.list()); got != points {
		t.Errorf("points: got %d, want %d", got, points)
	}
	if got := h.series[key{"shop", "d249"}].list()[points-1].delivered; got != 249 {
		t.Errorf("delivered in the last interval: got %d, want 249", got)
	}
	if got, want := rate(h.series[key{"shop", "d249"}].list(), delivered), "16/s"; got != want {
		t.Errorf("rate: got %s, want %s", got, want)
	}
}

// Many tabs with dead letters cost one read, and an open read keeps a second one waiting.
func TestDeadLettersAreReadOnce(t *testing.T) {
	var reads, reading, most atomic.Int64
	dispatcher := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		reads.Add(1)
		if n := reading.Add(1); n > most.Load() {
			most.Store(n)
		}
		defer reading.Add(-1)
		_ = json.NewEncoder(w).Encode(adminapi.DeadLetter{Key: "k", MessageID: "m", Reason: "Rejected", FailedAt: time.Unix(0, 0)})
	}))
	t.Cleanup(dispatcher.Close)
	p := New(Options{Dispatchers: dispatchers(dispatcher.URL)})
	crm := key{"shop", "crm"}
	v := view{
		destinations: map[key]*v1beta1.WebhookDestination{crm: {}},
		indices: map[string]*podreport.Index{"a": podreport.NewIndex(adminapi.Report{Namespaces: []adminapi.NamespaceReport{{
			Namespace: "shop", Destinations: []adminapi.DestinationReport{{Name: "crm", DeadLettersStored: 1}},
		}}})},
	}
	var tabs sync.WaitGroup
	for range 20 {
		tabs.Go(func() {
			if g, err := p.groups(t.Context(), v); err != nil || len(g.Groups) != 1 || g.Total != 1 {
				t.Errorf("groups: got %+v, %v, want one group of one dead letter", g, err)
			}
		})
	}
	tabs.Wait()
	if got := reads.Load(); got != 1 {
		t.Errorf("reads of 20 tabs: got %d, want 1", got)
	}
	p.lastGroups.at = p.lastGroups.at.Add(-groupsAge)
	if _, err := p.groups(t.Context(), v); err != nil || reads.Load() != 2 {
		t.Errorf("reads after %s: got %d, %v, want 2", groupsAge, reads.Load(), err)
	}
	done, err := p.readLetters(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p.lastGroups.at = p.lastGroups.at.Add(-groupsAge)
	if _, err := p.groups(ctx, v); err == nil || !strings.Contains(err.Error(), "another view") {
		t.Errorf("groups during another read: got %v, want an error about the other view", err)
	}
	done()
	if got := most.Load(); got != 1 {
		t.Errorf("reads at the same time: got %d, want 1", got)
	}
}

// dispatchers are the connected pods "a", "b" and so on.
func dispatchers(urls ...string) func() (map[string]*adminapi.Client, error) {
	clients := map[string]*adminapi.Client{}
	for i, u := range urls {
		clients[string(rune('a'+i))] = &adminapi.Client{URL: u}
	}
	return func() (map[string]*adminapi.Client, error) { return clients, nil }
}

// A key admits the first browser that opens the link, and only that one.
func TestAccess(t *testing.T) {
	p := New(Options{Key: "secret"})
	get := func(path string, cookies ...*http.Cookie) *http.Response {
		r := httptest.NewRequest(http.MethodGet, path, nil)
		r.Host, r.RemoteAddr = "127.0.0.1:8090", "127.0.0.1:5"
		for _, c := range cookies {
			r.AddCookie(c)
		}
		w := httptest.NewRecorder()
		p.ServeHTTP(w, r)
		return w.Result()
	}
	for _, path := range []string{"/page/style.css", "/?key=", "/?key=wrong", "/page/style.css?key=secret"} {
		if got := get(path); got.StatusCode != http.StatusForbidden || len(got.Cookies()) > 0 {
			t.Errorf("%s without a cookie: got %d and %d cookies, want 403 and none", path, got.StatusCode, len(got.Cookies()))
		}
	}
	first := get("/?key=secret")
	if first.StatusCode != http.StatusSeeOther || first.Header.Get("Location") != "/" || len(first.Cookies()) != 1 {
		t.Fatalf("first use of the link: got %d to %q with %d cookies, want 303 to / with 1", first.StatusCode, first.Header.Get("Location"), len(first.Cookies()))
	}
	cookie := first.Cookies()[0]
	if !cookie.HttpOnly || cookie.SameSite != http.SameSiteStrictMode || cookie.Value == "secret" {
		t.Errorf("cookie: got %v, want HttpOnly, SameSite=Strict, and another value than the key", cookie)
	}
	for path, want := range map[string]int{"/page/style.css": http.StatusOK, "/?key=secret": http.StatusSeeOther} {
		if got := get(path, cookie); got.StatusCode != want {
			t.Errorf("%s with the cookie: got %d, want %d", path, got.StatusCode, want)
		}
	}
	if got := get("/?key=secret"); got.StatusCode != http.StatusForbidden || len(got.Cookies()) > 0 {
		t.Errorf("second use of the link: got %d, want 403", got.StatusCode)
	}
	if got := get("/page/style.css", &http.Cookie{Name: cookie.Name, Value: "other"}); got.StatusCode != http.StatusForbidden {
		t.Errorf("wrong cookie: got %d, want 403", got.StatusCode)
	}
}

// A page of one namespace shows nothing of others, and what it can while a dispatcher fails.
func TestOneNamespace(t *testing.T) {
	dispatcher := func(failing bool) string {
		mux := http.NewServeMux()
		mux.HandleFunc("GET /report", func(w http.ResponseWriter, _ *http.Request) {
			report := adminapi.Report{Ready: true}
			for _, namespace := range []string{"shop", "bank"} {
				report.Namespaces = append(report.Namespaces, adminapi.NamespaceReport{
					Namespace: namespace, Sources: []adminapi.SourceReport{{Name: "web", Accepted: 7001}},
					Destinations: []adminapi.DestinationReport{{Name: "crm-of-" + namespace, DeadLettersStored: 1}},
				})
			}
			_ = json.NewEncoder(w).Encode(report)
		})
		mux.HandleFunc("GET /keys/unknown", func(http.ResponseWriter, *http.Request) {})
		mux.HandleFunc("GET /attempts", func(w http.ResponseWriter, r *http.Request) {
			if failing {
				http.Error(w, "out of order", http.StatusInternalServerError)
				return
			}
			_ = json.NewEncoder(w).Encode(adminapi.Attempt{Destination: r.FormValue("destination"), MessageID: "m-1", StatusCode: 200})
		})
		mux.HandleFunc("GET /trace", func(w http.ResponseWriter, r *http.Request) {
			if failing {
				http.Error(w, "out of order", http.StatusInternalServerError)
				return
			}
			id := r.FormValue("id")
			_ = json.NewEncoder(w).Encode(adminapi.MessageTrace{
				MessageID: event.ID(id), Accepted: []adminapi.AcceptedMessage{{Source: "shop/web", Stored: true, Type: "page",
					Destinations: []adminapi.MessageAtEndpoint{{Destination: "shop/crm-of-shop", State: adminapi.MessageFiltered}}}, {Source: "bank/web"}},
				Attempts: []adminapi.Attempt{{Destination: "bank/crm-of-bank", MessageID: event.ID(id)},
					{Destination: "shop/crm-of-shop", MessageID: event.ID(id)}},
				DeadLetters: []adminapi.DeadLetter{{Destination: "bank/crm-of-bank", MessageID: event.ID(id)}},
			})
		})
		mux.HandleFunc("GET /deadletters", func(w http.ResponseWriter, _ *http.Request) {
			if failing {
				http.Error(w, "out of order", http.StatusInternalServerError)
				return
			}
			_ = json.NewEncoder(w).Encode(adminapi.DeadLetter{Key: "k", MessageID: "m", Reason: "Rejected", FailedAt: time.Unix(0, 0)})
		})
		mux.HandleFunc("GET /tail", func(w http.ResponseWriter, _ *http.Request) {
			for _, name := range []string{"bank/crm-of-bank", "shop/crm-of-shop"} {
				_ = json.NewEncoder(w).Encode(adminapi.Attempt{Destination: name, MessageID: "m-1"})
			}
		})
		server := httptest.NewServer(mux)
		t.Cleanup(server.Close)
		return server.URL
	}
	objects := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.URL.Path, "/namespaces/shop/") {
			http.Error(w, "forbidden", http.StatusForbidden)
			return
		}
		list := v1beta1.WebhookDestinationList{}
		if strings.HasSuffix(r.URL.Path, "/webhookdestinations") {
			d := v1beta1.WebhookDestination{}
			d.Namespace, d.Name = "shop", "crm-of-shop"
			list.Items = append(list.Items, d)
		}
		_ = json.NewEncoder(w).Encode(list)
	}))
	t.Cleanup(objects.Close)
	p := New(Options{Objects: &adminapi.Client{URL: objects.URL}, Namespace: "shop", Dispatchers: dispatchers(dispatcher(false), dispatcher(true)), Command: "kubectl posthorn"})
	for path, want := range map[string]struct {
		code  int
		texts []string
	}{
		"/":                                  {http.StatusOK, []string{"crm-of-shop", "14,002"}},
		"/page/destination/shop/crm-of-shop": {http.StatusOK, []string{"m-1", "Not complete: attempts of dispatcher b"}},
		"/page/destination/bank/crm-of-bank": {http.StatusNotFound, []string{"namespace shop only"}},
		"/page/deadletters":                  {http.StatusOK, []string{"crm-of-shop", "dead letters of dispatcher b", "Rejected"}},
		"/page/search?id=m-1":                {http.StatusOK, []string{"crm-of-shop", "dispatcher b", "Filtered", "accepted by Source shop/web"}},
		"/page/search?id=$(touch+it%27s)":    {http.StatusOK, []string{"kubectl posthorn trace --since 6h -- &#39;$(touch it&#39;\\&#39;&#39;s)&#39;</code>"}},
		"/page/tail":                         {http.StatusOK, []string{"crm-of-shop"}},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		r := httptest.NewRequest(http.MethodGet, path, nil).WithContext(ctx)
		r.Host, r.RemoteAddr = "127.0.0.1:8090", "127.0.0.1:5"
		w := &watched{ResponseRecorder: httptest.NewRecorder(), cancel: cancel, until: "m-1</a>"}
		p.ServeHTTP(w, r)
		cancel()
		if w.Code != want.code {
			t.Errorf("%s: got %d, want %d", path, w.Code, want.code)
		}
		for _, text := range want.texts {
			if !strings.Contains(w.Body.String(), text) {
				t.Errorf("%s lacks %q:\n%s", path, text, w.Body.String())
			}
		}
		if w.Code == http.StatusOK && strings.Contains(w.Body.String(), "bank") {
			t.Errorf("%s shows another namespace:\n%s", path, w.Body.String())
		}
	}
}

// watched ends its request after it has written a text.
type watched struct {
	*httptest.ResponseRecorder
	cancel context.CancelFunc
	until  string
}

func (w *watched) Write(b []byte) (int, error) {
	n, err := w.ResponseRecorder.Write(b)
	if strings.Contains(w.Body.String(), w.until) {
		w.cancel()
	}
	return n, err
}

// A result is a status code, a class of them, a reason, or "delivered".
func TestResults(t *testing.T) {
	for _, c := range []struct {
		selected string
		status   int
		reason   string
		want     bool
	}{
		{"", 422, "Rejected", true}, {"422", 422, "Rejected", true}, {"42", 422, "Rejected", false},
		{"4xx", 422, "Rejected", true}, {"5XX", 503, "Unavailable", true}, {"5xx", 422, "Rejected", false},
		{"rejected", 422, "Rejected", true}, {"Timeout", 422, "Rejected", false}, {"Timeout", 0, "Timeout", true},
		{"delivered", 200, "", true}, {"delivered", 422, "Rejected", false},
	} {
		if got := hasResult(c.selected, c.status, c.reason); got != c.want {
			t.Errorf("%q selects %d %s: got %t, want %t", c.selected, c.status, c.reason, got, c.want)
		}
	}
	all := groups{Total: 7}
	for i := range maxRows + 2 {
		all.Groups = append(all.Groups, group{StatusCode: 400 + i%2, Reason: "Rejected", N: i})
	}
	if g := all.selected("Rejected"); len(g.Groups) != maxRows || g.More != 2 || g.Total != 7 {
		t.Errorf("all: got %d groups, %d more, total %d, want %d, 2 and 7", len(g.Groups), g.More, g.Total, maxRows)
	}
	if g := all.selected("401"); len(g.Groups) != maxRows/2+1 || g.More != 0 || g.Groups[0].N != 1 {
		t.Errorf("401: got %d groups and %d more, want %d and 0", len(g.Groups), g.More, maxRows/2+1)
	}
	if len(all.Groups) != maxRows+2 {
		t.Errorf("the kept groups: got %d, want %d", len(all.Groups), maxRows+2)
	}
}

// The stores of processes with several slots are their slots. Of two processes that report a slot, the
// one with the higher epoch owns it.
func TestSeveralSlots(t *testing.T) {
	process := func(pod string, epochs map[int]uint64) *adminapi.Client {
		root := adminapi.ReplicationReport{Number: 3, Slots: slices.Sorted(maps.Keys(epochs))}
		mux := http.NewServeMux()
		mux.HandleFunc("/report", func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(adminapi.Report{Pod: pod, Ready: true, Cursor: "1", Replication: &root})
		})
		for slot, epoch := range epochs {
			mux.HandleFunc(fmt.Sprintf("/slots/%d/report", slot), func(w http.ResponseWriter, _ *http.Request) {
				r := adminapi.Report{Pod: pod, Ready: true, Cursor: "1", Storage: adminapi.StorageReport{UsedBytes: 1, TotalBytes: 100},
					Replication: &adminapi.ReplicationReport{Slot: slot, Epoch: epoch}}
				_ = json.NewEncoder(w).Encode(r)
			})
		}
		server := httptest.NewServer(mux)
		t.Cleanup(server.Close)
		return &adminapi.Client{URL: server.URL}
	}
	pods := map[string]*adminapi.Client{"a": process("a", map[int]uint64{0: 1, 1: 1}), "b": process("b", map[int]uint64{1: 2})}
	p := New(Options{Dispatchers: func() (map[string]*adminapi.Client, error) { return pods, nil }})
	p.readReports(t.Context())
	stores, _ := p.dispatchers()
	if got := slices.Sorted(maps.Keys(stores)); !slices.Equal(got, []string{"slot 0", "slot 1"}) {
		t.Fatalf("stores: got %v, want slots 0 and 1", got)
	}
	for name, want := range map[string]string{"slot 0": pods["a"].URL + "/slots/0", "slot 1": pods["b"].URL + "/slots/1"} {
		if stores[name].URL != want {
			t.Errorf("%s: got %s, want %s", name, stores[name].URL, want)
		}
	}
	o := p.newOverview(p.live.view, "")
	if len(o.Problems) != 1 || o.Problems[0].Object != "slot 2 of the log" || o.Accepting {
		t.Errorf("got problems %+v, accepting %v; want one, slot 2 without an owner", o.Problems, o.Accepting)
	}
	if o.Pods != 2 || o.Used != 2 || o.Total != 200 {
		t.Errorf("got %d pods, %d of %d bytes; want 2, 2 of 200", o.Pods, o.Used, o.Total)
	}
}
