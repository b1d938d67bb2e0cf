package delivery

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/signature"
)

const (
	urlA = "http://a.test"
	urlB = "http://b.test"
	urlC = "http://c.test"
)

func TestSigned(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		d := dest("crm", urlA)
		d.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret("new"),
			Previous: liveconfig.NewSecret("old")}}
		w.apply(d, dest("plain", urlB))
		w.send("web", 100)
		w.sleep(time.Second)
		for _, r := range w.client.requests(urlB) {
			for name := range r.headers {
				if strings.Contains(strings.ToLower(name), "signature") {
					t.Fatalf("without a secret there is %s", name)
				}
			}
		}
		got := w.client.requests(urlA)
		if len(got) != 100 || len(w.client.requests(urlB)) != 100 {
			t.Fatalf("%d requests", len(got))
		}
		for _, r := range got {
			if r.headers.Get("X-Signature") != signature.SHA1("new", r.body) ||
				r.headers.Get("X-Signature-Previous") != signature.SHA1("old", r.body) || r.id() != r.body {
				t.Fatalf("%+v", r)
			}
		}
		w.end()
	})
}

// A marked message is sent, signed and retried with its long numbers as strings;
// the dead letter keeps its digits. An unmarked message is sent unchanged.
func TestLongNumbers(t *testing.T) {
	const stored, rewritten = `{"id":12345678901234567890,"text":"9007199254740993","out":1e400}`, `{"id":"12345678901234567890","text":"9007199254740993","out":"1e400"}`
	bubble(t, func(t *testing.T) {
		attempts := map[string]int{}
		w := newWorld(t, func(r request) answer {
			attempts[r.url]++
			if attempts[r.url] > 2 && r.url == urlA {
				return answer{status: 400}
			}
			return answer{status: 503}
		})
		signed := func(name, url string) liveconfig.Destination {
			d := dest(name, url)
			d.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret("key")}}
			return d
		}
		exact := signed("exact", urlB)
		exact.ExactNumbers = true
		w.apply(signed("crm", urlA), exact)
		append1 := func(id string, long bool) {
			if _,
				err := w.store.Append(t.Context(), []queue.Message{{Source: "ns/web", ID: id, Type: "track", AcceptedAt: time.Now(), LongNumbers: long,
				Body: []byte(stored)}}); err != nil {
				t.Fatal(err)
			}
		}
		check := func(url, want string, n int) {
			t.Helper()
			got := w.client.requests(url)
			if len(got) != n {
				t.Errorf("%d requests to %s, want %d", len(got), url, n)
			}
			for _, r := range got {
				if r.body != want || r.headers.Get("X-Signature") != signature.SHA1("key", want) {
					t.Errorf("request to %s has body %s and signature %s, want body %s", url, r.body, r.headers.Get("X-Signature"), want)
				}
			}
		}
		append1("m1", true)
		w.sleep(time.Minute)
		check(urlA, rewritten, 3)
		if n := len(w.client.requests(urlB)); n < 2 {
			t.Errorf("%d requests to %s, want 2 at least", n, urlB)
		}
		check(urlB, stored, len(w.client.requests(urlB)))
		dead := w.dead("crm")
		if len(dead) != 1 || string(dead[0].Body) != stored {
			t.Errorf("dead letters %+v, want one with body %s", dead, stored)
		}
		if n := w.engine.registry.destinations["ns/crm"].metrics.longNumbers; n != 3 {
			t.Errorf("%d requests with long numbers are counted, want 3", n)
		}
		w.end()
	})
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.apply(dest("crm", urlA))
		if _,
			err := w.store.Append(t.Context(), []queue.Message{{Source: "ns/web", ID: "m1", Type: "track", AcceptedAt: time.Now(),
			Body: []byte(stored)}}); err != nil {
			t.Fatal(err)
		}
		w.sleep(time.Second)
		if got := w.client.requests(urlA); len(got) != 1 || got[0].body != stored {
			t.Errorf("of an unmarked message: %+v, want body %s", got, stored)
		}
		w.end()
	})
}

// Without a shared secret a request has no signature header.
func TestNoSignatureWithoutSecret(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.apply(dest("crm", urlA))
		w.send("web", 3)
		w.sleep(time.Second)
		for _, r := range w.client.requests("") {
			for name := range r.headers {
				if name != headerIdempotencyKey {
					t.Errorf("a request without a shared secret has the header %s", name)
				}
			}
		}
		if n := len(w.client.requests("")); n != 3 {
			t.Errorf("%d requests", n)
		}
		w.end()
	})
}

// Invalid signing settings pause their destination, and no other.
func TestNeverUnsigned(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		unsigned, broken := dest("unsigned", urlA), dest("unpreparable", "http://unpreparable.test")
		unsigned.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1}}
		w.apply(dest("ok", urlB), broken, unsigned)
		w.send("web", 10)
		w.sleep(time.Hour)
		if a, b := len(w.client.requests(urlA)), len(w.client.requests(urlB)); a != 0 || b != 10 || len(w.client.requests("")) != 10 {
			t.Errorf("%d unsigned requests, %d to the other one", a, b)
		}
		if r := w.report("unsigned"); r.Pending != 10 {
			t.Errorf("%+v", r)
		}
		unsigned.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret("k")}}
		w.apply(dest("ok", urlB), dest("unpreparable", urlC), unsigned)
		w.sleep(time.Second)
		if a, c := len(w.client.requests(urlA)), len(w.client.requests(urlC)); a != 10 || c != 10 {
			t.Errorf("after the fix: %d and %d requests", a, c)
		}
		w.end()
	})
}

// Idempotency-Key and webhook-id are the key of the messageId, and an attempt keeps a messageId of any length.
func TestRequestsHaveTheKeyOfTheMessage(t *testing.T) {
	id := "a b+%\xed\xa0\xbd" + strings.Repeat("\U0001f600", 93)
	want := "a%20b%2B%25%ED%A0%BD" + strings.Repeat("%F0%9F%98%80", 93)
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		d := dest("crm", urlA)
		d.Signing = liveconfig.SigningSchemes{{Type: liveconfig.StandardWebhooks, Secret: liveconfig.NewSecret("s3cr3t")}}
		w.apply(d)
		if _,
			err := w.store.Append(t.Context(), []queue.Message{{Source: "ns/web", ID: id, Type: "track", AcceptedAt: time.Now(),
			Body: []byte("{}")}}); err != nil {
			t.Fatal(err)
		}
		w.sleep(time.Second)
		sent := w.client.requests(urlA)
		if len(sent) != 1 || sent[0].id() != want || sent[0].headers.Get("webhook-id") != want {
			t.Errorf("requests: got %+v, want one with the key %s", sent, want)
		}
		if got := w.engine.AttemptsOf(id); len(got) != 1 || string(got[0].MessageID) != id {
			t.Errorf("attempts of the message: got %+v, want one", got)
		}
		w.end()
	})
}

func TestRefusedIsBuriedAtOnce(t *testing.T) {
	for status, reason := range map[int]egress.Reason{400: egress.Rejected, 409: egress.Rejected, 451: egress.Rejected, 300: egress.Redirected,
		304: egress.Redirected} {
		bubble(t, func(t *testing.T) {
			w := newWorld(t, always(answer{status: status}))
			w.apply(dest("crm", urlA))
			w.send("web", 30)
			w.sleep(time.Second)
			if n := len(w.client.requests("")); n != 30 {
				t.Errorf("%d: %d requests, want one each: these answers do not open the circuit", status, n)
			}
			dead := w.dead("crm")
			if len(dead) != 30 || dead[0].Failure.Reason != string(reason) || dead[0].Failure.StatusCode != status || dead[0].Attempts != 1 {
				t.Errorf("%d: %d dead letters, %+v", status, len(dead), dead)
			}
			r := w.report("crm")
			if r.DeadLettered != 30 || r.Endpoints[0].State != adminapi.EndpointDegraded || r.Endpoints[0].LastFailure.Reason != string(reason) ||
				r.Endpoints[0].ConsecutiveFailures != 30 {
				t.Errorf("%d: %+v", status, r)
			}
			w.end()
		})
	}
}

func TestRetriesUntilDelivered(t *testing.T) {
	for _, failure := range []answer{{status: 500}, {status: 503}, {status: 429}, {status: 408}, {reason: egress.ConnectionRefused},
		{reason: egress.DNSFailed}, {reason: egress.CertificateRejected}, {reason: egress.AddressDenied}, {reason: egress.ProxyFailed},
		{reason: egress.TokenFailed}, {status: 200, after: time.Hour}} {
		bubble(t, func(t *testing.T) {
			n := 0
			w := newWorld(t, func(request) answer {
				if n++; n <= 5 {
					return failure
				}
				return answer{status: 200}
			})
			w.apply(dest("crm", urlA))
			w.send("web", 1)
			w.sleep(min(failure.after, 5*time.Second) + time.Millisecond)
			if r := w.report("crm"); r.Pending != 1 || r.Endpoints[0].State != adminapi.EndpointDegraded || r.Endpoints[0].LastFailure == nil {
				t.Errorf("%+v: while it fails: %+v", failure, r)
			}
			w.sleep(5 * time.Minute)
			if r := w.report("crm"); r.Delivered != 1 || r.Endpoints[0].State != adminapi.EndpointHealthy {
				t.Errorf("%+v: in the end: %+v", failure, r)
			}
			attempts := w.engine.Attempts("ns/crm", "e0")
			if len(attempts) != 6 || attempts[0].Number != 1 || attempts[5].Number != 6 || attempts[5].Reason != "" ||
				attempts[0].MessageID != "m1" {
				t.Errorf("%+v: attempts %+v", failure, attempts)
			}
			for i, a := range attempts[1:] {
				bound := time.Second<<i + 5*time.Second
				if gap := a.Time.Add(-a.Duration).Sub(attempts[i].Time); gap > bound {
					t.Errorf("%+v: attempt %d was %v after the one before", failure, i+2, gap)
				}
			}
			w.end()
		})
	}
}

func TestRetryAfterIsHonoured(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 503, retryAfter: 90 * time.Second}))
		w.apply(dest("crm", urlA))
		w.send("web", 1)
		w.sleep(89 * time.Second)
		if n := len(w.client.requests("")); n != 1 {
			t.Errorf("%d requests before the end of Retry-After", n)
		}
		if r := w.report("crm"); time.Until(r.NextAttempt) <= 0 || time.Until(r.NextAttempt) > 3*time.Second {
			t.Errorf("next attempt in %v", time.Until(r.NextAttempt))
		}
		w.sleep(3 * time.Second)
		if n := len(w.client.requests("")); n != 2 {
			t.Errorf("%d requests, want the second one after Retry-After", n)
		}
		w.end()
	})
}

// A message that always fails is retried until its window ends; then it becomes a dead letter with the reason.
func TestWindowEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 502}))
		w.apply(dest("crm", urlA))
		w.send("web", 1)
		begin := time.Now()
		w.sleep(4*time.Hour - 10*time.Second)
		if len(w.dead("crm")) != 0 {
			t.Error("the message expired too early")
		}
		w.sleep(2 * time.Minute)
		dead := w.dead("crm")
		if len(dead) != 1 || dead[0].Failure.Reason != "Expired" || dead[0].Failure.StatusCode != 502 || !strings.Contains(dead[0].Failure.Message, "4h0m0s") || !strings.Contains(dead[0].Failure.Message, "ServerError") {
			t.Fatalf("%+v", dead)
		}
		requests := w.client.requests("")
		if last := requests[len(requests)-1].at.Sub(begin); last > 4*time.Hour {
			t.Errorf("last request %v after acceptance", last)
		}
		n := len(requests)
		w.sleep(time.Hour)
		if more := len(w.client.requests("")) - n; more != 0 {
			t.Errorf("%d requests after the end", more)
		}
		w.end()
	})
}

// The window also ends for messages behind an open circuit, and of a paused destination.
func TestWindowEndsWhileParked(t *testing.T) {
	for _, state := range []liveconfig.State{liveconfig.Active, liveconfig.Paused} {
		bubble(t, func(t *testing.T) {
			w := newWorld(t, always(answer{reason: egress.ConnectionRefused}))
			d := dest("crm", urlA)
			d.State = state
			w.apply(d)
			w.send("web", 1000)
			w.sleep(4*time.Hour - time.Minute)
			w.send("web", 7)
			if n := len(w.dead("crm")); n > 0 {
				t.Errorf("%s: %d buried before the retry window ended", state, n)
			}
			w.sleep(2 * time.Minute)
			dead := w.dead("crm")
			if len(dead) != 1000 || dead[0].Failure.Reason != "Expired" {
				t.Errorf("%s: %d dead letters, want the 1000 old ones", state, len(dead))
			}
			if r := w.report("crm"); r.Pending != 7 || r.DeadLettered != 1000 {
				t.Errorf("%s: %+v", state, r)
			}
			w.end()
		})
	}
}

// With WindowsSince, messages that were accepted long before are sent again, and expire a whole window
// later.
func TestWindowsBeginAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 502}))
		w.apply(dest("crm", urlA))
		w.send("web", 10)
		w.sleep(time.Hour)
		w.restartAfter(8*24*time.Hour, func(o *Options) { o.WindowsSince = time.Now() })
		w.rev = 0
		before := len(w.client.requests(""))
		w.apply(dest("crm", urlA))
		w.sleep(4*time.Hour - time.Minute)
		check.Equal(t, "dead letters before the new window ended", len(w.dead("crm")), 0)
		check.Equal(t, "pending messages before the new window ended", w.report("crm").Pending, int64(10))
		if after := len(w.client.requests("")); after == before {
			t.Error("requests in the new window: got none, want probes")
		}
		w.sleep(2 * time.Minute)
		check.Equal(t, "dead letters after the new window", len(w.dead("crm")), 10)
		w.end()
	})
}

func TestSuspendedKeepsAndResumes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200, after: 10 * time.Millisecond}))
		d := dest("crm", urlA)
		w.apply(d)
		w.send("web", 5000)
		w.sleep(100 * time.Millisecond)
		d.State = liveconfig.Suspended
		w.apply(d)
		w.sleep(time.Second)
		before := len(w.client.requests(""))
		w.send("web", 100)
		w.sleep(time.Hour)
		if after := len(w.client.requests("")); after != before || before == 0 || before == 5000 {
			t.Errorf("%d requests before, %d after a suspended hour", before, after)
		}
		if r := w.report("crm"); r.Pending != int64(5100-before) || !r.NextAttempt.IsZero() {
			t.Errorf("%+v, %d sent", r, before)
		}
		d.State = liveconfig.Active
		w.apply(d)
		w.sleep(10 * time.Second)
		if r := w.report("crm"); r.Delivered != 5100 || len(w.client.requests("")) != 5100 {
			t.Errorf("%+v", r)
		}
		w.end()
	})
}

// Every URL gets its own first attempt of every message, independent of its speed and its
// circuit. The first success ends the retries at the others.
func TestAnyEndpoint(t *testing.T) {
	run := func(name string, answers map[string]answer, test func(t *testing.T, w *world)) {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				w := newWorld(t, byURL(answers))
				defer w.end()
				test(t, w)
			})
		})
	}
	// perURL returns the number of distinct messages and the number of requests of a URL.
	perURL := func(w *world, url string) (messages, requests int) {
		ids := map[string]bool{}
		for _, r := range w.client.requests(url) {
			ids[r.body] = true
			requests++
		}
		return len(ids), requests
	}
	got := func(w *world, url string, messages, requests int) {
		w.Helper()
		if m, n := perURL(w, url); m != messages || n != requests {
			w.Errorf("%s got %d messages in %d requests, want %d in %d", url, m, n, messages, requests)
		}
	}
	ledger := func(w *world, want adminapi.Ledger) {
		w.Helper()
		if r := w.report("crm"); r.Ledger != want {
			w.Errorf("ledger %+v, want %+v", r.Ledger, want)
		}
	}
	fast, slow := answer{status: 200, after: 5 * time.Millisecond}, answer{status: 200, after: 200 * time.Millisecond}

	// alone is the time that the fast URL needs for the burst without a slow one.
	var alone time.Duration
	run("fast alone", map[string]answer{urlA: fast}, func(t *testing.T, w *world) {
		w.apply(dest("crm", urlA))
		w.send("web", 2000)
		w.sleep(time.Minute)
		all := w.client.requests(urlA)
		alone = all[len(all)-1].at.Sub(all[0].at)
	})
	run("fast and slow, burst", map[string]answer{urlA: fast, urlB: slow}, func(t *testing.T, w *world) {
		w.apply(dest("crm", urlA, urlB))
		w.send("web", 2000)
		w.sleep(time.Minute)
		got(w, urlA, 2000, 2000)
		got(w, urlB, 2000, 2000)
		ledger(w, adminapi.Ledger{Accepted: 2000, Delivered: 2000})
		all := w.client.requests(urlA)
		if took := all[len(all)-1].at.Sub(all[0].at); float64(took) > float64(alone)/0.9 {
			t.Errorf("the fast URL needed %v, without the slow one %v", took, alone)
		}
	})
	run("two equal URLs, burst", map[string]answer{urlA: fast, urlB: fast}, func(t *testing.T, w *world) {
		w.apply(dest("crm", urlA, urlB))
		w.send("web", 2000)
		w.sleep(time.Minute)
		got(w, urlA, 2000, 2000)
		got(w, urlB, 2000, 2000)
		ledger(w, adminapi.Ledger{Accepted: 2000, Delivered: 2000})
	})
	run("fast and one that hangs", map[string]answer{urlA: fast, urlB: {after: time.Hour}}, func(t *testing.T, w *world) {
		d := dest("crm", urlA, urlB)
		d.Delivery.RetryWindowMS = time.Hour.Milliseconds()
		w.apply(d)
		w.send("web", 2000)
		w.sleep(10 * time.Second)
		got(w, urlA, 2000, 2000)
		ledger(w, adminapi.Ledger{Accepted: 2000, Delivered: 2000})
		if r := w.report("crm"); r.Endpoints[1].FirstAttemptsPending < 1990 || !r.OldestPending.IsZero() {
			t.Errorf("%d first attempts wait, and a message from %v", r.Endpoints[1].FirstAttemptsPending, r.OldestPending)
		}
		w.sleep(2 * time.Hour)
		tried, _ := perURL(w, urlB)
		r := w.report("crm")
		if r.Endpoints[1].FirstAttemptsSkipped != int64(2000-tried) || r.Endpoints[1].FirstAttemptsPending != 0 ||
			r.Endpoints[0].FirstAttemptsSkipped != 0 {
			t.Errorf("%d of 2000 were tried at the URL that hangs; its report says %+v", tried, r.Endpoints[1])
		}
		got(w, urlA, 2000, 2000)
		ledger(w, adminapi.Ledger{Accepted: 2000, Delivered: 2000})
		if dead := w.dead("crm"); len(dead) != 0 {
			t.Errorf("%d dead letters of messages that a URL accepted", len(dead))
		}
	})
	run("one fails for a while", map[string]answer{urlA: fast, urlB: {status: 500}}, func(t *testing.T, w *world) {
		w.apply(dest("crm", urlA, urlB))
		w.send("web", 2000)
		w.sleep(10 * time.Second)
		ledger(w, adminapi.Ledger{Accepted: 2000, Delivered: 2000})
		if r := w.report("crm"); r.Endpoints[1].State != adminapi.EndpointCircuitOpen {
			t.Errorf("%+v", r.Endpoints)
		}
		before, requests := perURL(w, urlB)
		w.client.set(byURL(map[string]answer{urlA: fast}))
		w.sleep(10 * time.Minute)
		got(w, urlA, 2000, 2000)
		got(w, urlB, 2000, requests+2000-before) // Its failed messages are not sent again.
		ledger(w, adminapi.Ledger{Accepted: 2000, Delivered: 2000})
	})
	run("all fail: retried to all", map[string]answer{urlA: {status: 500}, urlB: {status: 500}}, func(t *testing.T, w *world) {
		w.apply(dest("crm", urlA, urlB))
		w.send("web", 1)
		w.sleep(10 * time.Second)
		for _, url := range []string{urlA, urlB} {
			if _, n := perURL(w, url); n < 2 {
				t.Errorf("%d requests to %s", n, url)
			}
		}
		w.client.set(byURL(map[string]answer{urlA: {status: 500}}))
		w.sleep(10 * time.Minute)
		ledger(w, adminapi.Ledger{Accepted: 1, Delivered: 1})
		w.client.forget()
		w.sleep(3 * time.Hour)
		got(w, urlA, 0, 0) // The success ended the retries.
	})
	run("one's Retry-After holds back that one alone", map[string]answer{urlA: {status: 503, retryAfter: time.Hour}, urlB: {status: 503}},
		func(t *testing.T, w *world) {
			w.apply(dest("crm", urlA, urlB))
			w.send("web", 1)
			w.sleep(time.Second)
			w.client.set(always(answer{status: 200}))
			w.sleep(time.Minute)
			ledger(w, adminapi.Ledger{Accepted: 1, Delivered: 1})
			got(w, urlA, 1, 1)
		})
	run("refused by one, failed by the other: retried", map[string]answer{urlA: {status: 400}, urlB: {status: 500}},
		func(t *testing.T, w *world) {
			w.apply(dest("crm", urlA, urlB))
			w.send("web", 2)
			w.sleep(time.Second)
			ledger(w, adminapi.Ledger{Accepted: 2, Pending: 2})
			w.client.set(func(r request) answer {
				if r.body == "m1" {
					return answer{status: 200}
				}
				return answer{status: 410}
			})
			w.sleep(10 * time.Minute)
			ledger(w, adminapi.Ledger{Accepted: 2, Delivered: 1, DeadLettered: 1})
			dead := w.dead("crm")
			if len(dead) != 1 || dead[0].ID != "m2" || dead[0].Failure.Reason != "Rejected" || dead[0].Lane.Endpoint != "" || dead[0].Attempts < 3 {
				t.Errorf("dead letters: %+v", dead)
			}
			got(w, urlA, 2, 2)
		})
	run("the window ends at all: one dead letter each", map[string]answer{urlA: {reason: egress.ConnectionRefused}, urlB: {after: time.Hour}},
		func(t *testing.T, w *world) {
			w.apply(dest("crm", urlA, urlB))
			w.send("web", 500)
			w.sleep(5 * time.Hour)
			ledger(w, adminapi.Ledger{Accepted: 500, DeadLettered: 500})
			if dead := w.dead("crm"); len(dead) != 500 || dead[0].Failure.Reason != "Expired" {
				t.Errorf("%d dead letters", len(dead))
			}
		})
	run("a URL is added", map[string]answer{urlA: {reason: egress.ConnectionRefused}}, func(t *testing.T, w *world) {
		w.apply(dest("crm", urlA))
		w.send("web", 100)
		w.sleep(time.Minute)
		w.apply(dest("crm", urlA, urlB))
		w.send("web", 100)
		w.sleep(time.Minute)
		got(w, urlB, 100, 100) // The messages accepted since then.
		ledger(w, adminapi.Ledger{Accepted: 200, Delivered: 100, Pending: 100})
		w.client.forget()
		w.client.set(always(answer{status: 200}))
		w.sleep(10 * time.Minute)
		if m, _ := perURL(w, urlA); m < 190 { // Few messages failed before and were delivered by the other lane.
			t.Errorf("%d messages reached the first URL", m)
		}
		got(w, urlB, 0, 0)
		ledger(w, adminapi.Ledger{Accepted: 200, Delivered: 200})
	})
	run("a URL is removed", map[string]answer{urlA: {reason: egress.ConnectionRefused}}, func(t *testing.T, w *world) {
		d := dest("crm", urlA, urlB)
		w.apply(dest("crm", urlA))
		w.send("web", 100) // For the first URL only.
		w.sleep(time.Minute)
		w.apply(d)
		w.send("web", 100)
		w.sleep(time.Minute)
		d.Endpoints = d.Endpoints[1:]
		w.apply(d)
		w.send("web", 100)
		w.sleep(10 * time.Minute)
		got(w, urlB, 300, 300) // The messages that only the first URL had; the others are not sent again.
		ledger(w, adminapi.Ledger{Accepted: 300, Delivered: 300})
		if lanes := w.store.Lanes(); len(lanes) != 1 {
			t.Errorf("remaining lanes: %v", lanes)
		}
	})
	run("a slow URL is removed", map[string]answer{urlA: fast, urlB: slow}, func(t *testing.T, w *world) {
		d := dest("crm", urlA, urlB)
		w.apply(d)
		w.send("web", 2000)
		w.sleep(time.Second) // The lane of the slow URL has leased messages that wait for a request.
		d.Endpoints = d.Endpoints[:1]
		w.apply(d)
		w.sleep(time.Minute)
		got(w, urlA, 2000, 2000) // The first URL does not get these messages again.
		ledger(w, adminapi.Ledger{Accepted: 2000, Delivered: 2000})
		if lanes := w.store.Lanes(); len(lanes) != 1 {
			t.Errorf("remaining lanes: %v", lanes)
		}
	})
	run("the only URL is replaced by two", map[string]answer{urlA: {status: 503}}, func(t *testing.T, w *world) {
		w.apply(dest("crm", urlA))
		w.send("web", 100)
		w.sleep(time.Minute)
		d := dest("crm", urlA, urlB, urlC)
		d.Endpoints = d.Endpoints[1:]
		w.apply(d)
		w.sleep(10 * time.Minute)
		b, _ := perURL(w, urlB)
		c, _ := perURL(w, urlC)
		if b+c != 100 {
			t.Errorf("%d and %d messages, want 100 in all", b, c)
		}
		ledger(w, adminapi.Ledger{Accepted: 100, Delivered: 100})
	})
}

func TestEveryEndpoint(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{urlB: {reason: egress.ConnectionRefused}}))
		d := dest("crm", urlA, urlB)
		d.Success = liveconfig.EveryEndpoint
		w.apply(d)
		w.send("web", 100)
		w.sleep(time.Minute)
		if r := w.report("crm"); r.Accepted != 200 || r.Delivered != 100 || r.Pending != 100 || len(w.client.requests(urlA)) != 100 {
			t.Errorf("%+v", r)
		}
		w.client.set(always(answer{status: 200}))
		w.sleep(10 * time.Minute)
		if r := w.report("crm"); r.Delivered != 200 || len(w.client.requests(urlA)) != 100 {
			t.Errorf("%+v", r)
		}
		ids := map[string]int{}
		for _, r := range w.client.requests(urlB) {
			ids[r.id()]++
		}
		if len(ids) != 100 {
			t.Errorf("%d messages reached the second URL", len(ids))
		}
		w.end()
	})
}

// A change of the success policy changes the lanes; no message is lost, and messages after the
// change are sent by the new lanes only.
func TestSuccessPolicyChanges(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{reason: egress.ConnectionRefused}))
		d := dest("crm", urlA, urlB)
		w.apply(d)
		w.send("web", 100)
		w.sleep(time.Minute)
		d.Success = liveconfig.EveryEndpoint
		w.apply(d)
		w.send("web", 100)
		w.sleep(time.Minute)
		w.client.forget()
		w.client.set(always(answer{status: 200}))
		w.sleep(10 * time.Minute)
		count := map[string]int{}
		for _, r := range w.client.requests("") {
			count[r.id()]++
		}
		for i := 1; i <= 200; i++ {
			n := count[fmt.Sprint("m", i)]
			if i <= 100 && n == 0 || i > 100 && n != 2 {
				t.Errorf("m%d was sent %d times", i, n)
			}
		}
		if len(w.store.Lanes()) != 2 {
			t.Errorf("%d remaining lanes: %v", len(w.store.Lanes()), w.store.Lanes())
		}
		if r := w.report("crm"); r.Pending != 0 {
			t.Errorf("%+v", r)
		}
		// The policy changes back and forth under load.
		for i := range 6 {
			d.Success = []string{liveconfig.AnyEndpoint, liveconfig.EveryEndpoint}[i%2]
			w.send("web", 50)
			w.apply(d)
			w.send("web", 50)
			w.sleep(time.Duration(i) * time.Millisecond)
		}
		w.sleep(10 * time.Minute)
		for _, r := range w.client.requests("") {
			count[r.id()]++
		}
		for i := 1; i <= w.next; i++ {
			if count[fmt.Sprint("m", i)] == 0 {
				t.Errorf("m%d was never sent", i)
			}
		}
		w.end()
	})
}

// Each message counts once, even if lanes of a former success policy remain: while the
// destination is suspended, after a restart, and when the policy is restored.
func TestFormerLanesTakeNothingMore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{reason: egress.ConnectionRefused}))
		every := dest("crm", urlA, urlB)
		every.Success = liveconfig.EveryEndpoint
		w.apply(every)
		w.send("web", 1)
		w.sleep(time.Second)
		any := dest("crm", urlA) // e0 remains and drains, e1 is removed.
		w.apply(any)
		w.send("web", 1)
		w.sleep(time.Minute)
		any.State = liveconfig.Suspended
		w.apply(any)
		w.send("web", 1)
		w.sleep(time.Minute)
		check := func(accepted, pending int64) {
			t.Helper()
			if r := w.report("crm"); r.Accepted != accepted || r.Pending != pending {
				t.Errorf("%d accepted and %d pending, want %d and %d", r.Accepted, r.Pending, accepted, pending)
			}
		}
		check(4, 4)
		paused := any
		paused.State, paused.Endpoints = liveconfig.Paused, nil
		w.apply(paused) // Its endpoints are unknown.
		w.end()
		w.restart()
		w.apply(paused)
		w.send("web", 1)
		check(5, 5)
		any.State = liveconfig.Active
		w.apply(any)
		w.send("web", 1)
		check(6, 6)
		w.client.forget()
		w.client.set(always(answer{status: 200}))
		w.sleep(5 * time.Minute)
		check(6, 1) // Messages for the removed e1 are kept for the grace period.
		if got := len(w.client.requests("")); got != 5 {
			t.Errorf("%d requests, want 5", got)
		}
		w.sleep(20 * time.Minute)
		check(6, 0)
		if r := w.report("crm"); r.Delivered != 5 || r.DeadLettered != 1 {
			t.Errorf("%+v", r)
		}
		if lanes := w.store.Lanes(); len(lanes) != 1 {
			t.Errorf("remaining lanes: %v", lanes)
		}
		w.end()
	})
}

// A removed destination keeps its messages for the grace period, and delivers them when it is restored.
func TestOrphans(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{urlA: {reason: egress.ConnectionRefused}}))
		a, b := dest("a", urlA), dest("b", urlB)
		w.apply(a, b)
		w.send("web", 10)
		w.sleep(time.Minute)
		w.apply(b)
		w.client.forget()
		w.sleep(9 * time.Minute)
		if len(w.client.requests(urlA)) != 0 {
			t.Error("sent to a removed destination")
		}
		if forgotten := w.forgotten(); !slices.Contains(forgotten, urlA) || slices.Contains(forgotten, urlB) {
			t.Errorf("closed connections: %v", forgotten)
		}
		w.client.set(always(answer{status: 200}))
		w.apply(a, b)
		w.sleep(2 * time.Minute)
		if r := w.report("a"); r.Delivered != 10 {
			t.Errorf("after it was restored: %+v", r)
		}
		w.apply(b)
		w.sleep(9 * time.Minute)
		if len(w.store.Lanes()) != 2 {
			t.Error("dropped before the end of the grace period")
		}
		w.sleep(2 * time.Minute)
		if len(w.store.Lanes()) != 1 {
			t.Errorf("remaining lanes: %v", w.store.Lanes())
		}
		if look(w, func(e *Engine) bool { return e.registry.destinations["ns/a"] != nil }) ||
			w.store.DestinationStats("ns/a").Ledger != (queue.Ledger{}) {
			t.Error("the destination is still in memory")
		}
		w.end()
	})
}

// A restart does not postpone the discard of a removed destination, and a restored one begins a new grace period at
// its next removal.
func TestOrphanDeadlineSurvivesRestart(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{reason: egress.ConnectionRefused}))
		a, b := dest("a", urlA), dest("b", urlB)
		w.apply(a, b)
		w.send("web", 10)
		w.sleep(time.Minute)
		w.apply(b)
		removed := time.Now()
		// A commit that waits for another one takes 100 µs of virtual time.
		at := func() time.Duration { return w.engine.Discards()["ns"][0].At.Sub(removed).Round(time.Second) }
		check.Equal(t, "discard after the removal", at(), 10*time.Minute)
		for range 2 {
			w.sleep(3 * time.Minute)
			w.restart()
			w.apply(b)
			check.Equal(t, "discard after the removal, after a restart", at(), 10*time.Minute)
		}
		w.apply(a, b)
		w.sleep(time.Minute)
		w.apply(b)
		check.Equal(t, "discard after the second removal", at(), 17*time.Minute)
		w.restart()
		w.apply(b)
		check.Equal(t, "discard after the second removal, after a restart", at(), 17*time.Minute)
		w.sleep(9*time.Minute + 59*time.Second)
		check.Equal(t, "lanes before the discard", len(w.store.Lanes()), 2)
		w.sleep(time.Minute)
		check.Equal(t, "lanes after the discard", len(w.store.Lanes()), 1)
		all, err := w.store.AllMeta()
		check.NoError(t, "AllMeta", err)
		for name := range all {
			if strings.HasPrefix(name, orphanPrefix) {
				t.Errorf("the record %q remains", name)
			}
		}
		w.end()
	})
}

// A discard announces the messages from before the removal, once for all URLs, also after a restart.
func TestDiscardsCountAsTheLedger(t *testing.T) {
	every := dest("every", urlA, urlB)
	every.Success = liveconfig.EveryEndpoint
	for _, c := range []struct {
		d    liveconfig.Destination
		each int64 // Messages for each call, as the ledger counts.
	}{{dest("one", urlA), 1}, {dest("any", urlA, urlB), 1}, {every, 2}} {
		bubble(t, func(t *testing.T) {
			w := newWorld(t, always(answer{reason: egress.ConnectionRefused}))
			other := dest("other", "https://other.example")
			w.apply(c.d, other)
			w.send("web", 10)
			w.sleep(time.Minute)
			check.Equal(t, c.d.Name+": pending", w.report(c.d.Name).Pending, 10*c.each)
			w.apply(other)
			discards := func(fact string) {
				t.Helper()
				list := w.engine.Discards()["ns"]
				for i := range list {
					list[i].At = time.Time{}
				}
				check.Same(t, c.d.Name+": "+fact, list, []adminapi.Discard{{Source: "web", Destination: c.d.Name, Messages: 10 * c.each,
					Later: 3 * c.each}})
			}
			w.send("web", 3)
			w.sleep(time.Second)
			discards("after later calls")
			w.restart()
			w.apply(other)
			discards("after a restart")
			w.end()
		})
	}
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.apply(dest("a", urlA), dest("b", urlB))
		w.apply(dest("b", urlB))
		w.send("web", 7)
		w.sleep(time.Second)
		check.Equal(t, "announced messages without a backlog at the removal", w.engine.Discards()["ns"][0].Messages, 0)
		w.end()
	})
}

// The lanes of an earlier run: those in the config continue, the others are dropped after a new
// grace period.
func TestRestart(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{reason: egress.ConnectionRefused}))
		w.apply(dest("a", urlA), dest("b", urlB))
		w.send("web", 100)
		w.sleep(time.Minute)
		w.end()
		w.client.forget()
		w.client.set(always(answer{status: 200, after: time.Second}))
		w.restart()
		w.sleep(time.Hour)
		if n := len(w.client.requests("")); n != 0 || len(w.store.Lanes()) != 2 {
			t.Errorf("before the config: %d requests, %d lanes", n, len(w.store.Lanes()))
		}
		w.apply(dest("b", urlB))
		w.sleep(900 * time.Millisecond)
		if n := len(w.client.requests("")); n != 1 {
			t.Errorf("%d requests at once after a restart, want 1", n)
		}
		w.sleep(9 * time.Minute)
		if r := w.report("b"); r.Delivered != 100 || len(w.store.Lanes()) != 2 {
			t.Errorf("%+v", r)
		}
		w.sleep(2 * time.Minute)
		if len(w.store.Lanes()) != 1 {
			t.Errorf("remaining lanes: %v", w.store.Lanes())
		}
		w.end()
	})
}

// An open circuit is open after a restart, from the first report on: the endpoint that is down
// gets one probe when it is due, and no burst.
func TestCircuitSurvivesRestart(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{reason: egress.TimedOut, after: time.Second}))
		a := dest("a", urlA)
		apply := func() { // The same config each time, as after a restart.
			t.Helper()
			w.rev = 0
			w.apply(a)
		}
		apply()
		w.send("web", 100)
		w.sleep(10 * time.Minute)
		for !w.report("a").NextAttempt.After(time.Now()) {
			w.sleep(time.Second) // A probe is in flight.
		}
		before := w.report("a")
		open := func() adminapi.EndpointReport {
			t.Helper()
			ep := w.report("a").Endpoints[0]
			if ep.State != adminapi.EndpointCircuitOpen {
				t.Errorf("%+v", ep)
			}
			return ep
		}
		w.end()
		w.client.forget()
		w.restart()
		apply()
		if ep, was := open(), before.Endpoints[0]; !ep.Since.Equal(was.Since) || !ep.LastFailure.Time.Equal(was.LastFailure.Time) ||
			ep.LastFailure.Reason != "TimedOut" || ep.ConsecutiveFailures != was.ConsecutiveFailures {
			t.Errorf("%+v, was %+v", ep, was)
		}
		if r := w.report("a"); !r.NextAttempt.Equal(before.NextAttempt) {
			t.Errorf("next attempt %v, was %v", r.NextAttempt, before.NextAttempt)
		}
		w.sleep(time.Until(before.NextAttempt) - time.Millisecond)
		if n := len(w.client.requests("")); n != 0 {
			t.Errorf("%d requests before the probe was due", n)
		}
		w.sleep(10 * time.Minute)
		if n := len(w.client.requests("")); n < 7 || n > 14 || w.most("") != 1 {
			t.Errorf("%d requests in 10 minutes, %d at once; want one probe a minute", n, w.most(""))
		}
		// A changed config triggers a probe at once.
		w.end()
		w.client.forget()
		w.restart()
		w.rev = 7
		w.apply(a)
		w.sleep(time.Millisecond)
		if n := len(w.client.requests("")); n != 1 {
			t.Errorf("%d requests with another config, want a probe", n)
		}
		// A recovered endpoint remains healthy after a restart.
		w.client.set(always(answer{status: 200}))
		w.sleep(10 * time.Minute)
		if r := w.report("a"); r.Delivered != 100 {
			t.Errorf("%+v", r)
		}
		recovered := w.report("a").Endpoints
		w.end()
		w.restart()
		apply()
		check.Same(t, "endpoints after the recovery and a restart", w.report("a").Endpoints, recovered)
		check.Equal(t, "stored records", len(w.store.meta(t)), 1)
		// No record is kept of objects that are missing in the config.
		w.client.set(always(answer{status: 500}))
		w.send("web", 100)
		w.sleep(time.Minute)
		open()
		if len(w.store.meta(t)) != 1 {
			t.Errorf("%d stored records", len(w.store.meta(t)))
		}
		w.end()
		w.restart()
		if err := w.engine.Apply(liveconfig.NewView(nil, "ns")); err != nil {
			t.Fatal(err)
		}
		apply()
		open()
		w.apply()
		for name := range w.store.meta(t) {
			if strings.HasPrefix(name, recordPrefix) {
				t.Errorf("%s is still stored for a removed destination", name)
			}
		}
		w.end()
	})
}

// The state, the last success and the last failure of an endpoint survive a restart, and its last failed attempt
// with the receiver's answer, which the reports do not have. After a crash they are at most historyInterval old.
func TestHistorySurvivesRestart(t *testing.T) {
	kept := strings.Repeat("no", maxKeptResponse/2)
	failure := answer{status: 400, body: kept + "more"}
	for _, c := range []struct {
		name    string
		answers []answer
		want    adminapi.EndpointState
		failed  int // The message of the last failed attempt; 0 for none.
	}{
		{"healthy", []answer{{status: 200}}, adminapi.EndpointHealthy, 0},
		{"failing", []answer{{status: 200}, failure}, adminapi.EndpointDegraded, 2},
		{"recovered", []answer{failure, {status: 200}}, adminapi.EndpointHealthy, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				w := newWorld(t, always(answer{status: 200}))
				w.apply(dest("a", urlA))
				for _, a := range c.answers {
					w.client.set(always(a))
					w.send("web", 1)
					w.sleep(10 * time.Second)
				}
				before := w.report("a").Endpoints
				check.Equal(t, "state", before[0].State, c.want)
				var failed []adminapi.Attempt
				for _, a := range w.engine.Attempts("ns/a", "e0") {
					if a.Reason != "" {
						failed = []adminapi.Attempt{a}
					}
				}
				if c.failed > 0 {
					check.Equal(t, "message of the failed attempt", string(failed[0].MessageID), fmt.Sprint("m", c.failed))
					check.Equal(t, "answer of the failed attempt", failed[0].Response, kept)
				}
				for range 2 { // The second restart is without a new attempt.
					w.end()
					w.restart()
					w.rev = 0
					w.apply(dest("a", urlA))
					after := w.report("a").Endpoints
					check.Same(t, "endpoints after a restart", after, before)
					check.Same(t, "attempts after a restart", w.engine.Attempts("ns/a", "e0"), failed)
					if text, err := json.Marshal(after); err != nil || strings.Contains(string(text), kept) {
						t.Errorf("report: got %s and error %v, want one without the receiver's answer", text, err)
					}
				}
				w.end()
			})
		})
	}
	t.Run("stored in time", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			w := newWorld(t, always(answer{status: 200}))
			w.apply(dest("a", urlA))
			for range 100 {
				w.send("web", 1)
				w.sleep(time.Second)
			}
			var r endpoint.Record
			for _, value := range w.store.meta(t) {
				check.NoError(t, "decode the record", json.Unmarshal(value, &r))
			}
			if age := time.Since(r.LastSuccess); age > historyInterval+maintenanceInterval {
				t.Errorf("age of the stored last success: got %s, want at most %s", age, historyInterval+maintenanceInterval)
			}
			w.end()
		})
	})
}

// A namespace whose config cannot be loaded keeps all its messages.
func TestUnusableNamespace(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{reason: egress.ConnectionRefused}))
		w.apply(dest("a", urlA))
		w.send("web", 10)
		w.sleep(time.Minute)
		w.end()
		w.restart()
		if err := w.engine.Apply(liveconfig.NewView(nil, "ns")); err != nil {
			t.Fatal(err)
		}
		w.sleep(24 * time.Hour)
		if len(w.store.Lanes()) != 1 || len(w.dead("a")) != 0 {
			t.Error("messages were discarded")
		}
		w.end()
	})
}

// While a namespace's config is missing, nothing is sent, expired or discarded. Delivery continues
// when the config is there again, even if it is unchanged.
func TestParkedNamespace(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 500}))
		v, parked := w.view(dest("a", urlA)), liveconfig.NewView(nil, "ns")
		set := func(v *liveconfig.View) {
			t.Helper()
			if err := w.engine.Apply(v); err != nil {
				t.Fatal(err)
			}
		}
		counts := func(when string, pending, delivered int64) {
			t.Helper()
			s := w.store.DestinationStats("ns/a").Ledger
			if s.Pending != pending || s.Delivered != delivered {
				t.Errorf("%s: got %+v, want %d pending and %d delivered", when, s, pending, delivered)
			}
		}
		set(v)
		w.send("web", 10)
		w.sleep(time.Minute)
		set(parked)
		w.client.set(always(answer{status: 200}))
		w.sleep(time.Hour)
		counts("while parked", 10, 0)
		set(v)
		w.sleep(time.Minute)
		counts("with the config", 0, 10)

		w.client.set(always(answer{status: 500}))
		w.send("web", 10)
		w.sleep(time.Minute)
		set(parked)
		w.sleep(24 * time.Hour)
		counts("parked for longer than the retry window", 10, 10)
		w.end()
	})
}

// A parked destination keeps its dead letters beyond their retention, and its ledger, also after a
// restart and without lanes.
func TestParkedDestinationKeepsItsRecords(t *testing.T) {
	long(t)
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		parkAll := func() {
			t.Helper()
			check.NoError(t, "park the destinations", w.engine.Apply(w.view().WithParked(map[string]map[liveconfig.Ref]bool{
				"ns": {{Section: liveconfig.SectionDestinations, Name: "dead"}: true, {Section: liveconfig.SectionDestinations, Name: "done"}: true},
			})))
		}
		done, dead := dest("done", urlA), dest("dead", urlB)
		w.apply(done)
		w.send("web", 10)
		w.sleep(time.Minute)
		w.client.set(always(answer{status: 400}))
		done.Sources = nil
		w.apply(done, dead)
		w.sleep(time.Hour)
		w.send("web", 10)
		w.sleep(time.Hour)
		parkAll()
		w.sleep(8 * 24 * time.Hour)
		check.Equal(t, "dead letters", len(w.dead("dead")), 10)
		check.Equal(t, "delivered messages of the destination without lanes", w.store.DestinationStats("ns/done").Ledger.Delivered, int64(10))
		w.end()
		w.restart()
		w.rev = 0
		parkAll()
		w.sleep(8 * 24 * time.Hour)
		check.Equal(t, "dead letters after a restart", len(w.dead("dead")), 10)
		check.Equal(t, "delivered messages after a restart", w.store.DestinationStats("ns/done").Ledger.Delivered, int64(10))
		w.end()
	})
}

// The lane of an endpoint that a restored config lacks is parked for a limited time. After that its
// messages are dead letters, as after the removal of an endpoint.
func TestLostEndpoint(t *testing.T) {
	long(t)
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{urlA: {status: 200}, urlB: {status: 500}}))
		d := dest("a", urlA, urlB)
		d.Success = liveconfig.EveryEndpoint
		w.apply(d)
		w.send("web", 10)
		w.sleep(time.Minute)
		d.Endpoints = d.Endpoints[:1]
		lost := map[string]map[string]liveconfig.Lost{"ns": {"a": {Endpoints: []string{"e1"}, Since: time.Now()}}}
		check.NoError(t, "apply the restored config", w.engine.Apply(w.view(d).WithLost(lost)))
		w.sleep(liveconfig.ParkingTime - time.Minute)
		check.Equal(t, "pending messages while parked", w.report("a").Pending, int64(10))
		w.sleep(10 * time.Minute)
		check.Equal(t, "pending messages after the time", w.report("a").Pending, int64(0))
		check.Equal(t, "dead letters after the time", len(w.dead("a")), 10)
		w.end()
	})
}

// A destination whose spec does not name its Sources keeps all its messages, also after the
// grace period of a removed Source, and delivers them when its Sources are known again.
func TestUnknownSources(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		paused := dest("a", urlA)
		paused.State, paused.PausedReason, paused.Sources, paused.SourcesUnknown = liveconfig.Paused, "InvalidSpec", nil, true
		w.apply(dest("a", urlA))
		w.apply(paused)
		w.send("web", 10)
		w.sleep(time.Hour)
		if r := w.report("a"); r.Pending != 10 || r.Discarded != 0 {
			t.Errorf("while the Sources are unknown %d messages are pending and %d discarded; want 10 and 0", r.Pending, r.Discarded)
		}
		w.apply(dest("a", urlA))
		w.sleep(time.Minute)
		if r := w.report("a"); r.Delivered != 10 {
			t.Errorf("%d messages are delivered; want 10", r.Delivered)
		}
		w.end()
	})
}

// A lane that the store cannot open is an error and changes nothing.
func TestApplyFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.apply(dest("a", urlA))
		w.fail(queue.ErrFull)
		if err := w.engine.Apply(w.view(dest("b", urlB))); err == nil {
			t.Error("no error")
		}
		w.fail(nil)
		w.send("web", 1)
		w.sleep(time.Minute)
		if r := w.report("a"); r.Delivered != 1 {
			t.Errorf("%+v", r)
		}
		w.apply(dest("b", urlB))
		w.end()
	})
}

// A store that fails for a while delays a lane and loses no message.
func TestStoreFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.apply(dest("a", urlA))
		w.sleep(time.Second)
		w.fail(fmt.Errorf("input/output error"))
		w.send("web", 10)
		w.sleep(time.Minute)
		if w.leases() > 100 {
			t.Errorf("%d calls of a failing store in a minute", w.leases())
		}
		w.fail(nil)
		w.sleep(2 * time.Second)
		if r := w.report("a"); r.Delivered != 10 {
			t.Errorf("%+v", r)
		}
		w.end()
	})
}

func TestRateLimit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		d := dest("crm", urlA)
		d.Delivery.RequestsPerSecond = 50
		w.apply(d, dest("free", urlB))
		w.send("web", 1000)
		w.sleep(10 * time.Second)
		if n := len(w.client.requests(urlA)); n < 480 || n > 510 {
			t.Errorf("%d requests in 10 s at 50 a second", n)
		}
		if n := len(w.client.requests(urlB)); n != 1000 {
			t.Errorf("%d requests of the other destination", n)
		}
		// The free endpoint's window, and at most one second of the other one's rate.
		if n := look(w, func(e *Engine) int { return e.workers.count }); n > 64+50 {
			t.Errorf("workers: got %d, want at most %d", n, 64+50)
		}
		w.end()
	})
}

// When connections are scarce, an endpoint gets only as many concurrent requests as a rate of
// 100 requests per second requires: one if it responds at once.
func TestScarceConnections(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const fast, slow = "http://fast.test", "http://slow.test"
		w := newWorld(t, byURL(map[string]answer{fast: {status: 200, after: time.Millisecond},
			slow: {status: 200, after: 200 * time.Millisecond}}))
		w.client.egress = egress.New(egress.Options{MaxOpen: 2})
		w.apply(dest("fast", fast), dest("slow", slow))
		w.send("web", 2000)
		w.sleep(time.Minute)
		if most := w.most(fast); most != 1 {
			t.Errorf("%d requests at once to the fast one, want 1", most)
		}
		if most := w.most(slow); most != servedPerSecond/5 {
			t.Errorf("%d requests at once to the slow one, want %d", most, servedPerSecond/5)
		}
		for _, name := range []string{"fast", "slow"} {
			if r := w.report(name); r.Delivered != 2000 {
				t.Errorf("%s: %d delivered", name, r.Delivered)
			}
		}
		w.end()
	})
}

// A destination is changed under load: no message is lost or settled twice, and requests in
// flight finish with the old config.
func TestSwapUnderLoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200, after: 3 * time.Millisecond}))
		d := dest("crm", urlA)
		w.apply(d)
		w.send("web", 20000)
		for i := range 100 {
			w.sleep(5 * time.Millisecond)
			d = dest("crm", []string{urlA, urlB, urlC}[i%3])
			d.Delivery.MaxInFlight = 1 + i%64
			if i%7 == 0 {
				d.Endpoints = append(d.Endpoints, liveconfig.Endpoint{Name: "second", URL: liveconfig.NewSecret(urlB)})
			}
			if i%10 == 0 {
				d.State = liveconfig.Suspended
			}
			d.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret(fmt.Sprint("k", i))}}
			w.apply(d)
			_ = w.report("crm")
		}
		w.sleep(10 * time.Minute)
		if r := w.report("crm"); r.Delivered != 20000 || r.Pending != 0 {
			t.Errorf("%+v", r)
		}
		w.end()
	})
}

func TestShutdown(t *testing.T) {
	t.Run("drains", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			w := newWorld(t, always(answer{status: 200, after: 2 * time.Second}))
			w.apply(dest("crm", urlA))
			w.send("web", 1000)
			w.sleep(3 * time.Second)
			begin := time.Now()
			w.stop()
			if took := time.Since(begin); took > 2*time.Second {
				t.Errorf("stopped after %v", took)
			}
			if r := w.report("crm"); r.Delivered != int64(len(w.client.requests(""))) || r.Delivered == 0 {
				t.Errorf("%+v", r)
			}
			w.end()
		})
	})
	t.Run("cancels requests and releases messages", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			w := newWorld(t, always(answer{status: 200, after: 4 * time.Second}), func(o *Options) { o.DrainTimeout = time.Second })
			w.apply(dest("crm", urlA))
			w.send("web", 1000)
			w.sleep(5 * time.Second)
			begin := time.Now()
			w.stop()
			if took := time.Since(begin); took > time.Second {
				t.Errorf("stopped after %v", took)
			}
			r := w.report("crm")
			if r.Pending != 1000-r.Delivered || r.Retrying != 0 || r.Endpoints[0].ConsecutiveFailures != 0 {
				t.Errorf("an interrupted request counts as a failure: %+v", r)
			}
			w.end()
		})
	})
}

// Lanes that were parked while they waited for their share do not delay the lanes behind them.
func TestParkedLanesGiveWay(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 500, after: 4 * time.Second}), func(o *Options) { o.MaxInFlight = 4 })
		var all []liveconfig.Destination
		for i := range 100 {
			all = append(all, dest(fmt.Sprintf("d%03d", i), fmt.Sprintf("http://x%d.test", i)))
		}
		w.apply(all...)
		w.send("web", 1)
		w.sleep(5 * time.Minute) // All fail, and wait for the half of those that do.
		last := look(w, func(e *Engine) string { return e.scheduler.blockedFailing.tail.lanes.tail.destination.name })
		w.client.set(always(answer{status: 200, after: 4 * time.Second}))
		for i := range all {
			if all[i].Name != last {
				all[i].State = liveconfig.Suspended
			}
		}
		w.apply(all...)
		w.sleep(time.Minute)
		if r := w.report(last); r.Delivered != 1 {
			t.Errorf("%s, the one that is not suspended: %+v", last, r)
		}
		w.end()
	})
}

// A destination that keeps no dead letters still keeps them briefly, for diagnosis.
func TestDeadLettersStayForAMoment(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 404}))
		d := dest("crm", "http://a.test")
		d.DeadLetters = liveconfig.DeadLetters{}
		w.apply(d)
		w.sleep(10 * time.Minute)
		w.send("web", 3)
		w.sleep(50 * time.Second)
		if n := len(w.dead("crm")); n != 3 {
			t.Errorf("%d dead letters in the first minute, want 3", n)
		}
		w.sleep(2 * time.Minute)
		if n := len(w.dead("crm")); n != 0 {
			t.Errorf("%d dead letters are kept, want none", n)
		}
		w.end()
	})
}

// Pending messages of a renamed endpoint become dead letters; messages of a
// disconnected Source are discarded.
func TestRemovedEndpoint(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 503}))
		d := dest("crm", "http://a.test")
		d.Success, d.Sources = liveconfig.EveryEndpoint, []string{"ios", "web"}
		w.apply(d)
		w.send("web", 10)
		w.send("ios", 5)
		w.sleep(time.Minute)
		d.Endpoints = []liveconfig.Endpoint{{Name: "renamed", URL: d.Endpoints[0].URL}}
		d.Sources = []string{"web"}
		w.apply(d)
		w.client.set(always(answer{status: 200}))
		w.send("web", 20) // For the endpoint's new name only.
		w.sleep(15 * time.Minute)
		dead := w.dead("crm")
		if len(dead) != 10 || dead[0].Failure.Reason != ReasonEndpointRemoved || dead[0].Lane.Source != "ns/web" {
			t.Fatalf("%d dead letters, want the 10 of web: %+v", len(dead), dead)
		}
		if r := w.report("crm"); r.Ledger != (adminapi.Ledger{Accepted: 55, Delivered: 20, DeadLettered: 10, Discarded: 25}) {
			t.Errorf("%+v", r.Ledger)
		}
		w.end()
	})
}

func TestFairShare(t *testing.T) {
	for _, test := range []struct {
		sizes []int64
		total int64
		want  int64
	}{
		{nil, 10, math.MaxInt64},
		{[]int64{1, 2, 3}, 6, math.MaxInt64},
		{[]int64{1, 2, 4}, 6, 3},
		{[]int64{1, 10, 10}, 9, 4},
		{[]int64{5, 5}, 0, 0},
		{[]int64{5}, -1, 0},
	} {
		if got := fairShare(test.sizes, test.total); got != test.want {
			t.Errorf("fairShare(%v, %d) = %d, want %d", test.sizes, test.total, got, test.want)
		}
	}
}

// When all dead letters together exceed their quota, the destination with the most loses them
// first.
func TestDeadLettersOfAllAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var quota atomic.Int64
		quota.Store(math.MaxInt64)
		w := newWorld(t, always(answer{status: 409}), func(o *Options) { o.DeadLetterBytes = quota.Load })
		big, small := dest("big", "http://a.test"), dest("small", "http://b.test")
		small.Sources = []string{"ios"}
		w.apply(big, small)
		w.send("web", 50)
		w.send("ios", 10)
		w.sleep(5 * time.Minute)
		quota.Store(w.deadLetterBytes(30, "big", "small"))
		w.sleep(5 * time.Minute)
		if b, s := len(w.dead("big")), len(w.dead("small")); b != 20 || s != 10 {
			t.Errorf("%d and %d are kept, want 20 and 10", b, s)
		}
		w.end()
	})
}

// A message that always fails does not keep the circuit open for other messages.
func TestPoisonMessage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, func(r request) answer {
			if r.body == "m1" {
				return answer{status: 503}
			}
			return answer{status: 200}
		})
		w.apply(dest("crm", "http://a.test"))
		w.send("web", 1)
		w.sleep(40 * time.Minute)
		if state := w.report("crm").Endpoints[0].State; state != adminapi.EndpointCircuitOpen {
			t.Fatalf("the circuit is %s, want it open", state)
		}
		w.send("web", 100)
		w.sleep(10 * time.Minute)
		if r := w.report("crm"); r.Delivered != 100 || r.Pending != 1 {
			t.Errorf("%+v", r.Ledger)
		}
		w.end()
	})
}

// A success policy that is changed and changed back delivers each message once.
func TestPolicyThereAndBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, func(r request) answer {
			if r.body == "m1" {
				return answer{status: 503} // The first lane is not dropped.
			}
			return answer{status: 200}
		})
		d := dest("crm", "http://a.test")
		w.apply(d)
		w.send("web", 1)
		w.sleep(20 * time.Second)
		d.Success = liveconfig.EveryEndpoint
		w.apply(d)
		w.send("web", 100)
		w.sleep(20 * time.Second)
		d.Success = liveconfig.AnyEndpoint
		w.apply(d)
		w.send("web", 10)
		w.sleep(5 * time.Minute)
		sent := map[string]int{}
		for _, r := range w.client.requests("") {
			sent[r.body]++
		}
		for id, n := range sent {
			if id != "m1" && n != 1 {
				t.Errorf("%s was sent %d times", id, n)
			}
		}
		if r := w.report("crm"); r.Ledger != (adminapi.Ledger{Accepted: 111, Delivered: 110, Pending: 1}) || len(sent) != 111 {
			t.Errorf("%d messages sent; %+v", len(sent), r.Ledger)
		}
		w.end()
	})
}
