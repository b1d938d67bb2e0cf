package redelivery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/jobs"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// maxOpen is the number of parts above which idle parts are removed from memory.
const maxOpen = 1000

// ErrBusy is returned while another call processes the same part.
var ErrBusy = errors.New("another request processes this Redelivery; try again")

// Jobs runs this dispatcher's parts of Redelivery objects. It writes a part's record
// after each page, so that another call, or another process, continues from it. A run
// with the ID of a completed one is not repeated.
type Jobs struct {
	store   queue.Store
	records *jobs.Records

	mu sync.Mutex
	// open has the parts that this process runs, by ID.
	open map[string]*part
}

// part is the state of a part that Jobs keeps in memory between two calls.
type part struct {
	busy    bool
	limiter *rate.Limiter
	// counted is false until this process has compared the record with the dead
	// letters: an earlier process may have redelivered its last page without recording it.
	counted bool
}

// jobProgress is the Progress of a jobs.Record.
type jobProgress struct {
	Pods []string `json:"pods,omitempty"`
	// Matched, Redelivered and Left count dead letters.
	Matched     int64 `json:"matched,omitempty"`
	Redelivered int64 `json:"redelivered,omitempty"`
	Left        int64 `json:"left,omitempty"`
	Bytes       int64 `json:"bytes,omitempty"`
	// After is the key of the last processed dead letter.
	After string `json:"after,omitempty"`
	Done  bool   `json:"done,omitempty"`
}

// NewJobs returns a Jobs for a store and its records.
func NewJobs(store queue.Store, records *jobs.Records) *Jobs {
	return &Jobs{store: store, records: records, open: map[string]*part{}}
}

// Do runs a step of a job. The progress has the counts of the whole part, and its Job
// is set. A failed step can be repeated.
func (j *Jobs) Do(ctx context.Context, a adminapi.DeadLetterAction, o Options) (adminapi.DeadLetterProgress, error) {
	p, err := j.enter(a.Job.ID)
	if err != nil {
		return adminapi.DeadLetterProgress{}, err
	}
	ended := false
	defer func() { j.leave(a.Job.ID, p, ended) }()

	record, progress, err := j.load(a)
	if err != nil {
		return adminapi.DeadLetterProgress{}, err
	}
	if !record.Completed.IsZero() { // The same object may repeat a step if its status was not written.
		ended = true
		return progress.report(record.UID != a.Job.UID), nil
	}
	switch a.Job.Step {
	case adminapi.JobBegin:
		err = j.begin(ctx, p, a, &record, &progress, o)
	case adminapi.JobRun:
		err = j.run(ctx, p, a, &record, &progress, o)
	case adminapi.JobComplete:
		record.Completed = now(o).UTC()
		err = j.put(a.Job.ID, record, progress)
		ended = err == nil
	default:
		err = fmt.Errorf("job.step: %q is unknown; use begin, run or complete", a.Job.Step)
	}
	return progress.report(false), err
}

func (j *Jobs) enter(id string) (*part, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	p := j.open[id]
	if p == nil {
		if len(j.open) >= maxOpen { // A removed part is counted again when it continues.
			maps.DeleteFunc(j.open, func(_ string, p *part) bool { return !p.busy })
		}
		p = &part{}
		j.open[id] = p
	}
	if p.busy {
		return nil, ErrBusy
	}
	p.busy = true
	return p, nil
}

// leave removes a part from memory if it has ended or has no state.
func (j *Jobs) leave(id string, p *part, ended bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if p.busy = false; ended || !p.counted {
		delete(j.open, id)
	}
}

// load returns the record of a part. If another object's run did not complete, it returns
// a new record, so that the run starts again.
func (j *Jobs) load(a adminapi.DeadLetterAction) (jobs.Record, jobProgress, error) {
	var progress jobProgress
	record, ok := j.records.Get(a.Job.ID)
	if ok {
		if err := json.Unmarshal(record.Progress, &progress); err != nil {
			return record, progress, fmt.Errorf("record of the Redelivery: cannot decode: %w", err)
		}
		if record.UID == a.Job.UID || !record.Completed.IsZero() {
			return record, progress, nil
		}
	}
	namespace, _, _ := strings.Cut(a.Destination, "/")
	return jobs.Record{Namespace: namespace, UID: a.Job.UID}, jobProgress{}, nil
}

// begin counts the matching dead letters and records the part, unless it is already recorded.
func (j *Jobs) begin(ctx context.Context, p *part, a adminapi.DeadLetterAction, record *jobs.Record, progress *jobProgress, o Options) error {
	known := slices.Clone(progress.Pods)
	for _, name := range a.Job.Pods {
		if !slices.Contains(progress.Pods, name) {
			progress.Pods = append(progress.Pods, name)
		}
	}
	if len(record.Progress) > 0 && len(known) == len(progress.Pods) {
		return nil
	}
	if len(record.Progress) == 0 {
		counted, err := Run(ctx, j.store, a.Destination, a.Selector, Options{DryRun: true, Now: o.Now})
		if err != nil {
			return err
		}
		progress.Matched, progress.Bytes, p.counted = counted.Matched, counted.Bytes, true
		progress.Done = a.DryRun || counted.Matched == 0
	}
	return j.put(a.Job.ID, *record, *progress)
}

// run redelivers until no matching dead letter remains or the time slice ends.
func (j *Jobs) run(ctx context.Context, p *part, a adminapi.DeadLetterAction, record *jobs.Record, progress *jobProgress, o Options) error {
	switch {
	case len(record.Progress) == 0:
		return errors.New("this Redelivery has not begun on this dispatcher; send the step begin first")
	case progress.Done:
		return nil
	}
	if !p.counted {
		// Counted dead letters behind After that no longer exist were redelivered.
		rest, err := Run(ctx, j.store, a.Destination, a.Selector, Options{DryRun: true, Now: o.Now, from: progress.After})
		if err != nil {
			return err
		}
		progress.Redelivered = max(progress.Redelivered, progress.Matched-progress.Left-rest.Matched)
		p.counted = true
	}
	if p.limiter == nil {
		p.limiter = newLimiter(a.Rate)
	}
	start, base := now(o), *progress
	o.Rate, o.limiter, o.from = 0, p.limiter, progress.After
	onProgress := o.OnProgress
	o.OnProgress = nil
	ended := true
	o.onPage = func(done adminapi.DeadLetterProgress, after string) (bool, error) {
		progress.Redelivered = base.Redelivered + done.Redelivered
		progress.Left = base.Left + done.Matched - done.Redelivered
		progress.After = after
		if err := j.put(a.Job.ID, *record, *progress); err != nil {
			return false, err
		}
		if onProgress != nil {
			onProgress(progress.report(false))
		}
		ended = a.Job.SliceMS <= 0 || now(o).Sub(start) < time.Duration(a.Job.SliceMS)*time.Millisecond
		return ended, nil
	}
	if _, err := Run(ctx, j.store, a.Destination, a.Selector, o); err != nil || !ended {
		return err
	}
	progress.Done = true
	progress.Matched = max(progress.Matched, progress.Redelivered+progress.Left)
	return j.put(a.Job.ID, *record, *progress)
}

func (j *Jobs) put(id string, record jobs.Record, progress jobProgress) error {
	text, err := json.Marshal(progress)
	if err != nil {
		return err
	}
	record.Progress = text
	return j.records.Put(id, record)
}

func (p jobProgress) report(alreadyDone bool) adminapi.DeadLetterProgress {
	return adminapi.DeadLetterProgress{
		Matched: p.Matched, Redelivered: p.Redelivered, Bytes: p.Bytes,
		Job: &adminapi.DeadLetterJobState{AlreadyDone: alreadyDone, PartDone: p.Done, Left: p.Left, Pods: p.Pods},
	}
}
