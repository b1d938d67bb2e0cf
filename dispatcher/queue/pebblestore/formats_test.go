package pebblestore

import (
	"errors"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
)

// readPebble is the newest format of Pebble that this release reads.
const readPebble = pebble.FormatValueSeparation

func TestFormatOfPebbleIsADecision(t *testing.T) {
	if pebble.FormatNewest != readPebble {
		t.Errorf("Pebble reads format %d: got another one than %d, which the last release reads; set readPebble, and keep codec.PebbleFormat, so that a rollback reads the stores", pebble.FormatNewest, readPebble)
	}
	if codec.PebbleFormat > readPebble {
		t.Errorf("stores are written in format %d: got a higher one than %d, want one that the last release reads", codec.PebbleFormat, readPebble)
	}
	s := open(t, "data", Options{FS: vfs.NewMem()})
	defer s.Close()
	want := Formats{Store: codec.Format, Pebble: uint64(codec.PebbleFormat)}
	if got, err := s.Formats(); err != nil || got != want {
		t.Errorf("formats of a new store: got %+v and error %v, want %+v", got, err, want)
	}
}

// raiseFormats are the ways in which a newer release raises the format of the store in a folder, and the
// formats in the error. Each returns the stored format.
var raiseFormats = map[string]struct {
	error string
	raise func(fs vfs.FS, dir string) error
	read  func(fs vfs.FS, dir string) (string, error)
}{
	"store": {
		"(store format 2, this release reads 1)",
		func(fs vfs.FS, dir string) error {
			db, err := pebble.Open(dir, &pebble.Options{FS: fs, Logger: silentLogger{}})
			if err != nil {
				return err
			}
			// The mark has the checksum of a file that the engine has changed.
			return errors.Join(db.Set(codec.KeyFormat, []byte{codec.Format + 1}, pebble.Sync), db.Close(),
				fs.Remove(fs.PathJoin(dir, integrity.CleanName)))
		},
		func(fs vfs.FS, dir string) (string, error) {
			db, err := pebble.Open(dir, &pebble.Options{FS: fs, Logger: silentLogger{}, ReadOnly: true})
			if err != nil {
				return "", err
			}
			v, closer, err := db.Get(codec.KeyFormat)
			if err != nil {
				return "", err
			}
			format := string(v) // Before Close, which ends the validity of v.
			return format, errors.Join(closer.Close(), db.Close())
		},
	},
	"Pebble": {
		"(Pebble format 25, this release reads 24)",
		func(fs vfs.FS, dir string) error {
			m, _, err := atomicfs.LocateMarker(fs, dir, "format-version")
			if err != nil {
				return err
			}
			return errors.Join(m.Move((pebble.FormatNewest + 1).String()), m.Close())
		},
		func(fs vfs.FS, dir string) (string, error) { return atomicfs.ReadMarker(fs, dir, "format-version") },
	},
}

// A store or a copy of a newer release is refused, and remains as it is.
func TestNewerFormats(t *testing.T) {
	for kind, newer := range raiseFormats {
		for what, openFiles := range map[string]func(fs vfs.FS) error{
			"store": func(fs vfs.FS) error {
				s, err := Open("data", Options{FS: fs, Logger: discard})
				if err == nil {
					_ = s.Close()
				}
				return err
			},
			"log": func(fs vfs.FS) error {
				r, err := OpenReplica("data", Options{FS: fs, Logger: discard})
				if err == nil {
					_ = r.Close()
				}
				return err
			},
		} {
			t.Run(kind+" format of the "+what, func(t *testing.T) {
				fs, o := vfs.NewMem(), Options{}
				if what == "log" {
					o.Log = &memoryLog{session: Session{1}}
				}
				o.FS = fs
				if err := open(t, "data", o).Close(); err != nil {
					t.Fatal(err)
				}
				if err := newer.raise(fs, "data"); err != nil {
					t.Fatal(err)
				}
				want, err := newer.read(fs, "data")
				if err != nil {
					t.Fatal(err)
				}
				for range 2 { // The first attempt does not change the second one.
					var corrupt *CorruptError
					err := openFiles(fs)
					if !errors.Is(err, ErrNewerFormat) || errors.As(err, &corrupt) ||
						!strings.Contains(err.Error(), "a newer release wrote the "+what+" "+newer.error+": use that release or a newer one") {
						t.Errorf("open: got error %v, want %v with the formats", err, ErrNewerFormat)
					}
				}
				if got, err := newer.read(fs, "data"); err != nil || got != want {
					t.Errorf("format in the folder: got %q and error %v, want %q", got, err, want)
				}
			})
		}
	}
}

// A copy does not apply a batch that raises the format of the store.
func TestBatchOfANewerRelease(t *testing.T) {
	log := &memoryLog{session: Session{1}}
	fs := vfs.NewMem()
	if err := open(t, "data", Options{FS: fs, Log: log}).Close(); err != nil {
		t.Fatal(err)
	}
	r, err := OpenReplica("data", Options{FS: fs, Logger: discard})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	before := r.Position()
	next := Position{before.Batch + 1, log.session}
	b := r.s.db.NewBatch()
	_ = b.Set([]byte("x"), []byte("a newer encoding"), nil)
	_ = b.Set(codec.KeyFormat, []byte{codec.Format + 1}, nil)
	_ = b.Set(codec.KeyLogPosition, next.encode(), nil)
	if err := r.Apply(next, append([]byte(nil), b.Repr()...)); !errors.Is(err, ErrNewerFormat) {
		t.Errorf("apply: got error %v, want %v", err, ErrNewerFormat)
	}
	if got := r.Position(); got != before {
		t.Errorf("position: got %v, want %v", got, before)
	}
	if _, err := r.s.get([]byte("x")); !errors.Is(err, pebble.ErrNotFound) {
		t.Errorf("key of the batch: got error %v, want none of its keys", err)
	}
}
