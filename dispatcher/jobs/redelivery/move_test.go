package redelivery_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/check"
)

// everything selects all namespaces.
func everything(string) bool { return true }

func openFiles(t *testing.T, fs vfs.FS) *pebblestore.Store {
	t.Helper()
	s, err := pebblestore.Open("queue", pebblestore.Options{FS: fs, DuplicateWindow: time.Minute, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func openLanes(t *testing.T, s *pebblestore.Store, lanes ...queue.LaneID) {
	t.Helper()
	for _, l := range lanes {
		check.NoError(t, "open a lane", s.OpenLane(l))
	}
}

func appendTo(t *testing.T, s *pebblestore.Store, messages ...queue.Message) {
	t.Helper()
	_, err := s.Append(t.Context(), messages)
	check.NoError(t, "append messages", err)
}

// drain delivers all pending messages of lanes, and returns the ids of each lane, sorted, and of each first delivery.
func drain(t *testing.T, s *pebblestore.Store, lanes []queue.LaneID) (of map[queue.LaneID][]string, first map[queue.LaneID][]string) {
	t.Helper()
	of, first = map[queue.LaneID][]string{}, map[queue.LaneID][]string{}
	for _, l := range lanes {
		check.NoError(t, "open a lane", s.OpenLane(l))
		for {
			d, ok, err := s.LeaseOldest(l)
			check.NoError(t, "lease a message", err)
			if !ok {
				break
			}
			if string(d.Body) != `{"id":"`+d.ID+`"}` {
				t.Errorf("body of message %s: got %s", d.ID, d.Body)
			}
			of[l] = append(of[l], d.ID)
			if s.Ack(d) {
				first[l.Group()] = append(first[l.Group()], d.ID)
			}
		}
		if got := s.LaneStats(l).Ledger; got.Pending != 0 || got.Balance() != nil {
			t.Errorf("ledger of lane %v after the deliveries: got %+v", l, got)
		}
	}
	for _, m := range []map[queue.LaneID][]string{of, first} {
		for l := range m {
			slices.Sort(m[l])
		}
	}
	return of, first
}

// missing returns the ids of a list that another one lacks.
func missing(ids, in []string) []string {
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return slices.Contains(in, id) })
}

func lettersOf(t *testing.T, s *pebblestore.Store, destinations ...string) (ids []string) {
	t.Helper()
	for _, destination := range destinations {
		check.NoError(t, "read dead letters", s.DeadLetters(t.Context(), destination, "", func(d queue.DeadLetter) bool {
			ids = append(ids, fmt.Sprintf("%s of %v after %d: %s %s", d.ID, d.Lane, d.Attempts, d.Failure.Reason, d.Body))
			return true
		}))
		if got, want := s.DestinationStats(destination).DeadLetters, int64(len(ids)); got != want && len(destinations) == 1 {
			t.Errorf("number of dead letters of %s: got %d, want %d", destination, got, want)
		}
	}
	slices.Sort(ids)
	return ids
}

// Random operations on an origin; the target then delivers what the origin would have delivered.
func TestMoveOfRandomStores(t *testing.T) {
	t.Parallel()
	const groups = "shop/any"
	lanes := []queue.LaneID{
		lane, {Source: src, Destination: "shop/all", Endpoint: "a"}, {Source: src, Destination: "shop/all", Endpoint: "b"},
		{Source: src, Destination: groups, Endpoint: "a", Any: true}, {Source: src, Destination: groups, Endpoint: "b", Any: true}, {Source: src, Destination: groups, Endpoint: "c", Any: true},
		{Source: "shop/app", Destination: dest},
	}
	destinations := []string{dest, "shop/all", groups}
	seeds := uint64(20)
	if testing.Short() {
		seeds = 3
	}
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			fs := vfs.NewCrashableMem()
			from := openFiles(t, fs)
			openLanes(t, from, lanes...)
			messages := 0
			for i := range 400 {
				if gap := i == 200 && seed%2 == 0; gap || i == 210 { // The group gets no messages meanwhile.
					end := queue.Active
					if gap {
						end = queue.Ended
					}
					for _, l := range lanes[3:6] {
						check.NoError(t, "end or continue a lane", from.EndLane(l, end))
					}
				}
				switch l := lanes[rng.IntN(len(lanes))]; rng.IntN(3) {
				case 0:
					m := queue.Message{Source: l.Source, ID: fmt.Sprint("m", messages), Type: []string{"track", "identify", "delete"}[rng.IntN(3)], AcceptedAt: time.Now(), Body: fmt.Appendf(nil, `{"id":"m%d"}`, messages)}
					switch rng.IntN(6) {
					case 0:
						m.Skip = []string{dest}
					case 1:
						m.Only = "shop/all/b"
					case 2:
						m.Only = groups + "/b"
					}
					appendTo(t, from, m)
					messages++
				default:
					batch, err := from.Lease(l, 1+rng.IntN(3), nil)
					check.NoError(t, "lease messages", err)
					for _, d := range batch {
						failure := queue.Failure{Time: time.Now(), Reason: "Rejected", StatusCode: 400}
						switch rng.IntN(4) {
						case 0:
							from.Ack(d)
						case 1:
							from.Release(d)
						case 2:
							from.Retry(d, time.Now().Add(time.Duration(rng.IntN(3))*time.Hour), failure)
						default:
							_, err := from.Bury(d, failure)
							check.NoError(t, "bury a message", err)
						}
					}
				}
			}
			if rng.IntN(2) == 0 {
				check.NoError(t, "end a lane", from.EndLane(lanes[rng.IntN(len(lanes))], []queue.End{queue.Ended, queue.EndpointRemoved}[rng.IntN(2)]))
			}
			check.NoError(t, "make the origin durable", from.DeleteDeadLetters(t.Context(), dest))
			check.NoError(t, "close the origin", from.Close())
			same := openFiles(t, fs.CrashClone(vfs.CrashCloneCfg{}))
			wantLetters := lettersOf(t, same, destinations...)
			want, wantFirst := drain(t, same, lanes)

			from, to := openFiles(t, fs), openFiles(t, vfs.NewMem())
			if rng.IntN(2) == 0 { // The target has messages and dead letters of its own.
				openLanes(t, to, lanes...)
				appendTo(t, to, queue.Message{Source: src, ID: "own", Type: "track", AcceptedAt: time.Now(), Body: []byte(`{"id":"own"}`)})
				drain(t, to, lanes)
			}
			moved, err := redelivery.Move(t.Context(), from, to, "log", everything)
			check.NoError(t, "move", err)
			if got := int(moved.DeadLetters); got != len(wantLetters) {
				t.Errorf("moved dead letters: got %d, want %d", got, len(wantLetters))
			}
			check.Same(t, "dead letters of the target", lettersOf(t, to, destinations...), wantLetters)
			got, gotFirst := drain(t, to, lanes)
			for _, l := range lanes {
				group, want := l.Group(), want[l]
				if l.Any { // A message that another lane has delivered has no further attempts.
					want = missing(want, missing(want, wantFirst[group]))
				}
				for _, id := range missing(got[l], want) {
					// All lanes of a group get a message that none has delivered.
					if !l.Any || !slices.Contains(wantFirst[group], id) {
						t.Errorf("message %s: lane %v of the target has it, that of the origin did not", id, l)
					}
				}
				if lost := slices.Concat(missing(want, got[l]), missing(wantFirst[group], gotFirst[group])); len(lost) > 0 {
					t.Errorf("lane %v of the target lacks the messages %v", l, lost)
				}
				if len(slices.Compact(slices.Clone(got[l]))) != len(got[l]) {
					t.Errorf("deliveries of lane %v of the target: got %v, want each message once", l, got[l])
				}
			}
			check.Same(t, "messages that the target delivers for the first time", gotFirst[lanes[3].Group()], wantFirst[lanes[3].Group()])
			for _, l := range lanes {
				if of := from.LaneStats(l); of != (queue.LaneStats{}) {
					t.Errorf("lane %v of the origin: got %+v, want none", l, of)
				}
			}
			if got := from.SourceStats(src).Ledger; got.Pending != 0 || got.Balance() != nil {
				t.Errorf("ledger of the origin: got %+v, want nothing pending", got)
			}
			if got := lettersOf(t, from, destinations...); len(got) > 0 {
				t.Errorf("dead letters of the origin: got %v, want none", got)
			}
			if moved, err := redelivery.Move(t.Context(), from, to, "log", everything); err != nil || moved != (redelivery.Moved{}) {
				t.Errorf("second move: got %+v and %v, want nothing", moved, err)
			}
		})
	}
}

// failing is a target whose calls fail from a number on.
type failing struct {
	redelivery.Target
	left int
}

var errFails = errors.New("the target fails")

func (f *failing) next() error {
	if f.left--; f.left < 0 {
		return errFails
	}
	return nil
}

func (f *failing) Append(ctx context.Context, messages []queue.Message) ([]bool, error) {
	if err := f.next(); err != nil {
		return nil, err
	}
	return f.Target.Append(ctx, messages)
}

func (f *failing) AddDeadLetters(destination string, letters []queue.DeadLetter) error {
	if err := f.next(); err != nil {
		return err
	}
	return f.Target.AddDeadLetters(destination, letters)
}

// A move that fails is continued, with each page once. A crash repeats at most one page.
func TestMoveIsContinued(t *testing.T) {
	t.Parallel()
	for _, crash := range []bool{false, true} {
		fs := vfs.NewCrashableMem()
		from, to := openFiles(t, fs), openFiles(t, vfs.NewMem())
		openLanes(t, from, lane, other)
		const messages, letters = 1000, 600
		for i := range messages + letters {
			appendTo(t, from, queue.Message{Source: src, ID: fmt.Sprint("m", i), Type: "track", AcceptedAt: time.Now(), Body: fmt.Appendf(nil, `{"id":"m%d"}`, i)})
		}
		batch, err := from.Lease(other, letters, nil)
		check.NoError(t, "lease messages", err)
		for _, d := range batch {
			_, err := from.Bury(d, queue.Failure{Time: time.Now(), Reason: "Rejected"})
			check.NoError(t, "bury a message", err)
		}
		for calls := 0; ; calls++ {
			_, err := redelivery.Move(t.Context(), from, &failing{to, 1}, "log", everything)
			if err == nil {
				if calls < 8 {
					t.Errorf("calls of a move whose target fails after each page: got %d, want more", calls)
				}
				break
			}
			if !errors.Is(err, errFails) {
				t.Fatalf("move: got error %v, want %v", err, errFails)
			}
			if calls < 9 {
				if err := redelivery.CheckMoved(from); !errors.Is(err, redelivery.ErrMoving) {
					t.Errorf("check of a store that was moved in part: got error %v, want %v", err, redelivery.ErrMoving)
				}
				if _, err := redelivery.Move(t.Context(), from, to, "another log", everything); err == nil || !strings.Contains(err.Error(), "use that one") {
					t.Fatalf("move to another log: got error %v, want one about the first", err)
				}
			}
			if crash { // Of the last page, only the target has everything.
				fs = fs.CrashClone(vfs.CrashCloneCfg{})
				from = openFiles(t, fs)
			}
		}
		check.NoError(t, "check of a store that was moved", redelivery.CheckMoved(from))
		got, _ := drain(t, to, []queue.LaneID{lane, other})
		check.Equal(t, "messages of a lane", len(got[lane]), messages+letters)
		check.Equal(t, "messages of a lane with dead letters", len(got[other]), messages)
		check.Equal(t, "dead letters", len(lettersOf(t, to, other.Destination)), letters)
	}
}

// A move to a full target waits, and fails when ctx ends.
func TestMoveToAFullStore(t *testing.T) {
	t.Parallel()
	from, to := openFiles(t, vfs.NewMem()), openFiles(t, vfs.NewMem())
	openLanes(t, from, lane)
	appendTo(t, from, queue.Message{Source: src, ID: "m", AcceptedAt: time.Now(), Body: []byte(`{"id":"m"}`)})
	full := &fullOnce{Target: to}
	_, err := redelivery.Move(t.Context(), from, full, "log", everything)
	check.NoError(t, "move to a store that was full", err)
	check.Equal(t, "tries", full.calls, 2)
	got, _ := drain(t, to, []queue.LaneID{lane})
	check.Same(t, "moved messages", got[lane], []string{"m"})
}

type fullOnce struct {
	redelivery.Target
	calls int
}

func (f *fullOnce) Append(ctx context.Context, messages []queue.Message) ([]bool, error) {
	if f.calls++; f.calls == 1 {
		return nil, queue.ErrOverQuota
	}
	return f.Target.Append(ctx, messages)
}

// Only the selected namespaces are moved. An ended lane of the target gets the messages that the origin has for it.
func TestMoveOfANamespace(t *testing.T) {
	t.Parallel()
	from, to := openFiles(t, vfs.NewMem()), openFiles(t, vfs.NewMem())
	stays := queue.LaneID{Source: "other/web", Destination: "other/crm"}
	openLanes(t, from, lane, stays)
	openLanes(t, to, lane)
	check.NoError(t, "end a lane", to.EndLane(lane, queue.Ended))
	for _, source := range []string{src, stays.Source} {
		appendTo(t, from, queue.Message{Source: source, ID: source, AcceptedAt: time.Now(), Body: []byte(`{"id":"` + source + `"}`)})
	}
	moved, err := redelivery.Move(t.Context(), from, to, "log", func(namespace string) bool { return namespace == "shop" })
	check.NoError(t, "move", err)
	check.Equal(t, "moved messages", moved.Messages, 1)
	got, _ := drain(t, to, []queue.LaneID{lane})
	check.Same(t, "messages of the target", got[lane], []string{src})
	got, _ = drain(t, from, []queue.LaneID{stays})
	check.Same(t, "messages that remain", got[stays], []string{stays.Source})
}

// An ended lane of the target with messages gets no others, because it would also get those that were accepted since
// its end. Nothing is moved, and the origin keeps the message.
func TestMoveToAnEndedLaneWithMessages(t *testing.T) {
	t.Parallel()
	from, to := openFiles(t, vfs.NewMem()), openFiles(t, vfs.NewMem())
	for _, s := range []*pebblestore.Store{from, to} {
		openLanes(t, s, lane)
		appendTo(t, s, queue.Message{Source: src, ID: "m", AcceptedAt: time.Now(), Body: []byte(`{"id":"m"}`)})
	}
	check.NoError(t, "end a lane", to.EndLane(lane, queue.Ended))
	if _, err := redelivery.Move(t.Context(), from, to, "log", everything); err == nil || !strings.Contains(err.Error(), "shop/crm gets no calls of this Source any more") {
		t.Errorf("move: got error %v, want one about the ended lane", err)
	}
	got, _ := drain(t, from, []queue.LaneID{lane})
	check.Same(t, "messages of the origin", got[lane], []string{"m"})
}

// Damaged messages become dead letters of the target, as they would in the origin.
func TestMoveOfDamagedMessages(t *testing.T) {
	t.Parallel()
	fs := vfs.NewMem()
	from, to := openFiles(t, fs), openFiles(t, vfs.NewMem())
	openLanes(t, from, lane)
	for i := range 3 {
		appendTo(t, from, queue.Message{Source: src, ID: fmt.Sprint("m", i), Type: "track", AcceptedAt: time.Now(), Body: fmt.Appendf(nil, `{"id":"m%d"}`, i)})
	}
	moved, err := redelivery.Move(t.Context(), damagedOrigin{from}, to, "log", everything)
	check.NoError(t, "move", err)
	check.Equal(t, "moved messages and dead letters", moved, redelivery.Moved{Messages: 2, DeadLetters: 1})
	got, _ := drain(t, to, []queue.LaneID{lane})
	check.Same(t, "messages", got[lane], []string{"m0", "m2"})
	check.NoError(t, "read dead letters", to.DeadLetters(t.Context(), dest, "", func(d queue.DeadLetter) bool {
		if d.Failure.Reason != queue.ReasonDamaged || d.Seq != 2 || d.Lane != lane || !strings.Contains(d.Failure.Message, "message 2 of shop/web cannot be read: torn") {
			t.Errorf("dead letter of the damaged message: got %+v", d)
		}
		return true
	}))
	check.Equal(t, "dead letters", to.DestinationStats(dest).DeadLetters, 1)
}

// damagedOrigin is a store whose second message is damaged.
type damagedOrigin struct{ *pebblestore.Store }

func (o damagedOrigin) Pending(ctx context.Context, source string, after uint64, fn func(uint64, queue.Message, []queue.LaneID) bool) error {
	return o.Store.Pending(ctx, source, after, func(seq uint64, m queue.Message, to []queue.LaneID) bool {
		if seq == 2 {
			m = queue.Message{Source: source, Body: []byte("torn")}
		}
		return fn(seq, m, to)
	})
}

// Two dead letters of two stores with the same destination, time and position are both kept; the same one is stored once.
func TestAddDeadLetters(t *testing.T) {
	t.Parallel()
	s := openFiles(t, vfs.NewMem())
	at := time.Now()
	letter := func(id string) queue.DeadLetter {
		return queue.DeadLetter{Lane: lane, Seq: 7, ID: id, Type: "track", Body: []byte("{}"), AcceptedAt: at, Attempts: 3, Failure: queue.Failure{Time: at, Reason: "Rejected"}}
	}
	for range 2 {
		check.NoError(t, "add dead letters", s.AddDeadLetters(dest, []queue.DeadLetter{letter("a"), letter("b"), letter("a")}))
	}
	check.NoError(t, "add a dead letter", s.AddDeadLetters(dest, []queue.DeadLetter{letter("b")}))
	if got := lettersOf(t, s, dest); len(got) != 2 || !strings.HasPrefix(got[0], "a of") || !strings.HasPrefix(got[1], "b of") {
		t.Errorf("dead letters: got %q, want a and b", got)
	}
}
