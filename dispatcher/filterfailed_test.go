package dispatcher

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// A call about which a filter cannot decide is neither sent nor filtered: it is a dead letter of that destination. A
// redelivery asks the corrected filter.
func TestAFailedFilterMakesADeadLetter(t *testing.T) {
	var mu sync.Mutex
	got := map[string]int{}
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		got[r.URL.Path+" "+r.Header.Get("Idempotency-Key")]++
	}))
	t.Cleanup(receiver.Close)
	d, _ := started(t, t.TempDir())
	c := liveconfigtest.Config(receiver.URL + "/crm")
	second := c.Destinations[0]
	second.Name, second.Endpoints = "mail", []liveconfig.Endpoint{{Name: "primary", URL: liveconfig.NewSecret(receiver.URL + "/mail")}}
	c.Destinations = append(c.Destinations, second)
	c.Destinations[0].Filter = &liveconfig.Filter{Expression: "100 / int(call.properties.parts) > 10"}
	d.Set("shop", liveconfigtest.Encode(t, c))
	d.Synced()

	for id, parts := range map[string]string{"sent": "5", "filtered": "50", "failed-1": "0", "failed-2": `"secret-value"`, "absent": "null"} {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+d.Addr().String()+"/v1/track",
			strings.NewReader(`{"userId":"u","event":"E","messageId":"`+id+`","properties":{"parts":`+parts+`}}`))
		req.SetBasicAuth(liveconfigtest.Key, "")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		check.Equal(t, "status of "+id, resp.StatusCode, http.StatusOK)
	}
	settled := func(delivered, filtered, dead int64) {
		t.Helper()
		wait.True(t, "nothing is pending", func() bool { return d.store.DestinationStats("shop/crm").Ledger.Pending == 0 })
		check.Equal(t, "ledger", d.store.DestinationStats("shop/crm").Ledger,
			queue.Ledger{Accepted: delivered + filtered + dead, Delivered: delivered, Filtered: filtered, DeadLettered: dead})
	}
	settled(1, 2, 2)
	var letters []queue.DeadLetter
	check.NoError(t, "dead letters", d.store.DeadLetters(t.Context(), "shop/crm", "", func(l queue.DeadLetter) bool {
		letters = append(letters, l)
		return true
	}))
	check.Equal(t, "dead letters", len(letters), 2)
	for _, l := range letters {
		check.Equal(t, "reason of "+l.ID, l.Failure.Reason, queue.ReasonFilterFailed)
		check.Equal(t, "attempts of "+l.ID, l.Attempts, 0)
		want := "character 5 (call.properties.parts): division by zero; check the divisor first"
		if l.ID == "failed-2" {
			want = "character 10 (call.properties.parts): a value cannot be converted; check it first, for example with matches('^[0-9]+$')"
		}
		check.Equal(t, "message of "+l.ID, l.Failure.Message, want)
	}
	filterFailure := func() *adminapi.Failure {
		view, _ := d.gate.View().Namespace("shop")
		for _, r := range d.engine.Report(view.Config) {
			if r.Name == "crm" {
				return r.FilterFailure
			}
		}
		return nil
	}
	if f := filterFailure(); f == nil || f.Reason != queue.ReasonFilterFailed || !strings.HasPrefix(f.Message, "character") {
		t.Errorf("failure of the filter in the report: got %+v; want that of the last call", f)
	}
	wait.True(t, "the other destination has all calls", func() bool { return d.store.DestinationStats("shop/mail").Ledger.Delivered == 5 })

	// The corrected filter decides: one is sent, the other one still fails.
	c.Destinations[0].Filter = &liveconfig.Filter{Expression: "int(call.properties.parts) == 0"}
	c.Destinations[0].Revision = "d2"
	d.Set("shop", liveconfigtest.Encode(t, c))
	if f := filterFailure(); f != nil {
		t.Errorf("failure of the filter in the report after an edit: got %+v; want none", f)
	}
	p, err := redelivery.Run(t.Context(), d.gate, d.store, "shop/crm",
		adminapi.DeadLetterSelector{Reasons: []string{queue.ReasonFilterFailed}}, redelivery.Options{})
	check.NoError(t, "redelivery", err)
	check.Equal(t, "redelivered", p.Redelivered, 2)
	settled(2, 2, 3)
	mu.Lock()
	defer mu.Unlock()
	for _, key := range []string{"/crm sent", "/crm failed-1", "/mail sent", "/mail filtered", "/mail failed-1", "/mail failed-2",
		"/mail absent"} {
		if got[key] != 1 {
			t.Errorf("requests for %q: got %d, want 1", key, got[key])
		}
	}
	check.Equal(t, "requests", len(got), 7)
}
