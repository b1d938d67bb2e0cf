package redelivery_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/redelivery"
)

const (
	src  = "shop/web"
	dest = "shop/crm"
)

var (
	lane  = queue.LaneID{Source: src, Destination: dest}
	other = queue.LaneID{Source: src, Destination: "shop/other"}
)

// open makes a store with n dead letters of a destination; every third one is of the reason Expired.
func open(t *testing.T, n int, lanes ...queue.LaneID) *pebblestore.Store {
	t.Helper()
	s, err := pebblestore.Open("queue", pebblestore.Options{FS: vfs.NewMem(), DuplicateWindow: time.Minute, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, l := range append(lanes, other) {
		if err := s.OpenLane(l); err != nil {
			t.Fatal(err)
		}
	}
	for i := range n {
		m := queue.Message{Source: src, ID: fmt.Sprint("m", i), Type: "track", Event: "E", AcceptedAt: time.Now(), Body: fmt.Appendf(nil, `{"n":%d}`, i)}
		if _, err := s.Append(t.Context(), []queue.Message{m}); err != nil {
			t.Fatal(err)
		}
		for _, l := range lanes {
			for _, d := range lease(t, s, l) {
				reason := "Rejected"
				if i%3 == 0 {
					reason = "Expired"
				}
				if _, err := s.Bury(d, queue.Failure{Time: time.Now(), Reason: reason, StatusCode: 422}); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, d := range lease(t, s, other) {
			s.Ack(d)
		}
	}
	return s
}

func lease(t *testing.T, s queue.Store, l queue.LaneID) []queue.Delivery {
	t.Helper()
	got, err := s.Lease(l, 1000, nil)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func count(t *testing.T, s queue.Store) (n int) {
	t.Helper()
	if err := s.DeadLetters(context.Background(), dest, "", func(queue.DeadLetter) bool { n++; return true }); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestRunPutsTheChosenBackIntoTheirLaneAlone(t *testing.T) {
	s := open(t, 250, lane)
	dry, err := redelivery.Run(t.Context(), s, dest, redelivery.Selector{Reasons: []string{"Expired"}}, redelivery.Options{DryRun: true})
	if err != nil || dry.Matched != 84 || dry.Redelivered != 0 || count(t, s) != 250 {
		t.Fatalf("dry run: %+v %v, %d left", dry, err, count(t, s))
	}
	calls := 0
	p, err := redelivery.Run(t.Context(), s, dest, redelivery.Selector{Reasons: []string{"Expired"}}, redelivery.Options{Rate: 1e6, OnProgress: func(redelivery.Progress) { calls++ }})
	if err != nil || p.Matched != 84 || p.Redelivered != 84 || p.Bytes == 0 || calls == 0 {
		t.Fatalf("%+v %v, %d calls", p, err, calls)
	}
	if n := count(t, s); n != 166 {
		t.Errorf("%d dead letters left", n)
	}
	got := lease(t, s, lane)
	if len(got) != 84 || got[0].ID != "m0" || string(got[0].Body) != `{"n":0}` || got[0].Attempt != 0 {
		t.Errorf("%d pending again, the first one %+v", len(got), got[0])
	}
	for _, d := range got {
		s.Ack(d)
	}
	if n := len(lease(t, s, other)); n != 0 {
		t.Errorf("%d reached another destination", n)
	}
	if st := s.LaneStats(other); st.Accepted != 250 || st.Accepted != st.Delivered {
		t.Errorf("the other lane's ledger moved: %+v", st)
	}
	if st := s.LaneStats(lane); st.Accepted != st.Delivered+st.Filtered+st.DeadLettered+st.Discarded+st.Pending {
		t.Errorf("the ledger does not balance: %+v", st)
	}
}

func TestEndpointsOfTheirOwnAreRedeliveredByThemselves(t *testing.T) {
	a, b := queue.LaneID{Source: src, Destination: dest, Endpoint: "a"}, queue.LaneID{Source: src, Destination: dest, Endpoint: "b"}
	s := open(t, 3, a)
	if err := s.OpenLane(b); err != nil {
		t.Fatal(err)
	}
	if _, err := redelivery.Run(t.Context(), s, dest, redelivery.Selector{}, redelivery.Options{Rate: 1e6}); err != nil {
		t.Fatal(err)
	}
	if na, nb := len(lease(t, s, a)), len(lease(t, s, b)); na != 3 || nb != 0 {
		t.Errorf("endpoint a got %d, endpoint b %d", na, nb)
	}
}

func TestPurge(t *testing.T) {
	s := open(t, 10, lane)
	var first string
	_ = s.DeadLetters(t.Context(), dest, "", func(d queue.DeadLetter) bool { first = d.Key; return false })
	if p, err := redelivery.Purge(t.Context(), s, dest, redelivery.Selector{Keys: []string{first}}, redelivery.Options{}); err != nil || p.Matched != 1 || count(t, s) != 9 {
		t.Errorf("%+v %v, %d left", p, err, count(t, s))
	}
	if p, err := redelivery.Purge(t.Context(), s, dest, redelivery.Selector{}, redelivery.Options{}); err != nil || p.Matched != 9 || count(t, s) != 0 {
		t.Errorf("%+v %v, %d left", p, err, count(t, s))
	}
	if n := len(lease(t, s, lane)); n != 0 {
		t.Errorf("%d came back", n)
	}
}

// A rate that is not reached yet can be given up; what was not redelivered stays.
func TestRunStopsWithItsContext(t *testing.T) {
	s := open(t, 250, lane)
	ctx, cancel := context.WithCancel(t.Context())
	p, err := redelivery.Run(ctx, s, dest, redelivery.Selector{}, redelivery.Options{Rate: 0.001, OnProgress: func(redelivery.Progress) { cancel() }})
	if err == nil || p.Redelivered != 1 || count(t, s) != 249 {
		t.Errorf("%+v %v, %d left", p, err, count(t, s))
	}
}

// A lane that takes nothing more would swallow them.
func TestLettersOfALaneOnItsWayOutStay(t *testing.T) {
	s := open(t, 3, lane)
	orphan := redelivery.Options{Takes: func(l queue.LaneID) bool { return l != lane }}
	if p, err := redelivery.Run(t.Context(), s, dest, redelivery.Selector{}, orphan); err != nil || p.Matched != 3 || p.Redelivered != 0 || count(t, s) != 3 {
		t.Errorf("of an orphan: %+v %v, %d left", p, err, count(t, s))
	}
	if err := s.EndLane(lane, queue.Ended); err != nil {
		t.Fatal(err)
	}
	if p, err := redelivery.Run(t.Context(), s, dest, redelivery.Selector{}, redelivery.Options{}); err != nil || p.Redelivered != 0 || count(t, s) != 3 {
		t.Errorf("of a lane that has ended: %+v %v, %d left", p, err, count(t, s))
	}
}

// A dead letter keeps no mark: its body says whether it has long numbers, also
// when a release before the mark stored it.
func TestLongNumbersAreMarkedAgain(t *testing.T) {
	s := open(t, 0, lane)
	bodies := map[string]bool{`{"id":12345678901234567890}`: true, `{"id":"12345678901234567890"}`: false, `{"n":1e400}`: true, `{"n":0.10000000000000000001}`: true, `{"n":0.1}`: false}
	for body := range bodies {
		if _, err := s.Append(t.Context(), []queue.Message{{Source: src, ID: body, AcceptedAt: time.Now(), Body: []byte(body)}}); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range lease(t, s, lane) {
		if _, err := s.Bury(d, queue.Failure{Time: time.Now(), Reason: "Rejected"}); err != nil {
			t.Fatal(err)
		}
	}
	if p, err := redelivery.Run(t.Context(), s, dest, redelivery.Selector{}, redelivery.Options{}); err != nil || p.Redelivered != int64(len(bodies)) {
		t.Fatalf("%+v, %v, want %d redelivered", p, err, len(bodies))
	}
	got := map[string]bool{}
	for _, d := range lease(t, s, lane) {
		got[string(d.Body)] = d.LongNumbers
	}
	if diff := cmp.Diff(bodies, got); diff != "" {
		t.Errorf("marks of redelivered bodies (-want +got):\n%s", diff)
	}
}

// Of a damaged message nothing is left to send.
func TestDamagedLettersStay(t *testing.T) {
	s := open(t, 2, lane)
	appendOne := queue.Message{Source: src, ID: "damaged", AcceptedAt: time.Now(), Body: []byte("{}")}
	if _, err := s.Append(t.Context(), []queue.Message{appendOne}); err != nil {
		t.Fatal(err)
	}
	for _, d := range lease(t, s, lane) {
		if _, err := s.Bury(d, queue.Failure{Time: time.Now(), Reason: queue.ReasonDamaged}); err != nil {
			t.Fatal(err)
		}
	}
	if p, err := redelivery.Run(t.Context(), s, dest, redelivery.Selector{}, redelivery.Options{}); err != nil || p.Matched != 3 || p.Redelivered != 2 || count(t, s) != 1 {
		t.Errorf("%+v %v, %d left", p, err, count(t, s))
	}
}

func TestLettersOfALaneThatIsNoMoreStay(t *testing.T) {
	gone := queue.LaneID{Source: src, Destination: dest, Endpoint: "old"}
	s := open(t, 4, queue.LaneID{Source: src, Destination: dest, Endpoint: "new"}, gone)
	if err := s.DropLane(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	p, err := redelivery.Run(t.Context(), s, dest, redelivery.Selector{}, redelivery.Options{})
	if err != nil || p.Matched != 8 || p.Redelivered != 4 {
		t.Errorf("got %+v, %v; want 4 of 8 redelivered", p, err)
	}
	if n := count(t, s); n != 4 {
		t.Errorf("%d dead letters are left, want the 4 of the endpoint that is gone", n)
	}
}

// After a change of the success policy they go to the lanes that took over.
func TestLettersOfAFormerPolicyGoTheNewWay(t *testing.T) {
	a, b := queue.LaneID{Source: src, Destination: dest, Endpoint: "a"}, queue.LaneID{Source: src, Destination: dest, Endpoint: "b"}
	for _, test := range []struct {
		name   string
		before []queue.LaneID
		after  []queue.LaneID
		want   int
	}{
		{"to every endpoint", []queue.LaneID{lane}, []queue.LaneID{a, b}, 3},
		{"to any endpoint", []queue.LaneID{a}, []queue.LaneID{lane}, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := open(t, 3, test.before...)
			for _, l := range test.after {
				if err := s.OpenLane(l); err != nil {
					t.Fatal(err)
				}
			}
			for _, l := range test.before {
				if err := s.EndLane(l, queue.Ended); err != nil {
					t.Fatal(err)
				}
			}
			if p, err := redelivery.Run(t.Context(), s, dest, redelivery.Selector{}, redelivery.Options{}); err != nil || int(p.Redelivered) != test.want || count(t, s) != 0 {
				t.Errorf("%+v, %v; %d left", p, err, count(t, s))
			}
			for _, l := range test.after {
				if n := len(lease(t, s, l)); n != test.want {
					t.Errorf("%v got %d, want %d", l, n, test.want)
				}
			}
		})
	}
}

// A low rate is kept from the first one on, not only on average.
func TestRateIsBounded(t *testing.T) {
	for rate, want := range map[float64][3]int{0.5: {1, 2, 6}, 5: {5, 15, 55}, 1000: {100, 250, 250}} {
		t.Run(fmt.Sprint(rate), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := open(t, 250, lane)
				time.Sleep(time.Second)
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					_, _ = redelivery.Run(ctx, s, dest, redelivery.Selector{}, redelivery.Options{Rate: rate})
				}()
				for i, after := range []time.Duration{0, 2 * time.Second, 8 * time.Second} {
					time.Sleep(after)
					synctest.Wait()
					if got := 250 - count(t, s); got != want[i] {
						t.Errorf("%d were redelivered, want %d", got, want[i])
					}
				}
				cancel()
				<-ended
			})
		})
	}
}
