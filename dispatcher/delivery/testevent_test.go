package delivery

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// sendTest sends a test event, whose error must be want.
func (w *world) sendTest(destination, endpoint string, want error) []adminapi.Attempt {
	w.Helper()
	list, err := w.engine.SendTest(w.Context(), destination, endpoint)
	if !errors.Is(err, want) {
		w.Errorf("test of %s %s: got error %v, want %v", destination, endpoint, err, want)
	}
	return list
}

// A test event has the form and the signature of a delivery, and changes neither ledger nor circuit.
func TestTestEvent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{"http://b.test": {status: http.StatusTeapot, body: "short and stout"}}))
		defer w.end()
		crm := dest("crm", "http://a.test", "http://b.test")
		crm.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret("s3cret")}}
		w.apply(crm)
		before := w.report("crm")
		got := w.sendTest("ns/crm", "", nil)
		if len(got) != 2 || got[0].Endpoint != "e0" || got[0].StatusCode != 200 || got[0].Reason != "" || got[1].StatusCode != 418 ||
			got[1].Reason != "Rejected" || got[1].Response != "short and stout" || !got[0].Test || !got[1].Test {
			t.Errorf("attempts: got %+v, want a success at e0 and a rejection with its response at e1", got)
		}
		for i, r := range w.client.requests("") {
			var body struct{ Type, Event, MessageID string }
			if err := json.Unmarshal([]byte(r.body), &body); err != nil || body.Type != "track" || body.Event != adminapi.TestEvent ||
				!strings.HasPrefix(body.MessageID, "posthorn-test-") || string(got[i].MessageID) != body.MessageID || r.id() != body.MessageID {
				t.Errorf("request %d: got %s with the key %s and error %v, want the track event %q", i, r.body, r.id(), err, adminapi.TestEvent)
			}
			if len(r.headers.Get("X-Signature")) != 40 {
				t.Errorf("request %d: got X-Signature %q, want 40 digits", i, r.headers.Get("X-Signature"))
			}
		}
		after := w.report("crm")
		if after.Ledger != before.Ledger || after.Endpoints[1].State != before.Endpoints[1].State || after.Endpoints[1].LastFailure != nil {
			t.Errorf("report after a failed test: got %+v, want that of before, %+v", after, before)
		}
		attempts := w.engine.Attempts("ns/crm", "e1")
		if len(attempts) != 1 || !attempts[0].Test || attempts[0].Response != "" {
			t.Errorf("attempts at e1: got %+v, want the test without its response", attempts)
		}
	})
}

// Tests are bounded by destination, and sent by active destinations only.
func TestTestEventIsRefused(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		defer w.end()
		held := dest("held", "http://c.test")
		held.State = liveconfig.Suspended
		w.apply(dest("crm", "http://a.test"), dest("other", "http://b.test"), held)
		w.sendTest("ns/none", "", ErrNoSuchEndpoint)
		w.sendTest("ns/crm", "e7", ErrNoSuchEndpoint)
		w.sendTest("ns/held", "", ErrNotActive)
		for range 3 {
			w.sendTest("ns/crm", "e0", nil)
		}
		w.sendTest("ns/crm", "e0", ErrTooManyTests)
		w.sendTest("ns/other", "", nil)
		w.sleep(6 * time.Second)
		w.sendTest("ns/crm", "", nil)
		w.sendTest("ns/crm", "", ErrTooManyTests)
		if n := len(w.client.requests("")); n != 5 {
			t.Errorf("requests: got %d, want 5", n)
		}
	})
}

// A test that its caller ends is no failed attempt.
func TestTestEventIsEnded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200, after: 4 * time.Second}))
		defer w.end()
		w.apply(dest("crm", "http://a.test", "http://b.test"))
		ctx, cancel := context.WithCancel(w.Context())
		time.AfterFunc(time.Second, cancel)
		if _, err := w.engine.SendTest(ctx, "ns/crm", ""); !errors.Is(err, context.Canceled) {
			t.Errorf("test that its caller ended: got error %v, want %v", err, context.Canceled)
		}
		if got := w.engine.Attempts("ns/crm", ""); len(got) != 0 {
			t.Errorf("attempts: got %+v, want none", got)
		}
		if n := len(w.client.requests("")); n > 1 {
			t.Errorf("requests: got %d, want none to the second endpoint", n)
		}
	})
}
