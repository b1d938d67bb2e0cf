package dispatcher

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/test/wait"
)

func shopReport(d *Dispatcher) adminapi.ConfigReport {
	report := d.Report()
	return podreport.NewIndex(report).Config("shop")
}

// pending counts the pending messages in the store.
func pending(d *Dispatcher) (n int64) {
	for _, id := range d.Store().Lanes() {
		n += d.Store().LaneStats(id).Pending
	}
	return n
}

// A namespace whose live config is lost keeps its messages and answers 503, also after a restart
// without an operator. Its messages are delivered when the config is there again.
func TestLostConfigParksTheNamespace(t *testing.T) {
	var healthy atomic.Bool
	var delivered atomic.Int64
	sink := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if !healthy.Load() {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		delivered.Add(1)
	}))
	t.Cleanup(sink.Close)
	dir := t.TempDir()
	impatient := func(o *Options) { o.OrphanGrace = time.Millisecond }
	d, stop := started(t, dir, impatient)
	d.Set("shop", liveconfigtest.Numbered(t, 7, liveconfigtest.Config(sink.URL)))
	d.Synced()
	for _, id := range []string{"m1", "m2"} {
		if s, body := send(t, d, id); s != http.StatusOK {
			t.Fatalf("%d %s", s, body)
		}
	}
	lost := func(d *Dispatcher) {
		t.Helper()
		if s, body := send(t, d, "m3"); s != http.StatusServiceUnavailable || !strings.Contains(body, "config of this Source is missing") {
			t.Errorf("call: got %d %s, want 503 because of the config", s, body)
		}
		if !d.configs.HasUnlistedKeys() {
			t.Error("unlisted write keys with a lost config: got none, want some")
		}
		n := shopReport(d)
		if n.Missing.IsZero() || n.Number != 7 {
			t.Errorf("report: got missing %v, number %d; want a time, 7", n.Missing, n.Number)
		}
		var objects []string
		for _, p := range n.Parked {
			objects = append(objects, p.Object)
		}
		if diff := cmp.Diff([]string{"destinations/crm", "sources/web"}, objects); diff != "" {
			t.Errorf("parked objects (-want +got):\n%s", diff)
		}
		if got := pending(d); got != 2 {
			t.Errorf("pending messages: got %d, want 2", got)
		}
	}
	d.Delete("shop")
	lost(d)
	stop()

	healthy.Store(true)
	d, stop = started(t, dir, impatient)
	d.Synced()
	lost(d)
	d.Set("shop", liveconfigtest.Numbered(t, 6, liveconfigtest.Config("http://127.0.0.1:1/"))) // From a backup.
	lost(d)
	if refused := podreport.NewIndex(d.Report()).Namespace("shop").Refused; refused == nil || !strings.Contains(refused.Error, "number 6") {
		t.Errorf("refusal of an older number: got %+v", refused)
	}
	if got := delivered.Load(); got != 0 {
		t.Errorf("deliveries while parked: got %d, want 0", got)
	}
	d.Set("shop", liveconfigtest.Numbered(t, 8, liveconfigtest.Config(sink.URL)))
	wait.True(t, "delivery of both messages", func() bool { return delivered.Load() == 2 })
	if s, body := send(t, d, "m4"); s != http.StatusOK {
		t.Errorf("call with the config: got %d %s, want 200", s, body)
	}
	if d.configs.HasUnlistedKeys() {
		t.Error("unlisted write keys with the config: got some, want none")
	}
	stop()
}

// A pod without a config in effect is ready, so that it gets traffic and the operator's repair, unless
// its configs are invalid.
func TestReadyWhileParked(t *testing.T) {
	dir := t.TempDir()
	d, stop := started(t, dir)
	d.Set("shop", liveconfigtest.Numbered(t, 7, liveconfigtest.Config("http://127.0.0.1:1/")))
	d.Synced()
	stop()
	d, stop = started(t, dir)
	ready := func(step string, want int) {
		t.Helper()
		if got := get(t, "http://"+d.Addr().String()+"/readyz").StatusCode; got != want {
			t.Errorf("status of /readyz %s: got %d, want %d", step, got, want)
		}
	}
	d.Synced()
	ready("with a missing config", http.StatusOK)
	d.Set("shop", liveconfigtest.Numbered(t, 6, liveconfigtest.Config("http://127.0.0.1:1/")))
	ready("with an older number", http.StatusOK)
	d.Set("shop", liveconfig.Stored{Config: []byte("not a config")})
	ready("with an invalid config", http.StatusServiceUnavailable)
	d.Set("shop", liveconfigtest.Numbered(t, 6, liveconfigtest.Config("http://127.0.0.1:1/")))
	ready("with an older number again", http.StatusOK)
	stop()
}

// A parked destination gets only the calls that its filter permits, also after the grace and a
// restart.
func TestParkedDestinationKeepsItsFilter(t *testing.T) {
	var delivered atomic.Int64
	sink := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { delivered.Add(1) }))
	t.Cleanup(sink.Close)
	dir := t.TempDir()
	impatient := func(o *Options) { o.OrphanGrace = time.Millisecond }
	config := liveconfigtest.Config(sink.URL)
	config.Destinations[0].Filter = &liveconfig.Filter{Types: []string{"page"}}
	none := config
	none.Destinations = nil
	d, stop := started(t, dir, impatient)
	sendTrack := func(id string) {
		t.Helper()
		if s, body := send(t, d, id); s != http.StatusOK {
			t.Fatalf("call %s: got %d %s, want 200", id, s, body)
		}
	}
	d.Set("shop", liveconfigtest.Numbered(t, 7, config))
	d.Synced()
	d.Set("shop", liveconfigtest.Numbered(t, 8, none))
	sendTrack("m1")
	time.Sleep(2 * time.Millisecond) // The grace ends.
	d.Set("shop", liveconfigtest.Numbered(t, 9, none))
	sendTrack("m2")
	stop()
	d, stop = started(t, dir, impatient)
	d.Set("shop", liveconfigtest.Numbered(t, 9, none))
	d.Synced()
	sendTrack("m3")
	d.Set("shop", liveconfigtest.Numbered(t, 10, config))
	wait.True(t, "the end of the excluded calls", func() bool { return pending(d) == 0 })
	if got := delivered.Load(); got != 0 {
		t.Errorf("delivered calls that the filter excludes: got %d, want 0", got)
	}
	stop()
}

// A restored config parks the connections that it lacks, until a config has them again. A config of
// an unbroken history disconnects for the grace period.
func TestRestoredConfigParksLostConnections(t *testing.T) {
	for name, c := range map[string]struct {
		since int64 // of the config without the connection
		want  time.Duration
	}{
		"broken history":   {since: 8, want: liveconfig.ParkingTime},
		"complete history": {since: 7, want: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			grace := func(o *Options) { o.OrphanGrace = time.Hour }
			config := liveconfigtest.Config("http://127.0.0.1:1/")
			config.Destinations[0].Filter = &liveconfig.Filter{Types: []string{"track"}}
			disconnected := liveconfigtest.Config("http://127.0.0.1:1/")
			disconnected.Destinations[0].Sources = nil
			restored := liveconfigtest.Numbered(t, 8, disconnected)
			head, err := liveconfig.DecodeHead(restored.Head)
			if err != nil {
				t.Fatal(err)
			}
			head.Since = c.since
			if restored.Head, err = liveconfig.EncodeHead(head); err != nil {
				t.Fatal(err)
			}
			d, stop := started(t, dir, grace)
			d.Set("shop", liveconfigtest.Numbered(t, 7, config))
			d.Synced()
			if s, body := send(t, d, "m1"); s != http.StatusOK {
				t.Fatalf("%d %s", s, body)
			}
			dropped := func(step string) {
				t.Helper()
				discards := shopReport(d).Discards
				if len(discards) != 1 {
					t.Fatalf("discards %s: got %+v, want one", step, discards)
				}
				if left := time.Until(discards[0].At); left > c.want || left < c.want-time.Minute {
					t.Errorf("time until the discard %s: got %v, want %v", step, left, c.want)
				}
			}
			d.Set("shop", restored)
			dropped("with the restored config")
			stop()
			d, stop = started(t, dir, grace)
			d.Set("shop", restored)
			d.Synced()
			dropped("after a restart")
			d.Set("shop", liveconfigtest.Numbered(t, 9, config))
			if n := shopReport(d); len(n.Discards) != 0 || pending(d) != 1 {
				t.Errorf("connected again: got %+v, %d pending", n, pending(d))
			}
			stop()
		})
	}
}

// Only a tombstone removes an object's lanes; the discard is reported before.
func TestOnlyTombstonesDiscard(t *testing.T) {
	d, stop := started(t, t.TempDir(), func(o *Options) { o.OrphanGrace = time.Hour })
	config := liveconfigtest.Config("http://127.0.0.1:1/")
	d.Set("shop", liveconfigtest.Numbered(t, 7, config))
	d.Synced()
	if s, body := send(t, d, "m1"); s != http.StatusOK {
		t.Fatalf("%d %s", s, body)
	}
	none := config
	none.Destinations = nil
	d.Set("shop", liveconfigtest.Numbered(t, 8, none))
	n := shopReport(d)
	if len(n.Discards) != 0 || len(n.Parked) != 1 || n.Parked[0].Object != "destinations/crm" {
		t.Errorf("without a tombstone: got %+v", n)
	}
	before := time.Now()
	d.Set("shop", liveconfigtest.Numbered(t, 9, none, liveconfig.Tombstone{
		Object: liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: "crm"}, DeletedAt: time.Now(), Sources: []string{"web"},
	}))
	n = shopReport(d)
	if len(n.Discards) != 1 || len(n.Parked) != 0 {
		t.Fatalf("with a tombstone: got %+v", n)
	}
	at := n.Discards[0].At
	if diff := cmp.Diff(adminapi.Discard{Source: "web", Destination: "crm", Messages: 1, At: at}, n.Discards[0]); diff != "" {
		t.Errorf("discard (-want +got):\n%s", diff)
	}
	if at.Before(before.Add(time.Hour)) || at.After(time.Now().Add(time.Hour)) {
		t.Errorf("time of the discard: got %v, want an hour from now", at)
	}
	d.Set("shop", liveconfigtest.Numbered(t, 10, config))
	if n := shopReport(d); len(n.Discards) != 0 || pending(d) != 1 {
		t.Errorf("restored: got %+v, %d pending", n, pending(d))
	}
	stop()
}
