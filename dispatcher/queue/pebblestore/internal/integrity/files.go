// Package integrity detects damage of a store's files that the storage engine does not detect.
//
// The engine detects damage of its tables by checksums. It treats a damaged part of its manifest
// (the list of the current tables) and of its newest log as the torn end that a crash leaves,
// and would delete the tables and messages after it. So the package keeps, beside the engine's
// files, how far each of them is durable (Positions) and how many messages were acknowledged
// (AcceptedFile), and compares the files with both (CheckJournals). It does not know the keys and
// values of a store.
package integrity

import (
	"hash/crc32"
	"io"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/wal"
)

// CleanName is the file that a clean shutdown writes: name, size and checksum of the manifest.
const CleanName = "clean-shutdown"

// DamagedName is the file with the path of a file that was found damaged during a run. A repair
// removes it.
const DamagedName = "damaged"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// DamagedFile is a file, or a part of one, that cannot be read.
type DamagedFile struct {
	Path string
	// The description of the damage, and its place in the file.
	What string
}

// ReadFile returns the contents of a file.
func ReadFile(fs vfs.FS, path string) ([]byte, error) {
	f, err := fs.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(f)
}

// LogNumber returns the number of a write-ahead log from the name of its file.
func LogNumber(name string) (uint64, bool) {
	number, _, ok := wal.ParseLogFilename(name)
	return uint64(number), ok
}
