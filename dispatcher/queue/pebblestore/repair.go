package pebblestore

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Repaired is the result of a repair.
type Repaired struct {
	// Damaged are the files, or parts of files, that cannot be read.
	Damaged []DamagedFile
	// Lost names the lost messages and other lost data, one sentence each.
	Lost []string
	// Messages, DeadLetters and Lanes are the numbers of entries that were found.
	Messages, DeadLetters, Lanes int
	// Aside is the directory that the damaged store was moved to; empty when nothing was
	// changed.
	Aside string
}

// Repair reads the closed store in dir, regardless of damage, and makes a sound store from the
// readable data. With apply, the new store replaces the old one, which is kept beside it;
// without apply, nothing is changed. A store without damage is not changed.
//
// Unreadable messages become dead letters (queue.ReasonDamaged) of the lanes that still needed
// them. A lane without a readable position restarts at the oldest message of the log. So
// messages may be delivered again, and lost data is listed in Repaired.Lost. A repair needs as
// much free disk space as the store uses.
func Repair(dir string, apply bool) (r Repaired, err error) {
	if _, err := os.Stat(dir); err != nil {
		return r, fmt.Errorf("repair: %w", err)
	}
	lock, err := pebble.LockDirectory(dir, vfs.Default)
	if err != nil {
		return r, fmt.Errorf("repair the queue in %s: a dispatcher has it open; stop it first: %w", dir, err)
	}
	defer func() { _ = lock.Close() }()
	fresh := dir + ".repaired"
	if err := errors.Join(os.RemoveAll(fresh), os.Mkdir(fresh, 0o700)); err != nil {
		return r, fmt.Errorf("repair: %w", err)
	}
	defer func() { _ = os.RemoveAll(fresh) }()
	s, err := newSalvager(dir, lock)
	if err != nil {
		return r, fmt.Errorf("repair: %w", err)
	}
	if err := rebuild(s, fresh, &r); err != nil {
		return r, fmt.Errorf("repair the queue in %s: %w", dir, err)
	}
	r.Damaged = s.damages()
	if !apply || len(r.Damaged)+len(r.Lost) == 0 {
		return r, nil
	}
	// The exchange is one step, so that no start can find an empty directory and create a new
	// store. The new store is first renamed to the final name of the damaged one, a name that
	// no later repair removes.
	aside := dir + ".damaged-" + time.Now().UTC().Format("20060102T150405.000Z")
	if err := os.Rename(fresh, aside); err != nil {
		return r, fmt.Errorf("repair: %w", err)
	}
	if err := unix.Renameat2(unix.AT_FDCWD, aside, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE); err != nil {
		return r, errors.Join(fmt.Errorf("repair: replace %s by %s: %w", aside, dir, err), os.RemoveAll(aside))
	}
	r.Aside = aside
	return r, syncFolder(vfs.Default, vfs.Default.PathDir(dir))
}

// rebuild makes a store from the salvager's entries.
func rebuild(s *salvager, dir string, r *Repaired) error {
	v := &survey{latest: map[string]uint64{}, deleted: map[string]uint64{}, ranges: map[string][]deletedRange{}}
	if err := s.each(v.add); err != nil {
		return err
	}
	db, err := pebble.Open(dir, &pebble.Options{FormatMajorVersion: pebble.FormatNewest, Logger: discardLogger{}, DisableWAL: true, MemTableSize: 16 << 20})
	if err != nil {
		return err
	}
	for _, name := range s.unreadable {
		r.Lost = append(r.Lost, "data that only "+name+" contained")
	}
	accepted, _, err := readAccepted(s.fs, s.dir)
	if err != nil {
		return errors.Join(err, db.Close())
	}
	w := &rebuilder{s: s, db: db, b: db.NewBatch(), r: r, accepted: map[uint64]acceptedEntry{}, sources: map[uint64]string{}, heads: map[uint64]head{}, freed: map[uint64]uint64{}, lanes: map[uint64]*lane{}, dropped: map[string]queue.Ledger{}, names: map[string]uint64{}}
	for _, e := range accepted {
		w.accepted[e.number] = e
	}
	err = s.each(func(e entry) error {
		if !v.isCurrent(e) {
			return nil
		}
		return w.set(e.key, e.value)
	})
	if err == nil {
		err = w.repair()
	}
	if err = errors.Join(err, w.flush(), db.Flush(), db.Close()); err != nil {
		return err
	}
	return verify(dir, r)
}

// verify opens the new store, as a dispatcher would.
func verify(dir string, r *Repaired) error {
	s, err := Open(dir, Options{DuplicateWindow: MaxDuplicateWindow, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return fmt.Errorf("the rebuilt store is not sound: %w", err)
	}
	for _, id := range s.Lanes() {
		if e := s.LaneStats(id).Balance(); e != nil {
			err = errors.Join(err, fmt.Errorf("lane %v: %w", id, e))
		}
	}
	for _, name := range s.Destinations() {
		r.DeadLetters += int(s.DestinationStats(name).DeadLetters)
	}
	r.Lanes = len(s.Lanes())
	return errors.Join(err, s.Close())
}

// rebuilder writes a store and makes its parts consistent.
type rebuilder struct {
	s  *salvager
	db *pebble.DB
	b  *pebble.Batch
	r  *Repaired

	accepted map[uint64]acceptedEntry // Acknowledged messages, by log number.

	sources map[uint64]string // By log number.
	names   map[string]uint64 // The inverse of sources.
	heads   map[uint64]head
	freed   map[uint64]uint64 // The last trimmed message, by log number; logs of older releases may have none.
	lanes   map[uint64]*lane
	dropped map[string]queue.Ledger // By Source, and by destination.
	highest uint64                  // The highest number of a log, a lane or a group.
}

type head struct{ seq, bytes uint64 }

func (w *rebuilder) reportLoss(format string, args ...any) {
	w.r.Lost = append(w.r.Lost, fmt.Sprintf(format, args...))
}

func (w *rebuilder) set(k, v []byte) error {
	if err := w.b.Set(k, v, nil); err != nil {
		return err
	}
	if w.b.Len() < 1<<20 {
		return nil
	}
	return w.flush()
}

func (w *rebuilder) flush() error {
	err := w.db.Apply(w.b, pebble.NoSync)
	_ = w.b.Close()
	w.b = w.db.NewBatch()
	return err
}

// scan calls fn for every key that begins with prefix, including keys that were just written.
func (w *rebuilder) scan(prefix []byte, fn func(k, v []byte) error) error {
	if err := w.flush(); err != nil {
		return err
	}
	return scan(w.db, prefix, fn)
}

// repair makes the parts of the store consistent with each other.
func (w *rebuilder) repair() error {
	for _, step := range []func() error{w.readSources, w.readLanes, w.repairLogs, w.repairGroups, w.repairLanes, w.repairDestinations, w.repairMeta} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func (w *rebuilder) noteNumber(number uint64) { w.highest = max(w.highest, number) }

func (w *rebuilder) readSources() error {
	err := w.scan(keySources, func(k, v []byte) error {
		if len(v) == 8 {
			n := binary.BigEndian.Uint64(v)
			w.sources[n], w.names[string(k[2:])] = string(k[2:]), n
			w.noteNumber(n)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for n, e := range w.accepted {
		w.noteNumber(n)
		if _, known := w.names[e.source]; known || e.source == "" || w.sources[n] != "" {
			continue
		}
		w.sources[n], w.names[e.source] = e.source, n
		if err := w.set(append(append([]byte(nil), keySources...), e.source...), binary.BigEndian.AppendUint64(nil, n)); err != nil {
			return err
		}
	}
	err = w.scan([]byte{prefixFreed}, func(k, v []byte) error {
		if len(k) == 9 && len(v) == 8 {
			w.freed[number(k, 0)] = binary.BigEndian.Uint64(v)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return w.scan([]byte{prefixHead}, func(k, v []byte) error {
		if d := (decoder{b: v}); len(k) == 9 {
			w.heads[number(k, 0)] = head{d.fixed64(), d.fixed64()}
			w.noteNumber(number(k, 0))
		}
		return nil
	})
}

// readLanes reads the names and states of the lanes.
func (w *rebuilder) readLanes() error {
	orphans := map[string][]*lane{} // By the name of a Source without a log number.
	err := w.scan(keyLanes, func(k, v []byte) error {
		d := decoder{b: v}
		id := d.laneName()
		if d.bad || len(k) != 10 {
			return nil
		}
		l := newLane(id, binary.BigEndian.Uint64(k[2:]), nil, nil, nil)
		w.noteNumber(l.number)
		w.lanes[l.number] = l
		if n, ok := w.names[id.Source]; ok {
			l.log = &sourceLog{number: n, source: id.Source}
		} else {
			orphans[id.Source] = append(orphans[id.Source], l)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if w.s.inBlock(keyLanes) && w.s.inBlock([]byte{prefixLane}) {
		w.reportLoss("possibly names of lanes: a lane without a name starts after the last message")
	}
	if err := w.adopt(orphans); err != nil {
		return err
	}
	err = w.scan([]byte{prefixLane}, func(k, v []byte) error {
		l := w.lanes[number(k, 0)]
		if w.noteNumber(number(k, 0)); l == nil {
			w.reportLoss("the name of a lane at message %d of an unknown Source: a new lane starts after the last message", stateOf(v).next)
			return nil
		}
		open, err := l.decode(v)
		if l.opened = err == nil; l.opened { // During a repair, opened means that the state is known.
			for _, seq := range open {
				l.open[seq] = openMessage{}
			}
		}
		return nil
	})
	return err
}

func stateOf(v []byte) (s laneState) {
	_, _ = s.decode(v)
	return s
}

// adopt assigns a log without a name to the only Source with lanes and without a log.
func (w *rebuilder) adopt(orphans map[string][]*lane) error {
	nameless := map[uint64]bool{}
	for n := range w.heads {
		if w.sources[n] == "" {
			nameless[n] = true
		}
	}
	if len(orphans) == 1 && len(nameless) == 1 {
		for source, lanes := range orphans {
			for n := range nameless {
				w.sources[n], w.names[source] = source, n
				for _, l := range lanes {
					l.log = &sourceLog{number: n, source: source}
				}
				return w.set(append(append([]byte(nil), keySources...), source...), binary.BigEndian.AppendUint64(nil, n))
			}
		}
	}
	for n := range nameless {
		w.reportLoss("the name of a log with %d messages: none of them can be delivered", w.heads[n].seq)
		for _, prefix := range []byte{prefixMessage, prefixHead, prefixDropped, prefixFreed} {
			if err := w.b.DeleteRange(key(prefix, n), after(prefix, n), nil); err != nil {
				return err
			}
		}
	}
	for source, lanes := range orphans {
		w.reportLoss("the log of %s: the pending messages of its %d lanes", source, len(lanes))
		for _, l := range lanes {
			if err := w.forgetLane(l); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *rebuilder) forgetLane(l *lane) error {
	delete(w.lanes, l.number)
	err := w.b.Delete(binary.BigEndian.AppendUint64(append([]byte(nil), keyLanes...), l.number), nil)
	for _, prefix := range []byte{prefixLane, prefixRetry, prefixDue} {
		err = errors.Join(err, w.b.DeleteRange(key(prefix, l.number), after(prefix, l.number), nil))
	}
	return err
}

// salvagedRetry is an entry of the retry index.
type salvagedRetry struct {
	due     int64
	attempt int
	failure queue.Failure
	present bool // The message is readable.
}

// retriesOf merges a lane's retries from both of their indexes.
func (w *rebuilder) retriesOf(l *lane) (map[uint64]*salvagedRetry, error) {
	found := map[uint64]*salvagedRetry{}
	err := w.scan(key(prefixRetry, l.number), func(k, v []byte) error {
		d := decoder{b: v}
		due, attempt := d.retry()
		if f := d.failure(); !d.bad && len(k) == 17 {
			found[number(k, 1)] = &salvagedRetry{due: due, attempt: attempt, failure: f}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	inFull := maps.Clone(found)
	return found, w.scan(key(prefixDue, l.number), func(k, v []byte) error {
		d := decoder{b: v}
		attempt := int(d.uvarint())
		if d.bad || len(k) != 25 {
			return nil
		}
		due, seq := int64(number(k, 1)), number(k, 2)
		if old := found[seq]; inFull[seq] == nil && (old == nil || due > old.due) {
			found[seq] = &salvagedRetry{due: due, attempt: attempt}
		}
		return nil
	})
}

// repairLogs determines the beginning and the end of each log, and writes a lost record in the
// place of each missing message in between.
func (w *rebuilder) repairLogs() error {
	for _, n := range slices.Sorted(maps.Keys(w.sources)) {
		if err := w.repairLog(n); err != nil {
			return err
		}
	}
	return nil
}

func (w *rebuilder) repairLog(n uint64) error {
	source, h := w.sources[n], w.heads[n]
	var first, last, lastEnd uint64
	err := w.scan(key(prefixMessage, n), func(k, v []byte) error {
		if len(k) != messageKeyLen {
			return nil
		}
		if last = number(k, 1); first == 0 {
			first = last
		}
		if len(v) >= 16 {
			lastEnd = binary.BigEndian.Uint64(v[8:]) + uint64(len(v)+messageKeyLen)
		}
		return nil
	})
	if err != nil {
		return err
	}
	_, known := w.heads[n]
	accepted, counted := w.accepted[n]
	h.seq, h.bytes = max(h.seq, last, accepted.head), max(h.bytes, lastEnd, accepted.bytes)
	var lanes []*lane
	for _, number := range slices.Sorted(maps.Keys(w.lanes)) {
		if l := w.lanes[number]; l.log.number == n {
			lanes = append(lanes, l)
			h.seq = max(h.seq, l.next-min(l.next, 1), l.end-min(l.end, 1))
		}
	}
	if len(lanes) == 0 && first > 0 && w.s.maybeMissing(keyLanes) {
		w.reportLoss("the destinations of %s: its %d messages from %d to %d cannot be delivered", source, last-first+1, first, last)
	}
	if !known && !counted && h.seq > 0 {
		w.reportLoss("the end of the log of %s: possible messages after %d", source, h.seq)
	}
	need := h.seq + 1
	// Messages before the first readable one are damaged, unless they were trimmed.
	oldest := cmp.Or(first, h.seq+1)
	if freed, ok := w.freed[n]; ok {
		oldest = min(oldest, freed+1)
	}
	for _, l := range lanes {
		from, err := w.repairLane(l, oldest, h.seq)
		if err != nil {
			return err
		}
		need = min(need, from)
	}
	if err := w.b.DeleteRange(key(prefixMessage, n), key(prefixMessage, n, need), nil); err != nil {
		return err
	}
	// Every position from need on gets a record.
	next, bytes, at := need, uint64(0), time.Now().UnixMilli()
	lost := func(to, bytes uint64) error {
		if next > to {
			return nil
		}
		w.reportLoss("messages %d to %d of %s (%d)", next, to, source, to-next+1)
		for ; next <= to; next++ {
			if err := w.set(key(prefixMessage, n, next), appendLost(nil, at, bytes, "the file that it was in is damaged")); err != nil {
				return err
			}
		}
		return nil
	}
	err = w.scan(key(prefixMessage, n), func(k, v []byte) error {
		var rec record
		seq := number(k, 1)
		if rec.decode(v) != nil {
			return nil // A lost record replaces it.
		}
		if err := lost(seq-1, rec.bytesBefore); err != nil {
			return err
		}
		bytes, at = rec.bytesBefore+uint64(len(v)+messageKeyLen), rec.acceptedAt
		next = seq + 1
		if !rec.lost {
			w.r.Messages++
		}
		return nil
	})
	if err == nil {
		err = lost(h.seq, cmp.Or(bytes, h.bytes))
	}
	if err != nil {
		return err
	}
	w.heads[n] = h
	value := binary.BigEndian.AppendUint64(nil, h.seq)
	return w.set(key(prefixHead, n), binary.BigEndian.AppendUint64(value, max(h.bytes, bytes)))
}

// repairLane makes a lane's state consistent with its retries, and returns the first message
// that it needs. first is the oldest message of the log that was not trimmed, head the newest
// one.
func (w *rebuilder) repairLane(l *lane, first, head uint64) (need uint64, err error) {
	retries, err := w.retriesOf(l)
	if err != nil {
		return 0, err
	}
	if !l.opened {
		w.reportLoss("the position of lane %s: it restarts at message %d of %s, and its counters at zero", laneName(l.id), first, l.id.Source)
		l.laneState, l.open = laneState{start: first - 1, next: first}, map[uint64]openMessage{}
		clear(retries)
	}
	for seq, r := range retries {
		if _, open := l.open[seq]; open || seq >= l.next || seq <= l.start {
			delete(retries, seq) // It waits for its first attempt, or the entry is older than the state.
			continue
		}
		if r.present, err = w.exists(key(prefixMessage, l.log.number, seq)); err != nil {
			return 0, err
		}
	}
	if from := max(first, l.start+1); from < l.next && w.retriesUncertain(l, retries) {
		w.reportLoss("which messages of %s waited to be sent to %s again: all from %d on are sent again", l.id.Source, laneName(l.id), from)
		l.next = from
		maps.DeleteFunc(l.open, func(seq uint64, _ openMessage) bool { return seq >= from })
		clear(retries)
	}
	if uint64(len(retries)) > l.retries {
		// The index has entries of settled messages. The messages that are missing are among
		// them.
		maps.DeleteFunc(retries, func(_ uint64, r *salvagedRetry) bool { return !r.present })
	}
	// A message before next that is neither settled, nor open, nor in the retry index was lost
	// from the retry index. A message that is counted twice is delivered again.
	l.retries = uint64(len(retries))
	settled := int64(l.settled())
	missing := int64(l.next-1-l.start-l.passed) - settled - int64(len(l.open)) - int64(l.retries)
	switch {
	case missing > 0:
		w.reportLoss("%d messages of %s that waited to be sent to %s again", missing, l.id.Source, laneName(l.id))
		if l.id.Any { // The group counts the messages as discarded.
			l.handedOver += uint64(missing)
			break
		}
		l.passed += uint64(missing)
		lost := queue.Ledger{Accepted: missing, Discarded: missing}
		w.dropped[l.id.Source], w.dropped[l.id.Destination] = w.dropped[l.id.Source].Plus(lost), w.dropped[l.id.Destination].Plus(lost)
	case missing < 0:
		again := -missing
		for _, count := range []*uint64{&l.delivered, &l.buried, &l.handedOver, &l.filtered, &l.passed} {
			part := min(int64(*count), again)
			*count -= uint64(part)
			again -= part
		}
	}
	if err := w.writeLane(l, retries); err != nil {
		return 0, err
	}
	if need = l.next; l.readAll() {
		need = head + 1
	}
	for seq := range l.open {
		need = min(need, seq)
	}
	for seq := range retries {
		need = min(need, seq)
	}
	return need, nil
}

// retriesUncertain reports whether messages that waited for a retry may be missing from both of
// their indexes. The number of entries is no proof: a damaged part can contain new entries and
// the deletions of as many old ones.
func (w *rebuilder) retriesUncertain(l *lane, retries map[uint64]*salvagedRetry) bool {
	return l.retries > 0 && (uint64(len(retries)) < l.retries ||
		w.s.maybeMissing(key(prefixRetry, l.number)) && w.s.maybeMissing(key(prefixDue, l.number)))
}

func (w *rebuilder) writeLane(l *lane, retries map[uint64]*salvagedRetry) error {
	for _, prefix := range []byte{prefixRetry, prefixDue} {
		if err := w.b.DeleteRange(key(prefix, l.number), after(prefix, l.number), nil); err != nil {
			return err
		}
	}
	for seq, r := range retries {
		err := errors.Join(
			w.set(key(prefixRetry, l.number, seq), appendRetry(nil, r.due, r.attempt, &r.failure)),
			w.set(key(prefixDue, l.number, uint64(r.due), seq), binary.AppendUvarint(nil, uint64(r.attempt))),
		)
		if err != nil {
			return err
		}
	}
	return w.set(key(prefixLane, l.number), l.encode(nil, slices.Collect(maps.Keys(l.open))))
}

func (w *rebuilder) exists(k []byte) (bool, error) {
	_, closer, err := w.db.Get(k)
	if errors.Is(err, pebble.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, closer.Close()
}

// repairLanes removes entries without a lane, and counts lost messages in the ledgers of
// dropped lanes.
func (w *rebuilder) repairLanes() error {
	for _, prefix := range []byte{prefixLane, prefixRetry, prefixDue} {
		var stray []uint64
		err := w.scan([]byte{prefix}, func(k, _ []byte) error {
			if n := number(k, 0); w.lanes[n] == nil && !slices.Contains(stray, n) {
				stray = append(stray, n)
			}
			return nil
		})
		for _, n := range stray {
			err = errors.Join(err, w.b.DeleteRange(key(prefix, n), after(prefix, n), nil))
		}
		if err != nil {
			return err
		}
	}
	for _, n := range slices.Sorted(maps.Keys(w.sources)) {
		k := key(prefixDropped, n)
		ledger := w.dropped[w.sources[n]]
		if err := w.scan(k, func(_, v []byte) error {
			if d := (decoder{b: v}); !d.bad {
				ledger = ledger.Plus(d.dropped())
			}
			return nil
		}); err != nil {
			return err
		}
		if ledger != (queue.Ledger{}) {
			if err := w.set(k, appendDropped(nil, ledger)); err != nil {
				return err
			}
		}
	}
	return nil
}

// repairDestinations counts the dead letters.
func (w *rebuilder) repairDestinations() error {
	all, had := map[string]*destination{}, map[string]int64{}
	get := func(name string) *destination {
		if all[name] == nil {
			all[name] = &destination{name: name}
		}
		return all[name]
	}
	for _, l := range w.lanes {
		get(l.id.Destination).dropped = w.dropped[l.id.Destination]
	}
	err := w.scan([]byte{prefixDest}, func(k, v []byte) error {
		d, x := (decoder{b: v}), get(string(k[1:]))
		had[x.name] = int64(d.uvarint())
		d.uvarint()
		if len(d.b) > 0 {
			x.dropped = x.dropped.Plus(d.dropped())
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := w.b.DeleteRange([]byte{prefixDest}, []byte{prefixDest + 1}, nil); err != nil {
		return err
	}
	err = w.scan([]byte{prefixDeadLetter}, func(k, v []byte) error {
		if len(k) < 3+24 {
			return nil
		}
		if _, err := decodeDeadLetter(k, v); err != nil {
			return w.b.Delete(k, nil)
		}
		d := get(string(k[3 : len(k)-24]))
		d.count.Add(1)
		d.bytes.Add(int64(len(k) + len(v)))
		w.noteNumber(binary.BigEndian.Uint64(k[len(k)-16:]))
		return nil
	})
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		d := all[name]
		if lost := had[name] - d.count.Load(); lost > 0 {
			w.reportLoss("%d dead letters of %s", lost, name)
		} else if w.s.maybeMissing(destinationKey(name)) && w.s.maybeMissing(deadLetterPrefix(name)) {
			w.reportLoss("possibly dead letters of %s: their count may be outdated", name)
		}
		d.put(w.b)
	}
	return nil
}

func (w *rebuilder) repairMeta() error {
	return errors.Join(
		w.set(keyFormat, binary.AppendUvarint(nil, format)),
		w.set(keyLastNumber, binary.AppendUvarint(nil, max(w.highest, w.last()))),
	)
}

// last is the last assigned number, 0 when it is unknown.
func (w *rebuilder) last() uint64 {
	v, closer, err := w.db.Get(keyLastNumber)
	if err != nil {
		return 0
	}
	defer func() { _ = closer.Close() }()
	d := decoder{b: v}
	return d.uvarint()
}

func laneName(id queue.LaneID) string {
	if id.Endpoint == "" {
		return id.Source + " -> " + id.Destination
	}
	return id.Source + " -> " + id.Destination + "/" + id.Endpoint
}
