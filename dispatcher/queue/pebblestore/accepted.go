package pebblestore

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io/fs"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// acceptedName is the file with the number of acknowledged messages of each Source. A start
// compares it with the store, and a repair uses it to find missing messages.
//
// Invariants:
//
//   - The entries of a commit are written after its sync and before its callers get their
//     answers. So the file covers every acknowledged message, and never a message that is not
//     durable.
//   - The write is synced in the background (see syncPositions), and at once for a new Source,
//     so that the name of the Source is durable in two places. The end of the process loses no
//     entry; a power loss may restore older entries.
//   - Each entry has a checksum and lies within one sector. An entry with a wrong checksum is
//     ignored.
const acceptedName = "accepted"

// An entry: checksum(4) length of the Source's name(2) unused(2) number of its log(8) head(8)
// bytes(8) name. A name that does not fit is omitted.
const (
	acceptedEntryBytes = 512
	acceptedEntryHead  = 32
)

type acceptedEntry struct {
	source string // "" when the name did not fit.
	number uint64
	position
}

// acceptedFile writes the entries. The goroutine that finishes commits owns it.
type acceptedFile struct {
	file   vfs.File
	image  []byte // The contents of the whole file.
	failed func(error)
	dirty  []int
	grown  bool // A Source was added since the last write.
}

func (f *acceptedFile) open(fsys vfs.FS, dir string, logs map[string]*sourceLog, failed func(error)) error {
	f.failed = failed
	for _, l := range logs {
		f.put(l, position{l.head, l.bytes})
	}
	f.dirty, f.grown = f.dirty[:0], false
	unnamed := fsys.PathJoin(dir, acceptedName+".tmp")
	file, err := fsys.Create(unnamed, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	f.file = file
	if len(f.image) > 0 {
		_, err = file.WriteAt(f.image, 0)
	}
	if err = errors.Join(err, file.Sync(), fsys.Rename(unnamed, fsys.PathJoin(dir, acceptedName))); err != nil {
		return errors.Join(err, file.Close())
	}
	return nil
}

// put sets a log's entry for the next write.
func (f *acceptedFile) put(l *sourceLog, p position) {
	if l.entry == 0 {
		f.image = append(f.image, make([]byte, acceptedEntryBytes)...)
		l.entry, f.grown = len(f.image)/acceptedEntryBytes, true
	}
	b := f.image[(l.entry-1)*acceptedEntryBytes:][:acceptedEntryBytes]
	n := copy(b[acceptedEntryHead:], l.source)
	if n < len(l.source) {
		n = 0
	}
	binary.BigEndian.PutUint16(b[4:], uint16(n))
	binary.BigEndian.PutUint64(b[8:], l.number)
	binary.BigEndian.PutUint64(b[16:], p.head)
	binary.BigEndian.PutUint64(b[24:], p.bytes)
	binary.BigEndian.PutUint32(b, crc32.Checksum(b[4:acceptedEntryHead+n], castagnoli))
	f.dirty = append(f.dirty, l.entry-1)
}

// write writes the changed entries, adjacent ones together.
func (f *acceptedFile) write() {
	slices.Sort(f.dirty)
	for i := 0; i < len(f.dirty); {
		from, to := f.dirty[i], f.dirty[i]+1
		for i++; i < len(f.dirty) && f.dirty[i] <= to; i++ {
			to = f.dirty[i] + 1
		}
		at := from * acceptedEntryBytes
		if _, err := f.file.WriteAt(f.image[at:to*acceptedEntryBytes], int64(at)); err != nil {
			f.failed(err)
		}
	}
	f.dirty = f.dirty[:0]
	if f.grown {
		f.grown = false
		if err := f.file.Sync(); err != nil {
			f.failed(err)
		}
	}
}

func (f *acceptedFile) close() error {
	if f.file == nil {
		return nil
	}
	return f.file.Close()
}

// readAccepted returns the entries with valid checksums; damaged counts the others.
func readAccepted(fsys vfs.FS, dir string) (entries []acceptedEntry, damaged int, err error) {
	data, err := readAll(fsys, fsys.PathJoin(dir, acceptedName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	for ; len(data) > 0; data = data[min(acceptedEntryBytes, len(data)):] {
		b := data[:min(acceptedEntryBytes, len(data))]
		if len(b) < acceptedEntryBytes {
			damaged++
			continue
		}
		n := int(binary.BigEndian.Uint16(b[4:]))
		if acceptedEntryHead+n > len(b) || binary.BigEndian.Uint32(b) != crc32.Checksum(b[4:acceptedEntryHead+n], castagnoli) {
			damaged++
			continue
		}
		entries = append(entries, acceptedEntry{
			source: string(b[acceptedEntryHead : acceptedEntryHead+n]), number: binary.BigEndian.Uint64(b[8:]),
			position: position{binary.BigEndian.Uint64(b[16:]), binary.BigEndian.Uint64(b[24:])},
		})
	}
	return entries, damaged, nil
}

// checkAccepted compares the ends of the logs with the acknowledged messages.
func (s *Store) checkAccepted() error {
	entries, damaged, err := readAccepted(s.o.FS, s.dir)
	if err != nil {
		return err
	}
	if damaged > 0 {
		s.log.Warn("entries of accepted messages damaged; rewriting the file", "path", s.path(acceptedName), "entries", damaged)
	}
	byNumber := map[uint64]*sourceLog{}
	for _, l := range s.logs {
		byNumber[l.number] = l
	}
	for _, e := range entries {
		head, source := uint64(0), e.source
		if l := byNumber[e.number]; l != nil {
			head, source = l.head, l.source
		}
		if e.head > head {
			return s.corruptf("the log of %s ends at message %d, but %d were acknowledged: %d are missing", source, head, e.head, e.head-head)
		}
	}
	return nil
}
