package jobs

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// memStore is a Store in memory.
type memStore struct {
	mu     sync.Mutex
	values map[string][]byte
	// refuse, when set, is the error of durable writes.
	refuse error
}

func (s *memStore) PutMeta(name string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.values[name] = value; value == nil {
		delete(s.values, name)
	}
	return nil
}

func (s *memStore) PutMetaDurable(name string, value []byte) error {
	if s.refuse != nil {
		return s.refuse
	}
	return s.PutMeta(name, value)
}

func (s *memStore) AllMeta() (map[string][]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.values), nil
}

type clock struct{ t time.Time }

func (c *clock) now() time.Time { return c.t }

func open(t *testing.T, s Store, c *clock) *Records {
	t.Helper()
	r, err := Open(s, c.now)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func put(t *testing.T, r *Records, id string, record Record) {
	t.Helper()
	if err := r.Put(id, record); err != nil {
		t.Fatal(err)
	}
}

// A completed run is known for 30 days, to other objects only, also after a restart.
func TestRetention(t *testing.T) {
	s, c := &memStore{values: map[string][]byte{}}, &clock{time.Unix(1_800_000_000, 0)}
	r := open(t, s, c)
	put(t, r, "done", Record{Namespace: "shop", UID: "1", Completed: c.t})
	put(t, r, "failed", Record{Namespace: "shop", UID: "1"})
	for _, restart := range []bool{false, true} {
		if restart {
			r = open(t, s, c)
		}
		for _, q := range []struct {
			id, uid string
			want    bool
		}{{"done", "2", true}, {"done", "1", false}, {"failed", "2", false}, {"unknown", "2", false}} {
			if got := r.Completed(q.id, q.uid); got != q.want {
				t.Errorf("restart %t: Completed(%s, %s) = %t, want %t", restart, q.id, q.uid, got, q.want)
			}
		}
	}
	c.t = c.t.Add(Retention - time.Second)
	if !r.Completed("done", "2") {
		t.Error("the record expired before 30 days")
	}
	c.t = c.t.Add(time.Second)
	if r.Completed("done", "2") || open(t, s, c).Completed("done", "2") {
		t.Error("the record did not expire after 30 days")
	}
	put(t, r, "new", Record{Namespace: "shop"})
	if len(s.values) != 1 || len(r.byID) != 1 || r.namespaces["shop"] != 1 {
		t.Errorf("after the sweep: %d values, %d records, %d of the namespace; want 1 of each", len(s.values), len(r.byID), r.namespaces["shop"])
	}
}

// The oldest record of a namespace is removed for a new one, and in total the oldest record of
// the namespace with the most records.
func TestBounds(t *testing.T) {
	s, c := &memStore{values: map[string][]byte{}}, &clock{time.Unix(1_800_000_000, 0)}
	r := open(t, s, c)
	r.namespaceMax, r.totalMax = 5, 8
	add := func(namespace string, n int) {
		for range n {
			c.t = c.t.Add(time.Second)
			put(t, r, fmt.Sprintf("%s-%d", namespace, c.t.Unix()), Record{Namespace: namespace, Completed: c.t})
		}
	}
	add("quiet", 2)
	add("flood", 50)
	if r.namespaces["flood"] != 5 || r.namespaces["quiet"] != 2 {
		t.Errorf("records %v, want 5 of flood and 2 of quiet", r.namespaces)
	}
	add("other", 4)
	if want := map[string]int{"quiet": 2, "flood": 3, "other": 3}; len(s.values) != 8 || !maps.Equal(r.namespaces, want) {
		t.Errorf("%d values, records %v, want 8 and %v: the namespace with the most gives way", len(s.values), r.namespaces, want)
	}
	if again := open(t, s, c); !maps.Equal(again.namespaces, r.namespaces) {
		t.Errorf("after a restart %v, before %v", again.namespaces, r.namespaces)
	}
}

// A record whose write failed is not known.
func TestRefusedWrite(t *testing.T) {
	s, c := &memStore{values: map[string][]byte{}}, &clock{time.Unix(1_800_000_000, 0)}
	r := open(t, s, c)
	s.refuse = errors.New("the disk was removed")
	if err := r.Put("id", Record{Completed: c.t}); !errors.Is(err, s.refuse) {
		t.Errorf("error %v", err)
	}
	if r.Completed("id", "2") {
		t.Error("the record is known although it is not stored")
	}
}

// A record survives a power loss after Put has returned.
func TestPowerLoss(t *testing.T) {
	fs, c := vfs.NewCrashableMem(), &clock{time.Unix(1_800_000_000, 0)}
	options := func(fs vfs.FS) pebblestore.Options {
		return pebblestore.Options{FS: fs, Logger: slog.New(slog.DiscardHandler)}
	}
	store, err := pebblestore.Open("queue", options(fs))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	put(t, open(t, store, c), "id", Record{Namespace: "shop", UID: "1", Completed: c.t})
	after, err := pebblestore.Open("queue", options(fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 0})))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = after.Close() }()
	if !open(t, after, c).Completed("id", "2") {
		t.Error("the record was lost")
	}
}
