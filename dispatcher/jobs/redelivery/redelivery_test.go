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

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/admission/admissiontest"
	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/check"
)

const (
	src  = "shop/web"
	dest = "shop/crm"
)

var (
	lane  = queue.LaneID{Source: src, Destination: dest}
	other = queue.LaneID{Source: src, Destination: "shop/other"}
)

// open creates a store with n dead letters of a destination; every third one has the reason Expired.
func open(t *testing.T, n int, lanes ...queue.LaneID) *pebblestore.Store {
	t.Helper()
	s, err := pebblestore.Open("queue", pebblestore.Options{FS: vfs.NewMem(), DuplicateWindow: time.Minute,
		Logger: slog.New(slog.DiscardHandler)})
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
		m := queue.Message{Source: src, ID: fmt.Sprint("m", i), Type: "track", Event: "E", AcceptedAt: time.Now(),
			Body: fmt.Appendf(nil, `{"n":%d}`, i)}
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

// gate returns the way into a store, without a live config.
func gate(s queue.Appender) *admission.Gate {
	return admission.New(admission.Options{Store: &admissiontest.Store{OnAppend: s.Append}, Logger: slog.New(slog.DiscardHandler)})
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

func TestRunAppendsSelectedDeadLettersToTheirLane(t *testing.T) {
	s := open(t, 250, lane)
	dry, err := redelivery.Run(t.Context(), gate(s), s, dest, adminapi.DeadLetterSelector{Reasons: []string{"Expired"}},
		redelivery.Options{DryRun: true})
	check.NoError(t, "dry run", err)
	check.Equal(t, "dry run: Matched", dry.Matched, 84)
	check.Equal(t, "dry run: Redelivered", dry.Redelivered, 0)
	check.Equal(t, "dead letters after a dry run", count(t, s), 250)
	calls := 0
	p, err := redelivery.Run(t.Context(), gate(s), s, dest, adminapi.DeadLetterSelector{Reasons: []string{"Expired"}},
		redelivery.Options{Rate: 1e6, OnProgress: func(adminapi.DeadLetterProgress) { calls++ }})
	check.NoError(t, "run", err)
	check.Equal(t, "Matched", p.Matched, 84)
	check.Equal(t, "Redelivered", p.Redelivered, 84)
	check.Equal(t, "Bytes is zero", p.Bytes == 0, false)
	check.Equal(t, "OnProgress was called", calls > 0, true)
	check.Equal(t, "remaining dead letters", count(t, s), 166)
	got := lease(t, s, lane)
	if len(got) != 84 {
		t.Fatalf("pending messages: got %d, want 84", len(got))
	}
	check.Equal(t, "id of the first message", got[0].ID, "m0")
	check.Equal(t, "body of the first message", string(got[0].Body), `{"n":0}`)
	check.Equal(t, "attempts of the first message", got[0].Attempt, 0)
	for _, d := range got {
		s.Ack(d)
	}
	check.Equal(t, "messages for another destination", len(lease(t, s, other)), 0)
	check.Equal(t, "Accepted of the other lane", s.LaneStats(other).Accepted, 250)
	check.Equal(t, "Delivered of the other lane", s.LaneStats(other).Delivered, 250)
	check.NoError(t, "ledger of the lane", s.LaneStats(lane).Balance())
}

// 0 selects the dead letters without a response.
func TestStatusCodesSelectDeadLetters(t *testing.T) {
	s := open(t, 0, lane)
	for i, code := range []int{422, 400, 0, 422, 0, 422} {
		bury(t, s, queue.Message{ID: fmt.Sprint("m", i), Type: "track"}, code)
	}
	for _, c := range []struct {
		codes []int
		want  int64
	}{{nil, 6}, {[]int{422}, 3}, {[]int{0}, 2}, {[]int{0, 400}, 3}, {[]int{500}, 0}} {
		p, err := redelivery.Run(t.Context(), gate(s), s, dest, adminapi.DeadLetterSelector{StatusCodes: c.codes},
			redelivery.Options{DryRun: true})
		check.NoError(t, fmt.Sprint("dry run of ", c.codes), err)
		check.Equal(t, fmt.Sprint("Matched of ", c.codes), p.Matched, c.want)
	}
}

// bury stores a message as a dead letter.
func bury(t *testing.T, s *pebblestore.Store, m queue.Message, code int) {
	t.Helper()
	m.Source, m.AcceptedAt, m.Body = src, time.Now(), []byte(`{}`)
	if _, err := s.Append(t.Context(), []queue.Message{m}); err != nil {
		t.Fatal(err)
	}
	for _, d := range lease(t, s, lane) {
		if _, err := s.Bury(d, queue.Failure{Time: time.Now(), Reason: "Rejected", StatusCode: code}); err != nil {
			t.Fatal(err)
		}
	}
}

// Patterns match the events of track calls, and nothing else.
func TestPatternsOfEventsSelectDeadLetters(t *testing.T) {
	s := open(t, 0, lane)
	for i, event := range []string{"Order Completed", "Order Refunded", "Signed Up", ""} {
		m := queue.Message{ID: fmt.Sprint("m", i), Type: "track", Event: event}
		if event == "" {
			m.Type = "page"
		}
		bury(t, s, m, 422)
	}
	for _, c := range []struct {
		patterns []string
		want     int64
	}{{nil, 4}, {[]string{"*"}, 3}, {[]string{"Order *"}, 2}, {[]string{"order *"}, 0}, {[]string{"Signed Up", "*Refunded"}, 2}} {
		p, err := redelivery.Run(t.Context(), gate(s), s, dest, adminapi.DeadLetterSelector{Events: c.patterns},
			redelivery.Options{DryRun: true})
		check.NoError(t, fmt.Sprint("dry run of ", c.patterns), err)
		check.Equal(t, fmt.Sprint("Matched of ", c.patterns), p.Matched, c.want)
	}
}

func TestMessagesOfOneEndpointAreRedeliveredToIt(t *testing.T) {
	a, b := queue.LaneID{Source: src, Destination: dest, Endpoint: "a"}, queue.LaneID{Source: src, Destination: dest, Endpoint: "b"}
	s := open(t, 3, a)
	if err := s.OpenLane(b); err != nil {
		t.Fatal(err)
	}
	if _, err := redelivery.Run(t.Context(), gate(s), s, dest, adminapi.DeadLetterSelector{}, redelivery.Options{Rate: 1e6}); err != nil {
		t.Fatal(err)
	}
	check.Equal(t, "messages for endpoint a", len(lease(t, s, a)), 3)
	check.Equal(t, "messages for endpoint b", len(lease(t, s, b)), 0)
}

func TestPurge(t *testing.T) {
	s := open(t, 10, lane)
	var first string
	_ = s.DeadLetters(t.Context(), dest, "", func(d queue.DeadLetter) bool { first = d.Key; return false })
	p, err := redelivery.Purge(t.Context(), s, dest, adminapi.DeadLetterSelector{Keys: []string{first}}, redelivery.Options{})
	check.NoError(t, "purge by key", err)
	check.Equal(t, "purge by key: Matched", p.Matched, 1)
	check.Equal(t, "dead letters after a purge by key", count(t, s), 9)
	p, err = redelivery.Purge(t.Context(), s, dest, adminapi.DeadLetterSelector{}, redelivery.Options{})
	check.NoError(t, "purge of all", err)
	check.Equal(t, "purge of all: Matched", p.Matched, 9)
	check.Equal(t, "dead letters after a purge of all", count(t, s), 0)
	check.Equal(t, "pending messages", len(lease(t, s, lane)), 0)
}

// A run that waits for its rate ends with its context, and keeps the remaining dead letters.
func TestRunStopsWithItsContext(t *testing.T) {
	s := open(t, 250, lane)
	ctx, cancel := context.WithCancel(t.Context())
	p, err := redelivery.Run(ctx, gate(s), s, dest, adminapi.DeadLetterSelector{},
		redelivery.Options{Rate: 0.001, OnProgress: func(adminapi.DeadLetterProgress) { cancel() }})
	check.Equal(t, "run returned an error", err != nil, true)
	check.Equal(t, "Redelivered", p.Redelivered, 1)
	check.Equal(t, "remaining dead letters", count(t, s), 249)
}

// A lane that accepts no messages would lose them.
func TestDeadLettersOfAnEndingLaneAreKept(t *testing.T) {
	s := open(t, 3, lane)
	orphan := redelivery.Options{Takes: func(l queue.LaneID) bool { return l != lane }}
	p, err := redelivery.Run(t.Context(), gate(s), s, dest, adminapi.DeadLetterSelector{}, orphan)
	check.NoError(t, "run for a lane outside of the config", err)
	check.Equal(t, "Matched of a lane outside of the config", p.Matched, 3)
	check.Equal(t, "Redelivered of a lane outside of the config", p.Redelivered, 0)
	check.Equal(t, "dead letters of a lane outside of the config", count(t, s), 3)
	if err := s.EndLane(lane, queue.Ended); err != nil {
		t.Fatal(err)
	}
	p, err = redelivery.Run(t.Context(), gate(s), s, dest, adminapi.DeadLetterSelector{}, redelivery.Options{})
	check.NoError(t, "run for an ended lane", err)
	check.Equal(t, "Redelivered of an ended lane", p.Redelivered, 0)
	check.Equal(t, "dead letters of an ended lane", count(t, s), 3)
}

// A dead letter has no mark: the body shows whether it has long numbers, also
// when a release without the mark stored it.
func TestLongNumbersAreMarkedAgain(t *testing.T) {
	s := open(t, 0, lane)
	bodies := map[string]bool{`{"id":12345678901234567890}`: true, `{"id":"12345678901234567890"}`: false, `{"n":1e400}`: true,
		`{"n":0.10000000000000000001}`: true, `{"n":0.1}`: false}
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
	if p, err := redelivery.Run(t.Context(), gate(s), s, dest, adminapi.DeadLetterSelector{}, redelivery.Options{}); err != nil ||
		p.Redelivered != int64(len(bodies)) {
		t.Fatalf("run: got %d redelivered and error %v, want %d redelivered", p.Redelivered, err, len(bodies))
	}
	got := map[string]bool{}
	for _, d := range lease(t, s, lane) {
		got[string(d.Body)] = d.LongNumbers
	}
	if diff := cmp.Diff(bodies, got); diff != "" {
		t.Errorf("marks of redelivered bodies (-want +got):\n%s", diff)
	}
}

// A damaged message has no body to send.
func TestDamagedDeadLettersAreKept(t *testing.T) {
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
	p, err := redelivery.Run(t.Context(), gate(s), s, dest, adminapi.DeadLetterSelector{}, redelivery.Options{})
	check.NoError(t, "run", err)
	check.Equal(t, "Matched", p.Matched, 3)
	check.Equal(t, "Redelivered", p.Redelivered, 2)
	check.Equal(t, "remaining dead letters", count(t, s), 1)
}

func TestDeadLettersOfARemovedLaneAreKept(t *testing.T) {
	removed := queue.LaneID{Source: src, Destination: dest, Endpoint: "old"}
	s := open(t, 4, queue.LaneID{Source: src, Destination: dest, Endpoint: "new"}, removed)
	if err := s.DropLane(t.Context(), removed); err != nil {
		t.Fatal(err)
	}
	p, err := redelivery.Run(t.Context(), gate(s), s, dest, adminapi.DeadLetterSelector{}, redelivery.Options{})
	check.NoError(t, "run", err)
	check.Equal(t, "Matched", p.Matched, 8)
	check.Equal(t, "Redelivered", p.Redelivered, 4)
	check.Equal(t, "remaining dead letters, of the removed endpoint", count(t, s), 4)
}

// After a change of the success policy the lanes of the new policy get the messages.
func TestDeadLettersAfterAChangeOfThePolicy(t *testing.T) {
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
			p, err := redelivery.Run(t.Context(), gate(s), s, dest, adminapi.DeadLetterSelector{}, redelivery.Options{})
			check.NoError(t, "run", err)
			check.Equal(t, "Redelivered", int(p.Redelivered), test.want)
			check.Equal(t, "remaining dead letters", count(t, s), 0)
			for _, l := range test.after {
				check.Equal(t, fmt.Sprintf("messages in lane %v", l), len(lease(t, s, l)), test.want)
			}
		})
	}
}

// A low rate applies from the first dead letter on, not only on average.
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
					_, _ = redelivery.Run(ctx, gate(s), s, dest, adminapi.DeadLetterSelector{}, redelivery.Options{Rate: rate})
				}()
				for i, after := range []time.Duration{50 * time.Millisecond, 2 * time.Second, 8 * time.Second} {
					time.Sleep(after)
					synctest.Wait()
					check.Equal(t, fmt.Sprintf("redelivered after another %s", after), 250-count(t, s), want[i])
				}
				cancel()
				<-ended
			})
		})
	}
}
