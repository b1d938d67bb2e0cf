package deletion

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/jobs"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// request replaces the DeletionRequest of the rig; nil deletes it.
func (r *rig) request(change func(*liveconfig.Deletion)) {
	c := config()
	if change == nil {
		c.Deletions = nil
	} else {
		change(&c.Deletions[0])
	}
	r.set(c)
}

func (r *rig) report() liveconfig.DeletionReport {
	r.t.Helper()
	c, _ := r.view.Namespace("shop")
	return r.Report(c.Config)[0]
}

// deliver settles all that waits, well or not.
func (r *rig) deliver(ok bool) {
	r.t.Helper()
	for _, to := range [][2]string{{"ios", "crm"}, {"web", "crm"}, {"web", "paused"}} {
		for _, d := range r.lease(to[0], to[1]) {
			if ok {
				r.through.Ack(d)
			} else if _, err := r.through.Bury(d, queue.Failure{Time: r.now, Reason: "Rejected"}); err != nil {
				r.t.Fatal(err)
			}
		}
	}
	r.step()
}

func (r *rig) messages() int64 {
	return r.store.SourceStats("shop/ios").Accepted + r.store.SourceStats("shop/web").Accepted
}

// A request that completed is not sent again for an object with the same identity,
// for 30 days, whatever happens in between; with another identity it is.
func TestAlreadyDone(t *testing.T) {
	r := newRig(t)
	other := func(d *liveconfig.Deletion) { d.UID = "2" }
	r.step()
	r.deliver(true)
	if got := r.report(); !got.Completed || got.AlreadyDone || r.messages() != 2 {
		t.Fatalf("%+v, %d messages; want the end to be recorded after 2", got, r.messages())
	}
	alreadyDone := func(when string) {
		t.Helper()
		r.step()
		if got := r.report(); !got.AlreadyDone || !got.Started.IsZero() || r.messages() != 2 {
			t.Errorf("%s: %+v, %d messages; want AlreadyDone and 2", when, got, r.messages())
		}
	}
	r.request(other)
	alreadyDone("deleted and created again")
	r.start()
	alreadyDone("after a restart")
	r.request(nil)
	r.step()
	r.now = r.now.Add(time.Hour)
	r.step()
	if files, _ := filepath.Glob(filepath.Join(r.dir, "*")); len(files) != 0 {
		t.Errorf("left over: %v", files)
	}
	r.request(other)
	alreadyDone("after the notifications were forgotten")
	r.start()
	alreadyDone("after that and a restart")

	r.request(func(d *liveconfig.Deletion) { d.ID, d.UID = "cd", "3" })
	r.step()
	if got := r.report(); got.AlreadyDone || r.messages() != 4 {
		t.Errorf("with another identity: %+v, %d messages; want 4", got, r.messages())
	}
	r.deliver(true)

	r.request(nil)
	r.now = r.now.Add(jobs.Retention - 2*time.Hour)
	r.request(other)
	alreadyDoneAfter := r.messages()
	r.step()
	if got := r.report(); !got.AlreadyDone || r.messages() != alreadyDoneAfter {
		t.Errorf("after almost 30 days: %+v", got)
	}
	r.now = r.now.Add(3 * time.Hour)
	r.step()
	if got := r.report(); got.AlreadyDone || got.Started.IsZero() || r.messages() != alreadyDoneAfter+2 {
		t.Errorf("after 30 days: %+v, %d messages", got, r.messages())
	}
}

// A request that failed is sent again for another object, with other message ids.
func TestFailedRequestIsDoneAgain(t *testing.T) {
	r := newRig(t)
	r.now = time.Now() // The store finds duplicates by its own clock.
	r.step()
	r.deliver(false)
	if got := r.report(); got.Completed {
		t.Errorf("%+v is recorded as completed", got)
	}
	r.request(func(d *liveconfig.Deletion) { d.UID = "2" })
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending", "web picky Filtered")
	if r.messages() != 4 {
		t.Errorf("%d messages, want 4", r.messages())
	}
}

// An object that is deleted and created again while its run is in progress
// continues that run.
func TestRunContinuesForAnotherObject(t *testing.T) {
	r := newRig(t)
	r.step()
	r.request(nil)
	r.step()
	r.request(func(d *liveconfig.Deletion) { d.UID = "2" })
	r.step()
	r.deliver(true)
	if got := r.report(); !got.Completed || got.AlreadyDone || r.messages() != 2 {
		t.Errorf("%+v, %d messages", got, r.messages())
	}
}

// kill -9 between the last delivery and the record of the end.
func TestKilledBeforeTheRecord(t *testing.T) {
	r := newRig(t)
	r.step()
	for _, to := range [][2]string{{"ios", "crm"}, {"web", "crm"}, {"web", "paused"}} {
		for _, d := range r.lease(to[0], to[1]) {
			r.through.Ack(d)
		}
	}
	r.start()
	r.step()
	if got := r.report(); !got.Completed || r.messages() != 2 {
		t.Errorf("%+v, %d messages", got, r.messages())
	}
	r.request(func(d *liveconfig.Deletion) { d.UID = "2" })
	r.step()
	if got := r.report(); !got.AlreadyDone {
		t.Errorf("%+v", got)
	}
}

// A run that has ended is not in effect any more: it sends nothing, also when its
// record is lost with the volume.
func TestEndedRequestSendsNothing(t *testing.T) {
	r := newRig(t)
	r.request(func(d *liveconfig.Deletion) { d.Ended, d.Suppress = true, true })
	r.step()
	if got := r.report(); !got.Started.IsZero() || got.AlreadyDone || r.messages() != 0 {
		t.Errorf("%+v, %d messages", got, r.messages())
	}
}

// The deadline ends the run: what is in the queue becomes a dead letter instead of
// the next attempt, also after a restart, and the ledger balances.
func TestDeadline(t *testing.T) {
	r := newRig(t)
	r.request(func(d *liveconfig.Deletion) { d.DeadlineSeconds = 60 })
	r.step()
	r.through.Ack(r.lease("ios", "crm")[0])
	retried := r.lease("web", "crm")
	r.through.Retry(retried[0], r.now.Add(time.Hour), queue.Failure{Time: r.now, Reason: "TimedOut"})
	inFlight := r.lease("web", "paused")
	r.step()
	r.now = r.now.Add(57 * time.Second)
	r.step()
	if got := r.report(); got.DeadlineExceeded {
		t.Fatalf("%+v before the deadline", got)
	}
	r.step()
	ended := []string{"ios crm Delivered", "web crm DeadLetteredDeadlineExceeded", "web paused DeadLetteredDeadlineExceeded", "web picky Filtered"}
	r.want(ended...)
	if got := r.report(); !got.DeadlineExceeded || got.Completed {
		t.Errorf("%+v", got)
	}

	// The attempt in flight fails: no other one follows.
	r.through.Retry(inFlight[0], r.now, queue.Failure{Time: r.now, Reason: "TimedOut"})
	r.start()
	// Another message behind the cancelled one is leased, although the lease is for one.
	next := queue.Message{Source: "shop/web", ID: "next", Type: "track", AcceptedAt: r.now, Body: []byte("{}")}
	if _, err := r.store.Append(t.Context(), []queue.Message{next}); err != nil {
		t.Fatal(err)
	}
	crm := queue.LaneID{Source: "shop/web", Destination: "shop/crm"}
	d, ok, err := r.through.LeaseOldest(crm)
	if err != nil || !ok || d.ID != "next" {
		t.Errorf("leased %q %t %v, want next", d.ID, ok, err)
	}
	r.through.Ack(d)
	paused, err := r.through.Lease(queue.LaneID{Source: "shop/web", Destination: "shop/paused"}, 1, nil)
	if err != nil || len(paused) != 1 || paused[0].ID != "next" {
		t.Errorf("leased %v %v, want next", paused, err)
	}
	for _, destination := range []string{"shop/crm", "shop/paused"} {
		stats := r.store.DestinationStats(destination)
		if err := stats.Ledger.Balance(); err != nil || stats.DeadLetters != 1 {
			t.Errorf("%s: %d dead letters, %v", destination, stats.DeadLetters, err)
		}
	}
	r.step()
	r.want(ended...)

	// When all is settled, nothing is remembered of it, and a new object is a new run.
	if r.through.cancelled.Load() != nil {
		t.Error("messages are still cancelled")
	}
	r.request(func(d *liveconfig.Deletion) { d.UID = "2" })
	r.step()
	if got := r.report(); got.DeadlineExceeded || len(got.Notifications) != 4 {
		t.Errorf("%+v", got)
	}
}

// Messages that the queue did not take before the deadline are not sent at all.
func TestDeadlineBeforeTheAppend(t *testing.T) {
	r := newRig(t)
	r.refuse = queue.ErrFull
	r.request(func(d *liveconfig.Deletion) { d.DeadlineSeconds = 60 })
	r.step()
	r.now = r.now.Add(time.Hour)
	r.step()
	r.refuse = nil
	r.step()
	if got := r.report(); !got.DeadlineExceeded || r.messages() != 0 {
		t.Errorf("%+v, %d messages", got, r.messages())
	}
}

// A cancelled message whose object is deleted is settled all the same.
func TestDeadlineOfADeletedObject(t *testing.T) {
	r := newRig(t)
	r.request(func(d *liveconfig.Deletion) { d.DeadlineSeconds = 60 })
	r.step()
	r.now = r.now.Add(time.Hour)
	r.step()
	r.request(nil)
	r.now = r.now.Add(time.Hour)
	r.step()
	for _, lane := range []queue.LaneID{{Source: "shop/ios", Destination: "shop/crm"}, {Source: "shop/web", Destination: "shop/crm"}, {Source: "shop/web", Destination: "shop/paused"}} {
		if got, err := r.through.Lease(lane, 10, nil); err != nil || len(got) != 0 {
			t.Errorf("leased %v %v after the deadline", got, err)
		}
	}
	r.step()
	r.now = r.now.Add(time.Hour)
	r.step()
	r.now = r.now.Add(time.Hour)
	r.step()
	if files, _ := filepath.Glob(filepath.Join(r.dir, "*")); len(files) != 0 || r.through.cancelled.Load() != nil {
		t.Errorf("left over: %v", files)
	}
}
