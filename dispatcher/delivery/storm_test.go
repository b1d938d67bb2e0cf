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

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/admission/admissiontest"
	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/storetest"
)

// TestStorm runs random operations in virtual time on the real store: receivers with random
// results, destinations that are disabled, paused, changed, deleted and created again, Sources
// that are disconnected, changed success policies, redeliveries, purges, restarts and power
// losses at any operation of the file system. At the end
//
//   - every accepted message was delivered to its receivers, or is a dead letter, or was
//     discarded by its owner,
//   - no message was delivered twice, except because of a power loss, a redelivery or a change
//     of the policy,
//   - an endpoint that never responds never had two concurrent requests,
//   - the ledgers balance, at every start and at the end.
//
// POSTHORN_CRASH_SEEDS sets the number of seeds, POSTHORN_CRASH_SEED the first one.
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

// stormGrace is the time for which lanes that are missing in the config are kept. lastAcks is
// the age of an acknowledgement that no power loss can undo.
const (
	stormGrace = 3 * time.Minute
	lastAcks   = time.Second
)

// The destinations. A receiver is an endpoint of a destination, "name/endpoint".
const (
	one   = "one"   // One URL, of web; the URL changes.
	two   = "two"   // Any of two URLs, of web and ios; a third one and the first one are added and removed.
	every = "every" // Every URL gets all messages; a third one is added and removed.
	flip  = "flip"  // Two URLs; the success policy changes.
	temp  = "temp"  // The destination and its Sources are removed and restored.
	dead  = "dead"  // Never responds.
)

var stormNames = []string{one, two, every, flip, temp, dead}

// claim is a message and its receiver. For "flip", "two" and "temp" the receiver is the
// destination: any of its endpoints.
type claim struct{ receiver, id string }

// storm is the state across restarts and power losses.
type storm struct {
	*testing.T
	rnd  *rand.Rand // Used by the main goroutine only.
	next int        // The last message.
	rev  int

	destinations map[string]*liveconfig.Destination // The configured destinations; nil while deleted.
	unusable     bool                               // The namespace's config cannot be read.
	large        map[string]bool                    // Its endpoints are unknown while it is paused.
	// disconnectedAt is when a Source was last disconnected from "temp"; zero while it is
	// connected.
	disconnectedAt map[string]time.Time

	mu           sync.Mutex
	process      *stormProcess
	resultRnd    *rand.Rand
	result       map[string]answer
	healthy      bool
	expected     map[claim]time.Time // Messages to deliver, with the time of their acceptance.
	deliveries   map[claim]int
	lastDelivery map[claim]time.Time // The time of the last delivery.
	repeats      map[claim]int       // The number of allowed repeated deliveries.
	sent         map[string]bool     // All messages, also of an interrupted append.
	accepted     map[string]int64    // Accepted messages by Source.
	uncertain    int64               // Messages with an unknown acceptance.
	cuts         int
}

// stormProcess is a process from its start to its end or to a power loss.
type stormProcess struct {
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
	// untilCut counts the operations until the power loss, if above 0; survivors are the files
	// after it.
	untilCut  int
	survivors *vfs.MemFS
	rnd       *rand.Rand
}

func newStorm(t *testing.T, seed uint64) *storm {
	s := &storm{
		T: t, rnd: rand.New(rand.NewPCG(seed, 1)), resultRnd: rand.New(rand.NewPCG(seed, 2)),
		destinations: map[string]*liveconfig.Destination{}, large: map[string]bool{}, disconnectedAt: map[string]time.Time{},
		result:   map[string]answer{},
		expected: map[claim]time.Time{}, deliveries: map[claim]int{}, lastDelivery: map[claim]time.Time{}, repeats: map[claim]int{},
		sent: map[string]bool{}, accepted: map[string]int64{},
	}
	for _, name := range stormNames {
		d := dest(name, "http://"+name+"-0.test", "http://"+name+"-1.test")
		d.DeadLetters = liveconfig.DeadLetters{RetentionMS: (1000 * time.Hour).Milliseconds(), MaxBytes: 1 << 40}
		switch name {
		case one, dead:
			d.Endpoints = d.Endpoints[:1]
		case two, temp:
			d.Sources = []string{"ios", "web"}
		case every:
			d.Success = liveconfig.EveryEndpoint
		}
		s.destinations[name] = &d
	}
	return s
}

// results are the possible results of receivers.
var results = []answer{
	{status: 200}, {status: 200, after: 5 * time.Millisecond}, {status: 204, after: 800 * time.Millisecond},
	{status: 200, after: 4 * time.Second}, {status: 200, after: 6 * time.Second},
	{status: 500}, {status: 503, retryAfter: 20 * time.Second}, {status: 429, after: 50 * time.Millisecond},
	{status: 429, retryAfter: 2 * time.Hour}, {reason: egress.ConnectionRefused},
	{reason: egress.TimedOut, after: time.Hour}, {status: 404}, {status: 302},
}

// answer returns a receiver's result; the client's lock is held.
func (s *storm) answer(r request) answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.url == "http://dead-0.test" {
		return []answer{{status: 500, after: time.Second}, {reason: egress.TimedOut, after: time.Hour}}[s.resultRnd.IntN(2)]
	}
	if s.healthy {
		return answer{status: 200, after: time.Millisecond}
	}
	a, ok := s.result[r.url]
	if !ok || s.resultRnd.IntN(40) == 0 {
		a = results[s.resultRnd.IntN(len(results))]
		s.result[r.url] = a
	}
	return a
}

// Post records the messages that a receiver accepted before a power loss.
func (l *stormProcess) Post(ctx context.Context, e *egress.Endpoint, headers []egress.Header, body []byte) egress.Result {
	l.mu.Lock()
	url := l.urls[e]
	l.mu.Unlock()
	r := l.fakeClient.Post(ctx, e, headers, body)
	s := l.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.survivors != nil {
		return egress.Result{Reason: egress.ConnectionRefused}
	}
	if r.Reason == "" {
		c := claim{receiverOf(url), string(body)}
		if !s.sent[c.id] {
			s.Errorf("%s got %s, which was not sent", c.receiver, c.id)
		}
		s.deliveries[c]++
		s.lastDelivery[c] = time.Now()
	}
	return r
}

// receiverOf returns "name/endpoint" for a URL; a changed URL is the same receiver.
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

// operation counts operations until the power loss. Messages accepted or delivered after it do
// not count.
func (l *stormProcess) operation() {
	s := l.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.untilCut > 0 {
		if l.untilCut--; l.untilCut == 0 {
			l.cut()
		}
	}
}

// cut simulates a power loss. The storm's lock is held.
func (l *stormProcess) cut() {
	s := l.s
	l.survivors = l.mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: l.rnd.IntN(101), RNG: l.rnd})
	s.cuts++
	for c, at := range s.lastDelivery {
		if time.Since(at) < lastAcks {
			s.repeats[c]++
		}
	}
}

func (s *storm) dead() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process.survivors != nil
}

// start starts a process on the files of the previous one.
func (s *storm) start(mem *vfs.MemFS, cut int) {
	l := &stormProcess{fakeClient: newFakeClient(s.answer), s: s, mem: mem, untilCut: cut, rnd: rand.New(rand.NewPCG(s.rnd.Uint64(), 0))}
	s.mu.Lock()
	s.process = l
	s.mu.Unlock()
	var err error
	l.store, err = pebblestore.Open("data", pebblestore.Options{
		FS: storetest.Watch(mem, l.operation, nil), Logger: slog.New(slog.DiscardHandler), DuplicateWindow: 10 * time.Minute,
		MemTableBytes: 256 << 10, CacheBytes: 1 << 20, Now: time.Now,
	})
	if err != nil {
		s.Fatalf("the store does not open: %v", err)
	}
	s.balance()
	l.engine = New(Options{Store: l.store, Client: l, Logger: slog.New(slog.DiscardHandler), MaxInFlight: 50, DrainTimeout: 10 * time.Second,
		OrphanGrace: stormGrace})
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
		if e := l.engine; e.scheduler.inFlight != 0 || e.scheduler.unproven != 0 || e.scheduler.leased != 0 || e.workers.count != 0 {
			s.Errorf("at the end of a process: %d in flight, %d unproven, %d leased, %d workers", e.scheduler.inFlight, e.scheduler.unproven, e.scheduler.leased, e.workers.count)
		}
		if most := l.most["http://dead-0.test"]; most > 1 {
			s.Errorf("%d concurrent requests to the endpoint that never responds", most)
		}
		if err := l.store.Close(); err != nil {
			s.Errorf("close: %v", err)
		}
	}
	s.apply()
}

// restart ends the process and starts the next one.
func (s *storm) restart() {
	l := s.process
	l.stop()
	s.mu.Lock()
	mem := l.mem
	if l.survivors != nil {
		mem = l.survivors
	}
	s.mu.Unlock()
	cut := 0
	if s.rnd.IntN(2) == 0 {
		cut = 1 + s.rnd.IntN(1<<s.rnd.IntN(12)) // Often during the start.
	}
	s.start(mem, cut)
}

// apply applies the configured destinations.
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
	if err := s.process.engine.Apply(v); err != nil {
		s.Errorf("Apply: %v", err)
	}
	if s.unusable {
		return
	}
	// The messages of a destination that was removed for longer than the grace period are
	// discarded.
	connected := s.destinations[temp]
	for _, source := range []string{"web", "ios"} {
		here, at := connected != nil && slices.Contains(connected.Sources, source), s.disconnectedAt[source]
		switch {
		case !here && at.IsZero():
			s.disconnectedAt[source] = time.Now()
		case here && !at.IsZero():
			if time.Since(at) >= stormGrace-time.Second {
				s.dropExpected(func(c claim) bool { return c.receiver == temp && s.sourceOf(c.id) == source })
			}
			delete(s.disconnectedAt, source)
		}
	}
}

// sourceOf returns the Source of a message by its ID.
func (s *storm) sourceOf(id string) string { return id[:3] }

// dropExpected removes messages from those to deliver.
func (s *storm) dropExpected(which func(claim) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.expected, func(c claim, _ time.Time) bool { return which(c) })
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
	_, err := s.process.store.Append(context.Background(), msgs)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process.survivors != nil {
		s.uncertain += int64(n)
		return
	}
	if err != nil {
		s.Errorf("Append: %v", err)
	}
	s.accepted["ns/"+source] += int64(n)
	for _, m := range msgs {
		for name, d := range s.destinations {
			switch {
			case d == nil || !slices.Contains(d.Sources, source) || slices.Contains(m.Skip, "ns/"+name) || name == dead:
			case name == every:
				s.expected[claim{"every/e0", m.ID}] = time.Now()
				s.expected[claim{"every/e1", m.ID}] = time.Now()
			default:
				s.expected[claim{name, m.ID}] = time.Now()
			}
		}
	}
}

// letters lists the dead letters of a destination.
func (s *storm) letters(name string) (all []queue.DeadLetter) {
	if err := s.process.store.DeadLetters(context.Background(), "ns/"+name, "", func(d queue.DeadLetter) bool {
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
	var selector adminapi.DeadLetterSelector
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
				s.repeats[claim{fmt.Sprintf("%s/e%d", name, i), d.ID}]++
			}
		}
	}
	s.mu.Unlock()
	l, timeout, purge := s.process, time.Duration(s.rnd.IntN(1<<s.rnd.IntN(16)))*time.Millisecond, s.rnd.IntN(5) == 0
	if purge {
		s.dropExpected(func(c claim) bool {
			owner, _ := split(c.receiver)
			return (owner == name || c.receiver == name) && chosen[c.id]
		})
	} else {
		s.uncertain += int64(len(selector.Keys)) // Some may be appended after their lanes were removed.
	}
	gate := admission.New(admission.Options{Store: &admissiontest.Store{OnAppend: l.store.Append}, Logger: slog.New(slog.DiscardHandler)})
	l.redelivering.Go(func() {
		ctx, cancel := context.WithTimeout(l.redeliverCtx, timeout)
		defer cancel()
		if purge {
			_, _ = redelivery.Purge(ctx, l.store, "ns/"+name, selector, redelivery.Options{})
		} else {
			_, _ = redelivery.Run(ctx, gate, l.store, "ns/"+name, selector, redelivery.Options{Rate: 20, Takes: l.engine.Takes})
		}
	})
}

// change changes a destination at random.
func (s *storm) change() {
	name := stormNames[s.rnd.IntN(len(stormNames))]
	d := s.destinations[name]
	if d == nil {
		again := dest(temp, "http://temp-0.test", "http://temp-1.test")
		again.Sources = []string{"ios", "web"}
		again.DeadLetters = s.destinations[one].DeadLetters
		s.destinations[temp] = &again
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
		d.Success = map[string]string{liveconfig.AnyEndpoint: liveconfig.EveryEndpoint,
			liveconfig.EveryEndpoint: liveconfig.AnyEndpoint}[d.Success]
	case name == temp && s.rnd.IntN(2) == 0:
		s.destinations[temp] = nil
	case name == temp:
		d.Sources = [][]string{{"ios", "web"}, {"web"}, {"ios"}}[s.rnd.IntN(3)]
	}
}

// balance checks all ledgers.
func (s *storm) balance() {
	s.Helper()
	for _, name := range stormNames {
		if err := s.process.store.DestinationStats("ns/" + name).Ledger.Balance(); err != nil {
			s.Errorf("%s: %v", name, err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, source := range []string{"ns/web", "ns/ios"} {
		stats := s.process.store.SourceStats(source)
		if err := stats.Ledger.Balance(); err != nil {
			s.Errorf("%s: %v", source, err)
		}
		if stats.Accepted < s.accepted[source] || stats.Accepted > s.accepted[source]+s.uncertain {
			s.Errorf("%s: %d accepted, want %d and up to %d more", source, stats.Accepted, s.accepted[source], s.uncertain)
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

// conclude makes all receivers healthy and checks the final state.
func (s *storm) conclude() {
	s.mu.Lock()
	s.healthy = true
	s.process.untilCut = 0
	s.mu.Unlock()
	if s.dead() {
		s.process.stop()
		s.start(s.process.survivors, 0)
	}
	if s.destinations[temp] == nil {
		s.dropExpected(func(c claim) bool { return c.receiver == temp })
	} else {
		for source := range s.disconnectedAt {
			s.dropExpected(func(c claim) bool { return c.receiver == temp && s.sourceOf(c.id) == source })
		}
	}
	for _, d := range s.destinations {
		if d != nil {
			d.State = liveconfig.Active
		}
	}
	s.apply()
	s.process.stopRedeliver()
	time.Sleep(5 * time.Hour)
	synctest.Wait()
	s.balance()
	for _, source := range []string{"ns/web", "ns/ios"} {
		if n := s.process.store.SourceStats(source).LogBytes; n != 0 {
			s.Errorf("%s: %d bytes of the log are still kept", source, n)
		}
	}
	dead := map[claim]bool{}
	for _, name := range stormNames {
		ledger := s.process.store.DestinationStats("ns/" + name).Ledger
		if ledger.Pending != 0 || ledger.Discarded != 0 && name != temp && name != every {
			s.Errorf("%s: %+v", name, ledger)
		}
		for _, d := range s.letters(name) {
			dead[claim{name, d.ID}] = true
			dead[claim{name + "/" + d.Lane.Endpoint, d.ID}] = true
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.expected {
		n := s.deliveries[c]
		for i := range 3 {
			n += s.deliveries[claim{fmt.Sprintf("%s/e%d", c.receiver, i), c.id}]
		}
		if n == 0 && !dead[c] {
			s.Errorf("%s did not get %s, and it is not a dead letter", c.receiver, c.id)
		}
	}
	for c, n := range s.deliveries {
		if name, _ := split(c.receiver); name != flip && n > 1+s.repeats[c] {
			s.Errorf("%s got %s %d times, want at most %d", c.receiver, c.id, n, 1+s.repeats[c])
		}
	}
	s.Logf("%d messages, %d expected, %d delivered, %d dead letters, %d power losses", s.next, len(s.expected), len(s.deliveries), len(dead)/2, s.cuts)
	s.mu.Unlock()
	s.process.stop()
	s.mu.Lock()
}
