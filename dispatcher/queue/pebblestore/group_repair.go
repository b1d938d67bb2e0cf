package pebblestore

import (
	"encoding/binary"
	"errors"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// repairGroups makes the ledger of each group agree with the pending messages of its lanes.
// Lost bits cause additional deliveries, but no message is lost with them: every pending
// message is in some lane.
func (w *rebuilder) repairGroups() error {
	groups := map[queue.LaneID]*group{}
	err := w.scan(keyGroups, func(k, v []byte) error {
		d := decoder{b: v}
		if id := d.laneName(); !d.bad && len(k) == 10 {
			w.noteNumber(binary.BigEndian.Uint64(k[2:]))
			groups[id] = newGroup(id, binary.BigEndian.Uint64(k[2:]), nil, nil)
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
			g = newGroup(l.id, w.highest, nil, nil)
			groups[g.id] = g
			name := binary.BigEndian.AppendUint64(append([]byte(nil), keyGroups...), g.number)
			if err := w.set(name, appendLaneName(nil, g.id)); err != nil {
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
	v, err := w.value(key(prefixGroup, g.number))
	if err == nil && v != nil {
		err = g.decode(v)
	}
	if err != nil || v == nil {
		if err != nil && !errors.Is(err, errMalformed) {
			return err
		}
		w.reportLoss("the ledger of %s: its counters restart at zero", laneName(g.id))
		g.groupState = groupState{start: never}
		for _, l := range g.lanes {
			g.start = min(g.start, l.start)
		}
	}
	g.shared = g.shared || len(g.lanes) > 1
	head := w.heads[g.log.number].seq
	retries := map[*lane]map[uint64]bool{}
	low, end := uint64(never), uint64(0)
	for _, l := range g.lanes {
		retries[l] = map[uint64]bool{}
		err := w.scan(key(prefixRetry, l.number), func(k, _ []byte) error {
			retries[l][number(k, 1)] = true
			return nil
		})
		if err != nil {
			return err
		}
		low = min(low, l.next)
		for seq := range l.open {
			low = min(low, seq)
		}
		for seq := range retries[l] {
			low = min(low, seq)
		}
		if end = max(end, l.end-min(l.end, 1)); l.end == 0 {
			end = never
		}
	}
	limit := min(head, end)
	g.start = min(g.start, limit)
	var bits []byte
	block := uint64(never)
	pending := uint64(0)
	for seq := max(low, g.start+1); seq <= limit; seq++ {
		if seq/blockBits != block {
			block = seq / blockBits
			if bits, err = w.value(key(prefixBits, g.number, block)); err != nil {
				return err
			}
		}
		in, word := seq%blockBits, 8*(seq%blockBits/64)
		final := g.shared && len(bits) == blockBits/8 && binary.BigEndian.Uint64(bits[word:])&(1<<(in%64)) != 0
		if g.afterGap(seq) != seq {
			continue
		}
		for _, l := range g.lanes {
			_, open := l.open[seq]
			unread := seq >= l.next && seq > l.start && (l.end == 0 || seq < l.end)
			switch {
			case !final && (open || unread || retries[l][seq]):
				pending++
			case final && (open || retries[l][seq]):
				var rec record
				if v, err := w.value(key(prefixMessage, g.log.number, seq)); err != nil {
					return err
				} else if rec.decode(v) == nil && rec.code == codeDelete {
					pending++ // "delete" messages are pending per lane.
				}
				continue
			default:
				continue
			}
			break
		}
	}
	g.passed = min(g.passed, limit-g.start)
	settled := int64(limit-g.start-g.passed+g.extra) - int64(pending)
	if settled < 0 {
		g.extra += uint64(-settled)
		settled = 0
	}
	if diff := settled - int64(g.settled()); diff > 0 {
		g.discarded += uint64(diff)
		w.reportLoss("the outcome of %d messages of %s", diff, laneName(g.id))
	} else {
		again := uint64(-diff)
		for _, count := range []*uint64{&g.delivered, &g.buried, &g.filtered, &g.discarded} {
			part := min(*count, again)
			*count -= part
			again -= part
		}
	}
	g.handovers = 0
	err = w.scan(key(prefixHandover, g.number), func([]byte, []byte) error {
		g.handovers++
		return nil
	})
	return errors.Join(err, w.set(key(prefixGroup, g.number), g.encode()))
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
