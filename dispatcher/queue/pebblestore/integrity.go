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

// The engine finds damage of its tables and of its log by checksums. Of its
// manifest, the list of the tables that count, it reads what it can and takes a
// damaged part for the torn end that a crash leaves; tables that were listed
// there would be deleted. So the manifest is looked at before the engine opens
// it: there must be one, no sound entry may follow a damaged one, and after a
// clean shutdown it must be to the byte what it was then.

// cleanName is the file that a clean shutdown leaves: name, size and checksum of the manifest.
const cleanName = "clean-shutdown"

// damagedName is the file that names a damaged one which was met while the store
// was in use. It stays until a repair.
const damagedName = "damaged"

// noteDamage remembers the last damaged file that was met, also over a restart.
func (s *Store) noteDamage(path string) {
	if was := s.corrupt.Swap(&path); was != nil && *was == path {
		return
	}
	f, err := s.o.FS.Create(s.path(damagedName), vfs.WriteCategoryUnspecified)
	if err == nil {
		_, err = f.Write([]byte(path))
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err != nil {
		s.log.Warn("the damage could not be noted; after a restart it is met again", "path", path, "error", err)
	}
}

// recallDamage tells of damage that was met before the start.
func (s *Store) recallDamage() {
	if path, err := s.readFile(damagedName); err == nil {
		damaged := string(path)
		s.corrupt.Store(&damaged)
		s.log.Error("a file of the queue is corrupt since an earlier run; repair the queue", "path", damaged)
	}
}

// Damaged tells whether a file of the closed store in dir was found damaged while it was in use.
func Damaged(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, damagedName))
	return err == nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// inspect finds damage that the engine would pass over.
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
	data, err := s.readFile(manifest)
	if err != nil {
		return &CorruptError{Path: s.path(manifest), Err: err}
	}
	if slices.Contains(names, cleanName) {
		was, err := s.readFile(cleanName)
		if err != nil {
			return err
		}
		if is := fingerprint(manifest, data); string(was) != is {
			return &CorruptError{Path: s.path(manifest), Err: fmt.Errorf("it changed since the store was closed: it was %q and is %q", was, is)}
		}
		// From here on it changes.
		if err := s.fs.Remove(s.path(cleanName)); err != nil {
			return err
		}
		if err := s.syncDir(); err != nil {
			return err
		}
	}
	if at := damage(data); at >= 0 {
		return &CorruptError{Path: s.path(manifest), Err: fmt.Errorf("an entry after byte %d is damaged", at)}
	}
	return nil
}

// signClean notes the manifest of a store that was closed cleanly.
func (s *Store) signClean() error {
	manifest, err := atomicfs.ReadMarker(s.fs, s.dir, "manifest")
	if err != nil {
		return err
	}
	data, err := s.readFile(manifest)
	if err != nil {
		return err
	}
	// The name appears with its content or not at all.
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

func (s *Store) syncDir() error {
	dir, err := s.fs.OpenDir(s.dir)
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

// damage finds a damaged entry that a sound one follows: it was not torn by a
// crash. It returns the byte up to which all is sound, -1 when there is no damage.
func damage(data []byte) int64 {
	rr := records.NewReader(bytes.NewReader(data), 0)
	sound := int64(0)
	for {
		rec, err := rr.Next()
		if err == nil {
			_, err = io.Copy(io.Discard, rec)
		}
		if errors.Is(err, io.EOF) {
			return -1
		}
		if err != nil {
			break
		}
		sound = rr.Offset()
	}
	// The first damaged chunk begins at sound or later; its own bytes cannot pass for another.
	for at := sound + 1; at+chunkHeader < int64(len(data)); at++ {
		if soundChunk(data, at) {
			return sound
		}
	}
	return -1
}

// A chunk of the manifest: checksum(4) length(2) type(1), then its bytes, all within one block.
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
	sum := crc32.Checksum(h[6:chunkHeader+length], castagnoli)
	return binary.LittleEndian.Uint32(h) == (sum>>15|sum<<17)+0xa282ead8
}
