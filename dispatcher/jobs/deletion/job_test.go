package deletion

import (
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/jobs/records"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
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

func (r *rig) report() adminapi.DeletionReport {
	r.t.Helper()
	c, _ := r.gate.View().Namespace("shop")
	return r.Report(c.Config)[0]
}

// deliver gives every pending message an outcome: delivered, or a dead letter.
func (r *rig) deliver(ok bool) {
	r.t.Helper()
	for _, to := range [][2]string{{"ios", "crm"}, {"web", "crm"}, {"web", "paused"}} {
		for _, d := range r.lease(to[0], to[1]) {
			if ok {
				r.tracked.Ack(d)
			} else if _, err := r.tracked.Bury(d, queue.Failure{Time: r.now, Reason: "Rejected"}); err != nil {
				r.t.Fatal(err)
			}
		}
	}
	r.step()
}

func (r *rig) messages() int64 {
	return r.store.SourceStats("shop/ios").Accepted + r.store.SourceStats("shop/web").Accepted
}

// A completed request is not sent again for an object with the same identity within
// 30 days, even after restarts; with another identity it is.
func TestAlreadyDone(t *testing.T) {
	r := newRig(t)
	other := func(d *liveconfig.Deletion) { d.UID = "2" }
	r.step()
	r.deliver(true)
	check.Equal(t, "Completed", r.report().Completed, true)
	check.Equal(t, "AlreadyDone of the first object", r.report().AlreadyDone, false)
	check.Equal(t, "messages of the first object", r.messages(), 2)
	alreadyDone := func(when string) {
		t.Helper()
		r.step()
		check.Equal(t, when+": AlreadyDone", r.report().AlreadyDone, true)
		check.Equal(t, when+": Started", r.report().Started, time.Time{})
		check.Equal(t, when+": messages", r.messages(), 2)
	}
	r.request(other)
	alreadyDone("deleted and created again")
	r.start()
	alreadyDone("after a restart")
	r.request(nil)
	r.step()
	r.now = r.now.Add(time.Hour)
	r.step()
	check.Same(t, "records after the grace period", r.stored(), nil)
	r.request(other)
	alreadyDone("after the record was removed")
	r.start()
	alreadyDone("after the record was removed, and a restart")

	r.request(func(d *liveconfig.Deletion) { d.ID, d.UID = "cd", "3" })
	r.step()
	check.Equal(t, "another identity: AlreadyDone", r.report().AlreadyDone, false)
	check.Equal(t, "another identity: messages", r.messages(), 4)
	r.deliver(true)

	r.request(nil)
	r.now = r.now.Add(records.Retention - 2*time.Hour)
	r.request(other)
	before := r.messages()
	r.step()
	check.Equal(t, "after almost 30 days: AlreadyDone", r.report().AlreadyDone, true)
	check.Equal(t, "after almost 30 days: messages", r.messages(), before)
	r.now = r.now.Add(3 * time.Hour)
	r.step()
	check.Equal(t, "after 30 days: AlreadyDone", r.report().AlreadyDone, false)
	check.Equal(t, "after 30 days: report lacks its start", r.report().Started.IsZero(), false)
	check.Equal(t, "after 30 days: messages", r.messages(), before+2)
}

// A request that failed is sent again for another object, with other message ids.
func TestFailedRequestRunsAgain(t *testing.T) {
	r := newRig(t)
	r.now = time.Now() // The store detects duplicates by its own clock.
	r.step()
	r.deliver(false)
	check.Equal(t, "Completed of the failed run", r.report().Completed, false)
	r.request(func(d *liveconfig.Deletion) { d.UID = "2" })
	r.step()
	r.want("ios crm Pending", "web crm Pending", "web paused Pending")
	check.Equal(t, "messages", r.messages(), 4)
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
	check.Equal(t, "Completed", r.report().Completed, true)
	check.Equal(t, "AlreadyDone", r.report().AlreadyDone, false)
	check.Equal(t, "messages", r.messages(), 2)
}

// kill -9 between the last delivery and the record of the end.
func TestKilledBeforeTheRecord(t *testing.T) {
	r := newRig(t)
	r.step()
	for _, to := range [][2]string{{"ios", "crm"}, {"web", "crm"}, {"web", "paused"}} {
		for _, d := range r.lease(to[0], to[1]) {
			r.tracked.Ack(d)
		}
	}
	r.start()
	r.step()
	check.Equal(t, "Completed", r.report().Completed, true)
	check.Equal(t, "messages", r.messages(), 2)
	r.request(func(d *liveconfig.Deletion) { d.UID = "2" })
	r.step()
	check.Equal(t, "AlreadyDone of another object", r.report().AlreadyDone, true)
}

// A run that has ended sends nothing, even if its record was lost with the volume.
func TestEndedRequestSendsNothing(t *testing.T) {
	r := newRig(t)
	r.request(func(d *liveconfig.Deletion) { d.Ended, d.Suppress = true, true })
	r.step()
	check.Equal(t, "Started", r.report().Started, time.Time{})
	check.Equal(t, "AlreadyDone", r.report().AlreadyDone, false)
	check.Equal(t, "messages", r.messages(), 0)
}

// The deadline ends the run: a message in the queue becomes a dead letter instead of
// being attempted again, also after a restart, and the ledger balances.
func TestDeadline(t *testing.T) {
	failure := queue.Failure{Time: time.Now(), Reason: "TimedOut"}
	for name, retry := range map[string]func(*OutcomeTracker, queue.Delivery, time.Time) error{
		"Retry": func(s *OutcomeTracker, d queue.Delivery, at time.Time) error {
			s.Retry(d, at, failure)
			return nil
		},
		"SettleAll": func(s *OutcomeTracker, d queue.Delivery, at time.Time) error {
			return s.SettleAll(d.Lane, []queue.Settlement{{Delivery: d, Outcome: queue.Retried, At: at, Failure: failure}})
		},
	} {
		t.Run(name, func(t *testing.T) { testDeadline(t, retry) })
	}
}

func testDeadline(t *testing.T, retry func(*OutcomeTracker, queue.Delivery, time.Time) error) {
	r := newRig(t)
	r.request(func(d *liveconfig.Deletion) { d.DeadlineSeconds = 60 })
	r.step()
	r.tracked.Ack(r.lease("ios", "crm")[0])
	retried := r.lease("web", "crm")
	r.tracked.Retry(retried[0], r.now.Add(time.Hour), queue.Failure{Time: r.now, Reason: "TimedOut"})
	inFlight := r.lease("web", "paused")
	r.step()
	r.now = r.now.Add(57 * time.Second)
	r.step()
	check.Equal(t, "DeadlineExceeded before the deadline", r.report().DeadlineExceeded, false)
	r.step()
	ended := []string{"ios crm Delivered", "web crm DeadLetteredDeadlineExceeded", "web paused DeadLetteredDeadlineExceeded"}
	r.want(ended...)
	check.Equal(t, "DeadlineExceeded", r.report().DeadlineExceeded, true)
	check.Equal(t, "Completed", r.report().Completed, false)

	// The attempt in flight fails, and is not retried.
	check.NoError(t, "settle the attempt in flight", retry(r.tracked, inFlight[0], r.now))
	r.start()
	// The message behind the cancelled one is leased, although the lease is for one message.
	next := queue.Message{Source: "shop/web", ID: "next", Type: "track", AcceptedAt: r.now, Body: []byte("{}")}
	if _, err := r.store.Append(t.Context(), []queue.Message{next}); err != nil {
		t.Fatal(err)
	}
	crm := queue.LaneID{Source: "shop/web", Destination: "shop/crm"}
	d, ok, err := r.tracked.LeaseOldest(crm)
	if err != nil || !ok || d.ID != "next" {
		t.Errorf("lease of crm: got message %q, %t and error %v, want message next", d.ID, ok, err)
	}
	r.tracked.Ack(d)
	paused, err := r.tracked.Lease(queue.LaneID{Source: "shop/web", Destination: "shop/paused"}, 1, nil)
	if err != nil || len(paused) != 1 || paused[0].ID != "next" {
		t.Errorf("lease of paused: got %v and error %v, want message next", paused, err)
	}
	for _, destination := range []string{"shop/crm", "shop/paused"} {
		stats := r.store.DestinationStats(destination)
		check.NoError(t, "ledger of "+destination, stats.Ledger.Balance())
		check.Equal(t, "dead letters of "+destination, stats.DeadLetters, 1)
	}
	r.step()
	r.want(ended...)

	// When every message has an outcome, the cancellations are removed, and a new object
	// starts a new run.
	check.Equal(t, "cancelled messages remain", r.tracked.cancelled.Load() != nil, false)
	r.request(func(d *liveconfig.Deletion) { d.UID = "2" })
	r.step()
	check.Equal(t, "DeadlineExceeded of the new run", r.report().DeadlineExceeded, false)
	check.Equal(t, "notifications of the new run", len(r.report().Notifications), 3)
}

// Messages that the queue did not accept before the deadline are not sent.
func TestDeadlineBeforeTheAppend(t *testing.T) {
	r := newRig(t)
	r.appendError = queue.ErrFull
	r.request(func(d *liveconfig.Deletion) { d.DeadlineSeconds = 60 })
	r.step()
	r.now = r.now.Add(time.Hour)
	r.step()
	r.appendError = nil
	r.step()
	check.Equal(t, "DeadlineExceeded", r.report().DeadlineExceeded, true)
	check.Equal(t, "messages", r.messages(), 0)
}

// A cancelled message becomes a dead letter even if its object is deleted.
func TestDeadlineOfADeletedObject(t *testing.T) {
	r := newRig(t)
	r.request(func(d *liveconfig.Deletion) { d.DeadlineSeconds = 60 })
	r.step()
	r.now = r.now.Add(time.Hour)
	r.step()
	r.request(nil)
	r.now = r.now.Add(time.Hour)
	r.step()
	for _, lane := range []queue.LaneID{{Source: "shop/ios", Destination: "shop/crm"}, {Source: "shop/web", Destination: "shop/crm"},
		{Source: "shop/web", Destination: "shop/paused"}} {
		if got, err := r.tracked.Lease(lane, 10, nil); err != nil || len(got) != 0 {
			t.Errorf("lane %v after the deadline: got %v and error %v, want no message", lane, got, err)
		}
	}
	r.step()
	r.now = r.now.Add(time.Hour)
	r.step()
	r.now = r.now.Add(time.Hour)
	r.step()
	check.Same(t, "records after the grace period", r.stored(), nil)
	check.Equal(t, "cancelled messages remain", r.tracked.cancelled.Load() != nil, false)
}
