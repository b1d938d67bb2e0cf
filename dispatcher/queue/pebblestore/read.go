package pebblestore

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// reader takes messages for a lane. It reads a run of the log with one
// iterator, and gives all of what it took one piece of memory. The caller
// holds the lane's leasing lock.
type reader struct {
	s *Store
	l *lane
	*readBuffer
	it      *pebble.Iterator
	at      uint64 // The iterator's position, 0 for none.
	end     uint64 // The last position that it sees.
	scanned int
	dropped bool // A message that was taken turned out to be needless.
}

// readBuffer is reused from read to read.
type readBuffer struct {
	got   []piece
	taken []uint64 // Marked as leased, and not read yet.
	bytes []byte
	key   []byte
	upper []byte
}

// piece is a message that was read; its parts lie one after the other in bytes.
type piece struct {
	seq                         uint64
	acceptedAt                  int64
	code                        byte
	long                        bool
	start                       int
	id, typ, event, trace, body int // Lengths.
	attempt                     int
}

var readBuffers = sync.Pool{New: func() any { return new(readBuffer) }}

// maxKeptBytes bounds what a buffer keeps in memory.
const maxKeptBytes = 1 << 20

func newReader(s *Store, l *lane) *reader {
	return &reader{s: s, l: l, readBuffer: readBuffers.Get().(*readBuffer)}
}

func (r *reader) close() {
	if r.it != nil {
		_ = r.it.Close()
	}
	b := r.readBuffer
	b.got, b.taken, b.bytes = b.got[:0], b.taken[:0], b.bytes[:0]
	if cap(b.bytes) <= maxKeptBytes {
		readBuffers.Put(b)
	}
}

// open makes the iterator, for all that is durable now, or renews it.
func (r *reader) open() error {
	l := r.l.log
	end := l.durable.Load()
	if r.it != nil && r.end == end {
		return nil
	}
	if r.it != nil {
		_ = r.it.Close()
		r.it = nil
	}
	r.at, r.end = 0, end
	r.key = appendKey(r.key[:0], prefixMessage, l.number, 0)
	r.upper = appendKey(r.upper[:0], prefixMessage, l.number, r.end+1)
	var err error
	r.it, err = r.s.db.NewIter(&pebble.IterOptions{LowerBound: r.key, UpperBound: r.upper})
	return err
}

// maxDamagedRun bounds how many messages in a row are given up as damaged: as
// many as the block of a table may hold. Where more cannot be read, a repair
// finds more than the engine does.
const maxDamagedRun = 256

// read returns a message, valid until the next read. One that fails its checksum is lost.
func (r *reader) read(seq uint64) (rec record, err error) {
	if rec, err = r.readOnce(seq); err == nil || !pebble.IsCorruptionError(err) {
		return rec, err
	}
	// Once more from the disk, where the damage may not be.
	if r.it != nil {
		_ = r.it.Close()
		r.it = nil
	}
	if rec, err = r.readOnce(seq); err == nil || !pebble.IsCorruptionError(err) {
		return rec, err
	}
	l := r.l
	if seq != l.lastDamaged+1 {
		l.damagedRun = 0
	}
	if seq != l.lastDamaged {
		l.lastDamaged = seq
		l.damagedRun++
	}
	if l.damagedRun > maxDamagedRun {
		return rec, err
	}
	return record{lost: true, body: []byte(err.Error())}, nil
}

// setAside makes dead letters of messages that cannot be read. The caller holds mu.
func (r *reader) setAside(seqs []uint64, why []string) error {
	if len(seqs) == 0 {
		return nil
	}
	s, l := r.s, r.l
	l.dest.mu.Lock()
	defer l.dest.mu.Unlock()
	b := s.db.NewBatch()
	var failed error
	for i, seq := range seqs {
		t, ok := l.settle(seq)
		if ok && t.due != 0 {
			l.forgetRetry(b, seq, t.due)
		}
		_, err := s.giveUp(b, l, &queue.DeadLetter{Lane: l.id, Seq: seq, AcceptedAt: s.o.Now(), Attempts: t.attempt, Failure: s.damage(l, seq, why[i])})
		failed = errors.Join(failed, err)
	}
	l.dest.put(b)
	l.put(b)
	return errors.Join(failed, s.applyFor(b, l.group))
}

// damage is the failure of a message that cannot be read; it is logged and counted, too.
func (s *Store) damage(l *lane, seq uint64, why string) queue.Failure {
	s.metrics.damaged.Inc()
	s.log.With(l.id.LogArgs()...).Error("a message is damaged and cannot be delivered; it becomes a dead letter", "position", seq, "error", why)
	return queue.Failure{Time: s.o.Now(), Reason: queue.ReasonDamaged, Message: fmt.Sprintf("message %d of %s cannot be read: %s", seq, l.id.Source, why)}
}

func (r *reader) readOnce(seq uint64) (rec record, err error) {
	if r.it == nil || seq > r.end {
		if err := r.open(); err != nil {
			return rec, err
		}
	}
	var ok bool
	if r.at != 0 && seq == r.at+1 {
		ok = r.it.Next()
	} else {
		r.key = appendKey(r.key[:0], prefixMessage, r.l.log.number, seq)
		ok = r.it.SeekGE(r.key)
	}
	r.at = 0
	if !ok || number(r.it.Key(), 1) != seq {
		if err := r.it.Error(); err != nil {
			return rec, r.s.explain(err)
		}
		return rec, r.s.corruptf("message %d of %s is missing", seq, r.l.log.source)
	}
	r.at = seq
	v, err := r.it.ValueAndErr()
	if err == nil {
		err = rec.decode(v)
	}
	if err != nil {
		return rec, r.s.explain(err)
	}
	return rec, nil
}

func (r *reader) keep(seq uint64, rec *record, attempt int) {
	p := piece{seq: seq, acceptedAt: rec.acceptedAt, code: rec.code, long: rec.long, start: len(r.bytes), attempt: attempt,
		id: len(rec.id), typ: len(rec.typ), event: len(rec.event), trace: len(rec.trace), body: len(rec.body)}
	r.bytes = append(r.bytes, rec.id...)
	r.bytes = append(r.bytes, rec.typ...)
	r.bytes = append(r.bytes, rec.event...)
	r.bytes = append(r.bytes, rec.trace...)
	r.bytes = append(r.bytes, rec.body...)
	r.got = append(r.got, p)
}

// deliveries gives what was read. The messages share one piece of memory, of
// which nothing is ever changed.
func (r *reader) deliveries(buf []queue.Delivery) []queue.Delivery {
	if len(r.got) == 0 {
		return buf
	}
	all := append(make([]byte, 0, len(r.bytes)), r.bytes...)
	buf = slices.Grow(buf, len(r.got))
	for i := range r.got {
		p := &r.got[i]
		b := all[p.start:]
		str := func(n int) string {
			if n == 0 {
				return ""
			}
			s := unsafe.String(&b[0], n)
			b = b[n:]
			return s
		}
		d := queue.Delivery{Lane: r.l.id, Seq: p.seq, ID: str(p.id), LongNumbers: p.long, AcceptedAt: fromMillis(p.acceptedAt), Attempt: p.attempt}
		if d.Type = types[p.code]; p.code == 0 {
			d.Type = str(p.typ)
		}
		d.Event, d.TraceParent = str(p.event), str(p.trace)
		d.Body = b[:p.body:p.body]
		buf = append(buf, d)
	}
	return buf
}

// takeReleased takes messages that were given back. The caller holds mu.
func (r *reader) takeReleased(max int) int {
	n := min(max, len(r.l.released))
	if n <= 0 {
		return 0
	}
	for _, seq := range r.l.released[:n] {
		t := r.l.open[seq]
		t.leased = true
		r.l.open[seq] = t
		r.taken = append(r.taken, seq)
	}
	r.l.released = slices.Delete(r.l.released, 0, n)
	return n
}

// takeDue takes retries that are due. The caller holds mu.
func (r *reader) takeDue(now int64, max int) (int, error) {
	return r.s.scanDue(r.l, now, max, r.takeRetry)
}

func (r *reader) takeRetry(seq uint64, t taking) {
	r.l.open[seq] = t
	r.l.openRetries++
	r.taken = append(r.taken, seq)
}

// takeOldest takes the oldest message of those that were read before. The caller holds mu.
func (r *reader) takeOldest() error {
	l := r.l
	oldest := uint64(0)
	if len(l.released) > 0 {
		oldest = l.released[0]
	}
	if int(l.retries) > l.openRetries {
		if _, _, err := r.s.firstRetry(l); err != nil {
			return err
		}
		it, err := r.s.db.NewIter(&pebble.IterOptions{LowerBound: key(prefixRetry, l.number, l.lowSeq), UpperBound: after(prefixRetry, l.number)})
		if err != nil {
			return err
		}
		defer func() { _ = it.Close() }()
		for ok := it.First(); ok; ok = it.Next() {
			seq := number(it.Key(), 1)
			if oldest != 0 && seq > oldest {
				break
			}
			if _, isOpen := l.open[seq]; isOpen {
				continue
			}
			v, err := it.ValueAndErr()
			if err != nil {
				return err
			}
			d := decoder{b: v}
			due, attempt := d.retry()
			if d.bad {
				return r.s.corruptf("a retry of lane %v: %w", l.id, errMalformed)
			}
			r.takeRetry(seq, taking{due: due, attempt: attempt, leased: true})
			if due <= l.nextDue {
				_, err = r.s.scanDue(l, 0, 0, nil) // Finds the next one.
			}
			return err
		}
		if err := it.Error(); err != nil {
			return err
		}
	}
	if oldest != 0 {
		r.takeReleased(1)
	}
	return nil
}

// readTaken reads what was taken. What cannot be read is given back.
func (r *reader) readTaken() error {
	for i, seq := range r.taken {
		rec, err := r.read(seq)
		if err == nil && rec.lost {
			r.l.mu.Lock()
			err = r.setAside([]uint64{seq}, []string{string(rec.body)})
			r.l.mu.Unlock()
			if err == nil {
				continue
			}
		}
		if err == nil && r.l.left && rec.code != codeDelete {
			var no bool
			if no, err = r.dropNeedless(seq); no {
				continue
			}
		}
		if err != nil {
			r.l.mu.Lock()
			for _, seq := range r.taken[i:] {
				if t, ok := r.l.settle(seq); ok {
					r.l.release(seq, t)
				}
			}
			r.l.mu.Unlock()
			r.taken = r.taken[:0]
			return err
		}
		r.l.mu.Lock()
		attempt := r.l.open[seq].attempt
		r.l.mu.Unlock()
		r.keep(seq, &rec, attempt)
	}
	r.taken = r.taken[:0]
	return nil
}

// dropNeedless ends a message for a lane that has left, if another lane took or has it.
func (r *reader) dropNeedless(seq uint64) (bool, error) {
	s, l := r.s, r.l
	l.mu.Lock()
	defer l.mu.Unlock()
	no, err := s.needless(l, seq)
	if !no || err != nil {
		return false, err
	}
	r.dropped = true
	r.scanned++
	t, ok := l.settle(seq)
	if !ok {
		return true, nil
	}
	return true, s.needNoRetry(l, seq, t)
}

// more tells whether the log has messages that were not read yet.
func (r *reader) more() bool {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	return r.l.next <= r.l.limit()
}

// readFirsts takes messages from the log until the reader has max. It returns how many it took.
func (r *reader) readFirsts(max int) (int, error) {
	l := r.l
	l.mu.Lock()
	next := l.next
	var gaps []gap
	if l.group != nil {
		gaps = slices.Clone(l.group.gaps)
	}
	l.mu.Unlock()
	var before, passedOver, filteredOut, letGo = len(r.got), uint64(0), uint64(0), uint64(0)
	var lost []uint64
	var why []string
	var grouped []judged // What the group counts, too.
	var err error
	for len(r.got) < max && r.scanned < maxScan && next <= l.limit() {
		if to := behindGap(gaps, next); to != next {
			passedOver += to - next
			next = to
			continue
		}
		var rec record
		if rec, err = r.read(next); err != nil {
			break
		}
		v := rec.verdict(l.id)
		switch {
		case v == damaged:
			lost, why = append(lost, next), append(why, string(rec.body))
			r.scanned++
		case v != wanted && l.group != nil:
			grouped = append(grouped, judged{next, v, rec.forSibling(l.id)})
			r.scanned++
		case v == filtered:
			filteredOut++
			r.scanned++
		case v == passed:
			passedOver++
			r.scanned++
		case l.left && rec.code != codeDelete:
			var no bool
			l.mu.Lock()
			no, err = r.s.needless(l, next)
			l.mu.Unlock()
			if no {
				letGo++
				r.scanned++
			} else if err == nil {
				r.keep(next, &rec, 0)
			}
		default:
			r.keep(next, &rec, 0)
		}
		if err != nil {
			break
		}
		next++
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if next == l.next {
		return 0, err
	}
	l.next = next
	l.filtered += filteredOut
	l.passed += passedOver
	l.letGo += letGo
	for _, p := range r.got[before:] {
		l.open[p.seq] = taking{leased: true}
		err = errors.Join(err, r.s.countRead(l, types[p.code], p.seq))
	}
	r.s.changed(l)
	return len(r.got) - before, errors.Join(err, r.count(grouped), r.setAside(lost, why))
}

// judged is a message that a lane does not get, and why.
type judged struct {
	seq     uint64
	verdict verdict
	sibling bool // It is for another endpoint of the destination.
}

// count has the group count what a lane does not get. The caller holds mu.
func (r *reader) count(grouped []judged) error {
	if len(grouped) == 0 {
		return nil
	}
	s, l := r.s, r.l
	l.dest.mu.Lock()
	defer l.dest.mu.Unlock()
	b := s.db.NewBatch()
	changed := false
	var failed error
	for _, m := range grouped {
		if m.verdict == filtered {
			failed = errors.Join(failed, s.filter(l, m.seq))
			continue
		}
		buried, err := s.pass(b, l, r, m.seq, m.sibling)
		changed, failed = changed || buried, errors.Join(failed, err)
	}
	if !changed {
		return errors.Join(failed, b.Close())
	}
	l.dest.put(b)
	l.put(b)
	return errors.Join(failed, s.applyFor(b, l.group))
}
