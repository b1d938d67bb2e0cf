package pebblestore

import (
	"cmp"
	"errors"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// Formats are the versions of the formats of a store's files; 0 is an unknown one.
type Formats struct {
	// Store is the format of the keys and values.
	Store uint64 `json:"store,omitempty"`
	// Pebble is the format major version of the storage engine.
	Pebble uint64 `json:"pebble,omitempty"`
}

// ReadableFormats returns the highest formats that this release reads.
func ReadableFormats() Formats {
	return Formats{Store: codec.Format, Pebble: uint64(pebble.FormatNewest)}
}

// Check returns ErrNewerFormat if this release does not read the formats of the log.
func (f Formats) Check() error {
	known := ReadableFormats()
	return cmp.Or(CheckFormat("log", "store", f.Store, known.Store), CheckFormat("log", "Pebble", f.Pebble, known.Pebble))
}

// ErrNewerFormat reports data in a format of a newer release. The data are sound: nothing may be removed or
// replaced because of this error.
var ErrNewerFormat = codec.ErrNewerFormat

// CheckFormat returns ErrNewerFormat if the format of the store or of the log is higher than the highest one
// that this release reads. kind is the format's name.
func CheckFormat(what, kind string, format, readable uint64) error {
	return codec.CheckFormat(what, kind, format, readable)
}

// Formats returns the formats of the files.
func (s *Store) Formats() (f Formats, err error) {
	if err := s.enter(); err != nil {
		return f, err
	}
	defer s.leave()
	f.Pebble = uint64(s.db.FormatMajorVersion())
	f.Store, err = s.storedFormat()
	return f, err
}

// storedFormat returns the format of the keys and values; 0 for a new store.
func (s *Store) storedFormat() (uint64, error) {
	v, err := s.get(codec.KeyFormat)
	if errors.Is(err, pebble.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	d := codec.Decoder{Rest: v}
	format := d.Uvarint()
	if d.Bad || format == 0 {
		return 0, s.corruptf("its format version is malformed")
	}
	return format, CheckFormat(s.what(), "store", format, codec.Format)
}

// what is how errors about formats name the store.
func (s *Store) what() string {
	if s.withoutWAL {
		return "log"
	}
	return "store"
}
