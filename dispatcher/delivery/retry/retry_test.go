package retry

import (
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
)

var (
	accepted = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	policy   = Policy{Window: 4 * time.Hour, MinBackoff: time.Second, MaxBackoff: 5 * time.Minute, Timeout: 5 * time.Second}
)

func half() float64 { return 0.5 }

// Every status code, with the reason that the client gives for it.
func TestStatusCodes(t *testing.T) {
	for status := 100; status <= 999; status++ {
		want := Decision{Action: Retry, At: accepted.Add(500 * time.Millisecond)}
		switch {
		case status >= 200 && status <= 299:
			want = Decision{Action: Ack}
		case status == 408 || status == 429:
		case status >= 300 && status <= 399:
			want = Decision{Action: Bury, Reason: egress.Redirected}
		case status >= 400 && status <= 499:
			want = Decision{Action: Bury, Reason: egress.Rejected}
		}
		if got := Decide(Outcome{StatusCode: status}, policy, 0, accepted, accepted, half); got != want {
			t.Errorf("%d: %+v, want %+v", status, got, want)
		}
	}
}

// Further status codes of the policy are retried; the others are not affected.
func TestPolicyStatusCodes(t *testing.T) {
	p := policy
	p.StatusCodes = []int{302, 409}
	for status, want := range map[int]Action{302: Retry, 409: Retry, 301: Bury, 404: Bury, 503: Retry, 200: Ack} {
		if got := Decide(Outcome{StatusCode: status}, p, 0, accepted, accepted, half); got.Action != want {
			t.Errorf("action after %d: got %v, want %v", status, got.Action, want)
		}
	}
}

func TestReasons(t *testing.T) {
	for _, reason := range []egress.Reason{
		egress.TimedOut, egress.ConnectionRefused, egress.ConnectionFailed, egress.DNSFailed, egress.CertificateRejected,
		egress.TLSFailed, egress.AddressDenied, egress.InvalidResponse, egress.ProxyFailed, egress.TokenFailed, "SomethingNew",
	} {
		if got := Decide(Outcome{Reason: reason}, policy, 0, accepted, accepted, half); got.Action != Retry {
			t.Errorf("%s: %+v, want a retry", reason, got)
		}
	}
	// The head of a success is not a success.
	if got := Decide(Outcome{StatusCode: 200, Reason: egress.TimedOut}, policy, 0, accepted, accepted, half); got.Action != Retry {
		t.Errorf("200 that did not arrive whole: %+v, want a retry", got)
	}
	// No answer at all is not a success either.
	if got := Decide(Outcome{}, policy, 0, accepted, accepted, half); got.Action != Retry {
		t.Errorf("no answer: %+v, want a retry", got)
	}
}

func TestWait(t *testing.T) {
	almostOne := func() float64 { return 1 - 1e-12 }
	for _, test := range []struct {
		name    string
		attempt int
		after   time.Duration // RetryAfter
		age     time.Duration
		rnd     func() float64
		want    time.Duration // wait, to the millisecond
	}{
		{name: "first", rnd: almostOne, want: time.Second},
		{name: "second", attempt: 1, rnd: almostOne, want: 2 * time.Second},
		{name: "ninth", attempt: 8, rnd: almostOne, want: 256 * time.Second},
		{name: "tenth is capped", attempt: 9, rnd: almostOne, want: 5 * time.Minute},
		{name: "any number of attempts", attempt: 1 << 40, rnd: almostOne, want: 5 * time.Minute},
		{name: "jitter is full", attempt: 4, rnd: func() float64 { return 0 }, want: 0},
		{name: "half", attempt: 4, rnd: half, want: 8 * time.Second},
		{name: "Retry-After is a floor", after: time.Minute, rnd: half, want: time.Minute + 500*time.Millisecond},
		{name: "Retry-After is cut to an hour", after: 24 * time.Hour, rnd: half, want: time.Hour + 500*time.Millisecond},
		{name: "Retry-After is cut to the last attempt", after: 24 * time.Hour, age: 3*time.Hour + 30*time.Minute, rnd: half,
			want: 30*time.Minute - 5*time.Second},
		{name: "negative Retry-After", after: -time.Hour, rnd: half, want: 500 * time.Millisecond},
		{name: "near the end there is one last attempt", attempt: 20, age: 4*time.Hour - time.Minute, rnd: almostOne, want: 55 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			now := accepted.Add(test.age)
			got := Decide(Outcome{StatusCode: 503, RetryAfter: test.after}, policy, test.attempt, accepted, now, test.rnd)
			if wait := got.At.Sub(now).Round(time.Millisecond); got.Action != Retry || wait != test.want {
				t.Errorf("%+v, wait %v, want a retry after %v", got, wait, test.want)
			}
		})
	}
}

// A wait as long as a short window leaves several attempts in it, and the wait differs from the backoff.
func TestRetryAfterInAShortWindow(t *testing.T) {
	p := policy
	p.Window = 5 * time.Minute
	now, attempts := accepted, 1
	for d := (Decision{}); ; now, attempts = d.At, attempts+1 {
		if d = Decide(Outcome{StatusCode: 503, RetryAfter: 10 * time.Minute}, p, attempts-1, accepted, now, half); d.Action == Bury {
			break
		}
		if d.Wait < 0 || d.Wait > 75*time.Second || d.At.Add(-d.Wait).Before(now) {
			t.Errorf("attempt %d: %+v at +%v, want a wait of at most 75s", attempts, d, now.Sub(accepted))
		}
	}
	if attempts < 4 || attempts > 6 {
		t.Errorf("%d attempts, want 4 to 6", attempts)
	}
}

// However long the waits, attempts end within the window, the last one near its end.
func TestWindow(t *testing.T) {
	for _, window := range []time.Duration{time.Millisecond, time.Second, 10 * time.Second, time.Hour, 4 * time.Hour} {
		for _, rnd := range []float64{0.001, 0.5, 0.999999} {
			p := policy
			p.Window = window
			now, attempts := accepted, 1
			for {
				d := Decide(Outcome{StatusCode: 500}, p, attempts-1, accepted, now, func() float64 { return rnd })
				if d.Action == Bury {
					if d.Reason != Expired {
						t.Fatalf("window %v: buried for %s", window, d.Reason)
					}
					break
				}
				if d.At.Before(now) || !d.At.Before(accepted.Add(window)) {
					t.Fatalf("window %v: retry at +%v, from +%v", window, d.At.Sub(accepted), now.Sub(accepted))
				}
				now = d.At
				attempts++
			}
			if left := accepted.Add(window).Sub(now); left > window/10 && left > p.Timeout {
				t.Errorf("window %v: the last attempt was %v before its end", window, left)
			}
			if attempts < 2 {
				t.Errorf("window %v: no retry at all", window)
			}
		}
	}
	// A message that is too old already is not tried again.
	if d := Decide(Outcome{StatusCode: 500}, policy, 3, accepted, accepted.Add(5*time.Hour), half); d.Action != Bury || d.Reason != Expired {
		t.Errorf("%+v, want Expired", d)
	}
	// A late delivery counts as delivered, and a rejection keeps its reason.
	if d := Decide(Outcome{StatusCode: 200}, policy, 3, accepted, accepted.Add(5*time.Hour), half); d.Action != Ack {
		t.Errorf("%+v, want Ack", d)
	}
	if d := Decide(Outcome{StatusCode: 404}, policy, 3, accepted, accepted.Add(5*time.Hour), half); d.Reason != egress.Rejected {
		t.Errorf("%+v, want Rejected", d)
	}
}

// A 2xx that the destination's expression rejects is retried, or permanent by the policy.
func TestRejectedByExpression(t *testing.T) {
	bury := policy
	bury.BuryRejected = true
	retried := Decision{Action: Retry, At: accepted.Add(500 * time.Millisecond)}
	for name, test := range map[string]struct {
		policy  Policy
		outcome Outcome
		want    Decision
	}{
		"retry": {policy, Outcome{StatusCode: 200, Reason: RejectedByExpression}, retried},
		"dead letter": {bury, Outcome{StatusCode: 204, Reason: RejectedByExpression},
			Decision{Action: Bury, Reason: RejectedByExpression}},
		"others may get it":         {bury, Outcome{Reason: RejectedByExpression}, retried},
		"an incomplete 2xx":         {bury, Outcome{StatusCode: 200, Reason: egress.TimedOut}, retried},
		"a success of this policy":  {bury, Outcome{StatusCode: 200}, Decision{Action: Ack}},
		"a server error is no such": {bury, Outcome{StatusCode: 503, Reason: egress.ServerError}, retried},
	} {
		if got := Decide(test.outcome, test.policy, 0, accepted, accepted, half); got != test.want {
			t.Errorf("%s: got %+v, want %+v", name, got, test.want)
		}
	}
}
