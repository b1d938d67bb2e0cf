package pebblestore

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/storetest"
)

func TestFilter(t *testing.T) {
	f := newFilter(256)
	h := func(i int) *hash {
		sum := sha256.Sum256(binary.BigEndian.AppendUint64(nil, uint64(i)))
		h := hash(sum[:16])
		return &h
	}
	n := f.free
	for i := range n {
		f.add(h(i))
	}
	if f.free != 0 {
		t.Errorf("space for %d more IDs", f.free)
	}
	passed := 0
	for i := range n {
		if !f.mayHave(h(i)) {
			t.Fatalf("id %d is missing", i)
		}
		if f.mayHave(h(n + i)) {
			passed++
		}
	}
	if share := float64(passed) / float64(n); share > 0.01 {
		t.Errorf("%.2f %% of absent IDs are reported by a full filter; want less than 1 %%", 100*share)
	}
}

// TestDuplicateMemory: IDs beyond the memory bound are found on disk.
func TestDuplicateMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("-short is set, and the test has many messages and one goroutine")
	}
	const each = 6000
	// The clock does not move by itself: on a busy machine the test takes minutes.
	clock, begin := &storetest.Clock{}, time.Now()
	now := func() time.Time { return begin.Add(clock.Ahead()) }
	o := Options{DuplicateWindow: 10 * time.Minute, DuplicateMemory: 40 << 10, Now: now}
	dir := t.TempDir()
	s := open(t, dir, o)
	request := func(part int) []queue.Message {
		msgs := make([]queue.Message, each)
		for i := range msgs {
			msgs[i] = message(fmt.Sprintf("%d-%d", part, i))
		}
		return msgs
	}
	check := func(what string, part int, want bool) {
		t.Helper()
		dups, err := s.Append(context.Background(), request(part))
		if err != nil {
			t.Fatal(err)
		}
		wrong := 0
		for i := range each {
			if got := dups != nil && dups[i]; got != want {
				wrong++
			}
		}
		if wrong > 0 {
			t.Errorf("%s: %d of %d messages of part %d are misclassified", what, wrong, each, part)
		}
		if m := s.duplicates; m.memory > o.DuplicateMemory {
			t.Errorf("%s: the filters use %d bytes", what, m.memory)
		}
	}
	for part := range 4 {
		check("new", part, false)
		clock.Advance(140 * time.Second)
	}
	for part := range 4 {
		check("repeated", part, true)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, o)
	check("new while filters are rebuilt", 4, false)
	for part := range 5 {
		check("repeated after a restart", part, true)
	}
	time.Sleep(20 * time.Millisecond) // Any part of the filters may be rebuilt; the results are the same.
	for part := range 5 {
		check("repeated again", part, true)
	}
	check("new", 5, false)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	// Without a window the store deletes the IDs.
	o.DuplicateWindow = 0
	s = open(t, dir, o)
	check("off", 5, false)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	o.DuplicateWindow = time.Minute
	s = open(t, dir, o)
	defer func() { _ = s.Close() }()
	check("on again", 5, false)
	check("on again", 5, true)
}
