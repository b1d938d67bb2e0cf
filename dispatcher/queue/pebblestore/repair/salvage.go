package repair

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/batchrepr"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
)

// entry is an entry of an engine's file: the value of a key, or the deletion of a key or of all
// keys from key up to value. Of several entries for a key, the one with the highest seq is
// current.
type entry struct {
	key, value []byte
	seq        uint64
	kind       pebble.InternalKeyKind
}

// salvager reads the files of a store without the engine: all sound parts of them, regardless
// of damaged ones.
type salvager struct {
	fs           vfs.FS
	dir          string
	tables, logs []string
	damaged      []integrity.DamagedFile
	unreadable   []string // Tables that cannot be read at all.
	// missing are the ranges of keys whose newest entries may be in a damaged part.
	missing       []keyRange
	manifestSound bool
	// unopened is the error of the engine when it opened the store; nil on success or without a
	// try.
	unopened error
}

// keyRange is the keys from first to last; nil for last means all keys.
type keyRange struct{ first, last []byte }

// maybeMissing reports whether the newest entry of a key with the prefix may be in a damaged
// part.
func (s *salvager) maybeMissing(prefix []byte) bool {
	return slices.ContainsFunc(s.missing, func(r keyRange) bool { return r.last == nil || r.holds(prefix) })
}

// inBlock is maybeMissing for the damaged blocks of tables only, whose key ranges are known.
func (s *salvager) inBlock(prefix []byte) bool {
	return slices.ContainsFunc(s.missing, func(r keyRange) bool { return r.last != nil && r.holds(prefix) })
}

func (r keyRange) holds(prefix []byte) bool {
	return bytes.Compare(r.first, codec.EndOf(prefix)) < 0 && bytes.Compare(r.last, prefix) >= 0
}

// addMissing records that entries with keys from first to last cannot be read, or entries with any
// keys if last is nil.
func (s *salvager) addMissing(first, last []byte) {
	same := func(r keyRange) bool {
		return bytes.Equal(r.first, first) && bytes.Equal(r.last, last)
	}
	if !slices.ContainsFunc(s.missing, same) {
		s.missing = append(s.missing, keyRange{first, last})
	}
}

func newSalvager(dir string, lock *pebble.Lock) (*salvager, error) {
	s := &salvager{fs: vfs.Default, dir: dir}
	names, err := s.fs.List(dir)
	if err != nil {
		return nil, err
	}
	oldest := s.readManifest()
	live := s.liveTables(lock)
	for _, name := range names {
		number, err := strconv.ParseUint(strings.TrimSuffix(name, filepath.Ext(name)), 10, 64)
		switch {
		case err != nil:
		case filepath.Ext(name) == ".sst" && (live == nil || live[number]):
			s.tables = append(s.tables, name)
			delete(live, number)
		case filepath.Ext(name) == ".log" && number >= oldest:
			s.logs = append(s.logs, name)
		}
	}
	for number := range live {
		s.addUnreadable(fmt.Sprintf("%06d.sst", number), "the file is missing")
	}
	slices.Sort(s.tables)
	slices.Sort(s.logs)
	return s, nil
}

func (s *salvager) path(name string) string { return s.fs.PathJoin(s.dir, name) }

func (s *salvager) addDamage(name, format string, args ...any) {
	d := integrity.DamagedFile{Path: s.path(name), What: fmt.Sprintf(format, args...)}
	if !slices.Contains(s.damaged, d) {
		s.damaged = append(s.damaged, d)
	}
}

// addUnreadable records a table that cannot be read at all.
func (s *salvager) addUnreadable(name, format string, args ...any) {
	s.addDamage(name, format, args...)
	s.addMissing(nil, nil)
	if !slices.Contains(s.unreadable, name) {
		s.unreadable = append(s.unreadable, name)
	}
}

// readManifest checks the manifest, and returns the number of the oldest log that is still
// needed, 0 when it is unknown.
func (s *salvager) readManifest() (oldest uint64) {
	name, err := atomicfs.ReadMarker(s.fs, s.dir, "manifest")
	if err != nil || name == "" {
		s.addDamage("marker.manifest.*", "the file is missing or damaged")
		return 0
	}
	data, err := integrity.ReadFile(s.fs, s.path(name))
	if err != nil {
		s.addDamage(name, "%v", err)
		return 0
	}
	s.manifestSound = true
	if was, err := integrity.ReadFile(s.fs, s.path(integrity.CleanName)); err == nil && string(was) != integrity.Fingerprint(name, data) {
		s.addDamage(name, "it changed since the store was closed")
		s.manifestSound = false
	}
	if at, torn := integrity.SoundManifest(data); !torn {
		s.addDamage(name, "an entry after byte %d is damaged", at)
		s.manifestSound = false
	}
	oldest = integrity.OldestLog(data)
	check, err := integrity.CheckJournals(s.fs, s.dir, name, oldest)
	if err != nil {
		s.addDamage(name, "%v", err)
	}
	for _, d := range append(check.Damaged, check.Torn...) {
		s.damaged = append(s.damaged, d)
		if d.Path == s.path(name) {
			s.manifestSound = false // The manifest holds no entries: without it, every table is read.
		} else {
			s.addMissing(nil, nil)
		}
	}
	return oldest
}

// liveTables returns the tables of the current version; nil when they are unknown, and all
// tables are read.
func (s *salvager) liveTables(lock *pebble.Lock) map[uint64]bool {
	if !s.manifestSound {
		return nil
	}
	db, err := pebble.Open(s.dir, &pebble.Options{FS: s.fs, ReadOnly: true, Lock: lock, FormatMajorVersion: codec.PebbleFormat,
		Logger: discardLogger{}})
	if err != nil {
		s.unopened = err
		return nil
	}
	defer func() { _ = db.Close() }()
	levels, err := db.SSTables()
	if err != nil {
		return nil
	}
	live := map[uint64]bool{}
	for _, level := range levels {
		for _, table := range level {
			live[uint64(table.BackingSSTNum)] = true
		}
	}
	return live
}

// damages lists the damaged files. When the salvager finds none, it returns the engine's error.
func (s *salvager) damages() []integrity.DamagedFile {
	if len(s.damaged) == 0 && s.unopened != nil {
		return []integrity.DamagedFile{{Path: s.dir, What: firstLine(s.unopened)}}
	}
	return s.damaged
}

// each calls fn for every sound entry of the store. The entry is valid only during the call.
func (s *salvager) each(fn func(entry) error) error {
	for _, name := range s.tables {
		if err := s.table(name, fn); err != nil {
			return err
		}
	}
	for _, name := range s.logs {
		if err := s.log(name, fn); err != nil {
			return err
		}
	}
	return nil
}

// table reads a table block by block; it skips damaged blocks and records them. It returns the
// errors of fn only.
func (s *salvager) table(name string, fn func(entry) error) error {
	f, err := s.fs.Open(s.path(name))
	if err != nil {
		s.addUnreadable(name, "%v", err)
		return nil
	}
	readable, err := sstable.NewSimpleReadable(f)
	if err != nil {
		s.addUnreadable(name, "%v", err)
		return f.Close()
	}
	ctx := context.Background()
	r, err := sstable.NewReader(ctx, readable, sstable.ReaderOptions{})
	if err != nil {
		s.addUnreadable(name, "the whole file: %s", firstLine(err))
		return nil
	}
	defer func() { _ = r.Close() }()
	ranges, err := r.NewRawRangeDelIter(ctx, sstable.NoFragmentTransforms, sstable.NoReadEnv)
	if err == nil && ranges != nil {
		defer ranges.Close()
		span, err := ranges.First()
		for ; span != nil && err == nil; span, err = ranges.Next() {
			for _, k := range span.Keys {
				if err := fn(entry{key: span.Start, value: span.End, seq: uint64(k.SeqNum()), kind: k.Kind()}); err != nil {
					return err
				}
			}
		}
	}
	if err != nil {
		s.addDamage(name, "its deleted ranges: %s", firstLine(err))
		s.addMissing(nil, nil)
	}
	parts, err := integrity.TableBlocks(ctx, r)
	if err != nil {
		s.addUnreadable(name, "its index: %s", firstLine(err))
		return nil
	}
	var from []byte
	for _, b := range parts {
		if err := s.block(name, r, from, b, fn); err != nil {
			return err
		}
		from = append(slices.Clone(b.Last), 0)
	}
	return nil
}

// block reads the entries of one block, whose keys begin at from.
func (s *salvager) block(name string, r *sstable.Reader, from []byte, b integrity.TableBlock, fn func(entry) error) error {
	reportError := func(err error) {
		text := firstLine(err)
		if strings.Contains(text, ": block ") && !strings.Contains(text, fmt.Sprintf(": block %d/", b.Offset)) {
			return // The iterator read ahead; the other block is reported in its turn.
		}
		s.addDamage(name, "bytes %d to %d: %s", b.Offset, b.Offset+b.Length, text)
		s.addMissing(from, b.Last)
	}
	it, err := r.NewIter(sstable.NoTransforms, from, append(slices.Clone(b.Last), 0), sstable.AssertNoBlobHandles)
	if err != nil {
		reportError(err)
		return nil
	}
	defer func() { _ = it.Close() }()
	for kv := it.First(); kv != nil; kv = it.Next() {
		v, _, err := kv.Value(nil)
		if err != nil {
			reportError(err)
			continue
		}
		if err := fn(entry{key: kv.K.UserKey, value: v, seq: uint64(kv.SeqNum()), kind: kv.Kind()}); err != nil {
			return err
		}
	}
	if err := it.Error(); err != nil {
		reportError(err)
	}
	return nil
}

// log reads the sound batches of a write-ahead log, also those after damage.
func (s *salvager) log(name string, fn func(entry) error) error {
	number, _ := integrity.LogNumber(name)
	named := false // integrity.CheckJournals reports the first damaged part.
	var failed error
	_, err := integrity.ScanLogFile(s.fs, s.path(name), number, math.MaxInt, nil, func(rec integrity.LogRecord) error {
		if rec.Gap >= 0 && named {
			s.addDamage(name, "bytes %d to %d", rec.Gap, rec.At)
			s.addMissing(nil, nil)
		}
		named = named || rec.Gap >= 0
		failed = s.batch(name, int(rec.At), rec.Data, fn)
		return failed
	})
	if err != nil && failed == nil {
		s.addDamage(name, "%v", err)
	}
	return failed
}

func (s *salvager) batch(name string, at int, batch []byte, fn func(entry) error) error {
	h, ok := batchrepr.ReadHeader(batch)
	if !ok {
		s.addDamage(name, "the batch at byte %d", at)
		s.addMissing(nil, nil)
		return nil
	}
	seq := uint64(h.SeqNum)
	for r := batchrepr.Read(batch); ; {
		kind, key, value, ok, err := r.Next()
		if err != nil {
			s.addDamage(name, "the batch at byte %d: %s", at, firstLine(err))
			s.addMissing(nil, nil)
		}
		if !ok {
			return nil
		}
		if kind == pebble.InternalKeyKindLogData {
			continue
		}
		if err := fn(entry{key: key, value: value, seq: seq, kind: kind}); err != nil {
			return err
		}
		seq++
	}
}

func firstLine(err error) string {
	text, _, _ := strings.Cut(err.Error(), "\n") // The engine adds stacks.
	return text
}

type discardLogger struct{}

func (discardLogger) Infof(string, ...any) {}

func (discardLogger) Errorf(string, ...any) {}

// Fatalf is never called by a read-only store.
func (discardLogger) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// survey finds the newest entry of each key.
type survey struct {
	// latest holds the keys that are written more than once, deleted the deleted ones.
	latest, deleted map[string]uint64
	ranges          map[string][]deletedRange
	// format is the highest version of the keys and values that was found. It is never lowered.
	format uint64
}

// survey reads all entries. It returns codec.ErrNewerFormat if this release does not read them.
func (s *salvager) survey() (*survey, error) {
	v := &survey{latest: map[string]uint64{}, deleted: map[string]uint64{}, ranges: map[string][]deletedRange{}}
	if err := s.each(v.add); err != nil {
		return nil, err
	}
	return v, codec.CheckFormat("store", "store", v.format, codec.Format)
}

type deletedRange struct {
	start, end []byte
	seq        uint64
}

// rangeGroup is the common prefix of the keys of a deleted range, so that each key is compared
// with few ranges.
func rangeGroup(key []byte) string {
	if len(key) > 9 && (key[0] == codec.PrefixMessage || key[0] == codec.PrefixRetry || key[0] == codec.PrefixDue ||
		key[0] == codec.PrefixWait) {
		return string(key[:9])
	}
	return ""
}

// onceOnly reports whether a key never gets another value.
func onceOnly(key []byte) bool {
	return key[0] == codec.PrefixMessage || key[0] == codec.PrefixDuplicate || key[0] == codec.PrefixDeadLetter
}

func (v *survey) add(e entry) error {
	switch {
	case len(e.key) == 0:
	case e.kind == pebble.InternalKeyKindRangeDelete:
		group := ""
		if g := rangeGroup(e.key); g != "" && bytes.HasPrefix(e.value, []byte(g)) {
			group = g
		}
		v.ranges[group] = append(v.ranges[group], deletedRange{slices.Clone(e.key), slices.Clone(e.value), e.seq})
	case e.kind == pebble.InternalKeyKindSet || e.kind == pebble.InternalKeyKindSetWithDelete:
		if bytes.Equal(e.key, codec.KeyFormat) {
			d := codec.Decoder{Rest: e.value}
			v.format = max(v.format, d.Uvarint())
		}
		if !onceOnly(e.key) {
			v.latest[string(e.key)] = max(v.latest[string(e.key)], e.seq)
		}
	default:
		v.deleted[string(e.key)] = max(v.deleted[string(e.key)], e.seq)
	}
	return nil
}

// isCurrent reports whether an entry is the current value of its key.
func (v *survey) isCurrent(e entry) bool {
	if len(e.key) == 0 || e.kind != pebble.InternalKeyKindSet && e.kind != pebble.InternalKeyKindSetWithDelete {
		return false
	}
	if at, ok := v.deleted[string(e.key)]; ok && at > e.seq {
		return false
	}
	if at, ok := v.latest[string(e.key)]; ok && at != e.seq {
		return false
	}
	for _, group := range []string{rangeGroup(e.key), ""} {
		for _, r := range v.ranges[group] {
			if r.seq > e.seq && bytes.Compare(e.key, r.start) >= 0 && bytes.Compare(e.key, r.end) < 0 {
				return false
			}
		}
		if group == "" {
			break
		}
	}
	return true
}
