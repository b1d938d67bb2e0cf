package pebblestore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	records "github.com/cockroachdb/pebble/v2/record"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"
)

// The engine detects damage of its tables by checksums. It treats a damaged part of its
// manifest (the list of the current tables) and of its newest log as the torn end that a crash
// leaves, and would delete the tables and messages after it. So both files are checked before
// the engine opens them: the manifest must exist, no sound entry may follow a damaged one, and
// after a clean shutdown it must not differ in any byte. Both files must be sound up to the
// byte to which they were synced (see syncedName).

// cleanName is the file that a clean shutdown writes: name, size and checksum of the manifest.
const cleanName = "clean-shutdown"

// damagedName is the file with the path of a file that was found damaged during a run. A repair
// removes it.
const damagedName = "damaged"

// recordDamage writes the last file that was found damaged, durably.
func (s *Store) recordDamage(path string) {
	if was := s.corrupt.Swap(&path); was != nil && *was == path {
		return
	}
	f, err := s.o.FS.Create(s.path(damagedName), vfs.WriteCategoryUnspecified)
	if err == nil {
		_, err = f.Write([]byte(path))
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err != nil {
		s.log.Warn("write of the damage mark failed; after a restart the damage is detected again", "path", path, "error", err)
	}
}

// loadDamageMark restores the damage that an earlier run found.
func (s *Store) loadDamageMark() {
	if path, err := s.readFile(damagedName); err == nil {
		damaged := string(path)
		s.corrupt.Store(&damaged)
		s.log.Error("queue file corrupt since an earlier run; run posthorn repair", "path", damaged)
	}
}

// Damaged reports whether a run found a damaged file in the closed store in dir.
func Damaged(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, damagedName))
	return err == nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// inspect detects damage that the engine ignores.
func (s *Store) inspect() error {
	names, err := s.fs.List(s.dir)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	manifest, err := atomicfs.ReadMarker(s.fs, s.dir, "manifest")
	if err != nil {
		return err
	}
	if manifest == "" {
		for _, name := range names {
			if strings.HasSuffix(name, ".sst") || strings.HasSuffix(name, ".log") {
				return &CorruptError{Path: s.path("marker.manifest.*"), Err: fmt.Errorf("the file is missing, but there is data: %s", name)}
			}
		}
		return nil
	}
	if format, err := atomicfs.ReadMarker(s.fs, s.dir, "format-version"); err != nil {
		return err
	} else if format == "" && slices.ContainsFunc(names, func(name string) bool {
		return strings.HasSuffix(name, ".sst") || name == acceptedName
	}) {
		// The engine writes the marker before the first commit; a store without commits may
		// lack it after a power loss.
		return &CorruptError{Path: s.path("marker.format-version.*"), Err: errors.New("the file is missing")}
	}
	data, err := s.readFile(manifest)
	if err != nil {
		return &CorruptError{Path: s.path(manifest), Err: err}
	}
	clean := slices.Contains(names, cleanName)
	if clean {
		was, err := s.readFile(cleanName)
		if err != nil {
			return err
		}
		if is := fingerprint(manifest, data); string(was) != is {
			return &CorruptError{Path: s.path(manifest), Err: fmt.Errorf("it changed since the store was closed: it was %q and is %q", was, is)}
		}
	}
	if at, torn := soundManifest(data); !torn {
		return &CorruptError{Path: s.path(manifest), Err: fmt.Errorf("an entry after byte %d is damaged", at)}
	}
	check, err := checkJournals(s.o.FS, s.dir, manifest, oldestLog(data))
	if err != nil {
		return err
	}
	if len(check.damaged) > 0 {
		return &CorruptError{Path: check.damaged[0].Path, Err: errors.New(check.damaged[0].What)}
	}
	for _, d := range check.torn {
		s.log.Warn("last writes to the log lost in a power loss; dropping the records after them", "path", d.Path, "what", d.What)
	}
	if clean { // From here on the engine changes the manifest.
		return errors.Join(s.fs.Remove(s.path(cleanName)), s.syncDir())
	}
	return nil
}

// oldestLog returns the number of the oldest log that the sound part of a manifest needs.
func oldestLog(manifest []byte) (oldest uint64) {
	rr := records.NewReader(bytes.NewReader(manifest), 0)
	for {
		rec, err := rr.Next()
		if err != nil {
			return oldest
		}
		edit, err := io.ReadAll(rec)
		if err != nil {
			return oldest
		}
		// Only the numbers at the beginning of an edit are needed.
		const comparator, log, nextFile, lastSequence, previousLog = 1, 2, 3, 4, 9
		for d := (decoder{b: edit}); !d.bad; {
			switch d.uvarint() {
			case comparator:
				d.bytes()
				continue
			case log:
				oldest = max(oldest, d.uvarint())
				continue
			case nextFile, lastSequence, previousLog:
				d.uvarint()
				continue
			}
			break
		}
	}
}

// writeCleanMark writes the fingerprint of the manifest after a clean shutdown.
func (s *Store) writeCleanMark() error {
	manifest, err := atomicfs.ReadMarker(s.fs, s.dir, "manifest")
	if err != nil {
		return err
	}
	data, err := s.readFile(manifest)
	if err != nil {
		return err
	}
	// The rename makes the file appear with all its contents or not at all.
	unnamed := s.path(cleanName + ".tmp")
	f, err := s.fs.Create(unnamed, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write([]byte(fingerprint(manifest, data)))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return errors.Join(s.fs.Rename(unnamed, s.path(cleanName)), s.syncDir())
}

func fingerprint(name string, data []byte) string {
	return fmt.Sprintf("%s %d %08x", name, len(data), crc32.Checksum(data, castagnoli))
}

func (s *Store) path(name string) string { return s.fs.PathJoin(s.dir, name) }

func (s *Store) syncDir() error { return syncFolder(s.fs, s.dir) }

func syncFolder(fs vfs.FS, name string) error {
	dir, err := fs.OpenDir(name)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

func (s *Store) readFile(name string) ([]byte, error) {
	f, err := s.fs.Open(s.path(name))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(f)
}

// soundManifest returns the end of the sound entries. torn is false when a sound entry follows
// a damaged one, which is not the result of a crash.
func soundManifest(data []byte) (sound int64, torn bool) {
	rr := records.NewReader(bytes.NewReader(data), 0)
	for {
		rec, err := rr.Next()
		if err == nil {
			_, err = io.Copy(io.Discard, rec)
		}
		if errors.Is(err, io.EOF) {
			return sound, true
		}
		if err != nil {
			break
		}
		sound = rr.Offset()
	}
	// The first damaged chunk begins at sound or later; its payload does not match the checksum
	// of another chunk.
	for at := sound + 1; at+chunkHeader < int64(len(data)); at++ {
		if soundChunk(data, at) {
			return sound, false
		}
	}
	return sound, true
}

// A chunk of the manifest: checksum(4) length(2) type(1), then the payload, all within one
// block.
const (
	chunkHeader = 7
	chunkBlock  = 32 << 10
)

func soundChunk(data []byte, at int64) bool {
	h := data[at:]
	length, kind := int64(binary.LittleEndian.Uint16(h[4:])), h[6]
	if kind < 1 || kind > 4 || length == 0 || length > int64(len(h))-chunkHeader || at%chunkBlock+chunkHeader+length > chunkBlock {
		return false
	}
	return binary.LittleEndian.Uint32(h) == maskedSum(h[6:chunkHeader+length])
}
