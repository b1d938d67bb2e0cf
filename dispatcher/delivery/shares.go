package delivery

import (
	"slices"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

const (
	// backlogFor is the time that the messages that wait would need at the present rate from which on a limit delays
	// them. A shorter queue is a burst.
	backlogFor = 5 * time.Second
	// heldRetry is how often an endpoint is tried that waits for a share; a share wakes it as well.
	heldRetry = time.Second
)

// SetShares sets the dispatcher's shares of the limits of all destinations; nil gives it the whole limits. Requests in
// flight above a smaller share end as usual.
func (e *Engine) SetShares(shares *liveconfig.PodShares) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.shares, e.aboveShares = shares, nil
	now := e.o.Now()
	for _, d := range e.registry.destinations {
		if d.set == nil {
			continue
		}
		for _, t := range d.set.targets {
			if most := e.mostInFlight(d, d.set); most != t.most {
				t.most = most
				t.machine.Limit(most)
			}
			if t.inFlight > t.most {
				e.aboveShares = append(e.aboveShares, t.liveEndpoint)
			}
			t.setRate(d.set.perSecond, e.shareOf(d), now)
			e.wakeNextLane(t.liveEndpoint, now)
		}
	}
	e.wakeWorker()
}

func (e *Engine) shareOf(d *destination) liveconfig.Share {
	return e.shares.For(d.namespace, d.ref())
}

func (d *destination) ref() liveconfig.Ref {
	return liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: d.name}
}

// mostInFlight returns the share of maxInFlight, at least 1.
func (e *Engine) mostInFlight(d *destination, set *destinationConfig) int {
	return max(1, e.shareOf(d).Count(set.maxInFlight))
}

// AboveShares returns the keys of the destinations with an endpoint that still has more requests in flight than its share
// since SetShares, sorted.
func (e *Engine) AboveShares() (keys []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.aboveShares = slices.DeleteFunc(e.aboveShares, func(ep *liveEndpoint) bool { return ep.inFlight <= ep.most })
	for _, ep := range e.aboveShares {
		keys = append(keys, liveconfig.ShareKey(ep.destination.namespace, ep.destination.ref()))
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// use is the use of the limits of an endpoint.
type use struct {
	// used is a part of the total, rate in requests a second.
	used, rate float64
	// reached is true if the endpoint uses its share.
	reached bool
}

// use returns the use of an endpoint's limits.
func (e *Engine) use(ep *liveEndpoint, set *destinationConfig, now time.Time) use {
	u, peak := use{rate: ep.meter.PerSecond(now)}, max(ep.meter.Peak(now), ep.inFlight)
	u.used = float64(peak) / float64(set.maxInFlight)
	u.reached = peak >= ep.most
	if set.perSecond > 0 {
		u.used = max(u.used, u.rate/float64(set.perSecond))
		u.reached = u.reached || ep.held || u.rate >= 0.9*float64(ep.rate.Limit())
	}
	return u
}

// limitUse returns the use of a destination's limits for its report: of the endpoint that uses most. The lock is held.
func (e *Engine) limitUse(d *destination, now time.Time) (most use) {
	if !e.shares.Divided() {
		return most
	}
	for _, t := range d.set.targets {
		if u := e.use(t.liveEndpoint, d.set, now); u.used >= most.used {
			most = u
		}
	}
	if !e.shares.IsReported(most.used) && !most.reached {
		return use{}
	}
	d.changed.TransitionAt(now.Add(liveconfig.LimitUseFor)) // It ends without an event.
	return most
}

// report returns the use with a number of messages that wait for their first attempt, including those in flight.
func (u use) report(waiting int64, inFlight int) adminapi.LimitUse {
	backlog := float64(waiting) - float64(inFlight)
	return adminapi.LimitUse{Used: int64(u.used * 1e6), Limited: u.reached && backlog > 0 && backlog > u.rate*backlogFor.Seconds()}
}
