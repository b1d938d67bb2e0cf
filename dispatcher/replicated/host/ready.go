package host

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// ready returns why the process must not get calls.
func (h *host) ready() error {
	if err := h.canServe(); err != nil {
		return err
	}
	if h.s.Control != nil { // Each process follows the slot, and no config is known before it is owned.
		return h.slots[0].ready()
	}
	if !h.start.open.Load() {
		return errStarting
	}
	return nil
}

var errStarting = fmt.Errorf("restoring copies of slots: this process is ready when they are complete, when no other process is ready, or after %v without progress", copyLimit)

// startGate decides when a process is ready for the first time: a rolling update ends the next process then, and
// this one should be able to take its slots at once. It never closes again.
type startGate struct {
	open atomic.Bool
	// since is when the gate found the progress has; zero before.
	since time.Time
	has   int
}

// update takes the progress of the process, and whether another process is ready. One goroutine calls it.
func (g *startGate) update(now time.Time, p slots.Progress, served bool) {
	switch {
	case !served, p.Complete: // Without another process nothing is gained by the wait.
		g.open.Store(true)
	case g.since.IsZero() || p.Has > g.has:
		g.since, g.has = now, p.Has
	case now.Sub(g.since) >= copyLimit:
		g.open.Store(true)
	}
}

// checkStart opens the gate when it is time.
func (h *host) checkStart() {
	if h.start.open.Load() || time.Since(h.started) < settleTime || h.canServe() != nil {
		return
	}
	members, placed := h.members.View(len(h.slots))
	h.start.update(time.Now(), slots.ProgressOf(h.name, members, placed, h.s.Standbys), slots.Serves(members, h.name))
	if h.start.open.Load() {
		h.log.Info("ready for the first time")
		h.signal()
	}
}

// canServe returns why the process cannot serve calls.
func (h *host) canServe() error {
	if h.stopping.Load() {
		return errors.New("stopping")
	}
	// First: a process of another installation can have the same name, too.
	if fault := h.fault.Load(); fault != nil {
		return errors.New(*fault)
	}
	if h.isRecent(&h.namesakeAt) {
		return errors.New(h.namesake())
	}
	if at := h.heardAt.Load(); at != 0 && time.Since(h.started)-time.Duration(at) > cutOffAfter {
		return errCutOff
	}
	if !h.o.clock.isRight() && len(h.owned()) == 0 {
		return errors.New(h.o.clock.problem())
	}
	if problem := *h.oldConfig.Load(); problem != "" && len(h.owned()) == 0 {
		return errors.New(problem)
	}
	if err := h.canRoute(); err != nil {
		return err
	}
	if !h.namespaces.isSynced() {
		return errNotSynced
	}
	if !h.namespaces.isUsable() {
		return dispatcher.ErrNoUsableConfig
	}
	if err := h.namespaces.directory.Load().Err(); err != nil {
		return err
	}
	return h.newerFormat()
}

// newerFormat returns an error if a newer release wrote a slot: this process cannot take it from the processes
// of that release, so they must not be replaced by processes of this one.
func (h *host) newerFormat() error {
	for _, s := range h.slots {
		if b := s.standby.Load(); b != nil {
			if reason := b.newer.Load(); reason != nil {
				return fmt.Errorf("slot %d: %s", s.slot, *reason)
			}
		}
	}
	return nil
}

// errNotHeard is the reason of a process that would take all slots, because it hears no other one.
var errNotHeard = errors.New("no heartbeat of this process was received; permit the NATS user to publish and to subscribe to ph.NAME.members, with the NAME of --replication-name")

// errCutOff is the reason of a process that has lost the servers of the log.
var errCutOff = fmt.Errorf("no heartbeat of this process was received for %v: it cannot reach the servers of the log, or they do not run", cutOffAfter)

// canRoute returns why requests cannot be routed.
func (h *host) canRoute() error {
	if fault := h.fault.Load(); fault != nil {
		return errors.New(*fault)
	}
	if h.heardAt.Load() == 0 {
		return errNotHeard
	}
	if !h.isOnly() && !h.namespaces.isSynced() {
		return errNotSynced
	}
	return nil
}

var errNotSynced = errors.New("waiting for the first full config")
