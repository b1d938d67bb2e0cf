package redelivery_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/admission/admissiontest"
	"github.com/posthorn/posthorn/dispatcher/jobs/records"
	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
)

// rig runs a Service on a store, in virtual time.
type rig struct {
	*testing.T
	store   queue.Store
	service *redelivery.Service
	takes   func(queue.LaneID) bool
	// view is the live config in effect, also for the next process.
	view *liveconfig.View
	gate *admission.Gate
	stop func()
}

func newRig(t *testing.T, s queue.Store) *rig {
	r := &rig{T: t, store: s}
	r.start(s)
	return r
}

// start starts the Service of a new process.
func (r *rig) start(s queue.Store) {
	r.Helper()
	stored, err := records.Open(s, time.Now)
	check.NoError(r.T, "open the records", err)
	r.gate = gate(s)
	admissiontest.Set(r.gate, r.view, nil)
	r.service = redelivery.New(redelivery.ServiceOptions{Gate: r.gate, Store: s, Records: stored, Takes: r.takes,
		Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(r.Context())
	done := make(chan error, 1)
	go func() { done <- r.service.Run(ctx) }()
	r.stop = func() {
		cancel()
		check.NoError(r.T, "Run", <-done)
	}
}

// object returns a Redelivery of all dead letters.
func object(uid string, phase liveconfig.RedeliveryPhase) liveconfig.Redelivery {
	return liveconfig.Redelivery{
		Name: "again", Generation: 1, Revision: "r", ID: "id", UID: uid, Destination: "crm", Phase: phase, Rate: 1e6,
		Until: time.Now().Add(time.Second),
	}
}

// set makes the live config have these Redeliveries, and waits until the Service has
// processed it.
func (r *rig) set(objects ...liveconfig.Redelivery) {
	r.view = liveconfig.NewView([]liveconfig.Revisioned{{Config: liveconfig.Config{Namespace: "shop", Redeliveries: objects}}})
	admissiontest.Set(r.gate, r.view, nil)
	time.Sleep(3 * time.Second)
	synctest.Wait()
}

// report returns the report about the first Redelivery of the live config as text.
func (r *rig) report() string {
	r.Helper()
	config, _ := r.view.Namespace("shop")
	reports := r.service.Report(config.Config)
	if len(reports) == 0 {
		return ""
	}
	p := reports[0]
	text := []string{fmt.Sprintf("%d/%d left %d", p.Redelivered, p.Matched, p.Left)}
	for _, flag := range []struct {
		name string
		set  bool
	}{{"begun", p.Begun}, {"done", p.Done}, {"failed", p.Failed}, {"completed", p.Completed}, {"already done", p.AlreadyDone}} {
		if flag.set {
			text = append(text, flag.name)
		}
	}
	return strings.Join(text, ", ")
}

func (r *rig) expect(want string) {
	r.Helper()
	check.Equal(r.T, "report", r.report(), want)
}

// virtually runs a test in virtual time.
func virtually(t *testing.T, test func(*testing.T)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t) })
}

func TestServiceRunsOnce(t *testing.T) {
	virtually(t, func(t *testing.T) {
		s := open(t, 10, lane)
		r := newRig(t, s)
		r.set(object("1", liveconfig.RedeliveryBegin))
		r.expect("0/0 left 0, begun")
		check.Equal(t, "dead letters after the phase Begin", count(t, s), 10)
		r.set(object("1", liveconfig.RedeliveryRun))
		r.expect("10/10 left 0, begun, done")
		r.set(object("1", liveconfig.RedeliveryRecord))
		r.expect("10/10 left 0, begun, done, completed")
		r.stop()
		r.start(s)
		// The same object, whose status was not written, and then another object.
		r.set(object("1", liveconfig.RedeliveryRecord))
		r.expect("10/10 left 0, begun, done, completed")
		for _, phase := range []liveconfig.RedeliveryPhase{liveconfig.RedeliveryBegin, liveconfig.RedeliveryRun} {
			r.set(object("2", phase))
			r.expect("0/0 left 0, already done")
		}
		check.Equal(t, "pending messages", len(lease(t, s, lane)), 10)
		r.stop()
	})
}

// A dead letter that fails again must not be in the run, whose bound is its start, rounded up.
func TestServiceStartsAtTheBound(t *testing.T) {
	virtually(t, func(t *testing.T) {
		s := open(t, 10, lane)
		r := newRig(t, s)
		r.set(object("1", liveconfig.RedeliveryBegin))
		o := object("1", liveconfig.RedeliveryRun)
		o.Until = time.Now().Add(1500 * time.Millisecond) // The service reads the config each second.
		r.view = liveconfig.NewView([]liveconfig.Revisioned{{Config: liveconfig.Config{Namespace: "shop",
			Redeliveries: []liveconfig.Redelivery{o}}}})
		admissiontest.Set(r.gate, r.view, nil)
		for count(t, s) == 10 && time.Until(o.Until) > -time.Minute {
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
		}
		if early := time.Until(o.Until); early > 0 || early < -time.Second {
			t.Errorf("redelivered %v before the bound, want it at the bound", early)
		}
		r.stop()
	})
}

// A pod without a record of the phase Begin does not take part: it is new, or it has lost
// its store.
func TestServiceWithoutARecord(t *testing.T) {
	virtually(t, func(t *testing.T) {
		s := open(t, 10, lane)
		r := newRig(t, s)
		r.set(object("1", liveconfig.RedeliveryRun))
		r.expect("0/0 left 0")
		check.Equal(t, "dead letters", count(t, s), 10)
		r.stop()
	})
}

// A run that did not complete starts again for another object.
func TestServiceAfterAFailedRun(t *testing.T) {
	virtually(t, func(t *testing.T) {
		s := open(t, 10, lane)
		r := newRig(t, s)
		r.set(object("1", liveconfig.RedeliveryBegin))
		r.set(object("1", liveconfig.RedeliveryRun))
		for _, d := range lease(t, s, lane) {
			if _, err := s.Bury(d, queue.Failure{Time: time.Now(), Reason: "Rejected"}); err != nil {
				t.Fatal(err)
			}
		}
		r.set(object("2", liveconfig.RedeliveryBegin))
		r.expect("0/0 left 0, begun")
		r.set(object("2", liveconfig.RedeliveryRun))
		r.expect("10/10 left 0, begun, done")
		r.stop()
	})
}

func TestServiceDryRun(t *testing.T) {
	virtually(t, func(t *testing.T) {
		s := open(t, 7, lane)
		r := newRig(t, s)
		o := object("1", liveconfig.RedeliveryBegin)
		o.DryRun = true
		r.set(o)
		o.Phase = liveconfig.RedeliveryRun
		r.set(o)
		r.expect("0/7 left 0, begun, done")
		check.Equal(t, "remaining dead letters", count(t, s), 7)
		r.stop()
	})
}

// Dead letters that failed at the start or later, and those that the selector excludes,
// are not redelivered.
func TestServiceSelects(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*liveconfig.Redelivery)
		want   string
	}{
		"reason":        {func(o *liveconfig.Redelivery) { o.Reasons = []string{"Expired"} }, "3/3 left 0, begun, done"},
		"another event": {func(o *liveconfig.Redelivery) { o.Events = []string{"F"} }, "0/0 left 0, begun, done"},
		"another type":  {func(o *liveconfig.Redelivery) { o.Types = []string{"page"} }, "0/0 left 0, begun, done"},
		"until":         {func(o *liveconfig.Redelivery) { o.Until = time.Now().Add(-time.Hour) }, "0/0 left 0, begun, done"},
		"since":         {func(o *liveconfig.Redelivery) { o.Since = time.Now().Add(time.Hour) }, "0/0 left 0, begun, done"},
	} {
		t.Run(name, func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				s := open(t, 8, lane)
				r := newRig(t, s)
				o := object("1", liveconfig.RedeliveryBegin)
				c.change(&o)
				r.set(o)
				o.Phase = liveconfig.RedeliveryRun
				r.set(o)
				r.expect(c.want)
				r.stop()
			})
		})
	}
}

// After a kill between any two writes of the store the next process continues, no
// message is lost, and the counts equal a run without a kill.
func TestServiceKilled(t *testing.T) {
	const letters = 350
	for _, when := range []string{"after the append", "after the removal", "after the record"} {
		t.Run(when, func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				s := open(t, letters, lane)
				r := newRig(t, s)
				r.set(object("1", liveconfig.RedeliveryBegin))
				r.stop()
				killed := &killedStore{Store: s, when: when}
				r.start(killed)
				r.set(object("1", liveconfig.RedeliveryRun))
				r.stop()
				check.Equal(t, "the store was killed", killed.dead, true)
				if n := count(t, s); n == 0 || n == letters {
					t.Fatalf("dead letters after the kill: got %d, want some of %d", n, letters)
				}
				r.start(s)
				r.set(object("1", liveconfig.RedeliveryRun))
				r.expect(fmt.Sprintf("%d/%d left 0, begun, done", letters, letters))
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
				r.stop()
			})
		})
	}
}

var errKilled = errors.New("killed")

// killedStore fails at the second page, before or after a step, and at every write after
// that.
type killedStore struct {
	queue.Store
	when                        string
	appends, deletions, records int
	dead                        bool
}

func (s *killedStore) kill(now bool) error {
	s.dead = s.dead || now
	if s.dead {
		return errKilled
	}
	return nil
}

func (s *killedStore) DeleteDeadLetters(ctx context.Context, destination string, keys ...string) error {
	s.deletions++
	if err := s.kill(s.deletions == 2 && s.when == "after the append"); err != nil {
		return err
	}
	return s.Store.DeleteDeadLetters(ctx, destination, keys...)
}

func (s *killedStore) Append(ctx context.Context, m []queue.Message) ([]bool, error) {
	s.appends++
	if err := s.kill(s.appends == 3); err != nil {
		return nil, err
	}
	return s.Store.Append(ctx, m)
}

func (s *killedStore) PutMetaDurable(name string, value []byte) error {
	s.records++
	if err := s.kill(s.records == 3 && s.when == "after the removal"); err != nil { // The first record has the count.
		return err
	}
	return s.Store.PutMetaDurable(name, value)
}

// A part fails after repeated errors, and its failure is recorded.
func TestServiceFails(t *testing.T) {
	virtually(t, func(t *testing.T) {
		s := open(t, 10, lane)
		r := newRig(t, &fullStore{Store: s})
		r.set(object("1", liveconfig.RedeliveryBegin))
		r.set(object("1", liveconfig.RedeliveryRun))
		r.expect("0/10 left 0, begun")
		time.Sleep(4 * time.Minute)
		r.expect("0/10 left 0, begun")
		time.Sleep(6 * time.Minute)
		r.expect("0/10 left 0, begun, done, failed")
		config, _ := r.view.Namespace("shop")
		check.Equal(t, "error", r.service.Report(config.Config)[0].Error, "redeliver: storage is full")
		check.Equal(t, "dead letters", count(t, s), 10)
		r.stop()
	})
}

// fullStore rejects messages.
type fullStore struct{ queue.Store }

func (*fullStore) Append(context.Context, []queue.Message) ([]bool, error) {
	return nil, queue.ErrFull
}

// Dead letters without a receiver are kept, counted, and not scanned again.
func TestServiceKeepsDeadLettersWithoutReceiver(t *testing.T) {
	virtually(t, func(t *testing.T) {
		removed := queue.LaneID{Source: src, Destination: dest, Endpoint: "removed"}
		s := open(t, 6, lane, removed)
		r := &rig{T: t, store: s, takes: func(l queue.LaneID) bool { return l != removed && l != lane }}
		r.start(s)
		r.set(object("1", liveconfig.RedeliveryBegin))
		r.set(object("1", liveconfig.RedeliveryRun))
		r.expect("0/12 left 12, begun, done")
		r.stop()
	})
}

// The rate bounds a part, and applies across pages.
func TestServiceRate(t *testing.T) {
	virtually(t, func(t *testing.T) {
		s := open(t, 500, lane)
		r := newRig(t, s)
		o := object("1", liveconfig.RedeliveryBegin)
		o.Rate = 10
		r.set(o)
		start := time.Now()
		o.Phase = liveconfig.RedeliveryRun
		for r.set(o); r.report() != "500/500 left 0, begun, done"; {
			if time.Since(start) > time.Hour {
				t.Fatalf("after an hour: got %s", r.report())
			}
			time.Sleep(time.Second)
		}
		if took := time.Since(start); took < 48*time.Second || took > 53*time.Second {
			t.Errorf("duration of 500 dead letters at 10 a second: got %s, want 48s to 53s", took)
		}
		r.stop()
	})
}

// A run ends when its object is deleted, and the next one of the same destination starts.
func TestServiceStopsADeletedRun(t *testing.T) {
	virtually(t, func(t *testing.T) {
		s := open(t, 50, lane)
		r := newRig(t, s)
		slow, fast := object("1", liveconfig.RedeliveryBegin), object("2", liveconfig.RedeliveryBegin)
		slow.Rate, fast.ID, fast.Name = 1, "other", "other"
		r.set(slow, fast)
		slow.Phase, fast.Phase = liveconfig.RedeliveryRun, liveconfig.RedeliveryRun
		r.set(slow, fast)
		config, _ := r.view.Namespace("shop")
		var got []bool
		for _, p := range r.service.Report(config.Config) {
			got = append(got, p.Redelivered > 0)
		}
		if diff := cmp.Diff([]bool{true, false}, got); diff != "" {
			t.Errorf("runs of one destination that redeliver (-want +got):\n%s", diff)
		}
		r.set(fast)
		time.Sleep(5 * time.Second)
		check.Equal(t, "dead letters after the second run", count(t, s), 0)
		check.Equal(t, "pending messages", len(lease(t, s, lane)), 50)
		r.stop()
	})
}
