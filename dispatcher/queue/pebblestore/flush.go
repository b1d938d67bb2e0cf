package pebblestore

import (
	"container/heap"
	"sync"
	"sync/atomic"
	"time"
)

// flusher writes the states of lanes that changed in memory only, by acknowledgements or by
// messages for other destinations.
type flusher struct {
	// writing is held while lanes are written, so that a later caller finds their states on
	// disk.
	writing sync.Mutex

	mu    sync.Mutex
	dirty []*lane
	// unsynced: a write happened after the last sync began.
	unsynced atomic.Bool
	wake     chan struct{}
}

func (f *flusher) init() { f.wake = make(chan struct{}, 1) }

func (f *flusher) add(l *lane) {
	f.mu.Lock()
	f.dirty = append(f.dirty, l)
	f.mu.Unlock()
	f.signal()
}

func (f *flusher) signal() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// markUnsynced is called after a write without a sync, markSynced before a write with a sync.
func (f *flusher) markUnsynced() {
	if !f.unsynced.Swap(true) {
		f.signal()
	}
}

func (f *flusher) markSynced() { f.unsynced.Store(false) }

// runFlusher writes changed lanes every FlushInterval, and syncs every SyncInterval; it blocks
// while nothing changes.
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
		durable := false
		switch now := time.Now(); {
		case !s.flusher.unsynced.Load():
			unsyncedSince = now
		case now.Sub(unsyncedSince) >= s.o.SyncInterval:
			durable, unsyncedSince = true, now
		}
		if err := s.flushLanes(durable); err != nil {
			s.log.Error("write of lane positions failed; retrying", "error", err)
		}
		if s.flusher.unsynced.Load() {
			s.flusher.signal()
		}
	}
}

const lanesPerFlush = 64

// flushLanes writes all changed lanes. With durable it returns when all previous writes are
// durable, too.
func (s *Store) flushLanes(durable bool) error {
	if err := s.writeLanes(); err != nil || !durable {
		return err
	}
	return s.commitLog.sync()
}

// writeLanes applies the states of all changed lanes.
func (s *Store) writeLanes() error {
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
			s.flusher.signal()
			return err
		}
		dirty = dirty[n:]
	}
	return nil
}

// flushSome writes a few lanes as one batch. It holds all their locks until the batch is
// applied, so that an older state never overwrites a newer one. No other function locks two
// lanes.
func (s *Store) flushSome(lanes []*lane) error {
	b := s.db.NewBatch()
	locked := make(map[*sync.Mutex]bool, len(lanes))
	for _, l := range lanes {
		if !locked[l.mu] { // Lanes of a group share a lock.
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

// retryTimer notifies lanes whose retries become due, with one timer for all lanes.
type retryTimer struct {
	mu    sync.Mutex
	lanes laneHeap
	wake  chan struct{}
}

func (w *retryTimer) init() { w.wake = make(chan struct{}, 1) }

// schedule notifies the lane at a time, if it wants a notification then. The earlier of two
// times applies.
func (w *retryTimer) schedule(l *lane, at int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case l.heapIndex < 0:
		l.notifyAt = at
		heap.Push(&w.lanes, l)
	case at < l.notifyAt:
		l.notifyAt = at
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

func (w *retryTimer) forget(l *lane) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if l.heapIndex >= 0 {
		heap.Remove(&w.lanes, l.heapIndex)
	}
}

// due removes and returns a lane whose time is reached, or returns the time to wait.
func (w *retryTimer) due(now int64) (l *lane, wait time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.lanes) == 0 {
		return nil, time.Hour
	}
	if at := w.lanes[0].notifyAt; at > now {
		return nil, time.Duration(min(at-now, time.Hour.Milliseconds())) * time.Millisecond
	}
	return heap.Pop(&w.lanes).(*lane), 0
}

func (s *Store) runRetryTimer() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		l, wait := s.retryTimer.due(s.o.Now().UnixMilli())
		if l != nil {
			if l.wantsNotify.CompareAndSwap(true, false) {
				s.notify(l.id)
			}
			continue
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-s.retryTimer.wake:
		case <-s.stop:
			return
		}
	}
}

type laneHeap []*lane

func (h laneHeap) Len() int           { return len(h) }
func (h laneHeap) Less(i, j int) bool { return h[i].notifyAt < h[j].notifyAt }
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
