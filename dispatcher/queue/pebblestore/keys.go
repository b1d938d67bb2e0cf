package pebblestore

import (
	"encoding/binary"
	"encoding/hex"
	"math"
)

// The key space. Numbers are big endian, so that the keys are ordered by them.
//
//	b group(8) block(8)                   the bits of a group's messages
//	c name                                metadata of the caller (PutMeta)
//	d start(8) hash(16)                   an accepted messageId -> milliseconds since start(4)
//	e log(8) seq(8)                       a message
//	g log(8)                              the ledger of a Source's dropped lanes
//	h log(8)                              the log's head: seq(8), bytes(8)
//	k group(8)                            a group's state
//	l lane(8)                             a lane's state
//	mf                                    the version of this format
//	mg group(8)                           the group's names
//	ml lane(8)                            the lane's names
//	mn                                    the last number assigned to a log, a group or a lane
//	ms source                             the number of a Source's log(8)
//	q lane(8) seq(8)                      a retry -> due, attempt, failure
//	r lane(8) due(8) seq(8)               the same retries by due time -> attempt
//	t log(8)                              the last trimmed message of the log: seq(8); only a repair reads it
//	w group(8) seq(8)                     a handover record -> attempts, failure
//	x len(2) destination time(8) lane(8) seq(8)   a dead letter
//	y destination                         its number of dead letters, their bytes, and the ledger of its dropped lanes
const (
	prefixBits       = 'b'
	prefixCallerMeta = 'c'
	prefixDuplicate  = 'd'
	prefixMessage    = 'e'
	prefixDropped    = 'g'
	prefixHead       = 'h'
	prefixGroup      = 'k'
	prefixLane       = 'l'
	prefixMeta       = 'm'
	prefixRetry      = 'q'
	prefixDue        = 'r'
	prefixFreed      = 't'
	prefixHandover   = 'w'
	prefixDeadLetter = 'x'
	prefixDest       = 'y'
)

var (
	keyFormat     = []byte("mf")
	keyLastNumber = []byte("mn")
	keyGroups     = []byte("mg")
	keyLanes      = []byte("ml")
	keySources    = []byte("ms")
)

const messageKeyLen = 17

func appendKey(dst []byte, prefix byte, numbers ...uint64) []byte {
	dst = append(dst, prefix)
	for _, n := range numbers {
		dst = binary.BigEndian.AppendUint64(dst, n)
	}
	return dst
}

func key(prefix byte, numbers ...uint64) []byte {
	return appendKey(make([]byte, 0, 25), prefix, numbers...)
}

// after returns the first key behind all keys that begin with prefix and n. n is less than the
// maximum.
func after(prefix byte, n uint64) []byte { return key(prefix, n+1) }

// number returns the i-th number of a key with a one-byte prefix.
func number(key []byte, i int) uint64 { return binary.BigEndian.Uint64(key[1+8*i:]) }

// never is the due time of a lane without retries.
const never = math.MaxInt64

func deadLetterPrefix(destination string) []byte {
	b := make([]byte, 0, 3+len(destination)+24)
	b = append(b, prefixDeadLetter)
	b = binary.BigEndian.AppendUint16(b, uint16(len(destination)))
	return append(b, destination...)
}

func deadLetterKey(destination string, millis int64, lane, seq uint64) []byte {
	b := deadLetterPrefix(destination)
	b = binary.BigEndian.AppendUint64(b, uint64(max(millis, 0)))
	b = binary.BigEndian.AppendUint64(b, lane)
	return binary.BigEndian.AppendUint64(b, seq)
}

// deadLetterID returns the part of a dead letter's key that callers see.
func deadLetterID(key []byte) string { return hex.EncodeToString(key[len(key)-24:]) }

// parseDeadLetterID is the inverse of deadLetterID.
func parseDeadLetterID(destination, id string) ([]byte, bool) {
	suffix, err := hex.DecodeString(id)
	if err != nil || len(suffix) != 24 {
		return nil, false
	}
	return append(deadLetterPrefix(destination), suffix...), true
}

func deadLetterMillis(key []byte) int64 {
	return int64(binary.BigEndian.Uint64(key[len(key)-24:]))
}

func destinationKey(destination string) []byte {
	return append([]byte{prefixDest}, destination...)
}

// endOf returns the first key behind all keys that begin with prefix.
func endOf(prefix []byte) []byte {
	end := append([]byte(nil), prefix...)
	for i := len(end) - 1; i >= 0; i-- {
		if end[i]++; end[i] != 0 {
			return end[:i+1]
		}
	}
	return nil
}
