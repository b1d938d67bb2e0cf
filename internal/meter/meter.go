// Package meter measures a rate over the last seconds.
package meter

import "time"

// window is the time over which a Meter counts.
const window = 5 * time.Second

// Meter counts things in the present window and in the one before. The zero Meter has counted nothing.
type Meter struct {
	start         time.Time
	now, previous counts
}

// counts are the number of things of a window, and the highest level at one of them.
type counts struct{ n, peak int }

// Count counts n things, at a level.
func (m *Meter) Count(at time.Time, n, level int) {
	m.advance(at)
	m.now.n += n
	m.now.peak = max(m.now.peak, level)
}

// PerSecond returns the number of things a second: in the present window or in the one before, whichever is more.
func (m *Meter) PerSecond(at time.Time) float64 {
	m.advance(at)
	return max(float64(m.previous.n)/window.Seconds(), float64(m.now.n)/max(1, at.Sub(m.start).Seconds()))
}

// Peak returns the highest level in both windows.
func (m *Meter) Peak(at time.Time) int {
	m.advance(at)
	return max(m.now.peak, m.previous.peak)
}

// advance begins a window if the present one has ended.
func (m *Meter) advance(at time.Time) {
	age := at.Sub(m.start)
	if age < window {
		return
	}
	m.previous = m.now
	if age >= 2*window {
		m.previous = counts{}
	}
	m.start, m.now = at, counts{}
}
