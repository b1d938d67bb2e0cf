package dispatcher

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/contract/writekey"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/wait"
)

// running starts a dispatcher on a directory and stops it with the test, or when stop is
// called.
func started(t *testing.T, dir string, tune ...func(*Options)) (d *Dispatcher, stop func()) {
	t.Helper()
	policy, err := egress.ParsePolicy([]string{"127.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	o := Options{DataDir: dir, ServerOptions: ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0"}, Pod: "p0", Egress: policy,
		Queue: pebblestore.Options{DuplicateWindow: 10 * time.Minute}}
	for _, f := range tune {
		f(&o)
	}
	d, err = New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	var stopped atomic.Bool
	stop = func() {
		if stopped.Swap(true) {
			return
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	t.Cleanup(stop)
	return d, stop
}

func send(t *testing.T, d *Dispatcher, id string) (int, string) {
	t.Helper()
	// With an empty segment, as with a host setting that ends with a slash.
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+d.Addr().String()+"//v1/track",
		strings.NewReader(fmt.Sprintf(`{"userId":"u","event":"E","messageId":%q}`, id)))
	req.SetBasicAuth(liveconfigtest.Key, "")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body)
}

func get(t *testing.T, url string, header ...string) *http.Response {
	t.Helper()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

func destinationReport(d *Dispatcher) (r adminapi.DestinationReport) {
	for _, t := range d.Report().Namespaces {
		for _, r = range t.Destinations {
			if t.Namespace == "shop" && r.Name == "crm" {
				return r
			}
		}
	}
	return adminapi.DestinationReport{}
}

func TestTakesNoCallsBeforeTheFirstFullConfig(t *testing.T) {
	var got atomic.Int64
	sink := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { got.Add(1) }))
	t.Cleanup(sink.Close)
	d, _ := started(t, t.TempDir())
	ready := "http://" + d.Addr().String() + "/readyz"
	if s := get(t, ready).StatusCode; s != http.StatusServiceUnavailable {
		t.Errorf("readyz %d before the config", s)
	}
	if s, body := send(t, d, "early"); s != http.StatusServiceUnavailable {
		t.Errorf("a call was answered %d %s before the config", s, body)
	}
	d.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config(sink.URL)))
	if s, _ := send(t, d, "early"); s != http.StatusServiceUnavailable {
		t.Errorf("a call was answered %d before the config was full", s)
	}
	d.Synced()
	if s := get(t, ready).StatusCode; s != http.StatusOK {
		t.Errorf("readyz %d after the config", s)
	}
	if s, body := send(t, d, "m1"); s != http.StatusOK {
		t.Fatalf("%d %s", s, body)
	}
	wait.True(t, "delivery", func() bool { return got.Load() > 0 })
}

// A pod whose configs are all rejected, for example because another release wrote them, would
// answer every call with 503. So it must not be ready.
func TestNotReadyWithoutUsableConfig(t *testing.T) {
	d, _ := started(t, t.TempDir(), func(o *Options) { o.ProbeListen = "127.0.0.1:0" })
	ready := func(step string, wantStatus int, wantBody string) {
		t.Helper()
		resp := get(t, "http://"+d.ProbeAddr().String()+"/readyz")
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != wantStatus {
			t.Errorf("status of /readyz %s: got %d, want %d", step, resp.StatusCode, wantStatus)
		}
		if got := strings.TrimSpace(string(body)); got != wantBody {
			t.Errorf("body of /readyz %s: got %q, want %q", step, got, wantBody)
		}
	}
	d.Set("shop", liveconfig.Stored{Config: []byte("not a config")})
	d.Synced()
	ready("with only a rejected config", http.StatusServiceUnavailable, "no live config is usable; the log has the errors")
	d.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config("https://hooks.example")))
	ready("with a valid config", http.StatusOK, "ok")
	d.Set("shop", liveconfig.Stored{Config: []byte("not a config")})
	ready("with the previous config in effect", http.StatusOK, "ok")
	d.Delete("shop")
	ready("without namespaces", http.StatusOK, "ok")
}

// The listener for probes serves nothing else.
func TestProbeListener(t *testing.T) {
	d, _ := started(t, t.TempDir(), func(o *Options) { o.ProbeListen = "127.0.0.1:0" })
	for path, want := range map[string]int{"/healthz": http.StatusOK, "/readyz": http.StatusServiceUnavailable,
		"/metrics": http.StatusNotFound, "/v1/track": http.StatusNotFound} {
		if got := get(t, "http://"+d.ProbeAddr().String()+path).StatusCode; got != want {
			t.Errorf("status of GET %s: got %d, want %d", path, got, want)
		}
	}
}

func TestBadConfigIsRefusedReportedAndHarmsNothing(t *testing.T) {
	var got atomic.Int64
	sink := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { got.Add(1) }))
	t.Cleanup(sink.Close)
	d, _ := started(t, t.TempDir())
	d.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config(sink.URL)))
	d.Set("broken", liveconfig.Stored{Config: []byte("not a config")}) // A namespace without a valid config.
	stolen := liveconfigtest.Config(sink.URL)
	stolen.Sources[0].Suspended = true
	d.Set("other", liveconfigtest.Encode(t, stolen)) // Must not replace the config of shop.
	d.Synced()

	bad := liveconfigtest.Config(sink.URL)
	bad.Destinations[0].Success = "Sometimes"
	d.Set("shop", liveconfigtest.Encode(t, bad))
	if s, body := send(t, d, "m1"); s != http.StatusOK {
		t.Fatalf("%d %s", s, body)
	}
	wait.True(t, "delivery under the last good config", func() bool { return got.Load() > 0 })

	refused := map[string]string{}
	for _, namespace := range d.Report().Namespaces {
		if namespace.Refused != nil {
			refused[namespace.Namespace] = namespace.Refused.Error
		}
	}
	if !strings.Contains(refused["shop"], "Sometimes") || refused["broken"] == "" ||
		!strings.Contains(refused["other"], `to namespace "shop"`) {
		t.Errorf("refused: %v", refused)
	}
	// While a namespace's Sources are unknown, an unknown key may belong to it, so the response
	// is temporary.
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+d.Addr().String()+"/v1/track", strings.NewReader(`{}`))
	req.SetBasicAuth("unknown", "")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("an unknown key was answered %d while a namespace's config is rejected", resp.StatusCode)
	}
	d.Delete("broken")
	d.Delete("other")
	d.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config(sink.URL)))
	for _, namespace := range d.Report().Namespaces {
		if namespace.Refused != nil {
			t.Errorf("%s is still refused: %v", namespace.Namespace, namespace.Refused)
		}
	}
}

func TestReportIsTrueAndCheapWhenIdle(t *testing.T) {
	sink := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(sink.Close)
	d, _ := started(t, t.TempDir())
	d.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config(sink.URL)))
	d.Synced()
	for i := range 10 {
		send(t, d, fmt.Sprint("m", i))
	}
	send(t, d, "m0") // a duplicate
	wait.True(t, "10 deliveries in the report", func() bool { return destinationReport(d).Delivered == 10 })

	client := adminapi.Client{URL: "http://" + d.AdminAddr().String()}
	report, err := client.Report(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	crm, web := report.Namespaces[0].Destinations[0], report.Namespaces[0].Sources[0]
	if report.Pod != "p0" || !report.Ready || crm.Generation != 7 || crm.Revision != "d1" || crm.Accepted != 10 || crm.Pending != 0 {
		t.Errorf("report: %+v", report)
	}
	if crm.Endpoints[0].State != adminapi.EndpointHealthy || crm.Endpoints[0].LastSuccess.IsZero() {
		t.Errorf("endpoint: %+v", crm.Endpoints[0])
	}
	if web.Accepted != 10 || web.Duplicates != 1 || web.LastAccepted.IsZero() || web.Revision != "s1" {
		t.Errorf("source: %+v", web)
	}
	// Without further changes the report is the same, and the response is 304.
	cursor := report.Cursor
	wait.True(t, "304 for an idle pod", func() bool {
		changes, err := client.Report(t.Context(), cursor)
		if err == nil {
			cursor = changes.Cursor
		}
		return errors.Is(err, adminapi.ErrNotModified)
	})
	metrics, err := client.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(metrics, "posthorn_") || strings.Contains(metrics, sink.URL) {
		t.Errorf("metrics:\n%s", metrics)
	}
}

func TestStopsInOrderAndGoesOnWhereItWas(t *testing.T) {
	dir := t.TempDir()
	var down atomic.Bool
	down.Store(true)
	var got atomic.Int64
	sink := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if down.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		got.Add(1)
	}))
	t.Cleanup(sink.Close)
	d, stop := started(t, dir)
	d.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config(sink.URL)))
	d.Synced()
	for i := range 50 {
		if s, body := send(t, d, fmt.Sprint("m", i)); s != http.StatusOK {
			t.Fatalf("%d %s", s, body)
		}
	}
	stop()

	down.Store(false)
	d, _ = started(t, dir)
	d.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config(sink.URL)))
	d.Synced()
	wait.True(t, "all 50 after the restart", func() bool { return destinationReport(d).Delivered == 50 })
	if r := destinationReport(d); r.Accepted != 50 || r.Pending != 0 || got.Load() != 50 {
		t.Errorf("ledger %+v; %d arrived", r, got.Load())
	}
}

func TestSecondDispatcherOnTheSameFolderSaysWhy(t *testing.T) {
	dir := t.TempDir()
	started(t, dir)
	_, err := New(Options{DataDir: dir, ServerOptions: ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0"}})
	if err == nil || !strings.Contains(err.Error(), "another process has it open") {
		t.Errorf("error %v does not report that the folder is in use", err)
	}
}

// fullFS is a file system with a switch that makes it full.
type fullFS struct {
	vfs.FS
	full atomic.Bool
}

type fullFile struct {
	vfs.File
	fs *fullFS
}

func (f *fullFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	file, err := f.FS.Create(name, c)
	return &fullFile{file, f}, err
}

func (f *fullFS) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	file, err := f.FS.ReuseForWrite(old, name, c)
	return &fullFile{file, f}, err
}

func (f *fullFile) Write(p []byte) (int, error) {
	if f.fs.full.Load() {
		return 0, syscall.ENOSPC
	}
	return f.File.Write(p)
}

// A config that opens a lane waits for space on a full disk; reports and metrics of the config
// do not wait.
func TestReportsOnAFullDisk(t *testing.T) {
	sink := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }))
	t.Cleanup(sink.Close)
	fs := &fullFS{FS: vfs.Default}
	d, stop := started(t, t.TempDir(), func(o *Options) { o.Queue.FS = fs })
	config := liveconfigtest.Config(sink.URL)
	d.Set("shop", liveconfigtest.Encode(t, config))
	d.Synced()
	for i := range 5 {
		if code, body := send(t, d, fmt.Sprint("m", i)); code != http.StatusOK {
			t.Fatal(code, body)
		}
	}
	wait.True(t, "retries", func() bool { return destinationReport(d).Retrying > 0 })
	fs.full.Store(true)
	second := config.Destinations[0]
	second.Name, second.Revision = "second", "r2"
	config.Destinations = append(config.Destinations, second)
	applied := make(chan struct{})
	go func() {
		defer close(applied)
		d.Set("shop", liveconfigtest.Encode(t, config))
	}()
	wait.True(t, "the full disk shows", func() bool { return d.Store().Full() && d.Report().Pod == "p0" })
	resp := get(t, "http://"+d.AdminAddr().String()+"/metrics")
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("metrics: %d, %v", resp.StatusCode, err)
	}
	select {
	case <-applied:
		t.Error("a lane was opened on a full disk")
	default:
	}
	fs.full.Store(false)
	<-applied
	stop()
}

// Requests that a web page can cause in a browser on this machine are rejected.
func TestAdminIsNotForPages(t *testing.T) {
	d, _ := started(t, t.TempDir())
	d.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config("http://127.0.0.1:1/")))
	d.Synced()
	ask := func(method, path, host string, header ...string) int {
		t.Helper()
		req, _ := http.NewRequestWithContext(t.Context(), method, "http://"+d.AdminAddr().String()+path,
			strings.NewReader(`{"destination":"shop/crm"}`))
		for i := 0; i < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
		}
		if host != "" {
			req.Host = host
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		return resp.StatusCode
	}
	for _, test := range []struct {
		name string
		got  int
		want int
	}{
		{"a tool", ask("POST", "/deadletters/purge", ""), 200},
		{"a tool that names localhost", ask("POST", "/deadletters/purge", "localhost:8081"), 200},
		{"a page of another site", ask("POST", "/deadletters/purge", "", "Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site",
			"Content-Type", "text/plain"), 403},
		{"an image of another site", ask("GET", "/trace?message=a", "", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "no-cors"), 403},
		{"a frame of another site", ask("GET", "/bodies/tail", "", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"), 403},
		{"a probe of another site", ask("GET", "/healthz", "", "Sec-Fetch-Site", "cross-site"), 200},
		{"an address that the user typed", ask("GET", "/report", "", "Sec-Fetch-Site", "none"), 200},
		{"a page in an old browser", ask("POST", "/deadletters/purge", "", "Origin", "https://evil.example"), 403},
		{"a page whose name resolves to this machine", ask("GET", "/report", "evil.example:8081", "Sec-Fetch-Site", "same-origin"), 403},
		{"the same over IPv6", ask("GET", "/report", "[::1]:8081"), 200},
		{"localhost in capitals", ask("GET", "/report", "LOCALHOST:8081"), 200},
		{"localhost with a final dot", ask("GET", "/report", "localhost."), 200},
		{"a name that begins like localhost", ask("GET", "/report", "localhost.evil.example"), 403},
	} {
		if test.got != test.want {
			t.Errorf("%s: %d, want %d", test.name, test.got, test.want)
		}
	}
}

// A name that resolves to an address of the network is rejected like one that resolves to this
// machine, and the log warns of such an admin address. With a guard, requests need a token, and
// names are allowed.
func TestAdminOnTheNetwork(t *testing.T) {
	for _, guarded := range []bool{false, true} {
		var log syncBuffer
		d, _ := started(t, t.TempDir(), func(o *Options) {
			o.AdminListen = "0.0.0.0:0"
			o.Logger = slog.New(slog.NewTextHandler(&log, nil))
			if guarded {
				o.AdminGuard = func(next http.Handler) http.Handler { return next }
			}
		})
		_, port, _ := net.SplitHostPort(d.AdminAddr().String())
		for host, want := range map[string]int{"evil.example": http.StatusForbidden, "10.0.0.7": http.StatusOK} {
			if guarded {
				want = http.StatusOK
			}
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:"+port+"/metrics", nil)
			req.Host = host
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if resp.StatusCode != want {
				t.Errorf("guarded %v, Host %s: %d, want %d", guarded, host, resp.StatusCode, want)
			}
		}
		if n := strings.Count(log.String(), "the admin address has no authentication"); (n == 1) == guarded {
			t.Errorf("guarded %v: %d warnings of the open admin address", guarded, n)
		}
	}
}

// Another user must not be able to replace stored data.
func TestAFolderThatAllMayChangeIsReported(t *testing.T) {
	for mode, want := range map[os.FileMode]int{0o777: 1, 0o755: 0, 0o777 | os.ModeSticky: 0} {
		dir := t.TempDir()
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		var log syncBuffer
		_, stop := started(t, dir, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		stop()
		if n := strings.Count(log.String(), "data directory"); n != want {
			t.Errorf("mode %v: %d warnings, want %d", mode, n, want)
		}
	}
}

// syncBuffer is a buffer that a logger writes to while a test reads.
type syncBuffer struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.String()
}

// The guard of the admin listener also protects /debug.
func TestDebugIsGuarded(t *testing.T) {
	d, _ := started(t, t.TempDir(), func(o *Options) {
		o.Debug = true
		o.AdminGuard = func(http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
		}
	})
	for _, path := range []string{"config", "lanes", "pprof/", "pprof/heap", "pprof/profile"} {
		if s := get(t, "http://"+d.AdminAddr().String()+"/debug/"+path).StatusCode; s != http.StatusForbidden {
			t.Errorf("%s: %d", path, s)
		}
		if s := get(t, "http://"+d.Addr().String()+"/debug/"+path).StatusCode; s != http.StatusNotFound {
			t.Errorf("%s on the listener for calls: %d", path, s)
		}
	}
}

// keyConfig is the config of a namespace with a Source that has liveconfigtest.Key, without destinations.
func keyConfig() liveconfig.Config {
	hash := writekey.HashOf(liveconfigtest.Key)
	return liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: "shop", Sources: []liveconfig.Source{
		{Name: "web", WriteKeySHA256: liveconfig.KeyHashes{hex.EncodeToString(hash[:])}},
	}}
}

// The state is in the store: it survives a restart of the dispatcher.
func TestRemovedWriteKeySurvivesARestart(t *testing.T) {
	dir := t.TempDir()
	config := keyConfig()
	d, stop := started(t, dir)
	d.Set("shop", liveconfigtest.Encode(t, config))
	d.Synced()
	if status, body := send(t, d, "1"); status != http.StatusOK {
		t.Fatalf("%d %s", status, body)
	}
	config.Sources[0].WriteKeySHA256 = nil
	d.Set("shop", liveconfigtest.Encode(t, config))
	for _, when := range []string{"before", "after"} {
		if status, body := send(t, d, "2"); status != http.StatusServiceUnavailable || !strings.Contains(body, `"write_key_removed"`) {
			t.Errorf("%s the restart: %d %s, want 503 write_key_removed", when, status, body)
		}
		if when == "before" {
			stop()
			d, _ = started(t, dir)
			d.Set("shop", liveconfigtest.Encode(t, config))
			d.Synced()
		}
	}
	d.Set("shop", liveconfigtest.Encode(t, keyConfig()))
	if status, body := send(t, d, "2"); status != http.StatusOK {
		t.Errorf("with the restored key: %d %s", status, body)
	}
}

// The counters of a Source continue after a restart, so that the sums in a status do not decrease.
func TestCountersSurviveARestart(t *testing.T) {
	receiver := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(receiver.Close)
	dir, config := t.TempDir(), liveconfigtest.Encode(t, liveconfigtest.Config(receiver.URL))
	source := func(d *Dispatcher) adminapi.SourceReport { return d.Report().Namespaces[0].Sources[0] }
	var before adminapi.SourceReport
	for run := range 2 {
		d, stop := started(t, dir)
		d.Set("shop", config)
		d.Synced()
		if run == 1 {
			if got := source(d); got.Rejected != before.Rejected || got.Duplicates != before.Duplicates || got.Accepted != before.Accepted ||
				got.LastRejection != before.LastRejection ||
				!got.LastRejected.Equal(before.LastRejected) || !got.LastAccepted.Equal(before.LastAccepted) {
				t.Errorf("after a restart: got %+v, want %+v", got, before)
			}
		}
		for range 2 { // The second one is a duplicate.
			if status, body := send(t, d, fmt.Sprint("m", run)); status != http.StatusOK {
				t.Fatalf("call: got %d %s, want 200", status, body)
			}
		}
		if status, body := send(t, d, strings.Repeat("x", 1000)); status != http.StatusBadRequest {
			t.Fatalf("call with a long messageId: got %d %s, want 400", status, body)
		}
		before = source(d)
		if n := int64(run) + 1; before.Rejected != n || before.Duplicates != n || before.Accepted != n {
			t.Errorf("run %d: got %+v, want %d accepted, rejected and duplicate calls", run, before, n)
		}
		stop()
	}
}

// After a restart, the attempts have the last failed one with the receiver's answer; the report, the metrics and
// the log do not have the answer.
func TestAnswerSurvivesARestart(t *testing.T) {
	const answer = "the customer is unknown here"
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, answer, http.StatusForbidden)
	}))
	t.Cleanup(receiver.Close)
	var log bytes.Buffer
	dir, config := t.TempDir(), liveconfigtest.Encode(t, liveconfigtest.Config(receiver.URL))
	run := func() (*Dispatcher, func()) {
		d, stop := started(t, dir, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		d.Set("shop", config)
		d.Synced()
		return d, stop
	}
	d, stop := run()
	if status, body := send(t, d, "m1"); status != http.StatusOK {
		t.Fatalf("call: got %d %s, want 200", status, body)
	}
	wait.True(t, "the dead letter", func() bool { return destinationReport(d).DeadLettersStored == 1 })
	stop()
	d, stop = run()
	read := func(path string) string {
		text, err := io.ReadAll(get(t, "http://"+d.AdminAddr().String()+path).Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	var attempt adminapi.Attempt
	if text := read("/attempts?destination=shop/crm"); json.Unmarshal([]byte(text), &attempt) != nil || attempt.MessageID != "m1" || attempt.StatusCode != http.StatusForbidden || attempt.Response != answer+"\n" {
		t.Errorf("attempts: got %s, want that of m1 with the answer", text)
	}
	texts := map[string]string{"report": read("/report"), "metrics": read("/metrics")}
	stop()
	texts["log"] = log.String()
	for name, text := range texts {
		if text == "" || strings.Contains(text, answer) {
			t.Errorf("%s: got %q, want a text without the receiver's answer", name, text)
		}
	}
}

func TestTooLittleMemoryIsRefused(t *testing.T) {
	_, err := New(Options{DataDir: t.TempDir(), ServerOptions: ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0"},
		Memory: memory.Min - 1})
	if err == nil || !strings.Contains(err.Error(), "set --memory to 200000000 or more") {
		t.Errorf("New: %v, want an error with the minimum", err)
	}
}
