package repair

import (
	"encoding/binary"
	"errors"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// repairGroups makes the ledger of each group agree with the pending messages of its lanes.
// Lost bits cause additional deliveries, but no message is lost with them: every pending
// message is in some lane.
func (w *rebuilder) repairGroups() error {
	groups := map[queue.LaneID]*group{}
	err := w.scan(codec.KeyGroups, func(k, v []byte) error {
		d := codec.Decoder{Rest: v}
		if id := d.LaneName(); !d.Bad && len(k) == 10 {
			w.noteNumber(binary.BigEndian.Uint64(k[2:]))
			groups[id] = &group{id: id, number: binary.BigEndian.Uint64(k[2:])}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, l := range w.lanes {
		if !l.id.Any {
			continue
		}
		g := groups[l.id.Group()]
		if g == nil {
			w.noteNumber(w.highest + 1)
			g = &group{id: l.id.Group(), number: w.highest}
			groups[g.id] = g
			name := binary.BigEndian.AppendUint64(append([]byte(nil), codec.KeyGroups...), g.number)
			if err := w.set(name, codec.AppendLaneName(nil, g.id)); err != nil {
				return err
			}
		}
		g.log = l.log
		g.lanes = append(g.lanes, l)
	}
	for _, g := range groups {
		if len(g.lanes) > 0 { // The next start deletes the others.
			if err := w.repairGroup(g); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *rebuilder) repairGroup(g *group) error {
	v, err := w.value(codec.Key(codec.PrefixGroup, g.number))
	if err == nil && v != nil {
		err = g.Decode(v)
	}
	if err != nil || v == nil {
		if err != nil && !errors.Is(err, codec.ErrMalformed) {
			return err
		}
		w.reportLoss("the ledger of %s: its counters restart at zero", laneName(g.id))
		g.GroupState = codec.GroupState{Start: codec.Never}
		for _, l := range g.lanes {
			g.Start = min(g.Start, l.Start)
		}
	}
	g.Shared = g.Shared || len(g.lanes) > 1
	head := w.heads[g.log].seq
	retries := map[*lane]map[uint64]bool{}
	low, end := uint64(codec.Never), uint64(0)
	for _, l := range g.lanes {
		retries[l] = map[uint64]bool{}
		err := w.scan(codec.Key(codec.PrefixRetry, l.number), func(k, _ []byte) error {
			retries[l][codec.Number(k, 1)] = true
			return nil
		})
		if err != nil {
			return err
		}
		low = min(low, l.Next)
		for seq := range l.open {
			low = min(low, seq)
		}
		for seq := range retries[l] {
			low = min(low, seq)
		}
		if end = max(end, l.End-min(l.End, 1)); l.End == 0 {
			end = codec.Never
		}
	}
	limit := min(head, end)
	g.Start = min(g.Start, limit)
	var bits []byte
	block := uint64(codec.Never)
	pending := uint64(0)
	for seq := max(low, g.Start+1); seq <= limit; seq++ {
		if seq/codec.BlockBits != block {
			block = seq / codec.BlockBits
			if bits, err = w.value(codec.Key(codec.PrefixBits, g.number, block)); err != nil {
				return err
			}
		}
		in, word := seq%codec.BlockBits, 8*(seq%codec.BlockBits/64)
		final := g.Shared && len(bits) == codec.BlockBits/8 && binary.BigEndian.Uint64(bits[word:])&(1<<(in%64)) != 0
		if g.Gaps.After(seq) != seq {
			continue
		}
		for _, l := range g.lanes {
			open := l.open[seq]
			unread := seq >= l.Next && seq > l.Start && (l.End == 0 || seq < l.End)
			switch {
			case !final && (open || unread || retries[l][seq]):
				pending++
			case final && (open || retries[l][seq]):
				var rec codec.Record
				if v, err := w.value(codec.Key(codec.PrefixMessage, g.log, seq)); err != nil {
					return err
				} else if rec.Decode(v) == nil && rec.Code == codec.CodeDelete {
					pending++ // "delete" messages are pending per lane.
				}
				continue
			default:
				continue
			}
			break
		}
	}
	g.Passed = min(g.Passed, limit-g.Start)
	settled := int64(limit-g.Start-g.Passed+g.Extra) - int64(pending)
	if settled < 0 {
		g.Extra += uint64(-settled)
		settled = 0
	}
	if diff := settled - int64(g.Settled()); diff > 0 {
		g.Discarded += uint64(diff)
		w.reportLoss("the outcome of %d messages of %s", diff, laneName(g.id))
	} else {
		again := uint64(-diff)
		for _, count := range []*uint64{&g.Delivered, &g.Buried, &g.Filtered, &g.Discarded} {
			part := min(*count, again)
			*count -= part
			again -= part
		}
	}
	g.Handovers = 0
	err = w.scan(codec.Key(codec.PrefixHandover, g.number), func([]byte, []byte) error {
		g.Handovers++
		return nil
	})
	return errors.Join(err, w.set(codec.Key(codec.PrefixGroup, g.number), g.Encode()))
}

// value returns a copy of the current value of a key, nil when there is none.
func (w *rebuilder) value(k []byte) ([]byte, error) {
	if err := w.flush(); err != nil {
		return nil, err
	}
	v, closer, err := w.db.Get(k)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	v = slices.Clone(v)
	return v, closer.Close()
}
