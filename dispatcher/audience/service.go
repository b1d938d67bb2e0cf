// Package audience keeps who is in an audience, and tells the changes.
//
// A sync brings the members as lines of JSON, all of them or an increment. They
// are sorted on disk, merged with the members of the last sync, and the
// difference becomes identify calls, which go the way of every call. Memory is
// constant, whatever the number of members.
//
// A sync is decided at one moment, when a file gets its name. Before it, nothing
// has happened; after it, a restart carries the sync through to the same end.
// The ids of its calls follow from the sync and the user, so that what is
// appended again is found to be a duplicate.
package audience

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/event"
)

const (
	// DefaultMaxBytes is what one sync's members may take on disk.
	DefaultMaxBytes = 16 << 30

	// maxSyncs are received at once, of one tenant half of them at most.
	maxSyncs          = 8
	maxSyncsPerTenant = 4
	// batchSize is how many identify calls are appended at once.
	batchSize = 256
	tick      = time.Second
	retryMin  = 200 * time.Millisecond
	retryMax  = 10 * time.Second
	// answerAfter is how long a sync's sender waits for its calls to be in the queue.
	answerAfter = 10 * time.Second
	// checkEvery is after how many records the disk is looked at.
	checkEvery = 4096
)

// Options configure a Service. Dir, View, Skip and Queue are required.
type Options struct {
	// Dir holds the members; it is made when missing.
	Dir string
	// View, Skip and BeginRouting, which may be nil, are as for ingest.
	View         func() *liveconfig.View
	Skip         func(ref liveconfig.SourceRef, call *event.Call) []string
	BeginRouting func() (end func())
	Queue        Queue
	// Full reports that the disk is too full to take a sync; nil is never.
	Full func() bool
	// Room reports that a Source ("namespace/name") has room for a sync's calls
	// besides live ones; without it they wait. nil is always.
	Room func(source string) bool
	// Owner is the root URL of the pod that keeps the members; empty when it is
	// this one. A pod that is not the owner hands syncs on.
	Owner string
	// MaxBytes bounds what one sync may write. Default DefaultMaxBytes.
	MaxBytes int64
	// OrphanGrace is how long the members of a deleted audience are kept. Default 10 min.
	OrphanGrace time.Duration
	// IdleTimeout is how long a sync may send nothing. Default DefaultIdleTimeout.
	IdleTimeout time.Duration
	Now         func() time.Time
	Logger      *slog.Logger
	Registerer  prometheus.Registerer
}

// Service keeps the audiences of all tenants. Make it with New, and Run it.
type Service struct {
	Options
	metrics metrics
	proxy   http.Handler

	stopping chan struct{}
	stop     sync.Once
	kick     chan struct{}

	mu        sync.Mutex
	audiences map[name]*audience
	syncs     map[string]int // by tenant; "" is all
}

// name is an audience's.
type name struct{ tenant, name string }

// audience is what is kept of one. The mutex of the Service guards it.
type audience struct {
	name
	dir string
	// done is the last sync that is done, pending one that is decided.
	done, pending *state
	// sent is how many changes of pending are in the queue, and waits what the
	// rest waits for, if anything.
	sent  atomic.Int64
	waits atomic.Pointer[string]
	// broken says why the audience cannot be used.
	broken error
	// busy is what goes on, since when; empty when nothing.
	busy  string
	since time.Time
	// sending is true while a goroutine carries pending through; over is closed at its end.
	sending bool
	over    chan struct{}
	// gone is since when the config does not know the audience, and abandoned is
	// set when its time is up.
	gone      time.Time
	abandoned atomic.Bool

	refused     time.Time
	lastRefusal string
}

// New opens what is on disk. A sync that was decided before goes on when the
// Service runs.
func New(o Options) (*Service, error) {
	o.MaxBytes = cmp.Or(o.MaxBytes, DefaultMaxBytes)
	o.OrphanGrace = cmp.Or(o.OrphanGrace, 10*time.Minute)
	o.IdleTimeout = cmp.Or(o.IdleTimeout, DefaultIdleTimeout)
	o.Logger = cmp.Or(o.Logger, slog.Default())
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
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("audiences: %w", err)
	}
	entries, err := os.ReadDir(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("audiences: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			s.recover(filepath.Join(o.Dir, e.Name()))
		}
	}
	return s, nil
}

// recover opens one audience's folder. One that cannot be read or tidied breaks its
// audience, and nothing else.
func (s *Service) recover(dir string) {
	done, doneErr := readState(filepath.Join(dir, stateFile))
	pending, pendingErr := readState(filepath.Join(dir, pendingFile))
	broken := errors.Join(doneErr, pendingErr)
	if pending != nil {
		_, work := os.Stat(filepath.Join(dir, syncPrefix+pending.Sync))
		_, members := os.Stat(filepath.Join(dir, storePrefix+pending.Sync))
		if errors.Is(work, os.ErrNotExist) && errors.Is(members, os.ErrNotExist) {
			// It was taken back when its name could not be made durable.
			s.Logger.Warn("a sync without data is forgotten", "namespace", pending.Tenant, "audience", pending.Name, "sync", pending.Sync)
			broken = errors.Join(broken, os.Remove(filepath.Join(dir, pendingFile)))
			pending = nil
		}
	}
	a := &audience{dir: dir, done: done, pending: pending, broken: broken}
	switch {
	case pending != nil:
		a.name = name{pending.Tenant, pending.Name}
	case done != nil:
		a.name = name{done.Tenant, done.Name}
	case a.broken != nil:
		// Whose it is cannot be told; a sync of that audience finds its folder again.
		s.Logger.Error("the state of an audience cannot be read; syncs of it are refused", "dir", dir, "error", a.broken)
		return
	default:
		if err := os.RemoveAll(dir); err != nil {
			s.Logger.Error("what is left of an audience cannot be removed", "dir", dir, "error", err)
		}
		return
	}
	if a.broken != nil {
		s.Logger.Error("the state of an audience cannot be read; syncs of it are refused", "namespace", a.tenant, "audience", a.name.name, "error", a.broken)
	} else {
		var keep, next string
		if done != nil {
			keep = done.Sync
		}
		if pending != nil {
			next = pending.Sync
		}
		tidy(dir, keep, next, s.Logger.With("namespace", a.tenant, "audience", a.name.name))
		if pending != nil { // until it is carried on it shows how far it was
			if at, sent, err := openProgress(filepath.Join(dir, syncPrefix+next)); err == nil {
				a.sent.Store(sent)
				at.close()
			} else {
				a.sent.Store(pending.Changes()) // only its conclusion is missing
			}
		}
	}
	s.audiences[a.name] = a
	s.metrics.known(a)
}

// Run carries decided syncs through and removes what was deleted, until ctx is
// done. Appends in progress end before it returns.
func (s *Service) Run(ctx context.Context) error {
	defer s.Stop()
	var sending sync.WaitGroup
	defer sending.Wait()
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

// Stop ends syncs that are being received, and lets requests that wait for a
// decided one be answered. It may be called more than once.
func (s *Service) Stop() { s.stop.Do(func() { close(s.stopping) }) }

// due returns the audiences with a decided sync that nobody carries through.
func (s *Service) due() (list []*audience) {
	if s.View() == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.audiences {
		if a.pending != nil && !a.sending && a.broken == nil {
			a.sending, a.busy, a.since = true, "sending", s.Now()
			if a.over == nil {
				a.over = make(chan struct{})
			}
			list = append(list, a)
		}
	}
	return list
}

// carry brings the calls of a decided sync into the queue and concludes it.
func (s *Service) carry(ctx context.Context, a *audience) {
	log := s.Logger.With("namespace", a.tenant, "audience", a.name.name, "sync", a.pending.Sync)
	err := s.send(ctx, a, *a.pending, log)
	if err == nil {
		if err = conclude(a.dir, *a.pending); err == nil {
			tidy(a.dir, a.pending.Sync, "", log)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	a.sending = false
	switch {
	case err == nil:
		log.Info("audience synced", "members", a.pending.Members, "added", a.pending.Added, "removed", a.pending.Removed, "changed", a.pending.Changed)
		s.metrics.finished(a.name, *a.pending)
		a.done, a.pending, a.busy = a.pending, nil, ""
		close(a.over)
		a.over = nil
	case ctx.Err() != nil || errors.Is(err, queue.ErrClosed):
		log.Info("stopping: the sync goes on after the restart", "sent", a.sent.Load(), "of", a.pending.Changes())
	case errors.Is(err, errGone):
		log.Info("the audience, or the Source of its sync, was deleted; the sync ends")
		s.remove(a)
		close(a.over)
	case errors.Is(err, errDamaged) || errors.Is(err, os.ErrNotExist):
		a.broken = err
		log.Error("a sync cannot be carried through; syncs of this audience are refused", "error", err)
	default:
		log.Error("a sync cannot be carried through now; it is tried again", "error", err)
	}
}

var errGone = errors.New("the audience is gone")

// send appends the identify calls of a sync, in small batches, each durable
// before the next, at the pace of the lanes. What does not let them in now (a
// full disk, no Source) is waited for.
func (s *Service) send(ctx context.Context, a *audience, p state, log *slog.Logger) error {
	work := filepath.Join(a.dir, syncPrefix+p.Sync)
	if _, err := os.Stat(filepath.Join(a.dir, storePrefix+p.Sync)); err == nil {
		return nil // all was sent, and the members have their place already
	}
	changes, err := open(filepath.Join(work, changesFile))
	if err != nil {
		return err
	}
	defer changes.close()
	at, sent, err := openProgress(work)
	if err != nil {
		return err
	}
	defer at.close()
	a.sent.Store(sent)
	for range sent {
		if _, err := changes.next(); err != nil {
			return err
		}
	}
	calls := make([]event.Call, 0, batchSize)
	lanes := newPace(p.Tenant+"/"+p.Source, p.Changes()-sent, s.Now())
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
				// The limits of a line keep this from happening; one user must not stop all.
				log.Error("a member makes no valid call and is passed over", "error", err)
				continue
			}
			calls = append(calls, call)
		}
		if last, err = s.deliver(ctx, a, p, calls, log); err != nil {
			return err
		}
		sent += read
		a.sent.Store(sent)
		s.metrics.sending(a.name, p.Changes()-sent)
		if err := at.set(sent); err != nil {
			return err
		}
	}
	return nil
}

// await waits until the lanes have room for more calls, and returns for how many.
// last is what was appended since the last time.
func (s *Service) await(ctx context.Context, a *audience, p state, lanes *pace, last batch) (int, error) {
	defer a.waits.Store(nil)
	for pause := pauseMin; ; pause = min(2*pause, pauseMax) {
		if a.abandoned.Load() {
			return 0, errGone
		}
		now := s.Now()
		if now.Sub(lanes.listed) >= tick {
			config, _ := s.View().Tenant(p.Tenant)
			lanes.list(config.Config, s.Queue.Lanes(), now)
		}
		lanes.look(s.Queue.LaneStats, last, now)
		last = batch{}
		room := lanes.room(now)
		switch {
		case s.Room != nil && !s.Room(lanes.source):
			a.wait("storage is filling up; what is left is for live calls")
			pause = pauseMax
		case room > 0:
			return room, nil
		case pause == pauseMax:
			a.wait("the destinations take their time")
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(max(pause, lookShare*s.Now().Sub(now))):
		}
	}
}

func (a *audience) wait(reason string) { a.waits.Store(&reason) }

// deliver appends a batch of calls and tries until it can.
func (s *Service) deliver(ctx context.Context, a *audience, p state, calls []event.Call, log *slog.Logger) (batch, error) {
	if len(calls) == 0 {
		return batch{}, nil
	}
	defer a.waits.Store(nil)
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
			log.Warn("a sync waits to go on", "error", problem)
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
	if s.BeginRouting != nil {
		defer s.BeginRouting()()
	}
	view := s.View()
	config, ok := view.Tenant(p.Tenant)
	i := slices.IndexFunc(config.Sources, func(c liveconfig.Source) bool { return c.Name == p.Source })
	if !ok || i < 0 {
		return batch{}, fmt.Errorf("source %s/%s does not exist", p.Tenant, p.Source)
	}
	ref := liveconfig.SourceRef{Tenant: p.Tenant, Source: config.Sources[i]}
	messages := make([]queue.Message, 0, len(calls))
	skipped := map[string]int{}
	now := s.Now()
	for i := range calls {
		c := &calls[i]
		if view.Suppressed(ref, c.UserID) {
			continue
		}
		skip := s.Skip(ref, c)
		for _, destination := range skip {
			skipped[destination]++
		}
		messages = append(messages, queue.Message{Source: ref.Key(), ID: c.MessageID, Type: string(c.Type), AcceptedAt: now, Skip: skip, LongNumbers: c.LongNumbers, Body: c.Body})
	}
	_, err := s.Queue.Append(ctx, messages)
	return batch{len(messages), skipped}, err
}

// identify makes the call that tells a change.
func identify(p state, r record) (event.Call, error) {
	value := "true"
	switch {
	case r.op == opLeft && p.Kind == liveconfig.KindComputedTrait:
		value = "null" // the user has no such trait any more
	case r.op == opLeft:
		value = "false"
	case p.Kind == liveconfig.KindComputedTrait:
		value = string(r.value)
	}
	class := "audience"
	if p.Kind == liveconfig.KindComputedTrait {
		class = "trait"
	}
	sum := sha256.Sum256([]byte(p.Tenant + "/" + p.Name + "\x00" + p.Sync + "\x00" + string(r.id)))
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

// forget removes the members of audiences that were deleted a while ago. So it
// does with one that moved to another Source while a sync told the last one,
// which is deleted: it would wait for ever.
func (s *Service) forget() {
	view := s.View()
	if view == nil {
		return
	}
	now := s.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, a := range s.audiences {
		config, _ := view.Tenant(id.tenant)
		known := slices.ContainsFunc(config.Audiences, func(c liveconfig.Audience) bool {
			return c.Name == id.name && (a.pending == nil || c.Source == a.pending.Source ||
				slices.ContainsFunc(config.Sources, func(s liveconfig.Source) bool { return s.Name == a.pending.Source }))
		})
		switch {
		case known || view.Unusable(id.tenant):
			a.gone = time.Time{}
			a.abandoned.Store(false)
		case a.gone.IsZero():
			a.gone = now
		case now.Sub(a.gone) < s.OrphanGrace || a.busy == "receiving":
		case a.sending:
			a.abandoned.Store(true) // it is removed when that has ended
		default:
			s.remove(a)
		}
	}
}

// remove gives up all that is kept of an audience. The mutex is held.
func (s *Service) remove(a *audience) {
	delete(s.audiences, a.name)
	s.metrics.forget(a.name)
	if err := os.RemoveAll(a.dir); err != nil {
		s.Logger.Error("the members of a deleted audience could not be removed", "namespace", a.tenant, "audience", a.name.name, "error", err)
		return
	}
	s.Logger.Info("the members of a deleted audience are removed", "namespace", a.tenant, "audience", a.name.name)
}

// Request is one sync.
type Request struct {
	// Tenant, and the audience as it is configured.
	Tenant   string
	Audience liveconfig.Audience
	// Full: the body lists all members. Otherwise it is an increment.
	Full bool
	// AllowRemoval is the share of members, in percent, that a snapshot may remove.
	AllowRemoval float64
	// AllowEmpty lets a snapshot without members remove all.
	AllowEmpty bool
	// Resend tells also the members for whom nothing changed.
	Resend bool
	// DryRun counts and changes nothing.
	DryRun bool
}

// Result is what came of a sync.
type Result struct {
	Sync string `json:"sync"`
	Counts
	// Sent is true when every identify call is in the queue. Otherwise the sync
	// is decided and will be carried through.
	Sent   bool `json:"sent"`
	DryRun bool `json:"dryRun,omitempty"`
}

// Sync takes a sync. Its error is a *Refusal; then nothing was changed.
// It returns when the identify calls are in the queue, or earlier when that takes
// longer than 10 s, ctx is done or the Service stops.
func (s *Service) Sync(ctx context.Context, q Request, body io.Reader) (Result, error) {
	begin := s.Now()
	a, err := s.begin(q)
	if err != nil {
		return Result{}, err
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
		}
		if a.done == nil && a.broken == nil { // nothing of it exists
			_ = os.RemoveAll(a.dir)
		}
	}
	s.leave(q)
	s.mu.Unlock()
	if err != nil && q.DryRun {
		return Result{}, err
	}
	if err != nil {
		s.metrics.refused(a.name)
		s.Logger.Warn("a sync was refused", "namespace", q.Tenant, "audience", q.Audience.Name, "error", err)
		return Result{}, err
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
	case <-over:
		result.Sent = true
	case <-time.After(answerAfter):
	case <-ctx.Done():
	case <-s.stopping:
	}
	return result, nil
}

// begin makes the audience busy, or says why it cannot.
func (s *Service) begin(q Request) (*audience, error) {
	if s.Full != nil && s.Full() {
		return nil, errFull
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.stopping:
		return nil, errStopping
	default:
	}
	id := name{q.Tenant, q.Audience.Name}
	a := s.audiences[id]
	if a == nil {
		sum := sha256.Sum256([]byte(id.tenant + "/" + id.name))
		a = &audience{name: id, dir: filepath.Join(s.Dir, hex.EncodeToString(sum[:16]))}
		if _, err := readState(filepath.Join(a.dir, stateFile)); err != nil {
			a.broken = err
		} else if _, err := readState(filepath.Join(a.dir, pendingFile)); err != nil {
			a.broken = err
		}
		s.audiences[id] = a
	}
	switch {
	case a.broken != nil:
		s.Logger.Error("a sync is refused: what is kept of the audience is damaged", "namespace", id.tenant, "audience", id.name, "error", a.broken)
		return nil, errBroken
	case a.busy != "" || a.pending != nil:
		doing := cmp.Or(a.busy, "waiting")
		if a.pending != nil {
			doing = fmt.Sprintf("%d of %d identify calls are in the queue,", a.sent.Load(), a.pending.Changes())
			if reason := a.waits.Load(); reason != nil {
				doing += " " + *reason + ","
			}
		}
		r := refuse(http.StatusConflict, "sync_in_progress", "a sync of this audience is in progress (%s since %s); wait for its end and send again", doing, a.since.UTC().Format(time.RFC3339))
		r.RetryAfter = 5
		return nil, r
	case s.syncs[q.Tenant] >= maxSyncsPerTenant || s.syncs[""] >= maxSyncs:
		r := refuse(http.StatusServiceUnavailable, "busy", "too many syncs are in progress; send again")
		r.RetryAfter = 5
		return nil, r
	}
	s.syncs[q.Tenant]++
	s.syncs[""]++
	a.busy, a.since = "receiving", s.Now()
	return a, nil
}

// leave ends what begin began. The mutex is held.
func (s *Service) leave(q Request) {
	s.syncs[""]--
	if s.syncs[q.Tenant]--; s.syncs[q.Tenant] == 0 {
		delete(s.syncs, q.Tenant)
	}
}

// after is the time to the millisecond, but later than that of the last sync and
// refusal even when the clock is set back: receivers order what they are told by it.
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
	errFull     = &Refusal{Status: http.StatusServiceUnavailable, Code: "storage_full", Message: "storage is full; nothing was changed, send again later", RetryAfter: 60}
	errStopping = &Refusal{Status: http.StatusServiceUnavailable, Code: "not_ready", Message: "shutting down; nothing was changed, send again", RetryAfter: 1}
	errBroken   = &Refusal{Status: http.StatusInternalServerError, Code: "state_damaged", Message: "what is kept of this audience is damaged, so that the difference cannot be told; see the dispatcher's log. To start afresh, delete the Audience, wait for the grace period, and create it again"}
)

// receive reads, sorts, compares, and decides. over is closed when what was decided is done.
func (s *Service) receive(a *audience, q Request, body io.Reader) (result Result, over chan struct{}, err error) {
	next := state{
		Version: stateVersion, Tenant: q.Tenant, Name: q.Audience.Name,
		Source: q.Audience.Source, Key: q.Audience.Key, Kind: q.Audience.Kind,
		Sync: uuid.NewString(), Time: a.after(s.Now()),
	}
	work := filepath.Join(a.dir, syncPrefix+next.Sync)
	if err := os.MkdirAll(work, 0o700); err != nil {
		return result, nil, err
	}
	decided := false
	defer func() {
		if !decided {
			_ = os.RemoveAll(work)
		}
	}()
	sorter := newSorter(work, s.MaxBytes, s.watched)
	if err := read(s.watched(newLines(body, next.Kind, q.Full).next), sorter); err != nil {
		return result, nil, err
	}
	if next.Counts, err = s.compare(a, q, next, sorter, work); err != nil {
		return result, nil, err
	}
	result = Result{Sync: next.Sync, Counts: next.Counts, DryRun: q.DryRun}
	if err := guard(q, next.Counts); err != nil || q.DryRun {
		return result, nil, err
	}
	// The names in the folders must be durable before the file that decides.
	if err := errors.Join(syncDir(work), syncDir(a.dir), syncDir(s.Dir)); err != nil {
		return result, nil, err
	}
	step()
	decided = true // or unknown: what pending.json does not name is swept at the next start
	if err := writeState(a.dir, pendingFile, next); err != nil {
		// It may have its name although that is not known to be durable. Take it back.
		if gone := os.Remove(filepath.Join(a.dir, pendingFile)); gone == nil || errors.Is(gone, os.ErrNotExist) {
			decided = false
		}
		return result, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	over = make(chan struct{})
	a.pending, a.over, a.busy, a.since = &next, over, "sending", s.Now()
	a.sent.Store(0)
	return result, over, nil
}

// watched is a stream that ends with an error when the service stops, or the disk
// has no more room for syncs.
func (s *Service) watched(next stream) stream {
	n := 0
	return func() (record, error) {
		if n++; n%checkEvery == 1 {
			select {
			case <-s.stopping:
				return record{}, errStopping
			default:
			}
			if s.Full != nil && s.Full() {
				return record{}, errFull
			}
		}
		return next()
	}
}

// read brings all lines into the sorter.
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
func (s *Service) compare(a *audience, q Request, next state, sorter *sorter, work string) (Counts, error) {
	before := stream(empty)
	if a.done.of(next.Source, next.Key, next.Kind) {
		last, err := open(filepath.Join(a.dir, storePrefix+a.done.Sync))
		if err != nil {
			return Counts{}, s.damaged(a, err)
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
		return Counts{}, err
	}
	defer release()
	members, err := create(filepath.Join(work, membersFile))
	if err != nil {
		return Counts{}, err
	}
	changes, err := create(filepath.Join(work, changesFile))
	if err != nil {
		members.abandon()
		return Counts{}, err
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
	for _, run := range sorter.runs {
		_ = os.Remove(run)
	}
	return counts, nil
}

func (s *Service) damaged(a *audience, err error) error {
	s.Logger.Error("the members of an audience cannot be read", "namespace", a.tenant, "audience", a.name.name, "error", err)
	return errBroken
}

// guard refuses what looks like a mistake at the sender: a snapshot that lists
// nobody, or far fewer than before.
func guard(q Request, c Counts) error {
	switch {
	case !q.Full:
		return nil
	case c.Members == 0 && c.Before == 0 && !q.AllowEmpty:
		return refuse(http.StatusUnprocessableEntity, "empty_snapshot", "the snapshot lists no members; if that is meant, set allowEmpty=true")
	case c.Members == 0 && !q.AllowEmpty:
		return refuse(http.StatusUnprocessableEntity, "empty_snapshot", "the snapshot lists no members, which would remove all %d; if that is meant, set allowEmpty=true", c.Before)
	case c.Members == 0:
		return nil
	case float64(c.Removed)*100 > q.AllowRemoval*float64(c.Before):
		return refuse(http.StatusUnprocessableEntity, "too_many_removals", "the snapshot would remove %d of %d members; a sync may remove %g percent. If that is meant, set allowRemoval to a higher percentage, up to 100", c.Removed, c.Before, q.AllowRemoval)
	}
	return nil
}

// Progress is how far an audience's last sync is.
type Progress struct {
	Sync string    `json:"sync,omitempty"`
	Time time.Time `json:"time,omitzero"`
	Counts
	// Sent is true when every identify call is in the queue, and another sync may come.
	// Unsent is how many are not, and Waits what they wait for.
	Sent   bool   `json:"sent"`
	Unsent int64  `json:"unsent"`
	Waits  string `json:"waits,omitempty"`
}

// Progress says how far an audience's last sync is; it is zero before the first.
func (s *Service) Progress(tenant string, c liveconfig.Audience) Progress {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.audiences[name{tenant, c.Name}]; a != nil {
		return a.progress(c)
	}
	return Progress{}
}

// progress needs the mutex. One that is not accepted now has no key, and keeps what it had.
func (a *audience) progress(c liveconfig.Audience) (p Progress) {
	last := a.done
	p.Sent = a.done != nil && a.pending == nil
	if a.pending != nil {
		last, p.Unsent = a.pending, a.pending.Changes()-a.sent.Load()
		if reason := a.waits.Load(); reason != nil {
			p.Waits = *reason
		}
	}
	if c.Key == "" && last != nil || last.of(c.Source, c.Key, c.Kind) {
		p.Sync, p.Time, p.Counts = last.Sync, last.Time, last.Counts
	}
	return p
}

// Report says how a tenant's audiences are.
func (s *Service) Report(config liveconfig.Config) []liveconfig.AudienceReport {
	list := make([]liveconfig.AudienceReport, 0, len(config.Audiences))
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range config.Audiences {
		r := liveconfig.AudienceReport{Name: c.Name, Generation: c.Generation, Revision: c.Revision, Owner: s.Owner == ""}
		if a := s.audiences[name{config.Tenant, c.Name}]; a != nil {
			r.LastRefused, r.Refusal = a.refused, a.lastRefusal
			p := a.progress(c)
			r.Members, r.LastSync, r.Added, r.Removed, r.Changed = p.Members, p.Time, p.Added, p.Removed, p.Changed
			r.Unsent, r.Waits = p.Unsent, p.Waits
		}
		list = append(list, r)
	}
	return list
}
