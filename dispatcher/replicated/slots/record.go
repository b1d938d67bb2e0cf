package slots

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// kind is the kind of a record.
type kind byte

const (
	// kindBatches has the whole batches first to last.
	kindBatches kind = 1 + iota
	// kindPart has the next part of batch first, kindLastPart its last part. Parts without an end
	// are void when a claim follows.
	kindPart
	kindLastPart
	// kindClaim starts a session; kindReleased ends it.
	kindClaim
	kindReleased
	// kindSuspect is a question to the owner, written by another pod; see the design of leases.
	kindSuspect
	// kindHeartbeat extends the lease of an idle owner.
	kindHeartbeat
	// kindSnapshot names the manifest of a complete snapshot.
	kindSnapshot
)

func (k kind) String() string {
	names := [...]string{kindBatches: "batches", kindPart: "part", kindLastPart: "last part", kindClaim: "claim", kindReleased: "released",
		kindSuspect: "suspect", kindHeartbeat: "heartbeat", kindSnapshot: "snapshot"}
	if k == 0 || int(k) >= len(names) {
		return fmt.Sprintf("kind %d", byte(k))
	}
	return names[k]
}

// header begins every record.
type header struct {
	kind    kind
	session pebblestore.Session
	// epoch is the number of the session's claim, from 1.
	epoch uint64
	// number counts the records of the session; it identifies a repeated record.
	number uint64
	// last is the last batch of the log that is complete with this record. first is the first
	// batch in the record; last + 1 for a record without one.
	first, last uint64
	// snapshot is the sequence of the last snapshot record before this one; 0 for none.
	snapshot uint64
}

// A record is format(1) kind(1) checksum(4) session(16) epoch(8) number(8) first(8) last(8)
// snapshot(8), then for whole batches their lengths and bytes, for a part its bytes, and for a
// snapshot the reference to its manifest. The rest of other records is ignored. The checksum covers all but itself.
//
// A record of a higher format, or with a batch that this release does not read, is not damage. So all
// formats have their number and the checksum in the same places and at least headerBytes, and a new kind
// is a new format. How a format is raised is described at codec.Format of package pebblestore.
const (
	recordFormat  = 1
	checksumAt    = 2
	checksumBytes = 4
	headerBytes   = 2 + checksumBytes + 16 + 5*8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal writes the header into the first headerBytes of a record.
func (h header) seal(record []byte) {
	record[0], record[1] = recordFormat, byte(h.kind)
	b := record[checksumAt+checksumBytes:]
	b = b[copy(b, h.session[:]):]
	for i, n := range [...]uint64{h.epoch, h.number, h.first, h.last, h.snapshot} {
		binary.BigEndian.PutUint64(b[8*i:], n)
	}
	binary.BigEndian.PutUint32(record[checksumAt:], checksum(record))
}

func checksum(record []byte) uint32 {
	return crc32.Update(crc32.Checksum(record[:checksumAt], castagnoli), castagnoli, record[checksumAt+checksumBytes:])
}

// snapshotAt returns the sequence of the last snapshot record up to this one, which is at a sequence.
func (h header) snapshotAt(sequence uint64) uint64 {
	if h.kind == kindSnapshot {
		return sequence
	}
	return h.snapshot
}

// id is the Msg-Id of the record.
func (h header) id() string { return fmt.Sprintf("%x-%d", h.session, h.number) }

// decodeRecord checks a record. The payload refers to the record.
func decodeRecord(record []byte) (h header, payload []byte, err error) {
	switch {
	case len(record) < headerBytes:
		return h, nil, fmt.Errorf("the record has %d bytes; its header has %d", len(record), headerBytes)
	case binary.BigEndian.Uint32(record[checksumAt:]) != checksum(record):
		return h, nil, errors.New("the checksum of the record is wrong")
	case record[0] == 0:
		return h, nil, errors.New("the record has format 0")
	}
	if err := pebblestore.CheckFormat("log", "record", uint64(record[0]), recordFormat); err != nil {
		return h, nil, err
	}
	h.kind = kind(record[1])
	b := record[checksumAt+checksumBytes:]
	b = b[copy(h.session[:], b):]
	for i, n := range [...]*uint64{&h.epoch, &h.number, &h.first, &h.last, &h.snapshot} {
		*n = binary.BigEndian.Uint64(b[8*i:])
	}
	return h, record[headerBytes:], nil
}

// appendBatch appends a batch to the payload of a record of whole batches.
func appendBatch(record, batch []byte) []byte {
	return append(binary.AppendUvarint(record, uint64(len(batch))), batch...)
}

// cutBatch removes the first batch from a payload. The batch refers to the payload.
func cutBatch(payload []byte) (batch, rest []byte, err error) {
	n, used := binary.Uvarint(payload)
	if used <= 0 || n > uint64(len(payload)-used) {
		return nil, nil, errors.New("the length of a batch is wrong")
	}
	payload = payload[used:]
	return payload[:n:n], payload[n:], nil
}
