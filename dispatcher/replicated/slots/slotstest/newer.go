package slotstest

import (
	"encoding/binary"
	"hash/crc32"
	"slices"
)

// Newer returns a record in the format of a newer release. The places of the format and of the checksum, in
// bytes 2 to 6, are the same in all formats.
func Newer(record []byte) []byte {
	newer := slices.Clone(record)
	newer[0]++
	table := crc32.MakeTable(crc32.Castagnoli)
	binary.BigEndian.PutUint32(newer[2:], crc32.Update(crc32.Checksum(newer[:2], table), table, newer[6:]))
	return newer
}

// IsReleased reports whether a record ends a session in order.
func IsReleased(record []byte) bool {
	const kindAt, released = 1, 5
	return record[kindAt] == released
}
