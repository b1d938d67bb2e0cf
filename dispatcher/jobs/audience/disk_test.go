package audience

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/storetest"
	"github.com/posthorn/posthorn/internal/durable"
	"github.com/posthorn/posthorn/test/check"
)

// disk has the files of a Service and its store.
type disk struct {
	// fs has the folder of the members, storeFS the data directory of the store.
	fs, storeFS vfs.FS
	dir         string
	// step, when set, is called before each change of the files and of the stored state.
	step atomic.Pointer[func()]
	// refuse, when set, is the error of every change of the stored state.
	refuse atomic.Pointer[error]
	// unclear, when set, is the error of the next durable change, which takes effect, and of every
	// later change.
	unclear atomic.Pointer[error]
}

// memory is a disk in memory, which can lose its power.
func memory() *disk {
	fs := vfs.NewCrashableMem()
	return &disk{fs: fs, storeFS: fs, dir: "/data"}
}

// realDisk is a disk with the members on a real file system.
func realDisk(t *testing.T) *disk {
	return &disk{fs: vfs.Default, storeFS: vfs.NewMem(), dir: t.TempDir()}
}

// crash returns the disk after a kill, and after a power loss, which loses what was not synced.
func (d *disk) crash(power bool) *disk {
	kept := 100
	if power {
		kept = 0
	}
	fs := d.fs.(*vfs.MemFS).CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: kept, RNG: rand.New(rand.NewPCG(1, 2))})
	return &disk{fs: fs, storeFS: fs, dir: d.dir}
}

func (d *disk) path(parts ...string) string {
	return d.fs.PathJoin(append([]string{d.dir}, parts...)...)
}

// members is the folder of an audience, relative to the disk's.
func members(audience string) string { return "members/" + name{"shop", audience}.folder() }

func (d *disk) stepped() {
	if f := d.step.Load(); f != nil {
		(*f)()
	}
}

// open opens the store.
func (d *disk) open(t *testing.T) *pebblestore.Store {
	t.Helper()
	check.NoError(t, "make the data folder", makeFolder(d.storeFS, d.dir))
	store, err := pebblestore.Open(d.path("queue"), pebblestore.Options{FS: d.storeFS, MemTableBytes: 1 << 20,
		DuplicateWindow: 10 * time.Minute, Logger: slog.New(slog.DiscardHandler)})
	check.NoError(t, "open the store", err)
	return store
}

// options are the Options for the disk.
func (d *disk) options(o *Options) {
	o.Dir = d.path("members")
	o.FS = storetest.Watch(d.fs, d.stepped, nil)
	o.Store = watchedStore{o.Store, d}
}

// watchedStore is a Store with the steps and errors of a disk.
type watchedStore struct {
	Store
	disk *disk
}

func (s watchedStore) PutMeta(name string, value []byte) error {
	s.disk.stepped()
	if err := s.disk.refuse.Load(); err != nil {
		return *err
	}
	return s.Store.PutMeta(name, value)
}

func (s watchedStore) PutMetaDurable(name string, value []byte) error {
	s.disk.stepped()
	if err := s.disk.refuse.Load(); err != nil {
		return *err
	}
	defer s.disk.stepped()
	if err := s.disk.unclear.Swap(nil); err != nil {
		s.disk.refuse.Store(err)
		return errors.Join(*err, s.Store.PutMetaDurable(name, value))
	}
	return s.Store.PutMetaDurable(name, value)
}

// files returns the names of the audiences' files, relative to the folder of the members.
func (d *disk) files() (found []string) {
	folders, _ := d.fs.List(d.path("members"))
	for _, folder := range folders {
		names, _ := d.fs.List(d.path("members", folder))
		for _, name := range names {
			found = append(found, folder+"/"+name)
			inner, _ := d.fs.List(d.path("members", folder, name))
			for _, run := range inner {
				found = append(found, folder+"/"+name+"/"+run)
			}
		}
	}
	return found
}

// count returns the number of files whose name has a prefix.
func (d *disk) count(prefix string) (n int) {
	for _, file := range d.files() {
		if strings.HasPrefix(d.fs.PathBase(file), prefix) {
			n++
		}
	}
	return n
}

// write writes a file durably.
func (d *disk) write(t *testing.T, path string, content []byte) {
	t.Helper()
	check.NoError(t, "make the folder of a file", makeAll(d.fs, d.fs.PathDir(path)))
	f, err := d.fs.Create(path, vfs.WriteCategoryUnspecified)
	check.NoError(t, "create a file", err)
	_, err = f.Write(content)
	check.NoError(t, "write a file", errors.Join(err, f.Sync(), f.Close(), durable.Sync(d.fs.OpenDir(d.fs.PathDir(path)))))
}

// makeAll creates a folder and its parents durably.
func makeAll(fs vfs.FS, dir string) error {
	if _, err := fs.Stat(dir); err == nil {
		return nil
	}
	return errors.Join(makeAll(fs, fs.PathDir(dir)), makeFolder(fs, dir))
}
