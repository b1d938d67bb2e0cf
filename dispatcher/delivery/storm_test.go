package delivery

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/storetest"
	"github.com/posthorn/posthorn/dispatcher/redelivery"
)

// TestStorm has everything happen at once, at random, in virtual time, on the real
// store: receivers in every mood, destinations that are disabled, paused, changed,
// deleted and made again, Sources that are disconnected, success policies that go
// there and back, redeliveries, purges, restarts and cuts of the power at any
// operation of the file system. In any order, at the end
//
//   - every accepted message was accepted by its receivers, or is a dead letter, or
//     its owner discarded it,
//   - none was taken twice but for a cut, a redelivery or a change of the policy,
//   - an endpoint that never answers never had two requests at once,
//   - the ledgers add up, at every start and at the end.
//
// POSTHORN_CRASH_SEEDS sets how many seeds run, POSTHORN_CRASH_SEED which one is the first.
func TestStorm(t *testing.T) {
	first, seeds := setting("POSTHORN_CRASH_SEED", 1), setting("POSTHORN_CRASH_SEEDS", 6)
	for seed := first; seed < first+seeds; seed++ {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			bubble(t, func(t *testing.T) { newStorm(t, uint64(seed)).run() })
		})
	}
}

func setting(name string, normal int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return normal
}

// stormGrace is how long lanes that the config does not name are kept; lastAcks
// is how old an acknowledgement is that no cut can forget.
const (
	stormGrace = 3 * time.Minute
	lastAcks   = time.Second
)

// The destinations. A receiver is a destination's endpoint, "name/endpoint".
const (
	one   = "one"   // One URL, of web; it changes.
	two   = "two"   // Two URLs, any of which will do, of web and ios; a third one and the first one come and go.
	every = "every" // Each of its URLs must get all; a third one is added and removed.
	flip  = "flip"  // Two URLs; whether one will do changes.
	gone  = "gone"  // It, and its Sources, come and go.
	dead  = "dead"  // Never answers.
)

var stormNames = []string{one, two, every, flip, gone, dead}

// claim is a message that a receiver is to get: of "flip", "two" and "gone" any of their endpoints.
type claim struct{ receiver, id string }

// storm is what survives restarts and cuts.
type storm struct {
	*testing.T
	rnd  *rand.Rand // Of the main goroutine only.
	next int        // The last message.
	rev  int

	destinations map[string]*liveconfig.Destination // As they are to be configured; nil while deleted.
	unusable     bool                               // The namespace's config cannot be read.
	large        map[string]bool                    // While it is paused, its endpoints are not known.
	// left is when a Source was last disconnected from "gone"; zero while it is connected.
	left map[string]time.Time

	mu    sync.Mutex
	life  *stormLife
	luck  *rand.Rand
	mood  map[string]answer
	calm  bool
	owed  map[claim]time.Time // Since when.
	took  map[claim]int
	late  map[claim]time.Time // When it was taken last.
	again map[claim]int       // How often it may have been taken again.
	sent  map[string]bool     // All, also those of an interrupted append.
	known map[string]int64    // Messages that were accepted, by Source.
	spare int64               // Messages whose acceptance is unknown.
	cuts  int
}

// stormLife is a process, from its start to its end or to a cut.
type stormLife struct {
	*fakeClient
	s      *storm
	mem    *vfs.MemFS
	store  *pebblestore.Store
	engine *Engine
	stop   func()
	// redelivering are redeliveries in progress, until stopRedeliver is called.
	redelivering  sync.WaitGroup
	redeliverCtx  context.Context
	stopRedeliver func()
	// left counts operations down to the cut, if above 0; after is what the cut left.
	left  int
	after *vfs.MemFS
	rnd   *rand.Rand
}

func newStorm(t *testing.T, seed uint64) *storm {
	s := &storm{
		T: t, rnd: rand.New(rand.NewPCG(seed, 1)), luck: rand.New(rand.NewPCG(seed, 2)),
		destinations: map[string]*liveconfig.Destination{}, large: map[string]bool{}, left: map[string]time.Time{}, mood: map[string]answer{},
		owed: map[claim]time.Time{}, took: map[claim]int{}, late: map[claim]time.Time{}, again: map[claim]int{},
		sent: map[string]bool{}, known: map[string]int64{},
	}
	for _, name := range stormNames {
		d := dest(name, "http://"+name+"-0.test", "http://"+name+"-1.test")
		d.DeadLetters = liveconfig.DeadLetters{RetentionMS: (1000 * time.Hour).Milliseconds(), MaxBytes: 1 << 40}
		switch name {
		case one, dead:
			d.Endpoints = d.Endpoints[:1]
		case two, gone:
			d.Sources = []string{"ios", "web"}
		case every:
			d.Success = liveconfig.EveryEndpoint
		}
		s.destinations[name] = &d
	}
	return s
}

// weather is what receivers may answer.
var weather = []answer{
	{status: 200}, {status: 200, after: 5 * time.Millisecond}, {status: 204, after: 800 * time.Millisecond}, {status: 200, after: 4 * time.Second}, {status: 200, after: 6 * time.Second},
	{status: 500}, {status: 503, retryAfter: 20 * time.Second}, {status: 429, after: 50 * time.Millisecond}, {status: 429, retryAfter: 2 * time.Hour}, {reason: egress.ConnectionRefused},
	{reason: egress.TimedOut, after: time.Hour}, {status: 404}, {status: 302},
}

// answer is a receiver's; the client's lock is held.
func (s *storm) answer(r request) answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.url == "http://dead-0.test" {
		return []answer{{status: 500, after: time.Second}, {reason: egress.TimedOut, after: time.Hour}}[s.luck.IntN(2)]
	}
	if s.calm {
		return answer{status: 200, after: time.Millisecond}
	}
	a, ok := s.mood[r.url]
	if !ok || s.luck.IntN(40) == 0 {
		a = weather[s.luck.IntN(len(weather))]
		s.mood[r.url] = a
	}
	return a
}

// Post notes what a receiver took, unless the power went before it answered.
func (l *stormLife) Post(ctx context.Context, e *egress.Endpoint, headers []egress.Header, body []byte) egress.Result {
	l.mu.Lock()
	url := l.urls[e]
	l.mu.Unlock()
	r := l.fakeClient.Post(ctx, e, headers, body)
	s := l.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.after != nil {
		return egress.Result{Reason: egress.ConnectionRefused}
	}
	if r.Reason == "" {
		c := claim{receiverOf(url), string(body)}
		if !s.sent[c.id] {
			s.Errorf("%s got %s, which was never sent", c.receiver, c.id)
		}
		s.took[c]++
		s.late[c] = time.Now()
	}
	return r
}

// receiverOf is "name/endpoint" of a URL; a URL that replaced another is the same receiver.
func receiverOf(url string) string {
	var name, number string
	for _, n := range stormNames {
		if rest, ok := cutPrefix(url, "http://"+n+"-"); ok {
			name, number = n, rest[:1]
		}
	}
	return name + "/e" + number
}

func cutPrefix(s, prefix string) (string, bool) {
	if len(s) < len(prefix) || s[:len(prefix)] != prefix {
		return s, false
	}
	return s[len(prefix):], true
}

// operation counts down to the cut. Messages accepted or delivered after it do not count.
func (l *stormLife) operation() {
	s := l.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.left > 0 {
		if l.left--; l.left == 0 {
			l.cut()
		}
	}
}

// cut takes the power. The storm's lock is held.
func (l *stormLife) cut() {
	s := l.s
	l.after = l.mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: l.rnd.IntN(101), RNG: l.rnd})
	s.cuts++
	for c, at := range s.late {
		if time.Since(at) < lastAcks {
			s.again[c]++
		}
	}
}

func (s *storm) dead() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.life.after != nil
}

// start begins a life on what the one before left.
func (s *storm) start(mem *vfs.MemFS, cut int) {
	l := &stormLife{fakeClient: newFakeClient(s.answer), s: s, mem: mem, left: cut, rnd: rand.New(rand.NewPCG(s.rnd.Uint64(), 0))}
	s.mu.Lock()
	s.life = l
	s.mu.Unlock()
	var err error
	l.store, err = pebblestore.Open("data", pebblestore.Options{
		FS: storetest.Watch(mem, l.operation, nil), Logger: slog.New(slog.DiscardHandler), DuplicateWindow: 10 * time.Minute,
		MemTableBytes: 256 << 10, CacheBytes: 1 << 20, Now: time.Now,
	})
	if err != nil {
		s.Fatalf("it does not start: %v", err)
	}
	s.balance()
	l.engine = New(Options{Store: l.store, Client: l, Logger: slog.New(slog.DiscardHandler), MaxInFlight: 50, DrainTimeout: 10 * time.Second, OrphanGrace: stormGrace})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = l.engine.Run(ctx)
	}()
	l.redeliverCtx, l.stopRedeliver = context.WithCancel(context.Background())
	l.stop = func() {
		l.stopRedeliver()
		l.redelivering.Wait()
		cancel()
		<-done
		if e := l.engine; e.inFlight != 0 || e.unproven != 0 || e.leased != 0 || e.workers != 0 {
			s.Errorf("at the end of a life: %d in flight, %d unproven, %d leased, %d workers", e.inFlight, e.unproven, e.leased, e.workers)
		}
		if most := l.most["http://dead-0.test"]; most > 1 {
			s.Errorf("%d requests at once to the one that never answers", most)
		}
		if err := l.store.Close(); err != nil {
			s.Errorf("close: %v", err)
		}
	}
	s.apply()
}

// restart ends a life and begins the next one.
func (s *storm) restart() {
	l := s.life
	l.stop()
	s.mu.Lock()
	mem := l.mem
	if l.after != nil {
		mem = l.after
	}
	s.mu.Unlock()
	cut := 0
	if s.rnd.IntN(2) == 0 {
		cut = 1 + s.rnd.IntN(1<<s.rnd.IntN(12)) // Often while it starts.
	}
	s.start(mem, cut)
}

// apply puts the destinations into effect, as they are to be.
func (s *storm) apply() {
	s.rev++
	v := liveconfig.NewView(nil, "ns")
	if !s.unusable {
		var all []liveconfig.Destination
		for _, name := range stormNames {
			if d := s.destinations[name]; d != nil {
				all = append(all, *d)
				if d.State == liveconfig.Paused && s.large[name] {
					all[len(all)-1].Endpoints = nil
				}
			}
		}
		v = (&world{rev: s.rev}).view(all...)
	}
	if err := s.life.engine.Apply(v); err != nil {
		s.Errorf("Apply: %v", err)
	}
	if s.unusable {
		return
	}
	// A destination that was removed for longer than the grace period has lost its messages.
	connected := s.destinations[gone]
	for _, source := range []string{"web", "ios"} {
		here, at := connected != nil && slices.Contains(connected.Sources, source), s.left[source]
		switch {
		case !here && at.IsZero():
			s.left[source] = time.Now()
		case here && !at.IsZero():
			if time.Since(at) >= stormGrace-time.Second {
				s.forgive(func(c claim) bool { return c.receiver == gone && s.sourceOf(c.id) == source })
			}
			delete(s.left, source)
		}
	}
}

// sourceOf is the Source of a message, by its id.
func (s *storm) sourceOf(id string) string { return id[:3] }

// forgive forgets what is owed.
func (s *storm) forgive(which func(claim) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.owed, func(c claim, _ time.Time) bool { return which(c) })
}

// send appends messages of a Source; "one" filters some out.
func (s *storm) send(source string, n int) {
	var msgs []queue.Message
	s.mu.Lock()
	for range n {
		s.next++
		id := fmt.Sprint(source, "-", s.next)
		s.sent[id] = true
		m := queue.Message{Source: "ns/" + source, ID: id, Type: "track", AcceptedAt: time.Now(), Body: []byte(id)}
		if s.next%7 == 0 {
			m.Skip = []string{"ns/" + one}
		}
		msgs = append(msgs, m)
	}
	s.mu.Unlock()
	if n == 0 {
		return
	}
	_, err := s.life.store.Append(context.Background(), msgs)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.life.after != nil {
		s.spare += int64(n)
		return
	}
	if err != nil {
		s.Errorf("Append: %v", err)
	}
	s.known["ns/"+source] += int64(n)
	for _, m := range msgs {
		for name, d := range s.destinations {
			switch {
			case d == nil || !slices.Contains(d.Sources, source) || slices.Contains(m.Skip, "ns/"+name) || name == dead:
			case name == every:
				s.owed[claim{"every/e0", m.ID}] = time.Now()
				s.owed[claim{"every/e1", m.ID}] = time.Now()
			default:
				s.owed[claim{name, m.ID}] = time.Now()
			}
		}
	}
}

// letters lists the dead letters of a destination.
func (s *storm) letters(name string) (all []queue.DeadLetter) {
	if err := s.life.store.DeadLetters(context.Background(), "ns/"+name, "", func(d queue.DeadLetter) bool {
		d.Body = nil
		all = append(all, d)
		return true
	}); err != nil && !s.dead() {
		s.Errorf("the dead letters of %s: %v", name, err)
	}
	return all
}

// redeliver redelivers or purges some dead letters, while everything else continues.
func (s *storm) redeliver() {
	name := stormNames[s.rnd.IntN(len(stormNames))]
	var selector redelivery.Selector
	letters := s.letters(name)
	for _, d := range letters {
		if s.rnd.IntN(2) == 0 {
			selector.Keys = append(selector.Keys, d.Key)
		}
	}
	if len(selector.Keys) == 0 {
		return
	}
	chosen := map[string]bool{}
	s.mu.Lock()
	for _, d := range letters {
		if slices.Contains(selector.Keys, d.Key) {
			chosen[d.ID] = true
			for i := range 3 {
				s.again[claim{fmt.Sprintf("%s/e%d", name, i), d.ID}]++
			}
		}
	}
	s.mu.Unlock()
	l, patience, purge := s.life, time.Duration(s.rnd.IntN(1<<s.rnd.IntN(16)))*time.Millisecond, s.rnd.IntN(5) == 0
	if purge {
		s.forgive(func(c claim) bool {
			owner, _ := split(c.receiver)
			return (owner == name || c.receiver == name) && chosen[c.id]
		})
	} else {
		s.spare += int64(len(selector.Keys)) // Some may be appended in vain.
	}
	l.redelivering.Go(func() {
		ctx, cancel := context.WithTimeout(l.redeliverCtx, patience)
		defer cancel()
		if purge {
			_, _ = redelivery.Purge(ctx, l.store, "ns/"+name, selector, redelivery.Options{})
		} else {
			_, _ = redelivery.Run(ctx, l.store, "ns/"+name, selector, redelivery.Options{Rate: 20, Takes: l.engine.Takes})
		}
	})
}

// change changes a destination at random.
func (s *storm) change() {
	name := stormNames[s.rnd.IntN(len(stormNames))]
	d := s.destinations[name]
	if d == nil {
		again := dest(gone, "http://gone-0.test", "http://gone-1.test")
		again.Sources = []string{"ios", "web"}
		again.DeadLetters = s.destinations[one].DeadLetters
		s.destinations[gone] = &again
		return
	}
	switch n := s.rnd.IntN(8); {
	case n == 0:
		d.State = liveconfig.Disabled
	case n == 1:
		d.State, s.large[name] = liveconfig.Paused, s.rnd.IntN(2) == 0
	case n <= 3:
		d.State = liveconfig.Active
	case n == 4:
		d.Delivery.MaxInFlight = 1 + s.rnd.IntN(20)
	case n == 5:
		d.Delivery.RequestsPerSecond = s.rnd.IntN(3) * (1 + s.rnd.IntN(100))
	case n == 6:
		d.Delivery.RetryWindowMS = int64(5+s.rnd.IntN(60)) * time.Minute.Milliseconds()
	case name == one:
		d.Endpoints = slices.Clone(d.Endpoints)
		d.Endpoints[0].URL = liveconfig.NewSecret(fmt.Sprintf("http://one-0.test/%d", s.rnd.IntN(3)))
	case name == every:
		third := liveconfig.Endpoint{Name: "e2", URL: liveconfig.NewSecret("http://every-2.test")}
		if d.Endpoints = d.Endpoints[:2:2]; s.rnd.IntN(2) == 0 {
			d.Endpoints = append(d.Endpoints, third)
		}
	case name == two:
		all := []liveconfig.Endpoint{}
		for i := range 3 {
			all = append(all, liveconfig.Endpoint{Name: fmt.Sprint("e", i), URL: liveconfig.NewSecret(fmt.Sprintf("http://two-%d.test", i))})
		}
		d.Endpoints = [][]liveconfig.Endpoint{all[:2], all, all[1:], all[1:2]}[s.rnd.IntN(4)]
	case name == flip:
		d.Success = map[string]string{liveconfig.AnyEndpoint: liveconfig.EveryEndpoint, liveconfig.EveryEndpoint: liveconfig.AnyEndpoint}[d.Success]
	case name == gone && s.rnd.IntN(2) == 0:
		s.destinations[gone] = nil
	case name == gone:
		d.Sources = [][]string{{"ios", "web"}, {"web"}, {"ios"}}[s.rnd.IntN(3)]
	}
}

// balance checks all ledgers.
func (s *storm) balance() {
	s.Helper()
	for _, name := range stormNames {
		if err := s.life.store.DestinationStats("ns/" + name).Ledger.Balance(); err != nil {
			s.Errorf("%s: %v", name, err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, source := range []string{"ns/web", "ns/ios"} {
		stats := s.life.store.SourceStats(source)
		if err := stats.Ledger.Balance(); err != nil {
			s.Errorf("%s: %v", source, err)
		}
		if stats.Accepted < s.known[source] || stats.Accepted > s.known[source]+s.spare {
			s.Errorf("%s: %d accepted, want %d and up to %d more", source, stats.Accepted, s.known[source], s.spare)
		}
	}
}

func (s *storm) run() {
	s.start(vfs.NewCrashableMem(), 0)
	for range 120 {
		switch n := s.rnd.IntN(20); {
		case n < 8:
			s.send("web", s.rnd.IntN(40))
			s.send("ios", s.rnd.IntN(40))
		case n < 12:
			s.change()
			s.apply()
		case n < 13:
			s.redeliver()
		case n < 14:
			s.balance()
		case n < 15:
			s.unusable = s.rnd.IntN(3) == 0
			s.restart()
			if s.unusable {
				time.Sleep(time.Duration(s.rnd.IntN(300)) * time.Second)
				s.unusable = false
				s.apply()
			}
		default:
			time.Sleep(time.Duration(s.rnd.IntN(1<<s.rnd.IntN(18))) * time.Millisecond)
		}
		if s.dead() {
			s.restart()
		}
	}
	s.conclude()
}

// conclude lets all be well and checks the end.
func (s *storm) conclude() {
	s.mu.Lock()
	s.calm = true
	s.life.left = 0
	s.mu.Unlock()
	if s.dead() {
		s.life.stop()
		s.start(s.life.after, 0)
	}
	if s.destinations[gone] == nil {
		s.forgive(func(c claim) bool { return c.receiver == gone })
	} else {
		for source := range s.left {
			s.forgive(func(c claim) bool { return c.receiver == gone && s.sourceOf(c.id) == source })
		}
	}
	for _, d := range s.destinations {
		if d != nil {
			d.State = liveconfig.Active
		}
	}
	s.apply()
	s.life.stopRedeliver()
	time.Sleep(5 * time.Hour)
	synctest.Wait()
	s.balance()
	for _, source := range []string{"ns/web", "ns/ios"} {
		if n := s.life.store.SourceStats(source).LogBytes; n != 0 {
			s.Errorf("%s: %d bytes of the log are still kept", source, n)
		}
	}
	dead := map[claim]bool{}
	for _, name := range stormNames {
		ledger := s.life.store.DestinationStats("ns/" + name).Ledger
		if ledger.Pending != 0 || ledger.Discarded != 0 && name != gone && name != every {
			s.Errorf("%s: %+v", name, ledger)
		}
		for _, d := range s.letters(name) {
			dead[claim{name, d.ID}] = true
			dead[claim{name + "/" + d.Lane.Endpoint, d.ID}] = true
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.owed {
		n := s.took[c]
		for i := range 3 {
			n += s.took[claim{fmt.Sprintf("%s/e%d", c.receiver, i), c.id}]
		}
		if n == 0 && !dead[c] {
			s.Errorf("%s never got %s, and it is no dead letter", c.receiver, c.id)
		}
	}
	for c, n := range s.took {
		if name, _ := split(c.receiver); name != flip && n > 1+s.again[c] {
			s.Errorf("%s took %s %d times; it may have been %d", c.receiver, c.id, n, 1+s.again[c])
		}
	}
	s.Logf("%d messages, %d owed, %d taken, %d dead letters, %d cuts", s.next, len(s.owed), len(s.took), len(dead)/2, s.cuts)
	s.mu.Unlock()
	s.life.stop()
	s.mu.Lock()
}
