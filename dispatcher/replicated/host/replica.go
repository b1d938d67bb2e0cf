package host

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/replicated/peer"
)

// replica is a slot, as a process has it.
type replica struct {
	host *host
	slot int
	o    Options
	log  *slog.Logger
	gate requestGate
	// forwarder sends requests to the owner, if it is another process. calls serves them here or there.
	forwarder *peer.Forwarder
	calls     http.Handler
	// takes is true while slots.Place selects this process to take the slot.
	takes atomic.Bool
	// listed is true while the owner knows no other write keys than those in the live configs.
	listed atomic.Bool
	// standby is the copy while the process follows the slot, and ownership is set while it owns it.
	standby   atomic.Pointer[standby]
	ownership atomic.Pointer[ownership]
	stopper   stopper
	// compared is nil while this process does not own the slot, and until its store is compared with the
	// directory.
	compared atomic.Pointer[compared]
	// unwanted is the time for which placement has not wanted the copy.
	unwanted lasting

	mu sync.Mutex
	// end ends the following of the slot; nil while the process does not follow it. removing is true from its
	// call by remove until the copy is removed.
	end      context.CancelFunc
	removing bool
}

func newReplica(h *host, slot int) *replica {
	s := &replica{host: h, slot: slot, log: h.log.With("slot", slot)}
	s.forwarder = &peer.Forwarder{Refuse: refuseForwarded, Logger: s.log, Connections: &h.connections, Slot: strconv.Itoa(slot)}
	s.calls = s.gate.or((*openGate).serveCalls, forwardCalls(s.forwarder).ServeHTTP)
	o := h.o
	o.Logger, o.DataDir = s.log, slotFolder(h.o.DataDir, slot)
	o.ShutdownDelay = 0
	o.Entrance = &s.gate
	o.Share = &dispatcher.Share{
		Stores: s.share(), Labels: s.labels(), Listed: h.namespaces.index.Knows, Decoder: &h.namespaces.decoder,
	}
	o.Queue.Quiet = func(quiet bool) { h.quiet.set(slot, quiet) }
	o.Queue.Shared = h.shared
	// Copies have the same write buffers as stores.
	o.Queue.MemTableBytes = cmp.Or(o.Queue.MemTableBytes, h.memory.Share(s.share()).MemTable)
	s.o = o
	return s
}

// hasUnlistedKeys reports whether this process, which owns the slot, can know write keys that no live config
// has.
func (s *replica) hasUnlistedKeys() bool {
	inside := s.enter()
	if inside == nil {
		return true // Its Dispatcher starts or ends.
	}
	defer inside.requests.Done()
	return inside.dispatcher.HasUnlistedKeys()
}

// labels returns the labels of the slot's metrics.
func (s *replica) labels() prometheus.Labels { return prometheus.Labels{"slot": strconv.Itoa(s.slot)} }

// share is the number of stores for which the memory of the process is planned: half of the slots, rounded up,
// because an installation with several slots has two processes or more.
func (s *replica) share() int {
	return (s.host.s.Number + 1) / 2
}

// mayClaim is slots.Options.MayClaim: the clock is right, the directory is known, with which an owner compares its store,
// and slots.Place selects this process. With lacking, each process follows the only slot, and those with all objects may
// claim it.
func (s *replica) mayClaim() bool {
	if !s.o.clock.isRight() || s.host.namespaces.directory.Load() == nil {
		return false
	}
	if s.host.lacking != nil {
		return s.host.lacking.mayClaim()
	}
	return s.takes.Load()
}

// start starts to follow the slot, unless the process does already.
func (s *replica) start(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end != nil || ctx.Err() != nil {
		return
	}
	following, end := context.WithCancel(ctx)
	s.end = end
	s.host.running.Go(func() {
		s.follow(following)
		s.mu.Lock()
		removing := s.removing
		s.mu.Unlock()
		if !removing {
			return
		}
		if err := s.o.fs().RemoveAll(s.o.DataDir); err != nil {
			s.log.Warn("removing the copy of a slot failed", "error", err)
		}
		s.mu.Lock()
		s.end, s.removing = nil, false
		s.mu.Unlock()
	})
}

// stop ends the following and the ownership of the slot, without waiting.
func (s *replica) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end != nil {
		s.end()
	}
}

// remove ends the following of the slot, and removes the copy. It does not wait for them: the heartbeats of the
// process would wait, too, and the others would take it for lost.
func (s *replica) remove() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end == nil || s.removing || s.ownership.Load() != nil {
		return
	}
	s.log.Info("another process keeps the copy of this slot; removing this one")
	s.removing = true
	s.end()
	s.host.signal() // The others must not count the copy while its files are removed.
}

// isRemoving reports whether the copy is being removed.
func (s *replica) isRemoving() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.removing
}

// lasting measures the time for which a condition has held.
type lasting struct{ since time.Time }

// lasts takes whether the condition holds now, and reports whether it has held for a time.
func (l *lasting) lasts(holds bool, now time.Time, d time.Duration) bool {
	if !holds {
		l.since = time.Time{}
	} else if l.since.IsZero() {
		l.since = now
	}
	return holds && now.Sub(l.since) >= d
}

// handOver ends the ownership of the slot in order.
func (s *replica) handOver() {
	if s.stopper.now() {
		s.log.Info("handing over the slot to another process")
	}
}

// follow follows the slot, and owns it when the process may, until ctx is done.
func (s *replica) follow(ctx context.Context) {
	defer s.standby.Store(nil)
	for ctx.Err() == nil {
		t, d := s.newStandby().own(ctx)
		if t == nil {
			return
		}
		s.newStandby() // It is not ready until it follows the slot after this ownership.
		s.ownership.Store(t)
		s.host.signal()
		err := t.run(ctx, d, s.runOwned)
		s.host.quiet.end(s.slot)
		s.compared.Store(nil)
		s.ownership.Store(nil)
		s.host.signal()
		if err != nil {
			s.log.Error("the owner of the slot failed; following the slot again", "error", err)
			select {
			case <-time.After(slotRetry):
			case <-ctx.Done():
			}
		}
	}
}

// newStandby makes the standby of the slot.
func (s *replica) newStandby() *standby {
	s.host.lacking.restart()
	b := &standby{replica: s}
	b.setReason(connecting)
	s.standby.Store(b)
	return b
}

// runOwned runs a Dispatcher until ctx is done, or the slot is handed over.
func (s *replica) runOwned(ctx context.Context, d *dispatcher.Dispatcher) error {
	return s.stopper.run(ctx, func(ctx context.Context) error {
		group, ctx := errgroup.WithContext(ctx)
		beside, stop := context.WithCancel(ctx)
		stored := d.Namespaces()
		group.Go(func() error {
			s.assignStored(beside, stored)
			return nil
		})
		group.Go(func() error { return s.control(beside, d) })
		group.Go(func() error {
			defer stop()
			return d.Run(ctx)
		})
		return group.Wait()
	})
}

// control gives a Dispatcher its live configs until ctx is done.
func (s *replica) control(ctx context.Context, d *dispatcher.Dispatcher) error {
	if s.host.s.Control != nil {
		return s.host.s.Control(ctx, d)
	}
	s.host.namespaces.feed(ctx, s.slot, d)
	return nil
}

// ready returns why this process cannot serve the calls of the slot: as its owner, or as a standby that could
// replace the owner.
func (s *replica) ready() error {
	if inside := s.enter(); inside != nil {
		defer inside.requests.Done()
		return inside.dispatcher.Ready()
	}
	if b := s.standby.Load(); b != nil {
		return b.canReplaceOwner()
	}
	return errors.New(connecting)
}

// ServeHTTP sends a call to the owner of the slot.
func (s *replica) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.calls.ServeHTTP(w, r) }

// enter admits a request to the Dispatcher of the slot. The result is nil if this process does not own
// the slot; otherwise the caller calls requests.Done after its request.
func (s *replica) enter() *openGate {
	if s == nil {
		return nil
	}
	return s.gate.enter()
}
