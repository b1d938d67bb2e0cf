package codec

import (
	"encoding/binary"
	"encoding/hex"
	"math"

	"github.com/cockroachdb/pebble/v2"
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
//	mr                                    the last batch of the replicated log: number(8), session(16)
//	ms source                             the number of a Source's log(8)
//	q lane(8) seq(8)                      a retry -> due, attempt, failure
//	r lane(8) due(8) seq(8)               the same retries by due time -> attempt
//	s lane(8) failed(8) seq(8)            a retry whose receiver requested a wait -> milliseconds of its backoff; may be outdated
//	t log(8)                              the last trimmed message of the log: seq(8); only a repair reads it
//	w group(8) seq(8)                     a handover record -> attempts, failure
//	x len(2) destination time(8) lane(8) seq(8)   a dead letter
//	y destination                         its number of dead letters, their bytes, and the ledger of its dropped lanes
const (
	PrefixBits       = 'b'
	PrefixCallerMeta = 'c'
	PrefixDuplicate  = 'd'
	PrefixMessage    = 'e'
	PrefixDropped    = 'g'
	PrefixHead       = 'h'
	PrefixGroup      = 'k'
	PrefixLane       = 'l'
	prefixMeta       = 'm'
	PrefixRetry      = 'q'
	PrefixDue        = 'r'
	PrefixWait       = 's'
	PrefixFreed      = 't'
	PrefixHandover   = 'w'
	PrefixDeadLetter = 'x'
	PrefixDest       = 'y'
)

// Keys of single values: the version of the format, the last number that was assigned, the position
// in the replicated log, and the lists of groups, lanes and Sources.
var (
	KeyFormat      = []byte("mf")
	KeyLastNumber  = []byte("mn")
	KeyLogPosition = []byte("mr")
	KeyGroups      = []byte("mg")
	KeyLanes       = []byte("ml")
	KeySources     = []byte("ms")
)

// MessageKeyLen is the length of the key of a message.
const MessageKeyLen = 17

// AppendKey appends a prefix and numbers of eight bytes, which sort as the numbers do.
func AppendKey(dst []byte, prefix byte, numbers ...uint64) []byte {
	dst = append(dst, prefix)
	for _, n := range numbers {
		dst = binary.BigEndian.AppendUint64(dst, n)
	}
	return dst
}

// Key returns the key of a prefix and numbers.
func Key(prefix byte, numbers ...uint64) []byte {
	return AppendKey(make([]byte, 0, 25), prefix, numbers...)
}

// After returns the first key behind all keys that begin with prefix and n. n is less than the
// maximum.
func After(prefix byte, n uint64) []byte { return Key(prefix, n+1) }

// Number returns the i-th number of a key with a one-byte prefix.
func Number(key []byte, i int) uint64 { return binary.BigEndian.Uint64(key[1+8*i:]) }

// Never is the due time of a lane without retries.
const Never = math.MaxInt64

// DeadLetterPrefix returns the prefix of the keys of a destination's dead letters.
func DeadLetterPrefix(destination string) []byte {
	b := make([]byte, 0, 3+len(destination)+24)
	b = append(b, PrefixDeadLetter)
	b = binary.BigEndian.AppendUint16(b, uint16(len(destination)))
	return append(b, destination...)
}

// DeadLetterKey returns the key of a dead letter; keys sort by time.
func DeadLetterKey(destination string, millis int64, lane, seq uint64) []byte {
	b := DeadLetterPrefix(destination)
	b = binary.BigEndian.AppendUint64(b, uint64(max(millis, 0)))
	b = binary.BigEndian.AppendUint64(b, lane)
	return binary.BigEndian.AppendUint64(b, seq)
}

// DeadLetterID returns the part of a dead letter's key that callers see.
func DeadLetterID(key []byte) string { return hex.EncodeToString(key[len(key)-24:]) }

// ParseDeadLetterID is the inverse of deadLetterID.
func ParseDeadLetterID(destination, id string) ([]byte, bool) {
	suffix, err := hex.DecodeString(id)
	if err != nil || len(suffix) != 24 {
		return nil, false
	}
	return append(DeadLetterPrefix(destination), suffix...), true
}

// DeadLetterMillis returns the time of a dead letter's key in Unix milliseconds.
func DeadLetterMillis(key []byte) int64 {
	return int64(binary.BigEndian.Uint64(key[len(key)-24:]))
}

// DestinationKey returns the key of a destination's counts.
func DestinationKey(destination string) []byte {
	return append([]byte{PrefixDest}, destination...)
}

// EndOf returns the first key behind all keys that begin with prefix.
func EndOf(prefix []byte) []byte {
	end := append([]byte(nil), prefix...)
	for i := len(end) - 1; i >= 0; i-- {
		if end[i]++; end[i] != 0 {
			return end[:i+1]
		}
	}
	return nil
}

// Format is the version of the key space and the values. Open rejects a store with a higher version.
const Format = 1

// PebbleFormat is the format major version of the files that a release writes; it reads up to
// pebble.FormatNewest. An update of the dependency does not raise it.
const PebbleFormat = pebble.FormatValueSeparation
