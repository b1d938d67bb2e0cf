package audience

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/admission/admissiontest"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// log is a queue: it has the appended messages, without duplicates.
type log struct {
	mu       sync.Mutex
	messages []queue.Message
	ids      map[string]bool
	// full and room, when set, describe the disk.
	full func() bool
	room func(source string) bool
	// before, when set, may reject an append.
	before func(n int) error
	calls  int
}

// Lanes returns no lanes, so that no sync waits for one.
func (l *log) Lanes() []queue.LaneID                  { return nil }
func (l *log) LaneStats(queue.LaneID) queue.LaneStats { return queue.LaneStats{} }

func (l *log) Append(_ context.Context, messages []queue.Message) ([]bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls++
	if l.before != nil {
		if err := l.before(l.calls); err != nil {
			return nil, err
		}
	}
	for _, m := range messages {
		if !l.ids[m.ID] {
			l.ids[m.ID] = true
			l.messages = append(l.messages, m)
		}
	}
	return nil, nil
}

// clone returns a copy of the queue.
func (l *log) clone() *log {
	l.mu.Lock()
	defer l.mu.Unlock()
	return &log{messages: slices.Clone(l.messages), ids: maps.Clone(l.ids)}
}

func (l *log) onAppend(before func(n int) error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.before = before
}

// drain returns and removes the calls, as "user key=value", sorted.
func (l *log) drain(t *testing.T) []string {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for _, m := range l.messages {
		var call struct {
			Type, UserID string
			Version      int
			Traits       map[string]any
		}
		if err := json.Unmarshal(m.Body, &call); err != nil {
			t.Fatal(err)
		}
		if call.Type != "identify" || call.Version != 1 || m.Type != "identify" || m.Source != "shop/web" || m.AcceptedAt.IsZero() ||
			len(call.Traits) != 1 {
			t.Errorf("message: got %+v with body %s, want an identify call of version 1 of shop/web with one trait", m, m.Body)
		}
		for k, v := range call.Traits {
			out = append(out, fmt.Sprintf("%s %s=%v", call.UserID, k, v))
		}
	}
	l.messages = nil
	slices.Sort(out)
	return out
}

func keyHash(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

func config() liveconfig.Config {
	return liveconfig.Config{
		Version: 1, Namespace: "shop",
		Sources: []liveconfig.Source{
			{Name: "ios", WriteKeySHA256: liveconfig.KeyHashes{keyHash("ios-key")}},
			{Name: "off", Suspended: true, WriteKeySHA256: liveconfig.KeyHashes{keyHash("off-key")}},
			{Name: "web", WriteKeySHA256: liveconfig.KeyHashes{keyHash("web-key")}},
		},
		Audiences: []liveconfig.Audience{
			{Name: "shoppers", Generation: 3, Revision: "r", Source: "web", Key: "shoppers", Kind: liveconfig.KindAudience, MaxRemovalPercent: 50},
			{Name: "spent", Source: "web", Key: "spent", Kind: liveconfig.KindComputedTrait, MaxRemovalPercent: 50},
			{Name: "old", Source: "web", Key: "young", Kind: liveconfig.KindAudience, MaxRemovalPercent: 50},
		},
	}
}

type rig struct {
	*Service
	t      *testing.T
	log    *log
	router admission.Router
	server *httptest.Server
	end    func()
}

// newRig runs a Service on a disk.
func newRig(t *testing.T, d *disk, l *log, change func(*Options)) *rig {
	t.Helper()
	r := &rig{t: t, log: l, router: admissiontest.Router{}}
	store := &admissiontest.Store{OnAppend: l.Append, OnFull: l.full, OnRoom: l.room}
	o := Options{
		Gate: admission.New(admission.Options{Store: store, Logger: slog.New(slog.DiscardHandler)}), Lanes: l,
		Logger: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&o)
	}
	closeStore := func() {}
	if o.Store == nil {
		store := d.open(t)
		o.Store, closeStore = store, func() { _ = store.Close() }
	}
	d.options(&o)
	r.Service = &Service{Options: o}
	r.set(config())
	var err error
	if r.Service, err = New(o); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	r.Mount(mux)
	r.server = httptest.NewServer(mux)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = r.Run(ctx) }()
	r.end = sync.OnceFunc(func() { cancel(); <-done; r.server.Close(); closeStore() })
	t.Cleanup(r.end)
	return r
}

func (r *rig) set(c liveconfig.Config) {
	admissiontest.Set(r.Gate, liveconfig.NewView([]liveconfig.Revisioned{{Config: c}}), r.router)
}

func newLog() *log { return &log{ids: map[string]bool{}} }

type answer struct {
	status  int
	body    string // the raw body
	Success bool
	adminapi.SyncResult
	Error admission.Refusal
}

// want checks the status and the error code of an answer.
func (a answer) want(t *testing.T, fact string, status int, code string) {
	t.Helper()
	if a.status != status || a.Error.Code != code {
		t.Errorf("%s: got status %d and code %q, want %d and %q; body: %s", fact, a.status, a.Error.Code, status, code, a.body)
	}
}

func (r *rig) do(method, path, key string, body io.Reader, header ...string) answer {
	r.t.Helper()
	req, err := http.NewRequest(method, r.server.URL+path, body) //nolint:noctx // a test
	if err != nil {
		r.t.Fatal(err)
	}
	if key != "" {
		req.SetBasicAuth(key, "")
	}
	if len(header) == 2 {
		req.Header.Set(header[0], header[1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	a := answer{status: resp.StatusCode, body: string(text)}
	if err := json.Unmarshal(text, &a); err != nil {
		r.t.Fatal(err)
	}
	return a
}

func ids(ids ...string) io.Reader {
	var b strings.Builder
	for _, id := range ids {
		id, value, ok := strings.Cut(id, "=")
		if ok {
			value = `,"value":` + value
		}
		fmt.Fprintf(&b, "{\"userId\":%q%s}\n", id, value)
	}
	return strings.NewReader(b.String())
}

const shoppers, spent = "/v1/audiences/shoppers/members", "/v1/audiences/spent/members"

func (r *rig) sync(path string, members ...string) answer {
	r.t.Helper()
	a := r.do(http.MethodPut, path, "web-key", ids(members...))
	if a.status != http.StatusOK || !a.Success || !a.Sent {
		r.t.Fatalf("sync of %s: got status %d, success %t and sent %t, want 200, true and true; body: %s", path, a.status, a.Success, a.Sent, a.body)
	}
	return a
}

func (r *rig) wantCalls(want ...string) {
	r.t.Helper()
	slices.Sort(want)
	if d := gocmp.Diff(want, r.log.drain(r.t)); d != "" {
		r.t.Errorf("identify calls (-want +got):\n%s", d)
	}
}

func TestSyncSendsOnlyChanges(t *testing.T) {
	d := memory()
	r := newRig(t, d, newLog(), nil)
	a := r.sync(shoppers, "c", "a", "b", "a")
	check.Equal(t, "counts", a.SyncCounts, adminapi.SyncCounts{Members: 3, Added: 3})
	r.wantCalls("a shoppers=true", "b shoppers=true", "c shoppers=true")
	r.sync(shoppers, "b", "c", "a")
	r.wantCalls()
	r.sync(shoppers, "d", "b", "c")
	r.wantCalls("a shoppers=false", "d shoppers=true")
	r.sync(spent, "a=1", "b=2.50", `c="x"`)
	r.wantCalls("a spent=1", "b spent=2.5", "c spent=x")
	r.sync(spent, "a=1.0", "b=3", "b=4", `c="x"`) // 1.0 equals 1; the last value of b counts.
	r.wantCalls("b spent=4")
	r.sync(spent, "a=1", "b=4")
	r.wantCalls("c spent=<nil>")

	// The state survives a restart.
	r.end()
	registry := prometheus.NewRegistry()
	r = newRig(t, d, newLog(), func(o *Options) { o.Registerer = registry })
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	members := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "posthorn_audience_members" {
				members[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
			}
		}
	}
	check.Same(t, "posthorn_audience_members", members, map[string]float64{"shoppers": 3, "spent": 2})
	r.sync(shoppers, "b", "c")
	r.wantCalls("d shoppers=false")
	report := r.Report(config())
	if len(report) != 3 {
		t.Fatalf("audiences in the report: got %d, want 3", len(report))
	}
	check.Equal(t, "Members of shoppers", report[0].Members, 2)
	check.Equal(t, "Removed of shoppers", report[0].Removed, 1)
	check.Equal(t, "LastSync of shoppers is zero", report[0].LastSync.IsZero(), false)
	check.Equal(t, "Owner of shoppers", report[0].Owner, true)
	check.Equal(t, "Generation of shoppers", report[0].Generation, 3)
	check.Equal(t, "Members of spent", report[1].Members, 2)
}

// Every accepted line results in a valid call, whatever its size.
func TestLargestMembersAreSent(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	long := strings.Repeat("\x01", MaxUserIDBytes) // six bytes each in JSON
	deep := strings.Repeat("[", 254) + strings.Repeat("]", 254)
	a := r.do(http.MethodPut, spent, "web-key", strings.NewReader(strings.Join([]string{
		`{"userId":"` + strings.Repeat(`\u0001`, MaxUserIDBytes) + `","value":"` + strings.Repeat("x", 10_000) + `"}`,
		`{"userId":"deep","value":` + deep + `}`,
		`{"userId":"long","value":"` + strings.Repeat("x", MaxLineBytes-40) + `"}`,
		`{"userId":"numbers","value":[` + strings.Repeat("1e20,", 740) + `1]}`,
	}, "\n")))
	a.want(t, "sync", http.StatusOK, "")
	check.Equal(t, "Added", a.Added, 4)
	got := map[string]bool{}
	for _, call := range r.log.drain(t) {
		user, _, _ := strings.Cut(call, " ")
		got[user] = true
	}
	if want := map[string]bool{long: true, "deep": true, "long": true, "numbers": true}; !maps.Equal(got, want) {
		t.Errorf("users with a call: got %d, want the %d users of the sync", len(got), len(want))
	}
}

func TestIncrement(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	r.sync(shoppers, "a", "b", "c", "d")
	r.log.drain(t)
	a := r.do(http.MethodPost, shoppers, "web-key", strings.NewReader(`{"userId":"a","member":false}
{"userId":"b","member":false}
{"userId":"c","member":false}
{"userId":"x"}
{"userId":"d"}
{"userId":"unknown","member":false}`))
	a.want(t, "increment", http.StatusOK, "")
	check.Equal(t, "counts", a.SyncCounts, adminapi.SyncCounts{Before: 4, Members: 2, Added: 1, Removed: 3})
	r.wantCalls("a shoppers=false", "b shoppers=false", "c shoppers=false", "x shoppers=true")
	r.sync(shoppers, "d", "x")
	r.wantCalls()
}

func TestGzip(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.Copy(z, ids("a", "b"))
	_ = z.Close()
	whole := b.Bytes()
	for cut := range len(whole) {
		a := r.do(http.MethodPut, shoppers, "web-key", bytes.NewReader(whole[:cut]), "Content-Encoding", "gzip")
		check.Equal(t, fmt.Sprintf("status for the first %d bytes", cut), a.status, http.StatusBadRequest)
	}
	// Other data behind the stream is an error; another gzip stream is not, because some tools
	// write several.
	a := r.do(http.MethodPut, shoppers, "web-key", strings.NewReader(b.String()+"more"), "Content-Encoding", "gzip")
	a.want(t, "data behind the stream", http.StatusBadRequest, "unreadable_body")
	r.wantCalls()
	z.Reset(&b)
	_, _ = io.Copy(z, ids("c"))
	_ = z.Close()
	r.do(http.MethodPut, shoppers, "web-key", &b, "Content-Encoding", "gzip").want(t, "two streams", http.StatusOK, "")
	r.wantCalls("a shoppers=true", "b shoppers=true", "c shoppers=true")
}

// A rejected sync gets exactly these answers and changes nothing.
func TestRejectedSyncsChangeNothing(t *testing.T) {
	d := memory()
	r := newRig(t, d, newLog(), func(o *Options) { o.MaxBytes = 1 << 20 })
	r.sync(shoppers, "a", "b", "c", "d")
	r.sync(spent, "a=1")
	r.log.drain(t)
	lines := func(l ...string) io.Reader { return strings.NewReader(strings.Join(l, "\n")) }
	for _, c := range []struct {
		name, method, path, key string
		body                    io.Reader
		status                  int
		want                    string // the content of "error"
		encoding                string
	}{
		{name: "no key", path: shoppers, body: ids("a"), status: 401, want: `"code":"no_write_key","message":"no write key; send it as HTTP Basic user name (curl -u KEY:)"`},
		{name: "wrong key", path: shoppers, key: "unknown-key", body: ids("a"), status: 401, want: `"code":"unknown_write_key","message":"no accepted Source has this write key; compare it with the Source's Secret"`},
		{name: "suspended", path: shoppers, key: "off-key", body: ids("a"), status: 503, want: `"code":"source_suspended","message":"the Source is suspended; send the request again when its spec.suspend is false"`},
		{name: "another Source's", path: shoppers, key: "ios-key", body: ids("a"), status: 404, want: `"code":"unknown_audience","message":"the Source of this write key has no audience with this key; see the status of the Audience for its key"`},
		{name: "unknown audience", path: "/v1/audiences/x/members", body: ids("a"), status: 404, want: `"code":"unknown_audience","message":"the Source of this write key has no audience with this key; see the status of the Audience for its key"`},
		{name: "unknown path", path: "/v1/audiences/x", body: ids("a"), status: 404, want: `"code":"not_found","message":"unknown path; send members to /v1/audiences/KEY/members"`},
		{name: "method", method: "PATCH", path: shoppers, body: ids("a"), status: 405, want: `"code":"method_not_allowed","message":"use PUT to send all members, POST to send an increment, GET to read the progress of the last sync"`},
		{name: "unknown parameter", path: shoppers + "?allowremoval=1", body: ids("a"), status: 400, want: `"code":"unknown_parameter","message":"unknown parameter; use allowRemoval, allowEmpty, resend or dryRun"`},
		{name: "not a percentage", path: shoppers + "?allowRemoval=NaN", body: ids("a"), status: 400, want: `"code":"invalid_parameter","message":"allowRemoval must be a percentage from 0 to 100"`},
		{name: "not a boolean", path: shoppers + "?allowEmpty=maybe", body: ids("a"), status: 400, want: `"code":"invalid_parameter","message":"allowEmpty must be true or false, as in allowEmpty=true"`},
		{name: "a dry run without a value", path: shoppers + "?dryRun", body: ids("a", "b", "c"), status: 400, want: `"code":"invalid_parameter","message":"dryRun must be true or false, as in dryRun=true"`},
		{name: "a parameter twice", path: shoppers + "?dryRun=false&dryRun=true", body: ids("a", "b", "c"), status: 400, want: `"code":"invalid_parameter","message":"dryRun is set more than once; set it once"`},
		{name: "a malformed query", path: shoppers + "?dryRun=true;resend=true", body: ids("a", "b", "c"), status: 400, want: `"code":"invalid_parameter","message":"the query is malformed; write it like ?dryRun=true"`},
		{name: "encoding", path: shoppers, body: ids("a"), status: 415, want: `"code":"unsupported_encoding","message":"Content-Encoding must be gzip or absent; remove the header or compress the body with gzip"`, encoding: "br"},
		{name: "not gzip", path: shoppers, body: ids("a"), status: 400, want: `"code":"unreadable_body","message":"the body is not valid gzip, although Content-Encoding is gzip; compress the body or remove the header"`, encoding: "gzip"},
		{name: "no JSON", path: shoppers, body: lines(`{"userId":"a"}`, `u2`), status: 400, want: `"code":"invalid_json","message":"the line is not JSON; each line is a whole object like {\"userId\":\"u1\"}","line":2`},
		{name: "truncated", path: shoppers, body: lines(`{"userId":"a"}`, `{"userId":"b`), status: 400, want: `"code":"invalid_json","message":"the line is not JSON; each line is a whole object like {\"userId\":\"u1\"}","line":2`},
		{name: "two on a line", path: shoppers, body: lines(`{"userId":"a"}{"userId":"b"}`), status: 400, want: `"code":"invalid_json","message":"the line has data after the object; put each member on a line of its own, without commas","line":1`},
		{name: "an array", path: shoppers, body: lines(`[`, `{"userId":"a"},`), status: 400, want: `"code":"invalid_json","message":"the line is not JSON; each line is a whole object like {\"userId\":\"u1\"}","line":1`},
		{name: "gzip without Content-Encoding", path: shoppers, body: zipped(ids("a")), status: 400, want: `"code":"invalid_json","message":"the body is gzip but has no Content-Encoding; set Content-Encoding: gzip, or send a file that ends in .gz","line":1`},
		{name: "the audience's name for its key", path: "/v1/audiences/old/members", body: ids("a"), status: 404, want: `"code":"unknown_audience","message":"the Source of this write key has no audience with this key; the key of the Audience old is young"`},
		{name: "not UTF-8", path: shoppers, body: lines("{\"userId\":\"\xff\"}"), status: 400, want: `"code":"invalid_json","message":"the line is not UTF-8","line":1`},
		{name: "no object", path: shoppers, body: lines(``, `["a"]`), status: 400, want: `"code":"not_an_object","message":"a line must be an object like {\"userId\":\"u1\"}","line":2`},
		{name: "no id", path: shoppers, body: lines(`{"userId":"a"}`, `{}`), status: 400, want: `"code":"no_user_id","message":"\"userId\" is missing","line":2`},
		{name: "empty id", path: shoppers, body: lines(`{"userId":""}`), status: 400, want: `"code":"no_user_id","message":"\"userId\" is empty","line":1`},
		{name: "id of another type", path: shoppers, body: lines(`{"userId":7}`), status: 400, want: `"code":"invalid_field","message":"\"userId\" must be a string; a number needs quotes","line":1`},
		{name: "long id", path: shoppers, body: ids(strings.Repeat("x", 1025)), status: 400, want: `"code":"invalid_field","message":"\"userId\" is too long; at most 1024 bytes are allowed","line":1`},
		{name: "unknown field", path: shoppers, body: lines(`{"userId":"a","mail":"secret"}`), status: 400, want: `"code":"unknown_field","message":"unknown field \"mail\"; use \"userId\", \"value\" (of a computed trait) and \"member\" (of a POST)","line":1`},
		{name: "value of an audience", path: shoppers, body: ids("a=1"), status: 400, want: `"code":"invalid_field","message":"\"value\" is for computed traits; this is an audience","line":1`},
		{name: "no value", path: spent, body: ids("a"), status: 400, want: `"code":"no_value","message":"\"value\" is missing; a computed trait needs one for each user","line":1`},
		{name: "value of another type", path: spent, body: ids("a=1", "b={}"), status: 400, want: `"code":"invalid_field","message":"\"value\" must be a string, a number, true, false or a list","line":2`},
		{name: "null value", path: spent, body: ids("a=null"), status: 400, want: `"code":"invalid_field","message":"\"value\" must be a string, a number, true, false or a list","line":1`},
		{name: "value too deep for a call", path: spent, body: ids("a=" + strings.Repeat("[", 255) + strings.Repeat("]", 255)), status: 400, want: `"code":"invalid_field","message":"\"value\" is nested too deeply; at most 254 levels are allowed","line":1`},
		{name: "value of numbers with exponents that are long", path: spent, body: ids("a=1", "b=["+strings.Repeat("1e20,", 800)+"1]"), status: 400, want: `"code":"invalid_field","message":"\"value\" has more than 16384 bytes when its numbers are written out, as in 1e3: 1000","line":2`},
		{name: "member in a snapshot", path: shoppers, body: lines(`{"userId":"a","member":false}`), status: 400, want: `"code":"unknown_field","message":"a snapshot lists members only, without \"member\"; leave out users that are not members, or POST an increment","line":1`},
		{name: "member of another type", method: "POST", path: shoppers, body: lines(`{"userId":"a","member":"no"}`), status: 400, want: `"code":"invalid_field","message":"\"member\" must be true or false","line":1`},
		{name: "removal with a value", method: "POST", path: spent, body: lines(`{"userId":"a","member":false,"value":1}`), status: 400, want: `"code":"invalid_field","message":"\"value\" has no meaning with \"member\": false; leave it out","line":1`},
		{name: "a line of 1 GB", path: shoppers, body: io.LimitReader(repeated("x"), 1<<30), status: 400, want: `"code":"line_too_long","message":"the line is too long; at most 16384 bytes are allowed","line":1`},
		{name: "too many members", path: shoppers, body: io.MultiReader(ids("a", "b"), endlessMembers()), status: 413, want: `"code":"too_many_members","message":"the members need more than 1048576 bytes on disk; split the audience"`},
		{name: "gzip bomb", path: shoppers, body: zipped(io.LimitReader(repeated("\n"), 24<<20)), status: 413, want: `"code":"too_compressed","message":"the body inflates to more than 200 times its size, which is not a list of members"`, encoding: "gzip"},
		{name: "gzip bomb of a line", path: shoppers, body: zipped(io.LimitReader(repeated(" "), 16<<20)), status: 400, want: `"code":"line_too_long","message":"the line is too long; at most 16384 bytes are allowed","line":1`, encoding: "gzip"},
		{name: "empty", path: shoppers, body: lines(""), status: 422, want: `"code":"empty_snapshot","message":"the snapshot lists no members, which would remove all 4; if this is intended, set allowEmpty=true"`},
		{name: "empty although all may be removed", path: shoppers + "?allowRemoval=100", body: lines("", ""), status: 422, want: `"code":"empty_snapshot","message":"the snapshot lists no members, which would remove all 4; if this is intended, set allowEmpty=true"`},
		{name: "empty and the first", path: "/v1/audiences/young/members", body: lines(""), status: 422, want: `"code":"empty_snapshot","message":"the snapshot lists no members; if this is intended, set allowEmpty=true"`},
		{name: "too many removals", path: shoppers, body: ids("a"), status: 422, want: `"code":"too_many_removals","message":"the snapshot would remove 3 of 4 members; a sync may remove 50 percent. If this is intended, set allowRemoval to a higher percentage, up to 100"`},
		{name: "one more than allowed", path: shoppers + "?allowRemoval=24", body: ids("a", "b", "c"), status: 422, want: `"code":"too_many_removals","message":"the snapshot would remove 1 of 4 members; a sync may remove 24 percent. If this is intended, set allowRemoval to a higher percentage, up to 100"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var header []string
			if c.encoding != "" {
				header = []string{"Content-Encoding", c.encoding}
			}
			key := cmp.Or(c.key, "web-key")
			if c.name == "no key" {
				key = ""
			}
			a := r.do(cmp.Or(c.method, "PUT"), c.path, key, c.body, header...)
			if want := `{"success":false,"error":{` + c.want + "}}\n"; a.status != c.status || a.body != want {
				t.Errorf("answer:\n got %d %swant %d %s", a.status, a.body, c.status, want)
			}
		})
	}
	rejected := r.Report(config())[0].LastRefused
	check.Equal(t, "LastRefused is zero", rejected.IsZero(), false)
	r.do("PUT", shoppers+"?dryRun=true", "web-key", ids("a")).want(t, "rejected dry run", http.StatusUnprocessableEntity, "too_many_removals")
	check.Equal(t, "LastRefused after a rejected dry run", r.Report(config())[0].LastRefused, rejected)
	a := r.do("PUT", shoppers+"?dryRun=true", "web-key", ids("a", "b", "x"))
	a.want(t, "dry run", http.StatusOK, "")
	check.Equal(t, "Sent of a dry run", a.Sent, false)
	check.Equal(t, "DryRun of a dry run", a.DryRun, true)
	check.Equal(t, "counts of a dry run", a.SyncCounts, adminapi.SyncCounts{Before: 4, Members: 3, Added: 1, Removed: 2})
	r.wantCalls()
	check.Equal(t, "files of the members", d.count(membersPrefix), 2)
	check.Equal(t, "files", len(d.files()), 2)
	r.sync(shoppers, "a", "b", "c", "d")
	r.sync(spent, "a=1")
	r.wantCalls()
	// The parameters allow intended removals.
	r.do("PUT", shoppers+"?allowRemoval=75", "web-key", ids("a")).want(t, "sync with allowRemoval", http.StatusOK, "")
	r.do("PUT", shoppers+"?allowEmpty=true", "web-key", ids()).want(t, "sync with allowEmpty", http.StatusOK, "")
	r.wantCalls("b shoppers=false", "c shoppers=false", "d shoppers=false", "a shoppers=false")
}

// The memory for a sync does not grow with the number of members, in any order, while they
// are received, sorted, merged and compared.
func TestMemoryIsConstant(t *testing.T) {
	const members, most = 150_000, 16 << 20 // less than half of the size of the ids
	live := func() (bytes uint64) {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	var samples, peak atomic.Uint64
	l := newLog()
	l.full = func() bool {
		if samples.Add(1)%8 == 0 { // about every 32,000 members
			peak.Store(max(peak.Load(), live()))
		}
		return false
	}
	r := newRig(t, realDisk(t), l, nil)
	all, feed := io.Pipe()
	go func() {
		w := bufio.NewWriter(feed)
		for n := range members {
			fmt.Fprintf(w, "{\"userId\":\"user-%0250d\"}\n", n*7919%members)
		}
		_ = feed.CloseWithError(w.Flush())
	}()
	before := live()
	q := Request{Namespace: "shop", Audience: config().Audiences[0], Full: true, DryRun: true}
	if result, err := r.Sync(t.Context(), q, all); err != nil || result.Added != members {
		t.Fatalf("sync: got %d added and error %v, want %d added", result.Added, err, members)
	}
	if least := uint64(2 * members / checkEvery); samples.Load() < least {
		t.Errorf("memory samples: got %d, want at least %d", samples.Load(), least)
	}
	if grown := int64(peak.Load()) - int64(before); grown > most {
		t.Errorf("memory growth: got %d MiB, want at most %d MiB", grown>>20, most>>20)
	}
}

// The error is the same if only the last members are too many.
func TestSlightlyTooManyMembers(t *testing.T) {
	r := newRig(t, memory(), newLog(), func(o *Options) { o.MaxBytes = 100 })
	r.do(http.MethodPut, shoppers, "web-key", ids(many("u", 100)...)).want(t, "sync", http.StatusRequestEntityTooLarge, "too_many_members")
}

// repeated is an endless sequence of one letter.
func repeated(letter string) io.Reader {
	return readerFunc(func(p []byte) (int, error) {
		for i := range p {
			p[i] = letter[0]
		}
		return len(p), nil
	})
}

// zipped compresses all of in first, so that the request is sent as a whole: a
// server that answers in the middle of a body may close the connection before
// the client reads the answer.
func zipped(in io.Reader) io.Reader {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, _ = io.Copy(z, in)
	_ = z.Close()
	return &out
}

func endlessMembers() io.Reader {
	n := 0
	var left []byte
	return readerFunc(func(p []byte) (int, error) {
		if len(left) == 0 {
			n++
			left = fmt.Appendf(nil, "{\"userId\":\"user-%d\"}\n", n)
		}
		copied := copy(p, left)
		left = left[copied:]
		return copied, nil
	})
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// A body that ends early, at the owner or at another pod, changes nothing.
func TestInterruptedBody(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	other := newRig(t, memory(), newLog(), func(o *Options) { o.Owner = r.server.URL })
	r.sync(shoppers, "a", "b")
	r.log.drain(t)
	last := time.Time{}
	for _, pod := range []*rig{r, other} {
		for _, length := range []int64{-1, 1000} {
			body, feed := io.Pipe()
			req, _ := http.NewRequest(http.MethodPut, pod.server.URL+shoppers+"?allowRemoval=100", body) //nolint:noctx // a test
			req.ContentLength = length
			req.SetBasicAuth("web-key", "")
			go func() {
				_, _ = feed.Write([]byte("{\"userId\":\"a\"}\n"))
				wait.True(r.t, "the audience is up to date", func() bool { return r.busy() == "receiving" })
				_ = feed.CloseWithError(errors.New("the sender failed"))
			}()
			if resp, err := http.DefaultClient.Do(req); err == nil {
				_ = resp.Body.Close()
				t.Errorf("interrupted request: got status %s, want an error", resp.Status)
			}
			wait.True(r.t, "the audience is up to date", func() bool { return r.busy() == "" })
			report := r.Report(config())[0]
			check.Equal(t, "LastRefused changed", report.LastRefused.After(last), true)
			check.Equal(t, "Members", report.Members, 2)
			check.Equal(t, "Refusal", report.Refusal, "unreadable_body: the body ended early (unexpected EOF); nothing was changed, send the sync again")
			last = report.LastRefused
		}
	}
	r.sync(shoppers, "a", "b")
	r.wantCalls()
}

// A body without new data, at the owner or at another pod, is answered 408 and changes nothing.
func TestStalledBody(t *testing.T) {
	owner := newRig(t, memory(), newLog(), nil)
	for _, r := range []*rig{newRig(t, memory(), newLog(), nil),
		newRig(t, memory(), owner.log, func(o *Options) { o.Owner = owner.server.URL })} {
		r.sync(shoppers, "a", "b")
		r.log.drain(t)
		r.IdleTimeout = 200 * time.Millisecond // Only for the syncs that must exceed it.
		for _, encoding := range []string{"identity", "gzip"} {
			body, feed := io.Pipe()
			defer feed.Close()
			if encoding == "identity" {
				go func() {
					for range 10 { // The timeout restarts with each line.
						_, _ = feed.Write([]byte("{\"userId\":\"a\"}\n"))
						time.Sleep(50 * time.Millisecond)
					}
				}()
			}
			r.do(http.MethodPut, shoppers+"?allowRemoval=100", "web-key", body, "Content-Encoding", encoding).want(t, encoding,
				http.StatusRequestTimeout, "body_too_slow")
		}
		r.IdleTimeout = DefaultIdleTimeout
		wait.True(owner.t, "the audience is up to date", func() bool { return owner.busy() == "" })
		r.sync(shoppers, "a", "b")
		r.wantCalls()
	}
}

// busy returns the current activity of the audience shoppers.
func (r *rig) busy() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if a := r.audiences[name{"shop", "shoppers"}]; a != nil {
		return a.busy
	}
	return ""
}

func TestConcurrentSyncsOfOneAudience(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	body, feed := io.Pipe()
	first := make(chan answer, 1)
	go func() { first <- r.do(http.MethodPut, shoppers, "web-key", body) }()
	if _, err := feed.Write([]byte("{\"userId\":\"a\"}\n")); err != nil {
		t.Fatal(err)
	}
	wait.True(r.t, "the audience is up to date", func() bool { return r.busy() != "" })
	r.do(http.MethodPut, shoppers, "web-key", ids("b")).want(t, "second sync", http.StatusConflict, "sync_in_progress")
	r.sync(spent, "a=1") // Another audience does not wait.
	_ = feed.Close()
	(<-first).want(t, "first sync", http.StatusOK, "")
	r.wantCalls("a shoppers=true", "a spent=1")
}

// One namespace cannot use the capacity of all.
func TestConcurrentSyncsOfNamespaces(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	sync := func(namespace string, n int) Request {
		return Request{Namespace: namespace, Audience: liveconfig.Audience{Name: fmt.Sprint(n), Source: fmt.Sprint(n)}}
	}
	for _, c := range []struct {
		namespace string
		room      int
	}{{"shop", maxSyncsPerNamespace}, {"bank", maxSyncs - maxSyncsPerNamespace}, {"farm", 0}} {
		for n := range maxSyncsPerNamespace + 1 {
			_, err := r.begin(sync(c.namespace, n))
			if refusal, _ := errors.AsType[*admission.Refusal](err); n < c.room && err != nil ||
				n >= c.room && (refusal == nil || refusal.Code != "busy" || refusal.RetryAfter == 0) {
				t.Errorf("sync %d of namespace %s: got error %v, want busy after %d syncs", n, c.namespace, err, c.room)
			}
		}
	}
	r.mu.Lock()
	r.leave(sync("shop", 0))
	r.mu.Unlock()
	_, err := r.begin(sync("farm", 9))
	check.NoError(t, "sync after the end of another one", err)
}

// A request with Expect: 100-continue is rejected before its body is sent, by any pod.
func TestRejectedBeforeTheBody(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	other := newRig(t, memory(), newLog(), func(o *Options) { o.Owner = r.server.URL })
	body, feed := io.Pipe()
	first := make(chan answer, 1)
	go func() { first <- r.do(http.MethodPut, shoppers, "web-key", body) }()
	wait.True(r.t, "the audience is up to date", func() bool { return r.busy() != "" })
	for _, c := range []struct {
		pod           *rig
		key, encoding string
		status        int
	}{
		{r, "unknown-key", "identity", http.StatusUnauthorized},
		{r, "web-key", "identity", http.StatusConflict},
		{r, "web-key", "gzip", http.StatusConflict},
		{other, "unknown-key", "gzip", http.StatusUnauthorized},
		{other, "web-key", "gzip", http.StatusConflict},
	} {
		conn, err := net.Dial("tcp", c.pod.server.Listener.Addr().String()) //nolint:noctx // a test
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(wait.Limit))
		login := base64.StdEncoding.EncodeToString([]byte(c.key + ":"))
		fmt.Fprintf(conn, "PUT %s HTTP/1.1\r\nHost: x\r\nAuthorization: Basic %s\r\nContent-Encoding: %s\r\nContent-Length: 1000000000\r\nExpect: 100-continue\r\n\r\n", shoppers, login, c.encoding)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatalf("key %s, encoding %s: got error %v, want an answer", c.key, c.encoding, err)
		}
		check.Equal(t, fmt.Sprintf("status for key %s, encoding %s", c.key, c.encoding), resp.StatusCode, c.status)
		_ = resp.Body.Close()
	}
	_ = feed.Close()
	<-first
}

// While the queue is full a sync waits and reports its unsent calls; then it continues.
func TestSyncWaitsForAFullQueue(t *testing.T) {
	l := newLog()
	l.onAppend(func(int) error { return queue.ErrFull })
	r := newRig(t, memory(), l, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	result, err := r.Sync(ctx, Request{Namespace: "shop", Audience: config().Audiences[0], Full: true}, ids("a", "b"))
	check.NoError(t, "sync", err)
	check.Equal(t, "Sent", result.Sent, false)
	check.Equal(t, "Unsent of the report", r.Report(config())[0].Unsent, 2)
	check.Equal(t, "Members of the report", r.Report(config())[0].Members, 2)
	l.onAppend(nil)
	wait.True(r.t, "the audience is up to date", func() bool { return r.Report(config())[0].Unsent == 0 })
	r.wantCalls("a shoppers=true", "b shoppers=true")
}

// Every part of a sync leaves the reserved disk space to live calls.
func TestDiskIsFullDuringASync(t *testing.T) {
	d, fills, before := memory(), "", 0
	l := newLog()
	l.full = func() bool { return fills != "" && d.count(fills) > before }
	r := newRig(t, d, l, nil)
	r.sync(shoppers, "a", "b")
	wait.True(r.t, "the audience is up to date", func() bool { return r.busy() == "" })
	r.log.drain(t)
	for _, prefix := range []string{"run-000001", membersPrefix, changesPrefix} {
		fills, before = "", d.count(prefix)
		fills = prefix
		r.do(http.MethodPut, shoppers, "web-key", ids("b", "c")).want(t, "disk full after "+prefix, http.StatusServiceUnavailable, "storage_full")
		check.Equal(t, "files after "+prefix, len(d.files()), 1)
	}
	fills = ""
	r.sync(shoppers, "a", "b")
	r.wantCalls()
}

// After a kill at any append, every change is sent, and sent once within the duplicate
// window.
func TestKilledAtEveryAppend(t *testing.T) {
	before := make([]string, 1000)
	for i := range before {
		before[i] = fmt.Sprintf("u%04d", i)
	}
	after := before[300:]
	for kill := 1; kill <= 4; kill++ { // The kill is before this append of the second sync.
		for _, power := range []bool{false, true} {
			d, l := memory(), newLog()
			r := newRig(t, d, l, nil)
			r.sync(shoppers, before...)
			l.drain(t)
			appended := l.calls
			l.onAppend(func(n int) error {
				if n-appended >= kill {
					return queue.ErrClosed
				}
				return nil
			})
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(100*time.Millisecond, cancel)
			result, err := r.Sync(ctx, Request{Namespace: "shop", Audience: config().Audiences[0], Full: true, AllowRemoval: 50}, ids(after...))
			if err != nil || kill <= 2 && result.Sent {
				t.Fatalf("sync killed at append %d: got Sent %t and error %v, want no error, and not Sent before append 3", kill, result.Sent, err)
			}
			killed := d.crash(power)
			r.end()
			l.onAppend(nil)
			r = newRig(t, killed, l, nil)
			wait.True(r.t, "the audience is up to date", func() bool {
				p := r.Progress("shop", config().Audiences[0])
				return p.Sent && p.Members == 700
			})
			var want []string
			for _, id := range before[:300] {
				want = append(want, id+" shoppers=false")
			}
			r.wantCalls(want...)
			r.sync(shoppers, after...)
			r.wantCalls()
			r.end()
		}
	}
}

// After a kill or a power loss between any two changes of the files and the state, the sync has the same result, and the
// receiver gets no outdated calls.
func TestKilledAtEveryStep(t *testing.T) {
	syncs := []func(*rig) answer{
		func(r *rig) answer { return r.do("PUT", shoppers, "web-key", ids(many("u", 600)...)) },
		func(r *rig) answer { return r.do("PUT", shoppers, "web-key", ids(many("u", 400)...)) },
		func(r *rig) answer {
			return r.do("POST", shoppers, "web-key", strings.NewReader(`{"userId":"u000000","member":false}`+"\n"+`{"userId":"x"}`))
		},
	}
	// The calls of each sync, and the number of members after it.
	var joined, left []string
	for i, u := range many("u", 600) {
		joined = append(joined, u+" shoppers=true")
		if i >= 400 {
			left = append(left, u+" shoppers=false")
		}
	}
	calls := [][]string{joined, left, {"u000000 shoppers=false", "x shoppers=true"}}
	members := []int64{600, 400, 400}

	for n := range syncs {
		d, l := memory(), newLog()
		r := newRig(t, d, l, nil)
		for _, before := range syncs[:n] {
			before(r)
		}
		wait.True(r.t, "the audience is up to date", func() bool { return r.busy() == "" })
		l.drain(t)
		type crash struct {
			disk *disk
			log  *log
		}
		var crashes []crash
		step := func() {
			for _, power := range []bool{false, true} {
				crashes = append(crashes, crash{d.crash(power), l.clone()})
			}
		}
		d.step.Store(&step)
		if a := syncs[n](r); a.status != http.StatusOK {
			t.Fatalf("sync %d: got status %d, want 200; body: %s", n, a.status, a.body)
		}
		wait.True(r.t, "the audience is up to date", func() bool { return r.busy() == "" })
		r.end()
		d.step.Store(nil)
		r.wantCalls(calls[n]...)
		if len(crashes) < 30 {
			t.Errorf("crashes of sync %d: got %d, want at least 30", n, len(crashes))
		}
		for i, c := range crashes {
			r := newRig(t, c.disk, c.log, nil)
			// An accepted sync is completed after the restart; another one is sent again.
			done := r.Progress("shop", config().Audiences[0])
			var a answer
			wait.True(r.t, "the audience is up to date", func() bool { a = syncs[n](r); return a.status != http.StatusConflict })
			if a.status != http.StatusOK || a.Members != members[n] || a.Changes() != 0 && a.Changes() != int64(len(calls[n])) {
				t.Errorf("sync %d after crash %d: got status %d, %d members and %d changes, want 200, %d members, and no changes or %d; progress after the restart: %+v", n, i, a.status, a.Members, a.Changes(), members[n], len(calls[n]), done)
			}
			r.wantCalls(calls[n]...)
			wait.True(r.t, "the audience is up to date", func() bool { return r.busy() == "" })
			check.Equal(t, fmt.Sprintf("files after crash %d of sync %d", i, n), len(c.disk.files()), 1)
			r.end()
		}
	}
}

func TestDamagedMembersFile(t *testing.T) {
	d := memory()
	r := newRig(t, d, newLog(), nil)
	r.sync(shoppers, "a", "b", "c")
	r.log.drain(t)
	path := d.path("members", d.files()[0])
	f, err := d.fs.Open(path)
	check.NoError(t, "open the members", err)
	content, err := io.ReadAll(f)
	check.NoError(t, "read the members", errors.Join(err, f.Close()))
	content[len(content)/2] ^= 1
	d.write(t, path, content)
	r.do(http.MethodPut, shoppers, "web-key", ids("a", "b", "c", "d")).want(t, "sync", http.StatusInternalServerError, "state_damaged")
	r.wantCalls()
}

// The action in the answer for a damaged state works: after the Audience is deleted and
// created again, a sync succeeds without removals.
func TestRecoveryFromADamagedState(t *testing.T) {
	d := memory()
	r := newRig(t, d, newLog(), nil)
	r.sync(shoppers, "a", "b")
	check.NoError(t, "damage the state", r.Store.PutMetaDurable(name{"shop", "shoppers"}.key(), []byte("{")))
	r.end()
	r = newRig(t, d, newLog(), func(o *Options) { o.OrphanGrace = time.Millisecond })
	a := r.do(http.MethodPut, shoppers, "web-key", ids("b", "c"))
	a.want(t, "sync with a damaged state", http.StatusInternalServerError, "state_damaged")
	if want := "delete the Audience"; !strings.Contains(a.Error.Message, want) {
		t.Errorf("message for a damaged state: got %q, want one with %q", a.Error.Message, want)
	}
	c := config()
	c.Audiences = c.Audiences[1:]
	r.set(c)
	wait.True(r.t, "the audience is up to date", func() bool { return len(d.files()) == 0 })
	r.set(config())
	r.sync(shoppers, "b", "c")
	r.wantCalls("b shoppers=true", "c shoppers=true")
	r.end()
	r = newRig(t, d, newLog(), nil)
	r.sync(shoppers, "b", "c")
	r.wantCalls()
}

// stuckFS cannot remove a file.
type stuckFS struct {
	vfs.FS
	path string
}

func (f stuckFS) RemoveAll(path string) error {
	if path == f.path {
		return os.ErrPermission
	}
	return f.FS.RemoveAll(path)
}

// A file that cannot be removed does not prevent a start.
func TestFileThatCannotBeRemoved(t *testing.T) {
	for _, stuck := range []string{members("shoppers") + "/sync-old", "members/unknown"} {
		d := memory()
		r := newRig(t, d, newLog(), nil)
		r.sync(shoppers, "a")
		r.end()
		d.write(t, d.path(stuck), nil)
		d.fs = stuckFS{d.fs, d.path(stuck)}
		r = newRig(t, d, newLog(), nil)
		_, err := d.fs.Stat(d.path(stuck))
		check.NoError(t, "stat the file after the start", err)
		r.sync(shoppers, "a", "b")
		r.wantCalls("b shoppers=true")
	}
}

// Files that no state names are removed at the start.
func TestUnknownFilesAreRemoved(t *testing.T) {
	d := memory()
	r := newRig(t, d, newLog(), nil)
	r.sync(shoppers, "a")
	r.end()
	kept := d.files()
	for _, path := range []string{members("shoppers") + "/members-old", members("shoppers") + "/sync-old/run-000001",
		"members/unknown/members-old"} {
		d.write(t, d.path(path), nil)
	}
	newRig(t, d, newLog(), nil)
	check.Same(t, "files after the start", d.files(), kept)
}

// A sync whose state cannot be stored changes nothing, and can be sent again.
func TestStateIsNotStored(t *testing.T) {
	d := memory()
	r := newRig(t, d, newLog(), nil)
	r.sync(shoppers, "a", "b")
	wait.True(r.t, "the audience is up to date", func() bool { return r.busy() == "" })
	r.log.drain(t)
	refused := errors.New("refused")
	d.refuse.Store(&refused)
	r.do(http.MethodPut, shoppers, "web-key", ids("b", "c")).want(t, "sync without its state", http.StatusServiceUnavailable, "storage_failed")
	r.wantCalls()
	d.refuse.Store(nil)
	r.sync(shoppers, "b", "c")
	r.wantCalls("a shoppers=false", "c shoppers=true")
	wait.True(r.t, "the audience is up to date", func() bool { return r.busy() == "" })
	check.Equal(t, "files", len(d.files()), 1)
}

// The files of a sync are kept while it is unknown whether its state is stored.
func TestStateMayBeStored(t *testing.T) {
	unclear := errors.New("unclear")
	for _, c := range []struct {
		name string
		// before are calls before the sync; next is done after it.
		before []string
		next   func(*rig)
		calls  []string
	}{
		{"first sync", nil, func(*rig) {}, []string{"b shoppers=true", "c shoppers=true"}},
		{"later sync", []string{"a", "b"}, func(*rig) {}, []string{"a shoppers=false", "c shoppers=true"}},
		{"while the store refuses changes", nil, func(r *rig) {
			r.do(http.MethodPut, shoppers, "web-key", ids("x")).want(r.t, "another sync", http.StatusServiceUnavailable, "storage_failed")
		}, []string{"b shoppers=true", "c shoppers=true"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := memory()
			r := newRig(t, d, newLog(), nil)
			if c.before != nil {
				r.sync(shoppers, c.before...)
				wait.True(r.t, "the audience is up to date", func() bool { return r.busy() == "" })
			}
			d.unclear.Store(&unclear)
			r.do(http.MethodPut, shoppers, "web-key", ids("b", "c")).want(t, "sync", http.StatusServiceUnavailable, "storage_failed")
			c.next(r)
			r.end()
			d.refuse.Store(nil)
			r = newRig(t, d, newLog(), nil)
			wait.True(r.t, "the audience is up to date", func() bool { return r.Progress("shop", config().Audiences[0]).Sent })
			r.wantCalls(c.calls...)
			r.sync(shoppers, "b", "c")
			r.wantCalls()
		})
	}
}

// A rejected sync after one whose state may be stored removes that state before its files.
func TestRejectedSyncAfterAnUnclearOne(t *testing.T) {
	d := memory()
	r := newRig(t, d, newLog(), nil)
	unclear := errors.New("unclear")
	d.unclear.Store(&unclear)
	r.do(http.MethodPut, shoppers, "web-key", ids("b", "c")).want(t, "sync", http.StatusServiceUnavailable, "storage_failed")
	d.refuse.Store(nil)
	r.do(http.MethodPut, shoppers, "web-key", ids()).want(t, "sync without members", http.StatusUnprocessableEntity, "empty_snapshot")
	check.Equal(t, "files", len(d.files()), 0)
	r.end()
	r = newRig(t, d, newLog(), nil)
	r.sync(shoppers, "b", "c")
	r.wantCalls("b shoppers=true", "c shoppers=true")
}

// An accepted sync completes when the store accepts its state again.
func TestStateIsNotStoredAfterTheDecision(t *testing.T) {
	d := memory()
	r := newRig(t, d, newLog(), nil)
	r.sync(shoppers, "a", "b")
	wait.True(r.t, "the audience is up to date", func() bool { return r.busy() == "" })
	r.log.drain(t)
	refused := errors.New("refused")
	r.log.onAppend(func(int) error { d.refuse.Store(&refused); return nil })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	result, err := r.Sync(ctx, Request{Namespace: "shop", Audience: config().Audiences[0], Full: true, AllowRemoval: 50}, ids("b", "c"))
	check.NoError(t, "sync", err)
	check.Equal(t, "Sent", result.Sent, false)
	wait.True(r.t, "the audience is up to date", func() bool { return d.refuse.Load() != nil })
	check.Equal(t, "Sent without the state", r.Progress("shop", config().Audiences[0]).Sent, false)
	r.log.onAppend(nil)
	d.refuse.Store(nil)
	wait.True(r.t, "the audience is up to date", func() bool { return r.busy() == "" })
	r.wantCalls("a shoppers=false", "c shoppers=true")
	r.sync(shoppers, "b", "c")
	r.wantCalls()
}

// No calls are sent for a user that a deletion request suppresses.
func TestSuppressedMember(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	c := config()
	c.Deletions = []liveconfig.Deletion{{Name: "d", ID: "ab", UserID: "b", Suppress: true}}
	r.set(c)
	r.sync(shoppers, "a", "b", "c")
	r.wantCalls("a shoppers=true", "c shoppers=true")
	r.sync(spent, "b=1")
	r.wantCalls()
}

// Receivers order calls by their timestamps, so a later sync must not have an earlier
// timestamp after the clock is set back. The report must still show whether the last sync
// was rejected.
func TestClockSetBack(t *testing.T) {
	var clock atomic.Int64
	clock.Store(time.Now().UnixNano())
	d := memory()
	set := func(o *Options) { o.Now = func() time.Time { return time.Unix(0, clock.Load()) } }
	r := newRig(t, d, newLog(), set)
	last := ""
	later := func() {
		t.Helper()
		var call struct{ Timestamp string }
		r.log.mu.Lock()
		defer r.log.mu.Unlock()
		if len(r.log.messages) != 1 || json.Unmarshal(r.log.messages[0].Body, &call) != nil || call.Timestamp <= last {
			t.Errorf("messages: got %+v, want one with a timestamp after %s", r.log.messages, last)
		}
		last, r.log.messages = call.Timestamp, nil
	}
	rejected := func(want bool) {
		t.Helper()
		report := r.Report(config())[0]
		if got := report.LastRefused.After(report.LastSync); got != want {
			t.Errorf("LastRefused %s is after LastSync %s: got %t, want %t", report.LastRefused, report.LastSync, got, want)
		}
	}
	r.sync(shoppers, "a")
	later()
	clock.Add(-int64(time.Hour))
	r.sync(shoppers, "a", "b")
	later()
	r.do(http.MethodPut, shoppers, "web-key", ids()).want(t, "empty snapshot", http.StatusUnprocessableEntity, "empty_snapshot")
	rejected(true)
	r.sync(shoppers, "a")
	later()
	rejected(false)
	r.end()
	r = newRig(t, d, newLog(), set)
	r.sync(shoppers, "a", "b")
	later()
}

// An audience with another key, kind or Source starts without members.
func TestChangedKeyHasNoMembers(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	r.sync(shoppers, "a")
	r.wantCalls("a shoppers=true")
	c := config()
	c.Audiences[0].Key = "buyers"
	r.set(c)
	check.Equal(t, "Members of the new key", r.Report(c)[0].Members, 0)
	r.sync("/v1/audiences/buyers/members", "a")
	r.wantCalls("a buyers=true")
}

// An audience that changes its Source while its sync waits for a deleted Source can be
// synced again. A sync of an unchanged audience waits for the Source.
func TestSourceDeletedDuringASync(t *testing.T) {
	l := newLog()
	l.onAppend(func(int) error { return queue.ErrFull })
	var ahead atomic.Int64
	r := newRig(t, memory(), l, func(o *Options) { o.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) } })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for i, q := range []Request{{Namespace: "shop", Audience: config().Audiences[0]}, {Namespace: "shop", Audience: config().Audiences[2]}} {
		q.Full = true
		if _, err := r.Sync(ctx, q, ids("a", fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	c := config()
	c.Sources = c.Sources[:2] // without web
	c.Audiences[0].Source = "ios"
	r.set(c)
	l.onAppend(nil)
	waits := func(a answer) bool {
		return a.status == http.StatusConflict && strings.Contains(a.Error.Message, "source shop/web does not exist")
	}
	wait.True(r.t, "the audience is up to date", func() bool { return waits(r.do(http.MethodPut, shoppers, "ios-key", ids("b"))) })
	wait.True(r.t, "the audience is up to date", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return !r.audiences[name{"shop", "shoppers"}].gone.IsZero()
	})
	ahead.Store(int64(r.OrphanGrace))
	wait.True(r.t, "the audience is up to date", func() bool {
		a := r.do(http.MethodPut, shoppers, "ios-key", ids("b"))
		return a.status == http.StatusOK && a.Before == 0 && a.Added == 1
	})
	l.mu.Lock()
	if len(l.messages) != 1 || l.messages[0].Source != "shop/ios" {
		t.Errorf("messages: got %+v, want one of shop/ios", l.messages)
	}
	l.messages = nil
	l.mu.Unlock()
	c.Sources = config().Sources
	r.set(c)
	wait.True(r.t, "the audience is up to date", func() bool { return r.Report(c)[2].Unsent == 0 })
	r.wantCalls("1 young=true", "a young=true")
}

func TestStateOfADeletedAudienceIsRemoved(t *testing.T) {
	d := memory()
	r := newRig(t, d, newLog(), func(o *Options) { o.OrphanGrace = time.Millisecond })
	r.sync(shoppers, "a")
	r.sync(spent, "a=1")
	r.log.drain(t)
	c := config()
	c.Audiences = c.Audiences[1:]
	r.set(c)
	wait.True(r.t, "the audience is up to date", func() bool { return d.count(membersPrefix) == 1 })
	r.set(config())
	r.sync(shoppers, "a")
	r.wantCalls("a shoppers=true")
}

// A sync that is refused before its audience is known counts like a call: for its Source, or as
// unidentified.
func TestRefusedSyncsCountForTheSource(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	for _, key := range []string{"off-key", "unknown-key", ""} {
		r.do(http.MethodPut, shoppers, key, ids("a"))
	}
	check.Equal(t, "refused requests of the suspended Source", r.Gate.Counters("shop/off").Rejected, 1)
	check.Equal(t, "refused requests of another Source", r.Gate.Counters("shop/web").Rejected, 0)
}

func TestNotReady(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	admissiontest.Set(r.Gate, nil, r.router)
	status := func() int { return r.do(http.MethodPut, shoppers, "web-key", ids("a")).status }
	check.Equal(t, "status without a config", status(), http.StatusServiceUnavailable)
	admissiontest.Set(r.Gate, liveconfig.NewView(nil, "shop"), r.router)
	check.Equal(t, "status with an unusable namespace", status(), http.StatusServiceUnavailable)
	r.set(config())
	r.Stop()
	check.Equal(t, "status after Stop", status(), http.StatusServiceUnavailable)
}

// A pod that is not the owner forwards a sync to the owner, and a forwarded sync is not
// forwarded again.
func TestForwardToTheOwner(t *testing.T) {
	owner := newRig(t, memory(), newLog(), nil)
	other := newRig(t, memory(), newLog(), func(o *Options) { o.Owner = owner.server.URL })
	members := make([]string, 5000)
	for i := range members {
		members[i] = fmt.Sprintf("u%d", i)
	}
	check.Equal(t, "Added", other.sync(shoppers, members...).Added, 5000)
	check.Equal(t, "identify calls of the owner", len(owner.log.drain(t)), 5000)
	other.wantCalls()
	other.do(http.MethodPut, shoppers, "web-key", ids("a")).want(t, "sync that the owner rejects", http.StatusUnprocessableEntity,
		"too_many_removals")
	other.do(http.MethodPut, shoppers, "unknown-key", ids("a")).want(t, "unknown write key", http.StatusUnauthorized, "unknown_write_key")
	third := newRig(t, memory(), newLog(), func(o *Options) { o.Owner = other.server.URL })
	check.Equal(t, "status of a sync that was forwarded twice", third.do(http.MethodPut, shoppers, "web-key", ids("a")).status,
		http.StatusMisdirectedRequest)
	owner.end()
	other.do(http.MethodPut, shoppers, "web-key", ids("a")).want(t, "sync without the owner", http.StatusServiceUnavailable,
		"owner_unreachable")
}

// The rules for numbers in values are the same as for other calls.
func TestLongNumbersAreMarked(t *testing.T) {
	r := newRig(t, memory(), newLog(), nil)
	r.sync(spent, "a=12345678901234567890", "b=1.0", "c=[1e400]", `d="12345678901234567890"`, "e=0.10000000000000000001")
	got := map[string]bool{}
	r.log.mu.Lock()
	for _, m := range r.log.messages {
		traits, _, _ := strings.Cut(string(m.Body), `},"context"`)
		_, traits, _ = strings.Cut(traits, `"traits":{`)
		got[traits] = m.LongNumbers
	}
	r.log.mu.Unlock()
	want := map[string]bool{`"spent":12345678901234567890`: true, `"spent":1`: false, `"spent":[1e400]`: true,
		`"spent":"12345678901234567890"`: false, `"spent":0.1`: false}
	if d := gocmp.Diff(want, got); d != "" {
		t.Errorf("marks by traits (-want +got):\n%s", d)
	}
}
