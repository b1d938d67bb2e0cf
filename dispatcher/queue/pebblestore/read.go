package pebblestore

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// reader leases messages for a lane. It reads consecutive messages of the log with one
// iterator, and allocates their contents as one piece of memory. The caller holds the lane's
// leasing lock.
type reader struct {
	s *Store
	l *lane
	*readBuffer
	it      *pebble.Iterator
	at      uint64 // The iterator's position, 0 for none.
	end     uint64 // The last position that the iterator can see.
	scanned int
	dropped bool // A message that was taken is not needed.
	want    int  // The messages of the lease.
	// bodies are the bytes of the bodies that were read, maxBytes those of the lease.
	bodies, maxBytes int
}

// readBuffer is reused by later readers.
type readBuffer struct {
	got   []piece
	taken []uint64 // Marked as leased, and not read.
	bytes []byte
	key   []byte
	upper []byte
}

// piece is a message that was read; its parts are adjacent in bytes.
type piece struct {
	failed                      string // FilterError.
	seq                         uint64
	acceptedAt                  int64
	code                        byte
	long                        bool
	start                       int
	id, typ, event, trace, body int // Lengths.
	openMessage                     // When it was taken.
}

// end is the end of the message in bytes.
func (p *piece) end() int { return p.start + p.id + p.typ + p.event + p.trace + p.body }

var readBuffers = sync.Pool{New: func() any { return new(readBuffer) }}

// maxKeptBytes bounds the memory that a reused buffer keeps.
const maxKeptBytes = 1 << 20

func newReader(s *Store, l *lane) *reader {
	return &reader{s: s, l: l, readBuffer: readBuffers.Get().(*readBuffer), maxBytes: queue.MaxLeaseBytes}
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

// open creates an iterator over all durable messages, unless the present one covers them.
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
	r.key = codec.AppendKey(r.key[:0], codec.PrefixMessage, l.number, 0)
	r.upper = codec.AppendKey(r.upper[:0], codec.PrefixMessage, l.number, r.end+1)
	var err error
	r.it, err = r.s.db.NewIter(&pebble.IterOptions{LowerBound: r.key, UpperBound: r.upper})
	return err
}

// maxDamagedRun bounds the consecutive messages that become dead letters because they are
// damaged. It is the maximum of a table's block; a repair recovers more of a larger damaged
// part than the engine does.
const maxDamagedRun = 256

// read returns a message, which is valid until the next read. A message with a wrong checksum
// is returned as lost.
func (r *reader) read(seq uint64) (rec codec.Record, err error) {
	if rec, err = r.readOnce(seq); err == nil || !pebble.IsCorruptionError(err) {
		return rec, err
	}
	// The second read does not use the cache, and the file may be sound.
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
	return codec.Record{Lost: true, Body: []byte(err.Error())}, nil
}

// buryDamaged makes dead letters of messages that cannot be read. The caller holds mu.
func (r *reader) buryDamaged(seqs []uint64, why []string) error {
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
		_, err := s.buryOrHandOver(b, l, &queue.DeadLetter{Lane: l.id, Seq: seq, AcceptedAt: s.o.Now(), Attempts: t.attempt,
			Failure: s.recordDamaged(l, seq, why[i])})
		failed = errors.Join(failed, err)
	}
	l.dest.put(b)
	l.put(b)
	return errors.Join(failed, s.applyFor(b, l.group))
}

// recordDamaged logs and counts a message that cannot be read, and returns its failure.
func (s *Store) recordDamaged(l *lane, seq uint64, why string) queue.Failure {
	s.metrics.damaged.Inc()
	s.log.With(l.id.LogArgs()...).Error("message damaged; it becomes a dead letter", "position", seq, "error", why)
	return queue.Failure{Time: s.o.Now(), Reason: queue.ReasonDamaged,
		Message: fmt.Sprintf("message %d of %s cannot be read: %s", seq, l.id.Source, why)}
}

func (r *reader) readOnce(seq uint64) (rec codec.Record, err error) {
	if r.it == nil || seq > r.end {
		if err := r.open(); err != nil {
			return rec, err
		}
	}
	var ok bool
	if r.at != 0 && seq == r.at+1 {
		ok = r.it.Next()
	} else {
		r.key = codec.AppendKey(r.key[:0], codec.PrefixMessage, r.l.log.number, seq)
		ok = r.it.SeekGE(r.key)
	}
	r.at = 0
	if !ok || codec.Number(r.it.Key(), 1) != seq {
		if err := r.it.Error(); err != nil {
			return rec, r.s.explain(err)
		}
		return rec, r.s.corruptf("message %d of %s is missing", seq, r.l.log.source)
	}
	r.at = seq
	v, err := r.it.ValueAndErr()
	if err == nil {
		err = rec.Decode(v)
	}
	if err != nil {
		return rec, r.s.explain(err)
	}
	return rec, nil
}

func (r *reader) keep(seq uint64, rec *codec.Record, t openMessage) {
	var failed string
	if rec.Skips > 0 {
		failed = rec.FilterError(r.l.id.Destination)
	}
	p := piece{failed: failed, seq: seq, acceptedAt: rec.AcceptedAt, code: rec.Code, long: rec.Long, start: len(r.bytes), openMessage: t,
		id: len(rec.ID), typ: len(rec.Type), event: len(rec.Event), trace: len(rec.Trace), body: len(rec.Body)}
	r.bytes = append(r.bytes, rec.ID...)
	r.bytes = append(r.bytes, rec.Type...)
	r.bytes = append(r.bytes, rec.Event...)
	r.bytes = append(r.bytes, rec.Trace...)
	r.bytes = append(r.bytes, rec.Body...)
	r.bodies += len(rec.Body)
	r.got = append(r.got, p)
}

// full reports whether the reader has max of the wanted messages, or their part of maxBytes.
func (r *reader) full(max int) bool {
	return len(r.got) >= max || r.bodies >= r.maxBytes*max/r.want
}

// sharedBytes bounds the memory that messages share. A message that is in flight for long holds all of it.
const sharedBytes = 4 << 10

// shared returns the bytes of the messages from the i-th on that share memory: at least one.
func (r *reader) shared(i int) []byte {
	start, end := r.got[i].start, r.got[i].end()
	for i++; i < len(r.got) && r.got[i].end()-start <= sharedBytes; i++ {
		end = r.got[i].end()
	}
	return bytes.Clone(r.bytes[start:end])
}

// deliveries appends the messages to buf. Their memory, which some share, is never changed.
func (r *reader) deliveries(buf []queue.Delivery) []queue.Delivery {
	if len(r.got) == 0 {
		return buf
	}
	var b []byte
	buf = slices.Grow(buf, len(r.got))
	for i := range r.got {
		p := &r.got[i]
		if len(b) == 0 {
			b = r.shared(i)
		}
		str := func(n int) string {
			if n == 0 {
				return ""
			}
			s := unsafe.String(&b[0], n)
			b = b[n:]
			return s
		}
		d := queue.Delivery{Lane: r.l.id, Seq: p.seq, ID: str(p.id), LongNumbers: p.long, AcceptedAt: codec.FromMillis(p.acceptedAt),
			Attempt: p.attempt, FilterError: p.failed}
		if p.due != 0 {
			d.Due = codec.FromMillis(p.due)
		}
		if d.Type = codec.Types[p.code]; p.code == 0 {
			d.Type = str(p.typ)
		}
		d.Event, d.TraceParent = str(p.event), str(p.trace)
		d.Body, b = b[:p.body:p.body], b[p.body:]
		buf = append(buf, d)
	}
	return buf
}

// takeReleased takes released messages. The caller holds mu.
func (r *reader) takeReleased(max int) {
	n := min(max, len(r.l.released))
	for _, seq := range r.l.released[:n] {
		t := r.l.open[seq]
		t.leased = true
		r.l.open[seq] = t
		r.taken = append(r.taken, seq)
	}
	r.l.released = slices.Delete(r.l.released, 0, n)
}

func (r *reader) takeRetry(seq uint64, t openMessage) {
	r.l.open[seq] = t
	r.l.openRetries++
	r.taken = append(r.taken, seq)
}

// takeOldest takes the oldest released message or retry. The caller holds mu.
func (r *reader) takeOldest() error {
	l := r.l
	oldest := uint64(0)
	if len(l.released) > 0 {
		oldest = l.released[0]
	}
	if int(l.Retries) > l.openRetries {
		if _, _, err := r.s.firstRetry(l); err != nil {
			return err
		}
		it, err := r.s.db.NewIter(&pebble.IterOptions{LowerBound: codec.Key(codec.PrefixRetry, l.number, l.lowSeq),
			UpperBound: codec.After(codec.PrefixRetry, l.number)})
		if err != nil {
			return err
		}
		defer func() { _ = it.Close() }()
		for ok := it.First(); ok; ok = it.Next() {
			seq := codec.Number(it.Key(), 1)
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
			d := codec.Decoder{Rest: v}
			due, attempt := d.Retry()
			if d.Bad {
				return r.s.corruptf("a retry of lane %v: %w", l.id, codec.ErrMalformed)
			}
			r.takeRetry(seq, openMessage{due: due, attempt: attempt, leased: true})
			if due <= l.nextDue {
				err = r.s.scanDue(l, 0, 0, nil) // It sets nextDue.
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

// takeDue takes released and other retries that are due at a time, at most max. The caller holds mu.
func (r *reader) takeDue(due int64, max int) error {
	l := r.l
	if l.Retries == 0 {
		return nil
	}
	it, err := r.s.db.NewIter(&pebble.IterOptions{LowerBound: codec.Key(codec.PrefixDue, l.number, uint64(due)),
		UpperBound: codec.Key(codec.PrefixDue, l.number, uint64(due)+1)})
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }()
	for ok := it.First(); ok && err == nil && len(r.taken) < max; ok = it.Next() {
		seq := codec.Number(it.Key(), 2)
		t, isOpen := l.open[seq]
		if t.leased {
			continue
		}
		if !isOpen {
			var v []byte
			v, err = it.ValueAndErr()
			d := codec.Decoder{Rest: v}
			if t = (openMessage{due: due, attempt: int(d.Uvarint())}); d.Bad {
				err = errors.Join(err, r.s.corruptf("a retry of lane %v: %w", l.id, codec.ErrMalformed))
				break
			}
			l.openRetries++
		}
		t.leased = true
		l.open[seq] = t
		r.taken = append(r.taken, seq)
	}
	l.released = slices.DeleteFunc(l.released, func(seq uint64) bool { return l.open[seq].leased })
	if due <= l.nextDue {
		err = errors.Join(err, r.s.scanDue(l, 0, 0, nil)) // It sets nextDue.
	}
	return errors.Join(err, it.Error())
}

// readFirst reads released messages, and then first attempts, until the reader has max messages.
func (r *reader) readFirst(max int) error {
	if r.full(max) {
		return nil
	}
	r.l.mu.Lock()
	r.takeReleased(max - len(r.got))
	r.l.mu.Unlock()
	if err := r.readTaken(max, r.l.release); err != nil {
		return err
	}
	return r.readFirstAttempts(max)
}

// readDue reads due retries until the reader has max messages. It returns the number of retries.
func (r *reader) readDue(now int64, max int) (n int, err error) {
	before := len(r.got)
	r.l.mu.Lock()
	if r.l.nextDue <= now {
		err = r.s.scanDue(r.l, now, max-before, r.takeRetry)
	}
	r.l.mu.Unlock()
	err = errors.Join(err, r.readTaken(max, r.l.returnDue))
	return len(r.got) - before, err
}

// readTaken reads the taken messages until the reader has max, and calls putBack for the others. It releases those
// that cannot be read.
func (r *reader) readTaken(max int, putBack func(uint64, openMessage)) error {
	for i, seq := range r.taken {
		if r.full(max) {
			r.settleTaken(i, putBack)
			break
		}
		rec, err := r.read(seq)
		if err == nil && rec.Lost {
			r.l.mu.Lock()
			err = r.buryDamaged([]uint64{seq}, []string{string(rec.Body)})
			r.l.mu.Unlock()
			if err == nil {
				continue
			}
		}
		if err == nil && r.l.EndpointRemoved && rec.Code != codec.CodeDelete {
			var no bool
			if no, err = r.dropUnneeded(seq); no {
				continue
			}
		}
		if err != nil {
			r.settleTaken(i, r.l.release)
			r.taken = r.taken[:0]
			return err
		}
		r.l.mu.Lock()
		t := r.l.open[seq]
		r.l.mu.Unlock()
		r.keep(seq, &rec, t)
	}
	r.taken = r.taken[:0]
	return nil
}

// settleTaken ends the leases of the taken messages from the i-th on, and calls putBack for each with mu held.
func (r *reader) settleTaken(i int, putBack func(uint64, openMessage)) {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	for _, seq := range r.taken[i:] {
		if t, ok := r.l.settle(seq); ok {
			putBack(seq, t)
		}
	}
}

// dropUnneeded ends a message in a lane whose endpoint was removed, if the group does not need
// it.
func (r *reader) dropUnneeded(seq uint64) (bool, error) {
	s, l := r.s, r.l
	l.mu.Lock()
	defer l.mu.Unlock()
	no, err := s.isUnneeded(l, seq)
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

// more reports whether the log has unread messages.
func (r *reader) more() bool {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	return r.l.Next <= r.l.limit()
}

// readFirstAttempts reads messages from the log until the reader has max.
func (r *reader) readFirstAttempts(max int) error {
	l := r.l
	l.mu.Lock()
	next := l.Next
	var gaps codec.GapList
	if l.group != nil {
		gaps = slices.Clone(l.group.Gaps)
	}
	l.mu.Unlock()
	var before, passedOver, filteredOut, handedOver = len(r.got), uint64(0), uint64(0), uint64(0)
	var lost []uint64
	var why []string
	var grouped []excluded // Messages that the group counts, too.
	var err error
	for !r.full(max) && r.scanned < maxScan && next <= l.limit() {
		if to := min(gaps.After(next), l.limit()+1); to != next {
			passedOver += to - next
			next = to
			continue
		}
		var rec codec.Record
		if rec, err = r.read(next); err != nil {
			break
		}
		v := rec.Verdict(l.id)
		r.scanned += int(rec.Skips / skipsPerScan)
		switch {
		case v == codec.Damaged:
			lost, why = append(lost, next), append(why, string(rec.Body))
			r.scanned++
		case v != codec.Wanted && l.group != nil:
			grouped = append(grouped, excluded{next, v, rec.ForSibling(l.id)})
			r.scanned++
		case v == codec.Filtered:
			filteredOut++
			r.scanned++
		case v == codec.Passed:
			passedOver++
			r.scanned++
		case l.EndpointRemoved && rec.Code != codec.CodeDelete:
			var no bool
			l.mu.Lock()
			no, err = r.s.isUnneeded(l, next)
			l.mu.Unlock()
			if no {
				handedOver++
				r.scanned++
			} else if err == nil {
				r.keep(next, &rec, openMessage{})
			}
		default:
			r.keep(next, &rec, openMessage{})
		}
		if err != nil {
			break
		}
		next++
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if next == l.Next {
		return err
	}
	l.Next = next
	l.Filtered += filteredOut
	l.Passed += passedOver
	l.HandedOver += handedOver
	for _, p := range r.got[before:] {
		l.open[p.seq] = openMessage{leased: true}
		err = errors.Join(err, r.s.countRead(l, codec.Types[p.code], p.seq))
	}
	r.s.changed(l)
	return errors.Join(err, r.countExcluded(grouped), r.buryDamaged(lost, why))
}

// excluded is a message that its lane does not deliver.
type excluded struct {
	seq     uint64
	verdict codec.Verdict
	sibling bool // The message is for another endpoint of the destination.
}

// countExcluded counts excluded messages in the group. The caller holds mu.
func (r *reader) countExcluded(grouped []excluded) error {
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
		if m.verdict == codec.Filtered {
			failed = errors.Join(failed, s.countFiltered(l, m.seq))
			continue
		}
		buried, err := s.countPassed(b, l, r, m.seq, m.sibling)
		changed, failed = changed || buried, errors.Join(failed, err)
	}
	if !changed {
		return errors.Join(failed, b.Close())
	}
	l.dest.put(b)
	l.put(b)
	return errors.Join(failed, s.applyFor(b, l.group))
}
