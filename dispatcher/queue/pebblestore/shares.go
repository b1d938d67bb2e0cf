package pebblestore

import (
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// The space below the high-water mark, without a reserve of a tenth, is divided among the namespaces with messages
// or recent calls. Each of them has an equal share, at least a tenth of the space. While more than the reserve is
// free, unused parts are lent. Within the reserve, the part of the share that a namespace may use falls with the
// square of the free part: those above their shares are refused first, and a namespace without messages almost never.
// Nothing is lent to a namespace with a suspended destination, because no retry window ends the loan.
//
// The space of a replicated log for calls, which a snapshot frees, is divided in the same way.

const (
	// reserveDivisor is the divisor of the space that gives the reserve, and the least share.
	reserveDivisor = 10
	// reserveBuffers is the number of write buffers in the least reserve of a disk: a flush, and the logs that are kept
	// meanwhile, change the free space by several of them.
	reserveBuffers = 6
	// calledFor is how long a namespace without messages counts after its last call.
	calledFor = 10 * time.Minute
)

// shares has the uses of the namespaces. space is 0 while nothing is divided: the file system does not report its
// usage, or Options.MaxBytesPerSource is set.
type shares struct {
	// space is what the store can use below the mark, and free is the unused part of it, without the bytes that are
	// written since.
	space, free atomic.Int64
	// buffers is the size of reserveBuffers.
	buffers atomic.Int64

	mu     sync.Mutex
	of     map[string]*share
	active int
}

// share is the use of one namespace.
type share struct {
	// used is the number of bytes, before compression, of the messages in its logs.
	used atomic.Int64
	// logged estimates the bytes of its messages in the replicated log.
	logged atomic.Int64
	// called is the time of its last call, and active whether it counts; shares.mu guards both.
	called time.Time
	active bool
	// suspended is true if the namespace has a suspended destination.
	suspended atomic.Bool
}

// forLog returns the use of the namespace of a Source.
func (s *shares) forLog(source string) *share {
	namespace, _, _ := strings.Cut(source, "/")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of == nil {
		s.of = map[string]*share{}
	}
	if s.of[namespace] == nil {
		s.of[namespace] = &share{}
	}
	return s.of[namespace]
}

// SetSuspended sets the namespaces with a suspended destination.
func (s *Store) SetSuspended(namespaces map[string]bool) {
	for name := range namespaces {
		s.disk.shares.forLog(name + "/")
	}
	s.disk.shares.mu.Lock()
	defer s.disk.shares.mu.Unlock()
	for name, n := range s.disk.shares.of {
		n.suspended.Store(namespaces[name])
	}
}

// isActive reports whether a namespace has messages or had a call.
func (n *share) isActive(now time.Time) bool {
	return n.used.Load() > 0 || !n.called.IsZero() && now.Sub(n.called) < calledFor
}

// call takes note of a call of a namespace.
func (s *shares) call(n *share, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n.called = now
	if !n.active {
		n.active = true
		s.active++
	}
}

// count counts the namespaces with messages or recent calls. inLog is the number of bytes in the replicated log:
// when a snapshot has freed some, all namespaces have less.
func (s *shares) count(now time.Time, inLog int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active = 0
	var logged int64
	for _, n := range s.of {
		logged += n.logged.Load()
		if n.active = n.isActive(now); n.active {
			s.active++
		}
	}
	if logged <= inLog {
		return
	}
	for _, n := range s.of {
		was := n.logged.Load()
		n.logged.Add(int64(float64(was)*float64(max(inLog, 0))/float64(logged)) - was)
	}
}

// size returns the share of a namespace; 0 while nothing is divided.
func (s *shares) size() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	space := s.space.Load()
	return shareOf(space, reserveOf(space, s.buffers.Load()), s.active)
}

// reserveOf returns the reserve of a space.
func reserveOf(space, least int64) int64 { return min(max(space/reserveDivisor, least), space/2) }

// shareOf returns the share of one of several namespaces.
func shareOf(space, reserve int64, namespaces int) int64 {
	return max((space-reserve)/int64(max(namespaces, 1)), space/reserveDivisor)
}

// mayUse returns how many bytes a namespace may use while free bytes are left: any number while more than the
// reserve is free.
func mayUse(reserve, share, free int64) (bytes int64, bounded bool) {
	if free > reserve {
		return 0, false
	}
	left := float64(max(free, 0)) / float64(max(reserve, 1))
	return int64(float64(share) * left * left), true
}

// admit returns why a namespace may not use more bytes of the disk; nil if it may. written are the bytes that
// are written since the space was read.
func (s *shares) admit(n *share, more, written int64) error {
	space := s.space.Load()
	return s.admitTo(space, reserveOf(space, s.buffers.Load()), s.free.Load()-written, n.used.Load()+more, !n.suspended.Load())
}

// admitTo is admit for a space of which some bytes are free and may be lent; nothing is divided if it is 0. The share of
// the only namespace is the whole space, so its calls are refused because the storage is full.
func (s *shares) admitTo(space, reserve, free, use int64, lent bool) error {
	if space == 0 {
		return nil
	}
	s.mu.Lock()
	active := s.active
	s.mu.Unlock()
	share := shareOf(space, reserve, active)
	most, bounded := mayUse(reserve, share, free)
	if !bounded && !lent {
		most, bounded = share, true
	}
	switch {
	case !bounded || use <= most:
		return nil
	case active > 1 && use > share-share/reserveDivisor: // The space that is free is an estimate.
		return queue.ErrOverShare
	}
	return queue.ErrFull
}
