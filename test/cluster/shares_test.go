package cluster

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/posthorn/posthorn/controllers"
	"github.com/posthorn/posthorn/test/wait"
)

// arrivals are the times of the requests to a receiver.
type arrivals struct {
	mu    sync.Mutex
	times []time.Time
}

func (a *arrivals) ServeHTTP(http.ResponseWriter, *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.times = append(a.times, time.Now())
}

// perSecond returns the mean rate between two times.
func (a *arrivals) perSecond(from, to time.Time) float64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, at := range a.times {
		if !at.Before(from) && at.Before(to) {
			n++
		}
	}
	return float64(n) / to.Sub(from).Seconds()
}

// Three dispatchers, of which one has most of the calls, together keep the rate of a destination and use it, also while a
// fourth one is added.
func TestRateOfSeveralPods(t *testing.T) {
	const total, window = 60, 10 * time.Second
	server, kubectl, logs := cluster(t)
	kubectl("", "create", "namespace", release)
	p := newPods(t, server, logs, 4)
	var got arrivals
	hook := httptest.NewServer(&got)
	t.Cleanup(hook.Close)
	kubectl(webToCRM(hook.URL)+fmt.Sprintf("  delivery: {rateLimit: {requestsPerSecond: %d}}\n", total), "apply", "-f", "-")
	operator(t, server.Config, controllers.Options{Pods: p})
	for i := range 3 {
		p.start(i)
	}
	kubectl("", "wait", "whd/crm", "psrc/web", "--for=condition=Ready")

	send := func(number, calls int) {
		t.Helper()
		call := `{"type": "track", "userId": "u", "event": "E"}`
		status, answer, _, err := p.do(number, http.MethodPost, "/v1/batch", `{"batch": [`+strings.Repeat(call+",", calls-1)+call+`]}`)
		if err != nil || status != http.StatusOK {
			t.Fatalf("batch to %s: got status %d, body %s and error %v, want 200", p.list[number].name, status, answer, err)
		}
	}
	start := time.Now()
	for range 50 {
		send(0, 200)
	}
	// second sends a tenth of the total to each of two others, and checks the sum: a request that is late counts in the
	// next window.
	second := func() (rate float64) {
		t.Helper()
		time.Sleep(time.Second)
		send(1, total/10)
		send(2, total/10)
		now := time.Now()
		from := start
		if now.Sub(start) > window {
			from = now.Add(-window)
		}
		rate = got.perSecond(from, now)
		if now.Sub(start) > 2*time.Second && rate > 1.1*total {
			t.Fatalf("requests a second of three dispatchers: got %.1f, want at most %d", rate, total)
		}
		return rate
	}
	atLeast := func(fact string) {
		t.Helper()
		begun := time.Now()
		if err := wait.Until(func() error {
			if rate := second(); rate < 0.9*total {
				return fmt.Errorf("%s: got %.1f requests a second, want %.1f", fact, rate, 0.9*total)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: 0.9 of the total passed in the %v before %v", fact, window, time.Since(begun).Round(time.Second))
	}
	atLeast("calls at one of three")
	p.start(3)
	for range 15 {
		second()
	}
	atLeast("with a fourth one without calls")
}
