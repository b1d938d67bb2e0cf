package pebblestore

import (
	"encoding/binary"
	"encoding/hex"
	"math"
)

// The key space. Numbers are big endian, so that keys sort by them.
//
//	b group(8) block(8)                   the bits of a group's messages
//	c name                                what the layer above remembers
//	d start(8) hash(16)                   an accepted messageId -> milliseconds since start(4)
//	e log(8) seq(8)                       a message
//	g log(8)                              the ledger of a Source's dropped lanes
//	h log(8)                              the log's head: seq(8), bytes(8)
//	k group(8)                            a group's state
//	l lane(8)                             a lane's state
//	mf                                    the version of this format
//	mg group(8)                           the group's names
//	ml lane(8)                            the lane's names
//	mn                                    the last number given to a log, a group or a lane
//	ms source                             the number of a Source's log(8)
//	q lane(8) seq(8)                      a retry -> due, attempt, failure
//	r lane(8) due(8) seq(8)               the same retries by due time -> attempt
//	t log(8)                              up to which message the log is freed: seq(8); only a repair reads it
//	w group(8) seq(8)                     a message that a lane gave up while another has it -> attempts, failure
//	x len(2) destination time(8) lane(8) seq(8)   a dead letter
//	y destination                         how many dead letters it has, their bytes, and the ledger of its dropped lanes
const (
	prefixBits       = 'b'
	prefixMemory     = 'c'
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
	prefixGivenUp    = 'w'
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

// after is the first key behind all keys that begin with prefix and n. A number
// is never the greatest one.
func after(prefix byte, n uint64) []byte { return key(prefix, n+1) }

// number reads the i-th number of a key that has a one-byte prefix.
func number(key []byte, i int) uint64 { return binary.BigEndian.Uint64(key[1+8*i:]) }

// never is the due time of no retry at all.
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

// deadLetterID is what a caller sees of a dead letter's key.
func deadLetterID(key []byte) string { return hex.EncodeToString(key[len(key)-24:]) }

// parseDeadLetterID is its inverse.
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

// endOf is the first key behind all keys that begin with prefix.
func endOf(prefix []byte) []byte {
	end := append([]byte(nil), prefix...)
	for i := len(end) - 1; i >= 0; i-- {
		if end[i]++; end[i] != 0 {
			return end[:i+1]
		}
	}
	return nil
}
