package audience

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/internal/durable"
)

// Copies keeps copies of the files outside of this process's disk; slots.Objects implements it. A
// file is copied before a state names it, and has another name in each sync, so a copy never
// changes.
type Copies interface {
	// Put stores a copy.
	Put(ctx context.Context, name string, data io.Reader) error
	// Get returns the bytes of a copy.
	Get(ctx context.Context, name string) (io.ReadCloser, error)
	// List returns the names of all copies, also of incomplete ones.
	List(ctx context.Context) ([]string, error)
	// Missing returns the names of the copies that do not exist or are incomplete.
	Missing(ctx context.Context, names []string) ([]string, error)
	// Delete removes a copy if it exists.
	Delete(ctx context.Context, name string) error
}

// copyTimeout bounds the copies of one sync.
const copyTimeout = 10 * time.Minute

// copyName is the name of the copy of a file.
func copyName(folder, file string) string { return folder + "/" + file }

// copying returns a context for Copies that ends when the service stops.
func (s *Service) copying() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), copyTimeout)
	go func() {
		select {
		case <-s.stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// copyFiles copies the files of a sync.
func (s *Service) copyFiles(a *audience, r stored) error {
	if s.Copies == nil {
		return nil
	}
	ctx, cancel := s.copying()
	defer cancel()
	for file := range r.files() {
		f, err := s.FS.Open(s.FS.PathJoin(a.dir, file))
		if err == nil {
			err = errors.Join(s.Copies.Put(ctx, copyName(a.folder(), file), f), f.Close())
		}
		if err != nil {
			return fmt.Errorf("copy the members to the log: %w", err)
		}
	}
	return nil
}

// copiesCheck is the time between two checks of the copies.
const copiesCheck = 10 * time.Second

// keepCopies stores copies again that another program deleted, or a server lost, until ctx is done.
func (s *Service) keepCopies(ctx context.Context) {
	timer := time.NewTicker(copiesCheck)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if err := s.storeMissing(ctx); err != nil && ctx.Err() == nil {
			s.Logger.Warn("checking the copies of audiences' members failed; retrying", "error", err)
		}
	}
}

// storeMissing stores the copies that are missing.
func (s *Service) storeMissing(ctx context.Context) error {
	paths := map[string]string{}
	s.mu.Lock()
	for id, a := range s.audiences {
		if a.broken != nil {
			continue
		}
		for file := range (stored{Done: a.done, Pending: a.pending}).files() {
			paths[copyName(id.folder(), file)] = s.FS.PathJoin(a.dir, file)
		}
	}
	s.mu.Unlock()
	missing, err := s.Copies.Missing(ctx, slices.Collect(maps.Keys(paths)))
	if err != nil {
		return err
	}
	stored := int64(0)
	for _, name := range missing {
		f, err := s.FS.Open(paths[name])
		if errors.Is(err, fs.ErrNotExist) {
			continue // A sync has ended meanwhile.
		}
		if err == nil {
			err = errors.Join(s.Copies.Put(ctx, name, f), f.Close())
		}
		if err != nil {
			return fmt.Errorf("store %s: %w", name, err)
		}
		stored++
	}
	if s.restored.Store(stored); stored > 0 {
		s.Logger.Error("copies of audiences' members were missing in the log; stored them again", "copies", stored)
	}
	return nil
}

// Gaps returns what the last check of the copies found missing, and stored again.
func (s *Service) Gaps() []string {
	if n := s.restored.Load(); n > 0 {
		return []string{fmt.Sprintf("the object store of the members of audiences lacked %d copies: another program deleted them, or a server lost them; the owner has stored them again", n)}
	}
	return nil
}

// fetchFiles writes the files of a state that this disk does not have, or has damaged.
func (s *Service) fetchFiles(a *audience, r stored) error {
	if s.Copies == nil {
		return nil
	}
	if err := makeFolder(s.FS, a.dir); err != nil {
		return err
	}
	ctx, cancel := s.copying()
	defer cancel()
	fetched := false
	for file := range r.files() {
		path := s.FS.PathJoin(a.dir, file)
		err := verifyFile(s.FS, path, func() error { return ctx.Err() })
		switch {
		case err == nil:
			continue
		case ctx.Err() != nil:
			return err
		case !errors.Is(err, fs.ErrNotExist):
			s.Logger.Warn("a file of an audience is damaged; reading it from the log again", "error", err)
		}
		if err := fetchCopy(ctx, s.Copies, copyName(a.folder(), file), s.FS, path); err != nil {
			return fmt.Errorf("read the members from the log: %w", err)
		}
		fetched = true
	}
	if !fetched {
		return nil
	}
	return durable.Sync(s.FS.OpenDir(a.dir))
}

// fetchCopy writes one file, which exists only when it is complete.
func fetchCopy(ctx context.Context, copies Copies, name string, to vfs.FS, path string) error {
	from, err := copies.Get(ctx, name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	defer func() { _ = from.Close() }()
	temporary := path + ".part"
	f, err := to.Create(temporary, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, to.Remove(temporary))
	}
	return to.Rename(temporary, path)
}

// StoreFiles copies the files of all audiences in dir, which need not exist. No Service may use dir.
func StoreFiles(ctx context.Context, from vfs.FS, dir string, to Copies) error {
	folders, err := from.List(dir)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	for _, folder := range folders {
		files, err := from.List(from.PathJoin(dir, folder))
		if err != nil {
			return err
		}
		for _, file := range files {
			if err := storeFile(ctx, from, from.PathJoin(dir, folder, file), to, copyName(folder, file)); err != nil {
				return fmt.Errorf("%s: %w", copyName(folder, file), err)
			}
		}
	}
	return nil
}

// storeFile copies one file. A folder has the files of a sync in progress, which begins again.
func storeFile(ctx context.Context, from vfs.FS, path string, to Copies, name string) error {
	info, err := from.Stat(path)
	if err != nil || info.IsDir() {
		return err
	}
	f, err := from.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(to.Put(ctx, name, f), f.Close())
}

// removeCopies removes the copies that needed does not select. Copies that cannot be removed only cost
// space; they are removed at a later start.
func (s *Service) removeCopies(needed func(name string) bool) {
	if s.Copies == nil {
		return
	}
	ctx, cancel := s.copying()
	defer cancel()
	names, err := s.Copies.List(ctx)
	for _, name := range names {
		if !needed(name) {
			err = errors.Join(err, s.Copies.Delete(ctx, name))
		}
	}
	if err != nil {
		s.Logger.Error("removing old copies of audiences' members failed", "error", err)
	}
}

// removeCopiesOf removes the copies of an audience that its state does not name.
func (s *Service) removeCopiesOf(a *audience, r stored) {
	named, folder := r.files(), a.folder()+"/"
	s.removeCopies(func(name string) bool {
		file, ok := strings.CutPrefix(name, folder)
		return !ok || named[file]
	})
}
