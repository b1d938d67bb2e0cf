package host

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// single is a process with one slot among the others with the same log. By the heartbeats, an owner with a
// wrong clock finds a standby to which it hands over the slot.
type single struct {
	o Options
	// name is another one for each process: --pod-name is optional.
	name      string
	started   time.Time
	members   *slots.Members
	standby   atomic.Pointer[standby]
	ownership atomic.Pointer[ownership]
	stopper   stopper
}

func newSingle(o Options) *single {
	s := &single{o: o, name: rand.Text(), started: time.Now(), members: slots.NewMembers(nil)}
	s.o.clock = newClockCheck(o.WallClock, s.members)
	s.o.lacking = newLacking(o, s.members)
	return s
}

// exchange exchanges heartbeats until ctx is done.
func (s *single) exchange(ctx context.Context) {
	if s.o.Bus != nil {
		stop, err := s.o.Bus.Subscribe(func(text []byte) {
			var heartbeat slots.Heartbeat
			if err := json.Unmarshal(text, &heartbeat); err == nil {
				s.members.Hear(heartbeat)
			}
		})
		if err != nil {
			s.o.Logger.Warn("the heartbeats of the other processes cannot be read", "error", err)
		} else {
			defer stop()
		}
	}
	tick := time.NewTicker(slots.HeartbeatInterval)
	defer tick.Stop()
	for {
		s.beat()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// beat sends a heartbeat, and hands over the slot if it must.
func (s *single) beat() {
	skew, clock := s.o.clock.milliseconds()
	own := slots.Heartbeat{Member: s.name, Milliseconds: time.Since(s.started).Milliseconds(), ClockSkew: skew, Clock: clock}
	if t := s.ownership.Load(); t != nil {
		if t.writer.MaySend() {
			own.Owned = []slots.OwnedSlot{{Epoch: t.writer.Epoch()}}
		}
	} else if b := s.standby.Load(); b != nil && b.following.Load() {
		own.Copies, own.OldConfig = []slots.SlotCopied{b.copied(0)}, !s.o.lacking.isComplete()
	}
	s.members.Hear(own)
	s.o.clock.log(s.o.Logger)
	// A process that cannot use the log is not one of its processes.
	if s.o.Bus != nil && len(own.Owned)+len(own.Copies) > 0 {
		text, _ := json.Marshal(own) // Its fields always marshal.
		if err := s.o.Bus.Publish(text); err != nil {
			s.o.Logger.Debug("sending a heartbeat failed", "error", err)
		}
	}
	members, placed := s.members.View(1)
	for _, m := range slots.Place(members, placed, 1) {
		if m.Member == s.name && m.Action == slots.HandOver && s.stopper.now() {
			s.o.Logger.Warn("handing over the slot to another process, because the clock is wrong")
		}
	}
}

// own runs an ownership until ctx is done, the ownership has ended, or the slot is handed over.
func (s *single) own(ctx context.Context, t *ownership, d *dispatcher.Dispatcher, run func(context.Context, *dispatcher.Dispatcher) error) error {
	s.ownership.Store(t)
	defer s.ownership.Store(nil)
	return t.run(ctx, d, func(ctx context.Context, d *dispatcher.Dispatcher) error {
		return s.stopper.run(ctx, func(ctx context.Context) error { return run(ctx, d) })
	})
}
