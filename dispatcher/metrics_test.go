package dispatcher

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/metrics"
	"github.com/posthorn/posthorn/test/wait"
)

// The metrics of a dispatcher after traffic of every kind are exactly the metrics of
// docs/metrics.md.
func TestMetricsAreDocumented(t *testing.T) {
	endpoints := map[string]string{"down": "http://127.0.0.1:1/hook"}
	for name, status := range map[string]int{"fine": http.StatusOK, "rejects": http.StatusBadRequest, "moved": http.StatusFound,
		"fails": http.StatusInternalServerError} {
		sink := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
		t.Cleanup(sink.Close)
		endpoints[name] = sink.URL + "/hook-path"
	}
	d, _ := started(t, t.TempDir(), func(o *Options) { o.DetailedMetrics = true })
	config := liveconfigtest.Config("")
	plain := config.Destinations[0]
	config.Destinations = nil
	for _, name := range []string{"down", "fails", "fine", "moved", "rejects"} {
		destination := plain
		destination.Name, destination.Endpoints = name, []liveconfig.Endpoint{{Name: "primary", URL: liveconfig.NewSecret(endpoints[name])}}
		config.Destinations = append(config.Destinations, destination)
	}
	config.Audiences = []liveconfig.Audience{{Name: "shoppers", Generation: 1, Revision: "a1", Source: "web", Key: "shoppers",
		Kind: liveconfig.KindAudience, MaxRemovalPercent: 50}}
	d.Set("shop", liveconfigtest.Encode(t, config))
	d.Set("broken", liveconfig.Stored{Config: []byte("not a config")})
	d.Synced()

	for _, id := range []string{"m1", "m1", "m2"} {
		if status, body := send(t, d, id); status != http.StatusOK {
			t.Fatalf("%d %s", status, body)
		}
	}
	post := func(method, path, key, body string, want int) {
		t.Helper()
		req, _ := http.NewRequestWithContext(t.Context(), method, "http://"+d.Addr().String()+path, strings.NewReader(body))
		req.SetBasicAuth(key, "")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if answer, _ := io.ReadAll(resp.Body); resp.StatusCode != want {
			t.Fatalf("%s %s: %d %s", method, path, resp.StatusCode, answer)
		}
	}
	post(http.MethodPost, "/v1/track", liveconfigtest.Key, `{"userId":"user-1"}`, http.StatusBadRequest)
	post(http.MethodPost, "/v1/track", liveconfigtest.Key, `{`, http.StatusBadRequest)
	post(http.MethodPost, "/v1/track", liveconfigtest.Key, `{"userId":"u","event":"E","timestamp":"yesterday","properties":{"id":12345678901234567890}}`, http.StatusOK)
	post(http.MethodPost, "/v1/track", "unknown-key", `{}`, http.StatusServiceUnavailable) // "broken" may have it.
	post(http.MethodPut, "/v1/audiences/shoppers/members", liveconfigtest.Key, `{"userId":"user-1"}`, http.StatusOK)
	post(http.MethodPut, "/v1/audiences/shoppers/members", liveconfigtest.Key, `{"userId":`, http.StatusBadRequest)

	scrape := func() string {
		body, err := io.ReadAll(get(t, "http://"+d.AdminAddr().String()+"/metrics").Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(body)
	}
	for _, series := range []string{
		`posthorn_endpoint_failures_total{namespace="shop",destination="down",endpoint="primary",result="ConnectionRefused",code="none"}`,
		`posthorn_endpoint_failures_total{namespace="shop",destination="fails",endpoint="primary",result="ServerError",code="5xx"}`,
		`posthorn_endpoint_attempts_total{namespace="shop",destination="fine",endpoint="primary",result="delivered"} 4`,
		`posthorn_delivery_attempts_total{code="4xx",namespace="shop",result="Rejected"} 4`,
		`posthorn_endpoint_failures_total{namespace="shop",destination="moved",endpoint="primary",result="Redirected",code="3xx"} 4`,
		`posthorn_destination_long_numbers_total{namespace="shop",destination="fine"} 1`,
		`posthorn_destination_dead_lettered_total{namespace="shop",destination="rejects",reason="Rejected"} 4`,
		`posthorn_source_messages_total{namespace="shop",source="web",outcome="delivered"} 4`,
		`posthorn_destination_messages_total{namespace="shop",destination="rejects",outcome="dead_lettered"} 4`,
		`posthorn_ingest_calls_total{namespace="shop",result="duplicate",source="web"} 1`,
		`posthorn_audience_syncs_total{audience="shoppers",namespace="shop",result="done"} 1`,
		`posthorn_ingest_defects_total{defect="timestamp",namespace="shop",source="web"} 1`,
		`posthorn_config_refused{namespace="broken"} 1`,
		`posthorn_lane_pending_messages{namespace="shop",destination="fails",source="web",endpoint=""} 4`,
	} {
		wait.True(t, series, func() bool { return strings.Contains(scrape(), series) })
	}

	text := scrape()
	differences, err := metrics.Differences("Dispatcher", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range differences {
		t.Error(d)
	}
	// A label must never contain a URL, an event name or a user.
	for _, word := range []string{"hook-path", "127.0.0.1", `"E"`, "user-1", `"u"`, liveconfigtest.Key, "unknown-key"} {
		if strings.Contains(text, word) {
			t.Errorf("the metrics contain %q", word)
		}
	}
	// The WAL was synced for every accepted request, and its log is not empty while "fails" lacks its messages.
	for _, never := range []string{"posthorn_queue_sync_seconds_count 0\n", `posthorn_queue_log_bytes{namespace="shop",source="web"} 0` + "\n",
		`posthorn_config_revision{namespace="shop"} 0` + "\n"} {
		if strings.Contains(text, never) {
			t.Errorf("unexpected: %s", never)
		}
	}

	// The series of a deleted object are removed.
	config.Destinations, config.Audiences = config.Destinations[2:3], nil
	d.Set("shop", liveconfigtest.Encode(t, config))
	d.Delete("broken")
	gone := []string{`destination="rejects"`, `namespace="broken"`}
	wait.True(t, "the series of what was deleted to be gone", func() bool {
		text := scrape()
		for _, label := range gone {
			if strings.Contains(text, label) {
				return false
			}
		}
		return true
	})
}

// The counters of a Source without lanes begin at 0 in each process.
func TestCountersOfASourceWithoutLanesBeginAtZero(t *testing.T) {
	sink := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(sink.Close)
	dir := t.TempDir()
	d, stop := started(t, dir, func(o *Options) { o.OrphanGrace = time.Millisecond })
	config := liveconfigtest.Config(sink.URL)
	d.Set("shop", liveconfigtest.Numbered(t, 1, config))
	d.Synced()
	if status, body := send(t, d, "m1"); status != http.StatusOK {
		t.Fatalf("%d %s", status, body)
	}
	wait.True(t, "the delivery", func() bool { return destinationReport(d).Delivered == 1 })
	config.Destinations = nil
	d.Set("shop", liveconfigtest.Numbered(t, 2, config, liveconfig.Tombstone{
		Object: liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: "crm"}, DeletedAt: time.Now(), Sources: []string{"web"},
	}))
	wait.True(t, "the lane to be removed", func() bool { return len(d.store.Lanes()) == 0 })
	stop()
	d, _ = started(t, dir)
	series := d.seriesOf("shop", &config)
	check.Equal(t, "delivered in the ledger", series.sources[0].stats.Ledger.Delivered, 1)
	check.Equal(t, "delivered since the start", series.sources[0].ended.Delivered, 0)
}
