package redelivery_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/jobs"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/redelivery"
	"github.com/posthorn/posthorn/test/check"
)

// jobRig runs the steps of one object's job.
type jobRig struct {
	*testing.T
	store *pebblestore.Store
	jobs  *redelivery.Jobs
}

func newJobRig(t *testing.T, s *pebblestore.Store) *jobRig {
	r := &jobRig{T: t, store: s}
	r.restart()
	return r
}

// restart simulates a new process on the same store.
func (r *jobRig) restart() {
	r.Helper()
	records, err := jobs.Open(r.store, time.Now)
	if err != nil {
		r.Fatal(err)
	}
	r.jobs = redelivery.NewJobs(r.store, records)
}

func action(uid, step string) adminapi.DeadLetterAction {
	return adminapi.DeadLetterAction{
		Destination: dest, Rate: 1e6, Selector: adminapi.DeadLetterSelector{Until: time.Now().Add(time.Second)},
		Job: &adminapi.DeadLetterJob{ID: "id", UID: uid, Step: step, Pods: []string{"pod-0"}},
	}
}

func (r *jobRig) do(a adminapi.DeadLetterAction, want string) adminapi.DeadLetterProgress {
	r.Helper()
	p, err := r.jobs.Do(r.Context(), a, redelivery.Options{Rate: a.Rate, DryRun: a.DryRun})
	if err != nil {
		r.Fatalf("step %s for object %s: got error %v, want none", a.Job.Step, a.Job.UID, err)
	}
	got := fmt.Sprintf("%d/%d left %d", p.Redelivered, p.Matched, p.Job.Left)
	if p.Job.AlreadyDone {
		got += " already done"
	}
	if p.Job.PartDone {
		got += " part done"
	}
	if got != want {
		r.Errorf("step %s for object %s: got %s, want %s", a.Job.Step, a.Job.UID, got, want)
	}
	return p
}

func TestJobRunsOnce(t *testing.T) {
	s := open(t, 10, lane)
	r := newJobRig(t, s)
	r.do(action("1", adminapi.JobBegin), "0/10 left 0")
	r.do(action("1", adminapi.JobBegin), "0/10 left 0")
	r.do(action("1", adminapi.JobRun), "10/10 left 0 part done")
	r.do(action("1", adminapi.JobRun), "10/10 left 0 part done")
	r.do(action("1", adminapi.JobComplete), "10/10 left 0 part done")
	r.restart()
	// The same object, whose status was not written, and then another object.
	r.do(action("1", adminapi.JobBegin), "10/10 left 0 part done")
	r.do(action("2", adminapi.JobBegin), "10/10 left 0 already done part done")
	r.do(action("2", adminapi.JobRun), "10/10 left 0 already done part done")
	check.Equal(t, "pending messages", len(lease(t, s, lane)), 10)
}

// A run that did not complete starts again for another object.
func TestJobOfAFailedRun(t *testing.T) {
	s := open(t, 10, lane)
	r := newJobRig(t, s)
	r.do(action("1", adminapi.JobBegin), "0/10 left 0")
	r.do(action("1", adminapi.JobRun), "10/10 left 0 part done")
	for _, d := range lease(t, s, lane) {
		if _, err := s.Bury(d, queue.Failure{Time: time.Now(), Reason: "Rejected"}); err != nil {
			t.Fatal(err)
		}
	}
	r.do(action("2", adminapi.JobBegin), "0/10 left 0")
	r.do(action("2", adminapi.JobRun), "10/10 left 0 part done")
}

func TestJobDryRun(t *testing.T) {
	s := open(t, 7, lane)
	r := newJobRig(t, s)
	a := action("1", adminapi.JobBegin)
	a.DryRun = true
	r.do(a, "0/7 left 0 part done")
	a.Job.Step = adminapi.JobRun
	r.do(a, "0/7 left 0 part done")
	check.Equal(t, "remaining dead letters", count(t, s), 7)
}

// After a kill between any two writes of the store the next process continues, no
// message is lost, and the counts equal those of a run without a kill.
func TestJobKilled(t *testing.T) {
	const letters = 350
	for _, when := range []string{"after the append", "after the removal", "after the record"} {
		t.Run(when, func(t *testing.T) {
			s := open(t, letters, lane)
			r := newJobRig(t, s)
			r.do(action("1", adminapi.JobBegin), fmt.Sprintf("0/%d left 0", letters))
			killed := &killedStore{Store: s, when: when}
			records, err := jobs.Open(killed, time.Now)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := redelivery.NewJobs(killed, records).Do(t.Context(), action("1", adminapi.JobRun), redelivery.Options{Rate: 1e6}); !errors.Is(err, errKilled) {
				t.Fatalf("run on the killed store: got error %v, want %v", err, errKilled)
			}
			r.restart()
			r.do(action("1", adminapi.JobRun), fmt.Sprintf("%d/%d left 0 part done", letters, letters))
			check.Equal(t, "remaining dead letters", count(t, s), 0)
			seen := map[string]int{}
			for _, d := range lease(t, s, lane) {
				seen[d.ID]++
			}
			twice := 0
			for _, n := range seen {
				twice += n - 1
			}
			check.Equal(t, "pending messages", len(seen), letters)
			if limit := map[bool]int{true: 100}[when == "after the append"]; twice > limit {
				t.Errorf("repeated messages: got %d, want at most a page of %d", twice, limit)
			}
		})
	}
}

var errKilled = errors.New("killed")

// killedStore fails at the second page, before or after a step.
type killedStore struct {
	queue.Store
	when                        string
	appends, deletions, records int
}

func (s *killedStore) DeleteDeadLetters(ctx context.Context, destination string, keys ...string) error {
	if s.deletions++; s.deletions == 2 && s.when == "after the append" {
		return errKilled
	}
	return s.Store.DeleteDeadLetters(ctx, destination, keys...)
}

func (s *killedStore) Append(ctx context.Context, m []queue.Message) ([]bool, error) {
	if s.appends++; s.appends == 3 {
		return nil, errKilled
	}
	return s.Store.Append(ctx, m)
}

func (s *killedStore) PutMetaDurable(name string, value []byte) error {
	if s.records++; s.records == 2 && s.when == "after the removal" {
		return errKilled
	}
	return s.Store.PutMetaDurable(name, value)
}

// Dead letters without a receiver are kept, counted, and not scanned again.
func TestJobKeepsDeadLettersWithoutReceiver(t *testing.T) {
	removed := queue.LaneID{Source: src, Destination: dest, Endpoint: "removed"}
	s := open(t, 6, lane, removed)
	r := newJobRig(t, s)
	takes := func(l queue.LaneID) bool { return l != removed && l != lane }
	r.do(action("1", adminapi.JobBegin), "0/12 left 0")
	p, err := r.jobs.Do(t.Context(), action("1", adminapi.JobRun), redelivery.Options{Rate: 1e6, Takes: takes})
	check.NoError(t, "run", err)
	check.Equal(t, "Redelivered", p.Redelivered, 0)
	check.Equal(t, "Left", p.Job.Left, 12)
	check.Equal(t, "PartDone", p.Job.PartDone, true)
}

// The slice bounds the duration of a call, and the rate applies across calls.
func TestJobSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, 500, lane)
		r := newJobRig(t, s)
		r.do(action("1", adminapi.JobBegin), "0/500 left 0")
		start := time.Now()
		a := action("1", adminapi.JobRun)
		a.Rate, a.Job.SliceMS = 10, 2000
		calls := 0
		for {
			calls++
			before := time.Now()
			p, err := r.jobs.Do(t.Context(), a, redelivery.Options{Rate: a.Rate})
			if err != nil {
				t.Fatal(err)
			}
			if took := time.Since(before); took > 4*time.Second {
				t.Fatalf("duration of a call with a slice of 2s: got %s, want at most 4s", took)
			}
			if p.Job.PartDone {
				break
			}
		}
		if took := time.Since(start); took < 48*time.Second || took > 51*time.Second {
			t.Errorf("duration of 500 dead letters at 10 a second: got %s, want 48s to 51s", took)
		}
		if calls < 15 {
			t.Errorf("calls: got %d, want at least 15", calls)
		}
	})
}

// Two operators, an old one and its successor, do not process the same part.
func TestJobBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, 50, lane)
		r := newJobRig(t, s)
		r.do(action("1", adminapi.JobBegin), "0/50 left 0")
		a := action("1", adminapi.JobRun)
		a.Rate = 1
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := r.jobs.Do(ctx, a, redelivery.Options{Rate: 1})
			done <- err
		}()
		time.Sleep(10*time.Second + time.Millisecond)
		_, err := r.jobs.Do(t.Context(), a, redelivery.Options{})
		check.ErrorIs(t, "second call", err, redelivery.ErrBusy)
		cancel()
		check.ErrorIs(t, "cancelled call", <-done, context.Canceled)
		a.Rate = 1e6
		p := r.do(action("1", adminapi.JobRun), "50/50 left 0 part done")
		if diff := cmp.Diff([]string{"pod-0"}, slices.Sorted(slices.Values(p.Job.Pods))); diff != "" {
			t.Errorf("pods (-want +got):\n%s", diff)
		}
		check.Equal(t, "pending messages", len(lease(t, s, lane)), 50)
	})
}
