package audience

import (
	"context"
	"slices"
	"time"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

const (
	// minWindow and maxWindow bound how many calls of a sync wait in a lane.
	minWindow = 16
	maxWindow = 4096
	// firstWindow is for a lane whose speed is not known yet.
	firstWindow = 32
	// stallAfter is for how long a lane may stand still until the sync goes on for
	// the others, and patience until it goes on although none moves.
	stallAfter = 20 * time.Second
	patience   = time.Hour
	// While one lane has room, others are not waited for below so many calls a
	// second, or what brings the sync through in so long.
	floorRate = 100
	floorTime = 4 * time.Hour
	// lookShare is how many times longer than a look at the lanes the pause after it is.
	pauseMin, pauseMax, lookShare = 2 * time.Millisecond, 200 * time.Millisecond, 20
)

// Queue is what a sync needs of queue.Store.
type Queue interface {
	Append(ctx context.Context, msgs []queue.Message) ([]bool, error)
	Lanes() []queue.LaneID
	LaneStats(lane queue.LaneID) queue.LaneStats
}

// pace keeps a sync from crowding out the live calls of its Source, which wait in
// the same lanes: at most about a second's worth of a lane's deliveries waits
// there at a time. The slowest lane sets the pace, so that none is crowded; but one
// that crawls, stands still or is switched off does not hold up the others.
//
// It is kept while a sync is carried through, and by one goroutine.
type pace struct {
	source string
	lanes  map[queue.LaneID]*lanePace
	listed time.Time
	// appended calls since begin, of which at least floor a second are due.
	begin    time.Time
	appended int
	floor    float64
}

// lanePace is how one lane gets on with what a sync appends.
type lanePace struct {
	// waiting are the sync's batches that the lane has not read to their end.
	waiting []mark
	unread  int
	window  int
	// read is how far the lane is; moved, when that changed last or had to begin to.
	read  int64
	moved time.Time
	// measured and base are when, and where, the current measurement of its speed began.
	measured time.Time
	base     int64
}

// mark is a batch: its lane's count of accepted messages after it.
type mark struct {
	accepted int64
	calls    int
}

// batch is what was appended at once: how many calls, and how many of them were
// filtered out for a destination ("namespace/name").
type batch struct {
	calls   int
	skipped map[string]int
}

// newPace is for a sync with so many calls still to come.
func newPace(source string, calls int64, now time.Time) *pace {
	return &pace{source: source, lanes: map[queue.LaneID]*lanePace{}, begin: now, floor: max(floorRate, float64(calls)/floorTime.Seconds())}
}

// list takes over which lanes count: those of active destinations.
func (p *pace) list(config liveconfig.Config, lanes []queue.LaneID, now time.Time) {
	active := map[string]bool{}
	for _, d := range config.Destinations {
		if d.State == liveconfig.Active && slices.ContainsFunc(d.Sources, func(s string) bool { return config.Tenant+"/"+s == p.source }) {
			active[config.Tenant+"/"+d.Name] = true
		}
	}
	known := p.lanes
	p.lanes = map[queue.LaneID]*lanePace{}
	for _, id := range lanes {
		if id.Source != p.source || !active[id.Destination] {
			continue
		}
		id = id.Group() // A slow URL does not hold back a sync that another one takes.
		if known[id] == nil {
			known[id] = &lanePace{window: firstWindow}
		}
		p.lanes[id] = known[id]
	}
	p.listed = now
}

// look takes over how far each lane is, and what the sync has appended since the
// last look.
func (p *pace) look(stats func(queue.LaneID) queue.LaneStats, b batch, now time.Time) {
	p.appended += b.calls
	for id, l := range p.lanes {
		st := stats(id)
		first := st.Pending - st.Retrying - st.InFlight // wait for their first try
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
		// Messages that are for other lanes alone lower both counts, so a lane
		// with nothing left is through whatever the mark says.
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
	var moved time.Time // of those that stand still
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
	case crawls || now.Sub(moved) < patience:
		return 0
	}
	return room
}
