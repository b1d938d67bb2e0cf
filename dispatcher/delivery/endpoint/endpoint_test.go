package endpoint

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/check"
)

// Failures in a row that open a closed and a half-open circuit.
const (
	openAfter   = 10
	reopenAfter = 3
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// driver drives a Machine through attempts at a time.
type driver struct {
	Machine
	now time.Time
	// jitter of every attempt; 0.5 is no deviation from the interval.
	jitter float64
}

func drive(limit int) *driver {
	return &driver{Machine: New(limit, start), now: start, jitter: 0.5}
}

// attempt observes an attempt that began and ended now.
func (d *driver) attempt(a Attempt) Change {
	if a.Started.IsZero() {
		a.Started = d.now
	}
	a.Ended, a.Jitter, a.InFlight = d.now, d.jitter, max(1, a.InFlight)
	a.Failure.Time = d.now
	return d.Observe(a)
}

func (d *driver) fail(n int) {
	for range n {
		d.attempt(Attempt{Result: Failed})
	}
}

func (d *driver) succeed(n int) {
	for range n {
		d.attempt(Attempt{})
	}
}

// probe observes the probe of an open circuit.
func (d *driver) probe(r Result) Change {
	d.StartProbe()
	return d.attempt(Attempt{Result: r, Probe: true})
}

// run observes a sequence of attempts: '.' succeeded, 'x' failed, 'o' overloaded, 'r' rejected.
func (d *driver) run(attempts string) {
	for _, c := range attempts {
		d.attempt(Attempt{Result: map[rune]Result{'.': Succeeded, 'x': Failed, 'o': Overloaded, 'r': Rejected}[c]})
	}
}

func TestCircuitOpens(t *testing.T) {
	for _, test := range []struct {
		name, attempts string
		want           bool
	}{
		{"no attempt", "", false},
		{"nine in a row", "xxxxxxxxx", false},
		{"ten in a row", "xxxxxxxxxx", true},
		{"a success in between", "xxxxxxxxx.xxxxxxxxx", false},
		{"ten in a row, overloaded", "oxoxoxoxox", true},
		{"three in four of 64", strings.Repeat("xxx.", 17), true},
		{"three in four of fewer than 64", strings.Repeat("xxx.", 15), false},
		{"two in three", strings.Repeat("xx.", 100), false},
		{"a tenth", strings.Repeat(".........x", 10), false},
		{"rejected messages", "rrrrrrrrrrrrrrrrrrrrrrrr", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := drive(64)
			d.run(test.attempts)
			check.Equal(t, "Open", d.Open(), test.want)
		})
	}
}

// reject observes a permanent answer.
func (d *driver) reject(status int) Change {
	return d.attempt(Attempt{Result: Rejected, Failure: Failure{StatusCode: status}})
}

func TestPermanentAnswersOpenTheCircuit(t *testing.T) {
	limits := map[int]int{410: 1, 301: 10, 302: 10, 303: 10, 307: 10, 308: 10, 401: 10, 403: 10, 404: 10, 405: 10, 407: 10, 400: 100, 413: 100,
		415: 100, 422: 100}
	for status := range 100 {
		limits[200+status] = 100 // Responses that an expression rejects.
	}
	for status := 200; status < 500; status++ {
		d := drive(64)
		opened := 0
		for n := 1; n <= 200 && opened == 0; n++ {
			if d.reject(status).Opened {
				opened = n
			}
		}
		check.Equal(t, fmt.Sprintf("answers %d until the circuit opens", status), opened, limits[status])
	}
}

func TestSuccessBetweenPermanentAnswers(t *testing.T) {
	for status, n := range map[int]int{404: 9, 400: 99} {
		d := drive(64)
		for range 3 {
			for range n {
				d.reject(status)
			}
			d.succeed(1)
		}
		check.Equal(t, fmt.Sprintf("Open after answers %d", status), d.Open(), false)
	}
}

// With many requests in flight, more failures in a row open the circuit.
func TestFailuresOfAFullWindow(t *testing.T) {
	for inFlight, want := range map[int]int{1: 10, 20: 10, 64: 33, 1024: 64} {
		d := drive(1024)
		n := 0
		for ; !d.Open(); n++ {
			d.attempt(Attempt{Result: Failed, InFlight: inFlight})
		}
		check.Equal(t, fmt.Sprintf("failures in a row until the circuit opens, with %d in flight", inFlight), n, want)
	}
}

// Different failures in a row open the circuit together.
func TestMixedFailures(t *testing.T) {
	d := drive(64)
	d.fail(5)
	for range 4 {
		d.reject(404)
	}
	for range 9 {
		d.reject(400)
	}
	d.reject(409)
	check.Equal(t, "Open a moment before", d.Open(), false)
	check.Equal(t, "Opened", d.reject(400).Opened, true)
}

// A message is held only while the circuit is open, and only for an answer of the kind that opens it.
func TestHolds(t *testing.T) {
	d := drive(64)
	check.Equal(t, "Holds while the circuit is closed", d.Holds(404), false)
	d.fail(openAfter)
	for status, want := range map[int]bool{400: true, 404: true, 410: true, 409: false, 301: true, 304: false} {
		check.Equal(t, fmt.Sprintf("Holds %d", status), d.Holds(status), want)
	}
	probe := func(status int) Change {
		d.StartProbe()
		return d.attempt(Attempt{Result: Rejected, Probe: true, Failure: Failure{StatusCode: status}})
	}
	check.Equal(t, "change of a probe's 400", probe(400), Change{Record: true})
	check.Equal(t, "change of a probe's 409", probe(409), Change{Closed: true, Record: true, State: true})
}

func TestGone(t *testing.T) {
	d := drive(64)
	gone := func() time.Duration {
		d.StartProbe()
		d.attempt(Attempt{Result: Rejected, Probe: true, Failure: Failure{StatusCode: 410}})
		return d.ProbeAt().Sub(d.now)
	}
	d.reject(410)
	check.Equal(t, "state", d.Status().State, Gone)
	check.Equal(t, "wait for the confirmation", d.ProbeAt().Sub(d.now), time.Second)
	check.Equal(t, "wait after the confirmation", gone(), time.Hour)
	check.Equal(t, "wait after another probe", gone(), time.Hour)

	restored := New(64, start)
	restored.Restore(d.Record("r"), "r", d.now)
	check.Equal(t, "Status after a restart", restored.Status(), d.Status())

	d.probe(Failed)
	check.Equal(t, "state after a failed probe", d.Status().State, CircuitOpen)
	check.Equal(t, "wait after a failed probe", d.ProbeAt().Sub(d.now), time.Second)
	gone()
	d.probe(Succeeded)
	check.Equal(t, "Open after a success", d.Open(), false)
}

func TestWait(t *testing.T) {
	d := drive(64)
	check.Equal(t, "Wait without a request", d.Wait(d.now), 0)
	d.attempt(Attempt{Result: Failed, RetryAfter: time.Minute})
	d.attempt(Attempt{Result: Failed, RetryAfter: time.Second})
	check.Equal(t, "Wait", d.Wait(d.now), time.Minute)
	check.Equal(t, "Wait a minute later", d.Wait(d.now.Add(time.Minute)), 0)
	d.attempt(Attempt{Result: Failed, RetryAfter: 100 * time.Hour})
	check.Equal(t, "Wait after a Retry-After of 100 h", d.Wait(d.now), time.Hour)
}

func TestChange(t *testing.T) {
	d := drive(64)
	d.fail(openAfter - 1)
	check.Equal(t, "change of the tenth failure", d.attempt(Attempt{Result: Failed}), Change{Opened: true, State: true, Record: true})
	check.Equal(t, "change of a late failure", d.attempt(Attempt{Result: Failed}), Change{})
	check.Equal(t, "change of a late success", d.attempt(Attempt{}), Change{})
	d.now = d.ProbeAt()
	check.Equal(t, "change of a failed probe", d.probe(Failed), Change{Record: true})
	check.Equal(t, "change of a canceled probe", d.probe(Canceled), Change{})
	check.Equal(t, "Probing after a canceled probe", d.Probing(), false)
	check.Equal(t, "change of a successful probe", d.probe(Succeeded), Change{Closed: true, State: true, Record: true})
}

func TestProbeIntervals(t *testing.T) {
	d := drive(64)
	d.fail(openAfter)
	var waits []time.Duration
	for range 9 {
		waits = append(waits, d.ProbeAt().Sub(d.now)/time.Second)
		check.Equal(t, "ProbeDue a moment early", d.ProbeDue(d.ProbeAt().Add(-1)), false)
		d.now = d.ProbeAt()
		check.Equal(t, "ProbeDue", d.ProbeDue(d.now), true)
		d.StartProbe()
		check.Equal(t, "ProbeDue beside a probe", d.ProbeDue(d.now.Add(time.Hour)), false)
		d.probe(Failed)
	}
	check.Same(t, "seconds between probes", waits, []time.Duration{1, 2, 4, 8, 16, 32, 60, 60, 60})
}

func TestProbeJitter(t *testing.T) {
	for jitter, want := range map[float64]time.Duration{0: 800 * time.Millisecond, 0.5: time.Second, 0.999999999: 1200 * time.Millisecond} {
		d := drive(64)
		d.jitter = jitter
		d.fail(openAfter)
		check.Equal(t, "wait for the probe", d.ProbeAt().Sub(d.now).Round(time.Millisecond), want)
	}
}

func TestRetryAfterPostponesTheProbe(t *testing.T) {
	d := drive(64)
	d.fail(openAfter)
	late := func(retryAfter time.Duration) time.Duration {
		d.attempt(Attempt{Result: Failed, RetryAfter: retryAfter})
		return d.ProbeAt().Sub(d.now)
	}
	check.Equal(t, "wait after a late failure", late(0), time.Second)
	check.Equal(t, "wait after a late Retry-After", late(2*time.Minute), 2*time.Minute)
	check.Equal(t, "wait after a shorter Retry-After", late(time.Minute), 2*time.Minute)
	check.Equal(t, "wait for the first probe after a Retry-After of 24 h", late(24*time.Hour), 5*time.Minute)
	d.StartProbe()
	d.attempt(Attempt{Result: Failed, Probe: true, RetryAfter: 10 * time.Minute})
	check.Equal(t, "wait after a probe's Retry-After", d.ProbeAt().Sub(d.now), 10*time.Minute)
	d.StartProbe()
	d.attempt(Attempt{Result: Failed, Probe: true, RetryAfter: 100 * time.Hour})
	check.Equal(t, "wait after a Retry-After of 100 h", d.ProbeAt().Sub(d.now), time.Hour)
}

func TestHalfOpen(t *testing.T) {
	opened := func() *driver {
		d := drive(64)
		d.fail(openAfter)
		d.probe(Failed)
		d.probe(Succeeded)
		return d
	}
	d := opened()
	check.Equal(t, "Room after the probe", d.Room(0), 1)
	d.fail(reopenAfter - 1)
	check.Equal(t, "Open after two failures", d.Open(), false)
	d.fail(1)
	check.Equal(t, "Open after three failures", d.Open(), true)
	check.Equal(t, "interval after a relapse", d.ProbeAt().Sub(d.now), 4*time.Second)

	d = opened()
	d.succeed(halfOpenFor)
	d.fail(openAfter - 1)
	check.Equal(t, "Open after nine failures of a recovered endpoint", d.Open(), false)
	d.fail(1)
	check.Equal(t, "interval after a recovery", d.ProbeAt().Sub(d.now), time.Second)
}

// After a recovery three tenths of the answers are enough, until halfOpenFor successes.
func TestPermanentAnswersOpenAHalfOpenCircuit(t *testing.T) {
	for status, limits := range map[int][2]int{401: {3, 10}, 404: {3, 10}, 400: {30, 100}, 422: {30, 100}, 410: {1, 1}} {
		for successes, want := range map[int]int{0: limits[0], halfOpenFor - 1: limits[0], halfOpenFor: limits[1]} {
			d := drive(64)
			d.fail(openAfter)
			d.probe(Succeeded)
			d.succeed(successes)
			opened := 0
			for n := 1; n <= 200 && opened == 0; n++ {
				if d.reject(status).Opened {
					opened = n
				}
			}
			check.Equal(t, fmt.Sprintf("answers %d until the circuit opens again after %d successes", status, successes), opened, want)
		}
	}
}

// fill succeeds with a full window for a number of round trips and returns the windows.
func (d *driver) fill(rounds int) (windows []int) {
	for range rounds {
		n := d.Room(0)
		windows = append(windows, n)
		d.now = d.now.Add(time.Millisecond)
		for range n {
			d.attempt(Attempt{InFlight: n, FirstByte: time.Second})
		}
	}
	return windows
}

func TestWindow(t *testing.T) {
	d := drive(64)
	check.Same(t, "windows of slow start", d.fill(8), []int{1, 2, 4, 8, 16, 32, 64, 64})

	before := d.now
	d.now = d.now.Add(time.Second)
	for range 5 {
		d.attempt(Attempt{Result: Overloaded, Started: before})
	}
	check.Equal(t, "window after failures of one round trip", d.Window(), 32)
	check.Same(t, "windows of the next round trips", d.fill(3), []int{32, 37, 43})
	d.succeed(1000)
	check.Equal(t, "unused window", d.Window(), 50)
	d.Reconfigure(5, d.now)
	check.Equal(t, "window with a lower limit", d.Window(), 5)
}

// Failures that are not caused by load do not shrink the window, unless half of the attempts fail.
func TestWindowOfAFailingEndpoint(t *testing.T) {
	for _, test := range []struct {
		name, attempts string
		want           int
	}{
		{"one", "x", 64},
		{"one of four", strings.Repeat("x...", 100), 64},
		{"less than half", strings.Repeat("xx...", 100), 64},
		{"more than half", strings.Repeat("xx.", 16), 32},
		{"one overloaded", "o", 32},
		{"nine in a row", "xxxxxxxxx", 64},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := drive(64)
			d.fill(8)
			d.run(".") // It is the last one of a round.
			d.run(test.attempts)
			check.Equal(t, "Window", d.Window(), test.want)
		})
	}
}

// A recovered endpoint gets its former window by slow start, but an overloaded one only half of it.
func TestWindowAfterAnOutage(t *testing.T) {
	for name, test := range map[string]struct {
		attempts string
		want     []int
	}{
		"failed":     {"xxxxxxxxxx", []int{1, 2, 4, 8, 16, 32, 64, 64}},
		"overloaded": {"oooooooooo", []int{1, 2, 4, 8, 16, 32, 37, 43}},
	} {
		t.Run(name, func(t *testing.T) {
			d := drive(64)
			d.fill(8)
			started := d.now
			d.now = d.now.Add(time.Second)
			for _, c := range test.attempts {
				d.attempt(Attempt{Started: started, Result: map[rune]Result{'x': Failed, 'o': Overloaded}[c]})
			}
			d.probe(Succeeded)
			check.Same(t, "windows", d.fill(8), test.want)
		})
	}
}

func TestProven(t *testing.T) {
	for _, test := range []struct {
		name, attempts string
		want           bool
	}{
		{"no attempt", "", false},
		{"a success", ".", true},
		{"a failure", "x", false},
		{"a failure after successes", "........x", true},
		{"half of the last eight", ".........xxxx", true},
		{"more than half of the last eight", ".........xxxxx", false},
		{"a success after failures", "xxxxxxxx.", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := drive(64)
			d.run(test.attempts)
			check.Equal(t, "Proven", d.Proven(), test.want)
		})
	}
	d := drive(64)
	d.attempt(Attempt{Started: start.Add(-time.Minute)})
	check.Equal(t, "Proven of a slow endpoint", d.Proven(), false)
}

func TestRecord(t *testing.T) {
	d := drive(64)
	d.succeed(1)
	d.fail(openAfter)
	r := d.Record("r1")

	same := New(64, start.Add(time.Hour))
	same.Restore(r, "r1", d.now)
	check.Equal(t, "Open", same.Open(), true)
	check.Equal(t, "ProbeAt", same.ProbeAt(), d.ProbeAt())
	check.Equal(t, "Status", same.Status(), d.Status())

	changed := New(64, start)
	changed.Restore(r, "r2", d.now)
	check.Equal(t, "ProbeDue with another revision", changed.ProbeDue(d.now), true)

	before := d.now.Add(-100 * time.Hour)
	back := New(64, start)
	back.Restore(r, "r1", before)
	check.Equal(t, "wait after the clock was set back", back.ProbeAt().Sub(before), d.ProbeAt().Sub(r.LastFailure.Time))

	r.LastFailure = nil
	old := New(64, start)
	old.Restore(r, "r1", before)
	check.Equal(t, "wait of a record without a failure after the clock was set back", old.ProbeAt().Sub(before), 2*time.Hour)
}

// A scheduler must not pay for the state machine with garbage.
func TestObserveDoesNotAllocate(t *testing.T) {
	d := drive(64)
	for _, r := range []Result{Succeeded, Failed, Rejected, Canceled} {
		check.Equal(t, "allocations", testing.AllocsPerRun(1000, func() { d.attempt(Attempt{Result: r, Failure: Failure{Reason: "x"}}) }), 0)
	}
}

// The stored health of an endpoint whose circuit is closed restores what reports show, and neither
// the circuit nor the window.
func TestRecordOfClosedCircuit(t *testing.T) {
	for _, c := range []struct {
		attempts, revision string
		want               State
	}{
		{"", "r1", Idle},
		{"...", "r1", Healthy},
		{"...", "r2", Healthy},
		{"..xxx", "r1", Degraded},
		{"..xxx", "r2", Idle}, // The change may have fixed it.
		{"xxx......", "r1", Healthy},
	} {
		t.Run(fmt.Sprintf("%q, then revision %s", c.attempts, c.revision), func(t *testing.T) {
			d := drive(64)
			d.run(c.attempts)
			restored := drive(64)
			restored.Restore(d.Record("r1"), c.revision, d.now)
			got, was := restored.Status(), d.Status()
			check.Equal(t, "State", got.State, c.want)
			check.Equal(t, "LastSuccess", got.LastSuccess, was.LastSuccess)
			check.Equal(t, "LastFailure", got.LastFailure, was.LastFailure)
			check.Equal(t, "Open", restored.Open(), false)
			check.Equal(t, "Proven", restored.Proven(), false)
			check.Equal(t, "Window", restored.Window(), 1)
			restored.fail(openAfter - 1)
			check.Equal(t, "Open after fewer failures than open a circuit", restored.Open(), false)
		})
	}
}
