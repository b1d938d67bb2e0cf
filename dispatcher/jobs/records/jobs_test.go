package records

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/check"
)

// newStore opens a store in fs.
func newStore(t *testing.T, fs vfs.FS) *pebblestore.Store {
	t.Helper()
	s, err := pebblestore.Open("queue", pebblestore.Options{FS: fs, Logger: slog.New(slog.DiscardHandler)})
	check.NoError(t, "open the store", err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// stored returns the number of values in a store.
func stored(t *testing.T, s Store) int {
	t.Helper()
	all, err := s.AllMeta()
	check.NoError(t, "AllMeta", err)
	return len(all)
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
	s, c := newStore(t, vfs.NewMem()), &clock{time.Unix(1_800_000_000, 0)}
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
	check.Equal(t, "values after the sweep", stored(t, s), 2)
	check.Same(t, "records after the sweep", r.namespaces, map[string]int{"shop": 2})
}

// The record of a run whose messages are pending for the longest retry window outlives them.
func TestRetentionOfUnfinishedRuns(t *testing.T) {
	s, c := newStore(t, vfs.NewMem()), &clock{time.Unix(1_800_000_000, 0)}
	r := open(t, s, c)
	put(t, r, "pending", Record{Namespace: "shop", UID: "1"})
	c.t = c.t.Add(liveconfig.MaxRetryWindow + 24*time.Hour)
	put(t, r, "new", Record{Namespace: "shop"})
	if _, ok := r.Get("pending"); !ok {
		t.Errorf("record a day after the longest retry window: got none, want it")
	}
	c.t = c.t.Add(unfinishedRetention)
	if _, ok := r.Get("pending"); ok {
		t.Error("record after its retention: got it, want none")
	}
}

// The oldest record of a namespace is removed for a new one, and in total the oldest record of
// the namespace with the most records.
func TestBounds(t *testing.T) {
	s, c := newStore(t, vfs.NewMem()), &clock{time.Unix(1_800_000_000, 0)}
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
	check.Same(t, "records at the bound of a namespace", r.namespaces, map[string]int{"quiet": 2, "flood": 5})
	add("other", 4)
	want := map[string]int{"quiet": 2, "flood": 3, "other": 3}
	check.Same(t, "records at the total bound", r.namespaces, want)
	check.Equal(t, "values at the total bound", stored(t, s), 8)
	check.Same(t, "records after a restart", open(t, s, c).namespaces, want)
}

// A record whose write failed is not known.
func TestRefusedWrite(t *testing.T) {
	s, c := newStore(t, vfs.NewMem()), &clock{time.Unix(1_800_000_000, 0)}
	r := open(t, s, c)
	check.NoError(t, "close the store", s.Close())
	if err := r.Put("id", Record{Completed: c.t}); !errors.Is(err, queue.ErrClosed) {
		t.Errorf("error of Put: got %v, want %v", err, queue.ErrClosed)
	}
	if r.Completed("id", "2") {
		t.Error("the record is known although it is not stored")
	}
}

// A record survives a power loss after Put has returned.
func TestPowerLoss(t *testing.T) {
	fs, c := vfs.NewCrashableMem(), &clock{time.Unix(1_800_000_000, 0)}
	put(t, open(t, newStore(t, fs), c), "id", Record{Namespace: "shop", UID: "1", Completed: c.t})
	after := newStore(t, fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 0}))
	check.Equal(t, "Completed after the power loss", open(t, after, c).Completed("id", "2"), true)
}
