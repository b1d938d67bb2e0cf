package codec

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/atomicfs"
)

// ErrNewerFormat reports data in a format of a newer release.
var ErrNewerFormat = errors.New("a newer release wrote the data")

// CheckFormat returns ErrNewerFormat if the format of the store or of the log is higher than the highest one
// that this release reads. kind is the format's name.
func CheckFormat(what, kind string, format, readable uint64) error {
	if format <= readable {
		return nil
	}
	return &formatError{what, kind, format, readable}
}

type formatError struct {
	what, kind       string
	format, readable uint64
}

func (e *formatError) Error() string {
	return fmt.Sprintf("a newer release wrote the %s (%s format %d, this release reads %d): use that release or a newer one", e.what, e.kind, e.format, e.readable)
}

func (e *formatError) Is(target error) bool { return target == ErrNewerFormat }

// CheckPebbleFormat checks the format of the engine's files in dir. marker is its text; empty if it is missing.
func CheckPebbleFormat(fs vfs.FS, dir, what string) (marker string, err error) {
	if marker, err = atomicfs.ReadMarker(fs, dir, "format-version"); err != nil {
		return "", err
	}
	version, _ := strconv.ParseUint(marker, 10, 64) // 0 for a damaged marker.
	return marker, CheckFormat(what, "Pebble", version, uint64(pebble.FormatNewest))
}
