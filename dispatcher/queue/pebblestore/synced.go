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

// syncedName is the file that says up to which byte each write-ahead log and each
// manifest was synced. Damage before that byte is damage, not the torn end that a crash leaves.
//
// Invariants:
//
//   - A position is written after the sync has returned and before the engine
//     reports the sync to those who wait for it. So the file covers all that was
//     acknowledged, and never more than is durable.
//   - The write is synced in the background only (see syncPositions), never by a commit. It
//     survives the end of the process exactly. A power loss may bring back an older
//     state, never a newer one; the marks in the log (see mark) narrow that down.
//   - Two slots are written in turn, each with its length and checksum, so that a
//     torn write leaves the other slot. Without a sound slot the marks alone count.
//   - A position stays while its file exists: the engine needs the old logs and the old
//     manifest until a start is complete.
const syncedName = "synced"

const syncedSlotBytes = 4096

// filePosition says up to which byte a file was synced.
type filePosition struct {
	name   string
	offset int64
}

// syncedFiles keeps the positions of the files that the engine appends to.
type syncedFiles struct {
	mu         sync.Mutex
	file       vfs.File
	generation uint64
	positions  []filePosition
	unsynced   bool
	// log and offset are the position of the newest log.
	log    uint64
	offset int64
	buf    []byte
	failed func(error)
}

// open takes over the positions of the last run and begins a file of its own.
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

// synced notes that a file was synced up to offset. A failure to write is logged and
// does not fail the sync: an older position claims less than is durable.
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

// positionSyncInterval bounds how old the positions are that a power loss leaves.
const positionSyncInterval = 10 * time.Second

// syncPositions makes the positions durable when they changed: after a flush, which makes logs
// obsolete, and otherwise once an interval.
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

// removed forgets a file. That is written with the next position.
func (f *syncedFiles) removed(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.positions = slices.DeleteFunc(f.positions, func(p filePosition) bool { return p.name == name })
}

// write writes the positions into the slot that holds the older ones. The caller
// holds mu, or is alone.
func (f *syncedFiles) write() error {
	f.generation++
	b := append(f.buf[:0], make([]byte, syncedHeader)...)
	b = strconv.AppendUint(b, f.generation, 10)
	b = append(b, '\n')
	f.unsynced = true
	// The engine has about ten files at most. If there were more, the newest ones count.
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

// A slot is checksum(4) length(2), then text: the generation, and a name and an
// offset per line.
const syncedHeader = 6

// readSynced returns the newest sound positions. damaged says that the file exists and has none.
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

// A mark is written into the log with every group of messages. It says up to which
// byte which log was synced when the group was made: kind(1) log(8) offset(8). A mark
// that survives proves what was durable, whatever became of the file of positions.
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

// batchHead is how many bytes of a batch the check needs: its header and its mark,
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

// journalCheck is what became of the bytes that were synced.
type journalCheck struct {
	// damaged are the files that lack some of them.
	damaged []DamagedFile
	// torn are the ends of logs where sound records follow damage and nothing proves that it was
	// synced: a power loss leaves them, where it took a part of the last writes.
	torn []DamagedFile
}

// checkJournals compares the manifest and the logs from number oldest on with what was synced
// of them, by the file of positions and by the marks in the logs.
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
	synced := map[uint64]int64{} // By the number of a log.
	for _, p := range positions {
		if p.name == manifest {
			data, err := readAll(fsys, fsys.PathJoin(dir, manifest))
			if err != nil {
				return c, err
			}
			if sound, _ := soundManifest(data); sound < p.offset {
				damage(manifest, "bytes %d to %d are damaged or missing: it was synced up to there", sound, p.offset)
			}
		}
		if number, ok := logNumber(p.name); ok && number >= oldest {
			synced[number] = p.offset
			if p.offset > 0 && !slices.Contains(names, p.name) {
				damage(p.name, "the file is missing; it was synced up to byte %d", p.offset)
			}
		}
	}
	type scanned struct {
		logEnd
		name   string
		number uint64
		// gaps are the damaged parts that sound records follow.
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
				damage(l.name, "the record at byte %d is no batch", rec.at)
				return nil
			}
			first, count := binary.LittleEndian.Uint64(rec.data), binary.LittleEndian.Uint32(rec.data[8:])
			if next != 0 && first != next {
				damage(l.name, "the batch at byte %d begins with change %d, but the one before ends before %d: changes between are missing", rec.at, first, next)
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
			damage(l.name, "bytes %d to %d are damaged or missing; it was synced up to byte %d", l.sound, gapEnd(l.gaps, synced[l.number]), synced[l.number])
		case !newest && !l.closed:
			damage(l.name, "it has no sound end behind byte %d, but it was closed before %s was begun", l.sound, logs[i+1].name)
		case len(l.gaps) > 0:
			c.torn = append(c.torn, DamagedFile{fsys.PathJoin(dir, l.name), fmt.Sprintf("bytes %d to %d", l.sound, l.gaps[0][1])})
		}
	}
	return c, nil
}

// gapEnd is where the first damaged part ends, at most at synced.
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

// journalFile counts what is written to a log or a manifest, and notes what was synced.
type journalFile struct {
	*patientFile
	name    string
	written int64
}

func (f *journalFile) Write(p []byte) (int, error) {
	n, err := f.patientFile.Write(p)
	f.written += int64(n)
	return n, err
}

func (f *journalFile) Sync() error { return f.sync(f.patientFile.Sync) }

func (f *journalFile) SyncData() error { return f.sync(f.patientFile.SyncData) }

// sync is called by the one goroutine that writes the file.
func (f *journalFile) sync(sync func() error) error {
	end := f.written
	if err := sync(); err != nil {
		return err
	}
	f.fs.positions.synced(f.name, end)
	return nil
}
