package pebblestore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/repair"
)

// tablePlaces lists the bytes of a table where a flipped bit has a distinct effect: one byte of
// each block and of each trailer, which the same checksum protects, and all bytes from the
// properties on.
func tablePlaces(t *testing.T, table string) (places []int) {
	t.Helper()
	f, err := vfs.Default.Open(table)
	if err != nil {
		t.Fatal(err)
	}
	readable, err := sstable.NewSimpleReadable(f)
	if err != nil {
		t.Fatal(err)
	}
	r, err := sstable.NewReader(context.Background(), readable, sstable.ReaderOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	layout, err := r.Layout()
	if err != nil {
		t.Fatal(err)
	}
	size := int(readable.Size())
	tail := int(layout.Properties.Offset)
	for _, b := range layout.Data {
		places = append(places, int(b.Offset+b.Length/2), int(b.Offset+b.Length))
	}
	for _, h := range append(slices.Clone(layout.Index), layout.TopIndex) {
		if h.Length > 0 {
			places = append(places, int(h.Offset+h.Length/2), int(h.Offset+h.Length))
		}
	}
	for at := tail; at < size; at++ {
		places = append(places, at)
	}
	return places
}

// TestFlippedBitInTable flips one bit in each place of the tables of cleanly closed stores, one
// at a time. Each acknowledged message must be delivered or be a dead letter, or a repair must
// name it as lost.
//
// POSTHORN_FLIP_STORES sets the number of stores, POSTHORN_FLIP_STRIDE selects each nth place.
func TestFlippedBitInTable(t *testing.T) {
	first, stores, stride := env("POSTHORN_FLIP_STORE", 3), env("POSTHORN_FLIP_STORES", 1), env("POSTHORN_FLIP_STRIDE", 29)
	if testing.Short() {
		stride *= 10
	}
	flips, refused, dead := 0, 0, 0
	for store := first; store < first+stores; store++ {
		rnd := rand.New(rand.NewPCG(uint64(store), 7))
		v := makeEndedStore(t, rnd, []int{1, 20, 200}[store%3], "closed")
		for _, table := range files(t, v.dir, "*.sst") {
			places := tablePlaces(t, table)
			for i := rnd.IntN(stride); i < len(places); i += stride {
				name, at := filepath.Base(table), places[i]
				what := fmt.Sprintf("store %d, batches of %d, %s, byte %d", store, v.batch, name, at)
				temp, err := os.MkdirTemp("", "flip") // Removed at once, because there are many.
				if err != nil {
					t.Fatal(err)
				}
				used, damaged := filepath.Join(temp, "used", "queue"), filepath.Join(temp, "damaged", "queue")
				for _, dir := range []string{used, damaged} {
					if err := os.CopyFS(dir, os.DirFS(v.dir)); err != nil {
						t.Fatal(err)
					}
					edit(t, filepath.Join(dir, name), func(b []byte) []byte {
						b[at] ^= 1 << (at % 8)
						return b
					})
				}
				var r repair.Result
				got, err := v.drain(t, used, what)
				if err != nil {
					refused++
					if r, err = repair.Run(damaged, true, Verify); err != nil {
						t.Fatalf("%s: %v", what, err)
					}
					if got, err = v.drain(t, damaged, what); err != nil {
						t.Fatalf("%s: after a repair: %v\n%+v", what, err, r)
					}
				}
				lost, missing := v.check(t, what, got, r)
				if missing > 0 && len(r.Lost) == 0 {
					t.Errorf("%s: %d acknowledged messages are lost, and the repair does not name them; refused %t, damaged %q", what, missing, r.Aside != "", r.Damaged)
				}
				for source, n := range v.acked {
					if got.accepted[source] != int64(n) {
						t.Errorf("%s: %s has accepted %d messages, %d were acknowledged: %+v", what, source, got.accepted[source], n, r)
					}
				}
				flips++
				dead += lost
				if err := os.RemoveAll(temp); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if flips == 0 {
		t.Error("no bit was flipped")
	}
	t.Logf("%d flips: %d stores were refused and repaired, %d messages became dead letters", flips, refused, dead)
}

// TestRepairOfRetries damages a part of a table with new retry entries and the deletions of as
// many old ones, which thus exist again. The number of entries agrees with the lane's state,
// but the messages must be sent again.
func TestRepairOfRetries(t *testing.T) {
	const each = 20
	dir := filepath.Join(t.TempDir(), "queue")
	start, passed := time.Now(), atomic.Int64{} // The store reads the clock concurrently.
	now := func() time.Time { return start.Add(time.Duration(passed.Load())) }
	s := open(t, dir, Options{Now: now})
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	retry := func() {
		t.Helper()
		got, err := s.Lease(lane1, each, nil)
		if err != nil || len(got) != each {
			t.Fatalf("leased %d (%v)", len(got), err)
		}
		for _, d := range got {
			text := ""
			for range 40 {
				text += fmt.Sprintf("%016x", rnd.Uint64())
			}
			s.Retry(d, now().Add(time.Minute), queue.Failure{Time: now(), Reason: "TimedOut", Message: text})
		}
		if err := errors.Join(s.flushLanes(true), s.db.Flush()); err != nil {
			t.Fatal(err)
		}
	}
	appendAll(t, s, each, func(*queue.Message) {})
	retry()
	passed.Add(int64(time.Hour))
	got, err := s.Lease(lane1, each, nil)
	if err != nil || len(got) != each {
		t.Fatalf("leased %d (%v)", len(got), err)
	}
	for _, d := range got {
		s.Ack(d)
	}
	appendAll(t, s, each, func(m *queue.Message) { m.ID += "-later" })
	passed.Add(int64(-time.Hour))
	retry()
	passed.Add(int64(2 * time.Hour))
	tables := files(t, dir, "*.sst")
	table := tables[len(tables)-1]
	appendAll(t, s, 1, func(m *queue.Message) { m.ID += "-last" })
	s.mu.RLock()
	s.changed(s.lanes[lane1]) // So that the lane's state is in a later table.
	s.mu.RUnlock()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	hit := 0
	edit(t, table, func(b []byte) []byte {
		f, err := vfs.Default.Open(table)
		if err != nil {
			t.Fatal(err)
		}
		readable, err := sstable.NewSimpleReadable(f)
		if err != nil {
			t.Fatal(err)
		}
		r, err := sstable.NewReader(t.Context(), readable, sstable.ReaderOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Close() }()
		blocks, err := integrity.TableBlocks(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range blocks {
			if at.Offset > 0 && at.Last[0] >= codec.PrefixRetry { // The first block also has messages.
				b[at.Offset+at.Length/2] ^= 1
				hit++
			}
		}
		return b
	})
	r, err := repair.Run(dir, true, Verify)
	if err != nil || r.Aside == "" || hit == 0 {
		t.Fatalf("repair: %v, %d blocks were damaged: %+v", err, hit, r)
	}
	s = open(t, dir, Options{Now: now})
	defer func() { _ = s.Close() }()
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	came := map[uint64]bool{}
	for {
		got, err := s.Lease(lane1, 100, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range got {
			came[d.Seq] = true
			s.Ack(d)
		}
		if len(got) == 0 {
			break
		}
	}
	for seq := uint64(each + 1); seq <= 2*each+1; seq++ {
		if !came[seq] {
			t.Errorf("message %d is not delivered: %+v", seq, r)
		}
	}
	if st := s.LaneStats(lane1); st.Balance() != nil || st.Pending != 0 {
		t.Errorf("the ledger is %+v", st)
	}
}
