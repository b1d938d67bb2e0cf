package pebblestore

import (
	"github.com/cockroachdb/pebble/v2"
)

// Pending first attempts at one URL, of messages that another URL accepted, must not block
// new calls. If the space is needed they are skipped, oldest first.

const (
	// skipChunk is how many messages of a log are looked at between two looks at the room.
	skipChunk = 1024
	// relief is the part of a Source's quota, or of the room below the high-water
	// mark, that is made free at once, so that the work is not done for each message.
	relief = 16
)

// skipFor skips first attempts until about so many bytes of a log are not needed
// any more, and frees them. It does nothing when something else needs the log.
func (s *Store) skipFor(l *sourceLog, bytes uint64) error {
	s.disk.maintaining.Lock()
	defer s.disk.maintaining.Unlock()
	return s.skipAndFree(l, bytes)
}

// skipAndFree is skipFor for the one who holds maintaining.
func (s *Store) skipAndFree(l *sourceLog, bytes uint64) error {
	skipped := false
	for {
		need, err := s.needed(l)
		if err != nil || need == never || need > l.durable.Load() {
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
	c, err := s.cut(l, true)
	if err != nil || c.log == nil {
		return err
	}
	// Positions first: see trim.
	if err := s.flushLanes(pebble.NoSync); err != nil {
		return err
	}
	return s.free(c)
}

// needed is the first message of a log that some lane needs.
func (s *Store) needed(l *sourceLog) (need uint64, err error) {
	need = never
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
	var r record
	v, closer, err := s.db.Get(key(prefixMessage, l.number, seq))
	if err != nil {
		return 0, err
	}
	defer func() { _ = closer.Close() }()
	err = r.decodeHead(v)
	return r.bytesBefore, err
}

// grouped lists the lanes of a log that share messages with others.
func (s *Store) grouped(l *sourceLog) (lanes []*lane) {
	l.eachLane(func(o *lane) {
		if o.group != nil {
			lanes = append(lanes, o)
		}
	})
	return lanes
}

// skipTo skips what a lane has not attempted of the messages before a position,
// up to the first that no other lane took. It reports whether it moved.
func (s *Store) skipTo(l *lane, to uint64) (moved bool, err error) {
	if !l.leasing.TryLock() {
		return false, nil // Its turn comes with the next look.
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
			// The request may be under way. What becomes of it corrects the count.
			if l.revoked == nil {
				l.revoked = map[uint64]struct{}{}
			}
			l.revoked[seq] = struct{}{}
		} else {
			l.dropReleased(seq)
		}
		l.letGo++
		l.skip()
		moved = true
	}
	for l.skipGaps() < to && l.next <= l.limit() {
		if done, err := s.final(l.group, l.next); err != nil || !done {
			return moved, err
		}
		rec, err := r.read(l.next)
		if err != nil {
			return moved, err
		}
		switch v := rec.verdict(l.id); {
		case v == filtered:
			l.filtered++
		case v == passed:
			l.passed++
		case rec.code == codeDelete:
			return moved, nil
		default:
			l.letGo++
			l.skip()
		}
		l.next++
		moved = true
	}
	return moved, nil
}

// skippable reports whether a message that a lane has taken from the log is one
// that another lane took.
func (s *Store) skippable(l *lane, r *reader, seq uint64) (bool, error) {
	if done, err := s.final(l.group, seq); !done || err != nil {
		return false, err
	}
	rec, err := r.read(seq)
	return err == nil && rec.code != codeDelete, err
}

// makeRoom skips first attempts where the disk is near its high-water mark. The
// caller holds maintaining.
func (s *Store) makeRoom() error {
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
	// The largest first.
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

// size is about how many bytes of messages the log holds.
func (l *sourceLog) size() uint64 {
	trimmed := l.trimmedBytes.Load() // First: it is never ahead of what was durable before.
	return l.durableBytes.Load() - trimmed
}
