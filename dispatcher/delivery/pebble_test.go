package delivery

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/wait"
)

// On the real store, with a restart in the middle, every message is accounted for: one
// destination rejects messages, another is down for a while, and a third accepts them.
func TestOnPebble(t *testing.T) {
	dir := t.TempDir()
	var mended atomic.Bool
	client := newFakeClient(func(r request) answer {
		switch {
		case r.url == urlB && !mended.Load():
			return answer{reason: egress.ConnectionRefused}
		case r.url == urlC:
			return answer{status: 409}
		}
		return answer{status: 200}
	})
	destinations := func(success string) *liveconfig.View {
		a, b, c, d := dest("a", urlA), dest("b", urlB), dest("c", urlC), dest("d", urlA, urlB)
		b.Delivery.MaxBackoffMS, d.Delivery.MaxBackoffMS = 2000, 2000
		d.Success = success
		return (&world{rev: len(success)}).view(a, b, c, d)
	}
	const n = 3000
	begin := func() (*pebblestore.Store, *Engine, func()) {
		store, err := pebblestore.Open(dir, pebblestore.Options{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		e := New(Options{Store: store, Client: client, Logger: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = e.Run(ctx)
		}()
		return store, e, func() {
			cancel()
			<-done
			if err := store.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	send := func(store queue.Store, from, to int) {
		var msgs []queue.Message
		for i := from; i < to; i++ {
			msgs = append(msgs, queue.Message{Source: "ns/web", ID: "m" + strconv.Itoa(i), Type: "track", AcceptedAt: time.Now(),
				Body: []byte("{}")})
		}
		if _, err := store.Append(context.Background(), msgs); err != nil {
			t.Fatal(err)
		}
	}
	byName := func(e *Engine) map[string]adminapi.DestinationReport {
		out := map[string]adminapi.DestinationReport{}
		for _, r := range reports(e) {
			out[r.Name] = r
			if r.Accepted != r.Delivered+r.Filtered+r.DeadLettered+r.Discarded+r.Pending {
				t.Errorf("the ledger does not balance: %+v", r)
			}
		}
		return out
	}

	store, e, end := begin()
	if err := e.Apply(destinations(liveconfig.AnyEndpoint)); err != nil {
		t.Fatal(err)
	}
	send(store, 0, n)
	wait.True(t, "a, c and d are done and b's circuit is open", func() bool {
		r := byName(e)
		return r["a"].Delivered == n && r["c"].DeadLettered == n && r["d"].Delivered == n && r["b"].Pending == n &&
			r["b"].Endpoints[0].State == adminapi.EndpointCircuitOpen
	})
	end()

	store, e, end = begin()
	if err := e.Apply(destinations(liveconfig.EveryEndpoint)); err != nil {
		t.Fatal(err)
	}
	send(store, n, 2*n)
	wait.True(t, "a is done again", func() bool { return byName(e)["a"].Delivered == 2*n })
	mended.Store(true)
	wait.True(t, "all is done", func() bool {
		r := byName(e)
		return r["b"].Delivered == 2*n && r["c"].DeadLettered == 2*n && r["d"].Pending == 0
	})
	wait.True(t, "d's old lane is dropped", func() bool { return len(store.Lanes()) == 5 })
	if count := store.DestinationStats("ns/c").DeadLetters; count != 2*n {
		t.Errorf("%d dead letters, want %d", count, 2*n)
	}
	end()

	got := map[string]map[string]int{}
	for _, r := range client.requests("") {
		if got[r.url] == nil {
			got[r.url] = map[string]int{}
		}
		got[r.url][r.id()]++
	}
	for i := range 2 * n {
		id := fmt.Sprint("m", i)
		if a, b, c := got[urlA][id], got[urlB][id], got[urlC][id]; a < 2 || b < 1 || c != 1 {
			t.Errorf("%s was sent %d, %d and %d times", id, a, b, c)
		}
	}
}
