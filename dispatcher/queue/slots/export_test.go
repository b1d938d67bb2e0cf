package slots

import "time"

// HasLease reports whether the lease of the session has not ended.
func (w *Writer) HasLease() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.p.hasLease(w.now())
}

// SetClaimAfter replaces the time for which a suspect must be the last record before a claim.
func (o *Options) SetClaimAfter(d time.Duration) { o.claimAfter = d }
