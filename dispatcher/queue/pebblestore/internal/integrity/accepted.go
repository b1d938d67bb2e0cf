package integrity

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io/fs"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// AcceptedName is the file with the number of acknowledged messages of each Source. A start
// compares it with the store, and a repair uses it to find missing messages.
//
// Invariants:
//
//   - The entries of a commit are written after its sync and before its callers get their
//     answers. So the file covers every acknowledged message, and never a message that is not
//     durable.
//   - The write is synced in the background (see Positions.Sync), and at once for a new Source,
//     so that the name of the Source is durable in two places. The end of the process loses no
//     entry; a power loss may restore older entries.
//   - Each entry has a checksum and lies within one sector. An entry with a wrong checksum is
//     ignored.
const AcceptedName = "accepted"

// An entry: checksum(4) length of the Source's name(2) unused(2) number of its log(8) head(8)
// bytes(8) name. A name that does not fit is omitted.
const (
	acceptedEntryBytes = 512
	acceptedEntryHead  = 32
)

// AcceptedEntry is the number of acknowledged messages of a Source.
type AcceptedEntry struct {
	Source string // "" when the name did not fit.
	Number uint64
	// Head and bytes are the number and the bytes of all messages ever acknowledged.
	Head, Bytes uint64
}

// AcceptedFile writes the entries. The goroutine that finishes commits owns it.
type AcceptedFile struct {
	file   vfs.File
	image  []byte // The contents of the whole file.
	failed func(error)
	dirty  []int
	grown  bool // A Source was added since the last write.
}

// Open creates the file with the entries that were put before.
func (f *AcceptedFile) Open(fsys vfs.FS, dir string, failed func(error)) error {
	f.failed, f.dirty, f.grown = failed, f.dirty[:0], false
	unnamed := fsys.PathJoin(dir, AcceptedName+".tmp")
	file, err := fsys.Create(unnamed, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	f.file = file
	if len(f.image) > 0 {
		_, err = file.WriteAt(f.image, 0)
	}
	if err = errors.Join(err, file.Sync(), fsys.Rename(unnamed, fsys.PathJoin(dir, AcceptedName))); err != nil {
		return errors.Join(err, file.Close())
	}
	return nil
}

// Put sets the i-th entry, from 1, for the next write, and returns i. With 0 it adds an entry and
// returns its index.
func (f *AcceptedFile) Put(i int, e AcceptedEntry) int {
	if i == 0 {
		f.image = append(f.image, make([]byte, acceptedEntryBytes)...)
		i, f.grown = len(f.image)/acceptedEntryBytes, true
	}
	b := f.image[(i-1)*acceptedEntryBytes:][:acceptedEntryBytes]
	n := copy(b[acceptedEntryHead:], e.Source)
	if n < len(e.Source) {
		n = 0
	}
	binary.BigEndian.PutUint16(b[4:], uint16(n))
	binary.BigEndian.PutUint64(b[8:], e.Number)
	binary.BigEndian.PutUint64(b[16:], e.Head)
	binary.BigEndian.PutUint64(b[24:], e.Bytes)
	binary.BigEndian.PutUint32(b, crc32.Checksum(b[4:acceptedEntryHead+n], castagnoli))
	f.dirty = append(f.dirty, i-1)
	return i
}

// Write writes the changed entries, adjacent ones together.
func (f *AcceptedFile) Write() {
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

// Close closes the file, if there is one.
func (f *AcceptedFile) Close() error {
	if f.file == nil {
		return nil
	}
	return f.file.Close()
}

// ReadAccepted returns the entries with valid checksums; damaged counts the others.
func ReadAccepted(fsys vfs.FS, dir string) (entries []AcceptedEntry, damaged int, err error) {
	data, err := ReadFile(fsys, fsys.PathJoin(dir, AcceptedName))
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
		entries = append(entries, AcceptedEntry{
			Source: string(b[acceptedEntryHead : acceptedEntryHead+n]), Number: binary.BigEndian.Uint64(b[8:]),
			Head: binary.BigEndian.Uint64(b[16:]), Bytes: binary.BigEndian.Uint64(b[24:]),
		})
	}
	return entries, damaged, nil
}
