package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/admin"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
	"github.com/posthorn/posthorn/dispatcher/jobs/audience"
	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/peer"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/internal/promtext"
)

// OpenSlot opens the stream and the object stores of a slot, and creates them when they are missing.
type OpenSlot func(ctx context.Context) (slots.Remote, error)

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
	// drainTakeover bounds the wait for requests to the previous owner before a process opens the store.
	drainTakeover = time.Second
	// standbyRetryAfter is the Retry-After of a standby, in seconds, and silentRetryAfter that of one whose
	// owner does not answer.
	standbyRetryAfter = 2
	silentRetryAfter  = 5
	// syncLimit is the time within which an owner must answer the sync of an audience: it compares all members.
	syncLimit = 5 * time.Minute
)

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
	if o.Listeners.peers != nil {
		var err error
		if o.identity, err = peer.NewIdentity(o.Pod, o.Listeners.peers.Addr().String()); err != nil {
			return err
		}
		o.forwarder = &peer.Forwarder{Refuse: refuseForwarded, Logger: o.Logger, Connections: &peer.Connections{Memory: &limits.Pool{Max: memory.PlanFor(o.Memory).Requests}}}
	}
	process := newSingle(o)
	o.clock, o.lacking = process.o.clock, process.o.lacking
	exchanging, stop := context.WithCancel(ctx)
	var exchanged sync.WaitGroup
	exchanged.Go(func() { process.exchange(exchanging) })
	defer exchanged.Wait()
	defer stop()
	if o.lacking != nil {
		go o.lacking.run(exchanging)
	}
	defer context.AfterFunc(ctx, o.Listeners.Close)()
	o.Logger.Info("listening", "listen", o.Listeners.Addr().String(), "admin", o.Listeners.AdminAddr().String())
	for {
		t, d, err := becomeOwner(ctx, o, open, &process.standby)
		if err != nil || t == nil {
			return err
		}
		if err := process.own(ctx, t, d, run); err != nil || ctx.Err() != nil {
			return err
		}
	}
}

// becomeOwner is a standby until this process owns the slot and has made a Dispatcher with its store.
// The term is nil when ctx is done before. present is the standby meanwhile.
func becomeOwner(ctx context.Context, o Options, open OpenSlot, present *atomic.Pointer[standby]) (*term, *dispatcher.Dispatcher, error) {
	shared, err := o.Listeners.share()
	if err != nil {
		return nil, nil, err
	}
	o.lacking.restart()
	s := newStandby(o)
	present.Store(s)
	defer present.Store(nil)
	serving, stop := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() {
		defer stop() // Without a listener nothing is claimed.
		served <- s.serve(serving, ctx, shared, o)
	}()
	t, d := s.own(serving, o, open)
	stop()
	if err := <-served; err != nil {
		if t != nil {
			err = errors.Join(err, t.release(ctx), d.Close())
		}
		return nil, nil, err
	}
	return t, d, nil
}

// standby answers requests while this process does not own the slot.
type standby struct {
	log *slog.Logger
	// calls sends the calls to the owner; nil if it refuses them.
	calls *peer.Forwarder
	// reason is why the process does not own the slot.
	reason atomic.Pointer[string]
	clock  *clockCheck
	// lacking is nil in a process that compares no objects.
	lacking *lacking
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
	applied  atomic.Uint64
	stopping atomic.Bool
}

func newStandby(o Options) *standby {
	s := &standby{log: o.Logger, calls: o.forwarder, clock: o.clock, lacking: o.lacking}
	s.because(connecting)
	return s
}

// ready returns why the process must not get calls. One that forwards them to the owner is ready when
// it could replace the owner and has known its address once. It remains ready while the slot has no owner.
func (s *standby) ready() error {
	switch {
	case s.stopping.Load():
		return errors.New("stopping")
	case !s.clock.isRight():
		return errors.New(s.clock.problem())
	case s.newer.Load() != nil:
		return errors.New(*s.newer.Load())
	case s.openFailure() != "":
		return errors.New(s.openFailure())
	case s.calls == nil || !s.caughtUp.Load():
		return errors.New(*s.reason.Load())
	case s.lacking.problem() != "":
		return errors.New(s.lacking.problem())
	case s.calls.Owner() != "":
		s.hasKnown.Store(true)
	case !s.hasKnown.Load():
		return errors.New("standby: the owner of the slot has not announced its address yet, which it does every few seconds")
	}
	return nil
}

// connecting is the reason of a standby that has no answer of the log yet.
const connecting = "connecting to the log"

// because sets why the process does not own the slot.
func (s *standby) because(reason string) { s.reason.Store(&reason) }

// own follows the slot until this process owns it, and makes the Dispatcher; nil when ctx is done.
func (s *standby) own(ctx context.Context, o Options, open OpenSlot) (*term, *dispatcher.Dispatcher) {
	var damaged *pebblestore.CorruptError // of the last attempt to open the store
	for ctx.Err() == nil {
		s.because(connecting)
		pause := slotRetry
		t, err := s.follow(ctx, o, open, damaged)
		if err == nil {
			s.because("this process owns the slot, and opens its store")
			var d *dispatcher.Dispatcher
			if d, err = dispatcher.New(t.options(o)); err == nil {
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
		o.hosted.changed()
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
	s.because(reason)
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
func (s *standby) copied(slot int) slots.SlotCopied {
	failed := s.openFailure() != ""
	return slots.SlotCopied{Slot: slot, Ready: s.caughtUp.Load() && !failed, Failed: failed}
}

// upToDate takes note that the copy has all records of the log.
func (s *standby) upToDate() {
	s.caughtUp.Store(true)
	s.newer.Store(nil)
}

func (s *standby) follow(ctx context.Context, o Options, open OpenSlot, damaged *pebblestore.CorruptError) (*term, error) {
	t := &term{
		slot: o.hosted.number(), pod: o.Pod, address: o.identity.Address(), hosted: o.hosted, stopping: ctx.Done(),
		dir: filepath.Join(o.DataDir, backup.QueueFolder), logger: o.Logger, clock: o.clock, uploads: o.hosted.uploads(),
	}
	var err error
	if t.remote, err = open(ctx); err != nil {
		return nil, err
	}
	// A process with a wrong clock must not claim the slot, so the servers' clocks are read before.
	if err := o.clock.Read(ctx, t.slot, t.remote.Clocks); err != nil {
		return nil, err
	}
	watching, stop := context.WithCancel(ctx)
	defer stop()
	go o.clock.Watch(watching, t.slot, t.remote.Clocks)
	s.following.Store(true)
	defer s.following.Store(false)
	s.because("standby: another process owns the slot, or did a moment ago")
	q := o.Queue
	q.Logger = o.Logger
	s.log.Info("following the log as a standby", "dir", t.dir)
	access := slots.Options{Logger: o.Logger, CaughtUp: func() { s.upToDate(); o.hosted.changed() }, Applied: s.applied.Store, MayClaim: o.mayClaim}
	if o.lacking != nil {
		access.Values = o.lacking.offer
	}
	if o.identity != nil {
		access.Announcement, access.Announced = o.identity.Announce(), s.calls.SetOwner
	}
	t.writer, err = slots.Slot{Log: t.remote.Log, Objects: t.remote.Snapshots, Dir: t.dir, Store: q, Damaged: damaged, Options: access}.Follow(ctx)
	if err != nil {
		return nil, err
	}
	s.log.Info("this process owns the slot", "epoch", t.writer.Epoch())
	return t, nil
}

// serve answers requests until ctx is done. When process, the context of the process, is done, too, it
// stops as an owner does: calls are still forwarded for the shutdown delay.
func (s *standby) serve(ctx, process context.Context, l *Listeners, o Options) error {
	return l.serve(ctx, o, dispatcher.Handlers{Calls: s.handler(s.call()), Admin: s.admin(o), Ready: s.ready}, peer.NotOwner(), func() time.Duration {
		if process.Err() == nil || s.calls == nil {
			return drainTakeover
		}
		s.stopping.Store(true)
		time.Sleep(o.ShutdownDelay)
		return cmp.Or(o.DrainTimeout, dispatcher.DefaultDrain)
	})
}

// state returns the part of this standby in the log.
func (s *standby) state(o Options) *adminapi.LogState {
	state := &adminapi.LogState{Pod: o.Pod, Address: o.identity.Address(), Slot: o.hosted.number(), Sequence: s.applied.Load(), Clock: s.clock.problem()}
	if s.calls != nil {
		state.OwnerName = s.calls.Owner()
	}
	if err := s.ready(); err != nil {
		state.Reason = err.Error()
	} else {
		state.Ready = true
	}
	return state
}

// State implements dispatcher.Lease.
func (t *term) State(ready error) *adminapi.LogState {
	status := t.writer.Status()
	state := &adminapi.LogState{
		Pod: t.pod, Address: t.address, Slot: t.slot, Owner: true, Ready: ready == nil, Sequence: status.Sequence,
		Epoch: t.writer.Epoch(), MaySend: t.writer.MaySend(), Bytes: status.Bytes, MaxBytes: status.MaxBytes,
		Snapshot: t.snapshotTaken(), Clock: t.clock.problem(),
	}
	t.durability.describe(state)
	state.Gaps = t.gaps()
	if ready != nil {
		state.Reason = ready.Error()
	}
	return state
}

// snapshotTaken returns the time of the last snapshot; zero before the first one.
func (t *term) snapshotTaken() time.Time {
	if s := t.snapshots.Load(); s != nil {
		return s.Taken()
	}
	return time.Time{}
}

// repair makes a snapshot replace the records that a server lacks; false if the store is not open yet.
func (t *term) repair() bool {
	s := t.snapshots.Load()
	if s != nil {
		s.Repair()
	}
	return s != nil
}

// gaps returns what the log lacks.
func (t *term) gaps() (gaps []string) {
	if s := t.snapshots.Load(); s != nil {
		gaps = s.Gaps()
	}
	return slices.Concat(gaps, t.durability.known().Gaps)
}

// foundGaps returns the number of checks that found something that the log lacks.
func (t *term) foundGaps() (n int64) {
	if s := t.snapshots.Load(); s != nil {
		n = s.Repairs()
	}
	return n + t.durability.gaps.Load()
}

// uploaded returns the number of bytes that were uploaded for snapshots.
func (t *term) uploaded() int64 {
	if s := t.snapshots.Load(); s != nil {
		return s.Uploaded()
	}
	return 0
}

// call forwards the calls to the owner, or refuses them.
func (s *standby) call() http.Handler {
	if s.calls == nil {
		return http.HandlerFunc(refuseCall)
	}
	return forwardCalls(s.calls)
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

// handler serves the health checks; next serves all other requests.
func (s *standby) handler(next http.Handler) http.Handler {
	mux := http.NewServeMux()
	admin.MountHealth(mux, s.ready)
	mux.Handle("/", next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" {
			w.Header().Set(adminapi.StandbyHeader, "1")
		}
		mux.ServeHTTP(w, r)
	})
}

// admin is the handler of the admin listener: metrics, too.
func (s *standby) admin(o Options) http.Handler {
	registry := dispatcher.NewRegistry()
	registry.MustRegister(logMetrics{func() *term { return nil }, s.calls, func() (uint64, bool) { return s.applied.Load(), true }}, s.clock.metric(), s.lacking.metric())
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "posthorn_ready", Help: "1 if the pod may get calls."}, func() float64 { return promtext.Bool(s.ready() == nil) }))
	guarded := http.NewServeMux()
	guarded.Handle("GET /metrics", promtext.Handler(registry))
	guarded.HandleFunc("GET /report", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, adminapi.Report{Pod: o.Pod, Ready: s.ready() == nil, Log: &adminapi.LogReport{Standby: true}})
	})
	admin.MountLog(guarded, func() *adminapi.LogState { return s.state(o) })
	forwarded := http.Handler(http.HandlerFunc(refuseAdmin))
	if s.calls != nil {
		forwarded = forwardAdmin(s.calls)
	}
	guarded.Handle("/", forwarded)
	guarded.HandleFunc("/debug/", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "this process does not own the messages; use /slots/0/debug/ for the owner", http.StatusNotFound)
	})
	root, owner := http.NewServeMux(), adminapi.SlotPath(0)
	root.Handle("/", protect(o, guarded))
	root.Handle(owner+"/", http.StripPrefix(owner, protect(o, forwarded)))
	return s.handler(root)
}

const standbyMessage = "this process does not own the messages: it is a standby, or the log cannot be reached; send the request to the owner, or again later"

func refuseCall(w http.ResponseWriter, _ *http.Request) {
	admission.Retry(standbyRetryAfter, admission.CodeNotReady, standbyMessage).Write(w)
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

func refuseAdmin(w http.ResponseWriter, _ *http.Request) {
	http.Error(w, standbyMessage, http.StatusServiceUnavailable)
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

// ending ends a term in order, from another goroutine.
type ending struct {
	mu     sync.Mutex
	cancel context.CancelFunc // nil while there is no term
}

// run calls a function whose context ends with ctx, or by now.
func (e *ending) run(ctx context.Context, fn func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	e.set(cancel)
	defer e.set(nil)
	return fn(ctx)
}

func (e *ending) set(cancel context.CancelFunc) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cancel = cancel
}

// now ends the term, and reports whether there was one that had not been ended.
func (e *ending) now() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cancel == nil {
		return false
	}
	e.cancel()
	e.cancel = nil
	return true
}

// term is the time for which this process owns a slot.
type term struct {
	// slot is the number of the slot, in the process pod, which others reach at an address.
	slot         int
	pod, address string
	// hosted is nil in a process with one slot.
	hosted *hosted
	// stopping is closed when dispatcher.New need not continue.
	stopping <-chan struct{}
	remote   slots.Remote
	writer   *slots.Writer
	dir      string
	logger   *slog.Logger
	clock    *clockCheck
	// uploads is that of the process; nil for one with one slot.
	uploads *rate.Limiter
	// snapshots is set when the store is open.
	snapshots  atomic.Pointer[slots.Snapshotter]
	durability durability
}

// run runs a Dispatcher until ctx is done or the term has ended.
func (t *term) run(ctx context.Context, d *dispatcher.Dispatcher, run func(context.Context, *dispatcher.Dispatcher) error) error {
	defer t.writer.Close()
	running, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-t.writer.Done():
			stop()
		case <-running.Done():
		}
	}()
	go t.durability.watch(running, t.readDurability(d), t.repair, t.logger)
	go t.clock.Watch(running, t.slot, t.remote.Clocks)
	taken := make(chan struct{})
	go func() {
		defer close(taken)
		t.takeSnapshots(running, d.Store())
	}()
	defer func() {
		stop()
		if ctx.Err() == nil { // The next term uses the same folder.
			<-taken
		}
	}()
	err := run(running, d)
	if t.Ended() {
		if ctx.Err() == nil {
			t.logger.Warn("another process owns the slot now, or the log is damaged; becoming a standby", "error", t.writer.Err())
		}
		if errors.Is(err, slots.ErrSessionEnded) {
			err = nil // The writes of a session that has ended fail.
		}
		return err
	}
	return errors.Join(err, t.release(ctx))
}

// release ends the term in order, also when ctx is done.
func (t *term) release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	return t.writer.Release(ctx)
}

// options returns the options of the Dispatcher of this term.
func (t *term) options(o Options) dispatcher.Options {
	made := o.Options
	made.Lease, made.HandOver = t, cmp.Or(o.HandOver, handOverTimeout)
	if t.hosted != nil {
		return made
	}
	made.Listeners = o.Listeners.Listeners
	made.Collectors = []prometheus.Collector{logMetrics{func() *term { return t }, o.forwarder, func() (uint64, bool) { return t.writer.Status().Sequence, true }}, o.clock.metric()}
	if o.identity != nil {
		made.Entrance = &peerEntrance{on: o.Listeners.peers, identity: o.identity, log: o.Logger}
	}
	return made
}

// Log implements dispatcher.Lease.
func (t *term) Log() pebblestore.Log { return t.writer }

// MaySend implements dispatcher.Lease.
func (t *term) MaySend() bool { return t.writer.MaySend() && !t.clock.mustHandOver(t.slot) }

// MayExpire implements dispatcher.Lease.
func (t *term) MayExpire() bool { return t.clock.isTrusted() }

// Report implements dispatcher.Lease.
func (t *term) Report() *adminapi.LogReport {
	return &adminapi.LogReport{Epoch: t.writer.Epoch(), Slot: t.slot}
}

// abandonAfter is the time without an acknowledgement of the log after which the end of a term does not wait for it.
const abandonAfter = 5 * time.Second

// Abandon implements dispatcher.Lease.
func (t *term) Abandon() {
	if t.writer.Status().Unacknowledged >= abandonAfter {
		t.logger.Warn("the log does not answer; stopping without it. Calls in progress are refused")
		t.writer.Close()
	}
}

// Ended implements dispatcher.Lease.
func (t *term) Ended() bool { return t.writer.Err() != nil }

// Members implements dispatcher.Lease.
func (t *term) Members() audience.Copies {
	return ownedCopies{t.remote.Members, t.writer, t.stopping}
}

// ownedCopies are copies of which only those of this owner and of earlier ones are listed. A process
// that was stopped, and has lost the slot, must not remove the files of the next owner as unknown
// ones. Reads, which only New needs, end with the session and with the process.
type ownedCopies struct {
	audience.Copies
	writer interface {
		MaySend() bool
		Done() <-chan struct{}
	}
	stopping <-chan struct{}
}

// List implements audience.Copies.
func (c ownedCopies) List(ctx context.Context) ([]string, error) {
	names, err := c.Copies.List(ctx)
	// The check is after the list: a later owner adds its files after this moment.
	if err == nil && !c.writer.MaySend() {
		return nil, errors.New("this process may have lost the slot; the copies are listed again at the next start")
	}
	return names, err
}

// Get implements audience.Copies.
func (c ownedCopies) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-c.writer.Done():
			cancel()
		case <-c.stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	r, err := c.Copies.Get(ctx, name)
	if err != nil {
		cancel()
		return nil, err
	}
	return untilClosed{r, cancel}, nil
}

// untilClosed is a reader whose context ends when it is closed.
type untilClosed struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (r untilClosed) Close() error {
	defer r.cancel()
	return r.ReadCloser.Close()
}

// takeSnapshots takes snapshots of the store until ctx is done. It may end a few seconds later, when a
// request to the object store ends, so the release of the slot does not wait for it.
func (t *term) takeSnapshots(ctx context.Context, store *pebblestore.Store) {
	s := &slots.Snapshotter{
		Log: t.remote.Log, Objects: t.remote.Snapshots, Writer: t.writer, Store: store,
		FS: vfs.Default, Dir: t.dir + ".snapshot", Logger: t.logger, Limiter: t.uploads,
	}
	t.snapshots.Store(s)
	s.Run(ctx)
}
