package delivery

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// sendLarge appends n messages with bodies of a size.
func (w *world) sendLarge(source string, n, size int) {
	w.Helper()
	for range n {
		w.next++
		if _, err := w.store.Append(w.Context(), []queue.Message{{Source: "ns/" + source, ID: fmt.Sprint("m", w.next), Type: "track",
			AcceptedAt: time.Now(), Body: []byte(strings.Repeat("x", size))}}); err != nil {
			w.Fatal(err)
		}
	}
}

// Requests in flight and the leased messages share one memory: with messages of 30 KB fewer requests are in flight than
// with small ones, and all messages arrive.
func TestLargeMessagesUseTheMemoryOfRequests(t *testing.T) {
	const limit, messages, size = 100, 100, 30_000
	bubble(t, func(t *testing.T) {
		w := newWorld(t, always(answer{status: 200, after: time.Second}), func(o *Options) { o.MaxInFlight = limit })
		var all []liveconfig.Destination
		for i := range 20 {
			all = append(all, dest(fmt.Sprintf("d%02d", i), fmt.Sprintf("http://%d.test", i)))
		}
		w.apply(all...)
		w.sendLarge("web", messages, size)
		held, inFlight := 0, 0
		for range 200 {
			w.sleep(500 * time.Millisecond)
			s := look(w, func(e *Engine) scheduler { return e.scheduler })
			held = max(held, s.inFlight*memory.RequestBytes+s.leasedBytes)
			inFlight = max(inFlight, s.inFlight)
		}
		// A lane may always lease one message, and each of the 20 may have its first one in the buffer. A lease of more ends
		// above the bound.
		if most := limit*memory.RequestBytes + queue.MaxLeaseBytes + 20*size; held > most || inFlight < 30 {
			t.Errorf("at most %d requests in flight held %d bytes, want at least 30 and at most %d bytes", inFlight, held, most)
		}
		for _, d := range all {
			if got := w.store.DestinationStats("ns/" + d.Name).Ledger.Delivered; got != messages {
				t.Errorf("%s: got %d deliveries, want %d", d.Name, got, messages)
			}
		}
		if s := look(w, func(e *Engine) scheduler { return e.scheduler }); s.leasedBytes != 0 || s.bufferedBytes != 0 {
			t.Errorf("at the end %d bytes are leased and %d buffered, want 0", s.leasedBytes, s.bufferedBytes)
		}
		w.end()
	})
}
