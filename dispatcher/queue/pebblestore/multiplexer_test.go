package pebblestore_test

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/slots"
	"github.com/posthorn/posthorn/dispatcher/queue/storetest"
)

// suiteStore is a Multiplexer for the suite, which compares and makes deliveries without their
// Opening.
type suiteStore struct {
	*slots.Multiplexer
	opening uint64
	// own is the store of the suite's namespace.
	own *pebblestore.Store
}

func (s suiteStore) Lease(lane queue.LaneID, n int, buf []queue.Delivery) ([]queue.Delivery, error) {
	buf, err := s.Multiplexer.Lease(lane, n, buf)
	for i := range buf {
		buf[i].Opening = 0
	}
	return buf, err
}

func (s suiteStore) LeaseOldest(lane queue.LaneID) (queue.Delivery, bool, error) {
	d, ok, err := s.Multiplexer.LeaseOldest(lane)
	d.Opening = 0
	return d, ok, err
}

func (s suiteStore) of(d queue.Delivery) queue.Delivery {
	d.Opening = s.opening
	return d
}

func (s suiteStore) Ack(d queue.Delivery) bool { return s.Multiplexer.Ack(s.of(d)) }
func (s suiteStore) Release(d queue.Delivery)  { s.Multiplexer.Release(s.of(d)) }
func (s suiteStore) Retry(d queue.Delivery, at time.Time, f queue.Failure) {
	s.Multiplexer.Retry(s.of(d), at, f)
}
func (s suiteStore) Bury(d queue.Delivery, f queue.Failure) (bool, error) {
	return s.Multiplexer.Bury(s.of(d), f)
}

// A Multiplexer passes the suite of queue.Store, with one slot and with the suite's namespace in the
// last one of eight.
func TestMultiplexerConformance(t *testing.T) {
	for _, n := range []int{1, 8} {
		t.Run(fmt.Sprint(n, " slots"), func(t *testing.T) {
			storetest.Run(t, func(*testing.T) storetest.Engine {
				fs, clock := vfs.NewMem(), &storetest.Clock{}
				return storetest.Engine{
					Open: func(t testing.TB) queue.Store {
						m := slots.NewMultiplexer(slots.MultiplexerOptions{
							SlotOf:        func(namespace string) (int, bool) { return n - 1, namespace == "shop" },
							MetaNamespace: func(string) string { return "shop" },
						})
						var own *pebblestore.Store
						for slot := range n {
							s, err := pebblestore.Open(fmt.Sprint("slot", slot), pebblestore.Options{
								FS: fs, Now: clock.Now, DuplicateWindow: 10 * time.Minute, Logger: slog.New(slog.DiscardHandler),
								MemTableBytes: 256 << 10, CacheBytes: 1 << 20,
							})
							if err == nil {
								err = m.Add(slot, s)
							}
							if err != nil {
								t.Fatal(err)
							}
							own = s
						}
						return suiteStore{m, uint64(n), own} // The last opening.
					},
					Clock: clock, DuplicateWindow: 10 * time.Minute,
					Trim: func(s queue.Store) { pebblestore.TrimNow(s.(suiteStore).own) },
					IsPending: func(s queue.Store, lane queue.LaneID, seq uint64) bool {
						return pebblestore.LaneHasPending(s.(suiteStore).own, lane, seq)
					},
				}
			})
		})
	}
}
