// Package audience stores the members of audiences and sends their changes as identify calls. It
// does not know how calls are delivered; it appends them to the queue.
//
// A sync uploads the members as lines of JSON, all of them or an increment. They are sorted on disk
// and merged with the members of the last sync, and the difference becomes identify calls. Memory
// is constant for any number of members.
//
// A sync is decided at one moment, when the store has its state; the files that it names are durable
// before. Before that moment nothing has changed; after it, a restart completes the sync with the
// same result. The ids of its calls derive from the sync
// and the user, so that a call that is appended again is recognized as a duplicate. The main type
// is Service.
package audience

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/internal/durable"
)

const (
	// DefaultMaxBytes bounds the disk space of one sync's members.
	DefaultMaxBytes = 16 << 30

	// maxSyncs bounds the syncs that are received at the same time; one namespace may have half of
	// them.
	maxSyncs             = 8
	maxSyncsPerNamespace = 4
	// batchSize is how many identify calls are appended at once.
	batchSize = 256
	tick      = time.Second
	retryMin  = 200 * time.Millisecond
	retryMax  = 10 * time.Second
	// answerAfter is how long a sync's response waits until its calls are in the queue.
	answerAfter = 10 * time.Second
	// checkEvery is the number of records between two checks of the disk.
	checkEvery = 4096
)

// Options configure a Service. Dir, Store, Gate and Lanes are required.
type Options struct {
	// Dir holds the members; it is created if missing.
	Dir string
	// FS is the file system of Dir. Default vfs.Default.
	FS vfs.FS
	// Store keeps the states of the audiences.
	Store Store
	// Copies keeps copies of the files for other processes; nil when the Store is on the same disk.
	Copies Copies
	// Gate is the way into the queue.
	Gate *admission.Gate
	// Lanes are the lanes whose progress sets the pace of a sync.
	Lanes Lanes
	// Owner is the root URL of the pod that stores the members; empty if it is this pod. Other pods
	// forward syncs to the owner.
	Owner string
	// MaxBytes bounds the disk space of one sync. Default DefaultMaxBytes.
	MaxBytes int64
	// OrphanGrace is how long the members of a deleted audience are kept. Default 10 min.
	OrphanGrace time.Duration
	// IdleTimeout is the longest pause of a sync's sender. Default DefaultIdleTimeout.
	IdleTimeout time.Duration
	// Changes is marked when the report of an audience changes; nil marks nothing.
	Changes    *changes.Log
	Now        func() time.Time
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Service stores the audiences of all namespaces. Make it with New, and call Run.
type Service struct {
	Options
	metrics metrics
	proxy   http.Handler

	stopping chan struct{}
	stop     sync.Once
	kick     chan struct{}

	// restored is the number of copies that the last check found missing.
	restored atomic.Int64

	mu        sync.Mutex
	audiences map[name]*audience
	syncs     map[string]int // by namespace; "" is the total
}

// name identifies an audience.
type name struct{ namespace, name string }

// audience is the state of one audience. The mutex of the Service guards it.
type audience struct {
	name
	dir string
	// done is the last completed sync, pending one that is decided.
	done, pending *state
	// undecided is true while the store may have a sync as pending whose decision failed. The sync's
	// files are kept. Only the operation in progress uses it.
	undecided bool
	// sent is how many changes of pending are in the queue; waits is the reason why the rest waits,
	// if it does.
	sent  atomic.Int64
	waits atomic.Pointer[string]
	// broken is the reason why the audience cannot be used.
	broken error
	// busy is the operation in progress, with its start; empty if there is none.
	busy  string
	since time.Time
	// sending is true while a goroutine completes pending; over gets true at its end, or false if it was
	// cancelled.
	sending bool
	over    chan bool
	// gone is the time since when the config lacks the audience; abandoned is set at the end of the
	// grace period.
	gone      time.Time
	abandoned atomic.Bool

	refused     time.Time
	lastRefusal string
	// changed is marked when the report changes.
	changed *changes.Object
}

// New opens the stored audiences. A sync that was decided before continues when the Service runs.
func New(o Options) (*Service, error) {
	o.MaxBytes = cmp.Or(o.MaxBytes, DefaultMaxBytes)
	o.OrphanGrace = cmp.Or(o.OrphanGrace, 10*time.Minute)
	o.IdleTimeout = cmp.Or(o.IdleTimeout, DefaultIdleTimeout)
	o.Logger = cmp.Or(o.Logger, slog.Default())
	o.FS = cmp.Or(o.FS, vfs.Default)
	if o.Now == nil {
		o.Now = time.Now
	}
	s := &Service{
		Options: o, metrics: newMetrics(o.Registerer),
		stopping: make(chan struct{}), kick: make(chan struct{}, 1),
		audiences: map[name]*audience{}, syncs: map[string]int{},
	}
	if o.Owner != "" {
		var err error
		if s.proxy, err = s.newProxy(); err != nil {
			return nil, err
		}
		return s, nil
	}
	if err := s.load(); err != nil {
		return nil, fmt.Errorf("audiences: %w", err)
	}
	return s, nil
}

// load opens the stored audiences and removes files that no audience names.
func (s *Service) load() error {
	if err := makeFolder(s.FS, s.Dir); err != nil {
		return err
	}
	values, err := s.Store.AllMeta()
	if err != nil {
		return err
	}
	known, named := map[string]bool{}, map[string]bool{}
	for key, value := range values {
		if id, ok := nameOfKey(key); ok {
			a, r := s.restore(id, value)
			s.audiences[id], known[id.folder()] = a, true
			if a.broken == nil {
				err := s.fetchFiles(a, r)
				if err != nil && !errors.Is(err, fs.ErrNotExist) {
					return fmt.Errorf("%s/%s: %w", id.namespace, id.name, err)
				}
				if a.broken = err; err != nil {
					s.Logger.Error("the files of an audience are lost; its syncs are refused", "namespace", id.namespace, "audience", id.name,
						"error", err)
				}
			}
			for file := range r.files() {
				named[copyName(id.folder(), file)] = true
			}
		}
	}
	s.removeCopies(func(name string) bool {
		folder, _, _ := strings.Cut(name, "/")
		return named[name] || s.isBroken(folder)
	})
	folders, err := s.FS.List(s.Dir)
	if err != nil {
		return err
	}
	for _, folder := range folders {
		if !known[folder] {
			if err := s.FS.RemoveAll(s.FS.PathJoin(s.Dir, folder)); err != nil {
				s.Logger.Error("removing the files of an unknown audience failed", "dir", folder, "error", err)
			}
		}
	}
	return nil
}

// isBroken reports whether the audience with a folder cannot be used; its files are kept.
func (s *Service) isBroken(folder string) bool {
	for id, a := range s.audiences {
		if id.folder() == folder {
			return a.broken != nil
		}
	}
	return false
}

// newAudience makes an audience without a state.
func (s *Service) newAudience(id name) *audience {
	return &audience{
		name: id, dir: s.FS.PathJoin(s.Dir, id.folder()),
		changed: s.Changes.Object(changes.Audiences, id.namespace, id.name),
	}
}

// restore makes an audience from its stored state. If that fails, only this audience is broken.
func (s *Service) restore(id name, value []byte) (*audience, stored) {
	a := s.newAudience(id)
	log := s.Logger.With("namespace", id.namespace, "audience", id.name)
	r, err := decode(value)
	if a.broken = err; err != nil {
		log.Error("reading the state of an audience failed; its syncs are refused", "error", err)
		return a, r
	}
	a.done, a.pending = r.Done, r.Pending
	a.sent.Store(r.Sent)
	s.tidy(a, r, log)
	s.metrics.known(a)
	return a, r
}

// tidy removes the files that a state does not name. Files that cannot be removed only cost disk
// space.
func (s *Service) tidy(a *audience, r stored, log *slog.Logger) {
	if err := tidy(s.FS, a.dir, r); err != nil {
		log.Error("removing old files of an audience's syncs failed", "error", err)
	}
}

// Run completes decided syncs and removes deleted audiences until ctx is done. Appends in progress
// end before it returns.
func (s *Service) Run(ctx context.Context) error {
	defer s.Stop()
	var sending sync.WaitGroup
	defer sending.Wait()
	if s.Copies != nil {
		sending.Go(func() { s.keepCopies(ctx) })
	}
	timer := time.NewTicker(tick)
	defer timer.Stop()
	for {
		for _, a := range s.due() {
			sending.Go(func() { s.carry(ctx, a) })
		}
		s.forget()
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		case <-s.kick:
		}
	}
}

// Stop ends syncs that are being received, and answers requests that wait for a decided sync. It
// may be called more than once.
func (s *Service) Stop() { s.stop.Do(func() { close(s.stopping) }) }

// due returns the audiences with a decided sync that no goroutine completes.
func (s *Service) due() (list []*audience) {
	if s.Gate.View() == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.audiences {
		if a.pending != nil && !a.sending && a.broken == nil {
			a.sending, a.busy, a.since = true, "sending", s.Now()
			if a.over == nil {
				a.over = make(chan bool, 1)
			}
			list = append(list, a)
		}
	}
	return list
}

// carry appends the calls of a decided sync to the queue and concludes the sync.
func (s *Service) carry(ctx context.Context, a *audience) {
	log := s.Logger.With("namespace", a.namespace, "audience", a.name.name, "sync", a.pending.Sync)
	err := s.send(ctx, a, *a.pending, log)
	if err == nil {
		concluded := stored{Done: a.pending}
		if err = put(s.Store.PutMetaDurable, a.name, concluded); err == nil {
			s.tidy(a, concluded, log)
			s.removeCopiesOf(a, concluded)
		}
	}
	if errors.Is(err, errGone) {
		log.Info("sync cancelled: the audience, or the Source of its sync, was deleted")
		s.remove(a)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	a.sending = false
	a.changed.Transition()
	switch {
	case err == nil:
		log.Info("audience synced", "members", a.pending.Members, "added", a.pending.Added, "removed", a.pending.Removed, "changed",
			a.pending.Changed)
		s.metrics.finished(a.name, *a.pending)
		a.done, a.pending, a.busy = a.pending, nil, ""
		a.over <- true
		a.over = nil
	case ctx.Err() != nil || errors.Is(err, queue.ErrClosed):
		log.Info("stopping: the sync continues after the restart", "sent", a.sent.Load(), "of", a.pending.Changes())
	case errors.Is(err, errGone):
		a.over <- false
		a.over = nil
	case errors.Is(err, errDamaged) || errors.Is(err, os.ErrNotExist):
		a.broken = err
		log.Error("completing a sync failed; syncs of this audience are refused", "error", err)
	default:
		log.Error("completing a sync failed; retrying", "error", err)
	}
}

var errGone = errors.New("the audience was removed")

// send appends the identify calls of a sync in small batches, each durable before the next, at the
// pace of the lanes. While calls cannot be appended (a full disk, no Source) it waits.
func (s *Service) send(ctx context.Context, a *audience, p state, log *slog.Logger) error {
	changes, err := open(s.FS, s.FS.PathJoin(a.dir, changesPrefix+p.Sync))
	if err != nil {
		return err
	}
	defer changes.close()
	sent := a.sent.Load()
	for range sent {
		if _, err := changes.next(); err != nil {
			return err
		}
	}
	calls := make([]event.Call, 0, batchSize)
	lanes := newPace(p.Namespace+"/"+p.Source, p.Changes()-sent, s.Now())
	var last batch
	for ended := false; !ended; {
		room, err := s.await(ctx, a, p, lanes, last)
		if err != nil {
			return err
		}
		calls = calls[:0]
		read := int64(0)
		for len(calls) < min(room, batchSize) {
			r, err := changes.next()
			if errors.Is(err, io.EOF) {
				ended = true
				break
			}
			if err != nil {
				return err
			}
			read++
			call, err := identify(p, r)
			if err != nil {
				// The limits of a line prevent this; a single user must not stop the sync.
				log.Error("skipping a member without a valid call", "error", err)
				continue
			}
			calls = append(calls, call)
		}
		if last, err = s.deliver(ctx, a, p, calls, log); err != nil {
			return err
		}
		sent += read
		a.sent.Store(sent)
		a.changed.Numbers()
		s.metrics.sending(a.name, p.Changes()-sent)
		if err := put(s.Store.PutMeta, a.name, stored{Done: a.done, Pending: &p, Sent: sent}); err != nil {
			return err
		}
	}
	return nil
}

// await waits until the lanes have room for more calls, and returns their number. last is the batch
// appended since the last call.
func (s *Service) await(ctx context.Context, a *audience, p state, lanes *pace, last batch) (int, error) {
	defer a.endWait()
	for pause := pauseMin; ; pause = min(2*pause, pauseMax) {
		if a.abandoned.Load() {
			return 0, errGone
		}
		now := s.Now()
		if now.Sub(lanes.listed) >= tick {
			config, _ := s.Gate.View().Namespace(p.Namespace)
			lanes.list(config.Config, s.Lanes.Lanes(), now)
		}
		lanes.update(s.Lanes.LaneStats, last, now)
		last = batch{}
		room := lanes.room(now)
		switch {
		case !s.Gate.RoomForSync(lanes.source):
			a.wait("storage is filling up; the remaining space is for live calls")
			pause = pauseMax
		case room > 0:
			return room, nil
		case pause == pauseMax:
			a.wait("the destinations are slow")
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(max(pause, checkShare*s.Now().Sub(now))):
		}
	}
}

// wait sets the reason why the rest of a sync waits.
func (a *audience) wait(reason string) {
	a.waits.Store(&reason)
	a.changed.Numbers()
}

func (a *audience) endWait() {
	if a.waits.Swap(nil) != nil {
		a.changed.Numbers()
	}
}

// deliver appends a batch of calls and retries until it succeeds.
func (s *Service) deliver(ctx context.Context, a *audience, p state, calls []event.Call, log *slog.Logger) (batch, error) {
	if len(calls) == 0 {
		return batch{}, nil
	}
	defer a.endWait()
	wait, told := retryMin, false
	for {
		appended, problem := s.tryDeliver(ctx, p, calls)
		if problem == nil || errors.Is(problem, queue.ErrClosed) {
			return appended, problem
		}
		if a.abandoned.Load() {
			return batch{}, errGone
		}
		a.wait(problem.Error())
		if !told && ctx.Err() == nil {
			told = true
			log.Warn("sync is waiting", "error", problem)
		}
		select {
		case <-ctx.Done():
			return batch{}, ctx.Err()
		case <-time.After(wait):
		}
		wait = min(2*wait, retryMax)
	}
}

func (s *Service) tryDeliver(ctx context.Context, p state, calls []event.Call) (batch, error) {
	routing := s.Gate.Begin()
	defer routing.End()
	view := routing.View()
	config, ok := view.Namespace(p.Namespace)
	i := slices.IndexFunc(config.Sources, func(c liveconfig.Source) bool { return c.Name == p.Source })
	if !ok || i < 0 {
		return batch{}, fmt.Errorf("source %s/%s does not exist", p.Namespace, p.Source)
	}
	ref := liveconfig.SourceRef{Namespace: p.Namespace, Source: config.Sources[i]}
	messages := make([]queue.Message, 0, len(calls))
	skipped := map[string]int{}
	now := s.Now()
	for i := range calls {
		c := &calls[i]
		if routing.Suppressed(ref, c) {
			continue
		}
		message, _ := routing.Message(ref, ref.Key(), c, now)
		for _, destination := range message.Skip {
			skipped[destination]++
		}
		messages = append(messages, message)
	}
	_, err := routing.Append(ctx, messages)
	return batch{len(messages), skipped}, err
}

// identify makes the identify call of a change.
func identify(p state, r record) (event.Call, error) {
	value := "true"
	switch {
	case r.op == opLeft && p.Kind == liveconfig.KindComputedTrait:
		value = "null" // the user no longer has the trait
	case r.op == opLeft:
		value = "false"
	case p.Kind == liveconfig.KindComputedTrait:
		value = string(r.value)
	}
	class := "audience"
	if p.Kind == liveconfig.KindComputedTrait {
		class = "trait"
	}
	sum := sha256.Sum256([]byte(p.Namespace + "/" + p.Name + "\x00" + p.Sync + "\x00" + string(r.id)))
	at := p.Time.UTC().Format("2006-01-02T15:04:05.000Z")
	var b strings.Builder
	b.WriteString(`{"userId":`)
	b.Write(quote(string(r.id)))
	b.WriteString(`,"traits":{`)
	b.Write(quote(p.Key))
	b.WriteString(`:` + value + `},"context":{"personas":{"computation_class":"` + class + `","computation_key":`)
	b.Write(quote(p.Key))
	b.WriteString(`}},"messageId":"audience-` + hex.EncodeToString(sum[:16]) + `","timestamp":"` + at + `"}`)
	batch, err := event.Request{Type: event.Identify, ReceivedAt: p.Time}.Parse([]byte(b.String()))
	if err != nil {
		return event.Call{}, err
	}
	return batch.Calls[0], nil
}

// forget removes the members of audiences whose grace period has ended. It also removes an audience
// that moved to another Source while a sync still sent to the former Source, which is deleted: the
// sync would never end.
func (s *Service) forget() {
	view := s.Gate.View()
	if view == nil {
		return
	}
	for _, a := range s.gone(view, s.Now()) {
		s.remove(a)
	}
}

// gone returns the audiences to remove, and makes them busy.
func (s *Service) gone(view *liveconfig.View, now time.Time) (list []*audience) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, a := range s.audiences {
		config, _ := view.Namespace(id.namespace)
		known := slices.ContainsFunc(config.Audiences, func(c liveconfig.Audience) bool {
			return c.Name == id.name && (a.pending == nil || c.Source == a.pending.Source ||
				slices.ContainsFunc(config.Sources, func(s liveconfig.Source) bool { return s.Name == a.pending.Source }))
		})
		switch {
		case known || view.Parked(id.namespace, liveconfig.Ref{Section: liveconfig.SectionAudiences, Name: id.name}):
			a.gone = time.Time{}
			a.abandoned.Store(false)
		case a.gone.IsZero():
			a.gone = now
		case now.Sub(a.gone) < s.OrphanGrace || a.busy == "receiving":
		case a.sending:
			a.abandoned.Store(true) // removed when the goroutine has ended
		default:
			a.busy, a.since = "removing", now
			list = append(list, a)
		}
	}
	return list
}

// remove deletes all data of an audience that is busy.
func (s *Service) remove(a *audience) {
	log := s.Logger.With("namespace", a.namespace, "audience", a.name.name)
	err := put(s.Store.PutMetaDurable, a.name, stored{})
	if err == nil {
		s.removeCopiesOf(a, stored{})
	}
	s.mu.Lock()
	a.busy = ""
	if err == nil {
		delete(s.audiences, a.name)
		a.changed.Transition()
		s.metrics.forget(a.name)
		if err = s.FS.RemoveAll(a.dir); err == nil {
			log.Info("removed the members of a deleted audience")
		}
	}
	s.mu.Unlock()
	if err != nil {
		log.Error("removing the members of a deleted audience failed", "error", err)
	}
}

// Request is one sync.
type Request struct {
	// The namespace, and the configured audience.
	Namespace string
	Audience  liveconfig.Audience
	// Full: the body lists all members. Otherwise it is an increment.
	Full bool
	// AllowRemoval is the share of members, in percent, that a snapshot may remove.
	AllowRemoval float64
	// AllowEmpty lets a snapshot without members remove all.
	AllowEmpty bool
	// Resend includes unchanged members.
	Resend bool
	// DryRun counts the changes and changes nothing.
	DryRun bool
}

// Sync runs a sync. Its error is a *admission.Refusal; then nothing was changed. It returns when the identify
// calls are in the queue, or earlier if that takes longer than 10 s, ctx is done or the Service
// stops.
func (s *Service) Sync(ctx context.Context, q Request, body io.Reader) (adminapi.SyncResult, error) {
	begin := s.Now()
	a, err := s.begin(q)
	if err != nil {
		return adminapi.SyncResult{}, err
	}
	result, over, err := s.receive(a, q, body)
	if err != nil {
		err = s.refusal(err)
	}
	s.mu.Lock()
	if err != nil || q.DryRun {
		a.busy = ""
	}
	if err != nil {
		if !q.DryRun {
			a.refused, a.lastRefusal = a.after(s.Now()), err.Error()
			a.changed.Transition()
		}
	}
	s.leave(q)
	s.mu.Unlock()
	if err != nil && q.DryRun {
		return adminapi.SyncResult{}, err
	}
	if err != nil {
		s.metrics.refused(a.name)
		s.Logger.Warn("sync refused", "namespace", q.Namespace, "audience", q.Audience.Name, "error", err)
		return adminapi.SyncResult{}, err
	}
	if q.DryRun {
		return result, nil
	}
	s.metrics.duration.Observe(s.Now().Sub(begin).Seconds())
	select {
	case s.kick <- struct{}{}:
	default:
	}
	select {
	case result.Sent = <-over:
		if !result.Sent {
			return adminapi.SyncResult{}, errRemoved
		}
	case <-time.After(answerAfter):
	case <-ctx.Done():
	case <-s.stopping:
	}
	return result, nil
}

// begin makes the audience busy, or returns why it cannot.
func (s *Service) begin(q Request) (*audience, error) {
	if !s.Gate.DiskForSync() {
		return nil, errFull
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.stopping:
		return nil, errStopping
	default:
	}
	id := name{q.Namespace, q.Audience.Name}
	a := s.audiences[id]
	if a == nil {
		a = s.newAudience(id)
		s.audiences[id] = a
	}
	switch {
	case a.broken != nil:
		s.Logger.Error("sync refused: the data of the audience is damaged", "namespace", id.namespace, "audience", id.name, "error", a.broken)
		return nil, errBroken
	case a.busy != "" || a.pending != nil:
		doing := cmp.Or(a.busy, "waiting")
		if a.pending != nil {
			doing = fmt.Sprintf("%d of %d identify calls are in the queue,", a.sent.Load(), a.pending.Changes())
			if reason := a.waits.Load(); reason != nil {
				doing += " " + *reason + ","
			}
		}
		r := admission.Refusef(http.StatusConflict, "sync_in_progress", "a sync of this audience is in progress (%s since %s); wait for its end and send the sync again", doing, a.since.UTC().Format(time.RFC3339))
		r.RetryAfter = 5
		return nil, r
	case s.syncs[q.Namespace] >= maxSyncsPerNamespace || s.syncs[""] >= maxSyncs:
		return nil, admission.Retry(5, admission.CodeBusy, "too many syncs are in progress; send the sync again")
	}
	s.syncs[q.Namespace]++
	s.syncs[""]++
	a.busy, a.since = "receiving", s.Now()
	return a, nil
}

// leave ends the operation that begin started. The mutex is held.
func (s *Service) leave(q Request) {
	s.syncs[""]--
	if s.syncs[q.Namespace]--; s.syncs[q.Namespace] == 0 {
		delete(s.syncs, q.Namespace)
	}
}

// after is the time in milliseconds, but always later than the last sync and the last refusal, even
// if the clock is set back: receivers order changes by it.
func (a *audience) after(now time.Time) time.Time {
	now = now.UTC().Truncate(time.Millisecond)
	last := a.refused
	if a.done != nil && a.done.Time.After(last) {
		last = a.done.Time
	}
	if now.After(last) {
		return now
	}
	return last.Add(time.Millisecond)
}

var (
	errFull     = admission.Retry(60, admission.CodeStorageFull, "storage is full; nothing was changed, send again later")
	errStopping = admission.Retry(1, admission.CodeNotReady, "Posthorn is shutting down; nothing was changed, send the sync again")
	errRemoved  = admission.Refuse(http.StatusNotFound, "unknown_audience", "the audience, or its Source, was deleted during the sync; the rest of the sync was cancelled")
	errBroken   = admission.Refuse(http.StatusInternalServerError, "state_damaged", "the stored members of this audience are damaged, so the difference cannot be computed; see the dispatcher's log. To start over, delete the Audience, wait for the grace period, and create it again")
)

// receive reads, sorts, compares, and decides. over gets a value at the end of the decided sync.
func (s *Service) receive(a *audience, q Request, body io.Reader) (result adminapi.SyncResult, over chan bool, err error) {
	next := state{
		Namespace: q.Namespace, Name: q.Audience.Name,
		Source: q.Audience.Source, Key: q.Audience.Key, Kind: q.Audience.Kind,
		Sync: uuid.NewString(), Time: a.after(s.Now()),
	}
	if err := s.undo(a); err != nil {
		return result, nil, err
	}
	if err := makeFolder(s.FS, a.dir); err != nil {
		return result, nil, err
	}
	decided := false
	defer func() {
		if !decided {
			s.tidy(a, stored{Done: a.done}, s.Logger)
		}
	}()
	work := s.FS.PathJoin(a.dir, workPrefix+next.Sync)
	if err := s.FS.MkdirAll(work, 0o700); err != nil {
		return result, nil, err
	}
	sorter := newSorter(s.FS, work, s.MaxBytes, s.watched)
	if err := read(s.watched(newLines(body, next.Kind, q.Full).next), sorter); err != nil {
		return result, nil, err
	}
	if next.SyncCounts, err = s.compare(a, q, next, sorter); err != nil {
		return result, nil, err
	}
	result = adminapi.SyncResult{Sync: next.Sync, SyncCounts: next.SyncCounts, DryRun: q.DryRun}
	if err := guard(q, next.SyncCounts); err != nil || q.DryRun {
		return result, nil, err
	}
	if decided, err = s.decide(a, &next); err != nil {
		return result, nil, err
	}
	if err := s.FS.RemoveAll(work); err != nil {
		s.Logger.Error("removing the runs of a sync failed", "error", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	over = make(chan bool, 1)
	a.pending, a.over, a.busy, a.since = &next, over, "sending", s.Now()
	a.sent.Store(0)
	a.changed.Transition()
	return result, over, nil
}

// decide stores that a sync will be completed. After an error decided is true if that is unknown.
func (s *Service) decide(a *audience, next *state) (decided bool, err error) {
	// The names of the files must be durable before the state that has them.
	if err := errors.Join(durable.Sync(s.FS.OpenDir(a.dir)), s.copyFiles(a, stored{Pending: next})); err != nil {
		return false, err
	}
	if err = put(s.Store.PutMetaDurable, a.name, stored{Done: a.done, Pending: next}); err == nil {
		return true, nil
	}
	a.undecided = true
	return s.undo(a) != nil, err
}

// undo removes a sync from the store whose decision failed.
func (s *Service) undo(a *audience) error {
	if !a.undecided {
		return nil
	}
	err := put(s.Store.PutMetaDurable, a.name, stored{Done: a.done})
	a.undecided = err != nil
	return err
}

// watched is a stream that fails when the service stops, or the disk has no more space for syncs.
func (s *Service) watched(next stream) stream {
	n := 0
	return func() (record, error) {
		if n++; n%checkEvery == 1 {
			select {
			case <-s.stopping:
				return record{}, errStopping
			default:
			}
			if !s.Gate.DiskForSync() {
				return record{}, errFull
			}
		}
		return next()
	}
}

// read adds all lines to the sorter.
func read(next stream, sorter *sorter) error {
	for {
		r, err := next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = sorter.add(r)
		}
		if err != nil {
			return err
		}
	}
}

// compare writes the new members and the changes.
func (s *Service) compare(a *audience, q Request, next state, sorter *sorter) (adminapi.SyncCounts, error) {
	before := stream(empty)
	if a.done.of(next.Source, next.Key, next.Kind) {
		last, err := open(s.FS, s.FS.PathJoin(a.dir, membersPrefix+a.done.Sync))
		if err != nil {
			return adminapi.SyncCounts{}, s.damaged(a, err)
		}
		defer last.close()
		before = func() (record, error) {
			r, err := last.next()
			if err != nil && !errors.Is(err, io.EOF) {
				err = s.damaged(a, err)
			}
			return r, err
		}
	}
	now, release, err := sorter.sorted()
	if err != nil {
		return adminapi.SyncCounts{}, err
	}
	defer release()
	members, err := create(s.FS, s.FS.PathJoin(a.dir, membersPrefix+next.Sync))
	if err != nil {
		return adminapi.SyncCounts{}, err
	}
	changes, err := create(s.FS, s.FS.PathJoin(a.dir, changesPrefix+next.Sync))
	if err != nil {
		members.abandon()
		return adminapi.SyncCounts{}, err
	}
	counts, err := diff(s.watched(before), s.watched(now), q.Full, q.Resend, members.add, changes.add)
	if err != nil {
		members.abandon()
		changes.abandon()
		return counts, err
	}
	if err := errors.Join(members.finish(true), changes.finish(true)); err != nil {
		return counts, err
	}
	return counts, nil
}

func (s *Service) damaged(a *audience, err error) error {
	s.Logger.Error("reading the members of an audience failed", "namespace", a.namespace, "audience", a.name.name, "error", err)
	return errBroken
}

// guard refuses probable mistakes of the sender: a snapshot with no members, or far fewer than
// before.
func guard(q Request, c adminapi.SyncCounts) error {
	switch {
	case !q.Full:
		return nil
	case c.Members == 0 && c.Before == 0 && !q.AllowEmpty:
		return admission.Refusef(http.StatusUnprocessableEntity, "empty_snapshot", "the snapshot lists no members; if this is intended, set allowEmpty=true")
	case c.Members == 0 && !q.AllowEmpty:
		return admission.Refusef(http.StatusUnprocessableEntity, "empty_snapshot", "the snapshot lists no members, which would remove all %d; if this is intended, set allowEmpty=true", c.Before)
	case c.Members == 0:
		return nil
	case float64(c.Removed)*100 > q.AllowRemoval*float64(c.Before):
		return admission.Refusef(http.StatusUnprocessableEntity, "too_many_removals", "the snapshot would remove %d of %d members; a sync may remove %g percent. If this is intended, set allowRemoval to a higher percentage, up to 100", c.Removed, c.Before, q.AllowRemoval)
	}
	return nil
}

// Progress returns the progress of an audience's last sync; it is zero before the first.
func (s *Service) Progress(namespace string, c liveconfig.Audience) adminapi.SyncProgress {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.audiences[name{namespace, c.Name}]; a != nil {
		return a.progress(c)
	}
	return adminapi.SyncProgress{}
}

// progress needs the mutex. An audience that is not accepted now has no key, and keeps its data.
func (a *audience) progress(c liveconfig.Audience) (p adminapi.SyncProgress) {
	last := a.done
	p.Sent = a.done != nil && a.pending == nil
	if a.pending != nil {
		last, p.Unsent = a.pending, a.pending.Changes()-a.sent.Load()
		if reason := a.waits.Load(); reason != nil {
			p.Waits = *reason
		}
	}
	if c.Key == "" && last != nil || last.of(c.Source, c.Key, c.Kind) {
		p.Sync, p.Time, p.SyncCounts = last.Sync, last.Time, last.SyncCounts
	}
	return p
}

// Unfinished returns the audiences with a decided sync whose changes are not all in the queue,
// "namespace/name", and the reason why the rest waits, or "".
func (s *Service) Unfinished() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := map[string]string{}
	for id, a := range s.audiences {
		if a.pending == nil {
			continue
		}
		reason := ""
		if a.broken != nil {
			reason = a.broken.Error()
		} else if waits := a.waits.Load(); waits != nil {
			reason = *waits
		}
		names[id.namespace+"/"+id.name] = reason
	}
	return names
}

// Report returns the state of a namespace's audiences.
func (s *Service) Report(config liveconfig.Config) []adminapi.AudienceReport {
	list := make([]adminapi.AudienceReport, 0, len(config.Audiences))
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range config.Audiences {
		r := adminapi.AudienceReport{Name: c.Name, Generation: c.Generation, Revision: c.Revision, Owner: s.Owner == ""}
		if a := s.audiences[name{config.Namespace, c.Name}]; a != nil {
			r.LastRefused, r.Refusal = a.refused, a.lastRefusal
			p := a.progress(c)
			r.Members, r.LastSync, r.Added, r.Removed, r.Changed = p.Members, p.Time, p.Added, p.Removed, p.Changed
			r.Unsent, r.Waits = p.Unsent, p.Waits
		}
		list = append(list, r)
	}
	return list
}
