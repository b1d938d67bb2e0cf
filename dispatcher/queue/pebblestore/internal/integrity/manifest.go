package integrity

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	records "github.com/cockroachdb/pebble/v2/record"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// OldestLog returns the number of the oldest log that the sound part of a manifest needs.
func OldestLog(manifest []byte) (oldest uint64) {
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
		for d := (codec.Decoder{Rest: edit}); !d.Bad; {
			switch d.Uvarint() {
			case comparator:
				d.Bytes()
				continue
			case log:
				oldest = max(oldest, d.Uvarint())
				continue
			case nextFile, lastSequence, previousLog:
				d.Uvarint()
				continue
			}
			break
		}
	}
}

// Fingerprint returns the name, size and checksum of a file.
func Fingerprint(name string, data []byte) string {
	return fmt.Sprintf("%s %d %08x", name, len(data), crc32.Checksum(data, castagnoli))
}

// SoundManifest returns the end of the sound entries. torn is false when a sound entry follows
// a damaged one, which is not the result of a crash.
func SoundManifest(data []byte) (sound int64, torn bool) {
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
