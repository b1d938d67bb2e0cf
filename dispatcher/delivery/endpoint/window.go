package endpoint

import (
	"math"
	"time"
)

const (
	// failureRound is the number of attempts that are judged together for a reduction by failures.
	failureRound = 64
	// minRound is the smallest number of responses whose times are judged together.
	minRound = 16
	// tolerance is how many times as long as the base the times of a round may be while the window grows.
	tolerance = 1.5
	// minBase is the smallest base. Shorter times depend on the load of this process more than on the endpoint.
	minBase = 2 * time.Millisecond
	// startsPerSecond is a rate of requests to an endpoint that a process does not exceed. A window beyond it only makes
	// requests wait in this process. minMost is enough for any endpoint with short responses.
	startsPerSecond = 20_000
	minMost         = 64
	// restEvery is the mean time between two rounds at half the window.
	restEvery = time.Minute
)

// window is the limit of the requests in flight to an endpoint. It finds the number with which the endpoint works best
// by the times to the first byte of its successes: more requests than that wait in the endpoint, and take longer.
//
// The base is the smallest mean of these times in a round since the last round at half the window, which replaces it: so
// it follows an endpoint that became slower for another reason.
type window struct {
	limit          int
	size           float64
	slowStartUntil float64
	// full is the size before a round at half of it, zero in other rounds; restAt is when the next of these begins.
	full   float64
	restAt time.Time // of the present one when full is set

	times times
	base  float64 // seconds; zero without one

	// cutAt is the time of the last reduction by failures. Failures of requests that started before it
	// have the same cause and do not reduce the window again.
	cutAt time.Time
	// attempts counts the attempts of a failureRound, and down the failed ones among them, since the last reduction by
	// failures or full round.
	attempts, down int
}

// times are the times to the first byte, in seconds, of the requests of a round, which started after since.
type times struct {
	since        time.Time
	n            int
	sum, squares float64
}

func newWindow(limit int) window {
	return window{limit: limit, size: 1, slowStartUntil: float64(limit)}
}

// reconfigure sets the limit, and forgets the times: the endpoint may have changed.
func (w *window) reconfigure(limit int) {
	*w = window{limit: limit, size: min(max(w.size, w.full), float64(limit)), slowStartUntil: float64(limit), cutAt: w.cutAt}
}

// setLimit sets the limit. A window at the former limit was not too large, so it continues to grow from there.
func (w *window) setLimit(limit int) {
	if w.slowStartUntil >= float64(w.limit) {
		w.slowStartUntil = float64(limit)
	}
	w.limit = limit
	w.size, w.full = min(w.size, float64(limit)), min(w.full, float64(limit))
}

// restart begins again with the smallest window. Slow start continues up to the window that the endpoint is known to
// carry, so that a recovered endpoint is at full speed after a few round trips.
func (w *window) restart() {
	*w = window{limit: w.limit, size: 1, slowStartUntil: max(2, w.slowStartUntil), cutAt: w.cutAt, base: w.base}
}

// count counts an attempt of the current failureRound; a new one begins after a full one.
func (w *window) count(a *Attempt) {
	if a.Started.Before(w.cutAt) {
		return
	}
	if w.attempts >= failureRound {
		w.attempts, w.down = 0, 0
	}
	w.attempts++
	if a.down() {
		w.down++
	}
}

// resize adapts the window to an attempt.
func (w *window) resize(a *Attempt) {
	switch {
	case a.down():
		w.shrink(a)
	case a.Result == Succeeded && 2*a.InFlight >= int(w.size): // A half-empty window is no evidence about a larger one.
		w.grow()
		w.measure(a)
	}
}

// grow enlarges a window that is smaller than a round after each success: by one in slow start, and otherwise by one per
// round trip.
func (w *window) grow() {
	switch {
	case w.full > 0 || w.size >= minRound:
	case w.size < w.slowStartUntil:
		w.size = min(w.size+1, float64(w.limit))
	default:
		w.size = min(w.size+1/w.size, float64(w.limit))
	}
}

// most is the largest size that is of use: with it, startsPerSecond requests are in flight.
func (w *window) most() float64 {
	return min(float64(w.limit), max(minMost, w.base*startsPerSecond))
}

// shrink halves the window of an overloaded endpoint, and of one that failed in half of a round, at
// most once per round trip.
func (w *window) shrink(a *Attempt) {
	if a.Started.Before(w.cutAt) || a.Result != Overloaded && 2*w.down < failureRound {
		return
	}
	w.size = max(1, w.size/2)
	w.slowStartUntil = w.size
	if w.full > 0 {
		w.full, w.restAt = 0, time.Time{}
	}
	w.times = times{since: a.Ended}
	w.cutAt, w.attempts, w.down = a.Ended, 0, 0
}

// measure adds a success to the round, and ends the round when it has as many as the window.
func (w *window) measure(a *Attempt) {
	t, seconds := &w.times, a.FirstByte.Seconds()
	if !a.Started.After(t.since) {
		return
	}
	t.n, t.sum, t.squares = t.n+1, t.sum+seconds, t.squares+seconds*seconds
	if t.n < max(minRound, int(w.size)) {
		return
	}
	mean, margin := t.mean()
	*t = times{since: a.Ended}
	if w.base == 0 || w.full > 0 || mean+margin < w.base {
		w.base = max(mean+margin, minBase.Seconds())
	}
	atHalf := w.full > 0
	w.adapt(mean, margin)
	w.rest(atHalf, a.Ended, a.Jitter)
}

// mean returns the mean of the times, and twice its standard error: responses of different durations must not look like
// an overload, and the smallest of many means must not be one of a few short ones.
func (t *times) mean() (mean, margin float64) {
	n := float64(t.n)
	mean = t.sum / n
	return mean, 2 * math.Sqrt(max(0, t.squares/n-mean*mean)/n)
}

// adapt sets the window after a round with a mean and its margin. Above tolerance times the base, the window is reduced
// in proportion, but not further than by half; the square root is the queue that an endpoint may have.
func (w *window) adapt(mean, margin float64) {
	switch queue := math.Sqrt(w.size); {
	case w.full > 0:
		w.size, w.full = w.full, 0
	case mean-margin > tolerance*w.base:
		w.size = max(w.size*tolerance*w.base/mean+queue, w.size/2)
		w.slowStartUntil = w.size
	case w.size < minRound: // grow enlarges it.
	case w.size < w.slowStartUntil:
		w.size = min(2*w.size, w.slowStartUntil)
	default:
		w.size += queue
	}
	w.size = min(w.size, w.most())
}

// rest begins a round at half the window if one is due, and plans the next one at its end (atHalf). The random times keep
// several dispatchers apart. A slow endpoint with a small window needs long for a round: a ninth of the time is at half.
func (w *window) rest(atHalf bool, now time.Time, jitter float64) {
	pause := time.Duration(float64(restEvery) * (0.5 + jitter))
	switch {
	case atHalf:
		w.restAt = now.Add(max(pause, 8*now.Sub(w.restAt)))
	case w.restAt.IsZero():
		w.restAt = now.Add(pause)
	case w.size >= 2 && !now.Before(w.restAt):
		w.full, w.size, w.restAt = w.size, w.size/2, now
	}
}
