package repair

import (
	"encoding/binary"
	"errors"
	"maps"
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
	if err := w.readGroup(g); err != nil {
		return err
	}
	limit := min(w.heads[g.log].seq, g.last())
	g.Start = min(g.Start, limit)
	pending, err := w.countPending(g, limit)
	if err != nil {
		return err
	}
	w.balance(g, limit, pending)
	g.Handovers = 0
	err = w.scan(codec.Key(codec.PrefixHandover, g.number), func([]byte, []byte) error {
		g.Handovers++
		return nil
	})
	return errors.Join(err, w.set(codec.Key(codec.PrefixGroup, g.number), g.Encode()))
}

// readGroup reads the state of a group. Without a readable one, its counters begin again.
func (w *rebuilder) readGroup(g *group) error {
	v, err := w.value(codec.Key(codec.PrefixGroup, g.number))
	if err == nil && v != nil {
		err = g.Decode(v)
	}
	if err != nil && !errors.Is(err, codec.ErrMalformed) {
		return err
	}
	if err != nil || v == nil {
		w.reportLoss("the ledger of %s: its counters restart at zero", laneName(g.id))
		g.GroupState = codec.GroupState{Start: codec.Never}
		for _, l := range g.lanes {
			g.Start = min(g.Start, l.Start)
		}
	}
	g.Shared = g.Shared || len(g.lanes) > 1
	return nil
}

// last is the last message of the lanes of a group; codec.Never while one has no end.
func (g *group) last() (last uint64) {
	for _, l := range g.lanes {
		if l.End == 0 {
			return codec.Never
		}
		last = max(last, l.End-1)
	}
	return last
}

// countPending counts the messages up to a limit that are pending in a group.
func (w *rebuilder) countPending(g *group, limit uint64) (pending uint64, err error) {
	low := uint64(codec.Never)
	waiting := map[*lane]map[uint64]bool{} // The messages before Next that the lane has not ended.
	for _, l := range g.lanes {
		waiting[l] = map[uint64]bool{}
		maps.Copy(waiting[l], l.open)
		err := w.scan(codec.Key(codec.PrefixRetry, l.number), func(k, _ []byte) error {
			waiting[l][codec.Number(k, 1)] = true
			return nil
		})
		if err != nil {
			return 0, err
		}
		low = min(low, l.Next)
		for seq := range waiting[l] {
			low = min(low, seq)
		}
	}
	var block codec.Block
	read := uint64(codec.Never)
	for seq := max(low, g.Start+1); seq <= limit; seq++ {
		if n := seq / codec.BlockBits; n != read {
			v, err := w.value(codec.Key(codec.PrefixBits, g.number, n))
			if err != nil {
				return 0, err
			}
			if read = n; block.Decode(v) != nil {
				block = codec.Block{}
			}
		}
		if g.Gaps.After(seq) != seq {
			continue
		}
		final := g.Shared && block.IsFinal(seq)
		for _, l := range g.lanes {
			isUnread := seq >= l.Next && seq > l.Start && (l.End == 0 || seq < l.End)
			switch {
			case !final && (waiting[l][seq] || isUnread):
				pending++
			case final && waiting[l][seq]:
				var rec codec.Record
				if v, err := w.value(codec.Key(codec.PrefixMessage, g.log, seq)); err != nil {
					return 0, err
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
	return pending, nil
}

// balance changes the counters of a group so that its ledger balances.
func (w *rebuilder) balance(g *group, limit, pending uint64) {
	g.Passed = min(g.Passed, limit-g.Start)
	if accepted := g.Accepted(limit); accepted < pending {
		g.Extra += pending - accepted
	}
	settled := g.Accepted(limit) - pending
	if before := g.Settled(); settled > before {
		g.Discarded += settled - before
		w.reportLoss("the outcome of %d messages of %s", settled-before, laneName(g.id))
		return
	}
	again := g.Settled() - settled
	for _, count := range []*uint64{&g.Delivered, &g.Buried, &g.Filtered, &g.Omitted, &g.Discarded} {
		part := min(*count, again)
		*count -= part
		again -= part
	}
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
