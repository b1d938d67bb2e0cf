package integrity

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// SyncedName is the file with the synced length of each write-ahead log and each manifest.
// Damage before that byte is damage, not the torn end that a crash leaves.
//
// Invariants:
//
//   - A position is written after the sync returns and before the engine acknowledges it. So
//     the file covers every acknowledged write, and never a write that is not durable.
//   - The write is synced only in the background (see Sync), never by a commit. The
//     end of the process loses no position. A power loss may restore older positions, never
//     newer ones; the marks in the log (see Positions.Mark) are more recent then.
//   - Two slots are written in turn, each with its length and checksum, so that a torn write
//     leaves the other slot. Without a sound slot only the marks are used.
//   - A position is kept while its file exists: the engine needs the old logs and the old
//     manifest until a start is complete.
const SyncedName = "synced"

const syncedSlotBytes = 4096

// FilePosition is the synced length of a file.
type FilePosition struct {
	Name   string
	Offset int64
}

// Positions stores the positions of the files that the engine appends to.
type Positions struct {
	mu         sync.Mutex
	file       vfs.File
	generation uint64
	positions  []FilePosition
	unsynced   bool
	// log and offset are the number and the position of the newest log.
	log    uint64
	offset int64
	buf    []byte
	failed func(error)
}

// Open creates the file, with the positions of the last run.
func (f *Positions) Open(fsys vfs.FS, dir string, positions []FilePosition, failed func(error)) error {
	unnamed := fsys.PathJoin(dir, SyncedName+".tmp")
	file, err := fsys.Create(unnamed, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	f.file, f.positions, f.failed = file, positions, failed
	_, err = file.WriteAt(make([]byte, 2*syncedSlotBytes), 0)
	if err = errors.Join(err, f.write(), file.Sync(), fsys.Rename(unnamed, fsys.PathJoin(dir, SyncedName))); err != nil {
		return errors.Join(err, file.Close())
	}
	return nil
}

// Close closes the file, if there is one.
func (f *Positions) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file == nil {
		return nil
	}
	err := f.file.Close()
	f.file = nil
	return err
}

// Synced records that a file was synced up to offset. A failed write is logged and does not
// fail the sync: an older position is less exact, but not wrong.
func (f *Positions) Synced(name string, offset int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.positions, func(p FilePosition) bool { return p.Name == name })
	if i < 0 {
		i = len(f.positions)
		f.positions = append(f.positions, FilePosition{Name: name})
	}
	f.positions[i].Offset = offset
	if number, ok := LogNumber(name); ok {
		f.log, f.offset = number, offset
	}
	if f.file == nil {
		return
	}
	if err := f.write(); err != nil {
		f.failed(err)
	}
}

// Sync makes the positions, and the entries of the accepted messages, durable when they changed.
func (f *Positions) Sync(accepted *AcceptedFile) {
	f.mu.Lock()
	unsynced := f.unsynced
	f.unsynced = false
	f.mu.Unlock()
	if !unsynced {
		return
	}
	if err := errors.Join(f.file.SyncData(), accepted.file.SyncData()); err != nil {
		f.failed(err)
	}
}

// NewestLog returns the number of the newest log and its synced length.
func (f *Positions) NewestLog() (number uint64, offset int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.log, f.offset
}

// Removed deletes the position of a file. The next position writes the change.
func (f *Positions) Removed(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.positions = slices.DeleteFunc(f.positions, func(p FilePosition) bool { return p.Name == name })
}

// write writes the positions into the slot with the older ones. The caller holds mu, or no
// other goroutine uses the file.
func (f *Positions) write() error {
	f.generation++
	b := append(f.buf[:0], make([]byte, syncedHeader)...)
	b = strconv.AppendUint(b, f.generation, 10)
	b = append(b, '\n')
	f.unsynced = true
	// The engine has about ten files. Beyond 64 the oldest ones are omitted.
	for _, p := range f.positions[max(0, len(f.positions)-64):] {
		b = append(append(b, p.Name...), ' ')
		b = append(strconv.AppendInt(b, p.Offset, 10), '\n')
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

// ReadPositions returns the newest sound positions. damaged reports a file without a sound slot.
func ReadPositions(fsys vfs.FS, dir string) (positions []FilePosition, damaged bool, err error) {
	data, err := ReadFile(fsys, fsys.PathJoin(dir, SyncedName))
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
				positions = append(positions, FilePosition{name, at})
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

// Mark returns the last durable position, as a record for the next commit.
func (f *Positions) Mark() []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := make([]byte, 0, markLen)
	b = binary.BigEndian.AppendUint64(append(b, markKind), f.log)
	return binary.BigEndian.AppendUint64(b, uint64(f.offset))
}

// BatchHead is the number of bytes of a batch that the check needs: the header, and the mark,
// which is the first entry.
const BatchHead = 12 + 2 + markLen

// MarkOf reads the mark of a batch.
func MarkOf(batch []byte) (log uint64, offset int64, ok bool) {
	if len(batch) < BatchHead || batch[12] != byte(pebble.InternalKeyKindLogData) || batch[13] != markLen || batch[14] != markKind {
		return 0, 0, false
	}
	return binary.BigEndian.Uint64(batch[15:]), int64(binary.BigEndian.Uint64(batch[23:])), true
}
