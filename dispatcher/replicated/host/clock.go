package host

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// clockCheck compares the wall clock of this process with the clocks of the log's servers and of the other
// processes. A process with a wrong clock takes no slot, and hands over those that it has. A nil clockCheck
// finds no problem.
type clockCheck struct {
	*slots.WallClock
	members *slots.Members
	// logged is whether the last log message was about a problem.
	logged bool
}

func newClockCheck(wall, lease func() time.Time, members *slots.Members) *clockCheck {
	return &clockCheck{WallClock: slots.NewWallClock(wall, lease), members: members}
}

// isRight reports whether this process may take slots.
func (c *clockCheck) isRight() bool {
	return c == nil || slots.Member{ClockSkew: c.Skew(), Clock: c.Now()}.HasRightClock(c.members.List())
}

// isTrusted reports whether the clock agrees with the servers or with the other processes. Otherwise no
// retry window and no retention ends.
func (c *clockCheck) isTrusted() bool {
	return c == nil || c.Skew().Abs() <= slots.MaxClockSkew || c.isRight()
}

// mustHandOver reports whether the clock is wrong, and another process is ready to take a slot: this one sends
// no more, so that no time of its clock is stored.
func (c *clockCheck) mustHandOver(slot int) bool {
	return !c.isTrusted() && len(c.members.Successors(slot)) > 0
}

// problem describes a wrong clock with its fix; empty for none.
func (c *clockCheck) problem() string {
	if c == nil {
		return ""
	}
	skew := c.Skew()
	if skew.Abs() <= slots.MaxClockSkew {
		return ""
	}
	direction := "ahead of"
	if skew < 0 {
		direction = "behind"
	}
	difference := fmt.Sprintf("%v %s those of the NATS servers", skew.Abs().Round(time.Second), direction)
	if c.isRight() {
		return "the clocks of all processes are " + difference + ": correct the clocks of the servers by NTP"
	}
	return "the clock of this process is " + difference + ", so it takes no slot, hands over its slots to processes with a right clock, and ends no retry window or retention: correct the clock of this machine by NTP, or those of the servers"
}

// log logs a change of the problem. It is called by one goroutine.
func (c *clockCheck) log(to *slog.Logger) {
	problem := c.problem()
	switch is := problem != ""; {
	case is && !c.logged:
		to.Error("the clock is wrong", "problem", problem)
	case !is && c.logged:
		to.Info("the clock is right again")
	default:
		return
	}
	c.logged = !c.logged
}

// metric returns the metric of the clock.
func (c *clockCheck) metric() prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "posthorn_replication_clock_skew_seconds", Help: "Seconds by which the clock of the process is ahead of those of the NATS servers; negative if it is behind.",
	}, func() float64 { return c.Skew().Seconds() })
}

// milliseconds are the ClockSkew and the Clock of a heartbeat.
func (c *clockCheck) milliseconds() (skew, clock int64) {
	return c.Skew().Milliseconds(), c.Now().UnixMilli()
}
