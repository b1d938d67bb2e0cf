package pebblestore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/wal"
)

// syncedName is the file with the synced length of each write-ahead log and each manifest.
// Damage before that byte is damage, not the torn end that a crash leaves.
//
// Invariants:
//
//   - A position is written after the sync returns and before the engine acknowledges it. So
//     the file covers every acknowledged write, and never a write that is not durable.
//   - The write is synced only in the background (see syncPositions), never by a commit. The
//     end of the process loses no position. A power loss may restore older positions, never
//     newer ones; the marks in the log (see mark) are more recent then.
//   - Two slots are written in turn, each with its length and checksum, so that a torn write
//     leaves the other slot. Without a sound slot only the marks are used.
//   - A position is kept while its file exists: the engine needs the old logs and the old
//     manifest until a start is complete.
const syncedName = "synced"

const syncedSlotBytes = 4096

// filePosition is the synced length of a file.
type filePosition struct {
	name   string
	offset int64
}

// syncedFiles stores the positions of the files that the engine appends to.
type syncedFiles struct {
	mu         sync.Mutex
	file       vfs.File
	generation uint64
	positions  []filePosition
	unsynced   bool
	// log and offset are the number and the position of the newest log.
	log    uint64
	offset int64
	buf    []byte
	failed func(error)
}

// open creates the file, with the positions of the last run.
func (f *syncedFiles) open(fsys vfs.FS, dir string, positions []filePosition, failed func(error)) error {
	unnamed := fsys.PathJoin(dir, syncedName+".tmp")
	file, err := fsys.Create(unnamed, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	f.file, f.positions, f.failed = file, positions, failed
	_, err = file.WriteAt(make([]byte, 2*syncedSlotBytes), 0)
	if err = errors.Join(err, f.write(), file.Sync(), fsys.Rename(unnamed, fsys.PathJoin(dir, syncedName))); err != nil {
		return errors.Join(err, file.Close())
	}
	return nil
}

func (f *syncedFiles) close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file == nil {
		return nil
	}
	err := f.file.Close()
	f.file = nil
	return err
}

// synced records that a file was synced up to offset. A failed write is logged and does not
// fail the sync: an older position is less exact, but not wrong.
func (f *syncedFiles) synced(name string, offset int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.positions, func(p filePosition) bool { return p.name == name })
	if i < 0 {
		i = len(f.positions)
		f.positions = append(f.positions, filePosition{name: name})
	}
	f.positions[i].offset = offset
	if number, ok := logNumber(name); ok {
		f.log, f.offset = number, offset
	}
	if f.file == nil {
		return
	}
	if err := f.write(); err != nil {
		f.failed(err)
	}
}

// positionSyncInterval bounds the age of the positions after a power loss.
const positionSyncInterval = 10 * time.Second

// syncPositions makes changed positions durable: after a flush, which makes logs obsolete, and
// otherwise once per interval.
func (s *Store) syncPositions() {
	if now := s.o.Now(); s.flushed.Swap(false) || now.Sub(s.positionsSynced) >= positionSyncInterval {
		s.positionsSynced = now
		if err := s.fs.positions.sync(s.accepted.file); err != nil {
			s.fs.positions.failed(err)
		}
	}
}

func (f *syncedFiles) sync(also vfs.File) error {
	f.mu.Lock()
	unsynced := f.unsynced
	f.unsynced = false
	f.mu.Unlock()
	if !unsynced {
		return nil
	}
	return errors.Join(f.file.SyncData(), also.SyncData())
}

// removed deletes the position of a file. The next position writes the change.
func (f *syncedFiles) removed(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.positions = slices.DeleteFunc(f.positions, func(p filePosition) bool { return p.name == name })
}

// write writes the positions into the slot with the older ones. The caller holds mu, or no
// other goroutine uses the file.
func (f *syncedFiles) write() error {
	f.generation++
	b := append(f.buf[:0], make([]byte, syncedHeader)...)
	b = strconv.AppendUint(b, f.generation, 10)
	b = append(b, '\n')
	f.unsynced = true
	// The engine has about ten files. Beyond 64 the oldest ones are omitted.
	for _, p := range f.positions[max(0, len(f.positions)-64):] {
		b = append(append(b, p.name...), ' ')
		b = append(strconv.AppendInt(b, p.offset, 10), '\n')
	}
	binary.LittleEndian.PutUint16(b[4:], uint16(len(b)))
	binary.LittleEndian.PutUint32(b, crc32.Checksum(b[4:], castagnoli))
	f.buf = b
	_, err := f.file.WriteAt(b, int64(f.generation%2)*syncedSlotBytes)
	return err
}

// A slot is checksum(4) length(2), then text: the generation, then a name and an offset per
// line.
const syncedHeader = 6

// readSynced returns the newest sound positions. damaged reports a file without a sound slot.
func readSynced(fsys vfs.FS, dir string) (positions []filePosition, damaged bool, err error) {
	data, err := readAll(fsys, fsys.PathJoin(dir, syncedName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	damaged, newest := true, uint64(0)
	for ; len(data) > syncedHeader; data = data[min(syncedSlotBytes, len(data)):] {
		n := int(binary.LittleEndian.Uint16(data[4:]))
		if n <= syncedHeader || n > len(data) || binary.LittleEndian.Uint32(data) != crc32.Checksum(data[4:n], castagnoli) {
			continue
		}
		first, rest, _ := strings.Cut(string(data[syncedHeader:n]), "\n")
		generation, err := strconv.ParseUint(first, 10, 64)
		if err != nil || generation < newest {
			continue
		}
		positions, newest, damaged = nil, generation, false
		for line := range strings.Lines(rest) {
			name, offset, _ := strings.Cut(strings.TrimSpace(line), " ")
			if at, err := strconv.ParseInt(offset, 10, 64); err == nil {
				positions = append(positions, filePosition{name, at})
			}
		}
	}
	return positions, damaged, nil
}

// A mark is written into the log with every commit. It holds the synced position of a log at
// that time: kind(1) log(8) offset(8). A surviving mark proves which bytes were durable,
// independently of the file of positions.
const (
	markKind = 'S'
	markLen  = 17
)

func (f *syncedFiles) mark() []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := make([]byte, 0, markLen)
	b = binary.BigEndian.AppendUint64(append(b, markKind), f.log)
	return binary.BigEndian.AppendUint64(b, uint64(f.offset))
}

// batchHead is the number of bytes of a batch that the check needs: the header, and the mark,
// which is the first entry.
const batchHead = 12 + 2 + markLen

// markOf reads the mark of a batch.
func markOf(batch []byte) (log uint64, offset int64, ok bool) {
	if len(batch) < batchHead || batch[12] != byte(pebble.InternalKeyKindLogData) || batch[13] != markLen || batch[14] != markKind {
		return 0, 0, false
	}
	return binary.BigEndian.Uint64(batch[15:]), int64(binary.BigEndian.Uint64(batch[23:])), true
}

func logNumber(name string) (uint64, bool) {
	number, _, ok := wal.ParseLogFilename(name)
	return uint64(number), ok
}

// journalCheck is the result of checkJournals.
type journalCheck struct {
	// damaged are the files that lack synced bytes.
	damaged []DamagedFile
	// torn are the logs in which sound records follow damaged bytes that were not provably
	// synced. A power loss causes this when it loses a part of the last writes.
	torn []DamagedFile
}

// checkJournals compares the manifest, and the logs from number oldest on, with their synced
// lengths according to the file of positions and the marks in the logs.
func checkJournals(fsys vfs.FS, dir, manifest string, oldest uint64) (c journalCheck, err error) {
	positions, _, err := readSynced(fsys, dir)
	if err != nil {
		return c, err
	}
	names, err := fsys.List(dir)
	if err != nil {
		return c, err
	}
	damage := func(name, format string, args ...any) {
		c.damaged = append(c.damaged, DamagedFile{fsys.PathJoin(dir, name), fmt.Sprintf(format, args...)})
	}
	synced := map[uint64]int64{} // By log number.
	for _, p := range positions {
		if p.name == manifest {
			data, err := readAll(fsys, fsys.PathJoin(dir, manifest))
			if err != nil {
				return c, err
			}
			if sound, _ := soundManifest(data); sound < p.offset {
				damage(manifest, "bytes %d to %d are damaged or missing: the file was synced up to the end of this part", sound, p.offset)
			}
		}
		if number, ok := logNumber(p.name); ok && number >= oldest {
			synced[number] = p.offset
			if p.offset > 0 && !slices.Contains(names, p.name) {
				damage(p.name, "the file is missing, but it was synced up to byte %d", p.offset)
			}
		}
	}
	type scanned struct {
		logEnd
		name   string
		number uint64
		// gaps are the damaged parts before sound records.
		gaps [][2]int64
	}
	var logs []scanned
	for _, name := range names {
		if number, ok := logNumber(name); ok && number >= oldest {
			logs = append(logs, scanned{name: name, number: number})
		}
	}
	slices.SortFunc(logs, func(a, b scanned) int { return int(a.number) - int(b.number) })
	var next uint64 // The sequence number of the next change.
	for i := range logs {
		l := &logs[i]
		l.logEnd, err = scanLogFile(fsys, fsys.PathJoin(dir, l.name), l.number, batchHead, func(payload []byte) {
			if log, offset, ok := markOf(payload); ok {
				synced[log] = max(synced[log], offset)
			}
		}, func(rec logRecord) error {
			if rec.gap >= 0 {
				l.gaps, next = append(l.gaps, [2]int64{rec.gap, rec.at}), 0
			}
			if len(rec.data) < 12 {
				damage(l.name, "the record at byte %d is not a batch", rec.at)
				return nil
			}
			first, count := binary.LittleEndian.Uint64(rec.data), binary.LittleEndian.Uint32(rec.data[8:])
			if next != 0 && first != next {
				damage(l.name, "the batch at byte %d begins with change %d, but the previous one ends before %d: changes in between are missing", rec.at, first, next)
			}
			next = first + uint64(count)
			return nil
		})
		if err != nil {
			return c, err
		}
	}
	for i, l := range logs {
		newest := i == len(logs)-1
		switch {
		case l.sound < synced[l.number]:
			damage(l.name, "bytes %d to %d are damaged or missing; the file was synced up to byte %d", l.sound, gapEnd(l.gaps, synced[l.number]), synced[l.number])
		case !newest && !l.closed:
			damage(l.name, "it has no sound end after byte %d, but it was closed before %s was created", l.sound, logs[i+1].name)
		case len(l.gaps) > 0:
			c.torn = append(c.torn, DamagedFile{fsys.PathJoin(dir, l.name), fmt.Sprintf("bytes %d to %d", l.sound, l.gaps[0][1])})
		}
	}
	return c, nil
}

// gapEnd returns the end of the first damaged part, or synced without one.
func gapEnd(gaps [][2]int64, synced int64) int64 {
	if len(gaps) > 0 {
		return gaps[0][1]
	}
	return synced
}

func scanLogFile(fsys vfs.FS, path string, number uint64, keep int, first func([]byte), record func(logRecord) error) (logEnd, error) {
	f, err := fsys.Open(path)
	if err != nil {
		return logEnd{}, err
	}
	defer func() { _ = f.Close() }()
	return scanLog(f, number, keep, first, record)
}

// journalFile is a log or a manifest. It counts the written bytes and records the synced
// length.
type journalFile struct {
	*waitForSpaceFile
	name    string
	written int64
}

func (f *journalFile) Write(p []byte) (int, error) {
	n, err := f.waitForSpaceFile.Write(p)
	f.written += int64(n)
	return n, err
}

func (f *journalFile) Sync() error { return f.sync(f.waitForSpaceFile.Sync) }

func (f *journalFile) SyncData() error { return f.sync(f.waitForSpaceFile.SyncData) }

// sync is called only by the goroutine that writes the file.
func (f *journalFile) sync(sync func() error) error {
	end := f.written
	if err := sync(); err != nil {
		return err
	}
	f.fs.positions.synced(f.name, end)
	return nil
}
