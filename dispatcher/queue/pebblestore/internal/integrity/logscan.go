package integrity

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
)

// The engine's write-ahead log consists of blocks of 32 KB, and a block of chunks:
//
//	checksum(4) length(2) type(1) log number(4) [synced offset(8)] payload
//
// A chunk does not cross the end of its block. A record (one batch) has one or more chunks, and
// the rest of a block that is too short for a chunk is zero. A closed log ends with an end
// mark: a header without checksum and payload and with the number of the next log. A log file
// may be reused; its old contents after the end have an older number.
//
// The engine's own reader stops at the first damage of the newest log and treats it as a torn
// end, unless a later chunk has a synced offset beyond it. The engine computes too low offsets
// for records that cross a block, so its reader misses most damage.
const (
	walBlock      = 32 << 10
	walHeader     = 11 // Of a chunk without a synced offset.
	walSyncHeader = 19
)

// LogRecord is a sound record of a log.
type LogRecord struct {
	At, end int64 // Its bytes in the file.
	// Gap is the start of the damage directly before the record; -1 without damage.
	Gap int64
	// Data are the first bytes of the record, bounded by the scan. They are valid only during
	// the call.
	Data []byte
}

// logEnd describes the end of a log.
type logEnd struct {
	// sound is the number of bytes before the first damage or the end.
	sound int64
	// closed: the end mark is before sound.
	closed bool
}

// scanLog reads a log. It calls record for each sound record, in order, and first for the
// payload of each sound first chunk, even if the rest of its record is damaged. After damage it
// continues with the next chunk by the length in the damaged chunk's header, or with the next
// block. It never searches for a chunk within a payload, because payloads contain data of
// clients.
func scanLog(r io.Reader, number uint64, keep int, first func(payload []byte), record func(LogRecord) error) (end logEnd, err error) {
	block := make([]byte, walBlock)
	rec := LogRecord{At: -1, Gap: -1} // The record being read, if at >= 0.
	gap, damaged := int64(-1), false
	for base := int64(0); ; base += walBlock {
		n, err := io.ReadFull(r, block)
		if errors.Is(err, io.EOF) {
			return end, nil
		}
		if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			return end, err
		}
		for p := 0; p < n; {
			rest := block[p:n]
			if n == walBlock && len(rest) < walSyncHeader && len(bytes.Trim(rest, "\x00")) == 0 {
				p = n
				if !damaged {
					end.sound = base + int64(p)
				}
				continue
			}
			c := parseChunk(rest, number)
			begins := c.position == fullChunk || c.position == firstChunk
			switch {
			case c.endMark:
				if end.closed = !damaged && rec.At < 0; end.closed {
					end.sound = base + int64(p) + walHeader
				}
				return end, nil
			case c.sound && begins == (rec.At < 0):
			case c.sound && gap >= 0: // The rest of a record with a damaged beginning.
				p += c.size
				continue
			default:
				if gap < 0 {
					gap = base + int64(p)
				}
				if rec.At >= 0 {
					gap = rec.At
				}
				damaged, rec.At = true, -1
				switch {
				case c.sound && begins: // The next record; the rest of this one is missing.
				case c.size > 0:
					p += c.size
				default:
					p = n
				}
				continue
			}
			payload := rest[c.header:c.size]
			if begins {
				rec = LogRecord{At: base + int64(p), Gap: gap, Data: rec.Data[:0]}
				gap = -1
				if first != nil {
					first(payload)
				}
			}
			rec.Data = append(rec.Data, payload[:min(len(payload), max(keep-len(rec.Data), 0))]...)
			p += c.size
			if !damaged {
				end.sound = base + int64(p)
			}
			if c.position == fullChunk || c.position == lastChunk {
				rec.end = base + int64(p)
				if err := record(rec); err != nil {
					return end, err
				}
				rec.At = -1
			}
		}
	}
}

const (
	fullChunk = iota + 1
	firstChunk
	middleChunk
	lastChunk
)

// chunk is a decoded chunk header.
type chunk struct {
	position     int
	header, size int // size is 0 when no chunk of this log has the header.
	sound        bool
	endMark      bool
}

func parseChunk(b []byte, number uint64) (c chunk) {
	if len(b) < walHeader {
		return c
	}
	length, kind := int(binary.LittleEndian.Uint16(b[4:])), int(b[6])
	logNumber, sum := binary.LittleEndian.Uint32(b[7:]), binary.LittleEndian.Uint32(b)
	switch {
	case sum == 0 && length == 0 && kind == 5 && logNumber == uint32(number)+1:
		c.endMark = true
		return c
	case kind >= 5 && kind <= 8:
		c.position, c.header = kind-4, walHeader
	case kind >= 9 && kind <= 12:
		c.position, c.header = kind-8, walSyncHeader
	default:
		return c
	}
	if logNumber != uint32(number) || c.header+length > len(b) {
		return c
	}
	c.size = c.header + length
	c.sound = maskedSum(b[6:c.size]) == sum
	return c
}

// maskedSum is the checksum in the engine's encoding.
func maskedSum(b []byte) uint32 {
	sum := crc32.Checksum(b, castagnoli)
	return (sum>>15 | sum<<17) + 0xa282ead8
}
