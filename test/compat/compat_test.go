package compat

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
)

const total, batch = 60, 20

// ids returns prefix-0, prefix-1, ….
func ids(prefix string, n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf("%s-%d", prefix, i))
	}
	return list
}

// Each type of call of a client is delivered once, and the requests and deliveries equal
// those in testdata.
func TestEveryType(t *testing.T) {
	for _, c := range clients {
		t.Run(c.name, func(t *testing.T) {
			c.need(t)
			url := javascriptReceiver(t)
			p := start(t, url, false, "")
			w := newWire(t, p, c.tls, nil)
			sent := calls(t, w, c.showcase(w.URL))
			arrived := p.exactlyOnce(url, sent)
			compare(t, c.name, w.seen(), arrived)
		})
	}
}

// A client with its default settings loses no call when requests are answered 429 with
// Retry-After.
func TestRateLimit(t *testing.T) {
	for _, c := range clients {
		if c.many == nil {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			c.need(t)
			url := javascriptReceiver(t)
			p := start(t, url, false, "  rateLimit: {callsPerSecond: 10, burst: 20}\n")
			fillers, limited := 0, false
			// Other calls use up the Source's rate right before each request,
			// until a request has exceeded the limit.
			w := newWire(t, p, c.tls, func(seen []exchange) fate {
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
			sent := calls(t, w, c.many(w.URL, total, batch))
			w.settle()
			if len(sent) != total {
				t.Errorf("results of the client: got %d, want %d", len(sent), total)
			}
			p.exactlyOnce(url, append(sent, ids("filler", fillers)...))
			limited429 := 0
			for _, e := range w.seen() {
				if e.status == http.StatusTooManyRequests {
					limited429++
					if e.retryAfter == "" || e.retryAfter == "0" {
						t.Errorf("Retry-After of a 429: got %q, want at least 1", e.retryAfter)
					}
				}
			}
			if limited429 == 0 {
				t.Errorf("requests that were answered 429: got 0 of %d, want some", len(w.seen()))
			}
			t.Logf("%d requests, %d answered 429", len(w.seen()), limited429)
		})
	}
}

// filler returns a request that uses the whole burst.
func filler(first int) string {
	var b struct {
		WriteKey string              `json:"writeKey"`
		Batch    []map[string]string `json:"batch"`
	}
	b.WriteKey = key
	for i := range batch {
		b.Batch = append(b.Batch, map[string]string{"type": "track", "event": "E", "userId": "other",
			"messageId": fmt.Sprintf("filler-%d", first+i)})
	}
	body, _ := json.Marshal(b)
	return string(body)
}

// Posthorn is killed during a request, and again after it has stored a request but before its
// answer. The client sends both again, and each message is delivered once.
func TestRestart(t *testing.T) {
	for _, c := range clients {
		if c.many == nil {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			c.need(t)
			url := javascriptReceiver(t)
			// The destination is suspended until the last kill: a delivery whose success is not on
			// disk yet would be repeated.
			p := start(t, url, true, "")
			plan := []fate{cutRequest, loseAnswer}
			w := newWire(t, p, c.tls, func([]exchange) fate {
				if len(plan) == 0 {
					return pass
				}
				next := plan[0]
				plan = plan[1:]
				return next
			})
			sent := calls(t, w, c.many(w.URL, total, batch))
			w.settle()
			if len(sent) != total {
				t.Errorf("results of the client: got %d, want %d", len(sent), total)
			}
			repeated := batch
			if c.firstAlone {
				repeated = 1
			}
			if duplicates := p.metric(`posthorn_ingest_calls_total{namespace="default",result="duplicate"`); duplicates < float64(repeated) {
				t.Errorf("duplicates after the restart: got %v, want at least %d", duplicates, repeated)
			}
			p.deliver(url, false)
			p.exactlyOnce(url, sent)
			unanswered := 0
			for _, e := range w.seen() {
				if e.status == 0 {
					unanswered++
				}
			}
			if unanswered != 2 {
				t.Errorf("unanswered requests: got %d, want 2", unanswered)
			}
		})
	}
}
