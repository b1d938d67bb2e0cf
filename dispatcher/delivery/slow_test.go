package delivery

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// p99Beside returns the 99th percentile of the time from a message to its delivery at a destination with 200 messages a
// second, whose receiver responds after 10 ms. It is in a namespace with a number of destinations that have full
// backlogs and no open circuit, because their receivers respond 200 after 4.9 s; own is another namespace for it.
func p99Beside(t *testing.T, slow int, own bool) (p99 time.Duration) {
	bubble(t, func(t *testing.T) {
		const limit, messages = 512, 4000
		w := newWorld(t, func(r request) answer {
			if strings.Contains(r.url, "slow") {
				return answer{status: 200, after: 4900 * time.Millisecond}
			}
			return answer{status: 200, after: 10 * time.Millisecond}
		}, func(o *Options) { o.MaxInFlight = limit })
		large := liveconfig.Config{Version: 1, Namespace: "large",
			Sources: []liveconfig.Source{{Name: "web"}, {Name: "ios"}}}
		for i := range slow {
			d := dest(fmt.Sprintf("slow%02d", i), fmt.Sprintf("http://slow%d.test", i))
			d.Delivery.MaxInFlight = 1000
			large.Destinations = append(large.Destinations, d)
		}
		fast := dest("fast", "http://fast.test")
		fast.Sources, fast.Delivery.MaxInFlight = []string{"ios"}, 1000
		small := liveconfig.Config{Version: 1, Namespace: "small", Sources: large.Sources}
		if own {
			small.Destinations = append(small.Destinations, fast)
		} else {
			large.Destinations = append(large.Destinations, fast)
		}
		if err := w.engine.Apply(liveconfig.NewView([]liveconfig.Revisioned{{Config: large, Revision: "1"},
			{Config: small, Revision: "1"}})); err != nil {
			t.Fatal(err)
		}
		source := map[bool]string{true: "small/ios", false: "large/ios"}[own]
		w.sendTo("large/web", 5000)
		w.sleep(2 * time.Minute) // The windows grow.
		inFlight := look(w, func(e *Engine) int { return e.scheduler.inFlight })
		if slow > 0 && inFlight < limit*9/10 {
			t.Errorf("requests in flight to the slow receivers: got %d, want nearly %d", inFlight, limit)
		}
		sent := map[string]time.Time{}
		for range messages {
			w.sendTo(source, 1)
			sent[fmt.Sprintf("m%d", w.next)] = time.Now()
			time.Sleep(5 * time.Millisecond)
		}
		w.sleep(time.Second)
		var took []time.Duration
		for _, r := range w.client.requests("http://fast.test") {
			took = append(took, r.at.Add(10*time.Millisecond).Sub(sent[r.id()]))
		}
		if len(took) != messages {
			t.Fatalf("deliveries: got %d, want %d", len(took), messages)
		}
		slices.Sort(took)
		p99 = took[messages*99/100]
		for _, d := range large.Destinations[:slow] {
			if ledger := w.store.DestinationStats("large/" + d.Name).Ledger; ledger.Pending == 0 {
				t.Errorf("%s has no backlog: %+v", d.Name, ledger)
			}
		}
		w.stop()
	})
	return p99
}

// Sixteen slow endpoints leave the p99 of another destination within 5 ms of the one that it has alone, whether it is
// in their namespace or in its own.
func TestSlowEndpointsDoNotDelayOthers(t *testing.T) {
	long(t)
	for name, own := range map[string]bool{"in their namespace": false, "in its own namespace": true} {
		t.Run(name, func(t *testing.T) {
			alone, beside := p99Beside(t, 0, own), p99Beside(t, 16, own)
			t.Logf("p99 %v alone, %v beside sixteen slow endpoints", alone, beside)
			if beside > alone+5*time.Millisecond {
				t.Errorf("p99 beside sixteen slow endpoints: got %v, want at most %v", beside, alone+5*time.Millisecond)
			}
		})
	}
}
