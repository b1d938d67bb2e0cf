package limits

import (
	"sync/atomic"
	"time"
)

// A Source that stores more than bulkRate bytes a second, after a burst of bulkBurst, is slowed
// down while other Sources store as well: after each commit it pauses bulkPause times the duration
// of the commit, and at most maxPause. So other Sources get most of the disk's time, however fast
// the disk is, and a single Source uses all of it. The same holds for the bodies of refused requests
// and the processor's time.
const (
	bulkRate  = 4 << 20
	bulkBurst = 1 << 20
	bulkPause = 3
	maxPause  = 100 * time.Millisecond
	// sharedFor is how long two Sources count as simultaneous after they stored in turn.
	sharedFor = time.Second
)

// Pace slows down Sources that send in bulk while other Sources send as well.
type Pace struct {
	// lastWorked is the last Source that stored messages or had a request refused. Until sharedUntil
	// (nanoseconds since 1970) at least two Sources count as doing so at the same time.
	lastWorked  atomic.Pointer[Source]
	sharedUntil atomic.Int64
}

// Worked pauses a Source after bulk work for it: a commit, or a refused request. bytes is the size
// of the work, and took its duration.
func (p *Pace) Worked(s *Source, bytes int, took time.Duration) {
	now := time.Now()
	if before := p.lastWorked.Load(); before != s {
		p.lastWorked.Store(s)
		if before != nil {
			p.sharedUntil.Store(now.Add(sharedFor).UnixNano())
		}
	}
	if !s.bulk.AllowN(now, bytes) && now.UnixNano() < p.sharedUntil.Load() {
		time.Sleep(min(bulkPause*took, maxPause))
	}
}
