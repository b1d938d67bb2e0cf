// Package backup writes the data directory of a dispatcher as one archive while the dispatcher
// runs, and reads such archives. It does not know the engine: its caller makes the checkpoint of
// the store.
//
// An archive is a tar file: Index first, then the files of the data directory, and SumsName last.
// An archive without SumsName, or with other files than it lists, is not whole and is never
// restored. Take writes an archive, Pack makes one of an extracted one, and Read checks one.
package backup

import (
	"archive/tar"
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Names in an archive. QueueFolder is the store, MembersFolder the members of audiences, and
// StateName the state of the manifests of posthorn run. SumsName has the format of sha256sum.
const (
	IndexName     = "backup.json"
	SumsName      = "SHA256SUMS"
	QueueFolder   = "queue"
	MembersFolder = "audience-members"
	StateName     = "manifests.json"
)

// workFolder is the folder, in a data directory, of the checkpoint that Take writes.
const workFolder = "backup.tmp"

const (
	formatVersion = 1
	// maxTextBytes bounds the index and the checksums when they are read.
	maxTextBytes = 64 << 20
	// maxStateBytes bounds StateName.
	maxStateBytes = 1 << 30
	// chunkBytes is how much is written between two calls of Options.Check.
	chunkBytes = 1 << 20
	// maxTries bounds how often a checkpoint is repeated because a file beside it changed.
	maxTries = 5
)

// ErrIncomplete means that an archive ends early.
var ErrIncomplete = errors.New("the backup is incomplete: it ends before " + SumsName + "; make it again")

// Index describes an archive.
type Index struct {
	Format int `json:"format"`
	// Version is the release of Posthorn that wrote the archive. Every call that was answered before
	// Time is part of it.
	Version string    `json:"version"`
	Time    time.Time `json:"time"`
	// Bytes is the size of all files, without Index and checksums.
	Bytes int64 `json:"bytes"`
}

// Options of Take.
type Options struct {
	// DataDir is the data directory of the dispatcher.
	DataDir string
	// Checkpoint writes a consistent copy of the store to a folder that does not exist. It is
	// called while the files of MembersFolder are not removed.
	Checkpoint func(dir string) error
	// Verify returns an error if a file of the copy in dir, which has the names of an archive, is
	// damaged.
	Verify func(dir string) error
	// HoldRemovals delays the removal of files of MembersFolder until release is called.
	HoldRemovals func() (release func())
	// Check returns an error when the backup must end early. It is called for each MiB.
	Check   func() error
	Version string
	Now     func() time.Time
}

// RemoveRest removes the work folder of a backup that a crash interrupted.
func RemoveRest(dataDir string) error { return os.RemoveAll(filepath.Join(dataDir, workFolder)) }

// Take writes an archive of a data directory. Its work folder has hard links, which use disk space
// only for what the store removes meanwhile; each is removed when it is written.
func Take(o Options, w io.Writer) (Index, error) {
	work := filepath.Join(o.DataDir, workFolder)
	defer os.RemoveAll(work)
	begun, err := o.fill(work)
	if err != nil {
		return Index{}, err
	}
	if err := o.Verify(work); err != nil {
		return Index{}, err
	}
	names, size, err := list(work)
	if err != nil {
		return Index{}, err
	}
	index := Index{Format: formatVersion, Version: o.Version, Time: begun.UTC(), Bytes: size}
	text, err := json.Marshal(index)
	if err != nil {
		return index, err
	}
	out := newWriter(w, o.Check)
	out.addText(IndexName, append(text, '\n'))
	for _, name := range names {
		file := filepath.Join(work, filepath.FromSlash(name))
		out.addFile(name, file)
		out.try(func() error { return os.Remove(file) })
	}
	out.addText(SumsName, []byte(out.sums.String()))
	return index, out.close()
}

// fill makes the work folder: a checkpoint of the store, and the other files of the data directory
// as they were at the time of the checkpoint. It returns a time before the checkpoint.
func (o Options) fill(work string) (begun time.Time, err error) {
	for range maxTries {
		if err := errors.Join(os.RemoveAll(work), os.Mkdir(work, 0o700), o.Check()); err != nil {
			return begun, err
		}
		begun = o.Now()
		before, err := stateFile(o.DataDir)
		if err != nil {
			return begun, err
		}
		if before != nil {
			// A new state is another file, so the link keeps this one.
			err := linkOrCopy(filepath.Join(o.DataDir, StateName), filepath.Join(work, StateName))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return begun, err
			}
		}
		if err := o.link(work); err != nil {
			return begun, err
		}
		after, err := stateFile(o.DataDir)
		if err != nil {
			return begun, err
		}
		if sameFile(before, after) {
			return begun, nil
		}
	}
	return begun, errors.New("the files of the data directory change too often for a consistent backup; try again when no manifest changes")
}

// stateFile describes the state of the manifests; nil without one.
func stateFile(dir string) (fs.FileInfo, error) {
	info, err := os.Lstat(filepath.Join(dir, StateName))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular() || info.Size() > maxStateBytes:
		return nil, fmt.Errorf("%s is not a file that Posthorn writes: mode %v, %d bytes; move it away", filepath.Join(dir, StateName), info.Mode(), info.Size())
	}
	return info, nil
}

func sameFile(a, b fs.FileInfo) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// withoutLinks reports whether an error of os.Link means that the file system has no hard links, or
// that it does not allow this one.
func withoutLinks(err error) bool {
	return errors.Is(err, errors.ErrUnsupported) || errors.Is(err, syscall.EPERM)
}

// linkOrCopy makes a hard link, or a copy on a file system without them.
func linkOrCopy(from, to string) error {
	err := os.Link(from, to)
	if err == nil || !withoutLinks(err) {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// link makes the checkpoint, and links the members. The state in the store names only files that
// exist at the time of the checkpoint, and none of these is removed meanwhile.
func (o Options) link(work string) error {
	release := o.HoldRemovals()
	defer release()
	if err := o.Checkpoint(filepath.Join(work, QueueFolder)); err != nil {
		return err
	}
	from := filepath.Join(o.DataDir, MembersFolder)
	err := filepath.WalkDir(from, func(p string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		to := filepath.Join(work, MembersFolder, strings.TrimPrefix(p, from))
		switch {
		// The parts of a sync in progress: no state names them.
		case entry.IsDir() && strings.HasPrefix(entry.Name(), "sync-"):
			return fs.SkipDir
		case entry.IsDir():
			return os.Mkdir(to, 0o700)
		default:
			return linkOrCopy(p, to)
		}
	})
	if errors.Is(err, fs.ErrNotExist) {
		if _, missing := os.Stat(from); errors.Is(missing, fs.ErrNotExist) {
			return nil
		}
	}
	return err
}

// list returns the names of all files below a folder, and the sum of their sizes.
func list(dir string) (names []string, size int64, err error) {
	err = filepath.WalkDir(dir, func(p string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, p)
		names, size = append(names, filepath.ToSlash(name)), size+info.Size()
		return err
	})
	return names, size, err
}

// Pack writes the archive of a folder to which one was extracted. It does not check the contents: a
// changed file has another checksum, which Read reports. A file that SumsName does not list is an
// error.
func Pack(dir string, w io.Writer) error {
	index, err := os.ReadFile(filepath.Join(dir, IndexName))
	if err != nil {
		return fmt.Errorf("%s is not a backup: %w", dir, err)
	}
	sums, err := os.ReadFile(filepath.Join(dir, SumsName))
	if err != nil {
		return ErrIncomplete
	}
	names, _, err := list(dir)
	if err != nil {
		return err
	}
	unlisted := map[string]bool{}
	for _, name := range names {
		unlisted[name] = name != SumsName
	}
	var listed []string
	for line := range strings.Lines(string(sums)) {
		_, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		if !ok || !filepath.IsLocal(name) {
			return fmt.Errorf("%s: a line is malformed", SumsName)
		}
		unlisted[name] = false
		if name != IndexName {
			listed = append(listed, name)
		}
	}
	for _, name := range names {
		if unlisted[name] {
			return fmt.Errorf("%s is not part of the backup: %s does not list it; move it away", filepath.Join(dir, name), SumsName)
		}
	}
	out := newWriter(w, func() error { return nil })
	out.addText(IndexName, index)
	for _, name := range listed {
		out.addFile(name, filepath.Join(dir, filepath.FromSlash(name)))
	}
	out.addText(SumsName, sums)
	return out.close()
}

// writer writes an archive. After its first error it does nothing.
type writer struct {
	tar   *tar.Writer
	check func() error
	sums  strings.Builder
	err   error
}

func newWriter(w io.Writer, check func() error) *writer {
	return &writer{tar: tar.NewWriter(w), check: check}
}

func (w *writer) try(f func() error) {
	if w.err == nil {
		w.err = f()
	}
}

func (w *writer) addText(name string, text []byte) {
	w.add(name, int64(len(text)), bytes.NewReader(text))
}

func (w *writer) addFile(name, file string) {
	w.try(func() error {
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return err
		}
		w.add(name, info.Size(), f)
		return w.err
	})
}

// add writes the first size bytes of in.
func (w *writer) add(name string, size int64, in io.Reader) {
	w.try(func() error {
		return w.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o600})
	})
	sum := sha256.New()
	for size > 0 && w.err == nil {
		n := min(size, chunkBytes)
		size -= n
		w.try(w.check)
		w.try(func() error {
			_, err := io.CopyN(io.MultiWriter(w.tar, sum), in, n)
			return err
		})
	}
	w.sums.WriteString(sumLine(name, sum))
}

func (w *writer) close() error {
	w.try(w.tar.Close)
	return w.err
}

func sumLine(name string, sum hash.Hash) string { return fmt.Sprintf("%x  %s\n", sum.Sum(nil), name) }

// Sink receives the files of an archive.
type Sink interface {
	// Start is called before the first file. An error ends the reading.
	Start(Index) error
	// Create makes a file; its Close makes the contents durable.
	Create(name string) (io.WriteCloser, error)
}

// Read reads an archive to its end and passes its files to a sink. After an error, what the sink
// received is not a backup.
func Read(r io.Reader, to Sink) (index Index, err error) {
	buffered := bufio.NewReader(r)
	r = buffered
	if head, err := buffered.Peek(len(IndexName)); !strings.HasPrefix(IndexName, string(head)) {
		return index, errors.New("this is not a backup of Posthorn: a backup is a tar file that begins with " + IndexName + ", without compression")
	} else if err != nil && !errors.Is(err, io.EOF) {
		return index, err
	}
	in := tar.NewReader(r)
	sums := strings.Builder{}
	seen := map[string]bool{}
	left := int64(0)
	for {
		header, err := in.Next()
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return index, ErrIncomplete
		}
		if err != nil {
			return index, fmt.Errorf("read the backup: %w", err)
		}
		name := header.Name
		switch {
		case header.Typeflag != tar.TypeReg || !isName(name) || seen[name] || len(seen) == 0 && name != IndexName:
			return index, fmt.Errorf("read the backup: %q is not a file that Posthorn writes", name)
		}
		seen[name] = true
		text, sum := bytes.Buffer{}, sha256.New()
		isText := name == IndexName || name == SumsName
		// Start compares index.Bytes with the free space, so no file may exceed it.
		if left -= header.Size; !isText && left < 0 {
			return index, fmt.Errorf("the backup is damaged: its files have more than the %d bytes that %s declares; use another backup", index.Bytes, IndexName)
		}
		if isText {
			if _, err := text.ReadFrom(io.LimitReader(in, maxTextBytes)); err != nil {
				return index, incomplete(err)
			}
		}
		if name == IndexName {
			if err := json.Unmarshal(text.Bytes(), &index); err != nil {
				return index, fmt.Errorf("%s: %w", IndexName, err)
			}
			if index.Format != formatVersion {
				return index, fmt.Errorf("the backup has the format %d, but this release reads %d; use release %s", index.Format, formatVersion, index.Version)
			}
			if err := to.Start(index); err != nil {
				return index, err
			}
			left = index.Bytes
		}
		if name == SumsName && text.String() != sums.String() {
			return index, fmt.Errorf("the backup is damaged: %s; use another backup", firstDifference(text.String(), sums.String()))
		}
		from := io.Reader(in)
		if isText {
			from = &text
		}
		f, err := to.Create(name)
		if err != nil {
			return index, err
		}
		_, err = io.Copy(io.MultiWriter(f, sum), from)
		if err := errors.Join(incomplete(err), f.Close()); err != nil {
			return index, err
		}
		if name == SumsName {
			// The end of the tar file, so that a caller that copies r gets all of it.
			_, err := io.Copy(io.Discard, r)
			return index, err
		}
		sums.WriteString(sumLine(name, sum))
	}
}

// isName reports whether an archive can have a file with a name.
func isName(name string) bool {
	top, _, nested := strings.Cut(name, "/")
	switch top {
	case QueueFolder, MembersFolder:
		return nested && filepath.IsLocal(name) && path.Clean(name) == name && !strings.Contains(name, `\`)
	case IndexName, SumsName, StateName:
		return !nested
	}
	return false
}

func incomplete(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return ErrIncomplete
	}
	return err
}

// firstDifference describes the first line in which two lists of checksums differ.
func firstDifference(want, got string) string {
	wanted, found := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range min(len(wanted), len(found)) {
		if wanted[i] != found[i] {
			_, name, _ := strings.Cut(found[i], "  ")
			if name == "" {
				_, name, _ = strings.Cut(wanted[i], "  ")
				return name + " is missing"
			}
			return name + " differs from its checksum"
		}
	}
	return "a file is missing"
}

// Entries are the entries of a data directory that an archive replaces, the store last.
func Entries() []string { return []string{MembersFolder, StateName, QueueFolder} }
