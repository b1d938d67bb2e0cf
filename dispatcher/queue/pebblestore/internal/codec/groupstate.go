package codec

import (
	"encoding/binary"
	"math/bits"
)

// GroupState is the durable state of a group without its bits: one value.
type GroupState struct {
	Start     uint64 // The group has the messages after this one.
	Delivered uint64
	Filtered  uint64
	Omitted   uint64
	Buried    uint64
	Discarded uint64
	Passed    uint64 // Messages in the group's part of the log that are for other destinations.
	// Extra counts the messages accepted beyond the group's part of the log: "delete" messages,
	// which count once per lane, and messages of dropped lanes.
	Extra     uint64
	Handovers uint64 // Number of handover records.
	Shared    bool   // The group had two lanes at some time; a group that is not shared has no bits.
	Gaps      GapList
}

// Gap is a part of the log, both ends included, that was appended after all lanes had ended and
// before a lane continued or was opened. Its messages are not for the group.
type Gap struct{ From, To uint64 }

// Encode returns the state and its gaps.
func (g *GroupState) Encode() []byte {
	var v []byte
	shared := g.Omitted << 1
	if g.Shared {
		shared |= 1
	}
	for _, n := range [...]uint64{g.Start, g.Delivered, g.Filtered, g.Buried, g.Discarded, g.Passed, g.Extra, g.Handovers, shared} {
		v = binary.AppendUvarint(v, n)
	}
	for _, p := range g.Gaps {
		v = binary.AppendUvarint(binary.AppendUvarint(v, p.From), p.To)
	}
	return v
}

// Decode decodes what Encode returned.
func (g *GroupState) Decode(v []byte) error {
	d := Decoder{Rest: v}
	for _, n := range [...]*uint64{&g.Start, &g.Delivered, &g.Filtered, &g.Buried, &g.Discarded, &g.Passed, &g.Extra, &g.Handovers} {
		*n = d.Uvarint()
	}
	shared := d.Uvarint()
	g.Shared, g.Omitted = shared&1 != 0, shared>>1
	for len(d.Rest) > 0 {
		g.Gaps = append(g.Gaps, Gap{d.Uvarint(), d.Uvarint()})
	}
	return d.Err()
}

// BlockBits is the number of messages of one block of bits.
const BlockBits = 4096

// Block has a bit for each of BlockBits messages of a group, which is set when the message is final. A method ignores
// in which block a message is.
type Block [BlockBits / 64]uint64

// Encode returns the bits.
func (b *Block) Encode() []byte {
	v := make([]byte, 0, BlockBits/8)
	for _, w := range b {
		v = binary.BigEndian.AppendUint64(v, w)
	}
	return v
}

// Decode decodes what Encode returned.
func (b *Block) Decode(v []byte) error {
	if len(v) != BlockBits/8 {
		return ErrMalformed
	}
	for i := range b {
		b[i] = binary.BigEndian.Uint64(v[8*i:])
	}
	return nil
}

// IsFinal reports whether a message is final.
func (b *Block) IsFinal(seq uint64) bool { return b[seq%BlockBits/64]&(1<<(seq%64)) != 0 }

// MarkFinal makes a message final.
func (b *Block) MarkFinal(seq uint64) { b[seq%BlockBits/64] |= 1 << (seq % 64) }

// NextNotFinal returns the first message from seq on that is not final. found is false if its word
// of bits has none; next is then the first message of the next word.
func (b *Block) NextNotFinal(seq uint64) (next uint64, found bool) {
	if w := ^b[seq%BlockBits/64] >> (seq % 64); w != 0 {
		return seq + uint64(bits.TrailingZeros64(w)), true
	}
	return seq - seq%64 + 64, false
}

// GapList are the gaps of a group, ascending.
type GapList []Gap

// After returns seq, or the first message after the gap that contains seq.
func (g GapList) After(seq uint64) uint64 {
	for _, p := range g {
		if seq >= p.From && seq <= p.To {
			seq = p.To + 1
		}
	}
	return seq
}

// Accepted is the number of messages that the group has got up to a limit.
func (g *GroupState) Accepted(limit uint64) uint64 { return limit - g.Start - g.Passed + g.Extra }

// Settled is the number of messages that the group has ended.
func (g *GroupState) Settled() uint64 {
	return g.Delivered + g.Filtered + g.Omitted + g.Buried + g.Discarded
}
