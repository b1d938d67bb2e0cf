package pebblestore

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/batchrepr"
	"github.com/cockroachdb/pebble/v2/sstable"
	blocks "github.com/cockroachdb/pebble/v2/sstable/block"
	"github.com/cockroachdb/pebble/v2/sstable/block/blockkind"
	"github.com/cockroachdb/pebble/v2/sstable/colblk"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"
)

// entry is an entry of an engine's file: the value of a key, or the deletion of a key or of all
// keys from key up to value. Of several entries for a key, the one with the highest seq is
// current.
type entry struct {
	key, value []byte
	seq        uint64
	kind       pebble.InternalKeyKind
}

// DamagedFile is a file, or a part of one, that cannot be read.
type DamagedFile struct {
	Path string
	// The description of the damage, and its place in the file.
	What string
}

// salvager reads the files of a store without the engine: all sound parts of them, regardless
// of damaged ones.
type salvager struct {
	fs           vfs.FS
	dir          string
	tables, logs []string
	damaged      []DamagedFile
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
	return bytes.Compare(r.first, endOf(prefix)) < 0 && bytes.Compare(r.last, prefix) >= 0
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
	d := DamagedFile{s.path(name), fmt.Sprintf(format, args...)}
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
	data, err := readAll(s.fs, s.path(name))
	if err != nil {
		s.addDamage(name, "%v", err)
		return 0
	}
	s.manifestSound = true
	if was, err := readAll(s.fs, s.path(cleanName)); err == nil && string(was) != fingerprint(name, data) {
		s.addDamage(name, "it changed since the store was closed")
		s.manifestSound = false
	}
	if at, torn := soundManifest(data); !torn {
		s.addDamage(name, "an entry after byte %d is damaged", at)
		s.manifestSound = false
	}
	oldest = oldestLog(data)
	check, err := checkJournals(s.fs, s.dir, name, oldest)
	if err != nil {
		s.addDamage(name, "%v", err)
	}
	for _, d := range append(check.damaged, check.torn...) {
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
	db, err := pebble.Open(s.dir, &pebble.Options{FS: s.fs, ReadOnly: true, Lock: lock, FormatMajorVersion: pebble.FormatNewest, Logger: discardLogger{}})
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
func (s *salvager) damages() []DamagedFile {
	if len(s.damaged) == 0 && s.unopened != nil {
		return []DamagedFile{{s.dir, firstLine(s.unopened)}}
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
	parts, err := index(ctx, r)
	if err != nil {
		s.addUnreadable(name, "its index: %s", firstLine(err))
		return nil
	}
	var from []byte
	for _, b := range parts {
		if err := s.block(name, r, from, b, fn); err != nil {
			return err
		}
		from = append(slices.Clone(b.last), 0)
	}
	return nil
}

// tableBlock is a block of a table, and an upper bound of its keys.
type tableBlock struct {
	blocks.Handle
	last []byte
}

// index lists the blocks of a table.
func index(ctx context.Context, r *sstable.Reader) (all []tableBlock, err error) {
	layout, err := r.Layout()
	if err != nil {
		return nil, err
	}
	for _, at := range layout.Index {
		h, err := r.BlockReader().Read(ctx, blocks.NoReadEnv, nil, at, blockkind.Index, colblk.InitIndexBlockMetadata)
		if err != nil {
			return nil, err
		}
		var it colblk.IndexIter
		if err := it.Init(pebble.DefaultComparer, h.BlockData(), blocks.NoTransforms); err != nil {
			h.Release()
			return nil, err
		}
		for ok := it.First(); ok; ok = it.Next() {
			data, err := it.BlockHandleWithProperties()
			if err != nil {
				h.Release()
				return nil, err
			}
			all = append(all, tableBlock{data.Handle, slices.Clone(it.Separator())})
		}
		h.Release()
	}
	return all, nil
}

// block reads the entries of one block, whose keys begin at from.
func (s *salvager) block(name string, r *sstable.Reader, from []byte, b tableBlock, fn func(entry) error) error {
	reportError := func(err error) {
		text := firstLine(err)
		if strings.Contains(text, ": block ") && !strings.Contains(text, fmt.Sprintf(": block %d/", b.Offset)) {
			return // The iterator read ahead; the other block is reported in its turn.
		}
		s.addDamage(name, "bytes %d to %d: %s", b.Offset, b.Offset+b.Length, text)
		s.addMissing(from, b.last)
	}
	it, err := r.NewIter(sstable.NoTransforms, from, append(slices.Clone(b.last), 0), sstable.AssertNoBlobHandles)
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
	number, _ := logNumber(name)
	named := false // checkJournals reports the first damaged part.
	var failed error
	_, err := scanLogFile(s.fs, s.path(name), number, math.MaxInt, nil, func(rec logRecord) error {
		if rec.gap >= 0 && named {
			s.addDamage(name, "bytes %d to %d", rec.gap, rec.at)
			s.addMissing(nil, nil)
		}
		named = named || rec.gap >= 0
		failed = s.batch(name, int(rec.at), rec.data, fn)
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

func readAll(fs vfs.FS, path string) ([]byte, error) {
	f, err := fs.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(f)
}

func firstLine(err error) string {
	text, _, _ := strings.Cut(err.Error(), "\n") // The engine adds stacks.
	return text
}

type discardLogger struct{}

func (discardLogger) Infof(string, ...any)  {}
func (discardLogger) Errorf(string, ...any) {}

// Fatalf is never called by a read-only store.
func (discardLogger) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// survey finds the newest entry of each key.
type survey struct {
	// latest holds the keys that are written more than once, deleted the deleted ones.
	latest, deleted map[string]uint64
	ranges          map[string][]deletedRange
}

type deletedRange struct {
	start, end []byte
	seq        uint64
}

// rangeGroup is the common prefix of the keys of a deleted range, so that each key is compared
// with few ranges.
func rangeGroup(key []byte) string {
	if len(key) > 9 && (key[0] == prefixMessage || key[0] == prefixRetry || key[0] == prefixDue) {
		return string(key[:9])
	}
	return ""
}

// onceOnly reports whether a key never gets another value.
func onceOnly(key []byte) bool {
	return key[0] == prefixMessage || key[0] == prefixDuplicate || key[0] == prefixDeadLetter
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
