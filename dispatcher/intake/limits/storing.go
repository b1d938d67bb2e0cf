package limits

import (
	"context"

	"golang.org/x/sync/semaphore"
)

// MaxStoring bounds the bytes of one Source's messages that are built and stored at the same time.
// It is enough to keep the disk busy. Excess requests wait for it with only their bodies in memory,
// and not inside the store, where they would delay other Sources. A request larger than MaxStoring
// runs while its Source has no other.
const MaxStoring = 512 << 10

// Storing is one request's share of its Source's MaxStoring.
type Storing struct {
	of    *semaphore.Weighted
	bytes int64
}

// Enter waits until the Source may store that many more bytes, at most MaxStoring. It reports false
// if ctx ended before.
func (s *Storing) Enter(ctx context.Context, source *Source, bytes int) bool {
	n := int64(min(bytes, MaxStoring))
	if source.storing.Acquire(ctx, n) != nil {
		return false
	}
	s.of, s.bytes = source.storing, n
	return true
}

// Extend raises the share to that many bytes, if this is possible without a wait. For a request
// that did not Enter it takes the share of the Source.
func (s *Storing) Extend(source *Source, bytes int) bool {
	more := int64(min(bytes, MaxStoring)) - s.bytes
	if more <= 0 {
		return true
	}
	if !source.storing.TryAcquire(more) {
		return false
	}
	s.of = source.storing
	s.bytes += more
	return true
}

// Leave ends the share. It may be called more than once.
func (s *Storing) Leave() {
	if s.bytes > 0 {
		s.of.Release(s.bytes)
		s.bytes = 0
	}
}
