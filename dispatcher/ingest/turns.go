package ingest

import "sync"

// turns lets a few requests at a time use the CPU. When more wait, the Sources
// take turns, so that one Source's flood or its expensive filters cost the
// others one turn each, not the whole queue.
type turns struct {
	mu   sync.Mutex
	free int
	// ring holds the lines in which somebody waits, the next one first.
	ring []*line
}

// line is who waits of one Source, guarded by the lock of its turns.
type line struct{ waiting []chan struct{} }

// enter waits for a turn. Who holds one does nothing but compute, so the wait ends.
func (t *turns) enter(l *line) {
	t.mu.Lock()
	if t.free > 0 {
		t.free--
		t.mu.Unlock()
		return
	}
	mine := make(chan struct{})
	if len(l.waiting) == 0 {
		t.ring = append(t.ring, l)
	}
	l.waiting = append(l.waiting, mine)
	t.mu.Unlock()
	<-mine
}

// leave ends a turn and hands it to the next line.
func (t *turns) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.ring) == 0 {
		t.free++
		return
	}
	l := t.ring[0]
	t.ring = t.ring[1:]
	next := l.waiting[0]
	l.waiting = l.waiting[1:]
	if len(l.waiting) > 0 {
		t.ring = append(t.ring, l)
	}
	close(next)
}
