// Package repair makes a sound store from the readable data of a damaged one.
//
// It reads the files without the storage engine: every sound block of each table, and every
// sound record of each log. Then it makes the parts of the store consistent with each other. The
// store must be closed. The main functions are Run and Rebuild.
package repair

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
	"github.com/posthorn/posthorn/internal/durable"
)

// Result is the result of a repair.
type Result struct {
	// Damaged are the files, or parts of files, that cannot be read.
	Damaged []integrity.DamagedFile
	// Lost names the lost messages and other lost data, one sentence each.
	Lost []string
	// Messages, DeadLetters and Lanes are the numbers of entries that were found.
	Messages, DeadLetters, Lanes int
	// Aside is the directory that the damaged store was moved to; empty when nothing was
	// changed.
	Aside string
}

// Verifier opens the closed store in dir as a dispatcher would and checks it, as
// pebblestore.Verify does.
type Verifier func(dir string) (lanes, deadLetters int, err error)

// Run reads the closed store in dir, regardless of damage, and makes a sound store from the
// readable data. With apply, the new store replaces the old one, which is kept beside it;
// without apply, nothing is changed. A store without damage is not changed.
//
// Unreadable messages become dead letters (queue.ReasonDamaged) of the lanes that still needed
// them. A lane without a readable position restarts at the oldest message of the log. So
// messages may be delivered again, and lost data is listed in Result.Lost. A repair needs as
// much free disk space as the store uses. A store of a newer release is refused (codec.ErrNewerFormat).
func Run(dir string, apply bool, verify Verifier) (r Result, err error) {
	lock, err := lockStore(dir)
	if err != nil {
		return r, err
	}
	defer func() { _ = lock.Close() }()
	fresh := dir + ".repaired"
	defer func() { _ = os.RemoveAll(fresh) }()
	if r, err = rebuild(dir, lock, fresh, verify); err != nil {
		return r, err
	}
	if !apply || len(r.Damaged)+len(r.Lost) == 0 {
		return r, nil
	}
	r.Aside, err = replace(dir, fresh)
	return r, err
}

// Rebuild is a Run that writes the sound store into fresh, also without damage, and does not
// change the store in dir. It removes fresh first.
func Rebuild(dir, fresh string, verify Verifier) (r Result, err error) {
	lock, err := lockStore(dir)
	if err != nil {
		return r, err
	}
	defer func() { _ = lock.Close() }()
	return rebuild(dir, lock, fresh, verify)
}

func lockStore(dir string) (*pebble.Lock, error) {
	if _, err := os.Stat(dir); err != nil {
		return nil, fmt.Errorf("repair: %w", err)
	}
	lock, err := pebble.LockDirectory(dir, vfs.Default)
	if err != nil {
		return nil, fmt.Errorf("repair the queue in %s: a dispatcher has it open; stop it first: %w", dir, err)
	}
	return lock, nil
}

// rebuild writes a sound store into fresh from the files in dir.
func rebuild(dir string, lock *pebble.Lock, fresh string, verify Verifier) (r Result, err error) {
	// A marker that cannot be read is damage.
	if _, err := codec.CheckPebbleFormat(vfs.Default, dir, "store"); errors.Is(err, codec.ErrNewerFormat) {
		return r, fmt.Errorf("repair the queue in %s: %w", dir, err)
	}
	s, err := newSalvager(dir, lock)
	if err != nil {
		return r, fmt.Errorf("repair: %w", err)
	}
	v, err := s.survey()
	if err != nil {
		return r, fmt.Errorf("repair the queue in %s: %w", dir, err)
	}
	if err := errors.Join(os.RemoveAll(fresh), os.Mkdir(fresh, 0o700)); err != nil {
		return r, fmt.Errorf("repair: %w", err)
	}
	if err := writeStore(s, v, fresh, &r); err != nil {
		return r, fmt.Errorf("repair the queue in %s: %w", dir, err)
	}
	r.Damaged = s.damages()
	if r.Lanes, r.DeadLetters, err = verify(fresh); err != nil {
		return r, fmt.Errorf("repair the queue in %s: the rebuilt store is not sound: %w", dir, err)
	}
	return r, nil
}

// replace exchanges the store in dir and the one in fresh, and returns where the old one is now.
//
// The exchange is one step, so that no start can find an empty directory and create a new store.
// The new store is first renamed to the final name of the damaged one, a name that no later
// repair removes.
func replace(dir, fresh string) (aside string, err error) {
	aside = dir + ".damaged-" + time.Now().UTC().Format("20060102T150405.000Z")
	if err := os.Rename(fresh, aside); err != nil {
		return "", fmt.Errorf("repair: %w", err)
	}
	if err := exchange(aside, dir); err != nil {
		return "", errors.Join(fmt.Errorf("repair: replace %s by %s: %w", aside, dir, err), os.RemoveAll(aside))
	}
	return aside, durable.Sync(vfs.Default.OpenDir(vfs.Default.PathDir(dir)))
}

// writeStore makes a store from the salvager's current entries.
func writeStore(s *salvager, v *survey, dir string, r *Result) error {
	db, err := pebble.Open(dir, &pebble.Options{FormatMajorVersion: codec.PebbleFormat, Logger: discardLogger{}, DisableWAL: true,
		MemTableSize: 16 << 20})
	if err != nil {
		return err
	}
	for _, name := range s.unreadable {
		r.Lost = append(r.Lost, "data that only "+name+" contained")
	}
	accepted, _, err := integrity.ReadAccepted(s.fs, s.dir)
	if err != nil {
		return errors.Join(err, db.Close())
	}
	w := &rebuilder{s: s, db: db, b: db.NewBatch(), r: r, accepted: map[uint64]integrity.AcceptedEntry{}, sources: map[uint64]string{},
		heads: map[uint64]head{}, freed: map[uint64]uint64{}, lanes: map[uint64]*lane{}, dropped: map[string]queue.Ledger{},
		names: map[string]uint64{}}
	for _, e := range accepted {
		w.accepted[e.Number] = e
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
	return errors.Join(err, w.flush(), db.Flush(), db.Close())
}

// rebuilder writes a store and makes its parts consistent.
type rebuilder struct {
	s  *salvager
	db *pebble.DB
	b  *pebble.Batch
	r  *Result

	accepted map[uint64]integrity.AcceptedEntry // Acknowledged messages, by log number.

	sources map[uint64]string // By log number.
	names   map[string]uint64 // The inverse of sources.
	heads   map[uint64]head
	freed   map[uint64]uint64 // The last trimmed message, by log number; a log without a trim has none.
	lanes   map[uint64]*lane
	dropped map[string]queue.Ledger // By Source, and by destination.
	highest uint64                  // The highest number of a log, a lane or a group.
}

type head struct{ seq, bytes uint64 }

// lane is a lane of the damaged store.
type lane struct {
	id     queue.LaneID
	number uint64
	log    uint64 // The number of its Source's log.
	// known: the state was readable.
	known bool
	codec.LaneState
	open map[uint64]bool
}

// group is a group of the damaged store.
type group struct {
	id     queue.LaneID
	number uint64
	log    uint64
	codec.GroupState
	lanes []*lane
}

// destination counts the dead letters that were found.
type destination struct {
	letters, bytes int64
	dropped        queue.Ledger
}

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
	return codec.Scan(w.db, prefix, fn)
}

// repair makes the parts of the store consistent with each other.
func (w *rebuilder) repair() error {
	for _, step := range []func() error{w.readSources, w.readLanes, w.repairLogs, w.repairGroups, w.repairLanes, w.repairDestinations,
		w.repairMeta} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func (w *rebuilder) noteNumber(number uint64) { w.highest = max(w.highest, number) }

func (w *rebuilder) readSources() error {
	err := w.scan(codec.KeySources, func(k, v []byte) error {
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
		if _, known := w.names[e.Source]; known || e.Source == "" || w.sources[n] != "" {
			continue
		}
		w.sources[n], w.names[e.Source] = e.Source, n
		if err := w.set(append(append([]byte(nil), codec.KeySources...), e.Source...), binary.BigEndian.AppendUint64(nil, n)); err != nil {
			return err
		}
	}
	err = w.scan([]byte{codec.PrefixFreed}, func(k, v []byte) error {
		if len(k) == 9 && len(v) == 8 {
			w.freed[codec.Number(k, 0)] = binary.BigEndian.Uint64(v)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return w.scan([]byte{codec.PrefixHead}, func(k, v []byte) error {
		if d := (codec.Decoder{Rest: v}); len(k) == 9 {
			w.heads[codec.Number(k, 0)] = head{d.Fixed64(), d.Fixed64()}
			w.noteNumber(codec.Number(k, 0))
		}
		return nil
	})
}

// readLanes reads the names and states of the lanes.
func (w *rebuilder) readLanes() error {
	orphans := map[string][]*lane{} // By the name of a Source without a log number.
	err := w.scan(codec.KeyLanes, func(k, v []byte) error {
		d := codec.Decoder{Rest: v}
		id := d.LaneName()
		if d.Bad || len(k) != 10 {
			return nil
		}
		l := &lane{id: id, number: binary.BigEndian.Uint64(k[2:]), open: map[uint64]bool{}}
		w.noteNumber(l.number)
		w.lanes[l.number] = l
		if n, ok := w.names[id.Source]; ok {
			l.log = n
		} else {
			orphans[id.Source] = append(orphans[id.Source], l)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if w.s.inBlock(codec.KeyLanes) && w.s.inBlock([]byte{codec.PrefixLane}) {
		w.reportLoss("possibly names of lanes: a lane without a name starts after the last message")
	}
	if err := w.adopt(orphans); err != nil {
		return err
	}
	err = w.scan([]byte{codec.PrefixLane}, func(k, v []byte) error {
		l := w.lanes[codec.Number(k, 0)]
		if w.noteNumber(codec.Number(k, 0)); l == nil {
			w.reportLoss("the name of a lane at message %d of an unknown Source: a new lane starts after the last message", stateOf(v).Next)
			return nil
		}
		open, err := l.Decode(v)
		if l.known = err == nil; l.known {
			for _, seq := range open {
				l.open[seq] = true
			}
		}
		return nil
	})
	return err
}

func stateOf(v []byte) (s codec.LaneState) {
	_, _ = s.Decode(v)
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
					l.log = n
				}
				return w.set(append(append([]byte(nil), codec.KeySources...), source...), binary.BigEndian.AppendUint64(nil, n))
			}
		}
	}
	for n := range nameless {
		w.reportLoss("the name of a log with %d messages: none of them can be delivered", w.heads[n].seq)
		for _, prefix := range []byte{codec.PrefixMessage, codec.PrefixHead, codec.PrefixDropped, codec.PrefixFreed} {
			if err := w.b.DeleteRange(codec.Key(prefix, n), codec.After(prefix, n), nil); err != nil {
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
	err := w.b.Delete(binary.BigEndian.AppendUint64(append([]byte(nil), codec.KeyLanes...), l.number), nil)
	for _, prefix := range []byte{codec.PrefixLane, codec.PrefixRetry, codec.PrefixDue, codec.PrefixWait} {
		err = errors.Join(err, w.b.DeleteRange(codec.Key(prefix, l.number), codec.After(prefix, l.number), nil))
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
	err := w.scan(codec.Key(codec.PrefixRetry, l.number), func(k, v []byte) error {
		d := codec.Decoder{Rest: v}
		due, attempt := d.Retry()
		if f := d.Failure(); !d.Bad && len(k) == 17 {
			found[codec.Number(k, 1)] = &salvagedRetry{due: due, attempt: attempt, failure: f}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	inFull := maps.Clone(found)
	return found, w.scan(codec.Key(codec.PrefixDue, l.number), func(k, v []byte) error {
		d := codec.Decoder{Rest: v}
		attempt := int(d.Uvarint())
		if d.Bad || len(k) != 25 {
			return nil
		}
		due, seq := int64(codec.Number(k, 1)), codec.Number(k, 2)
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
	err := w.scan(codec.Key(codec.PrefixMessage, n), func(k, v []byte) error {
		if len(k) != codec.MessageKeyLen {
			return nil
		}
		if last = codec.Number(k, 1); first == 0 {
			first = last
		}
		if len(v) >= 16 {
			lastEnd = binary.BigEndian.Uint64(v[8:]) + uint64(len(v)+codec.MessageKeyLen)
		}
		return nil
	})
	if err != nil {
		return err
	}
	_, known := w.heads[n]
	accepted, counted := w.accepted[n]
	h.seq, h.bytes = max(h.seq, last, accepted.Head), max(h.bytes, lastEnd, accepted.Bytes)
	var lanes []*lane
	for _, number := range slices.Sorted(maps.Keys(w.lanes)) {
		if l := w.lanes[number]; l.log == n {
			lanes = append(lanes, l)
			h.seq = max(h.seq, l.Next-min(l.Next, 1), l.End-min(l.End, 1))
		}
	}
	if len(lanes) == 0 && first > 0 && w.s.maybeMissing(codec.KeyLanes) {
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
	if err := w.b.DeleteRange(codec.Key(codec.PrefixMessage, n), codec.Key(codec.PrefixMessage, n, need), nil); err != nil {
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
			if err := w.set(codec.Key(codec.PrefixMessage, n, next),
				codec.AppendLost(nil, at, bytes, "the file that it was in is damaged")); err != nil {
				return err
			}
		}
		return nil
	}
	err = w.scan(codec.Key(codec.PrefixMessage, n), func(k, v []byte) error {
		var rec codec.Record
		seq := codec.Number(k, 1)
		if rec.Decode(v) != nil {
			return nil // A lost record replaces it.
		}
		if err := lost(seq-1, rec.BytesBefore); err != nil {
			return err
		}
		bytes, at = rec.BytesBefore+uint64(len(v)+codec.MessageKeyLen), rec.AcceptedAt
		next = seq + 1
		if !rec.Lost {
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
	return w.set(codec.Key(codec.PrefixHead, n), binary.BigEndian.AppendUint64(value, max(h.bytes, bytes)))
}

// repairLane makes a lane's state consistent with its retries, and returns the first message
// that it needs. first is the oldest message of the log that was not trimmed, head the newest
// one.
func (w *rebuilder) repairLane(l *lane, first, head uint64) (need uint64, err error) {
	retries, err := w.retriesOf(l)
	if err != nil {
		return 0, err
	}
	if !l.known {
		w.reportLoss("the position of lane %s: it restarts at message %d of %s, and its counters at zero", laneName(l.id), first, l.id.Source)
		l.LaneState, l.open = codec.LaneState{Start: first - 1, Next: first}, map[uint64]bool{}
		clear(retries)
	}
	for seq, r := range retries {
		if l.open[seq] || seq >= l.Next || seq <= l.Start {
			delete(retries, seq) // It waits for its first attempt, or the entry is older than the state.
			continue
		}
		if r.present, err = w.exists(codec.Key(codec.PrefixMessage, l.log, seq)); err != nil {
			return 0, err
		}
	}
	if from := max(first, l.Start+1); from < l.Next && w.retriesUncertain(l, retries) {
		w.reportLoss("which messages of %s waited to be sent to %s again: all from %d on are sent again", l.id.Source, laneName(l.id), from)
		l.Next = from
		maps.DeleteFunc(l.open, func(seq uint64, _ bool) bool { return seq >= from })
		clear(retries)
	}
	if uint64(len(retries)) > l.Retries {
		// The index has entries of settled messages. The messages that are missing are among
		// them.
		maps.DeleteFunc(retries, func(_ uint64, r *salvagedRetry) bool { return !r.present })
	}
	// A message before next that is neither settled, nor open, nor in the retry index was lost
	// from the retry index. A message that is counted twice is delivered again.
	l.Retries = uint64(len(retries))
	settled := int64(l.Settled())
	missing := int64(l.Next-1-l.Start-l.Passed) - settled - int64(len(l.open)) - int64(l.Retries)
	switch {
	case missing > 0:
		w.reportLoss("%d messages of %s that waited to be sent to %s again", missing, l.id.Source, laneName(l.id))
		if l.id.Any { // The group counts the messages as discarded.
			l.HandedOver += uint64(missing)
			break
		}
		l.Passed += uint64(missing)
		lost := queue.Ledger{Accepted: missing, Discarded: missing}
		w.dropped[l.id.Source], w.dropped[l.id.Destination] = w.dropped[l.id.Source].Plus(lost), w.dropped[l.id.Destination].Plus(lost)
	case missing < 0:
		again := -missing
		for _, count := range []*uint64{&l.Delivered, &l.Buried, &l.HandedOver, &l.Filtered, &l.Omitted, &l.Passed} {
			part := min(int64(*count), again)
			*count -= uint64(part)
			again -= part
		}
	}
	if err := w.writeLane(l, retries); err != nil {
		return 0, err
	}
	if need = l.Next; l.ReadAll() {
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
	return l.Retries > 0 && (uint64(len(retries)) < l.Retries ||
		w.s.maybeMissing(codec.Key(codec.PrefixRetry, l.number)) && w.s.maybeMissing(codec.Key(codec.PrefixDue, l.number)))
}

func (w *rebuilder) writeLane(l *lane, retries map[uint64]*salvagedRetry) error {
	for _, prefix := range []byte{codec.PrefixRetry, codec.PrefixDue} {
		if err := w.b.DeleteRange(codec.Key(prefix, l.number), codec.After(prefix, l.number), nil); err != nil {
			return err
		}
	}
	for seq, r := range retries {
		err := errors.Join(
			w.set(codec.Key(codec.PrefixRetry, l.number, seq), codec.AppendRetry(nil, r.due, r.attempt, &r.failure)),
			w.set(codec.Key(codec.PrefixDue, l.number, uint64(r.due), seq), binary.AppendUvarint(nil, uint64(r.attempt))),
		)
		if err != nil {
			return err
		}
	}
	return w.set(codec.Key(codec.PrefixLane, l.number), l.Encode(nil, slices.Collect(maps.Keys(l.open))))
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
	for _, prefix := range []byte{codec.PrefixLane, codec.PrefixRetry, codec.PrefixDue, codec.PrefixWait} {
		var stray []uint64
		err := w.scan([]byte{prefix}, func(k, _ []byte) error {
			if n := codec.Number(k, 0); w.lanes[n] == nil && !slices.Contains(stray, n) {
				stray = append(stray, n)
			}
			return nil
		})
		for _, n := range stray {
			err = errors.Join(err, w.b.DeleteRange(codec.Key(prefix, n), codec.After(prefix, n), nil))
		}
		if err != nil {
			return err
		}
	}
	for _, n := range slices.Sorted(maps.Keys(w.sources)) {
		k := codec.Key(codec.PrefixDropped, n)
		ledger := w.dropped[w.sources[n]]
		if err := w.scan(k, func(_, v []byte) error {
			if d := (codec.Decoder{Rest: v}); !d.Bad {
				ledger = ledger.Plus(d.Dropped())
			}
			return nil
		}); err != nil {
			return err
		}
		if ledger != (queue.Ledger{}) {
			if err := w.set(k, codec.AppendDropped(nil, ledger)); err != nil {
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
			all[name] = &destination{}
		}
		return all[name]
	}
	for _, l := range w.lanes {
		get(l.id.Destination).dropped = w.dropped[l.id.Destination]
	}
	err := w.scan([]byte{codec.PrefixDest}, func(k, v []byte) error {
		d, name := (codec.Decoder{Rest: v}), string(k[1:])
		letters, _, dropped := d.Destination()
		had[name] = letters
		x := get(name)
		x.dropped = x.dropped.Plus(dropped)
		return nil
	})
	if err != nil {
		return err
	}
	if err := w.b.DeleteRange([]byte{codec.PrefixDest}, []byte{codec.PrefixDest + 1}, nil); err != nil {
		return err
	}
	err = w.scan([]byte{codec.PrefixDeadLetter}, func(k, v []byte) error {
		if len(k) < 3+24 {
			return nil
		}
		if _, err := codec.DecodeDeadLetter(k, v); err != nil {
			return w.b.Delete(k, nil)
		}
		d := get(string(k[3 : len(k)-24]))
		d.letters++
		d.bytes += int64(len(k) + len(v))
		w.noteNumber(binary.BigEndian.Uint64(k[len(k)-16:]))
		return nil
	})
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		d := all[name]
		if lost := had[name] - d.letters; lost > 0 {
			w.reportLoss("%d dead letters of %s", lost, name)
		} else if w.s.maybeMissing(codec.DestinationKey(name)) && w.s.maybeMissing(codec.DeadLetterPrefix(name)) {
			w.reportLoss("possibly dead letters of %s: their count may be outdated", name)
		}
		if d.letters == 0 && d.dropped == (queue.Ledger{}) {
			continue
		}
		if err := w.set(codec.DestinationKey(name), codec.AppendDestination(nil, d.letters, d.bytes, d.dropped)); err != nil {
			return err
		}
	}
	return nil
}

func (w *rebuilder) repairMeta() error {
	return errors.Join(
		w.set(codec.KeyFormat, binary.AppendUvarint(nil, codec.Format)),
		w.set(codec.KeyLastNumber, binary.AppendUvarint(nil, max(w.highest, w.last()))),
	)
}

// last is the last assigned number, 0 when it is unknown.
func (w *rebuilder) last() uint64 {
	v, closer, err := w.db.Get(codec.KeyLastNumber)
	if err != nil {
		return 0
	}
	defer func() { _ = closer.Close() }()
	d := codec.Decoder{Rest: v}
	return d.Uvarint()
}

func laneName(id queue.LaneID) string {
	if id.Endpoint == "" {
		return id.Source + " -> " + id.Destination
	}
	return id.Source + " -> " + id.Destination + "/" + id.Endpoint
}
