package pebblestore

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// destination counts the dead letters of one destination and holds the ledger of its dropped
// lanes. Its lock is held until a change is applied, so that the count on disk is the newest
// one. It is locked after a lane's lock.
type destination struct {
	name string
	mu   sync.Mutex
	// count and bytes change under mu, and can be read without it.
	count, bytes atomic.Int64
	// holders is replaced or appended to; guarded by the store's mu.
	holders []ledgerHolder
	// last is the largest time in the keys of dead letters, once lastKnown is true; the keys of
	// later ones have a time of at least floor. Both are in Unix milliseconds.
	last, floor int64
	lastKnown   bool
	// dropped is the ledger of dropped lanes. It changes under this lock and the store's.
	dropped queue.Ledger
}

func (s *Store) destination(name string) *destination {
	s.mu.RLock()
	d := s.destinations[name]
	s.mu.RUnlock()
	if d != nil {
		return d
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if d = s.destinations[name]; d == nil {
		d = &destination{name: name}
		s.destinations[name] = d
	}
	return d
}

func (d *destination) put(b *pebble.Batch) { d.putWith(b, d.dropped) }

func (d *destination) putWith(b *pebble.Batch, dropped queue.Ledger) {
	if d.count.Load() == 0 && dropped == (queue.Ledger{}) {
		_ = b.Delete(codec.DestinationKey(d.name), nil)
		return
	}
	_ = b.Set(codec.DestinationKey(d.name), codec.AppendDestination(nil, d.count.Load(), d.bytes.Load(), dropped), nil)
}

// bury adds a dead letter to a batch. The caller holds the destination's lock and adds the
// destination's counts to the same batch.
func (s *Store) bury(b *pebble.Batch, l *lane, letter *queue.DeadLetter) {
	at := codec.Millis(letter.Failure.Time)
	if at <= 0 {
		at = s.o.Now().UnixMilli()
	}
	at = max(at, l.dest.floor)
	l.dest.last = max(l.dest.last, at)
	k := codec.DeadLetterKey(l.id.Destination, at, l.number, letter.Seq)
	v := codec.AppendDeadLetter(make([]byte, 0, len(letter.Body)+512), letter)
	_ = b.Set(k, v, nil)
	l.dest.count.Add(1)
	l.dest.bytes.Add(int64(len(k) + len(v)))
	l.Buried++
}

// Bury implements queue.Store. The dead letter and the lane's state are one write.
func (s *Store) Bury(d queue.Delivery, f queue.Failure) (buried bool, err error) {
	all := []queue.Settlement{{Delivery: d, Outcome: queue.Buried, Failure: f}}
	err = s.SettleAll(d.Lane, all)
	return all[0].Done, err
}

// Bounds of one batch of BuryExpired.
const (
	buryMessages = 256
	buryBytes    = 1 << 20
)

// BuryExpired implements queue.Store.
func (s *Store) BuryExpired(ctx context.Context, id queue.LaneID, cut time.Time, f queue.Failure) (int, error) {
	total := 0
	for {
		n, more, err := s.buryChunk(id, cut.UnixMilli(), &f)
		total += n
		if err != nil || !more {
			return total, err
		}
		if err := ctx.Err(); err != nil {
			return total, err
		}
		runtime.Gosched() // Other lanes can run.
	}
}

// buryChunk buries expired messages within the bounds of one batch; more is true when it
// reached them.
func (s *Store) buryChunk(id queue.LaneID, cut int64, f *queue.Failure) (n int, more bool, err error) {
	if err := s.enter(); err != nil {
		return 0, false, err
	}
	defer s.leave()
	if s.disk.exhausted.Load() {
		return 0, false, fmt.Errorf("bury expired messages: %w", queue.ErrFull)
	}
	l := s.lane(id)
	if l == nil {
		return 0, false, queue.ErrNoLane
	}
	l.leasing.Lock()
	defer l.leasing.Unlock()
	r := newReader(s, l)
	defer r.close()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dropped {
		return 0, false, queue.ErrNoLane
	}
	l.dest.mu.Lock()
	defer l.dest.mu.Unlock()
	g := buryBatch{s: s, l: l, r: r, b: s.db.NewBatch(), cut: cut, f: f}
	err = errors.Join(g.released(), g.retries(), g.unread())
	if !g.changed {
		_ = g.b.Close()
		return 0, false, err
	}
	l.dest.put(g.b)
	l.put(g.b)
	more = g.full() // Read now: apply returns the batch to a pool.
	err = errors.Join(err, s.applyFor(g.b, l.group))
	for _, seq := range g.closed {
		delete(l.open, seq)
		l.lowStale = true // The index was read before its entry was deleted.
	}
	if g.dueChanged {
		err = errors.Join(err, s.scanDue(l, 0, 0, nil))
	}
	return g.n, more, err
}

// buryBatch is one batch of expired messages.
type buryBatch struct {
	s          *Store
	l          *lane
	r          *reader
	b          *pebble.Batch
	cut        int64
	f          *queue.Failure
	n, scanned int
	changed    bool
	dueChanged bool
	closed     []uint64
}

func (g *buryBatch) full() bool {
	return g.n >= buryMessages || g.scanned >= maxScan || g.b.Len() >= buryBytes
}

// letterOf returns the dead letter of a message.
func letterOf(r *codec.Record, lane queue.LaneID, seq uint64) queue.DeadLetter {
	return queue.DeadLetter{
		Lane: lane, Seq: seq, ID: string(r.ID), Type: typeOf(r), Event: string(r.Event), Body: r.Body,
		AcceptedAt: codec.FromMillis(r.AcceptedAt),
	}
}

// typeOf returns the type of a message.
func typeOf(r *codec.Record) string {
	if r.Code == 0 {
		return string(r.Type)
	}
	return codec.Types[r.Code]
}

func (g *buryBatch) bury(seq uint64, rec *codec.Record, attempts int, last *queue.Failure) error {
	letter := letterOf(rec, g.l.id, seq)
	letter.Attempts, letter.Failure = attempts, *g.f
	if rec.Lost {
		letter.Body, letter.AcceptedAt, letter.Failure = nil, g.s.o.Now(), g.s.recordDamaged(g.l, seq, string(rec.Body))
	}
	if why := rec.FilterError(g.l.id.Destination); why != "" {
		letter.Failure = queue.Failure{Time: g.f.Time, Reason: queue.ReasonFilterFailed, Message: why, Redact: g.f.Redact}
	}
	// The receiver's response to this message is more specific. It may repeat what other rules did not redact.
	if last != nil && letter.Failure.StatusCode == 0 && len(letter.Failure.Response) == 0 {
		letter.Failure.StatusCode = last.StatusCode
		if len(g.f.Redact) == 0 {
			letter.Failure.Response = last.Response
		}
	}
	buried, err := g.s.buryOrHandOver(g.b, g.l, &letter)
	if g.scanned++; buried {
		g.n++
	}
	g.changed = true
	return err
}

// released buries released messages.
func (g *buryBatch) released() error {
	l := g.l
	keep := l.released[:0:0]
	var failed error
	for _, seq := range l.released {
		if failed != nil || g.full() {
			keep = append(keep, seq)
			continue
		}
		rec, err := g.r.read(seq)
		if err != nil || rec.AcceptedAt >= g.cut {
			failed = err
			keep = append(keep, seq)
			continue
		}
		t := l.open[seq]
		if t.due == 0 {
			delete(l.open, seq)
		} else {
			l.openRetries--
			l.forgetRetry(g.b, seq, t.due)
			// Its index entry exists until the batch is applied. The message remains open, so
			// that retries does not bury it again.
			g.closed = append(g.closed, seq)
		}
		failed = g.bury(seq, &rec, t.attempt, nil)
	}
	l.released = keep
	return failed
}

// retries buries entries of the retry index, oldest first.
func (g *buryBatch) retries() error {
	l := g.l
	if int(l.Retries) == l.openRetries {
		return nil
	}
	if _, _, err := g.s.firstRetry(l); err != nil {
		return err
	}
	it, err := g.s.db.NewIter(&pebble.IterOptions{LowerBound: codec.Key(codec.PrefixRetry, l.number, l.lowSeq),
		UpperBound: codec.After(codec.PrefixRetry, l.number)})
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }()
	for ok := it.First(); ok && !g.full(); ok = it.Next() {
		seq := codec.Number(it.Key(), 1)
		if _, isOpen := l.open[seq]; isOpen {
			continue
		}
		rec, err := g.r.read(seq)
		if err != nil {
			return err
		}
		if rec.AcceptedAt >= g.cut {
			return nil
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return err
		}
		d := codec.Decoder{Rest: v}
		due, attempts := d.Retry()
		last := d.Failure()
		if d.Bad {
			return g.s.corruptf("a retry of lane %v: %w", l.id, codec.ErrMalformed)
		}
		l.forgetRetry(g.b, seq, due)
		g.dueChanged = true
		if err := g.bury(seq, &rec, attempts, &last); err != nil {
			return err
		}
	}
	return it.Error()
}

// unread buries unread messages, up to the first that has not expired.
func (g *buryBatch) unread() error {
	l := g.l
	for !g.full() && l.skipGaps() <= l.limit() {
		rec, err := g.r.read(l.Next)
		if err != nil {
			return err
		}
		v := rec.Verdict(l.id)
		if v == codec.Wanted && rec.AcceptedAt >= g.cut {
			return nil
		}
		seq := l.Next
		l.Next++
		g.changed = true
		g.scanned++
		switch v {
		case codec.Wanted, codec.Damaged:
			if err = g.s.countRead(l, codec.Types[rec.Code], seq); err == nil {
				err = g.bury(seq, &rec, 0, nil)
			}
		case codec.Filtered:
			err = g.s.countFiltered(l, seq)
		case codec.Passed:
			_, err = g.s.countPassed(g.b, l, g.r, seq, rec.ForSibling(l.id))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Bounds of one read of dead letters.
const (
	letterMessages = 200
	letterBytes    = 1 << 20
)

// DeadLetters implements queue.Store. It has no lock or iterator open while fn runs.
func (s *Store) DeadLetters(ctx context.Context, destination, from string, fn func(queue.DeadLetter) bool) error {
	prefix := codec.DeadLetterPrefix(destination)
	start := prefix
	if from != "" {
		k, ok := codec.ParseDeadLetterID(destination, from)
		if !ok {
			return fmt.Errorf("dead letters: %q is not a key of a dead letter", from)
		}
		start = append(k, 0)
	}
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		letters, next, err := s.someLetters(start, codec.EndOf(prefix))
		if err != nil {
			return err
		}
		for i := range letters {
			if !fn(letters[i]) {
				return nil
			}
		}
		if next == nil {
			return nil
		}
		start = next
	}
}

// someLetters copies dead letters from start on; next is the key to continue with, nil at the
// end.
func (s *Store) someLetters(start, end []byte) (letters []queue.DeadLetter, next []byte, err error) {
	if err := s.enter(); err != nil {
		return nil, nil, err
	}
	defer s.leave()
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: start, UpperBound: end})
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = it.Close() }()
	bytes := 0
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			return nil, nil, s.explain(err)
		}
		l, err := codec.DecodeDeadLetter(it.Key(), append([]byte(nil), v...))
		if err != nil {
			return nil, nil, s.corruptf("dead letter %s: %w", codec.DeadLetterID(it.Key()), err)
		}
		letters = append(letters, l)
		if bytes += len(v); bytes >= letterBytes || len(letters) >= letterMessages {
			return letters, append(append([]byte(nil), it.Key()...), 0), nil
		}
	}
	return letters, nil, s.explain(it.Error())
}

// DeadLetterMark implements queue.Store. A dead letter gets its key under the destination's lock,
// which is held until the dead letter is readable.
func (s *Store) DeadLetterMark(destination string) (string, error) {
	if err := s.enter(); err != nil {
		return "", err
	}
	defer s.leave()
	d := s.destination(destination)
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.lastKnown {
		prefix := codec.DeadLetterPrefix(destination)
		it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: prefix, UpperBound: codec.EndOf(prefix)})
		if err != nil {
			return "", err
		}
		if it.Last() {
			d.last = max(d.last, codec.DeadLetterMillis(it.Key()))
		}
		if err := it.Close(); err != nil {
			return "", s.explain(err)
		}
		d.lastKnown = true
	}
	d.floor = max(d.floor, d.last+1)
	// No lane and no message has the number 0.
	return codec.DeadLetterID(codec.DeadLetterKey(destination, d.floor, 0, 0)), nil
}

// DeleteDeadLetters implements queue.Store. It ignores unknown keys.
func (s *Store) DeleteDeadLetters(ctx context.Context, destination string, keys ...string) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	if len(keys) == 0 {
		return s.commitLog.sync()
	}
	d := s.destination(destination)
	for len(keys) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(len(keys), 1000)
		if err := await(s.deleteSome(d, keys[:n])); err != nil {
			return err
		}
		keys = keys[n:]
	}
	return nil
}

func (s *Store) deleteSome(d *destination, ids []string) (wait func() error, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	b := s.db.NewBatch()
	count, bytes := d.count.Load(), d.bytes.Load()
	seen := make(map[string]bool, len(ids))
	for _, id := range ids {
		k, ok := codec.ParseDeadLetterID(d.name, id)
		if !ok || seen[string(k)] {
			continue
		}
		seen[string(k)] = true
		v, closer, err := s.db.Get(k)
		if errors.Is(err, pebble.ErrNotFound) {
			continue
		}
		if err != nil {
			_ = b.Close()
			return nil, s.explain(err)
		}
		count--
		bytes -= int64(len(k) + len(v))
		_ = closer.Close()
		_ = b.Delete(k, nil)
	}
	return s.applyCounts(d, b, count, bytes)
}

// applyCounts applies a batch that removes dead letters. Without any, those that a caller names may be removed
// by another batch that is not durable yet.
func (s *Store) applyCounts(d *destination, b *pebble.Batch, count, bytes int64) (wait func() error, err error) {
	if b.Count() == 0 {
		return s.commitLog.sync, b.Close()
	}
	before, beforeBytes := d.count.Swap(count), d.bytes.Swap(bytes)
	d.put(b)
	if wait, err = s.submit(b); err != nil {
		d.count.Store(before)
		d.bytes.Store(beforeBytes)
	}
	return wait, err
}

const (
	trimLetters = 1000
	// maxAhead is how far the time of a dead letter may be ahead of the clock.
	maxAhead = 10 * time.Minute
)

// TrimDeadLetters implements queue.Store.
func (s *Store) TrimDeadLetters(ctx context.Context, destination string, before, young time.Time, maxBytes int64) (int, error) {
	d := s.destination(destination)
	total := 0
	for {
		if err := ctx.Err(); err != nil {
			return total, err
		}
		n, err := s.trimPage(d, before.UnixMilli(), young.UnixMilli(), maxBytes)
		total += n
		if err != nil || n < trimLetters {
			return total, err
		}
	}
}

func (s *Store) trimPage(d *destination, before, young, maxBytes int64) (int, error) {
	if err := s.enter(); err != nil {
		return 0, err
	}
	defer s.leave()
	n, wait, err := s.trimSome(d, before, young, maxBytes)
	return n, await(wait, err)
}

func (s *Store) trimSome(d *destination, before, young, maxBytes int64) (n int, wait func() error, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.count.Load() == 0 {
		return 0, nil, nil
	}
	prefix := codec.DeadLetterPrefix(d.name)
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: prefix, UpperBound: codec.EndOf(prefix)})
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = it.Close() }()
	soon := s.o.Now().Add(maxAhead).UnixMilli()
	count, bytes := d.count.Load(), d.bytes.Load()
	ok := it.First()
	for ; ok && n < trimLetters; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			return 0, nil, s.explain(err)
		}
		if at := letterMillis(it.Key(), v, soon); at >= before && (at >= young && at <= soon || bytes <= maxBytes) {
			break
		}
		bytes -= int64(len(it.Key()) + len(v))
		count--
		n++
	}
	if err := it.Error(); err != nil {
		return 0, nil, s.explain(err)
	}
	if n == 0 {
		return 0, nil, nil
	}
	end := codec.EndOf(prefix)
	if ok {
		end = append([]byte(nil), it.Key()...)
	}
	b := s.db.NewBatch()
	_ = b.DeleteRange(prefix, end, nil)
	s.disk.addFreed(d.bytes.Load() - bytes)
	wait, err = s.applyCounts(d, b, count, bytes)
	return n, wait, err
}

// letterMillis is the time of a dead letter for a trim. A key is ahead of the clock after the clock
// was set back, and because keys never decrease behind a mark: then the time of the failure counts,
// or the time of the acceptance when the former is ahead, too. When both are, the age is unknown, and
// only the size removes the dead letter.
func letterMillis(key, value []byte, soon int64) int64 {
	at := codec.DeadLetterMillis(key)
	if at <= soon {
		return at
	}
	l, err := codec.DecodeDeadLetter(key, value)
	if err != nil {
		return at
	}
	for _, t := range []time.Time{l.Failure.Time, l.AcceptedAt} {
		if m := codec.Millis(t); m <= soon {
			return m
		}
	}
	return at
}

// DestinationStats implements queue.Store.
func (s *Store) DestinationStats(destination string) queue.DestinationStats {
	s.mu.RLock()
	d := s.destinations[destination]
	if d == nil {
		s.mu.RUnlock()
		return queue.DestinationStats{}
	}
	ledger, all := d.dropped, d.holders
	s.mu.RUnlock()
	st := queue.DestinationStats{Ledger: s.sum(ledger, all)}
	st.DeadLetters, st.DeadLetterBytes = d.count.Load(), d.bytes.Load()
	return st
}

// Destinations implements queue.Store.
func (s *Store) Destinations() []string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var names []string
	for name, d := range s.destinations {
		if len(d.holders) > 0 || d.dropped != (queue.Ledger{}) || d.count.Load() > 0 {
			names = append(names, name)
		}
	}
	return names
}

// ForgetDestination implements queue.Store.
func (s *Store) ForgetDestination(destination string) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	return await(s.forget(s.destination(destination)))
}

func (s *Store) forget(d *destination) (wait func() error, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dropped == (queue.Ledger{}) {
		return nil, nil
	}
	b := s.db.NewBatch()
	d.putWith(b, queue.Ledger{})
	if wait, err = s.submit(b); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d.dropped = queue.Ledger{}
	return wait, nil
}
