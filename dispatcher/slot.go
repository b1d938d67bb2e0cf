package dispatcher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/dispatcher/admin"
	"github.com/posthorn/posthorn/dispatcher/admission"
	"github.com/posthorn/posthorn/dispatcher/audience"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/ingest"
	"github.com/posthorn/posthorn/dispatcher/listen"
	"github.com/posthorn/posthorn/dispatcher/promtext"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/slots"
)

// OpenSlot opens the stream and the object stores of a slot, and creates them when they are missing.
type OpenSlot func(ctx context.Context) (slots.Remote, error)

const (
	// slotRetry is the wait after an error of the log.
	slotRetry = 2 * time.Second
	// claimPause is the wait after a Dispatcher could not be made. It is longer than the time after
	// which a standby claims the slot.
	claimPause = 15 * time.Second
	// releaseTimeout bounds the orderly end of a session.
	releaseTimeout = 5 * time.Second
	// standbyRetryAfter is the Retry-After of a standby, in seconds.
	standbyRetryAfter = 2
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
func RunSlot(ctx context.Context, o Options, open OpenSlot, run func(context.Context, *Dispatcher) error) error {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Repair {
		return errors.New("dispatcher: a store with a replicated log is not repaired; remove --repair: damaged files are restored from the log")
	}
	defer context.AfterFunc(ctx, o.Listeners.Close)()
	o.Logger.Info("listening", "listen", o.Listeners.calls.Addr().String(), "admin", o.Listeners.admin.Addr().String())
	for {
		t, err := becomeOwner(ctx, o, open)
		if err != nil || t == nil {
			return err
		}
		if err := t.run(ctx, o, run); err != nil || ctx.Err() != nil {
			return err
		}
	}
}

// becomeOwner is a standby until this process owns the slot. The term is nil when ctx is done.
func becomeOwner(ctx context.Context, o Options, open OpenSlot) (*term, error) {
	shared, err := o.Listeners.share()
	if err != nil {
		return nil, err
	}
	s := &standby{log: o.Logger}
	serving, stop := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() { served <- s.serve(serving, shared, o) }()
	t := s.claim(ctx, o, open)
	stop()
	if err := <-served; err != nil {
		if t != nil {
			t.writer.Close()
		}
		return nil, err
	}
	return t, nil
}

// standby answers requests while this process does not own the slot.
type standby struct {
	log *slog.Logger
	// reason is why the process is not ready.
	reason atomic.Pointer[string]
}

// claim follows the slot until this process owns it; nil when ctx is done.
func (s *standby) claim(ctx context.Context, o Options, open OpenSlot) *term {
	for ctx.Err() == nil {
		reason := "connecting to the log"
		s.reason.Store(&reason)
		t, err := s.follow(ctx, o, open)
		if err == nil {
			return t
		}
		if ctx.Err() != nil {
			return nil
		}
		reason = err.Error()
		s.reason.Store(&reason)
		s.log.Warn("the slot cannot be followed; retrying", "error", err)
		select {
		case <-time.After(slotRetry):
		case <-ctx.Done():
		}
	}
	return nil
}

func (s *standby) follow(ctx context.Context, o Options, open OpenSlot) (*term, error) {
	t := &term{dir: filepath.Join(o.DataDir, backup.QueueFolder), logger: o.Logger}
	var err error
	if t.remote, err = open(ctx); err != nil {
		return nil, err
	}
	reason := "standby: another process owns the slot, or did a moment ago"
	s.reason.Store(&reason)
	q := o.Queue
	q.Logger = o.Logger
	s.log.Info("following the log as a standby", "dir", t.dir)
	t.writer, err = slots.Slot{Log: t.remote.Log, Objects: t.remote.Snapshots, Dir: t.dir, Store: q, Options: slots.Options{Logger: o.Logger}}.Follow(ctx)
	if err != nil {
		return nil, err
	}
	s.log.Info("this process owns the slot", "epoch", t.writer.Epoch())
	return t, nil
}

// serve answers requests until ctx is done.
func (s *standby) serve(ctx context.Context, l *Listeners, o Options) error {
	calls := listen.New(ingest.NewServer(s.handler(refuseCall)), maxConns, s.log)
	requests := listen.New(admin.NewStandbyServer(s.admin(o)), maxAdminConns, s.log)
	group, ctx := errgroup.WithContext(ctx)
	serve := func(serve func(net.Listener) error, on net.Listener) {
		group.Go(func() error {
			if err := serve(on); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("serve %s: %w", on.Addr(), err)
			}
			return nil
		})
	}
	serve(calls.Serve, l.calls)
	if l.callsTLS != nil {
		serve(func(on net.Listener) error { return calls.ServeTLS(on, o.TLS) }, l.callsTLS)
	}
	if l.probes != nil {
		serve(requests.Serve, l.probes)
	}
	if o.AdminTLS != nil {
		serve(func(on net.Listener) error { return requests.ServeTLS(on, o.AdminTLS) }, l.admin)
	} else {
		serve(requests.Serve, l.admin)
	}
	group.Go(func() error {
		<-ctx.Done()
		return errors.Join(calls.Close(), requests.Close())
	})
	return group.Wait()
}

// handler serves the health checks, and refuses all other requests.
func (s *standby) handler(refuse http.HandlerFunc) http.Handler {
	mux := http.NewServeMux()
	admin.MountHealth(mux, func() error { return errors.New(*s.reason.Load()) })
	mux.HandleFunc("/", refuse)
	return mux
}

// admin is the handler of the admin listener: metrics, too.
func (s *standby) admin(o Options) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	registerLog(registry, nil)
	metrics := promtext.Handler(registry)
	if o.AdminGuard != nil {
		metrics = o.AdminGuard(metrics)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	mux.Handle("/", s.handler(refuseAdmin))
	return mux
}

const standbyMessage = "this process does not own the messages: it is a standby, or the log cannot be reached; send the request to the owner, or again later"

func refuseCall(w http.ResponseWriter, _ *http.Request) {
	admission.Retry(standbyRetryAfter, admission.CodeNotReady, standbyMessage).Write(w)
}

func refuseAdmin(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusServiceUnavailable)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": standbyMessage})
}

// term is the time for which this process owns a slot.
type term struct {
	remote slots.Remote
	writer *slots.Writer
	dir    string
	logger *slog.Logger
	// snapshots is set when the store is open.
	snapshots atomic.Pointer[slots.Snapshotter]
}

// run runs a Dispatcher until ctx is done or the term has ended.
func (t *term) run(ctx context.Context, o Options, run func(context.Context, *Dispatcher) error) error {
	defer t.writer.Close()
	o.term = t
	d, err := New(o)
	if err != nil {
		// Another process can claim the slot meanwhile, and may have what this one lacks.
		t.writer.Close()
		t.logger.Error("the store of the slot cannot be used; trying again", "error", err, "after", claimPause.String())
		select {
		case <-time.After(claimPause):
		case <-ctx.Done():
		}
		return nil
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-t.writer.Done():
			stop()
		case <-running.Done():
		}
	}()
	taken := make(chan struct{})
	go func() {
		defer close(taken)
		t.takeSnapshots(running, d.store)
	}()
	defer func() {
		stop()
		if ctx.Err() == nil { // The next term uses the same folder.
			<-taken
		}
	}()
	err = run(running, d)
	if t.hasEnded() {
		t.logger.Warn("another process owns the slot now, or the log is damaged; becoming a standby", "error", t.writer.Err())
		if errors.Is(err, slots.ErrSessionEnded) {
			err = nil // The writes of a session that has ended fail.
		}
		return err
	}
	releasing, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	return errors.Join(err, t.writer.Release(releasing))
}

// maySend is the condition for each request; nil for none.
func (t *term) maySend() func() bool {
	if t == nil {
		return nil
	}
	return t.writer.MaySend
}

// hasEnded reports whether another session has ended the term.
func (t *term) hasEnded() bool { return t != nil && t.writer.Err() != nil }

// members are the copies of the audiences' files; nil when the disk is the only place of the store.
func (t *term) members() audience.Copies {
	if t == nil {
		return nil
	}
	return t.remote.Members
}

// takeSnapshots takes snapshots of the store until ctx is done. It may end a few seconds later, when a
// request to the object store ends, so the release of the slot does not wait for it.
func (t *term) takeSnapshots(ctx context.Context, store *pebblestore.Store) {
	s := &slots.Snapshotter{
		Log: t.remote.Log, Objects: t.remote.Snapshots, Writer: t.writer, Store: store,
		FS: vfs.Default, Dir: t.dir + ".snapshot", Logger: t.logger,
	}
	t.snapshots.Store(s)
	s.Run(ctx)
}

// registerLog registers the metrics of the replicated log. t is nil in a standby.
func registerLog(r prometheus.Registerer, t *term) {
	gauge := func(name, help string, value func() float64) {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value))
	}
	gauge("posthorn_log_owner", "1 in the process that accepts and delivers calls, 0 in a standby.", func() float64 { return number(t != nil) })
	if t == nil {
		return
	}
	gauge("posthorn_log_epoch", "Number of the owner's claim; it grows by one with each change of the owner.", func() float64 { return float64(t.writer.Epoch()) })
	gauge("posthorn_log_may_send", "1 while the owner may deliver; 0 while the log does not answer.", func() float64 { return number(t.writer.MaySend()) })
	gauge("posthorn_log_unacknowledged_seconds", "Age of the oldest change that the log has not acknowledged.", func() float64 { return t.writer.Status().Unacknowledged.Seconds() })
	gauge("posthorn_log_stream_bytes", "Bytes in the stream; calls are refused at 70 % of the maximum.", func() float64 { return float64(t.writer.Status().Bytes) })
	gauge("posthorn_log_stream_max_bytes", "Maximum size of the stream; 0 for none.", func() float64 { return float64(t.writer.Status().MaxBytes) })
	gauge("posthorn_log_snapshot_timestamp_seconds", "Time of the owner's last snapshot; 0 before the first one.", func() float64 {
		if s := t.snapshots.Load(); s != nil && !s.Taken().IsZero() {
			return float64(s.Taken().UnixMilli()) / 1000
		}
		return 0
	})
}
