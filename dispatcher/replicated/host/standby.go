package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/jobs/audience"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/peer"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

const (
	// slotRetry is the wait after an error of the log.
	slotRetry = 2 * time.Second
	// claimPause is the wait after a Dispatcher could not be made, in which a standby claims the slot.
	claimPause = 15 * time.Second
	// openBackoff is the time after such a failure for which the copy of the process does not count as ready:
	// the cause is mostly in the process or its machine, and another process takes the slot. Without another
	// one, this process tries again after each claimPause.
	openBackoff = 5 * time.Minute
	// releaseTimeout bounds the orderly end of a session.
	releaseTimeout = 5 * time.Second
	// standbyRetryAfter is the Retry-After of a standby, in seconds, and silentRetryAfter of one whose
	// owner does not answer.
	standbyRetryAfter = 2
	silentRetryAfter  = 5
	// syncLimit is the time within which an owner must answer the sync of an audience: it compares all members.
	syncLimit = 5 * time.Minute
)

// standby answers requests while this process does not own the slot.
type standby struct {
	*replica
	// reason is why the copy has not caught up.
	reason atomic.Pointer[string]
	// following is true while the process keeps a copy.
	following atomic.Bool
	// caughtUp is true when the copy had all records of the log.
	caughtUp atomic.Bool
	// hasKnown is true when the process has known the address of the owner.
	hasKnown atomic.Bool
	// unopened is the last failure to open the store; nil for none.
	unopened atomic.Pointer[failedOpen]
	// newer is why this release cannot follow the log: a newer one wrote it; nil if it can.
	newer atomic.Pointer[string]
	// applied is the sequence of the last record in the copy.
	applied atomic.Uint64
}

// canReplaceOwner returns why the copy does not count as ready: it is ready when the process could replace the owner and has
// known its address once. It remains ready while the slot has no owner.
func (s *standby) canReplaceOwner() error {
	switch {
	case !s.o.clock.isRight():
		return errors.New(s.o.clock.problem())
	case s.newer.Load() != nil:
		return errors.New(*s.newer.Load())
	case s.openFailure() != "":
		return errors.New(s.openFailure())
	case !s.caughtUp.Load():
		return errors.New(*s.reason.Load())
	case s.host.lacking.problem() != "":
		return errors.New(s.host.lacking.problem())
	case s.forwarder.Owner() != "":
		s.hasKnown.Store(true)
	case !s.hasKnown.Load():
		return errors.New("standby: the owner of the slot has not announced its address yet, which it does every few seconds")
	}
	return nil
}

// connecting is the reason of a standby that has no answer of the log yet.
const connecting = "connecting to the log"

// setReason sets why the copy has not caught up.
func (s *standby) setReason(reason string) { s.reason.Store(&reason) }

// own follows the slot until this process owns it, and makes the Dispatcher; nil when ctx is done.
func (s *standby) own(ctx context.Context) (*ownership, *dispatcher.Dispatcher) {
	var damaged *pebblestore.CorruptError // of the last attempt to open the store
	for ctx.Err() == nil {
		s.setReason(connecting)
		pause := slotRetry
		t, err := s.claim(ctx, damaged)
		if err == nil {
			s.setReason("this process owns the slot, and opens its store")
			var d *dispatcher.Dispatcher
			if d, err = dispatcher.New(t.options()); err == nil {
				return t, d
			}
			damaged, _ = errors.AsType[*pebblestore.CorruptError](err)
			// Another process claims the released slot immediately, and may have what this one lacks.
			pause, err = claimPause, fmt.Errorf("open the store of the slot: %w", errors.Join(err, t.release(ctx)))
			s.unopened.Store(&failedOpen{err.Error(), time.Now().Add(openBackoff)})
		}
		if ctx.Err() != nil {
			break
		}
		s.failed(err)
		s.host.signal()
		s.log.Warn("this process cannot own the slot; trying again", "error", err, "after", pause.String())
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
	return nil, nil
}

// failed takes the error that ended the following of the slot, or with which its store could not be opened.
func (s *standby) failed(err error) {
	reason := err.Error()
	s.setReason(reason)
	s.caughtUp.Store(false)
	if errors.Is(err, pebblestore.ErrNewerFormat) {
		s.newer.Store(&reason)
	}
}

// failedOpen is a failure to open the store of a slot.
type failedOpen struct {
	reason string
	// until is the time before which the copy does not count as ready.
	until time.Time
}

// openFailure returns why the store could not be opened lately; empty if it was not tried.
func (s *standby) openFailure() string {
	if f := s.unopened.Load(); f != nil && time.Now().Before(f.until) {
		return f.reason
	}
	return ""
}

// copied describes the copy in heartbeats.
func (s *standby) copied() slots.SlotCopied {
	failed := s.openFailure() != ""
	return slots.SlotCopied{Slot: s.slot, Ready: s.caughtUp.Load() && !failed, Failed: failed}
}

// markCaughtUp takes note that the copy has all records of the log.
func (s *standby) markCaughtUp() {
	s.caughtUp.Store(true)
	s.newer.Store(nil)
}

// claim follows the slot until this process owns it.
func (s *standby) claim(ctx context.Context, damaged *pebblestore.CorruptError) (*ownership, error) {
	t := &ownership{
		replica: s.replica, stopping: ctx.Done(), dir: filepath.Join(s.o.DataDir, backup.QueueFolder), logger: s.log, clock: s.o.clock,
	}
	var err error
	if t.remote, err = s.host.s.Open(ctx, s.slot); err != nil {
		return nil, err
	}
	// A process with a wrong clock must not claim the slot, so the servers' clocks are read before.
	if err := t.clock.Read(ctx, s.slot, t.remote.Clocks); err != nil {
		return nil, err
	}
	watching, stop := context.WithCancel(ctx)
	defer stop()
	go t.clock.Watch(watching, s.slot, t.remote.Clocks)
	s.following.Store(true)
	defer s.following.Store(false)
	s.setReason("standby: the copy has not reached the end of the log yet")
	q := s.o.Queue
	q.Logger = s.log
	s.log.Info("following the log as a standby", "dir", t.dir)
	access := slots.Options{
		Logger: s.log, CaughtUp: func() { s.markCaughtUp(); s.host.signal() }, Applied: s.applied.Store,
		MayClaim: s.mayClaim, Now: s.o.LeaseClock,
	}
	if s.host.lacking != nil {
		access.Values = s.host.lacking.offer
	}
	t.writer, err = slots.Slot{Log: t.remote.Log, Objects: t.remote.Snapshots, Dir: t.dir, Store: q, Damaged: damaged,
		Options: access}.Follow(ctx)
	if err != nil {
		return nil, err
	}
	s.log.Info("this process owns the slot", "epoch", t.writer.Epoch())
	return t, nil
}

// state returns the part of this standby in the log.
func (s *standby) state() *adminapi.ReplicationState {
	state := &adminapi.ReplicationState{Pod: s.o.Pod, Slot: s.slot, Sequence: s.applied.Load(), Clock: s.o.clock.problem(),
		OwnerName: s.forwarder.Owner()}
	if err := s.canReplaceOwner(); err != nil {
		state.Reason = err.Error()
	} else {
		state.Ready = true
	}
	return state
}

// forwardCalls is a handler that sends calls to an owner.
func forwardCalls(f *peer.Forwarder) http.Handler {
	mux := http.NewServeMux()
	syncs := f.Limited(syncLimit)
	mux.HandleFunc(audience.SyncPath, func(w http.ResponseWriter, r *http.Request) {
		syncs.ServeHTTP(w, audience.WithoutDeadline(w, r, audience.DefaultIdleTimeout))
	})
	mux.Handle("/", f)
	return mux
}

func refuseCall(w http.ResponseWriter, _ *http.Request) {
	admission.Retry(standbyRetryAfter, admission.CodeNotReady, "this process does not know the slot of this write key yet; send the request again").Write(w)
}

// refuseForwarded answers a call that the owner did not answer.
func refuseForwarded(w http.ResponseWriter, err error) {
	broken, isClient := errors.AsType[*peer.BodyError](err)
	var timeout net.Error
	switch {
	case isClient && errors.As(broken, &timeout) && timeout.Timeout():
		admission.Refuse(http.StatusRequestTimeout, admission.CodeTooSlow, "the body did not arrive in time; send the request again").Write(w)
	case isClient:
		admission.Refuse(http.StatusBadRequest, admission.CodeUnreadable, "the body ended early; send the request again").Write(w)
	case errors.Is(err, peer.ErrBusy):
		admission.Retry(silentRetryAfter, admission.CodeBusy, "too many requests of this namespace, or of senders without a known write key, wait for the process that stores the calls; send the request again").Write(w)
	case errors.Is(err, peer.ErrTimeout):
		admission.Retry(silentRetryAfter, admission.CodeNotReady, "the process that stores the calls of this write key does not answer in time, but may have accepted the request; send it again with the same messageIds").Write(w)
	default:
		admission.Retry(standbyRetryAfter, admission.CodeNotReady, "the process that stores the calls did not answer, or another one is replacing it; send the request again").Write(w)
	}
}

// forwardAdmin is a handler that sends requests to the admin API of an owner.
func forwardAdmin(f *peer.Forwarder) http.Handler {
	return f.Admin(func(w http.ResponseWriter, err error) {
		owner, status := cmp.Or(f.Owner(), "of the slot"), http.StatusBadGateway
		message := fmt.Sprintf("the owner, %s, did not answer: %v; send the request again, or to its admin address", owner, err)
		switch broken, isClient := errors.AsType[*peer.BodyError](err); {
		case isClient:
			status, message = http.StatusBadRequest, broken.Error()
		case errors.Is(err, peer.ErrNoOwner):
			status, message = http.StatusServiceUnavailable, "no process owns the slot at the moment; a standby takes it over within about 15 s: send the request again"
		case errors.Is(err, peer.ErrBusy):
			status, message = http.StatusServiceUnavailable, fmt.Sprintf("too many requests wait for the owner, %s; send the request again", owner)
		case errors.Is(err, peer.ErrTimeout):
			status = http.StatusGatewayTimeout
			message = fmt.Sprintf("the owner, %s, did not answer within %v; it may have handled the request", owner, peer.AdminLimit)
		}
		http.Error(w, message, status)
	})
}
