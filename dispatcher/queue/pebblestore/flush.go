package pebblestore

import (
	"container/heap"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
)

// flusher writes the states of lanes that changed in memory alone: those whose
// messages were acknowledged or passed over.
type flusher struct {
	// writing is held while lanes are written: who comes next finds them on disk.
	writing sync.Mutex

	mu    sync.Mutex
	dirty []*lane
	// unsynced: something was written that no sync has covered since.
	unsynced atomic.Bool
	wake     chan struct{}
}

func (f *flusher) init() { f.wake = make(chan struct{}, 1) }

func (f *flusher) add(l *lane) {
	f.mu.Lock()
	f.dirty = append(f.dirty, l)
	f.mu.Unlock()
	f.poke()
}

func (f *flusher) poke() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// wrote is called after a write without a sync; syncing before one with it.
func (f *flusher) wrote() {
	if !f.unsynced.Swap(true) {
		f.poke()
	}
}

func (f *flusher) syncing() { f.unsynced.Store(false) }

// runFlusher sleeps while nothing changes.
func (s *Store) runFlusher() {
	var unsyncedSince time.Time
	for {
		select {
		case <-s.flusher.wake:
		case <-s.stop:
			return
		}
		select {
		case <-time.After(s.o.FlushInterval):
		case <-s.stop:
			return
		}
		write := pebble.NoSync
		switch now := time.Now(); {
		case !s.flusher.unsynced.Load():
			unsyncedSince = now
		case now.Sub(unsyncedSince) >= s.o.SyncInterval:
			write, unsyncedSince = pebble.Sync, now
		}
		if err := s.flushLanes(write); err != nil {
			s.log.Error("writing the positions of lanes failed; retrying", "error", err)
		}
		if s.flusher.unsynced.Load() {
			s.flusher.poke()
		}
	}
}

const lanesPerFlush = 64

// flushLanes writes all changed lanes. With pebble.Sync all that was written before is durable too.
func (s *Store) flushLanes(write *pebble.WriteOptions) error {
	s.flusher.writing.Lock()
	defer s.flusher.writing.Unlock()
	s.flusher.mu.Lock()
	dirty := s.flusher.dirty
	s.flusher.dirty = nil
	s.flusher.mu.Unlock()
	for len(dirty) > 0 {
		n := min(len(dirty), lanesPerFlush)
		if err := s.flushSome(dirty[:n]); err != nil {
			s.flusher.mu.Lock()
			s.flusher.dirty = append(s.flusher.dirty, dirty...)
			s.flusher.mu.Unlock()
			s.flusher.poke()
			return err
		}
		dirty = dirty[n:]
	}
	if !write.Sync {
		return nil
	}
	s.flusher.syncing()
	return s.db.LogData(s.fs.positions.mark(), pebble.Sync)
}

// flushSome writes a few lanes as one batch. It holds the locks of all of them
// until it is applied: no state may overtake a newer one. Nobody else ever holds two.
func (s *Store) flushSome(lanes []*lane) error {
	b := s.db.NewBatch()
	locked := make(map[*sync.Mutex]bool, len(lanes))
	for _, l := range lanes {
		if !locked[l.mu] { // Lanes of a group have one lock.
			locked[l.mu] = true
			l.mu.Lock()
			defer l.mu.Unlock()
		}
		if !l.dropped {
			l.put(b)
		}
	}
	if b.Count() == 0 {
		_ = b.Close()
		return nil
	}
	if err := s.apply(b); err != nil {
		for _, l := range lanes {
			if l.group != nil {
				l.group.putFailed()
			}
		}
		return err
	}
	for _, l := range lanes {
		l.dirty = false
	}
	return nil
}

// waker tells of retries that become due: one timer for all lanes.
type waker struct {
	mu    sync.Mutex
	lanes laneHeap
	wake  chan struct{}
}

func (w *waker) init() { w.wake = make(chan struct{}, 1) }

// schedule makes the lane be notified at a time, if it is hungry then. Of two times the earlier counts.
func (w *waker) schedule(l *lane, at int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case l.heapIndex < 0:
		l.wakeAt = at
		heap.Push(&w.lanes, l)
	case at < l.wakeAt:
		l.wakeAt = at
		heap.Fix(&w.lanes, l.heapIndex)
	default:
		return
	}
	if l.heapIndex == 0 {
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

func (w *waker) forget(l *lane) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if l.heapIndex >= 0 {
		heap.Remove(&w.lanes, l.heapIndex)
	}
}

// due removes and returns a lane whose time has come, and otherwise the time to wait.
func (w *waker) due(now int64) (l *lane, wait time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.lanes) == 0 {
		return nil, time.Hour
	}
	if at := w.lanes[0].wakeAt; at > now {
		return nil, time.Duration(min(at-now, time.Hour.Milliseconds())) * time.Millisecond
	}
	return heap.Pop(&w.lanes).(*lane), 0
}

func (s *Store) runWaker() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		l, wait := s.waker.due(s.o.Now().UnixMilli())
		if l != nil {
			if l.hungry.CompareAndSwap(true, false) {
				s.notify(l.id)
			}
			continue
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-s.waker.wake:
		case <-s.stop:
			return
		}
	}
}

type laneHeap []*lane

func (h laneHeap) Len() int           { return len(h) }
func (h laneHeap) Less(i, j int) bool { return h[i].wakeAt < h[j].wakeAt }
func (h laneHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].heapIndex, h[j].heapIndex = i, j
}

func (h *laneHeap) Push(x any) {
	l := x.(*lane)
	l.heapIndex = len(*h)
	*h = append(*h, l)
}

func (h *laneHeap) Pop() any {
	old := *h
	l := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	l.heapIndex = -1
	return l
}
