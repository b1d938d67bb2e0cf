package delivery

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/check"
)

// shareOf gives the dispatcher "d-0" a share of all limits in percent.
func (w *world) shareOf(number int64, percent liveconfig.Share) {
	all := liveconfig.Shares{Number: number, Pods: []string{"d-0", "d-1", "d-2"},
		Default: []liveconfig.Share{percent * liveconfig.Whole / 100, 0, 0}}
	w.engine.SetShares(all.Of("d-0"))
}

// requestsIn returns the number of requests to a URL in the next time.
func (w *world) requestsIn(url string, d time.Duration) int {
	before := len(w.client.requests(url))
	w.sleep(d)
	return len(w.client.requests(url)) - before
}

// A share takes effect without a restart or an edit, and begins the deliveries that wait for one.
func TestShareOfARate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.shareOf(1, 0)
		d := dest("crm", urlA)
		d.Delivery.RequestsPerSecond = 60
		w.apply(d, dest("free", urlB))
		w.send("web", 3000)
		if n := w.requestsIn(urlA, 10*time.Second); n != 0 {
			t.Errorf("requests in 10 s without a share: got %d, want 0", n)
		}
		if n := len(w.client.requests(urlB)); n != 3000 {
			t.Errorf("requests of a destination without a rate: got %d, want 3000", n)
		}
		for number, c := range []struct {
			percent liveconfig.Share
			want    int
		}{{50, 300}, {10, 60}, {100, 600}} {
			w.shareOf(int64(number+2), c.percent)
			if n := w.requestsIn(urlA, 10*time.Second); n < c.want*95/100 || n > c.want*102/100+6 {
				t.Errorf("requests in 10 s with %d %% of 60 a second: got %d, want %d", c.percent, n, c.want)
			}
		}
		w.end()
	})
}

func TestShareOfMaxInFlight(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200, after: time.Second}))
		w.shareOf(1, 100)
		d := dest("crm", urlA)
		d.Delivery.MaxInFlight = 40
		w.apply(d)
		w.send("web", 5000)
		w.sleep(30 * time.Second)
		w.shareOf(2, 25)
		check.Equal(t, "above their shares while 40 requests are in flight and 10 are permitted",
			strings.Join(w.engine.AboveShares(), " "), "ns/destinations/crm")
		w.sleep(2 * time.Second)
		check.Equal(t, "above their shares after the requests have ended", len(w.engine.AboveShares()), 0)
		if n := w.requestsIn(urlA, 10*time.Second); n < 60 || n > 105 { // Rounds run at half the window.
			t.Errorf("requests of 1 s in 10 s with 10 in flight: got %d, want 100", n)
		}
		if r := w.report("crm"); !r.Limit.Limited || r.Limit.Used != 250_000 {
			t.Errorf("use of the limits: got %+v, want 250000 and limited", r.Limit)
		}
		w.shareOf(3, 100)
		w.sleep(30 * time.Second)
		if n := w.requestsIn(urlA, 10*time.Second); n < 300 || n > 420 {
			t.Errorf("requests of 1 s in 10 s with 40 in flight: got %d, want 400", n)
		}
		w.end()
	})
}

// The report has the use of limits while there is traffic, and whether more waits for the share.
func TestLimitUse(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200}))
		w.shareOf(1, 50)
		d := dest("crm", urlA)
		d.Delivery.RequestsPerSecond = 100
		w.apply(d)
		for range 20 {
			w.send("web", 20)
			w.sleep(time.Second)
		}
		if r := w.report("crm"); r.Limit.Limited || math.Abs(float64(r.Limit.Used)-200_000) > 20_000 {
			t.Errorf("use with 20 of 50 a second: got %+v, want 200000 and not limited", r.Limit)
		}
		w.send("web", 2000)
		w.sleep(15 * time.Second)
		if r := w.report("crm"); !r.Limit.Limited || math.Abs(float64(r.Limit.Used)-500_000) > 20_000 {
			t.Errorf("use with a backlog: got %+v, want 500000 and limited", r.Limit)
		}
		w.sleep(time.Minute)
		if r := w.report("crm"); r.Limit.Used != 0 || r.Limit.Limited {
			t.Errorf("use without traffic: got %+v, want none", r.Limit)
		}
		w.engine.SetShares(nil)
		w.send("web", 2000)
		w.sleep(5 * time.Second)
		if r := w.report("crm"); r.Limit.Used != 0 {
			t.Errorf("use with the whole limit: got %+v, want none", r.Limit)
		}
		w.end()
	})
}

// A smaller share deletes no dead letters. A smaller total does.
func TestBoundOfDeadLetters(t *testing.T) {
	const third = liveconfig.Whole / 3
	trim := trimmer{kept: map[string]keptLetters{}}
	trim.kept["a"] = trim.bound("a", 0, 900, third)
	for _, c := range []struct {
		fact        string
		size, total int64
		share       liveconfig.Share
		want        int64
	}{
		{"the share", 0, 900, third, 299},
		{"more than the share", 400, 900, third, 299},
		{"a smaller share", 299, 900, liveconfig.Whole / 9, 299},
		{"some have expired", 200, 900, liveconfig.Whole / 9, 200},
		{"new ones", 250, 900, liveconfig.Whole / 9, 200},
		{"a larger share", 200, 900, third, 299},
		{"a larger total and a smaller share", 299, 1200, liveconfig.Whole / 9, 299},
		{"a smaller total", 300, 90, third, 29},
	} {
		trim.kept["a"] = trim.bound("a", c.size, c.total, c.share)
		if got := trim.kept["a"].bytes; got != c.want {
			t.Errorf("bound with %s: got %d, want %d", c.fact, got, c.want)
		}
	}
	for size, want := range map[int64]int64{200: 299, 500: 500, 1000: 900} {
		delete(trim.kept, "a")
		if got := trim.bound("a", size, 900, third).bytes; got != want {
			t.Errorf("bound after a start for %d stored bytes: got %d, want %d", size, got, want)
		}
	}
}
