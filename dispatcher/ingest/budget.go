package ingest

import "sync"

// budget is the memory that all requests in progress may hold together. Each
// Source, and those whose write key is not known yet, has a share in it. A
// share may grow as long as it is not larger than what is left for all: one
// Source alone gets half, two that flood get a third each, and there is always
// room for one that comes new.
type budget struct {
	mu   sync.Mutex
	used int64
}

// share is what one Source holds of a budget; the budget's lock guards it.
type share struct{ used int64 }

// hold is what one request holds of a share.
type hold struct {
	budget *budget
	share  *share
	bytes  int64
}

// grow takes n bytes more, or none and reports false.
func (h *hold) grow(n, limit int64) bool {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	return h.take(n, limit)
}

func (h *hold) take(n, limit int64) bool {
	if h.share.used+n > limit-(h.budget.used+n) {
		return false
	}
	h.budget.used += n
	h.share.used += n
	h.bytes += n
	return true
}

// move gives back what is held and takes n bytes of another share instead.
func (h *hold) move(to *share, n, limit int64) bool {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	h.give()
	h.share = to
	return h.take(n, limit)
}

// free gives back what is held; a second time is harmless.
func (h *hold) free() {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	h.give()
}

func (h *hold) give() {
	h.budget.used -= h.bytes
	h.share.used -= h.bytes
	h.bytes = 0
}

// held is how much all requests hold.
func (b *budget) held() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}
