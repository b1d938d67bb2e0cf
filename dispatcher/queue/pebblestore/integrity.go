package pebblestore

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
	"github.com/posthorn/posthorn/internal/durable"
)

// The manifest and the logs are checked before the engine opens them: the manifest must exist,
// no sound entry may follow a damaged one, and after a clean shutdown it must not differ in any
// byte. Both kinds of files must be sound up to the byte to which they were synced (see package
// integrity).

// recordDamage writes the last file that was found damaged, durably.
func (s *Store) recordDamage(path string) {
	if was := s.corrupt.Swap(&path); was != nil && *was == path {
		return
	}
	f, err := s.o.FS.Create(s.path(integrity.DamagedName), vfs.WriteCategoryUnspecified)
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
	if path, err := s.readFile(integrity.DamagedName); err == nil {
		damaged := string(path)
		s.corrupt.Store(&damaged)
		s.log.Error("queue file corrupt since an earlier run; run posthorn repair", "path", damaged)
	}
}

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
	format, err := codec.CheckPebbleFormat(s.fs, s.dir, s.what())
	if err != nil {
		return err
	}
	if format == "" && slices.ContainsFunc(names, func(name string) bool {
		return strings.HasSuffix(name, ".sst") || name == integrity.AcceptedName
	}) {
		// The engine writes the marker before the first commit; a store without commits may
		// lack it after a power loss.
		return &CorruptError{Path: s.path("marker.format-version.*"), Err: errors.New("the file is missing")}
	}
	data, err := s.readFile(manifest)
	if errors.Is(err, fs.ErrPermission) {
		return err
	}
	if err != nil {
		return &CorruptError{Path: s.path(manifest), Err: err}
	}
	clean := slices.Contains(names, integrity.CleanName)
	if clean {
		was, err := s.readFile(integrity.CleanName)
		if err != nil {
			return err
		}
		if is := integrity.Fingerprint(manifest, data); string(was) != is {
			return &CorruptError{Path: s.path(manifest), Err: fmt.Errorf("it changed since the store was closed: it was %q and is %q", was, is)}
		}
	}
	if at, torn := integrity.SoundManifest(data); !torn {
		return &CorruptError{Path: s.path(manifest), Err: fmt.Errorf("an entry after byte %d is damaged", at)}
	}
	check, err := integrity.CheckJournals(s.o.FS, s.dir, manifest, integrity.OldestLog(data))
	if err != nil {
		return err
	}
	if len(check.Damaged) > 0 {
		return &CorruptError{Path: check.Damaged[0].Path, Err: errors.New(check.Damaged[0].What)}
	}
	for _, d := range check.Torn {
		s.log.Warn("last writes to the log lost in a power loss; dropping the records after them", "path", d.Path, "what", d.What)
	}
	if clean { // From here on the engine changes the manifest.
		return errors.Join(s.fs.Remove(s.path(integrity.CleanName)), s.syncDir())
	}
	return nil
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
	unnamed := s.path(integrity.CleanName + ".tmp")
	f, err := s.fs.Create(unnamed, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write([]byte(integrity.Fingerprint(manifest, data)))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return errors.Join(s.fs.Rename(unnamed, s.path(integrity.CleanName)), s.syncDir())
}

func (s *Store) path(name string) string { return s.fs.PathJoin(s.dir, name) }

func (s *Store) syncDir() error { return durable.Sync(s.fs.OpenDir(s.dir)) }

func (s *Store) readFile(name string) ([]byte, error) { return integrity.ReadFile(s.fs, s.path(name)) }

// checkAccepted compares the ends of the logs with the acknowledged messages.
func (s *Store) checkAccepted() error {
	entries, damaged, err := integrity.ReadAccepted(s.o.FS, s.dir)
	if err != nil {
		return err
	}
	if damaged > 0 {
		s.log.Warn("entries of accepted messages damaged; rewriting the file", "path", s.path(integrity.AcceptedName), "entries", damaged)
	}
	byNumber := map[uint64]*sourceLog{}
	for _, l := range s.logs {
		byNumber[l.number] = l
	}
	for _, e := range entries {
		head, source := uint64(0), e.Source
		if l := byNumber[e.Number]; l != nil {
			head, source = l.head, l.source
		}
		if e.Head > head {
			return s.corruptf("the log of %s ends at message %d, but %d were acknowledged: %d are missing", source, head, e.Head, e.Head-head)
		}
	}
	return nil
}
