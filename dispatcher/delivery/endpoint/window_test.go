package endpoint

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/check"
)

// receiver returns the time to the response of a request that arrives, with the number of requests in flight, and its
// result.
type receiver func(now time.Time, inFlight int, rnd *rand.Rand) (time.Duration, Result)

// constant responds after a time, however many requests it gets.
func constant(after time.Duration) receiver {
	return func(time.Time, int, *rand.Rand) (time.Duration, Result) { return after, Succeeded }
}

// workers has a number of workers, and a queue.
func workers(n int, each time.Duration) receiver {
	free := make([]time.Time, n)
	return func(now time.Time, _ int, _ *rand.Rand) (time.Duration, Result) {
		next := slices.MinFunc(free, time.Time.Compare)
		i := slices.Index(free, next)
		if next.Before(now) {
			next = now
		}
		free[i] = next.Add(each)
		return free[i].Sub(now), Succeeded
	}
}

// limited rejects what exceeds a number of requests a second with 429.
func limited(perSecond float64, after time.Duration) receiver {
	tokens, last := perSecond/10, start
	return func(now time.Time, _ int, rnd *rand.Rand) (time.Duration, Result) {
		tokens, last = min(tokens+now.Sub(last).Seconds()*perSecond, perSecond/10), now
		if tokens < 1 {
			return time.Millisecond, Overloaded
		}
		tokens--
		return time.Duration(float64(after) * (0.7 + 0.6*rnd.Float64())), Succeeded
	}
}

// collapsing becomes slower with the square of a load beyond a number.
func collapsing(at int, after time.Duration) receiver {
	return func(_ time.Time, inFlight int, _ *rand.Rand) (time.Duration, Result) {
		x := max(1, float64(inFlight)/float64(at))
		took := time.Duration(float64(after) * x * x)
		if took > 5*time.Second {
			return 5 * time.Second, Overloaded
		}
		return took, Succeeded
	}
}

// oscillating is fast for a time and slow for the same time.
func oscillating(period, fast, slow time.Duration) receiver {
	return func(now time.Time, _ int, _ *rand.Rand) (time.Duration, Result) {
		if now.Sub(start)/period%2 == 0 {
			return fast, Succeeded
		}
		return slow, Succeeded
	}
}

// mixed is slow for a tenth of the messages, whatever their number.
func mixed(fast, slow time.Duration) receiver {
	return func(_ time.Time, _ int, rnd *rand.Rand) (time.Duration, Result) {
		if rnd.IntN(10) == 0 {
			return slow, Succeeded
		}
		return fast, Succeeded
	}
}

// flight is a request that ends at a time.
type flight struct {
	ends    time.Time
	attempt Attempt
}

type flights []flight

func (f flights) Len() int           { return len(f) }
func (f flights) Less(i, j int) bool { return f[i].ends.Before(f[j].ends) }
func (f flights) Swap(i, j int)      { f[i], f[j] = f[j], f[i] }
func (f *flights) Push(x any)        { *f = append(*f, x.(flight)) }
func (f *flights) Pop() any {
	last := (*f)[len(*f)-1]
	*f = (*f)[:len(*f)-1]
	return last
}

// simulation delivers a backlog that never ends to a receiver.
type simulation struct {
	*driver
	to       receiver
	rnd      *rand.Rand
	inFlight flights
	// succeeded, failed and largest are the successes, the failures and the largest window since they were reset.
	succeeded, failed, largest int
}

func simulate(limit int, to receiver) *simulation {
	return &simulation{driver: drive(limit), to: to, rnd: rand.New(rand.NewPCG(1, 2))}
}

func (s *simulation) start(probe bool) {
	took, result := s.to(s.now, len(s.inFlight)+1, s.rnd)
	heap.Push(&s.inFlight, flight{s.now.Add(took), Attempt{Started: s.now, Result: result, FirstByte: took, Probe: probe}})
}

// run runs for a time, and returns the successes per second.
func (s *simulation) run(d time.Duration) float64 {
	end := s.now.Add(d)
	s.succeeded, s.failed, s.largest = 0, 0, 0
	for s.now.Before(end) {
		if s.ProbeDue(s.now) {
			s.StartProbe()
			s.start(true)
		}
		for s.Room(len(s.inFlight)) > 0 {
			s.start(false)
		}
		if len(s.inFlight) == 0 {
			s.now = s.ProbeAt()
			continue
		}
		next := heap.Pop(&s.inFlight).(flight)
		s.now, s.jitter = next.ends, s.rnd.Float64()
		next.attempt.InFlight = len(s.inFlight) + 1
		s.attempt(next.attempt)
		if next.attempt.Result == Succeeded {
			s.succeeded++
		} else {
			s.failed++
		}
		s.largest = max(s.largest, s.Window())
	}
	return float64(s.succeeded) / d.Seconds()
}

// atLeast fails the test if a number is too small.
func atLeast(t *testing.T, fact string, got, want float64) {
	t.Helper()
	t.Logf("%s: %.1f", fact, got)
	if got < want {
		t.Errorf("%s: got %.1f, want at least %.1f", fact, got, want)
	}
}

func atMost(t *testing.T, fact string, got, want float64) {
	t.Helper()
	t.Logf("%s: %.1f", fact, got)
	if got > want {
		t.Errorf("%s: got %.1f, want at most %.1f", fact, got, want)
	}
}

// A receiver whose responses do not depend on the load gets the largest window, however slow it is.
func TestWindowOfAReceiverWithoutALimit(t *testing.T) {
	for after, reached := range map[time.Duration]time.Duration{
		10 * time.Millisecond: time.Second, 200 * time.Millisecond: 5 * time.Second, time.Second: 20 * time.Second,
		4900 * time.Millisecond: 90 * time.Second,
	} {
		t.Run(fmt.Sprint(after), func(t *testing.T) {
			s := simulate(1000, constant(after))
			s.run(reached)
			want := min(1000, startsPerSecond*after.Seconds())
			check.Equal(t, "largest window after "+reached.String(), s.largest, int(want))
			most := want / after.Seconds()
			atLeast(t, "successes per second afterwards, of the most possible", s.run(60*after+10*time.Second)/most, 0.9)
			check.Equal(t, "failures", s.failed, 0)
		})
	}
}

// A receiver with 20 workers is busy, and has at most as many requests in its queue.
func TestWindowOfAReceiverWithWorkers(t *testing.T) {
	for _, each := range []time.Duration{5 * time.Millisecond, 100 * time.Millisecond, time.Second} {
		t.Run(each.String(), func(t *testing.T) {
			s := simulate(1000, workers(20, each))
			s.run(20 * each)
			atMost(t, "largest window in slow start", float64(s.largest), 64)
			most := 20 / each.Seconds()
			atLeast(t, "successes per second, of the most possible", s.run(12_000*each)/most, 0.95)
			atMost(t, "largest window", float64(s.largest), 40)
		})
	}
}

// A receiver that permits a number of requests a second gets nearly as many, and few more.
func TestWindowOfALimitedReceiver(t *testing.T) {
	for _, after := range []time.Duration{20 * time.Millisecond, 500 * time.Millisecond} {
		t.Run(after.String(), func(t *testing.T) {
			s := simulate(1000, limited(100, after))
			s.run(time.Minute)
			atLeast(t, "successes per second", s.run(10*time.Minute), 60)
			atMost(t, "rejected requests for each success", float64(s.failed)/float64(s.succeeded), 0.5)
		})
	}
}

// A receiver that collapses beyond a load is kept near that load.
func TestWindowOfACollapsingReceiver(t *testing.T) {
	s := simulate(1000, collapsing(50, 100*time.Millisecond))
	s.run(time.Minute)
	atLeast(t, "successes per second, of 500", s.run(20*time.Minute), 350)
	atMost(t, "largest window", float64(s.largest), 100)
	check.Equal(t, "failures", s.failed, 0)
}

// A receiver that becomes slower or faster for some minutes, whatever the load, has the largest window soon after.
func TestWindowOfAnOscillatingReceiver(t *testing.T) {
	const fast, slow, period = 100 * time.Millisecond, 800 * time.Millisecond, 10 * time.Minute
	s := simulate(200, oscillating(period, fast, slow))
	for range 3 {
		atLeast(t, "successes per second while it is fast, of 2,000", s.run(period-s.now.Sub(start)%period), 1600)
		atLeast(t, "successes per second while it is slow, of 250", s.run(period-s.now.Sub(start)%period), 150)
		check.Equal(t, "failures", s.failed, 0)
	}
}

// Responses of very different durations are no overload.
func TestWindowOfMixedResponses(t *testing.T) {
	for _, slow := range []time.Duration{time.Second, 4 * time.Second, 30 * time.Second} {
		t.Run(slow.String(), func(t *testing.T) {
			const fast = 200 * time.Millisecond
			s := simulate(500, mixed(fast, slow))
			s.run(5 * time.Minute)
			most := 500 / (0.9*fast.Seconds() + 0.1*slow.Seconds())
			atLeast(t, "successes per second, of the most possible", s.run(5*time.Minute)/most, 0.5)
		})
	}
}

// A round at half the window is due once a minute, at a random time, and ends with the former window.
func TestRoundsAtHalfTheWindow(t *testing.T) {
	s := simulate(100, constant(100*time.Millisecond))
	s.run(time.Minute)
	rests, below := 0, time.Duration(0)
	for range 6000 {
		was, before := s.Window(), s.now
		s.run(100 * time.Millisecond)
		if s.Window() == 50 && was == 100 {
			rests++
		}
		if was == 50 {
			below += s.now.Sub(before)
		}
		if got := s.Window(); got != 50 && got != 100 {
			t.Fatalf("window: got %d, want 100 or its half", got)
		}
	}
	atLeast(t, "rounds at half the window in ten minutes", float64(rests), 7)
	atMost(t, "rounds at half the window in ten minutes", float64(rests), 14)
	atMost(t, "seconds with half the window, for each round", below.Seconds()/float64(rests), 0.3)
}

// A slow receiver with a small window is not at half of it all the time, though a round at half takes longer than the time
// between two.
func TestSmallWindowOfASlowReceiver(t *testing.T) {
	s := simulate(2, constant(6*time.Second))
	s.run(10 * time.Minute)
	atLeast(t, "successes per second, of the most possible", s.run(2*time.Hour)/(2.0/6), 0.9)
}

// A half-empty window, rejected messages and fast errors prove nothing.
func TestWindowWithoutEvidence(t *testing.T) {
	d := drive(1000)
	d.fill(6)
	check.Equal(t, "window", d.Window(), 64)
	d.now = d.now.Add(time.Millisecond)
	for range 1000 {
		d.attempt(Attempt{InFlight: 31, FirstByte: time.Second})
		d.attempt(Attempt{InFlight: 64, Result: Rejected, FirstByte: time.Millisecond})
		d.attempt(Attempt{InFlight: 64, Started: start, FirstByte: time.Millisecond})
	}
	check.Equal(t, "window after responses that prove nothing", d.Window(), 64)
	for range 63 {
		d.attempt(Attempt{InFlight: 64, FirstByte: time.Second})
	}
	d.attempt(Attempt{InFlight: 64, Result: Failed, FirstByte: time.Millisecond})
	d.attempt(Attempt{InFlight: 64, FirstByte: time.Second})
	check.Equal(t, "window after a round", d.Window(), 128)
	check.Equal(t, "base after fast errors", d.window.base, 1.0)
}

// An endpoint with the largest window that begins to fail gets few requests more than those in flight.
func TestFailuresOfALargeWindow(t *testing.T) {
	dead := false
	s := simulate(1000, func(_ time.Time, _ int, _ *rand.Rand) (time.Duration, Result) {
		if dead {
			return 10 * time.Millisecond, Failed
		}
		return 100 * time.Millisecond, Succeeded
	})
	s.run(30 * time.Second)
	check.Equal(t, "window", s.Window(), 1000)
	dead = true
	s.run(100 * time.Millisecond) // The requests in flight succeed, and each starts another one.
	s.run(time.Second)
	check.Equal(t, "Open", s.Open(), true)
	s.inFlight = nil
	s.run(10 * time.Second)
	atMost(t, "requests in 10 seconds after that", float64(s.failed), 5)
}
