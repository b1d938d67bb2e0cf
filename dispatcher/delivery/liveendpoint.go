package delivery

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/delivery/endpoint"
	"github.com/posthorn/posthorn/internal/meter"
)

// target is an endpoint with its prepared request.
type target struct {
	*liveEndpoint
	to *egress.Endpoint
}

// liveEndpoint is one URL of one destination with its traffic, shared by its lanes.
type liveEndpoint struct {
	destination *destination
	name        string
	// to is the endpoint's present config; nil while the endpoint is not usable.
	to      *egress.Endpoint
	machine endpoint.Machine
	// stored is the health that the store has, since storedAt.
	stored   endpoint.Status
	storedAt time.Time
	// rate is nil without a rate limit.
	rate *rate.Limiter
	// held is true while the dispatcher has no share of the rate.
	held bool
	// most is the dispatcher's share of maxInFlight.
	most     int
	inFlight int
	meter    meter.Meter
	attempts attempts
	metrics  endpointMetrics
	// loggedState is the last logged state, loggedAt the time of that log line, suppressed the number of changes since.
	loggedState endpoint.State
	loggedAt    time.Time
	suppressed  int
	// lanes that send to the endpoint, in turns; turn is the index of the next.
	lanes []*lane
	turn  int
	// waitsRequested counts the responses that requested a wait. The first waitsEnded of these waits have ended,
	// because a later request succeeded.
	waitsRequested, waitsEnded int
	// timer fires at timerAt, when a probe is due or the rate limit permits a request.
	timer   *time.Timer
	timerAt time.Time
}

// takes reports whether the endpoint can accept an ordinary request.
func (ep *liveEndpoint) takes(now time.Time) bool {
	return ep.room() > 0 && ep.rateWait(now) == 0
}

// setRate sets the largest number of requests per second to a share of a total; 0 is no limit. A tenth of a second's
// requests may be sent at once.
func (ep *liveEndpoint) setRate(total int, share liveconfig.Share, now time.Time) {
	ep.held = total > 0 && share == 0
	perSecond := rate.Limit(share.Rate(total))
	burst := max(1, int(perSecond)/10)
	switch {
	case total == 0:
		ep.rate = nil
	case ep.rate == nil:
		ep.rate = rate.NewLimiter(perSecond, burst)
	case ep.rate.Limit() != perSecond:
		ep.rate.SetLimitAt(now, perSecond)
		ep.rate.SetBurstAt(now, burst)
	}
}

// rateWait returns the time until the rate limit permits a request.
func (ep *liveEndpoint) rateWait(now time.Time) time.Duration {
	if ep.rate == nil {
		return 0
	}
	if ep.held {
		return heldRetry
	}
	// The tolerance covers rounding; without it a timer could always fire just too early.
	missing := 1 - ep.rate.TokensAt(now)
	if missing <= 1e-6 {
		return 0
	}
	return time.Duration(missing/float64(ep.rate.Limit())*float64(time.Second)) + 1
}

// servedPerSecond is the request rate that an endpoint should reach even when other endpoints use most connections.
const servedPerSecond = 100

// room is the number of further requests that the endpoint may have in flight. While connections
// are scarce, it waits for one of its own connections instead of dialling, as long as they are fast
// enough: for a burst to a fast endpoint, dialling does not pay.
func (ep *liveEndpoint) room() int {
	room := ep.machine.Room(ep.inFlight)
	if room > 0 && ep.to != nil {
		needed := 1 + int(ep.machine.Latency()*servedPerSecond/time.Second)
		room = min(room, ep.to.Room(needed, ep.inFlight))
	}
	return room
}

// rank orders the endpoints of a lane: 0 if the circuit is open, 1 if the endpoint requested a wait,
// 2 if it is not proven, 3 if it is.
func (ep *liveEndpoint) rank(now time.Time) int {
	switch m := &ep.machine; {
	case m.Open():
		return 0
	case m.Wait(now) > 0:
		return 1
	case m.Proven():
		return 3
	}
	return 2
}

const stateLogEvery = 10 * time.Second

// logState logs an endpoint's new state. A flapping endpoint changes it all the time, so changes
// other than an opened or closed circuit are logged by the maintenance, at least stateLogEvery
// after the last log line: it reports whether that must happen.
func (ep *liveEndpoint) logState(log *slog.Logger, now time.Time) (later bool) {
	ep.suppressed++
	if ep.machine.Open() || ep.loggedState == endpoint.CircuitOpen || ep.loggedState == endpoint.Gone {
		ep.loggedAt = time.Time{}
	}
	return ep.logSuppressed(log, now) > 0 && ep.suppressed == 1
}

// logSuppressed logs suppressed state changes, or returns how long to wait.
func (ep *liveEndpoint) logSuppressed(log *slog.Logger, now time.Time) (wait time.Duration) {
	if ep.suppressed == 0 {
		return 0
	}
	if wait := ep.loggedAt.Add(stateLogEvery).Sub(now); wait > 0 {
		return wait
	}
	suppressed := ep.suppressed - 1
	ep.suppressed = 0
	status := ep.machine.Status()
	if status.State == ep.loggedState {
		return 0
	}
	ep.loggedState, ep.loggedAt = status.State, now
	level, args := slog.LevelInfo, append(ep.logArgs(), "state", string(ep.loggedState))
	if status.Failures > 0 {
		level, args = slog.LevelWarn, append(args, failureArgs(status.LastFailure)...)
	}
	log.Log(context.Background(), level, "endpoint state changed", append(args, "suppressed", suppressed)...)
	return 0
}

func (ep *liveEndpoint) logArgs() []any {
	return []any{"namespace", ep.destination.namespace, "destination", ep.destination.name, "endpoint", ep.name}
}

// failureArgs has no status code if there was no response.
func failureArgs(f endpoint.Failure) []any {
	args := []any{"reason", f.Reason}
	if f.StatusCode != 0 {
		args = append(args, "statusCode", f.StatusCode)
	}
	return append(args, "message", f.Message)
}
