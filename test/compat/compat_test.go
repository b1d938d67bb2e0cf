package compat

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
)

const total, batch = 60, 20

// ids are prefix-0, prefix-1, ….
func ids(prefix string, n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf("%s-%d", prefix, i))
	}
	return list
}

// Every type of call that a client has arrives once, and what the client sends
// and what we make of it are what testdata holds.
func TestEveryType(t *testing.T) {
	for _, c := range clients {
		t.Run(c.name, func(t *testing.T) {
			c.need(t)
			url := javascriptReceiver(t)
			p := start(t, url, true, "")
			w := newWire(t, p, nil)
			sent := calls(t, c.showcase(w.URL))
			arrived := p.exactlyOnce(url, sent)
			compare(t, c.name, w.seen(), arrived)
		})
	}
}

// A client with its default settings that is told to slow down, by 429 with
// Retry-After, loses nothing.
func TestRateLimit(t *testing.T) {
	for _, c := range clients {
		if c.many == nil {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			c.need(t)
			url := javascriptReceiver(t)
			p := start(t, url, true, "  rateLimit: {callsPerSecond: 10, burst: 20}\n")
			fillers, limited := 0, false
			// Somebody else uses up the Source's rate right before each request,
			// until one has met the limit.
			w := newWire(t, p, func(seen []exchange) fate {
				for _, e := range seen {
					limited = limited || e.status == http.StatusTooManyRequests
				}
				for !limited {
					body := filler(fillers)
					resp, err := send(p.Addr, recorded{Method: http.MethodPost, Path: "/v1/batch", Body: body})
					if err != nil {
						t.Error(err)
						break
					}
					_ = resp.Body.Close()
					if resp.StatusCode != http.StatusOK {
						break
					}
					fillers += batch
				}
				return pass
			})
			sent := calls(t, c.many(w.URL, total, batch))
			w.settle()
			if len(sent) != total {
				t.Errorf("the client reported %d calls of %d", len(sent), total)
			}
			p.exactlyOnce(url, append(sent, ids("filler", fillers)...))
			refused := 0
			for _, e := range w.seen() {
				if e.status == http.StatusTooManyRequests {
					refused++
					if e.retryAfter == "" || e.retryAfter == "0" {
						t.Errorf("429 with Retry-After %q", e.retryAfter)
					}
				}
			}
			if refused == 0 {
				t.Errorf("no request met the limit: %d requests", len(w.seen()))
			}
			t.Logf("%d requests, %d answered 429", len(w.seen()), refused)
		})
	}
}

// filler is a request that takes the whole burst.
func filler(first int) string {
	var b struct {
		WriteKey string              `json:"writeKey"`
		Batch    []map[string]string `json:"batch"`
	}
	b.WriteKey = key
	for i := range batch {
		b.Batch = append(b.Batch, map[string]string{"type": "track", "event": "E", "userId": "other", "messageId": fmt.Sprintf("filler-%d", first+i)})
	}
	body, _ := json.Marshal(b)
	return string(body)
}

// Posthorn is killed in the middle of a request, and once more after it has
// stored a request whose answer is then lost. The client sends both again, and
// each message still arrives once.
func TestRestart(t *testing.T) {
	for _, c := range clients {
		if c.many == nil {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			c.need(t)
			url := javascriptReceiver(t)
			// Nothing is delivered before the last kill: a delivery whose success was
			// not on disk yet would rightly be repeated.
			p := start(t, url, false, "")
			plan := []fate{cutRequest, loseAnswer}
			w := newWire(t, p, func([]exchange) fate {
				if len(plan) == 0 {
					return pass
				}
				next := plan[0]
				plan = plan[1:]
				return next
			})
			sent := calls(t, c.many(w.URL, total, batch))
			w.settle()
			if len(sent) != total {
				t.Errorf("the client reported %d calls of %d", len(sent), total)
			}
			if again := p.metric(`posthorn_ingest_calls_total{namespace="default",result="duplicate"`); again < batch {
				t.Errorf("%v calls were sent again and recognised after the restart; want %d", again, batch)
			}
			p.deliver(url, true)
			p.exactlyOnce(url, sent)
			lost := 0
			for _, e := range w.seen() {
				if e.status == 0 {
					lost++
				}
			}
			if lost != 2 {
				t.Errorf("%d requests had no answer; want 2", lost)
			}
		})
	}
}
