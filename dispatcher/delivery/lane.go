package delivery

import (
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// lane is the engine's side of a queue lane.
type lane struct {
	id          queue.LaneID
	destination *destination
	owner       *namespace
	// set and targets are the lane's current settings. A lane without targets is parked: it leases and sends nothing.
	set     *destinationConfig
	targets []target
	// opened is true after the store has opened the lane in this run.
	opened bool
	// broken is true while the store fails for the lane.
	broken bool
	// dropAt is set for an orphan: a lane that is missing in the config and not parked there.
	dropAt time.Time
	// removedAt is when an orphan was removed from the config; lost is true if this may not be its
	// owner's decision (liveconfig.Lost).
	removedAt time.Time
	lost      bool
	// pendingAtRemoval are the messages that were pending at removedAt, as the ledger counts them.
	pendingAtRemoval int64
	// A lane of the success policy that the destination had before is draining: it delivers the messages accepted
	// before the replacing lanes were open. A lane of a group whose endpoint is removed (endpointRemoved) drains, too:
	// it sends to the remaining endpoints the messages that no other lane has. end is the state in the store.
	draining, endpointRemoved bool
	end                       queue.End

	// next links the lane into its queue, if queued.
	next   *lane
	queued bool
	// waited is true from the time when the lane was blocked until its next request.
	waited bool
	// probes counts the requested probes of the lane.
	probes int
	// buffer[head:] holds leased messages that are not started. Another lease may be in progress.
	buffer  []queue.Delivery
	scratch []queue.Delivery
	// parts are leased messages of batches that are sent first, the last part before the others.
	parts []part
	// held is true while the buffered messages wait for further ones of their batch, until the timer holding fires.
	held    bool
	holding *time.Timer
	head    int
	leasing bool
	// dense is true if the last lease returned every message after lastSeq, the end of the one before.
	dense   bool
	lastSeq uint64
	// free is true if the lease in progress is one of scheduler.freeLeases.
	free bool
	// waits is true if the store may have messages that wait as their receiver requested. waitsEnded is
	// the time of an edit that ends the waits of earlier responses; zero if the store has ended them.
	waits      bool
	waitsEnded time.Time
	// more is true unless the last lease emptied the lane; notified is true if the store reported
	// new messages during a lease.
	more, notified bool
	// inFlight counts requests, leased counts messages. counted and batched are the parts of leased in the counts of scheduler.
	inFlight, leased, counted, batched int
}

// snapshot makes the snapshot of a lane.
func (l *lane) snapshot() adminapi.LaneState {
	s := adminapi.LaneState{
		Source: l.id.Source, Destination: l.id.Destination, Endpoint: l.id.Endpoint, State: "idle",
		InFlight: l.inFlight, Leased: l.leased, Draining: l.draining, Dropped: l.dropAt,
	}
	switch {
	case l.parked():
		s.State = "parked"
	case l.waited:
		s.State = "blocked"
	case l.inFlight > 0:
		s.State = "sending"
	case l.queued:
		s.State = "ready"
	}
	for _, t := range l.targets {
		status := t.machine.Status()
		b := adminapi.BreakerState{
			Endpoint: t.name, State: adminapi.EndpointState(status.State), Open: t.machine.Open(), Probing: t.machine.Probing(),
			InFlight: t.inFlight, Window: t.machine.Window(), ConsecutiveFailures: status.Failures,
		}
		if b.Open {
			b.NextAttempt = t.machine.ProbeAt()
		}
		s.Breakers = append(s.Breakers, b)
	}
	return s
}

func (l *lane) parked() bool  { return len(l.targets) == 0 || l.broken }
func (l *lane) buffered() int { return len(l.buffer) - l.head }
func (l *lane) hasWork() bool { return l.more || len(l.parts) > 0 || l.buffered() > 0 && !l.held }

// failing reports whether all endpoints of the lane fail most of the time.
func (l *lane) failing() bool {
	for _, t := range l.targets {
		if !t.machine.Failing() {
			return false
		}
	}
	return len(l.targets) > 0
}

// sendable reports whether an endpoint with a closed circuit can accept a request, or, if all
// circuits are open, whether a probe is due. Only the endpoints of the highest rank count: a message
// must not be sent to a failing URL only because the working one is briefly busy.
func (l *lane) sendable(now time.Time) (closed, probe bool) {
	best := 0
	for _, t := range l.targets {
		switch r := t.rank(now); {
		case r == 0:
			probe = probe || t.machine.ProbeDue(now) && !t.held
		case r > best:
			closed, best = t.takes(now), r
		case r == best:
			closed = closed || t.takes(now)
		}
	}
	return closed, probe && best == 0
}

// take removes the first message of the lane's buffer.
func (l *lane) take() queue.Delivery {
	d := l.buffer[l.head]
	l.buffer[l.head] = queue.Delivery{}
	if l.head++; l.head == len(l.buffer) {
		l.emptyBuffer()
	}
	return d
}

// emptyBuffer keeps only the memory of a small buffer: there can be thousands of lanes.
func (l *lane) emptyBuffer() {
	if l.buffer, l.head = l.buffer[:0], 0; cap(l.buffer) > 4*maxLease {
		l.buffer, l.scratch = nil, nil
	}
}

func (l *lane) anyClosed() bool {
	for _, t := range l.targets {
		if !t.machine.Open() {
			return true
		}
	}
	return false
}

// choose returns the lane's endpoint of the highest rank that satisfies will.
func (l *lane) choose(turn int, now time.Time, will func(target) bool) (to target) {
	if len(l.targets) == 1 {
		return l.targets[0]
	}
	best := -1
	for i := range l.targets {
		t := l.targets[(turn+i)%len(l.targets)]
		if r := t.rank(now); r > best && will(t) {
			to, best = t, r
		}
	}
	return to
}

// expiry is the failure of messages that were not delivered in time. It includes the last failure
// of the lane's endpoints.
func (l *lane) expiry(now time.Time) queue.Failure {
	var last endpoint.Failure
	for _, t := range l.targets {
		if f := t.machine.Status().LastFailure; f.Time.After(last.Time) {
			last = f
		}
	}
	f := queue.Failure{Time: now, Reason: last.Reason, StatusCode: last.StatusCode, Message: last.Message, Redact: l.set.redaction.text}
	return expired(f, l.set.policy.Window)
}

// place assigns the role of a lane under the config of its destination, which is nil if there is none: a
// lane of the config; a draining lane, because it belongs to the destination's former success policy or its
// endpoint was removed from a group; or an orphan, for which it returns true.
func (l *lane) place(v *liveconfig.View, config *liveconfig.Destination) (orphan bool) {
	id, set := l.id, l.destination.set
	// A lane of the former success policy drains: other lanes have taken over.
	known := config != nil && len(config.Endpoints) > 0
	former := known && (id.Endpoint == "" || id.Any != anyEndpoint(config))
	switch {
	case parkedLane(v, id):
		l.park(nil)
		l.draining, l.endpointRemoved = l.end != queue.Active, l.end == queue.EndpointRemoved
		l.dropAt = time.Time{} // Its config is unknown and may contain the lane.
	case config == nil || !hasPlace(config, id):
		// Unless others have taken over, the lane still receives its Source's messages: the
		// destination may be restored.
		l.park(set)
		l.draining = l.end != queue.Active || former
		return true
	default:
		l.dropAt = time.Time{}
		if l.draining, l.endpointRemoved = l.end != queue.Active, l.end == queue.EndpointRemoved; known {
			l.endpointRemoved = id.Any && !hasEndpoint(config, id.Endpoint)
			l.draining = former || l.endpointRemoved
		}
		l.follow(set)
	}
	return false
}

// parkedLane reports whether a lane's destination or Source is parked.
func parkedLane(v *liveconfig.View, id queue.LaneID) bool {
	namespace, source := split(id.Source)
	return parkedDestination(v, id.Destination) || v.Parked(namespace, liveconfig.Ref{Section: liveconfig.SectionSources, Name: source})
}

// park removes a lane's endpoints, so that nothing is sent.
func (l *lane) park(set *destinationConfig) { l.set, l.targets, l.held = set, nil, false }

// follow applies the destination's settings to a lane. A lane whose endpoint was removed is parked until the store has
// ended it: before that, the store would lease messages to it that other lanes of the group have, too.
func (l *lane) follow(set *destinationConfig) {
	l.park(set)
	if !set.active || l.endpointRemoved && l.end != queue.EndpointRemoved {
		return
	}
	for _, t := range set.targets {
		if l.id.Endpoint == "" || l.endpointRemoved || l.id.Endpoint == t.name {
			l.targets = append(l.targets, t)
		}
	}
}

// wantedEnd is the end of the lane that the store should have.
func (l *lane) wantedEnd() queue.End {
	switch {
	case l.endpointRemoved:
		return queue.EndpointRemoved
	case l.draining:
		return queue.Ended
	}
	return queue.Active
}

// judgeLease notes whether a lease returned every message since the lease before it.
func (l *lane) judgeLease(got []queue.Delivery) {
	l.dense = false
	if n := len(got); n > 0 {
		last := got[n-1].Seq
		l.dense, l.lastSeq = last-l.lastSeq == uint64(n), last
	}
}
