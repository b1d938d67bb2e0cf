package audience

import (
	"slices"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

const (
	// minWindow and maxWindow bound how many calls of a sync are pending in a lane.
	minWindow = 16
	maxWindow = 4096
	// firstWindow is the window of a lane with unknown speed.
	firstWindow = 32
	// stallAfter is how long a lane may make no progress before the sync continues without it;
	// stallAllAfter is the same if no lane makes progress.
	stallAfter    = 20 * time.Second
	stallAllAfter = time.Hour
	// While one lane has room, the sync sends at least floorRate calls a second, or enough to end
	// within floorTime, without waiting for the others.
	floorRate = 100
	floorTime = 4 * time.Hour
	// checkShare is the ratio of the pause between two checks of the lanes to the duration of a
	// check.
	pauseMin, pauseMax, checkShare = 2 * time.Millisecond, 200 * time.Millisecond, 20
)

// Lanes is the part of queue.Store that sets the pace of a sync.
type Lanes interface {
	Lanes() []queue.LaneID
	LaneStats(lane queue.LaneID) queue.LaneStats
}

// pace keeps a sync from delaying the live calls of its Source, which are pending in the same
// lanes: the sync has at most about one second's deliveries pending per lane. The slowest lane
// limits the rate, so that no lane is overloaded; but a lane that crawls, stalls or is suspended
// does not stop the others.
//
// One goroutine uses it, for one sync.
type pace struct {
	source string
	lanes  map[queue.LaneID]*lanePace
	listed time.Time
	// appended counts calls since begin; at least floor a second are due.
	begin    time.Time
	appended int
	floor    float64
}

// lanePace is the progress of one lane.
type lanePace struct {
	// waiting are the sync's batches that the lane has not read completely.
	waiting []mark
	unread  int
	window  int
	// read is the position of the lane; moved is the last time when it changed or was expected to.
	read  int64
	moved time.Time
	// measured and base are the time and the position at the start of the current speed
	// measurement.
	measured time.Time
	base     int64
}

// mark is the end of a batch: its lane's count of accepted messages after it.
type mark struct {
	accepted int64
	calls    int
}

// batch is one append: the number of calls, and how many of them the filter of a destination
// ("namespace/name") excluded.
type batch struct {
	calls   int
	skipped map[string]int
}

// newPace makes the pace of a sync with that many remaining calls.
func newPace(source string, calls int64, now time.Time) *pace {
	return &pace{source: source, lanes: map[queue.LaneID]*lanePace{}, begin: now, floor: max(floorRate, float64(calls)/floorTime.Seconds())}
}

// list selects the lanes that count: the lanes of active destinations.
func (p *pace) list(config liveconfig.Config, lanes []queue.LaneID, now time.Time) {
	active := map[string]bool{}
	for _, d := range config.Destinations {
		if d.State == liveconfig.Active && slices.ContainsFunc(d.Sources, func(s string) bool { return config.Namespace+"/"+s == p.source }) {
			active[config.Namespace+"/"+d.Name] = true
		}
	}
	known := p.lanes
	p.lanes = map[queue.LaneID]*lanePace{}
	for _, id := range lanes {
		if id.Source != p.source || !active[id.Destination] {
			continue
		}
		id = id.Group() // A slow URL does not limit a sync that another URL accepts.
		if known[id] == nil {
			known[id] = &lanePace{window: firstWindow}
		}
		p.lanes[id] = known[id]
	}
	p.listed = now
}

// update reads the position of each lane and adds the calls appended since the last update.
func (p *pace) update(stats func(queue.LaneID) queue.LaneStats, b batch, now time.Time) {
	p.appended += b.calls
	for id, l := range p.lanes {
		st := stats(id)
		first := st.Pending - st.Retrying - st.InFlight // waiting for their first attempt
		read := st.Accepted - first
		if l.measured.IsZero() {
			l.measured, l.base = now, read
		}
		if read != l.read || l.unread == 0 {
			l.read, l.moved = read, now
		}
		if calls := b.calls - b.skipped[id.Destination]; calls > 0 {
			l.waiting, l.unread = append(l.waiting, mark{st.Accepted, calls}), l.unread+calls
		}
		// Messages for other lanes only lower both counts, so a lane without pending messages has
		// read everything, whatever the mark.
		for len(l.waiting) > 0 && (l.waiting[0].accepted <= read || first <= 0) {
			l.unread -= l.waiting[0].calls
			l.waiting = l.waiting[1:]
		}
		if elapsed := now.Sub(l.measured); elapsed >= time.Second {
			l.window = min(max(int(float64(read-l.base)/elapsed.Seconds()), minWindow), maxWindow)
			l.measured, l.base = now, read
		}
	}
}

// room returns how many calls may be appended now.
func (p *pace) room(now time.Time) int {
	room, flows, crawls := maxWindow, len(p.lanes) == 0, false
	var moved time.Time // of the stalled lanes
	for _, l := range p.lanes {
		switch free := l.window - l.unread; {
		case 2*free >= l.window:
			room, flows = min(room, free), true
		case now.Sub(l.moved) < stallAfter:
			crawls = true
		case l.moved.After(moved):
			moved = l.moved
		}
	}
	due := int(p.floor*now.Sub(p.begin).Seconds()) - p.appended
	switch {
	case flows && crawls:
		return max(0, min(room, due))
	case flows:
		return room
	case crawls || now.Sub(moved) < stallAllAfter:
		return 0
	}
	return room
}
