package pebblestore

import (
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// Pending first attempts at one URL, of messages that another URL accepted, must not block
// new calls. If the space is needed they are skipped, oldest first.

const (
	// skipChunk is the number of messages of a log that are processed between two checks of the
	// freed space.
	skipChunk = 1024
	// skipDivisor is the divisor of a Source's quota, or of the space below the high-water mark,
	// that gives the bytes freed in one pass, so that the pass does not run for each message.
	skipDivisor = 16
	// skipFrom is the divisor of that space that gives the free bytes below which first attempts are skipped: more
	// than those below which namespaces are refused.
	skipFrom = 8
)

// skipFor skips first attempts until about this many bytes of a log are not needed, and frees
// them. It does nothing when other messages need the log.
func (s *Store) skipFor(l *sourceLog, bytes uint64) error {
	s.disk.maintaining.Lock()
	defer s.disk.maintaining.Unlock()
	return s.skipAndFree(l, bytes)
}

// skipAndFree is skipFor for callers that hold maintaining.
func (s *Store) skipAndFree(l *sourceLog, bytes uint64) error {
	skipped := false
	for {
		need, err := s.needed(l)
		if err != nil || need == codec.Never || need > l.durable.Load() {
			break
		}
		if at, err := s.bytesBefore(l, need); err != nil {
			return err
		} else if at-l.trimmedBytes.Load() >= bytes {
			break
		}
		moved := false
		for _, lane := range s.grouped(l) {
			n, err := s.skipTo(lane, need+skipChunk)
			if err != nil {
				return err
			}
			moved = moved || n
		}
		if !moved {
			break
		}
		skipped = true
	}
	if !skipped {
		return nil
	}
	c, err := s.planTrim(l, true)
	if err != nil || c.log == nil {
		return err
	}
	// Positions are written first; see trim.
	if err := s.flushLanes(false); err != nil {
		return err
	}
	return s.freeAll(c)
}

// needed returns the first message of a log that a lane needs.
func (s *Store) needed(l *sourceLog) (need uint64, err error) {
	need = codec.Never
	l.eachLane(func(lane *lane) {
		if err != nil {
			return
		}
		lane.mu.Lock()
		defer lane.mu.Unlock()
		var first uint64
		first, err = s.first(lane)
		need = min(need, first)
	})
	return need, err
}

func (s *Store) bytesBefore(l *sourceLog, seq uint64) (uint64, error) {
	var r codec.Record
	v, closer, err := s.db.Get(codec.Key(codec.PrefixMessage, l.number, seq))
	if err != nil {
		return 0, err
	}
	defer func() { _ = closer.Close() }()
	err = r.DecodeHead(v)
	return r.BytesBefore, err
}

// grouped lists the lanes of a log that are in a group.
func (s *Store) grouped(l *sourceLog) (lanes []*lane) {
	l.eachLane(func(o *lane) {
		if o.group != nil {
			lanes = append(lanes, o)
		}
	})
	return lanes
}

// skipTo skips the first attempts of a lane for messages before a position, up to the first
// message that no other lane delivered. It reports whether the lane's position or its open
// messages changed.
func (s *Store) skipTo(l *lane, to uint64) (moved bool, err error) {
	if !l.leasing.TryLock() {
		return false, nil // The next pass tries again.
	}
	defer l.leasing.Unlock()
	r := newReader(s, l)
	defer r.close()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dropped || len(l.group.lanes) < 2 {
		return false, nil
	}
	defer func() {
		if moved {
			s.changed(l)
		}
	}()
	for seq, t := range l.open {
		if seq >= to || t.due != 0 {
			continue
		}
		if no, err := s.skippable(l, r, seq); err != nil {
			return moved, err
		} else if !no {
			continue
		}
		delete(l.open, seq)
		if t.leased {
			// A request may be in progress. Its outcome corrects the count.
			if l.revoked == nil {
				l.revoked = map[uint64]struct{}{}
			}
			l.revoked[seq] = struct{}{}
		} else {
			l.dropReleased(seq)
		}
		l.HandedOver++
		l.countSkipped()
		moved = true
	}
	for l.skipGaps() < to && l.Next <= l.limit() {
		if done, err := s.isFinal(l.group, l.Next); err != nil || !done {
			return moved, err
		}
		rec, err := r.read(l.Next)
		if err != nil {
			return moved, err
		}
		switch v := rec.Verdict(l.id); {
		case v == codec.Filtered:
			l.Filtered++
		case v == codec.Passed:
			l.Passed++
		case rec.Code == codec.CodeDelete:
			return moved, nil
		default:
			l.HandedOver++
			l.countSkipped()
		}
		l.Next++
		moved = true
	}
	return moved, nil
}

// skippable reports whether another lane delivered an open message of this lane.
func (s *Store) skippable(l *lane, r *reader, seq uint64) (bool, error) {
	if done, err := s.isFinal(l.group, seq); !done || err != nil {
		return false, err
	}
	rec, err := r.read(seq)
	return err == nil && rec.Code != codec.CodeDelete, err
}

// makeSpace skips first attempts when the disk is near its high-water mark. The caller holds
// maintaining.
func (s *Store) makeSpace() error {
	excess := s.disk.excess.Load() - s.disk.trimmed.Load()
	if excess <= 0 {
		return nil
	}
	s.mu.RLock()
	logs := make([]*sourceLog, 0, len(s.logs))
	for _, l := range s.logs {
		if len(s.grouped(l)) > 1 {
			logs = append(logs, l)
		}
	}
	s.mu.RUnlock()
	// The largest log is processed first.
	for excess > 0 && len(logs) > 0 {
		largest := 0
		for i, l := range logs {
			if l.size() > logs[largest].size() {
				largest = i
			}
		}
		l := logs[largest]
		logs = append(logs[:largest], logs[largest+1:]...)
		before := l.size()
		if err := s.skipAndFree(l, uint64(excess)); err != nil {
			return err
		}
		excess -= int64(before) - int64(l.size())
	}
	return nil
}

// size is the approximate number of bytes of messages in the log.
func (l *sourceLog) size() uint64 {
	trimmed := l.trimmedBytes.Load() // Read first: it is never ahead of the durable bytes that are read later.
	return l.durableBytes.Load() - trimmed
}
