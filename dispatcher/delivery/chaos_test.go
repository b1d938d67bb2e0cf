package delivery

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// Endpoints that fail in all ways, destinations that are changed, disabled and
// enabled, and restarts, all at random: in the end every message was taken by
// an endpoint of every destination or is a dead letter, and nothing was settled twice.
func TestChaos(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				rnd, luck := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 2)) // luck is the endpoints', under the client's lock.
				weather := []answer{
					{status: 200}, {status: 200, after: 5 * time.Millisecond}, {status: 204, after: 800 * time.Millisecond}, {status: 200, after: 6 * time.Second},
					{status: 500}, {status: 503, retryAfter: 20 * time.Second}, {status: 429, after: 50 * time.Millisecond}, {reason: egress.ConnectionRefused},
					{reason: egress.TimedOut, after: time.Hour}, {status: 404}, {status: 302},
				}
				mood := map[string]answer{}
				stormy := true
				taken := map[string]bool{} // URL and message
				answers := func(r request) answer {
					a, ok := mood[r.url]
					if !ok || luck.IntN(40) == 0 {
						a = weather[luck.IntN(len(weather))]
						mood[r.url] = a
					}
					if !stormy {
						a = answer{status: 200, after: time.Millisecond}
					}
					if a.status/100 == 2 && a.after < 5*time.Second {
						taken[r.url+" "+r.id()] = true
					}
					return a
				}
				w := newWorld(t, answers, func(o *Options) { o.MaxInFlight = 50; o.DrainTimeout = 2 * time.Second })
				destinations := func() []liveconfig.Destination {
					one, two, every, both := dest("a-one", "http://1.test"), dest("b-two", "http://2a.test", "http://2b.test"), dest("c-every", "http://3a.test", "http://3b.test"), dest("d-both", "http://4.test")
					every.Success = liveconfig.EveryEndpoint
					both.Sources = []string{"ios", "web"}
					all := []liveconfig.Destination{one, two, every, both}
					for i := range all {
						all[i].Delivery.MaxInFlight = 1 + rnd.IntN(20)
						if stormy && rnd.IntN(4) == 0 {
							all[i].State = liveconfig.Disabled
						}
						if stormy && rnd.IntN(4) == 0 {
							all[i].Delivery.RequestsPerSecond = 1 + rnd.IntN(500)
						}
					}
					return all
				}
				w.apply(destinations()...)
				for range 60 {
					w.send("web", rnd.IntN(50))
					w.send("ios", rnd.IntN(50))
					w.sleep(time.Duration(rnd.IntN(3000)) * time.Millisecond)
					switch rnd.IntN(10) {
					case 0:
						w.end()
						w.restart(func(o *Options) { o.MaxInFlight = 50; o.DrainTimeout = 2 * time.Second })
						w.apply(destinations()...)
					case 1, 2, 3:
						w.apply(destinations()...)
					}
				}
				w.client.mu.Lock()
				stormy = false
				w.client.mu.Unlock()
				w.apply(destinations()...)
				w.sleep(20 * time.Minute)
				w.end()
				for name, urls := range map[string][]string{"a-one": {"http://1.test"}, "b-two": {"http://2a.test", "http://2b.test"}, "c-every": {"http://3a.test", "http://3b.test"}, "d-both": {"http://4.test"}} {
					r := w.report(name)
					if r.Pending != 0 || r.Accepted != r.Delivered+r.DeadLettered || r.Delivered == 0 {
						t.Errorf("%s: %+v", name, r)
					}
					dead := map[string]int{}
					for _, d := range w.dead(name) {
						dead[d.ID]++
					}
					for _, source := range []string{"ns/web", "ns/ios"} {
						if source == "ns/ios" && name != "d-both" {
							continue
						}
						for _, m := range w.store.logs[source] {
							n := dead[m.ID]
							for _, url := range urls {
								if taken[url+" "+m.ID] {
									n++
								}
							}
							if want := map[bool]int{true: 2, false: 1}[name == "c-every"]; n < want {
								t.Errorf("%s: message %s was taken or buried %d times, want %d", name, m.ID, n, want)
							}
						}
					}
				}
			})
		})
	}
}

// With several URLs, too, there is never more than one probe at a time at any of them.
func TestOneProbePerEndpoint(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, byURL(map[string]answer{urlA: {reason: egress.TimedOut, after: time.Hour}, urlB: {status: 500, after: time.Second}}))
		d := dest("crm", urlA, urlB)
		d.Sources = []string{"ios", "web"}
		w.apply(d)
		w.send("web", 500)
		w.send("ios", 500)
		w.sleep(5 * time.Minute)
		w.client.forget()
		for range 600 {
			w.send("web", 1)
			w.sleep(time.Second)
		}
		for _, url := range []string{urlA, urlB} {
			if most, n := w.most(url), len(w.client.requests(url)); most != 1 || n < 8 || n > 16 {
				t.Errorf("%s: %d probes, %d at once", url, n, most)
			}
		}
		// With a third URL that works, probes ride on ordinary messages.
		w.apply(func() liveconfig.Destination {
			d := dest("crm", urlA, urlB, urlC)
			d.Sources = []string{"ios", "web"}
			return d
		}())
		w.sleep(5 * time.Minute)
		w.client.forget()
		for range 600 {
			w.send("web", 1)
			w.sleep(time.Second)
		}
		if n := len(w.client.requests(urlC)); n != 600 {
			t.Errorf("%d of 600 messages reached the URL that works", n)
		}
		for _, url := range []string{urlA, urlB} {
			if most, n := w.most(url), len(w.client.requests(url)); most != 1 || n < 8 || n > 16 {
				t.Errorf("beside a URL that works, %s: %d probes, %d at once", url, n, most)
			}
		}
		w.end()
	})
}
