package redelivery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Origin is a store whose content is moved; pebblestore.Store.
type Origin interface {
	queue.Store
	// Destinations lists the destinations with lanes, dead letters or a ledger.
	Destinations() []string
	// Pending calls fn for the messages of a Source that lanes still have to deliver, in their order, behind a
	// position, until fn returns false. to are these lanes, or groups by their IDs. The message is valid during the
	// call. A damaged one has no ID and no Type, and its body is the reason.
	Pending(ctx context.Context, source string, after uint64, fn func(seq uint64, m queue.Message, to []queue.LaneID) bool) error
}

// Target is the store that gets the content; pebblestore.Store.
type Target interface {
	queue.Store
	// AddDeadLetters stores dead letters of a destination, durably, unless they are stored already.
	AddDeadLetters(destination string, letters []queue.DeadLetter) error
}

// Moved counts what Move has moved.
type Moved struct{ Messages, DeadLetters int64 }

const (
	// movedPrefix is the prefix of the Origin's records of progress, by Source.
	movedPrefix = "moved/"
	// moveMessages and moveBytes bound the messages in memory.
	moveMessages = 256
	moveBytes    = 1 << 20
	// moveWait is how long Move waits for a target that is full or does not answer, and movePause the time between
	// two tries.
	moveWait  = time.Minute
	movePause = time.Second
)

// ErrMoving reports that a store was moved in part.
var ErrMoving = errors.New("posthorn log import --add did not end for this data directory, and some of its messages can be in the log already; call it again")

// CheckMoved returns ErrMoving if a Move of the store began and did not end: the moved messages would be delivered
// again.
func CheckMoved(store queue.Meta) error {
	records, err := store.AllMeta()
	if err != nil {
		return err
	}
	for name := range records {
		if strings.HasPrefix(name, movedPrefix) {
			return ErrMoving
		}
	}
	return nil
}

// Move moves the pending messages and the dead letters of the selected namespaces from one store to another. Nothing
// may use the stores. The target delivers a message only to the lanes that still have to deliver it in the origin. A
// message of a group that no lane delivered goes to the group; one that a lane delivered has no further attempts.
// The messages are new ones of the target: their retry windows begin again, and its ledgers count them. The origin
// counts them as discarded. A damaged message becomes a dead letter of the target.
//
// Move can be called again after an error or a crash, with the same id of the target: at most 256 messages are then
// in the target twice. Until it has ended, CheckMoved fails for the origin.
func Move(ctx context.Context, from Origin, to Target, id string, selects func(namespace string) bool) (moved Moved, err error) {
	selected := func(name string) bool {
		namespace, _, _ := strings.Cut(name, "/")
		return selects(namespace)
	}
	m := move{from, to, id, &moved}
	lanes := map[string][]queue.LaneID{}
	for _, l := range from.Lanes() {
		if selected(l.Source) {
			lanes[l.Source] = append(lanes[l.Source], l)
		}
	}
	progress, err := m.begin(lanes, selected)
	if err != nil {
		return moved, err
	}
	for _, source := range slices.Sorted(maps.Keys(progress)) {
		if err := m.source(ctx, source, lanes[source], progress[source]); err != nil {
			return moved, fmt.Errorf("move the messages of Source %s: %w", source, err)
		}
	}
	destinations := from.Destinations()
	slices.Sort(destinations)
	for _, destination := range destinations {
		if selected(destination) {
			if err := m.deadLetters(ctx, destination); err != nil {
				return moved, fmt.Errorf("move the dead letters of %s: %w", destination, err)
			}
		}
	}
	for source := range progress {
		if err := m.record(source, nil); err != nil {
			return moved, err
		}
	}
	return moved, nil
}

type move struct {
	from  Origin
	to    Target
	id    string
	moved *Moved
}

// moveProgress is the record of the last moved message of a Source.
type moveProgress struct {
	// Target is the id of the target.
	Target string `json:"target"`
	After  uint64 `json:"after"`
}

// begin returns the progress of each selected Source, and records that the move has begun.
func (m move) begin(lanes map[string][]queue.LaneID, selected func(string) bool) (map[string]moveProgress, error) {
	records, err := m.from.AllMeta()
	if err != nil {
		return nil, err
	}
	all := map[string]moveProgress{}
	for name, record := range records {
		source, ok := strings.CutPrefix(name, movedPrefix)
		if !ok || !selected(source) {
			continue
		}
		var at moveProgress
		if err := json.Unmarshal(record, &at); err != nil {
			return nil, fmt.Errorf("read the progress of the last call for Source %s: %w", source, err)
		}
		if at.Target != m.id {
			return nil, fmt.Errorf("an earlier call moved a part of the messages of Source %s to another log or slot; use that one, or restore the data directory from its backup", source)
		}
		all[source] = at
	}
	for source := range lanes {
		if _, begun := all[source]; begun {
			continue
		}
		at := moveProgress{Target: m.id}
		if err := m.record(source, &at); err != nil {
			return nil, err
		}
		all[source] = at
	}
	return all, nil
}

// source moves the messages of a Source, and drops its lanes.
func (m move) source(ctx context.Context, source string, lanes []queue.LaneID, at moveProgress) error {
	only := map[queue.LaneID]string{}
	for more := true; more; {
		var page []pending
		messages, size := 0, 0
		more = false
		err := m.from.Pending(ctx, source, at.After, func(seq uint64, msg queue.Message, to []queue.LaneID) bool {
			msg.Body = slices.Clone(msg.Body)
			p := pending{msg, seq, to}
			page = append(page, p)
			at.After = seq
			if size += len(msg.Body); !p.damaged() { // Pending counts the damaged ones.
				messages++
			}
			more = messages == moveMessages || size >= moveBytes
			return !more
		})
		if err != nil {
			return err
		}
		if len(page) == 0 {
			break
		}
		if err := m.page(ctx, page, lanes, only); err != nil {
			return err
		}
		if err := m.record(source, &at); err != nil {
			return err
		}
	}
	for _, lane := range lanes {
		if err := m.from.DropLane(ctx, lane); err != nil {
			return err
		}
	}
	return nil
}

// page appends a page to the target. only has the receivers of lanes, and all are the lanes of the Source in the origin.
func (m move) page(ctx context.Context, page []pending, all []queue.LaneID, only map[queue.LaneID]string) (err error) {
	var messages []queue.Message
	var damaged []pending
	for _, p := range page {
		if p.damaged() {
			damaged = append(damaged, p)
			continue
		}
		var receivers []string
		for _, lane := range p.to {
			if only[lane] == "" {
				if only[lane], err = m.receiver(lane, all); err != nil {
					return err
				}
			}
			if !slices.Contains(receivers, only[lane]) {
				receivers = append(receivers, only[lane])
			}
		}
		for _, receiver := range receivers {
			p.Only, p.AcceptedAt = receiver, time.Now()
			messages = append(messages, p.Message)
		}
	}
	if len(messages) > 0 {
		if err := m.append(ctx, messages); err != nil {
			return err
		}
	}
	m.moved.Messages += int64(len(page) - len(damaged))
	for _, p := range damaged {
		if err := m.bury(p); err != nil {
			return err
		}
	}
	return nil
}

func (m move) record(source string, at *moveProgress) error {
	var record []byte
	if at != nil {
		record, _ = json.Marshal(at) // It never fails.
	}
	return m.from.PutMetaDurable(movedPrefix+source, record)
}

// pending is a message with its position and the lanes that have to deliver it.
type pending struct {
	queue.Message
	seq uint64
	to  []queue.LaneID
}

func (p pending) damaged() bool { return p.ID == "" && p.Type == "" }

// bury makes dead letters of a damaged message.
func (m move) bury(p pending) error {
	for _, lane := range p.to {
		now := time.Now()
		letter := queue.DeadLetter{Lane: lane, Seq: p.seq, AcceptedAt: now, Failure: queue.Failure{
			Time: now, Reason: queue.ReasonDamaged, Message: fmt.Sprintf("message %d of %s cannot be read: %s", p.seq, lane.Source, p.Body),
		}}
		if err := m.to.AddDeadLetters(lane.Destination, []queue.DeadLetter{letter}); err != nil {
			return err
		}
		m.moved.DeadLetters++
	}
	return nil
}

// receiver returns the Only of the messages of a lane or group. The target gets the lane if it lacks it. all are
// the lanes of the Source in the origin.
func (m move) receiver(lane queue.LaneID, all []queue.LaneID) (string, error) {
	find := func() string {
		lanes := slices.DeleteFunc(m.to.Lanes(), func(l queue.LaneID) bool {
			return l.Destination != lane.Destination || m.to.LaneStats(l).Ended
		})
		// The other lanes of a group do not get the message of one lane.
		if lane.Any && lane.Endpoint != "" {
			lanes = slices.DeleteFunc(lanes, func(l queue.LaneID) bool { return l.Endpoint != lane.Endpoint })
		}
		return receiver(lane, lanes)
	}
	if only := find(); only != "" {
		return only, nil
	}
	for _, l := range all {
		if l.Group() != lane.Group() {
			continue
		}
		if err := m.to.OpenLane(l); err != nil {
			return "", err
		}
		switch stats := m.to.LaneStats(l); {
		case stats.Ended && stats.Pending > 0: // It would get the messages that were accepted since its end.
			return "", fmt.Errorf("%s gets no calls of this Source any more, and the log still has earlier ones for it; start processes with the log until they are delivered, then call this again", l.Destination)
		case stats.Ended:
			if err := m.to.EndLane(l, queue.Active); err != nil {
				return "", err
			}
		}
	}
	if only := find(); only != "" {
		return only, nil
	}
	return "", fmt.Errorf("no lane for %v", lane)
}

// append appends messages, and waits while the target has no space or does not answer.
func (m move) append(ctx context.Context, messages []queue.Message) error {
	for end := time.Now().Add(moveWait); ; {
		_, err := m.to.Append(ctx, messages)
		if !errors.Is(err, queue.ErrFull) && !errors.Is(err, queue.ErrUnavailable) || time.Now().After(end) {
			return err
		}
		select {
		case <-time.After(movePause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// deadLetters moves the dead letters of a destination.
func (m move) deadLetters(ctx context.Context, destination string) error {
	for {
		var page []queue.DeadLetter
		var keys []string
		size := 0
		err := m.from.DeadLetters(ctx, destination, "", func(d queue.DeadLetter) bool {
			d.Body = slices.Clone(d.Body)
			page, keys, size = append(page, d), append(keys, d.Key), size+len(d.Body)
			return len(page) < moveMessages && size < moveBytes
		})
		if err != nil || len(page) == 0 {
			return err
		}
		if err := m.to.AddDeadLetters(destination, page); err != nil {
			return err
		}
		if err := m.from.DeleteDeadLetters(ctx, destination, keys...); err != nil {
			return err
		}
		m.moved.DeadLetters += int64(len(page))
	}
}
