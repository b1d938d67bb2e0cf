package redelivery

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/jobs/records"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

const (
	tick = time.Second
	// maxPages bounds the pages of dead letters in memory, over all namespaces. At more
	// parts, each one waits for its turn after every page, so no part waits for the end of
	// another one.
	maxPages = 64
	// maxFailures is the number of consecutive errors after which a part fails: with
	// backoff, after a little more than five minutes.
	maxFailures = 11
)

// backoff returns the wait after the n-th consecutive error; n starts at 1.
func backoff(n int) time.Duration { return min(time.Second<<(n-1), time.Minute) }

// ServiceOptions configure a Service. All fields but Takes, Changes and Logger are required.
type ServiceOptions struct {
	// Gate is the way into the queue of Store.
	Gate    *admission.Gate
	Store   Store
	Records *records.Records
	// Takes has the meaning of Options.Takes.
	Takes func(queue.LaneID) bool
	// Changes is marked when the report of a Redelivery changes; nil marks nothing.
	Changes *changes.Log
	Logger  *slog.Logger
}

// Service runs this dispatcher's parts of the Redelivery objects in the live config. A
// part is recorded in the phase RedeliveryBegin and its record is updated after each page,
// so that another process continues from it. A part without a record does not run: the
// pod did not take part in the run, or has lost its store. A run with the ID of a
// completed one is not repeated for another object.
type Service struct {
	ServiceOptions
	pages   chan struct{}
	workers sync.WaitGroup

	mu sync.Mutex
	// running has the parts that a goroutine processes, by destination ("namespace/name"):
	// two parts must not read the same dead letters.
	running map[string]running
	// errors has the last error of a part, by ID.
	errors map[string]string
}

type running struct {
	id     string
	cancel context.CancelFunc
}

// progress is the Progress of a records.Record.
type progress struct {
	// Counted is true when Matched is set.
	Counted bool `json:"counted,omitempty"`
	// Matched, Redelivered and Left count dead letters, as in adminapi.RedeliveryReport.
	Matched     int64 `json:"matched,omitempty"`
	Redelivered int64 `json:"redelivered,omitempty"`
	Left        int64 `json:"left,omitempty"`
	// After is the key of the last processed dead letter.
	After string `json:"after,omitempty"`
	// Done is true when the part has ended, with Error set when it failed.
	Done  bool   `json:"done,omitempty"`
	Error string `json:"error,omitempty"`
}

// New returns a Service; call its Run.
func New(o ServiceOptions) *Service {
	o.Logger = cmp.Or(o.Logger, slog.Default())
	return &Service{ServiceOptions: o, pages: make(chan struct{}, maxPages), running: map[string]running{}, errors: map[string]string{}}
}

// Run processes the Redeliveries of the live config until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	defer s.workers.Wait()
	timer := time.NewTicker(tick)
	defer timer.Stop()
	for {
		if view := s.Gate.View(); view != nil {
			s.advance(ctx, view)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
	}
}

// advance starts what the live config requests, and stops the parts of deleted objects.
func (s *Service) advance(ctx context.Context, view *liveconfig.View) {
	wanted := map[string]bool{}
	for _, namespace := range view.Namespaces() {
		config, _ := view.Namespace(namespace)
		for _, r := range config.Redeliveries {
			wanted[r.ID] = true
			if err := s.enter(ctx, namespace, r); err != nil && ctx.Err() == nil {
				s.setError(namespace, r, err)
				s.Logger.Error("redelivery failed; it is retried", "namespace", namespace, "redelivery", r.Name, "phase", r.Phase, "error", err)
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, part := range s.running {
		if !wanted[part.id] {
			part.cancel()
		}
	}
	for id := range s.errors {
		if !wanted[id] {
			delete(s.errors, id)
		}
	}
}

// enter does what the phase of a Redelivery requires of this dispatcher.
func (s *Service) enter(ctx context.Context, namespace string, r liveconfig.Redelivery) error {
	record, p, err := s.load(r.ID)
	if err != nil {
		return err
	}
	mine := record.UID == r.UID
	switch {
	case !record.Completed.IsZero():
		return nil
	case r.Phase == liveconfig.RedeliveryBegin && !mine:
		// The run of another object did not complete, so this one starts with the rest.
		return s.put(namespace, r, records.Record{Namespace: namespace, UID: r.UID}, progress{})
	case r.Phase == liveconfig.RedeliveryRun && mine && !p.Done:
		s.start(ctx, namespace, r)
	case r.Phase == liveconfig.RedeliveryRecord && mine && p.Done:
		record.Completed = time.Now().UTC()
		return s.put(namespace, r, record, p)
	}
	return nil
}

// Unfinished lists the Redeliveries of the live config that may redeliver further dead letters of
// this dispatcher, "namespace/name".
func (s *Service) Unfinished(view *liveconfig.View) (names []string) {
	for _, namespace := range view.Namespaces() {
		config, _ := view.Namespace(namespace)
		for _, r := range config.Redeliveries {
			record, p, err := s.load(r.ID)
			mine := record.UID == r.UID
			begins := r.Phase == liveconfig.RedeliveryBegin && (!mine || !p.Done)
			runs := r.Phase == liveconfig.RedeliveryRun && mine && !p.Done
			if record.Completed.IsZero() && (err != nil || begins || runs) {
				names = append(names, namespace+"/"+r.Name)
			}
		}
	}
	return names
}

func (s *Service) load(id string) (records.Record, progress, error) {
	var p progress
	record, ok := s.Records.Get(id)
	if !ok {
		return record, p, nil
	}
	if err := json.Unmarshal(record.Progress, &p); err != nil {
		return record, p, fmt.Errorf("record of the Redelivery: cannot decode: %w", err)
	}
	return record, p, nil
}

// put stores the record of a Redelivery.
func (s *Service) put(namespace string, r liveconfig.Redelivery, record records.Record, p progress) error {
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	record.Progress = text
	if err := s.Records.Put(r.ID, record); err != nil {
		return err
	}
	s.Changes.Object(changes.Redeliveries, namespace, r.Name).Transition()
	return nil
}

// start processes a part in a goroutine, unless one processes the destination.
func (s *Service) start(ctx context.Context, namespace string, r liveconfig.Redelivery) {
	destination := namespace + "/" + r.Destination
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, busy := s.running[destination]; busy {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	s.running[destination] = running{r.ID, cancel}
	s.workers.Go(func() {
		defer cancel()
		w := worker{Service: s, namespace: namespace, destination: destination, config: r, limiter: newLimiter(r.Rate)}
		w.run(ctx)
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.running, destination)
	})
}

// setError sets the last error of a Redelivery; nil removes it.
func (s *Service) setError(namespace string, r liveconfig.Redelivery, err error) {
	s.mu.Lock()
	before := s.errors[r.ID]
	delete(s.errors, r.ID)
	if err != nil {
		s.errors[r.ID] = err.Error()
	}
	changed := s.errors[r.ID] != before
	s.mu.Unlock()
	if changed {
		s.Changes.Object(changes.Redeliveries, namespace, r.Name).Transition()
	}
}

// Report returns the state of this dispatcher's parts of a namespace's Redeliveries.
func (s *Service) Report(config liveconfig.Config) []adminapi.RedeliveryReport {
	var list []adminapi.RedeliveryReport
	for _, r := range config.Redeliveries {
		out := adminapi.RedeliveryReport{Name: r.Name, Generation: r.Generation, Revision: r.Revision, UID: r.UID}
		record, p, err := s.load(r.ID)
		s.mu.Lock()
		out.Error = s.errors[r.ID]
		s.mu.Unlock()
		switch {
		case err != nil:
			out.Error = err.Error()
		case record.UID == r.UID:
			out.Begun, out.Completed = true, !record.Completed.IsZero()
			out.Matched, out.Redelivered, out.Left = p.Matched, p.Redelivered, p.Left
			out.Done, out.Failed, out.Error = p.Done, p.Error != "", cmp.Or(p.Error, out.Error)
		default:
			out.AlreadyDone = !record.Completed.IsZero()
		}
		list = append(list, out)
	}
	return list
}

// worker processes one part.
type worker struct {
	*Service
	namespace   string
	destination string // "namespace/name"
	config      liveconfig.Redelivery
	limiter     *rate.Limiter
	// recounted is true when this process has compared the record with the dead letters: an
	// earlier process may have redelivered its last page without recording it.
	recounted bool
}

// run processes the part until it ends or ctx is done.
func (w *worker) run(ctx context.Context) {
	log := w.Logger.With("namespace", w.namespace, "redelivery", w.config.Name, "destination", w.config.Destination)
	// Until is the start of the run, rounded up to a second: dead letters of this run that fail again before it would be
	// redelivered again.
	select {
	case <-time.After(min(w.config.Until.Sub(w.Gate.Now()), time.Second)):
	case <-ctx.Done():
		return
	}
	for failures := 0; ctx.Err() == nil; {
		done, err := w.page(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			failures = 0
			w.setError(w.namespace, w.config, nil)
			if done {
				return
			}
			continue
		}
		failures++
		w.setError(w.namespace, w.config, err)
		if failures >= maxFailures {
			log.Error("redelivery failed on this dispatcher", "error", err)
			if err := w.fail(err); err != nil {
				log.Error("recording the failure of a redelivery failed; it is retried", "error", err)
			}
			return
		}
		if failures == 1 {
			log.Error("redelivery failed on this dispatcher; it is retried", "error", err)
		}
		select {
		case <-time.After(backoff(failures)):
		case <-ctx.Done():
		}
	}
}

// page redelivers the next page of dead letters; the first call counts them before. It
// reports whether the part has ended.
func (w *worker) page(ctx context.Context) (done bool, err error) {
	select {
	case w.pages <- struct{}{}:
		defer func() { <-w.pages }()
	case <-ctx.Done():
		return false, ctx.Err()
	}
	record, p, err := w.load(w.config.ID)
	if err != nil || p.Done {
		return p.Done, err
	}
	if !w.recounted {
		if err := w.count(ctx, record, &p); err != nil || p.Done {
			return p.Done, err
		}
	}
	err = w.redeliver(ctx, record, &p)
	return p.Done, err
}

// count sets the number of matching dead letters. After a restart it adds those that the
// earlier process redelivered after its last record.
func (w *worker) count(ctx context.Context, record records.Record, p *progress) error {
	rest, err := Run(ctx, w.Gate, w.Store, w.destination, w.selector(), Options{DryRun: true, from: p.After})
	if err != nil {
		return err
	}
	if p.Counted {
		p.Redelivered = max(p.Redelivered, p.Matched-p.Left-rest.Matched)
	} else {
		p.Counted, p.Matched = true, rest.Matched
	}
	if w.config.DryRun || rest.Matched == 0 {
		return w.end(record, p)
	}
	if err := w.put(w.namespace, w.config, record, *p); err != nil {
		return err
	}
	w.recounted = true
	return nil
}

// redeliver redelivers one page. If there is none, the part has ended.
func (w *worker) redeliver(ctx context.Context, record records.Record, p *progress) error {
	ended := true
	_, err := Run(ctx, w.Gate, w.Store, w.destination, w.selector(), Options{
		Takes: w.Takes, limiter: w.limiter, from: p.After,
		onPage: func(page adminapi.DeadLetterProgress, after string) (bool, error) {
			ended = false
			p.Redelivered += page.Redelivered
			p.Left += page.Matched - page.Redelivered
			p.After = after
			return false, w.put(w.namespace, w.config, record, *p)
		},
	})
	if err != nil {
		w.recounted = false // The page may be redelivered, and not recorded.
		return err
	}
	if !ended {
		return nil
	}
	p.Matched = max(p.Matched, p.Redelivered+p.Left)
	return w.end(record, p)
}

// end records the end of a part.
func (w *worker) end(record records.Record, p *progress) error {
	ended := *p
	ended.Done = true
	if err := w.put(w.namespace, w.config, record, ended); err != nil {
		return err
	}
	*p = ended
	w.Logger.Info("redelivery ended on this dispatcher", "namespace", w.namespace, "redelivery", w.config.Name, "matched", p.Matched,
		"redelivered", p.Redelivered, "left", p.Left, "error", p.Error)
	return nil
}

// fail records the end of a part that failed.
func (w *worker) fail(cause error) error {
	record, p, err := w.load(w.config.ID)
	if err != nil {
		return err
	}
	p.Error = cause.Error()
	return w.end(record, &p)
}

func (w *worker) selector() adminapi.DeadLetterSelector {
	c := w.config
	return adminapi.DeadLetterSelector{Reasons: c.Reasons, StatusCodes: c.StatusCodes, Types: c.Types, Events: c.Events, Since: c.Since,
		Until: c.Until}
}
