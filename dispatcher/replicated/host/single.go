package host

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/contract/writekey"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/dispatcher/replicated/peer"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// OpenSlot opens the stream and the object stores of a slot, and creates them when they are missing.
type OpenSlot func(ctx context.Context) (slots.Remote, error)

// RunSlot runs a dispatcher whose store is a slot of a replicated log, until ctx is done. While
// another process owns the slot, this one is a standby: it keeps a copy of the store and answers
// calls with 503. When it owns the slot, it makes a Dispatcher, calls run with it, and becomes a
// standby again when it loses the slot. run must call Run of the Dispatcher.
//
// RunSlot requires o.Listeners, and closes them when ctx is done.
//
// An error of the log does not end RunSlot: it is logged, is the reason of /readyz, and the attempt is
// repeated.
func RunSlot(ctx context.Context, o Options, open OpenSlot, run func(context.Context, *dispatcher.Dispatcher) error) error {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	defer o.Listeners.Close()
	if o.Listeners.peers != nil {
		var err error
		if o.identity, err = peer.NewIdentity(o.Pod, o.Listeners.peers.Addr().String()); err != nil {
			return err
		}
		o.forwarder = &peer.Forwarder{Refuse: refuseForwarded, Logger: o.Logger, Connections: &peer.Connections{Memory: &limits.Pool{Max: memory.PlanFor(o.Memory).Requests}}}
	}
	s := newSingle(o)
	exchanging, stop := context.WithCancel(ctx)
	var exchanged sync.WaitGroup
	exchanged.Go(func() { s.exchange(exchanging) })
	defer exchanged.Wait()
	defer stop()
	if s.o.lacking != nil {
		go s.o.lacking.run(exchanging)
	}
	o.Logger.Info("listening", "listen", o.Listeners.Addr().String(), "admin", o.Listeners.AdminAddr().String())
	// The process serves until its Dispatcher has ended. Without a listener it claims nothing.
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	group, working := errgroup.WithContext(ctx)
	group.Go(func() error { return o.Listeners.serve(serving, s.o, s.handlers(), s.peers(), s.leave) })
	group.Go(func() error {
		defer stopServing()
		return s.run(working, open, run)
	})
	return group.Wait()
}

// single is a process with one slot among the others with the same log. By the heartbeats, an owner with a
// wrong clock finds a standby to which it hands over the slot.
type single struct {
	o Options
	// name is another one for each process: --pod-name is optional.
	name    string
	started time.Time
	members *slots.Members
	// gate is open while the process owns the slot. Otherwise the present standby responds.
	gate      requestGate
	present   atomic.Pointer[presentStandby]
	ownership atomic.Pointer[ownership]
	stopper   stopper
}

// presentStandby is a standby with its handlers.
type presentStandby struct {
	*standby
	serveCalls, serveAdmin http.Handler
}

func newSingle(o Options) *single {
	s := &single{o: o, name: rand.Text(), started: time.Now(), members: slots.NewMembers(nil)}
	s.o.clock = newClockCheck(o.WallClock, s.members)
	s.o.lacking = newLacking(o, s.members)
	s.o.Entrance = &s.gate
	s.standby()
	return s
}

// standby makes a standby that responds while the gate is closed.
func (s *single) standby() *standby {
	b := newStandby(s.o)
	s.present.Store(&presentStandby{b, b.handler(b.call()), b.admin(s.o)})
	return b
}

// run follows the slot, and owns it when it can, until ctx is done.
func (s *single) run(ctx context.Context, open OpenSlot, run func(context.Context, *dispatcher.Dispatcher) error) error {
	for b := s.present.Load().standby; ; {
		s.o.lacking.restart()
		t, d := b.own(ctx, s.o, open)
		if t == nil {
			return nil
		}
		b = s.standby() // It is not ready, and knows no owner, until it follows the log after this ownership.
		if s.o.forwarder != nil {
			s.o.forwarder.SetOwner(nil)
		}
		s.ownership.Store(t)
		err := t.run(ctx, d, func(ctx context.Context, d *dispatcher.Dispatcher) error {
			return s.stopper.run(ctx, func(ctx context.Context) error { return run(ctx, d) })
		})
		if err != nil || ctx.Err() != nil {
			return err
		}
		s.ownership.Store(nil)
	}
}

// leave is called at the end of the process. A standby forwards calls for the shutdown delay; an owner has accepted
// them for this time.
func (s *single) leave() time.Duration {
	if b := s.present.Load(); s.ownership.Load() == nil && b.calls != nil {
		b.stopping.Store(true)
		time.Sleep(s.o.ShutdownDelay)
	}
	return cmp.Or(s.o.DrainTimeout, dispatcher.DefaultDrain)
}

// handlers serve the requests to this process: the Dispatcher does behind the open gate, and a standby otherwise.
func (s *single) handlers() dispatcher.Handlers {
	return dispatcher.Handlers{
		Calls: s.gate.or((*openGate).serveCalls, func(w http.ResponseWriter, r *http.Request) { s.present.Load().serveCalls.ServeHTTP(w, r) }),
		Admin: s.gate.or((*openGate).serveAdmin, func(w http.ResponseWriter, r *http.Request) { s.present.Load().serveAdmin.ServeHTTP(w, r) }),
		Ready: func() error {
			if inside := s.gate.enter(); inside != nil {
				defer inside.requests.Done()
				return inside.dispatcher.Ready()
			}
			return s.present.Load().ready()
		},
	}
}

// peers serve the requests that standbys have forwarded.
func (s *single) peers() peer.Handlers {
	return peer.Handlers{
		Calls: s.gate.or((*openGate).serveCalls, peer.Misdirected),
		Admin: s.gate.or((*openGate).serveAdmin, peer.Misdirected),
		Namespace: func(key writekey.Hash) (string, bool) {
			inside := s.gate.enter()
			if inside == nil {
				return "", false
			}
			defer inside.requests.Done()
			return inside.dispatcher.NamespaceOf(key)
		},
	}
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
	} else if b := s.present.Load(); b.following.Load() {
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
