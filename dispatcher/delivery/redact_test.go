package delivery

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
)

// redacting returns dest("crm", urlA) with rules.
func redacting(rules *liveconfig.Redact) liveconfig.Destination {
	d := dest("crm", urlA)
	d.Redact = rules
	return d
}

// sendJSON appends a message with a body.
func (w *world) sendJSON(body string) {
	w.Helper()
	w.next++
	_, err := w.store.Append(context.Background(), []queue.Message{{Source: "ns/web", ID: fmt.Sprint("m", w.next), Type: "track",
		AcceptedAt: time.Now(), LongNumbers: strings.Contains(body, "12345678901234567890"), Body: []byte(body)}})
	check.NoError(w.T, "append", err)
}

const private = `{"type":"track","messageId":"m","userId":"u","total":12345678901234567890,"ip":"192.0.2.7"}`

// Requests and their tail have the redacted body; the copy counts as memory of requests in flight until it is sent.
func TestRedactedRequest(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200, after: time.Second}))
		w.apply(redacting(&liveconfig.Redact{Drop: []string{"ip"}, Mask: []string{"userId"}}))
		tail := w.engine.Tail(t.Context(), "ns/crm", "", true)
		w.sendJSON(private)
		w.sleep(time.Millisecond)
		const want = `{"type":"track","messageId":"m","userId":"***","total":"12345678901234567890"}`
		leased := func(e *Engine) int { return e.scheduler.leasedBytes }
		check.Equal(t, "leased bytes in flight", look(w, leased), len(private)+len(want))
		w.sleep(2 * time.Second)
		check.Equal(t, "leased bytes afterwards", look(w, leased), 0)
		check.Equal(t, "body", w.client.requests(urlA)[0].body, want)
		for a := range tail.Attempts() {
			check.Equal(t, "body of the tail", string(a.Body), want)
			break
		}
		list, err := w.engine.SendTest(t.Context(), "ns/crm", "")
		check.NoError(t, "test event", err)
		check.Equal(t, "test attempts", len(list), 1)
		w.end()
	})
}

// A response is shown only under the rules of its request, because it may repeat the request.
func TestResponsesUnderOtherRules(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 422, body: "echo"}))
		drop, mask := &liveconfig.Redact{Drop: []string{"ip"}}, &liveconfig.Redact{Mask: []string{"userId"}}
		shown := func() (attempt, letter, body string) {
			for _, a := range w.engine.Attempts("ns/crm", "") {
				attempt += a.Response
			}
			d := w.dead("crm")[0]
			text, err := w.engine.ShownBody(&d)
			check.NoError(t, "body", err)
			return attempt, string(w.engine.ShownResponse(&d)), string(text)
		}
		expect := func(when, wantAttempt, wantLetter, wantBody string) {
			t.Helper()
			attempt, letter, body := shown()
			if diff := cmp.Diff([]string{wantAttempt, wantLetter, wantBody}, []string{attempt, letter, body}); diff != "" {
				t.Errorf("%s: attempt, response and body (-want +got):\n%s", when, diff)
			}
		}
		w.apply(redacting(drop))
		w.sendJSON(private)
		w.sleep(time.Minute)
		dropped := strings.Replace(private, `,"ip":"192.0.2.7"`, "", 1)
		expect("the same rules", "echo", "echo", dropped)
		w.apply(redacting(mask))
		expect("other rules", "", responseHidden, strings.Replace(dropped, `"u"`, `"***"`, 1))
		w.apply(redacting(nil))
		expect("no rules", "", "echo", dropped)

		w.client.set(always(answer{status: 422, body: "late", after: time.Second}))
		w.sendJSON(private)
		w.sleep(time.Millisecond)
		w.apply(redacting(drop))
		w.sleep(time.Minute)
		expect("rules that changed during the request", "", "echo", dropped)
		w.apply(redacting(nil))
		w.sendJSON(private)
		w.sleep(time.Minute)
		expect("a request without rules", "late", "echo", dropped)
		w.restart()
		w.apply(redacting(drop))
		expect("rules since a restart", "", "echo", dropped)
		w.apply(redacting(mask))
		w.apply()
		d := w.dead("crm")[0]
		body, err := w.engine.ShownBody(&d)
		check.NoError(t, "body", err)
		check.Equal(t, "body of a deleted destination", string(body), strings.Replace(dropped, `"u"`, `"***"`, 1))
		w.stop()
	})
}

// The report names the paths that matched none of many messages, until the destination is changed.
func TestUnmatchedPaths(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		rules := &liveconfig.Redact{Drop: []string{"ip", "address"}, Mask: []string{"*.email"}}
		w.apply(redacting(rules))
		for range unmatchedAfter - 1 {
			w.sendJSON(private)
		}
		w.sleep(time.Minute)
		if u := w.report("crm").Unmatched; u != nil {
			t.Errorf("after few messages: got %+v, want none", u)
		}
		w.sendJSON(private)
		w.sleep(time.Minute)
		check.Same(t, "unmatched paths", w.report("crm").Unmatched, &adminapi.UnmatchedPaths{Messages: unmatchedAfter,
			Paths: []string{"drop[address]", "mask[*.email]"}})
		w.sendJSON(`{"type":"track","address":1,"traits":{"email":null}}`)
		w.sleep(time.Minute)
		if u := w.report("crm").Unmatched; u != nil {
			t.Errorf("after a match: got %+v, want none", u)
		}
		w.apply(redacting(rules))
		w.sendJSON(private)
		w.sleep(time.Minute)
		if u := w.report("crm").Unmatched; u != nil {
			t.Errorf("after a change: got %+v, want none", u)
		}
		w.end()
	})
}
