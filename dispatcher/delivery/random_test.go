package delivery

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
)

// An endpoint that fails at random gets nearly as many attempts as one that works: at least 0.6 of
// what its window could carry.
func TestRandomFailures(t *testing.T) {
	long(t)
	const (
		latency = 10 * time.Millisecond
		window  = 64
		share   = 0.25
		lasts   = 10 * time.Second
	)
	for name, failure := range map[string]answer{
		"503": {status: 503, after: latency}, "500": {status: 500, after: latency}, "refused": {reason: egress.ConnectionRefused, after: latency},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				rnd := rand.New(rand.NewPCG(1, 2))
				w := newWorld(t, func(request) answer {
					if rnd.Float64() < share {
						return failure
					}
					return answer{status: 200, after: latency}
				})
				w.apply(dest("crm", urlA))
				w.send("web", 100_000)
				w.sleep(lasts)
				possible := window * (1 - share) * lasts.Seconds() / latency.Seconds()
				got := float64(w.report("crm").Delivered) / possible
				t.Logf("%.2f of what the attempts could carry", got)
				if got < 0.6 {
					t.Errorf("delivered share of what the attempts could carry: got %.2f, want at least 0.6", got)
				}
				w.stop()
			})
		})
	}
}

// A few messages to the same endpoint are delivered soon, too.
func TestRandomFailuresOfABurst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(3, 4))
		w := newWorld(t, func(request) answer {
			if rnd.IntN(4) == 0 {
				return answer{status: 503}
			}
			return answer{status: 200}
		})
		w.apply(dest("crm", urlA))
		w.send("web", 5000)
		w.sleep(10 * time.Second)
		if n := w.report("crm").Delivered; n < 4900 {
			t.Errorf("messages delivered after 10 s: got %d, want at least 4900 of 5000", n)
		}
		w.stop()
	})
}

// An endpoint that recovers from an outage has its full speed within 10 s of the first successful
// probe.
func TestFullSpeedAfterOutage(t *testing.T) {
	long(t)
	for name, down := range map[string]answer{
		"503": {status: 503}, "refused": {reason: egress.ConnectionRefused}, "black hole": {reason: egress.TimedOut, after: time.Hour},
	} {
		for _, latency := range []time.Duration{20 * time.Millisecond, 200 * time.Millisecond} {
			t.Run(name+" "+latency.String(), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					up := answer{status: 200, after: latency}
					w := newWorld(t, always(up))
					w.apply(dest("crm", urlA))
					w.send("web", 1000)
					w.sleep(10 * time.Second)
					w.client.set(always(down))
					w.send("web", 50_000)
					w.sleep(10 * time.Minute)
					var recovered time.Time
					served := 0 // In the second that begins 10 s after the recovery.
					w.client.set(func(r request) answer {
						if recovered.IsZero() {
							recovered = r.at
						}
						if after := r.at.Sub(recovered); after >= 10*time.Second && after < 11*time.Second {
							served++
						}
						return up
					})
					w.sleep(90 * time.Second)
					if possible := 64 / latency.Seconds(); float64(served) < 0.95*possible {
						t.Errorf("requests per second 10 s after the recovery: got %d, want %.0f", served, possible)
					}
					w.stop()
				})
			})
		}
	}
}
